"""Codecs: round trips, error bounds, fixed bytes, and bytes that are none of ours."""

from __future__ import annotations

import struct
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diloco.compress import Codec, PayloadError, open_codec
from diloco.compress.int8 import TILE_ELEMENTS, Int8Codec
from diloco.config import CodecSection

NAMES = ("fp32", "fp16", "bf16", "int8")
CODECS = [open_codec(CodecSection(name=name, block=64, zstd=zstd)) for name in NAMES for zstd in (False, True)]
LOSSLESS = [codec for codec in CODECS if codec.name.startswith("fp32")]
ZSTD = [codec for codec in CODECS if codec.name.endswith("+zstd")]
FP32_MAX = torch.finfo(torch.float32).max

each_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
values_fp32 = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=300)


def gaussian(elements: int, seed: int = 0) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed)) * 1e-3


def there_and_back(codec: Codec, values: Tensor) -> Tensor:
    payload = codec.encode(values)
    assert len(payload) <= codec.max_bytes(values.numel())
    decoded = codec.decode(payload, values.numel())
    assert (decoded.dtype, decoded.shape) == (torch.float32, values.shape)
    return decoded


def bits(values: Tensor) -> list[int]:
    return values.view(torch.int32).tolist()


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("codec", LOSSLESS, ids=lambda codec: codec.name)
@given(values=values_fp32)
def test_fp32_changes_no_bit(codec: Codec, values: list[float]) -> None:
    tensor = torch.tensor([*values, -0.0, 1e-45, FP32_MAX])
    assert bits(there_and_back(codec, tensor)) == bits(tensor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("zstd", [False, True])
def test_half_precision_keeps_every_value_that_it_has(dtype: torch.dtype, zstd: bool) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    values = patterns[patterns.isfinite()].float()
    codec = open_codec(CodecSection(name="fp16" if dtype is torch.float16 else "bf16", zstd=zstd))
    assert bits(there_and_back(codec, values)) == bits(values)


@pytest.mark.parametrize(("name", "largest"), [("fp16", 65504.0), ("bf16", torch.finfo(torch.bfloat16).max)])
@given(values=values_fp32)
def test_half_precision_rounds_to_nearest_and_saturates(name: str, largest: float, values: list[float]) -> None:
    tensor = torch.tensor(values)
    expected = tensor.clamp(-largest, largest).to(torch.float16 if name == "fp16" else torch.bfloat16).float()
    codec = open_codec(CodecSection(name=name, zstd=False))
    assert bits(there_and_back(codec, tensor)) == bits(expected)


@pytest.mark.parametrize("zstd", [False, True])
@given(values=values_fp32, block=st.sampled_from([4, 64, 256]))
def test_int8_errs_by_half_a_scale_at_most(zstd: bool, values: list[float], block: int) -> None:
    tensor = torch.tensor(values)
    decoded = there_and_back(open_codec(CodecSection(name="int8", block=block, zstd=zstd)), tensor)
    for got, sent in zip(decoded.split(block), tensor.clamp(-127 * 2.0**120, 127 * 2.0**120).split(block), strict=True):
        scale = sent.abs().max().double() / 127
        tiny = 127 * 2.0**-126  # a block that stays below is sent as zero
        error = (got.double() - sent.double()).abs().max()
        assert error <= scale / 2 * (1 + 1e-5) or sent.abs().max() <= tiny


def test_int8_on_gaussian_values() -> None:
    values = gaussian(2**18)
    codec = open_codec(CodecSection(name="int8", zstd=False))
    error = (there_and_back(codec, values) - values).norm() / values.norm()
    assert error == pytest.approx(0.0070, abs=0.0003)
    assert codec.max_bytes(2**18) * 8 / 2**18 == 8.125


@pytest.mark.parametrize("elements", [1, 255, 256, 257, TILE_ELEMENTS - 1, TILE_ELEMENTS + 255, 2 * TILE_ELEMENTS])
def test_int8_tiles_and_short_blocks_do_not_show(elements: int) -> None:
    values = gaussian(elements)
    codec = Int8Codec(256)
    assert bits(codec.decode(codec.encode(values), elements)) == bits(plain_int8(values.numpy(), 256))


def plain_int8(values: np.ndarray, block: int) -> Tensor:
    """The definition, block by block, in numpy's fp32."""
    decoded = []
    for start in range(0, len(values), block):
        piece = values[start : start + block]
        scale = np.abs(piece).max() / np.float32(127)
        decoded.append(np.rint(piece / scale).astype(np.int8).astype(np.float32) * scale)
    return torch.from_numpy(np.concatenate(decoded))


def test_fixed_bytes_of_int8() -> None:
    """Scales 1, 0, 2; halves go to the even code; a zero block; a short last one."""
    values = torch.tensor([127.0, -63.5, 0.5, 1.5, 0.0, -0.0, 0.0, 0.0, -254.0])
    payload = Int8Codec(4).encode(values)
    assert payload.hex() == "0000803f00000000000000407fc000020000000081"
    assert Int8Codec(4).decode(payload, 9).tolist() == [127.0, -64.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, -254.0]


def test_int8_block_below_the_smallest_scale_is_zero() -> None:
    """190 of the smallest fp32: a scale of 1 or 2 of them would ask for codes that an int8 has not."""
    block = torch.full((4,), 190 * 2.0**-149)
    kept = torch.full((4,), -127 * 2.0**-126)
    assert there_and_back(Int8Codec(4), torch.cat([block, kept])).tolist() == [0.0] * 4 + kept.tolist()


def test_splitting_floats_into_planes_pays() -> None:
    """Exponents side by side: 16 % smaller on gaussian values, where whole floats become 8 % smaller."""
    values = gaussian(2**18)
    split = open_codec(CodecSection(name="fp32", zstd=True)).encode(values)
    whole = zstandard.ZstdCompressor(level=1).compress(values.numpy().tobytes())
    assert len(split) < 0.86 * values.nbytes
    assert len(split) < 0.94 * len(whole)


@each_codec
def test_threads_may_share_a_codec(codec: Codec) -> None:
    batches = [gaussian(20_000, seed) for seed in range(8)]
    expected = [codec.encode(values) for values in batches]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(codec.encode, batches * 4)) == expected * 4
        decoded = pool.map(lambda payload: bits(codec.decode(payload, 20_000)), expected * 4)
        assert list(decoded) == [bits(codec.decode(payload, 20_000)) for payload in expected] * 4


@each_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_not_sent(codec: Codec, bad: float) -> None:
    values = gaussian(1000)
    values[700] = bad
    with pytest.raises(PayloadError, match="not finite"):
        codec.encode(values)


@each_codec
def test_the_largest_values_saturate(codec: Codec) -> None:
    values = torch.tensor([FP32_MAX, -FP32_MAX, 1.0])
    decoded = there_and_back(codec, values)
    assert decoded.isfinite().all()
    assert decoded[0] == -decoded[1] >= 65504.0


# ---------------------------------------------------------------- hostile bytes


def refuses_or_decodes(codec: Codec, payload: bytes, elements: int) -> bool:
    """Whether refused. Anything but PayloadError or finite values of the right number fails the test."""
    try:
        values = codec.decode(payload, elements)
    except PayloadError:
        return True
    assert values.shape == (elements,)
    assert values.isfinite().all()
    return False


@each_codec
@given(payload=st.binary(max_size=200), elements=st.integers(1, 40))
def test_random_bytes(codec: Codec, payload: bytes, elements: int) -> None:
    refused = refuses_or_decodes(codec, payload, elements)
    if codec in ZSTD or len(payload) != codec.max_bytes(elements):
        assert refused


@each_codec
def test_cut_short_or_too_long(codec: Codec) -> None:
    payload = codec.encode(gaussian(100))
    for cut in range(len(payload)):
        assert refuses_or_decodes(codec, payload[:cut], 100)
    for more in (b"\0", payload, bytes(10_000)):
        assert refuses_or_decodes(codec, payload + more, 100)


@each_codec
def test_made_for_another_number_of_values(codec: Codec) -> None:
    payload = codec.encode(gaussian(100))
    for elements in (1, 99, 101, 2**20):
        assert refuses_or_decodes(codec, payload, elements)


@each_codec
def test_every_single_bit_flip(codec: Codec) -> None:
    payload = codec.encode(gaussian(70))
    for bit in range(8 * len(payload)):
        flipped = bytearray(payload)
        flipped[bit // 8] ^= 1 << bit % 8
        refuses_or_decodes(codec, bytes(flipped), 70)


@pytest.mark.parametrize("codec", ZSTD, ids=lambda codec: codec.name)
def test_every_flip_in_magic_and_stated_size_of_zstd(codec: Codec) -> None:
    payload = codec.encode(gaussian(70))
    for bit in [*range(4 * 8), *range(5 * 8, 6 * 8)]:
        flipped = bytearray(payload)
        flipped[bit // 8] ^= 1 << bit % 8
        assert refuses_or_decodes(codec, bytes(flipped), 70)


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_floats_that_are_not_finite(name: str, bad: float) -> None:
    values = torch.tensor([1.0, bad, 2.0]).to({"fp32": torch.float32, "fp16": torch.float16}.get(name, torch.bfloat16))
    payload = values.view(torch.uint8).numpy().tobytes()
    assert refuses_or_decodes(open_codec(CodecSection(name=name, zstd=False)), payload, 3)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0, -1e-45, 2.0**120 * 1.001, 3e38])
def test_int8_scales_that_are_none(scale: float) -> None:
    payload = struct.pack("<2f5b", 1.0, scale, 1, 2, 3, 4, 5)
    assert refuses_or_decodes(Int8Codec(4), payload, 5)


def test_int8_code_that_is_none_stays_finite() -> None:
    assert not refuses_or_decodes(Int8Codec(4), struct.pack("<f4b", 2.0**120, -128, 127, 0, 0), 4)


def zeros_frame(header: bytes, content_bytes: int) -> bytes:
    """A zstandard frame of run-length blocks, 128 KiB of zeros in 4 bytes each (RFC 8878, 3.1.1)."""
    full, rest = divmod(content_bytes, 2**17)
    lengths = [2**17] * full + [rest] * (rest > 0)
    blocks = [(length << 3 | 1 << 1 | (i == len(lengths) - 1)) for i, length in enumerate(lengths)]
    return b"\x28\xb5\x2f\xfd" + header + b"".join(block.to_bytes(3, "little") + b"\0" for block in blocks)


def stating(content_bytes: int) -> bytes:
    """Descriptor: content size in 8 bytes, one segment."""
    return b"\xe0" + struct.pack("<Q", content_bytes)


def test_our_frames_of_zeros_are_frames() -> None:
    codec = open_codec(CodecSection(name="fp32", zstd=True))
    payload = zeros_frame(stating(4 * 2**16), 4 * 2**16)
    assert codec.decode(payload, 2**16).count_nonzero() == 0


BOMBS = {
    "33 kB that state and hold 1 GiB": zeros_frame(stating(2**30), 2**30),
    "state 256 KiB, hold 1 GiB": zeros_frame(stating(2**18), 2**30),
    "state 1 GiB, hold 256 KiB": zeros_frame(stating(2**30), 2**18),
    "state 2**64 - 3 bytes": zeros_frame(stating(2**64 - 3), 2**18),
    "state nothing, hold 1 GiB": zeros_frame(b"\x00\x88", 2**30),
    "state and hold 1 GiB, window of 1 KiB": zeros_frame(b"\xc0\x00" + struct.pack("<Q", 2**30), 2**30),
    "state 256 KiB, window of 2 GiB": zeros_frame(b"\xc0\xa8" + struct.pack("<Q", 2**18), 2**18),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_allocate_little(bomb: str) -> None:
    codec = open_codec(CodecSection(name="fp32", zstd=True))
    tracemalloc.start()
    try:
        assert refuses_or_decodes(codec, BOMBS[bomb], 2**16)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2**20
