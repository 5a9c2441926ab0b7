"""What contract and site are made of: sections of keys with bounds."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]


PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]


NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]


MOST_S = 1e9
"""Thirty years stand for never: clocks do not wait much longer, and JSON, as which contracts travel, has no inf."""


Seconds = Annotated[float, Field(ge=0, le=MOST_S, allow_inf_nan=False)]


PositiveSeconds = Annotated[float, Field(gt=0, le=MOST_S, allow_inf_nan=False)]


Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


Beta = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
"""Of Adam: at 1 a moment takes nothing in, and what corrects its bias would be divided by zero."""


Glob = Annotated[str, Field(min_length=1, max_length=100)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def shown(value: Any) -> str:
    """A value from outside in one short line, control characters escaped."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
