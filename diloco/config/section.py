"""The base of contract and site: sections of keys with bounds."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

MAX_COUNT = 2**31 - 1
"""Largest number of anything without a bound of its own. A stranger's contract may hold any: none may overflow."""


PositiveInt = Annotated[int, Field(gt=0, le=MAX_COUNT)]


TOKEN_UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}
_COUNT = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?([kKMGB])")


def _counted(value: Any) -> Any:
    """A key's value `"50M"` as 50,000,000; anything else as it is, for the schema to judge. Raises ValueError."""
    match = _COUNT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value
    unit = match[2] if match[2] in TOKEN_UNITS else match[2].lower()
    count = Decimal(match[1]) * TOKEN_UNITS[unit]
    if count != int(count):
        raise ValueError(f"{value} is no whole number of tokens")
    return int(count)


Tokens = Annotated[int, Field(gt=0, le=2**60), BeforeValidator(_counted)]
"""A number of tokens or parameters above zero, as a number or as text with a unit: `50_000_000` or `"50M"`."""


PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]


NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]


PEER_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""Pattern of a peer's name. It names folders, so it has no separator of paths."""


MAX_S = 1e9
"""Thirty years stand for never: clocks do not wait much longer, and JSON, as which contracts travel, has no inf."""


Seconds = Annotated[float, Field(ge=0, le=MAX_S, allow_inf_nan=False)]


PositiveSeconds = Annotated[float, Field(gt=0, le=MAX_S, allow_inf_nan=False)]


Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


Beta = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
"""A decay rate of Adam, below 1: at 1 a moment takes nothing in, and its bias correction would divide by zero."""


Name = Annotated[str, Field(max_length=1000)]
"""A name or a path."""


Glob = Annotated[str, Field(min_length=1, max_length=100)]


class Section(BaseModel):
    """Base of all sections: frozen, strict, unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def sections_of(schema: type[Section]) -> dict[str, type[Section]]:
    """The sections of a contract or site, by name."""
    kinds = {name: field.annotation for name, field in schema.model_fields.items()}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Section)}


def shown(value: Any) -> str:
    """A value from a contract or site in one short line of an error, control characters escaped."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
