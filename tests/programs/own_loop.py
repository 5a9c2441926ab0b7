"""Somebody's training loop with a run around it, to be killed and resumed: AdamW, a schedule, dropout, data by step.

Told in JSON. With RANK and WORLD_SIZE in the environment it is one rank of several.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import diloco
import diloco.config.site
from diloco.observe.events import Event, VersionClosed
from tests.peers import until
from tests.warm_spares import fork_ahead

ROWS = 8
SITE = {
    "network": {"listen": "127.0.0.1:0"},
    "timeouts": {"heartbeat_s": 0.2, "suspect_s": 3.0, "join_s": 60.0},
    "storage": {"keep": 8},  # all that a killed peer saved, so that two of them have some version in common
}


def batch_of(step: int, peer: int, rank: int, ranks: int) -> torch.Tensor:
    """This rank's rows: the data's position follows from `run.steps`."""
    generator = torch.Generator().manual_seed(1000 * peer + step)
    return torch.rand(ROWS, 4, generator=generator).chunk(ranks)[rank]


def main(told: dict[str, Any]) -> None:
    """Train until the run is done, and write down how it ended.

    `stop_at`: inner steps of this life, after which it waits to be killed. Until then it saves each version before it
    goes on: a log leads on from an older checkpoint, but to other bits, as the inner optimizer is in no log.
    """
    torch.set_num_threads(1)
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        dist.init_process_group("gloo", init_method=told["meeting"], rank=rank, world_size=ranks)
    torch.manual_seed(3)
    bare = nn.Sequential(nn.Linear(4, 512), nn.Dropout(told.get("dropout", 0.0)), nn.Tanh(), nn.Linear(512, 1))
    model: nn.Module = bare
    if told["kind"] == "fsdp":
        fully_shard(bare)
    elif told["kind"] == "ddp":
        model = DistributedDataParallel(bare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
    site = diloco.config.site.Site.model_validate({**SITE, "peer": {"name": told["name"]}})
    kept = {"optimizer": optimizer, "state": {"scheduler": scheduler}}
    folder, resume = told.get("directory"), told.get("resume", False)
    if told.get("join"):
        run = diloco.join(told["join"], model, site=site, directory=folder, resume=resume, **kept)
    else:
        run = diloco.found(told["contract"], model, site=site, directory=folder, resume=resume, **kept)
    closed: list[int] = []

    def note(event: Event) -> None:
        if isinstance(event, VersionClosed):
            closed.append(event.version)

    run.subscribe(note)
    out = Path(told["out"])
    if rank == 0:
        out.with_suffix(".address").write_text(run.address)
    began_at = run.steps
    with run:
        while not run.done:
            batch = batch_of(run.steps, told["peer"], rank, ranks)
            loss = (model(batch) - batch.sin().sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            time.sleep(told.get("pause_s", 0.0))
            if run.step(tokens=ROWS, loss=loss.item()) and "stop_at" in told:
                saved = Path(folder, "checkpoints", f"v{closed[-1]:08d}")
                until(saved.is_dir, f"{saved.name} is saved")
            if run.steps - began_at == told.get("stop_at"):
                out.with_suffix(f".{rank}.stopped").touch()
                time.sleep(120.0)  # somebody kills it
        with run.anchor():
            held = torch.cat([_whole(value).flatten() for value in bare.parameters()])
    ended = {"version": run.version, "digest": run.digest, "steps": run.steps, "tokens": run.tokens, "closed": closed}
    out.with_suffix(f".{rank}").write_text(json.dumps({**ended, "anchor": held.double().sum().item()}))
    if ranks > 1:
        dist.destroy_process_group()


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor().detach() if hasattr(value, "full_tensor") else value.detach()


def live(arguments: list[str]) -> None:
    """As a process of its own (`tests.warm.Program`)."""
    fork_ahead(1)
    main(json.loads(arguments[0]))
