"""One peer of one system, for `scripts/bench-sync`: gets ready, averages when it is told to, looks at what came out.

    sync_peer.py TASK       a `Task` as JSON

It takes commands as lines on stdin and answers each with a line of JSON on stdout; what libraries print goes to
stderr. It runs in the Python that has its system: only `Diloco` needs this project, and nothing else needs more than
torch and the system itself.

All peers move the same model along the same noise, each by another length: peer r by r + 1. So the mean is
known, and whatever came out must be a multiple of the noise.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, TextIO

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from scripts.bench.sync_task import LAYERS, WIDTH, Task

NOISE = 1e-3
"""Root mean square of the noise: a pseudo-gradient's usual size."""
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
PATIENCE_S = 600.0
"""Timeouts of the other systems: the bench has its own."""


class System:
    """One system's way to average. The first peer makes it; the others make theirs with the address to `meet` it at.

    Then all `enter`.
    """

    log_bytes = 0
    """Written to the disk in the last sync."""
    longest_sync_s = 0.0
    """The longest wait of it until that was there."""

    def __init__(self, task: Task, meet: str) -> None:
        """`meet`: what the first peer told; empty for itself."""
        self.task = task
        self.meet = meet

    def enter(self) -> None:
        """Wait until all peers are there."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of all parameters on the wire, once."""
        return self.task.elements * 4

    def prepare(self) -> None:
        """Fill in what is to be averaged next."""
        raise NotImplementedError

    def sync(self) -> None:
        """Average once. This is the timed part."""
        raise NotImplementedError

    def outcome(self) -> tuple[Sequence[Tensor], float]:
        """The averaged tensors, and the multiple of the noise that they should be."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave nothing behind."""


# ---------------------------------------------------------------- the model


def build_model(task: Task) -> nn.Sequential:
    """Layers of zeros."""
    layers = [nn.Linear(WIDTH, task.rows, bias=False) for _ in range(LAYERS)]
    for layer in layers:
        nn.init.zeros_(layer.weight)
    return nn.Sequential(*layers)


def noise_beside(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tensor and its noise: the same on every peer and in every round, made again to save memory."""
    for layer, tensor in enumerate(tensors):
        generator = torch.Generator().manual_seed(layer)
        yield tensor, torch.randn(tensor.shape, generator=generator).mul_(NOISE)


def move(tensors: Sequence[Tensor], length: float) -> None:
    """Add a multiple of the noise."""
    with torch.no_grad():
        for tensor, noise in noise_beside(tensors):
            tensor.add_(noise, alpha=length)


def error_of(tensors: Sequence[Tensor], length: float) -> float:
    """Relative L2 distance from a multiple of the noise."""
    off = norm = 0.0
    for tensor, noise in noise_beside(tensors):
        noise.mul_(length)
        norm += float(noise.square().sum())
        off += float((tensor.detach() - noise).square().sum())
    return math.sqrt(off / norm)


def digest_of(tensors: Sequence[Tensor]) -> str:
    """SHA-256 of all bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().data)
    return digest.hexdigest()


class Course:
    """Where DiLoCo's outer step (Nesterov) takes weights that began at zero, as a multiple of the noise."""

    def __init__(self) -> None:
        self.place = self._momentum = 0.0

    def step(self, mean_length: float) -> None:
        self._momentum = OUTER_MOMENTUM * self._momentum - mean_length
        self.place -= OUTER_LR * (OUTER_MOMENTUM * self._momentum - mean_length)


# ---------------------------------------------------------------- the systems


class Moving(System):
    """DiLoCo itself: a model that every peer moves, and an outer step."""

    def __init__(self, task: Task, meet: str) -> None:
        super().__init__(task, meet)
        self.model = build_model(task)
        self.course = Course()

    @property
    def parameters(self) -> list[Tensor]:
        return list(self.model.parameters())

    def prepare(self) -> None:
        move(self.parameters, self.task.rank + 1)
        self.course.step(self.task.mean_length)

    def outcome(self) -> tuple[Sequence[Tensor], float]:
        return self.parameters, self.course.place


class Diloco(Moving):
    """This project, through its library: found, join, and a step that is a round."""

    def __init__(self, task: Task, meet: str) -> None:
        super().__init__(task, meet)
        import diloco
        from diloco.config.site import Site

        site = Site.model_validate(
            {
                "peer": {"name": f"p{task.rank}"},
                "network": {"listen": f"{task.host}:0", "streams": task.streams},
                "storage": {"directory": task.scratch, "log": task.log},
            }
        )
        if meet:
            self.run = diloco.join(meet, self.model, site=site)
        else:
            self.run = diloco.found(self._contract(), self.model, site=site)
        self.meet = self.run.address

    def _contract(self) -> Any:
        from diloco.config.contract import Contract

        name, _, zstd = self.task.codec.partition("+")
        return Contract.model_validate(
            {
                "run": {"name": "bench-sync", "total_tokens": 10**15},
                "membership": {"start_peers": self.task.peers},
                "model": {"kind": "external"},
                "inner": {"steps": 1},
                "outer": {"lr": OUTER_LR, "momentum": OUTER_MOMENTUM},
                "codec": {"name": name, "zstd": bool(zstd)},
            }
        )

    def enter(self) -> None:
        if not self.run.wait(PATIENCE_S):
            raise TimeoutError(f"{self.task.peers} peers were not together within {PATIENCE_S:g} s")

    @property
    def payload_bytes(self) -> int:
        """Bytes of this peer's next contribution, which is encoded here once more for its size."""
        from diloco.compress import open_codec
        from diloco.outer.fragments import Layout

        contract = self.run.contract
        shapes = [(name, tuple(parameter.shape)) for name, parameter in self.model.named_parameters()]
        (fragment,) = Layout.agreed(shapes, contract).fragments
        moved = torch.cat([noise.flatten() for _, noise in noise_beside(self.parameters)]).mul_(self.task.rank + 1)
        codec = open_codec(contract.codec)
        bounds = [fragment.part_bounds(part) for part in range(fragment.parts)]
        return sum(len(codec.encode(moved[start:stop])) for start, stop in bounds)

    def sync(self) -> None:
        from diloco.observe.events import RoundSkipped, VersionClosed

        for event in self.run.step(tokens=1):
            if isinstance(event, RoundSkipped):
                raise RuntimeError(f"the round was skipped: {event}")
            if isinstance(event, VersionClosed):
                self.log_bytes, self.longest_sync_s = event.log_bytes or 0, event.longest_sync_s or 0.0

    def close(self) -> None:
        self.run.close()


class Gloo(System):
    """One all-reduce of torch.distributed over one flat tensor: the baseline that every mean is made of."""

    def __init__(self, task: Task, meet: str) -> None:
        super().__init__(task, meet)
        os.environ["GLOO_SOCKET_IFNAME"] = task.interface
        host, _, port = meet.rpartition(":")
        first = not meet
        self.store = TCPStore(host or task.host, int(port or 0), None, first, wait_for_workers=False)
        self.meet = f"{task.host}:{self.store.port}"
        self.values = torch.zeros(task.elements)

    def enter(self) -> None:
        task = self.task
        torch.distributed.init_process_group("gloo", store=self.store, rank=task.rank, world_size=task.peers)

    def prepare(self) -> None:
        self.values.zero_()
        move(self._layers(), self.task.rank + 1)

    def sync(self) -> None:
        torch.distributed.all_reduce(self.values)

    def outcome(self) -> tuple[Sequence[Tensor], float]:
        return self._layers(), self.task.mean_length * self.task.peers

    def _layers(self) -> Sequence[Tensor]:
        return self.values.chunk(LAYERS)

    def close(self) -> None:
        torch.distributed.destroy_process_group()


class Hivemind(System):
    """hivemind's averager. Its group is made beforehand and not timed: it would add seconds of waiting."""

    BYTES: ClassVar = {"fp32": 4, "fp16": 2, "int8": 1}
    """Bytes of one parameter; for 8 bit without the codebooks (1 KiB per 512 KiB)."""

    def __init__(self, task: Task, meet: str) -> None:
        super().__init__(task, meet)
        import hivemind
        import numpy as np
        from hivemind import compression as c

        if task.codec == "int8" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
            raise SystemExit("with numpy 2.4 hivemind's 8 bit averages nothing: give --hivemind-python with numpy<2.4")
        codec = {"fp32": c.NoCompression, "fp16": c.Float16Compression, "int8": c.Uniform8BitQuantization}[task.codec]
        bootstrap = meet.split() or None
        self.dht = hivemind.DHT(initial_peers=bootstrap, host_maddrs=[f"/ip4/{task.host}/tcp/0"], start=True)
        self.meet = " ".join(map(str, self.dht.get_visible_maddrs()))
        self.averager = hivemind.DecentralizedAverager(
            [torch.zeros(task.rows, WIDTH) for _ in range(LAYERS)],
            self.dht,
            start=True,
            prefix="bench",
            target_group_size=task.peers,
            min_group_size=task.peers,
            min_matchmaking_time=3.0,
            compression=codec(),
            declare_state_period=PATIENCE_S,
        )

    @property
    def payload_bytes(self) -> int:
        return self.task.elements * self.BYTES[self.task.codec]

    def prepare(self) -> None:
        from hivemind.averaging.control import AveragingStage

        with self.averager.get_tensors() as tensors:
            for tensor in tensors:
                tensor.zero_()
            move(tensors, self.task.rank + 1)
        self.step = self.averager.step(wait=False, require_trigger=True, timeout=PATIENCE_S)
        while self.step.stage != AveragingStage.AWAITING_TRIGGER:
            if self.step.done():
                raise RuntimeError(f"no group: {self.step.exception()}")
            time.sleep(0.01)

    def sync(self) -> None:
        self.step.allow_allreduce()
        self.step.result(PATIENCE_S)

    def outcome(self) -> tuple[Sequence[Tensor], float]:
        with self.averager.get_tensors() as tensors:
            return [tensor.clone() for tensor in tensors], self.task.mean_length

    def close(self) -> None:
        self.averager.shutdown()
        self.dht.shutdown()


class Torchft(Moving):
    """torchft's DiLoCo over Gloo. The first peer's process starts its lighthouse, too."""

    def __init__(self, task: Task, meet: str) -> None:
        super().__init__(task, meet)
        os.environ["GLOO_SOCKET_IFNAME"] = task.interface
        self.lighthouse: subprocess.Popen[bytes] | None = None
        self.meet = meet or self._start_lighthouse()
        self.inner = torch.optim.SGD(self.model.parameters(), lr=1.0)  # never has a gradient: `prepare` moves the model
        outer = torch.optim.SGD(self.model.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
        self.manager = self._manager()
        from torchft.local_sgd import DiLoCo

        self.diloco = DiLoCo(self.manager, [self.model], self.inner, outer, sync_every=1)
        self.diloco.__enter__()

    def _start_lighthouse(self) -> str:
        with socket.socket() as attempt:
            attempt.bind((self.task.host, 0))
            port = attempt.getsockname()[1]
        program = Path(sys.executable).with_name("torchft_lighthouse")
        arguments = ["--min_replicas", str(self.task.peers), "--bind", f"[::]:{port}"]
        self.lighthouse = subprocess.Popen([program, *arguments])
        return f"http://{self.task.host}:{port}"

    def _manager(self) -> Any:
        from torchft import Manager, ProcessGroupGloo

        task, patience = self.task, timedelta(seconds=PATIENCE_S)
        self.store = TCPStore(task.host, 0, is_master=True, wait_for_workers=False)
        return Manager(
            pg=ProcessGroupGloo(patience),
            timeout=patience,
            quorum_timeout=patience,
            load_state_dict=self.model.load_state_dict,
            state_dict=self.model.state_dict,
            min_replica_size=task.peers,
            use_async_quorum=False,
            init_sync=False,  # all begin with the same weights
            rank=0,
            world_size=1,
            store_addr=task.host,
            store_port=self.store.port,
            lighthouse_addr=self.meet,
            replica_id=f"p{task.rank}",
            hostname=task.host,
        )

    def sync(self) -> None:
        self.inner.step()
        if self.manager.num_participants() != self.task.peers:
            raise RuntimeError(f"only {self.manager.num_participants()} peers took part")

    def close(self) -> None:
        self.manager.shutdown(wait=False)
        if self.lighthouse is not None:
            self.lighthouse.kill()
            self.lighthouse.wait()


SYSTEMS: dict[str, type[System]] = {"diloco": Diloco, "gloo": Gloo, "hivemind": Hivemind, "torchft": Torchft}


# ---------------------------------------------------------------- talking to the bench


def main() -> None:
    answers = take_stdout()
    task = Task(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    meet = sys.stdin.readline().strip() if task.rank else ""
    system = SYSTEMS[task.system](task, meet)
    if not task.rank:
        tell(answers, meet=system.meet)
    system.enter()
    tell(answers, payload_bytes=system.payload_bytes)
    try:
        for line in sys.stdin:
            obey(system, line.split(), answers)
    finally:
        system.close()


def obey(system: System, command: list[str], answers: TextIO) -> None:
    """`prepare`, `sync AT` (time.monotonic(), which all processes of a machine share) or `check`."""
    match command:
        case ["prepare"]:
            system.prepare()
            tell(answers)
        case ["sync", at_s]:
            time.sleep(max(float(at_s) - time.monotonic(), 0.0))
            system.sync()
            ended_s = time.monotonic()
            tell(answers, ended_s=ended_s, log_bytes=system.log_bytes, longest_sync_s=system.longest_sync_s)
        case ["check"]:
            tensors, length = system.outcome()
            tell(answers, error=error_of(tensors, length), digest=digest_of(tensors))


def take_stdout() -> TextIO:
    """The stream for answers. Whoever else prints, does so on stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def tell(answers: TextIO, **values: Any) -> None:
    answers.write(json.dumps(values) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
