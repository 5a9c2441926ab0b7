"""Codecs: the bytes that a part's values become on the wire, and back."""

from __future__ import annotations

import math

import torch

from diloco.compress.binned import DEFAULT_BLOCKS, BinnedCodec
from diloco.compress.codec import Codec, PayloadError
from diloco.compress.dct import DctCodec
from diloco.compress.e3m0 import E3M0Codec
from diloco.compress.floats import FloatCodec
from diloco.compress.int4 import Int4Codec
from diloco.compress.int8 import Int8Codec
from diloco.compress.lowrank import LowRankCodec
from diloco.compress.sign import SignCodec
from diloco.compress.topk import CHUNK, TopKCodec, kept_of
from diloco.compress.zstd import ZstdCodec
from diloco.config.contract import GATHERED_CODECS, CodecChoice, CodecSection

__all__ = ["Codec", "PayloadError", "open_codec", "open_codecs"]

SMALLEST_BLOCK = 128
"""Kept values that share a scale or a codebook, at least: a codebook of 64 bits costs half a bit for each of them."""
_FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def open_codecs(section: CodecSection) -> tuple[Codec, ...]:
    """The codecs of a contract, by group of parameters: `codecs[fragment.group_of(part)]` is that of a part."""
    return tuple(map(open_codec, section.by_group))


def open_codec(section: CodecChoice) -> Codec:
    """One codec that a contract asks for."""
    if section.name in _FLOATS:
        floats = FloatCodec(section.name, _FLOATS[section.name])
        return ZstdCodec(floats, floats.dtype.itemsize) if section.zstd else floats
    codec = _open_gathered(section) if section.name in GATHERED_CODECS else _open_blocks(section)
    return ZstdCodec(codec, planes=1) if section.zstd else codec


def _open_blocks(section: CodecChoice) -> Codec:
    binned = {"int8": 8, "int4": 4} if section.scale == "statistical" else {}
    bits = {**binned, "two_bit": 2}.get(section.name)
    if bits is not None:
        return BinnedCodec(section.block or DEFAULT_BLOCKS[bits], bits)
    stochastic = section.rounding == "stochastic"
    match section.name:
        case "int8":
            return Int8Codec(section.block or Int8Codec.block, stochastic)
        case "int4":
            return Int4Codec(section.block or Int4Codec.block, stochastic)
        case "e3m0":
            return E3M0Codec(section.block or E3M0Codec.block, stochastic)
        case "sign":
            return SignCodec(section.block or SignCodec.block)
    raise AssertionError(section.name)


def _open_gathered(section: CodecChoice) -> Codec:
    if section.name == "lowrank":
        return LowRankCodec(section.rank, section.columns)
    kept_values = kept_of(CHUNK, section.density)
    block = max(4 * math.ceil(kept_values / 4), SMALLEST_BLOCK)  # a chunk's; 2-bit codes fill their bytes
    kept: dict[str, Codec] = {
        "fp16": FloatCodec("fp16", torch.float16),
        "int8": Int8Codec(block),
        "two_bit": BinnedCodec(block, bits=2),
    }
    kind = DctCodec if section.name == "dct" else TopKCodec
    return kind(section.density, kept[section.values], section.mean)
