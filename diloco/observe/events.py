"""Everything that happens in a run, as values: one frozen class for each kind of event.

`KINDS` maps the name of a kind, as it stands in `events.jsonl`, to its class. A field has the name that it has there,
except where its metadata give another one. Fields with a default may be missing in a file; fields that only some
peers know (a learning rate, blocks of data) are None or empty elsewhere.

A class checks the types of its fields when it is made: an event that is written is well-formed. Floats that are not
finite become None. `from_json` reads files of other releases and of other people: fields that it does not know are
left out, and an event that lacks what its kind needs is none.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, lru_cache
from types import NoneType
from typing import Any, ClassVar, dataclass_transform, get_args, get_origin, get_type_hints

from diloco.base.clock import monotonic_s

SCHEMA = 1
"""Number of this schema. It changes when a kind or a field gets another meaning, not when one is added."""
STEPS = ("inner", "pseudo_gradient", "compress", "exchange", "average", "outer", "merge", "other")
"""Keys of a version's `seconds`: the seven steps of the line in order, and what is left of the round."""
FLIGHT = "flight"
"""Beside these while a version is applied, then an event's `flight_s`: since the contribution was measured that it
counts."""
GOODBYES = frozenset({"left", "leaving", "goodbye", "done"})
"""Reasons of a `Departure` for a peer that left of its own will; any other reason is a death."""
MAX_NUMBER = 1e30
"""A number in a file beyond this was never counted or measured."""
MAX_COUNT = 2**53


KINDS: dict[str, type[Event]] = {}
"""Every kind of event by its name in files."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Event:
    """Something that happened to one peer. `kind` is the name of its class in files. Every subclass is a frozen
    dataclass."""

    kind: ClassVar[str]

    def __init_subclass__(cls, kind: str) -> None:
        cls.kind = kind
        KINDS[kind] = dataclass(frozen=True)(cls)

    def __post_init__(self) -> None:
        """Raises TypeError for a field of another type."""
        for name, (_, hint) in _schema(type(self)).items():
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                object.__setattr__(self, name, None)
                value = None
            if not _fits(hint, value):
                raise TypeError(f"{type(self).__name__}.{name} is {value!r}, not {hint}")


@dataclass(frozen=True)
class Stamped:
    """An event with when and to whom it happened: one line of `events.jsonl`."""

    t_s: float
    """Since the peer's process began to write events (monotonic)."""
    time_s: float
    """Unix time. It orders the files of one machine; no decision reads it."""
    peer: str
    event: Event


# ---------------------------------------------------------------- a peer's life


class Started(Event, kind="start"):
    """A peer's process is set up: its run, its model, its hardware."""

    run: str = ""
    contract_digest: str = ""
    parameters: int | None = None
    resumed_version: int | None = None
    """Version of the checkpoint that it goes on from; 0 for a fresh start."""
    blocks_per_epoch: int | None = None
    """Blocks in the data; None for a stream."""
    total_tokens: int | None = None
    ranks: int = 1
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Size of each mesh dimension above 1."""
    device: str = ""
    flops_per_token: float | None = None
    peak_flops_per_rank: float | None = None
    schema: int = SCHEMA


class Listening(Event, kind="listening"):
    """The peer can be reached at an address."""

    address: str
    ticket: str
    """The string that others join with."""


class StateCopying(Event, kind="copying"):
    """Anchor and outer state are being copied from members."""

    done_bytes: int
    total_bytes: int


class StateCopied(Event, kind="state"):
    """Anchor and outer state of a version are here."""

    version: int
    state_digest: str = ""
    wire_bytes_received: int | None = None


class Remark(Event, kind="reason"):
    """A sentence on what the peer does or waits for."""

    text: str
    routine: bool = False
    """Whether the peer makes this remark in every round."""


class Warned(Event, kind="warning"):
    """A fault that a person should know of, and that does not end the training."""

    text: str
    version: int | None = None


class ProfileWritten(Event, kind="profile"):
    """A trace of some inner steps is on disk."""

    path: str
    ranks: int = 1


class CheckpointWritten(Event, kind="checkpoint"):
    """A checkpoint is on disk."""

    version: int
    total_s: float = field(metadata={"json": "seconds"})
    """From the begin of the checkpoint to its end."""
    held_s: float
    """Seconds for which training was held up."""
    size_bytes: int = field(metadata={"json": "bytes"})


class Ended(Event, kind="end"):
    """The peer's life is over in good order."""

    reason: str = ""
    """`done`: the run has its tokens; `left`: asked to leave."""
    version: int | None = None
    tokens: int | None = None
    state_digest: str = ""
    chain_digest: str = ""
    val_loss: float | None = None
    discarded_tokens: int | None = None
    spread: float | None = None
    wire_bytes_sent: int | None = None
    wall_s: float | None = None


# ---------------------------------------------------------------- training


class TrainingProgress(Event, kind="progress"):
    """A sign of life between two versions."""

    inner_step: int | None = None
    tokens: int | None = None
    """Trained on here in this life, counted or not."""
    loss: float | None = None


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank, in bytes."""

    host_peak_bytes: int
    """Most that the process ever had in RAM."""
    device_peak_bytes: int
    """Most that tensors took of the GPU; 0 without one."""
    device_reserved_bytes: int = 0
    """Memory of the GPU that torch holds now."""


class HardwareUsed(Event, kind="usage"):
    """Use of the hardware by the inner steps since the last such event."""

    inner_s: float
    wall_s: float
    inner_tokens: int
    memory: tuple[RankMemory, ...]
    """By rank."""
    phases: Mapping[str, float]
    """Seconds by phase of the inner steps, on rank 0."""
    version: int | None = None
    flops: float | None = None
    """The model's FLOPs, over all ranks."""
    flops_per_s: float | None = None
    """While it did inner steps."""
    flops_per_s_wall: float | None = None
    mfu: float | None = None
    """Share of the peak of all ranks, while it did inner steps."""
    mfu_wall: float | None = None


class Evaluated(Event, kind="eval"):
    """Held-out loss (nats per token) at a version's anchor."""

    tokens: int
    version: int | None = None
    val_loss: float | None = None


class BaselineStep(Event, kind="step"):
    """One step of a baseline that has no versions (DDP)."""

    tokens: int
    step: int | None = None
    loss: float | None = None
    wall_s: float | None = field(default=None, metadata={"json": "wall"})
    """Since its training began."""
    wire_bytes_sent: int | None = None


# ---------------------------------------------------------------- versions


class VersionClosed(Event, kind="version"):
    """The peer has applied a version that all members agree on."""

    version: int
    tokens: int
    """Committed in the whole run."""
    lineage: str = ""
    fragment: int = 0
    members: tuple[str, ...] = ()
    counted: tuple[str, ...] = ()
    """Peers with a contribution in this version."""
    own: bool = True
    """Whether this peer's contribution is one of them."""
    attempts: int = 0
    """Attempts of the exchange at this version."""
    loss: float | None = None
    """Mean over this peer's inner steps of the round, nats per token."""
    inner_tokens: int = 0
    """In this peer's contribution."""
    blocks: tuple[tuple[int, int], ...] = ()
    """Data of the contribution: first block and the one after the last."""
    tokens_per_s: float | None = None
    wire_bytes_sent: int | None = None
    """By this process so far, counted on its sockets; of all ranks."""
    wire_bytes_received: int | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By step of the line (`STEPS`)."""
    flight_s: float | None = None
    """Since the contribution was measured."""
    state_digest: str = ""
    lr: float | None = None
    """The inner optimizer's."""
    expert_imbalance: tuple[float, ...] = ()
    """By layer of experts."""
    repeats: int | None = None
    """Blocks that were read again because the lease had no others."""
    log_bytes: int | None = None
    """Written to this rank's log and votes since the version before; None: it keeps none."""
    longest_sync_s: float | None = None
    """The longest wait of one of these writes until it was on the disk."""
    outliers: Mapping[str, int] | None = None
    """Parts in which a contribution was an outlier (`outer.aggregation`), by its peer: of those that this rank averaged
    since the version before. None: in none."""


class RoundSkipped(Event, kind="skip"):
    """A round ended without a version."""

    version: int | None = None
    """The one that would have closed."""
    reason: str = ""


@dataclass(frozen=True)
class Departure:
    """A peer that is out of the view; `reason` is one of GOODBYES or how it was lost."""

    peer: str
    reason: str = ""


class ViewChanged(Event, kind="view"):
    """Members came or went."""

    version: int | None = None
    joined: tuple[str, ...] = ()
    left: tuple[Departure, ...] = ()


class LineageReplaced(Event, kind="lineage"):
    """Another lineage of the run goes on; what this peer had committed since they parted is void."""

    lineage: str
    void_tokens: int


class VersionWitnessed(Event, kind="witnessed"):
    """A witness has seen a version close."""

    version: int
    tokens: int
    counted: tuple[str, ...] = ()
    commit_digest: str = ""


class SwapApplied(Event, kind="swap"):
    """Gossip: the peer has averaged with a partner. Its version counts its own swaps."""

    version: int
    tokens: int
    partner: str = ""
    leads: bool = False
    final: bool = False
    """Whether the swap belongs to the final average."""
    spread: float | None = None
    """Distance of the two before, relative; None where the peer averaged alone."""
    inner_tokens: int = 0
    loss: float | None = None
    tokens_per_s: float | None = None
    wire_bytes_sent: int | None = None
    wire_bytes_received: int | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


# ---------------------------------------------------------------- JSON


def to_json(stamped: Stamped) -> dict[str, Any]:
    """The event as plain JSON: a line of `events.jsonl`."""
    stamp = {"t": stamped.t_s, "time": stamped.time_s, "peer": stamped.peer, "kind": stamped.event.kind}
    return {**stamp, **_plain(stamped.event)}


def from_json(line: Mapping[str, Any]) -> Stamped | None:
    """The event of a line of `events.jsonl`; None where the kind is unknown or a field is not of the kind's type."""
    kind = KINDS.get(line["kind"]) if isinstance(line.get("kind"), str) else None
    if kind is None:
        return None
    try:
        read = {
            name: _read(hint, line[key]) for name, (key, hint) in _schema(kind).items() if line.get(key) is not None
        }
        stamp = (_read(float, line["t"]), _read(float, line["time"]), _read(str, line["peer"]))
        return Stamped(*stamp, kind(**read))
    except (KeyError, TypeError, ValueError):
        return None


_SCHEMAS: dict[Any, Mapping[str, tuple[str, Any]]] = {}


def _schema(kind: Any) -> Mapping[str, tuple[str, Any]]:
    """The schema of an event or of a record within one: key in `events.jsonl` and type, by field."""
    if kind not in _SCHEMAS:
        hints = get_type_hints(kind)
        _SCHEMAS[kind] = {one.name: (one.metadata.get("json", one.name), hints[one.name]) for one in fields(kind)}
    return _SCHEMAS[kind]


def _plain(value: Any) -> Any:
    """A field of an event, or a record within one, as plain JSON for `events.jsonl`."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    if is_dataclass(value):
        return {key: _plain(getattr(value, name)) for name, (key, _) in _schema(type(value)).items()}
    return value


@cache
def _taken_apart(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """The annotated type of an event's field without what is in its brackets, and that: one takes 2 µs."""
    return get_origin(hint), get_args(hint)


def _fits(hint: Any, value: Any) -> bool:
    """Whether a value has the annotated type of an event's field; an int may stand for a float."""
    if type(value) is hint:
        return True
    origin, inside = _taken_apart(hint)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        each = (inside[0],) * len(value) if inside[-1] is Ellipsis else inside
        return len(each) == len(value) and all(map(_fits, each, value))
    if origin is not None and inside[-1] is NoneType:
        return value is None or _fits(inside[0], value)
    if origin is not None:
        named = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
        return named and all(_fits(inside[1], entry) for entry in value.values())
    if hint is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    return isinstance(value, hint) and (hint is not int or not isinstance(value, bool))


def _read(hint: Any, value: Any) -> Any:
    """An event's field of the annotated type, from plain JSON. Raises ValueError, TypeError or KeyError."""
    origin, inside = _taken_apart(hint)
    if origin is tuple and isinstance(value, list):
        each = (inside[0],) * len(value) if inside[-1] is Ellipsis else inside
        return _one_of_equals(tuple(_read(one, entry) for one, entry in zip(each, value, strict=True)))
    if origin is not None and inside[-1] is NoneType:
        return None if value is None else _read(inside[0], value)
    if origin is Mapping and isinstance(value, dict):
        return {sys.intern(key): _read(inside[1], entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, dict) and isinstance(hint, type) and is_dataclass(hint):
        known = {name: (key, one) for name, (key, one) in _schema(hint).items() if key in value}
        return hint(**{name: _read(one, value[key]) for name, (key, one) in known.items()})
    largest = {int: MAX_COUNT, float: MAX_NUMBER}.get(hint)
    if not _fits(hint, value) or (largest is not None and not -largest < value < largest):
        raise ValueError(value)
    return sys.intern(value) if hint is str else value


@lru_cache(maxsize=64)
def _one_of_equals(entries: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same tuple for equal ones: the events of a run name the same members again and again, and parsing makes a new
    tuple each time."""
    return entries


# ---------------------------------------------------------------- seconds


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Measure seconds for an event: add those spent inside to `seconds[name]`, also when the body raises."""
    began_s = monotonic_s()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + monotonic_s() - began_s
