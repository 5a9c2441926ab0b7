"""Plain values to protobuf messages and back, by their fields and annotations.

A message has the name of its dataclass and the names of its fields; where that is not so it is written out below.
Messages that come in are hostile: the readers raise ValueError for whatever is missing, out of range or too long, and
nothing else. `diloco.base.types` has the bounds that an annotation can set, and those of a field without one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import is_dataclass
from enum import IntEnum
from types import NoneType, UnionType
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import DecodeError, Message
from xxhash import xxh3_64_intdigest

from diloco.base.types import MAX_LIST, MAX_TEXT, Commit, HexDigest, MaxLength, MinLength, MinValue
from diloco.protocol import messages as m
from diloco.protocol.streams import StateOffer, StreamHeader, Welcome
from diloco.wire.chunks import Damaged
from diloco.wire.v1 import control_pb2 as control
from diloco.wire.v1 import parts_pb2 as parts
from diloco.wire.v1 import peer_pb2 as peer

WIRE_VERSION: Final = 2
MAX_COMMIT_BYTES: Final = 1 << 20

V = TypeVar("V")
M = TypeVar("M", bound=Message)

# ---------------------------------------------------------------- checks


def check_version(wire_version: int) -> None:
    """Raises ValueError for a protobuf message of another wire version."""
    if wire_version != WIRE_VERSION:
        raise ValueError(f"wire version {wire_version} meets {WIRE_VERSION}: both sides need the same diloco release")


def _present(message: Message, field: str) -> Any:
    if not message.HasField(field):
        raise ValueError(f"{message.DESCRIPTOR.name} without {field}")
    return getattr(message, field)


def _whole(value: int, name: str, low: int) -> int:
    if not low <= value < 2**63:
        raise ValueError(f"{name} is {value}, must be at least {low} and below 2^63")
    return value


def _finite(value: float, name: str, low: float) -> float:
    if not low <= value or not math.isfinite(value):
        raise ValueError(f"{name} is {value}, must be a number of at least {low}")
    return value


def _short(value: V, name: str, most: int) -> V:
    if len(value) > most:  # type: ignore[arg-type]
        unit = "characters" if isinstance(value, str) else "bytes"
        raise ValueError(f"{name} has {len(value)} {unit}, at most {most} may be")  # type: ignore[arg-type]
    return value


def _several(values: Collection[V], name: str, fewest: int, most: int) -> Collection[V]:
    if not fewest <= len(values) <= most:
        raise ValueError(f"{len(values)} {name}, must be {fewest} to {most}")
    return values


def _hex(value: bytes, name: str, size: int) -> str:
    if len(value) != size:
        raise ValueError(f"{name} of {len(value)} bytes, each has {size} bytes")
    return value.hex()


def _known(table: Mapping[int, V], number: int, name: str) -> V:
    if number not in table:
        raise ValueError(f"unknown {name} {number}")
    return table[number]


def _numbers(kind: type[V], wire: EnumDescriptor) -> dict[V, Any]:
    """Protobuf number of each member of an enum. On the wire 0 means a missing field, so members begin with 1."""
    return {member: wire.values_by_name[f"{wire.name.upper()}_{member.name}"].number for member in kind}  # type: ignore[attr-defined]


# ---------------------------------------------------------------- commits


def commit_to_wire(commit: Commit) -> bytes:
    """A commit for a protobuf message: digest (32 bytes) and canonical bytes."""
    return bytes.fromhex(commit.digest) + commit.to_bytes()


def commit_from_wire(data: bytes) -> Commit:
    """The commit in a protobuf message. Raises ValueError where its bytes do not match the digest."""
    sha256, text = _short(data, "commit", MAX_COMMIT_BYTES)[:32], data[32:]
    if hashlib.sha256(text).digest() != sha256:
        raise ValueError("a commit that does not match its digest")
    return Commit.from_bytes(text)


# ---------------------------------------------------------------- two functions per class

# All that the generated functions may call. Each class adds its own two functions when it is compiled.
_CHECKS = (_finite, _hex, _known, _present, _several, _short, _whole, check_version)
_SCOPE: dict[str, Any] = {check.__name__: check for check in _CHECKS}
_SCOPE |= {"math": math, "write_Commit": commit_to_wire, "read_Commit": commit_from_wire}


def _compile(kind: type[V], message: type[M]) -> tuple[Callable[[V], M], Callable[[M], V]]:
    """Make the function that turns a `kind` into a protobuf `message`, and the one that reads and checks a `message`.

    Their source is put together here, once, at import. To ask a class for its fields at every call would take several
    times as long, and in a large view a peer converts hundreds of messages a second.
    """
    name, wire = kind.__name__, message.DESCRIPTOR.fields_by_name
    written, read, checks = [], [], ""
    if "wire_version" in wire:
        written, checks = [f"wire_version={WIRE_VERSION}"], "check_version(message.wire_version)"
    for field, annotation in get_type_hints(kind, include_extras=True).items():
        if field in message.DESCRIPTOR.oneofs_by_name:
            written.append(f"**write_{field}(value.{field})")
            read.append(f"{field}=read_{field}(message)")
        else:
            written.append(f"{field}={_writing(annotation, f'value.{field}')}")
            read.append(f"{field}={_reading(annotation, wire[field])}")
    source = f"""
def write_{name}(value):
    return message_{name}({", ".join(written)})
def read_{name}(message):
    {checks}
    return kind_{name}({", ".join(read)})
"""
    _SCOPE[f"message_{name}"], _SCOPE[f"kind_{name}"] = message, kind
    exec(compile(source, f"<converters of {name}>", "exec"), _SCOPE)
    return _SCOPE[f"write_{name}"], _SCOPE[f"read_{name}"]


def _writing(annotation: Any, value: str) -> str:
    """Expression that turns the value of a field into what its protobuf message holds."""
    kind, bounds = _kind_and_bounds(annotation)
    if _is_optional(kind):
        return f"None if {value} is None else {_writing(get_args(kind)[0], value)}"
    if get_origin(kind) is tuple:
        item = _writing(get_args(kind)[0], "item")
        return value if item == "item" else f"[{item} for item in {value}]"
    if HexDigest in bounds:
        return f"bytes.fromhex({value})"
    if MaxLength in bounds and bounds[MaxLength].cut:
        return f"{value}[:{bounds[MaxLength].length}]"
    if is_dataclass(kind):
        return f"write_{_compiled(kind)}({value})"
    return f"{kind.__name__}_numbers[{value}]" if issubclass(kind, IntEnum) else value


def _reading(annotation: Any, wire: Any) -> str:
    """Expression that reads a field of a protobuf message, of which `wire` is the descriptor, and checks it."""
    kind = _kind_and_bounds(annotation)[0]
    value = f"message.{wire.name}"
    if _is_optional(kind):
        return f"{_checking(get_args(kind)[0], value, wire)} if message.HasField({wire.name!r}) else None"
    return _checking(annotation, f"_present(message, {wire.name!r})" if wire.has_presence else value, wire)


def _checking(annotation: Any, value: str, wire: Any) -> str:
    """Expression that turns what a protobuf message holds into the value of a field, or refuses it."""
    kind, bounds = _kind_and_bounds(annotation)
    name = repr(wire.name)
    if get_origin(kind) is tuple:
        fewest = bounds[MinLength].length if MinLength in bounds else 0
        most = bounds[MaxLength].length if MaxLength in bounds else MAX_LIST
        item = _checking(get_args(kind)[0], "item", wire)
        return f"tuple([{item} for item in _several({value}, {name}, {fewest}, {most})])"
    if HexDigest in bounds:
        return f"_hex({value}, {name}, {bounds[HexDigest].size})"
    if is_dataclass(kind):
        return f"read_{_compiled(kind)}({value})"
    if kind is bool:
        return value
    if issubclass(kind, IntEnum):
        numbers = _numbers(kind, wire.enum_type)
        _SCOPE[f"{kind.__name__}_numbers"] = numbers
        _SCOPE[f"{kind.__name__}_members"] = {number: member for member, number in numbers.items()}
        return f"_known({kind.__name__}_members, {value}, {name})"
    if kind in (str, bytes):
        return f"_short({value}, {name}, {bounds[MaxLength].length if MaxLength in bounds else MAX_TEXT})"
    check, low = {int: ("_whole", "0"), float: ("_finite", "-math.inf")}[kind]
    return f"{check}({value}, {name}, {bounds[MinValue].value if MinValue in bounds else low})"


def _kind_and_bounds(annotation: Any) -> tuple[Any, dict[type, Any]]:
    """Type annotated for a field of a protobuf message, and its bounds by their type."""
    if get_origin(annotation) is not Annotated:
        return annotation, {}
    kind, *bounds = get_args(annotation)
    return kind, {type(bound): bound for bound in bounds}


def _is_optional(kind: Any) -> bool:
    return isinstance(kind, UnionType) and get_args(kind)[1:] == (NoneType,)


def _compiled(kind: Any) -> str:
    """Name of a dataclass within another, once its two functions to and from protobuf are there."""
    name: str = kind.__name__
    if f"read_{name}" not in _SCOPE:
        _compile(kind, getattr(control, name))
    return name


# ---------------------------------------------------------------- envelopes

_BODIES = {kind: (kind.__name__.lower(), *_compile(kind, getattr(control, kind.__name__))) for kind in get_args(m.Body)}
_BODY_READERS = {field: read for field, _, read in _BODIES.values()}


def _write_body(body: m.Body) -> dict[str, Message]:
    """The one field of the protobuf envelope that holds the body."""
    field, write, _ = _BODIES[type(body)]
    return {field: write(body)}


def _read_body(message: control.Envelope) -> m.Body:
    field = message.WhichOneof("body")
    if field is None:
        raise ValueError("envelope without a body that this release knows")
    body: m.Body = _BODY_READERS[field](getattr(message, field))
    return body


_SCOPE |= {"write_body": _write_body, "read_body": _read_body}
envelope_to_wire, envelope_from_wire = _compile(m.Envelope, control.Envelope)


def seal(envelope: m.Envelope) -> control.Sealed:
    """An envelope as a protobuf message with a checksum, as it travels."""
    data = envelope_to_wire(envelope).SerializeToString()
    return control.Sealed(envelope=data, checksum=xxh3_64_intdigest(data))


def unseal(message: control.Sealed) -> m.Envelope:
    """The envelope in a protobuf message. Raises Damaged for a flipped bit, ValueError when it is none."""
    if xxh3_64_intdigest(message.envelope) != message.checksum:
        raise Damaged("an envelope with a wrong checksum")
    try:
        return envelope_from_wire(control.Envelope.FromString(message.envelope))
    except DecodeError as error:
        raise ValueError("not an envelope") from error


# ---------------------------------------------------------------- headers, joining and state, replies

header_to_wire, header_from_wire = _compile(StreamHeader, parts.StreamHeader)
welcome_to_wire, welcome_from_wire = _compile(Welcome, peer.Welcome)
state_offer_to_wire, state_offer_from_wire = _compile(StateOffer, peer.StateOffer)

_REPLY_NUMBERS = _numbers(m.Reply, control.Reply.DESCRIPTOR)
_REPLIES = {number: reply for reply, number in _REPLY_NUMBERS.items()}


def reply_to_wire(reply: m.Reply, detail: str = "") -> control.DeliverReply:
    """A reply code and its detail, cut to `MAX_REASON`, as a protobuf message."""
    return control.DeliverReply(reply=_REPLY_NUMBERS[reply], detail=detail[: m.MAX_REASON])


def reply_from_wire(message: control.DeliverReply) -> tuple[m.Reply, str]:
    """Reply code of a protobuf message, and why its bytes were refused; empty when they were understood."""
    return _known(_REPLIES, message.reply, "reply"), _short(message.detail, "detail", m.MAX_REASON)


def lanes_from_wire(message: peer.LanesReply) -> tuple[str, ...]:
    """Addresses of lanes in a protobuf message. The link checks an address when it dials it."""
    addresses = _several(message.addresses, "lanes", 0, MAX_LIST)
    return tuple(_short(address, "the address of a lane", MAX_TEXT) for address in addresses)
