"""Plain encoding of the values that the ranks of an island send each other: JSON, and bytes beside it.

Unlike a pickle it can make nothing but values: numbers, texts, bytes, collections, and the value classes of the
protocol, by name. So whoever can write to a rank, by a key that was overheard for instance, runs no code there.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping, Sequence, Set
from enum import Enum
from types import ModuleType
from typing import Any

from diloco.base import types
from diloco.outer.state import StateChunk
from diloco.protocol import effects, messages, streams

_HEAD = struct.Struct(">Q")
"""Bytes of JSON that follow; the bytes beside it come after them."""


def _classes(module: ModuleType) -> dict[str, type]:
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type)]
    return {
        kind.__name__: kind
        for kind in kinds
        if dataclasses.is_dataclass(kind) or (issubclass(kind, Enum) and len(kind))
    }


CLASSES: Mapping[str, type] = {
    **_classes(types), **_classes(messages), **_classes(streams), **_classes(effects), "StateChunk": StateChunk,
}  # fmt: skip
"""Value classes that ranks of an island may send, by name."""


def packed(value: object) -> bytes:
    """A value for another rank of the island. Raises TypeError for what is none."""
    blobs: list[Any] = []
    tree = _tree(value, blobs)
    text = json.dumps([tree, [len(blob) for blob in blobs]], separators=(",", ":")).encode()
    return b"".join([_HEAD.pack(len(text)), text, *blobs])


def unpacked(data: bytes) -> Any:
    """The value that another rank of the island packed. Raises ValueError for other bytes."""
    try:
        (length,) = _HEAD.unpack_from(data)
        place = _HEAD.size + length
        tree, lengths = json.loads(data[_HEAD.size : place])
        # Else pieces of a few bytes, there and back again, take a thousand times the memory of what came.
        if not all(type(size) is int and size >= 0 for size in lengths) or place + sum(lengths) != len(data):
            raise ValueError("sizes that do not fit")
        blobs = []
        for size in lengths:
            blobs.append(data[place : place + size])
            place += size
        return _value(tree, blobs)
    except (struct.error, ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise ValueError(f"not from a rank of this island: {error!r}") from error


def _tree(value: Any, blobs: list[Any]) -> Any:
    """JSON of a value that ranks send: what JSON lacks is a list that begins with its kind. Appends to `blobs`."""
    name = type(value).__name__
    known = CLASSES.get(name) is type(value)
    match value:
        case Enum() if known:
            return ["enum", name, value.value]
        case Enum():
            pass  # although it is a number, or a text, too
        case None | bool() | int() | float() | str():
            return value
        case bytes() | bytearray() | memoryview():
            blobs.append(value)
            return ["bytes", len(blobs) - 1]
        case range():
            return ["range", value.start, value.stop, value.step]
        case Mapping():
            return ["map", *([_tree(key, blobs), _tree(item, blobs)] for key, item in value.items())]
        case Sequence() | Set():
            kind = "tuple" if isinstance(value, tuple) else "set" if isinstance(value, Set) else "list"
            return [kind, *(_tree(item, blobs) for item in value)]
    if not known or not dataclasses.is_dataclass(value):
        raise TypeError(f"ranks of an island do not send {name}")
    return ["class", name, *(_tree(getattr(value, one.name), blobs) for one in dataclasses.fields(value))]


def _value(tree: Any, blobs: Sequence[bytes]) -> Any:
    """The value that `_tree` made this JSON of. Raises KeyError, TypeError, IndexError or ValueError for any other."""
    if not isinstance(tree, list):
        return tree
    kind, *items = tree
    match kind:
        case "bytes":
            return blobs[items[0]]
        case "range":
            return range(*items)
        case "enum":
            return CLASSES[items[0]](items[1])
        case "map":
            return {_value(key, blobs): _value(item, blobs) for key, item in items}
        case "tuple" | "list" | "set":
            return {"tuple": tuple, "list": list, "set": set}[kind](_value(item, blobs) for item in items)
        case "class":
            found = CLASSES[items[0]]
            names = (one.name for one in dataclasses.fields(found))
            return found(**dict(zip(names, (_value(item, blobs) for item in items[1:]), strict=True)))
    raise ValueError(f"ranks of an island send no {kind!r}")
