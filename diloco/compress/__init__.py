"""Codecs: the bytes that a part's values become on the wire, and back."""

from __future__ import annotations

from importlib import import_module

import torch

from diloco.compress.blocks import DEFAULT_BLOCKS, BinnedCodec, E3M0Codec, Int4Codec, Int8Codec
from diloco.compress.codec import Codec, FloatCodec, PayloadError
from diloco.compress.topk import TopKCodec
from diloco.compress.zstd import ZstdCodec
from diloco.config.codec import CodecChoice, CodecSection

__all__ = ["Codec", "PayloadError", "open_codec", "open_codecs"]

_RARE = {"dct": "DctCodec", "lowrank": "LowRankCodec", "sign": "SignCodec"}
"""Imported when a contract names one: the default path knows their names only."""
_GRIDS: dict[str, type[Int8Codec | Int4Codec | E3M0Codec]] = {"int8": Int8Codec, "int4": Int4Codec, "e3m0": E3M0Codec}
_BINNED = {("int8", "statistical"): 8, ("int4", "statistical"): 4, ("two_bit", "absmax"): 2}
"""(name, scale) in a contract -> bits of a `BinnedCodec`."""
_FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def open_codecs(section: CodecSection) -> tuple[Codec, ...]:
    """The codecs of a contract, by group of parameters: `codecs[fragment.group_of(part)]` is that of a part."""
    return tuple(map(open_codec, section.by_group))


def open_codec(section: CodecChoice) -> Codec:
    """The codec that `[codec]` of a contract, or one of its groups, asks for."""
    if section.name in _FLOATS:
        floats = FloatCodec(section.name, _FLOATS[section.name])
        return ZstdCodec(floats, floats.dtype.itemsize) if section.zstd else floats
    codec: Codec
    bits = _BINNED.get((section.name, section.scale))
    if section.name in _RARE:
        codec = getattr(import_module(f"diloco.compress.extra.{section.name}"), _RARE[section.name]).opened(section)
    elif section.name == "topk":
        codec = TopKCodec.opened(section)
    elif bits is not None:
        codec = BinnedCodec(section.block or DEFAULT_BLOCKS[bits], bits)
    else:
        kind = _GRIDS[section.name]
        codec = kind(section.block or kind.block, section.rounding == "stochastic")
    return ZstdCodec(codec, planes=1) if section.zstd else codec
