"""Codecs: the bytes that a part's values become on the wire, and back."""

from __future__ import annotations

import torch

from diloco.compress.codec import Codec, PayloadError
from diloco.compress.floats import FloatCodec
from diloco.compress.int8 import Int8Codec
from diloco.compress.zstd import ZstdCodec
from diloco.config import CodecSection

__all__ = ["Codec", "PayloadError", "open_codec"]

_FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def open_codec(section: CodecSection) -> Codec:
    """The codec that a contract asks for."""
    if section.name == "int8":
        codec: Codec = Int8Codec(section.block)
        planes = 1
    else:
        codec = FloatCodec(section.name, _FLOATS[section.name])
        planes = _FLOATS[section.name].itemsize
    return ZstdCodec(codec, planes) if section.zstd else codec
