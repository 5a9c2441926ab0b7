"""The codec sections of a contract."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from diloco.config.section import Glob, PositiveInt, Section

SPARSE_CODECS = ("topk", "dct")
READ_BY = {
    "density": SPARSE_CODECS, "values": SPARSE_CODECS, "mean": SPARSE_CODECS,
    "rank": ("lowrank",), "columns": ("lowrank",),
}  # fmt: skip
"""Codecs that read a key; any other takes its default only."""
CODE_BITS = {"int8": 8, "int4": 4, "e3m0": 4, "two_bit": 2, "sign": 1}
"""Bits per value of the codecs with blocks."""


class CodecChoice(Section):
    """One codec and its keys."""

    name: Literal["fp32", "fp16", "bf16", "int8", "int4", "e3m0", "two_bit", "sign", "topk", "dct", "lowrank"] = "int8"
    """Bits a value, in this order, before zstd: 32, 16, 16, 8.125, 4.25, 4.25, 2.25, 1.0625; then as their keys say."""
    block: PositiveInt | None = None
    """Elements that share one scale, or one codebook; a divisor of 1024. Chosen by the codec when not given: `int8`,
    `sign`, `two_bit` 256; `int4`, `e3m0` 64; `statistical` `int4` 1024, and for `int8` the whole part."""
    scale: Literal["absmax", "statistical"] = "absmax"
    """For `int8` and `int4`. `absmax`: a grid up to the largest value of a block; `statistical`: bins over 6 (`int8`)
    or 2.5 (`int4`) standard deviations, each decoded as the mean of what was in it (INTELLECT-1), as in `two_bit`."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """For `int8`, `int4` and `e3m0`. `stochastic`: up or down by chance, so that the expected value is the value; at
    least twice the squared error."""
    density: Annotated[float, Field(gt=0, le=1)] = 0.03125
    """Share of the values that are sent (`topk`, `dct`): the largest of every 4096."""
    values: Literal["fp16", "int8", "two_bit"] = "two_bit"
    """Codec of the values that are sent."""
    mean: Literal["senders", "all"] = "senders"
    """Weights that a value's mean is divided by (`topk`, `dct`): those of the peers who sent it, or of all who
    contribute."""
    rank: PositiveInt = 8
    """For `lowrank`: a part is sent as the product of two matrices with so many columns and rows."""
    columns: PositiveInt = 1024
    """For `lowrank`: a part is seen as a matrix with so many columns, or as a square one if that has fewer."""
    zstd: bool = True
    """Compress the encoded bytes once more, losslessly, where that saves 2 %."""

    @model_validator(mode="after")
    def _quantised(self) -> Self:
        bits = CODE_BITS.get(self.name)
        if bits and self.block and (1024 % self.block or self.block * bits % 8):
            raise ValueError(f"codec.block ({self.block}) must divide 1024, and {bits} bits for each must fill bytes")
        if self.scale == "statistical" and self.name not in ("int8", "int4"):
            raise ValueError(f"codec.scale 'statistical' is for int8 and int4, not for {self.name}")
        if self.rounding == "stochastic" and (self.name not in ("int8", "int4", "e3m0") or self.scale != "absmax"):
            raise ValueError("codec.rounding 'stochastic' is for int8, int4 and e3m0 with codec.scale 'absmax'")
        return self

    @model_validator(mode="after")
    def _read(self) -> Self:
        for key, readers in READ_BY.items():
            if self.name not in readers and getattr(self, key) != CodecChoice.model_fields[key].default:
                raise ValueError(f"codec.{key} is for {' and '.join(readers)}, not for {self.name}")
        return self


class CodecGroup(CodecChoice):
    """Parameters with a codec of their own. A key that is not given has its default, not the value in `[codec]`."""

    match: Annotated[tuple[Glob, ...], Field(min_length=1, max_length=16)]
    """Names of parameters, with `*`, `?` and `[...]` as in a shell: `["*norm*", "*.bias"]`. A parameter is in the first
    group that it fits. Globs and not regular expressions, which in a stranger's contract may take for ever."""


class CodecSection(CodecChoice):
    """The codec of contributions and means."""

    error_feedback: Annotated[float, Field(ge=0, le=1)] | None = None
    """Error feedback: the codec's error is added to the next pseudo-gradient, times this decay; not given: it is
    lost. It is remembered for 1 / (1 - decay) rounds, which must be few of the run's: SparseLoCo takes 0.95 for 160
    rounds, without outer momentum; for 30, and beside momentum, 0.25 to 0.5 is better (`scripts/bench-quality`)."""
    residual_after_rejoin: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of it that a peer keeps when it had to copy the state, for it was measured on another anchor, or when a
    version counts what it sent in an earlier life, and the residual with that."""
    groups: Annotated[tuple[CodecGroup, ...], Field(max_length=64)] = ()
    """Each a `[[codec.groups]]` with `match` and the keys of a codec; `[codec]` is for what no group matches. No part
    has parameters of two groups."""

    @property
    def by_group(self) -> tuple[CodecChoice, ...]:
        """The contract's codec keys of the parameters in no group, then those of each group
        (`diloco.outer.fragments.Fragment.groups`)."""
        return (self, *self.groups)
