"""The ranks of one island, joined by torch.distributed; this folder is the only place that imports it.

To the world an island is one peer. Rank 0 lives its life and leads: it announces what is to be done together, and the
other ranks do it. Started without torchrun or SLURM an island is one process, and nothing of torch.distributed is
initialised.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous as meet

from diloco.base.decisions import Decision, Fail
from diloco.base.errors import ResourceError, UsageError
from diloco.island.connections import RankListener, RankWire, call_rank_0

SEE = "its output says why"
COLLECTIVE_S = 600.0
"""`timeouts.collective_s`, where there is no site."""
MEETING_TIMEOUT = timedelta(minutes=10)
"""Longest time, at least, from the first rank's start to the last one's."""
ASIDE_TIMEOUT = timedelta(hours=6)
"""Longest that ranks wait for each other on another thread (`Island.aside`): there they wait for a disk."""


@dataclass(eq=False)
class Island:
    """This process's place among the ranks of an island, and the calls by which they exchange texts and numbers."""

    rank: int
    size: int
    device: torch.device
    ranks_per_node: int = 0
    """All ranks, where it is not given."""
    timeout_s: float = COLLECTIVE_S
    """Longest that a rank waits for another."""
    _group: Any = None
    """Process group for numbers and gathered texts; None: torch's default group."""
    _borrowed: bool = False
    """Whether the caller's script began torch.distributed, and will end it."""
    _connections: list[Connection[Any, Any]] = field(init=False, default_factory=list)
    """On rank 0 to all other ranks, on these to rank 0; made when the first text is shared."""

    def __post_init__(self) -> None:
        self.ranks_per_node = self.ranks_per_node or self.size

    @staticmethod
    def here(device: torch.device, timeout_s: float = COLLECTIVE_S) -> Island:
        """The island whose ranks torchrun or SLURM started, or one of one rank. `timeout_s`: longest wait of ranks.

        Raises UsageError when their variables are incomplete.
        """
        given = given_ranks()
        if given is None:
            return Island(0, 1, device)
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            fix = "start with torchrun; under SLURM export them: the first node's name, and a free port"
            raise UsageError(f"this is one rank of several, but {' and '.join(missing)} is not set", fix)
        rank, size, local_rank, per_node = given
        if device.type == "cuda":
            there = torch.cuda.device_count()
            if local_rank >= there:
                cause = f"rank {local_rank} of this node has no GPU: torch sees {there}"
                raise ResourceError(cause, f"start {there} ranks on each node (device.ranks, or --nproc-per-node)")
            device = torch.device("cuda", local_rank)
            torch.cuda.set_device(device)
        return replace(Island.at(rank, size, device, timeout_s=timeout_s), ranks_per_node=per_node)

    @staticmethod
    def at(
        rank: int, size: int, device: torch.device, rendezvous: str = "env://", timeout_s: float = COLLECTIVE_S
    ) -> Island:
        """Join an island as rank `rank` of `size`; meets the others at `rendezvous` (torch's init_method)."""
        if size > 1:
            # Numbers go over gloo also where NCCL moves the tensors: it waits without keeping a GPU busy.
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            timeout = timedelta(seconds=timeout_s)
            store, rank, size = next(meet(rendezvous, rank, size, timeout=max(timeout, MEETING_TIMEOUT)))
            life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            # The launcher's store outlives ranks that are started again; what the dead wrote there misleads these.
            store = dist.PrefixStore(f"life {life}", store)  # type: ignore[attr-defined]
            dist.init_process_group(backend, timeout=timeout, world_size=size, rank=rank, store=store)
        return Island(rank, size, device, timeout_s=timeout_s)

    @staticmethod
    def beside(device: torch.device, timeout_s: float = COLLECTIVE_S) -> Island:
        """The island of the ranks that the caller's torch.distributed joins, over connections of its own; or of one.

        All ranks call it together.
        """
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return Island(0, 1, device)
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        return Island(dist.get_rank(), dist.get_world_size(), device, per_node, timeout_s, group, _borrowed=True)

    def aside(self) -> Island:
        """The island's ranks over connections of their own, for another thread of each. All ranks call it together."""
        group = dist.new_group(backend="gloo", timeout=ASIDE_TIMEOUT) if self.size > 1 else None
        return replace(self, timeout_s=ASIDE_TIMEOUT.total_seconds(), _group=group, _borrowed=True)

    @property
    def host(self) -> str:
        """Address at which the other ranks of the island reach rank 0."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    def listen(self, key: bytes) -> RankListener:
        """On rank 0: let the other ranks of the island call that know the key."""
        return RankListener(self.host, key)

    def call(self, rank_0: tuple[str, int], key: bytes) -> RankWire:
        """On another rank: a wire to rank 0 of the island, which listens there."""
        return RankWire(call_rank_0(rank_0, key, self.rank))

    @property
    def leads(self) -> bool:
        """Whether this process is rank 0 of the island, which decides for all ranks."""
        return self.rank == 0

    def decide(self, decision: Decision) -> None:
        """On rank 0: announce a decision to the other ranks of the island, which then carry it out with it."""
        if self.size > 1:
            self.share(decision.to_json())

    def decision(self) -> Decision:
        """On other ranks of the island: rank 0's next decision. Raises ResourceError when rank 0 is gone or failed."""
        decision = Decision.from_json(self.share())
        if isinstance(decision, Fail):
            raise ResourceError(f"rank 0 of this island failed: {decision.why}", SEE)
        return decision

    def share(self, text: str = "") -> str:
        """Rank 0's text, on every rank of the island. Raises ResourceError when another rank is gone.

        It travels over plain sockets: a broadcast of gloo takes several times as long, and ranks meet often.
        """
        if self.size == 1:
            return text
        try:
            self._connections = self._connections or self._connect()
            if self.leads:
                data = text.encode()
                for connection in self._connections:
                    connection.send_bytes(data)
            elif self._connections[0].poll(self.timeout_s):
                text = self._connections[0].recv_bytes().decode()
            else:
                raise ResourceError(f"rank 0 of this island has not answered for {self.timeout_s:g} s", SEE)
        except (EOFError, OSError, AuthenticationError) as error:
            raise ResourceError(f"{'a rank' if self.leads else 'rank 0'} of this island is gone", SEE) from error
        return text

    def _connect(self) -> list[Connection[Any, Any]]:
        """Connect rank 0 of the island with every other rank. All ranks call it together."""
        given, here = os.environ.get("MASTER_ADDR"), socket.gethostname()
        if self.leads:
            key = secrets.token_bytes(32)
            listener = RankListener(given or "0.0.0.0", key)
            self.gather(f"{listener.port} {key.hex()} {here}")
            return list(listener.accept_ranks(self.size - 1, self.timeout_s).values())
        port, key_hex, there = self.gather("")[0].split()
        # A caller's script may have met by another way than MASTER_ADDR: then rank 0's node is known by its name.
        host = given or ("127.0.0.1" if there == here else there)
        return [call_rank_0((host, int(port)), bytes.fromhex(key_hex), self.rank)]

    def share_tensor(self, tensor: Tensor) -> Tensor:
        """Copy rank 0's host tensor into that of every rank of the island, of the same shape and dtype."""
        try:
            if self.size > 1:
                dist.broadcast(tensor, 0, group=self._group)
        except RuntimeError as error:
            if self.leads:
                raise
            raise ResourceError("rank 0 of this island is gone", SEE) from error
        return tensor

    def all(self, fine: bool) -> bool:
        """Whether something is fine on every rank of the island."""
        return self.total(torch.tensor([not fine], dtype=torch.float64, device="cpu")).item() == 0

    def total(self, sums: Tensor) -> Tensor:
        """Sum of a host tensor over the ranks of the island, in place."""
        if self.size > 1:
            dist.all_reduce(sums, group=self._group)
        return sums

    def gather(self, text: str) -> list[str]:
        """Every rank's text, on every rank of the island. Raises ResourceError when one is gone."""
        if self.size == 1:
            return [text]
        data = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)
        try:
            count = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
            lengths = [int(length) for length in self._gather(count)]
            padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
            padded[: len(data)] = data
            found = self._gather(padded)
        except RuntimeError as error:
            raise ResourceError("a rank of this island is gone", SEE) from error
        return [bytes(one[: length - 1].numpy()).decode() for one, length in zip(found, lengths, strict=True)]

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """Host tensors of all ranks of the island, of one shape."""
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(found, tensor, group=self._group)
        return found

    def mean(self, value: float) -> float:
        """Mean of a number over the ranks of the island."""
        if self.size == 1:
            return value
        return self.total(torch.tensor([value], dtype=torch.float32, device="cpu")).item() / self.size

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raise ResourceError in place of torch.distributed's errors where another rank is gone or hangs."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            cause = f"another rank of this island is gone, or has not answered for {self.timeout_s:g} s"
            said = str(error).partition("\n")[0][:300]
            raise ResourceError(f"{cause} ({said})", SEE) from error

    def close(self) -> None:
        """Leave the island's process group, all ranks together: an early one takes the others' connections with it."""
        if self.size > 1 and dist.is_initialized() and not self._borrowed:
            dist.barrier()
            dist.destroy_process_group()
        self.hang_up()

    def hang_up(self) -> None:
        """Close the connections over which texts of rank 0 travel."""
        for connection in self._connections:
            connection.close()
        self._connections = []


def given_ranks() -> tuple[int, int, int, int] | None:
    """(rank, ranks, rank on this node, ranks on this node) that torchrun or srun gave this process; None: neither did.

    Ranks on this node are 0 where they are not known. Raises UsageError when torchrun's variables are incomplete.
    """
    variables = os.environ
    if "WORLD_SIZE" in variables:
        missing = [name for name in ("RANK", "LOCAL_RANK") if name not in variables]
        if missing:
            cause = f"WORLD_SIZE is set, but not {', '.join(missing)}"
            raise UsageError(cause, "start with torchrun, or unset WORLD_SIZE")
        per_node = int(variables.get("LOCAL_WORLD_SIZE", 0))
        return int(variables["RANK"]), int(variables["WORLD_SIZE"]), int(variables["LOCAL_RANK"]), per_node
    if int(variables.get("SLURM_STEP_NUM_TASKS", 1)) > 1:  # of srun; SLURM_NTASKS is also set where nothing was started
        tasks = re.match(r"\d+", variables.get("SLURM_STEP_TASKS_PER_NODE", ""))
        ranks, per_node = int(variables["SLURM_STEP_NUM_TASKS"]), int(tasks.group()) if tasks else 0
        return int(variables["SLURM_PROCID"]), ranks, int(variables["SLURM_LOCALID"]), per_node
    return None
