"""Plan of a simulation: its settings and faults, as a text. `draw` draws one from a seed.

The text is what a failure prints and what `tests/transcripts/*.txt` begin with:

    peers 3
    codec int8
    4.2 kill p1: after Accept
    6.0 cut p0+p2 for 3: in
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from diloco.base.errors import UsageError

FUSE_S = 2.0
"""A death, or a goodbye, that waits for its moment does not wait longer."""
OMITS = "omits"
"""A lie: an owner says that it left somebody out of a part, and did not."""
MEDDLES = "meddles"
"""A lie: a member sends means of parts that others own."""
NO_CLOCK = "no clock"
"""Start of a process on a machine whose clock begins anew each time."""
IN_CHECKPOINT, CHECKPOINT_S = "in checkpoint", 5.0
"""A death between two syncs of a checkpoint; where there is none within this time, it comes then."""
IN_RECORD = "in record"
"""A death in the middle of a record of the ledger, of which the disk has half."""
FLIPPED = "flipped"
"""Start of a process whose newest checkpoint has a flipped bit."""
OFFERS = "offers"
"""A muffle: of the promises of a peer for an attempt only the first arrives."""
FILTERED = "filtered"
"""A cut that lets through what answers the calls of the group."""
FORMER = "former"
"""An eviction that comes so late that the next life of its peer is there."""
EXCHANGE_S = 0.4
"""Time from the last inner step of a round to its version, about."""
FUSED = ("kill", "power", "leave")


KINDS: Mapping[str, str] = {
    "kill": "a process is dead at once; how: before or after an effect or a message, or in the middle of a checkpoint",
    "power": "its machine loses power: names and tails of files that were not synced are gone, and nobody is told",
    "blackout": "all processes die; how: power, as above",
    "restart": "a dead one starts again; how: disk, itself (with it, and no help), blank, "
    "old (copy of the disk), flipped (bit), no clock",
    "second": "one more process starts in the folder of one that lives: the folder has one writer",
    "twin": "a living one is taken for dead, and started once more elsewhere, with a copy of its disk or blank",
    "stop": "nothing of it happens for a while",
    "busy": "its machine has much else to do: work beside its event loop takes long; how: seconds",
    "jump": "its clock jumps forward; how: seconds",
    "join": "a new one joins",
    "leave": "it is asked to leave; how: before or after an effect or a message",
    "resume": "an operator begins again from a checkpoint",
    "evict": "an operator declares a dead one dead; how: former (the life before the present one)",
    "cut": "nothing passes between a group and the rest; how: both, in, filtered (in, but answers pass) or out, and "
    "`reset`: senders are told",
    "link": "the same between two",
    "duel": "of two attempts each is heard by one member only, and the first one hears of nothing else meanwhile",
    "muffle": "some messages about an attempt reach some members when these have gone on to a later one; how: offers",
    "half": "an owner dies when its mean has reached one, and not the coordinator; how: whole (one has all of it)",
    "tunnel": "connections to one that lives are refused and those that there are break; how: both, in or out",
    "slow": "its messages take 20 times as long",
    "late": "some of its messages come late; how: seconds at most",
    "corrupt": "bytes of its streams are damaged",
    "flip": "bits of messages to and from it are flipped: a checksum or TLS finds them",
    "replay": "an attacker sends old messages again",
    "drift": "its anchor changes in memory, where nobody hashes it again: its next version has another state",
    "stranger": "one that is no member accepts whatever is proposed",
    "lie": "a member lies; how: one of `LIES`, or omits",
    "full": "its disk is full; how: means (it has room for votes and records)",
    "ranks": "the connections between the lanes of its ranks; how: broken, or late SECONDS at most",
    "disk": "its disk fails; how: late SECONDS (of a sync), broken (a sync raises EIO), lies (a sync does nothing)",
}
"""Kinds of faults."""
ITSELF = "itself"
"""A restart as by `--resume`: it asks the members of its last version once, and goes on without a word of them."""
IN_SECONDS = ("late", "busy", "jump")
"""Those whose how is a number."""
IN_TURN: Mapping[str, tuple[type[int | float], float, float]] = {
    "uplinks": (float, 0.0, 1e6),
    "bandwidth": (float, 0.0, 1e6),
    "speeds": (float, 1e-3, 1e3),
    "ranks": (int, 1, 8),
}
"""Settings that have a value for each peer in turn: its kind, and the least and the most that it may be."""


STATE_MBIT = 0.5
"""Size of a state in fp32, which is that of what a peer uploads for a version, too."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a simulation at a time (s), with a peer or several (`p0+p1`), for a while or for good."""

    at_s: float
    kind: str
    peer: str = ""
    for_s: float = 0.0
    how: str = ""

    @property
    def over_s(self) -> float:
        """Virtual time at which the fault has happened, and is over."""
        if self.kind == "late":
            return self.at_s + self.for_s + float(self.how)
        if self.how == IN_CHECKPOINT:
            return self.at_s + CHECKPOINT_S
        return self.at_s + (FUSE_S if self.kind in FUSED and self.how else self.for_s)

    def __str__(self) -> str:
        duration = f" for {self.for_s:g}" if self.for_s else ""
        how = f": {self.how}" if self.how else ""
        peer = f" {self.peer}" if self.peer else ""
        return f"{self.at_s:g} {self.kind}{peer}{duration}{how}"


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The settings and faults of one simulation. Everything else follows from them and the production code."""

    seed: int = 0
    """Seed of the dice that the network, the training and the host code throw."""
    peers: int = 3
    witnesses: int = 0
    codec: str = "fp32"
    """Or one for each group of parameters, as `topk/fp16`."""
    elements: int = 3000
    """Elements of each of the model's two layers. A part has 1,024 at most."""
    fragments: int = 1
    optimizer: str = "nesterov"
    weighting: str = "uniform"
    policy: str = "sync"
    without_majority: str = "wait"
    delay_s: float = 0.05
    """Longest time that a message takes."""
    loss: float = 0.0
    """Share of the messages that get lost, and as many arrive twice, until the faults are over."""
    proven: bool = False
    """The peers share a machine: its kernel proves the death of one whose process is gone."""
    round_s: float = 0.8
    """Time that inner steps take, about."""
    jitter: float = 0.3
    """Share by which they take longer or shorter."""
    overlap: float = 0.0
    """Share of them that is done while a contribution is on its way."""
    merge: str = "carry"
    feedback: float = -1.0
    """Decay of the codec's residual; below 0: no error feedback."""
    uplinks: str = ""
    """Mbit/s at which p0, p1, ... say that they upload, in turn, as in `100+10+0`; 0, or empty: unknown."""
    speeds: str = ""
    """Speeds of p0, p1, ... in inner steps, in turn, as in `1+0.5+0.1`; empty: all the same."""
    sized_by: str = "contract"
    """Or `speed`: the slower do fewer inner steps (`inner.sized_by`)."""
    most_peers: int = 0
    """Contributors of a version, who take turns; 0: all that are ready."""
    radial: bool = False
    """Lengths and directions of contributions are averaged apart (`outer.averaging`)."""
    aggregation: str = "mean"
    """Or `clip`, `centred`, `trimmed`, `median` (`outer.aggregation`)."""
    fixed_addresses: bool = False
    """A process listens where the one before it did, and hears what was meant for that one."""
    stragglers: str = "wait"
    """Or `cut`: who is late ends its inner steps early (`membership.stragglers`)."""
    bandwidth: str = ""
    """Mbit/s of the uplinks of p0, p1, ... in turn, as in `4+0.5+0`, which all streams of a peer share; 0: no limit. A
    contribution in fp32 has 0.2 Mbit, a state twice that or more."""
    backlog: int = 4
    """Versions that peers keep for those that are behind (`membership.backlog_versions`)."""
    checkpoint_every: int = 2
    """Versions from one checkpoint of a peer to its next."""
    total_tokens: int = 0
    """The run ends when so many are committed; 0: it does not."""
    calm_s: float = 0.0
    """Time that the run has after the last fault, before it is looked at whether all is well."""
    ranks: str = ""
    """Ranks of p0, p1, ... in turn, as in `2+1`, which divide the outer state, each with a lane; empty: one each. A
    peer that lies has one."""
    faults: tuple[Fault, ...] = ()

    def ranks_of(self, name: str) -> int:
        """Ranks of the simulated peer with this name."""
        lies = any(fault.kind == "lie" and fault.peer == name for fault in self.faults)
        return 1 if lies or self.policy == "gossip" else int(_in_turn(self.ranks, int(name[1:]), 1))

    @property
    def quiet_s(self) -> float:
        """Virtual time at which the plan's last fault is over."""
        return max((fault.over_s for fault in self.faults), default=3.0) + self.calm_s + 0.01

    def speed(self, index: int) -> float:
        """Speed of the simulated peer with this number."""
        return _in_turn(self.speeds, index, 1.0)

    def uplink_mbit(self, index: int) -> float:
        """Uplink that the simulated peer with this number reports, in Mbit/s."""
        return _in_turn(self.uplinks, index, 0.0)

    @property
    def longest_exchange_s(self) -> float:
        """Virtual time in which the slowest limited uplink carries a state, or a version's bytes, about."""
        limits = [float(rate) for rate in self.bandwidth.split("+") if rate and float(rate)]
        return STATE_MBIT / min(limits) if limits else 0.0

    @property
    def longest_round_s(self) -> float:
        """Virtual time of the slowest simulated peer's inner steps, if they are as many as those of the others."""
        return self.round_s / min(self.speed(index) for index in range(self.speeds.count("+") + 1))

    def __str__(self) -> str:
        default = FaultPlan()
        settings = [
            f"{field.name} {str(getattr(self, field.name)).lower()}"
            for field in fields(self)
            if field.name != "faults" and getattr(self, field.name) != getattr(default, field.name)
        ]
        return "\n".join([*settings, *map(str, self.faults)])


def _in_turn(values: str, index: int, default: float) -> float:
    given = values.split("+")
    return float(given[index % len(given)] or default)


def parse(text: str) -> FaultPlan:
    """The plan of faults that `str(plan)` wrote; lines that begin with # are comments. Raises UsageError."""
    lines = [line.strip() for line in text.splitlines()]
    wanted = [line for line in lines if line and not line.startswith("#")]
    settings: dict[str, Any] = dict(_setting(line) for line in wanted if not line[0].isdigit())
    return FaultPlan(**settings, faults=tuple(_fault(line) for line in wanted if line[0].isdigit()))


def _setting(line: str) -> tuple[str, int | float | bool | str]:
    name, _, text = line.partition(" ")
    default = getattr(FaultPlan(), name, None)
    if isinstance(default, bool):
        return name, text == "true"
    if isinstance(default, int | float):
        return name, _number(text, line, type(default))
    if isinstance(default, str):
        for value in text.split("+") if name in IN_TURN else ():
            _check_in_turn(name, value, line)
        return name, text
    known = ", ".join(field.name for field in fields(FaultPlan) if field.name != "faults")
    raise UsageError(f"a simulation has no setting {name!r}", f"known: {known}")


_FAULT = re.compile(r"(?P<at>[\d.]+) (?P<kind>\w+)( (?P<peer>[\w+*]+))??( for (?P<for>[\d.]+))?(: (?P<how>.+))?")


def _fault(line: str) -> Fault:
    match = _FAULT.fullmatch(line)
    if match is None or match["kind"] not in KINDS:
        raise UsageError(
            f"cannot read the fault {line!r}", f"for example '4.2 stop p1 for 3'; known: {', '.join(KINDS)}"
        )
    if match["kind"] in IN_SECONDS:
        _number(match["how"] or "", line)
    at_s, duration = _number(match["at"], line), _number(match["for"] or "0", line)
    return Fault(at_s, match["kind"], match["peer"] or "", duration, match["how"] or "")


def _check_in_turn(name: str, value: str, line: str) -> None:
    kind, least, most = IN_TURN[name]
    if value and not least <= _number(value, line, kind) <= most:
        raise UsageError(f"cannot read {line!r}: {value} is not {least:g} to {most:g}", f"for example '{name} 2+1'")


def _number(text: str, line: str, kind: type[int | float] = float) -> int | float:
    try:
        return kind(text)
    except ValueError:
        whole = "whole number" if kind is int else "number"
        cause = f"cannot read {line!r}: {text!r} is no {whole}"
        raise UsageError(cause, "write it as in a plan of `diloco virtual --seed 0`") from None
