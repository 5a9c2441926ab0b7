"""One peer of torchft's DiLoCo, for `scripts/bench-faults`: the contract's model, H and rates, else torchft's defaults.

It writes an event per sync, as a `diloco peer` does, and may kill or stop itself at a place in the sync. It runs in an
environment of its own, which needs torchft and pydantic; of this project it takes the contract and the model.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn import functional as F
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo

from diloco.config.contract import Contract
from diloco.config.load import load_contract
from diloco.models import build_model

VOCABULARY = 256
QUORUM_TIMEOUT = timedelta(hours=1)
"""As the documentation of its Manager advises for DiLoCo: survivors wait for each other as long as a collective."""
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class WatchedManager(Manager):  # type: ignore[misc]  # torchft has no types where it is not installed
    """Tells of each sync, and ends itself in the one that it is armed for."""

    def __init__(self, events: Path, armed: str, steps_per_round: int, reductions: int, **settings: Any) -> None:
        """`armed`: POINT=ACTION@N with N-th sync, or empty. `reductions`: how many all-reduces a sync takes."""
        super().__init__(**settings)
        self._events = events.open("a")
        self._point, _, action = armed.partition("=")
        self._action, _, at = action.partition("@")
        self._at = int(at or 0)
        self._steps_per_round, self._half = steps_per_round, max(reductions // 2, 1)
        self._syncs = self._committed = self._reduced = 0

    def start_quorum(self, *arguments: Any, **settings: Any) -> None:
        """The inner steps are done."""
        self._syncs += 1
        self._reduced = 0
        self._come_by("after-inner-steps")
        super().start_quorum(*arguments, **settings)

    def allreduce(self, *arguments: Any, **settings: Any) -> Any:
        """A tensor of the model, or all in one, is handed to the network."""
        work = super().allreduce(*arguments, **settings)
        self._reduced += 1
        if self._reduced == self._half:
            self._come_by("mid-all-reduce")
        return work

    def should_commit(self, *arguments: Any, **settings: Any) -> bool:
        """Whether the outer step is taken; if not, DiLoCo puts the old weights back and H inner steps are gone."""
        committed: bool = super().should_commit(*arguments, **settings)
        self._committed += committed
        event = {
            "kind": "version" if committed else "failed",
            "time": time.time(),
            "version": self.current_step(),
            "peers": self.num_participants(),
            "lost_steps": self._steps_per_round * (self._syncs - self._committed),
        }
        self._events.write(json.dumps(event) + "\n")
        self._events.flush()
        return committed

    def _come_by(self, point: str) -> None:
        if point == self._point and self._syncs == self._at:
            os.kill(os.getpid(), SIGNALS[self._action])


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    contract = load_contract(options.contract).value
    model = build_model(contract.model, VOCABULARY, seed=0)
    inner = torch.optim.AdamW(model.parameters(), lr=contract.inner.lr)
    outer = torch.optim.SGD(model.parameters(), lr=contract.outer.lr, momentum=contract.outer.momentum, nesterov=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # serves as long as it is referred to
    manager = watched_manager(options, model, inner, contract.inner.steps, store.port)
    with DiLoCo(manager, [model], inner, outer, sync_every=contract.inner.steps, use_bucketization=options.bucket):
        while True:  # bench-faults ends it
            inner_step(model, inner, contract, options.step_s)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contract", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--lighthouse", required=True, metavar="URL")
    parser.add_argument("--events", type=Path, required=True, metavar="FILE")
    parser.add_argument("--step-s", type=float, default=0.0, help="an inner step takes at least this long")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="of a collective (60, torchft's default)")
    parser.add_argument("--bucket", action="store_true", help="all tensors in one all-reduce")
    parser.add_argument("--armed", default="", metavar="POINT=ACTION@N")
    return parser.parse_args()


def watched_manager(
    options: argparse.Namespace,
    model: torch.nn.Module,
    inner: torch.optim.Optimizer,
    steps_per_round: int,
    store_port: int,
) -> WatchedManager:
    timeout = timedelta(seconds=options.timeout_s)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    return WatchedManager(
        options.events,
        options.armed,
        steps_per_round,
        1 if options.bucket else sum(1 for _ in model.parameters()),
        pg=ProcessGroupGloo(timeout),
        timeout=timeout,
        quorum_timeout=QUORUM_TIMEOUT,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store_port,
        lighthouse_addr=options.lighthouse,
        replica_id=options.name,
        hostname="127.0.0.1",
    )


def inner_step(model: torch.nn.Module, inner: torch.optim.Optimizer, contract: Contract, step_s: float) -> None:
    """Random tokens: nothing here depends on what is learned. The sync is in `inner.step`."""
    began_s = time.monotonic()
    tokens = torch.randint(VOCABULARY, (contract.inner.batch_size, contract.data.sequence_length + 1))
    inner.zero_grad()
    torch.autograd.backward(F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()))
    time.sleep(max(began_s + step_s - time.monotonic(), 0.0))
    inner.step()


if __name__ == "__main__":
    main()
