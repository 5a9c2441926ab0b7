"""Damage to valid inputs: to plain bytes, JSON, TOML and protobuf messages.

Bytes in which a checksum or a structure comes first are damaged behind it, and get it anew where they are read: else
nothing but the check would ever be tried.
"""

from __future__ import annotations

import copy
import json
import math
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from diloco.base.sealed import canonical

Spoil = Callable[[bytes, Random], bytes]
"""Makes another input of a valid one."""

MAX_BYTES = 2**16
TOML_VALUES = (
    "", "1", "-1", "nan", "inf", "1e400", '"x"', '"' + "x" * 3000 + '"', "[]", "[[[1]]]", "{a = 1}", "true", "9" * 30,
    "1979-05-27T07:32:00Z", '"\\u202e\\u001b[2J"', '["a", "b"]', "0x" + "f" * 5000, "[" * 500,
)  # fmt: skip
NUMBERS = (0.0, math.nan, math.inf, -math.inf, -1.0, 3.4e38, 1e-45, 2.0**121, 1.7e308)
WHOLES = (0, 1, -1, 2, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 10**30, 10**400)
TEXTS = (
    "",
    "x" * 300,
    "\0",
    "\x1b[2J\x1b]0;a\x07",
    "\u202ea",
    "<script>",
    "../../a",
    "/etc",
    "\ud800",
    "é" * 70,
    "0" * 64,
)
SPECIAL = [
    b"\x80\x7f", b"\xff\xff", b"\0\0", b"\xff" * 4, b"\xff" * 8, b"\n", b"{", b"[" * 50, b'"',
    *(struct.pack("<f", min(max(number, -3.4e38), 3.4e38)) for number in NUMBERS),
]  # fmt: skip


def spoiled_bytes(data: bytes, random: Random) -> bytes:
    """Damage bytes by one to four accidents."""
    raw = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(raw)) if raw else 0
        match random.randrange(8):
            case 0 if raw:
                raw[at] ^= 1 << random.randrange(8)
            case 1:
                special = random.choice(SPECIAL)
                start = at - at % len(special)
                raw[start : start + len(special)] = special
            case 2:
                raw[at : at + random.randint(1, 16)] = random.randbytes(random.randint(0, 16))
            case 3 if random.random() < 0.3:
                del raw[at:]
            case 4 if random.random() < 0.3:
                raw += random.randbytes(random.randint(1, 2**10))
            case 5:
                raw[at:at] = raw[at : at + random.randint(1, 64)] * random.choice((1, 1, 1, 100))
            case 6:
                del raw[at : at + random.randint(1, 64)]
            case _:
                raw[at : at + 8] = random.randbytes(len(raw[at : at + 8]))
    return bytes(raw[:MAX_BYTES])


def odd(random: Random) -> Any:
    """A JSON value that readers may not expect."""
    deep: Any = []
    for _ in range(random.choice((3, 300))):
        deep = [deep]
    plain: tuple[Any, ...] = (None, True, [], {}, [{}], {"": None}, [0] * 500, deep)
    return random.choice((*plain, *NUMBERS, *WHOLES, *TEXTS))


def spoiled_tree(tree: Any, random: Random) -> Any:
    """Damage a JSON value: replace, drop, double or swap one to three values anywhere in it."""
    root = [copy.deepcopy(tree)]
    for _ in range(random.randint(1, 3)):
        places = _places(root)
        owner, key = random.choice(places)
        match random.randrange(6):
            case 0 if owner is not root:
                del owner[key]
            case 1 if isinstance(owner, list) and owner is not root:
                owner[key:key] = [copy.deepcopy(owner[key])] * random.choice((1, 1, 50))
            case 2:
                other, name = random.choice(places)
                owner[key] = copy.deepcopy(other[name])
            case 3 if isinstance(owner, dict):
                owner[random.choice(TEXTS)] = owner.pop(key)
            case 4 if type(owner[key]) is int:
                owner[key] += random.choice((1, -1))
            case _:
                owner[key] = odd(random)
    return root[0]


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every place of a value within lists and objects: what holds it, and its key there."""
    found, todo = list[tuple[Any, Any]](), [tree]
    while todo:
        owner = todo.pop()
        keys: Any = range(len(owner)) if isinstance(owner, list) else owner
        for key in keys:
            found.append((owner, key))
            if isinstance(owner[key], list | dict):
                todo.append(owner[key])
    return found


def spoiled_json(data: bytes, random: Random) -> bytes:
    """Damage JSON behind its syntax, now and then the syntax, too."""
    if random.random() < 0.1:
        return spoiled_bytes(data, random)
    try:
        return canonical(spoiled_tree(json.loads(data), random))[:MAX_BYTES]
    except (ValueError, RecursionError):
        return spoiled_bytes(data, random)


def spoiled_lines(data: bytes, random: Random) -> bytes:
    """Damage lines of JSON: one of them, or their order."""
    lines = data.split(b"\n")
    at, other = random.randrange(len(lines)), random.randrange(len(lines))
    match random.randrange(8):
        case 0:
            del lines[at]
        case 1:
            lines.insert(other, lines[at])
        case 2:
            lines[at], lines[other] = lines[other], lines[at]
        case _:
            lines[at] = spoiled_json(lines[at], random)
    return b"\n".join(lines)[:MAX_BYTES]


def spoiled_toml(data: bytes, random: Random) -> bytes:
    """Damage the values, keys or sections of TOML, now and then its syntax."""
    lines = data.decode(errors="replace").split("\n")
    at = random.randrange(len(lines))
    key, equals, _ = lines[at].partition("=")
    match random.randrange(6):
        case 0:
            return spoiled_bytes(data, random)
        case 1:
            lines.insert(random.randrange(len(lines)), lines[at])
        case 2:
            lines[at] = random.choice(
                ("[", "[run]", "[[codec.groups]]", "[model.x]", "a.b.c = 1", '"\\u001b" = 1', "[x]")
            )
        case _ if equals:
            lines[at] = f"{key}={random.choice(TOML_VALUES)}"
    return "\n".join(lines).encode(errors="replace")[:MAX_BYTES]


def spoiled_message(kind: type[Message]) -> Spoil:
    """Damage of protobuf messages of a kind: of any field, at any depth, to what its type can hold."""

    def spoil(data: bytes, random: Random) -> bytes:
        message = kind()
        try:
            message.ParseFromString(data)
        except DecodeError:
            return spoiled_bytes(data, random)
        if random.random() < 0.1:
            return spoiled_bytes(data, random)
        for _ in range(random.randint(1, 3)):
            _spoil_message(message, random)
        return message.SerializeToString()[:MAX_BYTES]

    return spoil


def _spoil_message(message: Message, random: Random) -> None:
    """Change one field of a message, or of one within it."""
    fields: Sequence[Any] = message.DESCRIPTOR.fields
    if not fields:
        return
    field = random.choice(fields)
    if random.random() < 0.2:
        message.ClearField(field.name)
    elif field.is_repeated:
        entries = getattr(message, field.name)
        if entries and random.random() < 0.3:
            del entries[random.randrange(len(entries))]
        elif field.message_type is not None:
            one = random.choice(entries) if entries and random.random() < 0.7 else entries.add()
            _spoil_message(one, random)
        else:
            entries.extend([_scalar(field, b"", random)] * random.choice((1, 1, 1, 5000)))
    elif field.message_type is not None:
        getattr(message, field.name).SetInParent()
        _spoil_message(getattr(message, field.name), random)
    else:
        setattr(message, field.name, _scalar(field, getattr(message, field.name), random))


def _scalar(field: FieldDescriptor, now: Any, random: Random) -> Any:
    """An odd value of a field's type."""
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return random.choice(NUMBERS)
        case FieldDescriptor.CPPTYPE_BOOL:
            return random.random() < 0.5
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_STRING:
            return random.choice([text for text in TEXTS if text != "\ud800"])
        case FieldDescriptor.CPPTYPE_STRING:
            return spoiled_bytes(now, random) if now else random.choice((b"", b"\0" * 32, b"\xff" * 300))
        case FieldDescriptor.CPPTYPE_ENUM:
            return random.choice((0, 1, 2, 3, 100, -1))
    bits = 32 if field.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32) else 64
    signed = field.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
    return random.choice([number for number in WHOLES if low <= number < high])


FRAME = struct.Struct("<I")


def framed(pieces: list[bytes]) -> bytes:
    """Several inputs as one: each behind its length."""
    return b"".join(FRAME.pack(len(piece)) + piece for piece in pieces)


def unframed(data: bytes) -> list[bytes]:
    """The inputs in one, as far as their lengths go."""
    pieces = []
    while len(data) >= FRAME.size:
        (length,) = FRAME.unpack_from(data)
        pieces.append(data[FRAME.size : FRAME.size + length])
        data = data[FRAME.size + length :]
    return pieces


def spoiled_frames(spoil: Spoil) -> Spoil:
    """Damage to one of several inputs, or to their order."""

    def spoil_one(data: bytes, random: Random) -> bytes:
        pieces = unframed(data)
        if not pieces:
            return spoiled_bytes(data, random)
        at = random.randrange(len(pieces))
        match random.randrange(6):
            case 0:
                del pieces[at]
            case 1:
                pieces.insert(random.randrange(len(pieces)), pieces[at])
            case _:
                pieces[at] = spoil(pieces[at], random)
        return framed(pieces)[:MAX_BYTES]

    return spoil_one
