"""Values of every kind that peers send each other or write, made from the annotations of its fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import count
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from diloco.base.types import HexDigest

V = TypeVar("V")


def example(kind: type[V]) -> V:
    """A value of a dataclass with every field set: optional ones, too, and two entries in each tuple."""
    made: V = _Maker().value(kind)
    return made


class _Maker:
    """Maker of one value: numbers in it grow, so that what comes later is larger, as bounds often have it."""

    def __init__(self) -> None:
        self._numbers = count(1)

    def value(self, hint: Any) -> Any:
        """A value of an annotated type."""
        if get_origin(hint) is Annotated:
            kind, *bounds = get_args(hint)
            sizes = [bound.size for bound in bounds if isinstance(bound, HexDigest)]
            return "a5" * sizes[0] if sizes else self.value(kind)
        origin, inside = get_origin(hint), get_args(hint)
        if isinstance(hint, UnionType) or origin is Union:
            return self.value(next(one for one in inside if one is not NoneType))
        if origin is tuple:
            return tuple(self.value(one) for one in (inside[:1] * 2 if inside[-1] is Ellipsis else inside))
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return {name: self.value(inside[1]) for name in ("a", "b")}
        if origin is not None and len(inside) == 1:
            return [self.value(inside[0])]
        if is_dataclass(hint):
            hints = get_type_hints(hint, include_extras=True)
            return hint(**{one.name: self.value(hints[one.name]) for one in fields(hint) if one.init})  # type: ignore[operator]
        if isinstance(hint, type) and issubclass(hint, Enum):
            return next(iter(hint))
        return self._plain(hint)

    def _plain(self, kind: Any) -> Any:
        """A value of a type without parts."""
        values = {bool: True, str: "a", bytes: b"{}", float: 0.5, object: "a", Any: 1}
        return next(self._numbers) if kind is int else values[kind]
