"""DiLoCo around a plain PyTorch loop: two terminals, one model.

    python examples/own_loop.py                      # founds a run, prints its address
    python examples/own_loop.py ADDRESS              # joins it

The model and the data are whatever you have; here a small network learns a sine.
"""

import sys

import torch
from torch.nn import functional as F

import diloco

CONTRACT = {
    "run": {"name": "own-loop", "total_tokens": 64_000},
    "membership": {"start_peers": 2},
    "model": {"kind": "external"},
    "inner": {"steps": 25},
    "outer": {"lr": 0.7, "momentum": 0.9},
    "codec": {"name": "int8"},
}


def main(address: str | None) -> float:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    run = diloco.join(address, model) if address else diloco.found(CONTRACT, model)
    if not address:
        print(f"join with:  python examples/own_loop.py {run.address}", flush=True)
    with run:
        torch.manual_seed(run.peers.index(run.name))  # each peer its own data
        while not run.done:
            inputs = torch.rand(64, 1) * 6 - 3
            loss = F.mse_loss(model(inputs), torch.sin(inputs))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(tokens=len(inputs))  # every 25th call is a round: the sync happens here
    print(f"version {run.version}, loss {loss.item():.5f}, state {run.digest[:16]}")
    return loss.item()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
