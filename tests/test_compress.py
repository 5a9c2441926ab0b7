"""Codecs: round trips, error bounds, fixed bytes, and bytes that are none of ours."""

from __future__ import annotations

import ast
import struct
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from diloco import compress
from diloco.compress import Codec, PayloadError, open_codec
from diloco.compress.blocks import TILE_ELEMENTS, BinnedCodec, BlockCodec, E3M0Codec, Int4Codec, Int8Codec
from diloco.compress.extra.sign import SignCodec
from diloco.config.codec import CodecSection
from tests.alone import alone

KINDS = (
    {"name": "fp32"},
    {"name": "fp16"},
    {"name": "bf16"},
    {"name": "int8", "block": 64},
    {"name": "int8", "block": 64, "rounding": "stochastic"},
    {"name": "int8", "scale": "statistical"},
    {"name": "int4", "block": 32},
    {"name": "int4", "rounding": "stochastic"},
    {"name": "int4", "scale": "statistical"},
    {"name": "e3m0"},
    {"name": "e3m0", "rounding": "stochastic"},
    {"name": "two_bit", "block": 64},
    {"name": "sign", "block": 64},
)
CODECS = [open_codec(CodecSection.model_validate({**kind, "zstd": zstd})) for kind in KINDS for zstd in (False, True)]
BLOCKS = [codec for codec in CODECS if isinstance(codec, BlockCodec)]
LOSSLESS = [codec for codec in CODECS if codec.name.startswith("fp32")]
ZSTD = [codec for codec in CODECS if codec.name.endswith("+zstd")]
FP32_MAX = torch.finfo(torch.float32).max

each_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
each_block_codec = pytest.mark.parametrize("codec", BLOCKS, ids=lambda codec: codec.name)
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


def test_rare_codecs_are_imported_only_where_a_contract_names_one():
    package = Path(compress.__file__).parents[1]
    files = [path for path in package.rglob("*.py") if path.parent.name != "extra"]
    trees = {path: ast.parse(path.read_text()) for path in files}
    assert not [
        str(path)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and "diloco.compress.extra" in ast.unparse(node)
    ]
    assert isinstance(open_codec(CodecSection(name="sign", zstd=False)), SignCodec)


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


LEVELS = (
    ({"name": "int8"}, 8.125, 0.0070),
    ({"name": "int8", "rounding": "stochastic"}, 8.125, 0.0099),
    ({"name": "int8", "scale": "statistical"}, 8 + 4096 / 2**18, 0.0136),
    ({"name": "int4"}, 4.25, 0.108),
    ({"name": "int4", "rounding": "stochastic"}, 4.25, 0.153),
    ({"name": "int4", "scale": "statistical"}, 4.25, 0.102),
    ({"name": "e3m0"}, 4.25, 0.188),
    ({"name": "e3m0", "rounding": "stochastic"}, 4.25, 0.271),
    ({"name": "two_bit"}, 2.25, 0.338),
    ({"name": "sign"}, 1.0625, 0.601),
)


@pytest.mark.parametrize(("kind", "bits_a_value", "expected_error"), LEVELS, ids=lambda level: str(level))
def test_size_and_error_on_gaussian_values(kind: dict[str, str], bits_a_value: float, expected_error: float) -> None:
    values = gaussian(2**18)
    codec = open_codec(CodecSection.model_validate({**kind, "zstd": False}))
    error = (there_and_back(codec, values) - values).norm() / values.norm()
    assert error == pytest.approx(expected_error, rel=0.02)
    assert len(codec.encode(values)) * 8 / 2**18 == codec.max_bytes(2**18) * 8 / 2**18 == bits_a_value


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


def test_fixed_bytes_of_int4() -> None:
    """Scales 1, 0 and 2; a byte holds codes that are half a block apart, 8 added to each."""
    values = torch.tensor([7.0, -3.5, 0.5, 1.5, 0.0, -0.0, 0.0, 0.0, -14.0])
    payload = Int4Codec(4).encode(values)
    assert payload.hex() == "803f00000040" + "8fa4" + "8888" + "01"
    assert Int4Codec(4).decode(payload, 9).tolist() == [7.0, -4.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, -14.0]


def test_fixed_bytes_of_e3m0() -> None:
    """Scale 4, a sign in the fourth bit: 4 and 2 are levels, 3 lies half-way, 2^-5 half-way between zero and 2^-4."""
    values = torch.tensor([4.0, -2.0, 3.0, -3.1, 0.0, -0.0625, 0.03125, 0.04])
    payload = E3M0Codec(8).encode(values)
    assert payload.hex() == "8040" + "079e" + "06" + "1f"
    assert E3M0Codec(8).decode(payload, 8).tolist() == [4.0, -2.0, 2.0, -4.0, 0.0, -0.0625, 0.0, 0.0625]


def test_fixed_bytes_of_two_bit() -> None:
    """Deviation 2.97, where the bins meet, and at 0: 3 0 2, 1 3 2, 2 0 0, 1 1 3; a byte holds one of each three."""
    values = torch.tensor([3.5, -4.0, 1.0, -1.0, 4.0, 0.5, 1.5, -3.0, -5.0, -0.5, -1.5, 4.5])
    payload = BinnedCodec(12, 2).encode(values)
    assert payload.hex() == "80c080bf803f8040" + "674cca"
    assert BinnedCodec(12, 2).decode(payload, 12).tolist() == [4, -4, 1, -1, 4, 1, 1, -4, -4, -1, -1, 4]


def test_fixed_bytes_of_sign() -> None:
    """Mean sizes 2 and 0; a byte of eight codes for each block, with nothing in the upper bits of the short one."""
    values = torch.tensor([1.0, -2.0, 3.0, -2.0, 1.0, -3.0, 2.0, 2.0, 0.0, -0.0])
    payload = SignCodec(8).encode(values)
    assert payload.hex() == "00400000" + "d5" + "03"
    assert SignCodec(8).decode(payload, 10).tolist() == [2.0, -2.0, 2.0, -2.0, 2.0, -2.0, 2.0, 2.0, 0.0, 0.0]


# ---------------------------------------------------------------- blocks of all sizes and magnitudes


MAX_ERROR = {"int8": 0.5 / 127, "int4": 0.5 / 7, "e3m0": 0.25, "sign": 1.0, "two_bit": 2.0, "statistical": 2.0}
"""In shares of a block's largest absolute value, when rounding to nearest; the scale in bf16 adds 2^-7 of that."""


@each_block_codec
@given(values=values_fp32)
def test_no_value_of_a_block_errs_beyond_its_step(codec: BlockCodec, values: list[float]) -> None:
    tensor = torch.tensor(values)
    decoded = there_and_back(codec, tensor)
    assert decoded.isfinite().all()
    limit = MAX_ERROR[codec.name.split("-")[-1] if "statistical" in codec.name else codec.name.split("-")[0]]
    limit *= 2 if codec.stochastic else 1
    block = min(codec.block, len(values))
    for got, sent in zip(decoded.split(block), tensor.clamp(-(2.0**120), 2.0**120).split(block), strict=True):
        largest = sent.abs().max().item()
        if tensor.abs().max() <= 2.0**120 and largest > 2.0**-100:
            assert (got.double() - sent.double()).abs().max() <= largest * limit * (1 + 2**-6)


@each_block_codec
def test_tiny_blocks_are_zero_and_huge_ones_finite(codec: BlockCodec) -> None:
    tiny = torch.full((32,), 2.0**-140)
    assert there_and_back(codec, torch.cat([tiny, -tiny])).abs().max() == 0.0
    huge = torch.full((32,), 2.0**119)
    assert there_and_back(codec, torch.cat([huge, -huge])).abs().max() == pytest.approx(2.0**119, rel=2**-5)


@pytest.mark.parametrize("codec", [Int4Codec(64), E3M0Codec(64), SignCodec(64)], ids=lambda codec: codec.name)
@given(values=values_fp32)
def test_what_was_decoded_is_encoded_as_before(codec: BlockCodec, values: list[float]) -> None:
    payload = codec.encode(torch.tensor(values))
    assert codec.encode(codec.decode(payload, len(values))) == payload


@given(values=values_fp32)
def test_e3m0_takes_the_nearest_level(values: list[float]) -> None:
    tensor = torch.tensor(values).clamp(-1e30, 1e30)
    codec = E3M0Codec(512)
    decoded = there_and_back(codec, tensor).double()
    scale = struct.unpack("<f", b"\0\0" + codec.encode(tensor)[:2])[0]
    levels = torch.tensor([0.0, *(2.0**exponent for exponent in range(-6, 1))], dtype=torch.float64) * scale
    best = (tensor.abs().double()[:, None] - levels).abs().amin(dim=1)
    assert torch.all((decoded - tensor).abs() <= best * (1 + 1e-6))


@pytest.mark.parametrize("codec", [codec for codec in BLOCKS if isinstance(codec, BinnedCodec)], ids=lambda c: c.name)
def test_bins_leave_the_sum_as_it_is(codec: BinnedCodec) -> None:
    """With a few values far out, which a bin swallows: every bin is decoded as its mean."""
    values = gaussian(1024)
    values[::100] *= 30
    tolerance = 2**-9 * values.abs().sum().item()  # of means in bf16
    assert there_and_back(codec, values).sum().item() == pytest.approx(values.sum().item(), abs=tolerance)


@pytest.mark.parametrize("codec", [codec for codec in BLOCKS if not codec.stochastic], ids=lambda codec: codec.name)
def test_a_block_of_one_value_comes_back(codec: BlockCodec) -> None:
    values = torch.full((64,), 0.375)
    assert there_and_back(codec, values).tolist() == pytest.approx([0.375] * 64, rel=2**-6)


# ---------------------------------------------------------------- stochastic rounding


DITHERED = [Int8Codec(64, True), Int4Codec(64, True), E3M0Codec(64, True)]
each_dithered = pytest.mark.parametrize("codec", DITHERED, ids=lambda codec: codec.name)


@each_dithered
def test_stochastic_rounding_has_the_right_mean(codec: BlockCodec) -> None:
    """4,000 blocks that are alike but for one small value, which gives each of them dice of its own."""
    block = gaussian(64)
    rows = block.repeat(4000, 1)
    rows[:, 0] = torch.arange(1, 4001) * 1e-9
    decoded = there_and_back(codec, rows.flatten()).view(rows.shape)[:, 1:]
    standard_error = decoded.std(dim=0) / 4000**0.5 + 1e-9
    assert torch.all((decoded.mean(dim=0) - block[1:]).abs() < 5 * standard_error)
    assert decoded.std(dim=0).max() > 0


@each_dithered
def test_stochastic_rounding_repeats_itself_and_nothing_else(codec: BlockCodec) -> None:
    values = gaussian(64)
    same = codec.encode(torch.cat([values, values]))
    assert codec.encode(torch.cat([values, values])) == same
    state = torch.random.get_rng_state()
    codec.encode(values)
    assert torch.equal(torch.random.get_rng_state(), state)
    first, second = codec.decode(same, 128).split(64)
    assert not torch.equal(first, second)


# ---------------------------------------------------------------- what a contract may ask for


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"name": "int8", "block": 96}, "must divide 1024"),
        ({"name": "int4", "block": 1}, "must fill bytes"),
        ({"name": "sign", "block": 4}, "must fill bytes"),
        ({"name": "e3m0", "scale": "statistical"}, "'statistical' is for int8 and int4, not for e3m0"),
        ({"name": "two_bit", "rounding": "stochastic"}, "'stochastic' is for int8, int4 and e3m0"),
        ({"name": "int8", "scale": "statistical", "rounding": "stochastic"}, "with codec.scale 'absmax'"),
    ],
)
def test_settings_that_mean_nothing(section: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        CodecSection.model_validate(section)


# ---------------------------------------------------------------- zstd


def test_splitting_floats_into_planes_pays() -> None:
    """Exponents side by side: 16 % smaller on gaussian values, where whole floats become 8 % smaller."""
    values = gaussian(2**18)
    split = open_codec(CodecSection(name="fp32", zstd=True)).encode(values)
    whole = zstandard.ZstdCompressor(level=1).compress(values.numpy().tobytes())
    assert len(split) < 0.86 * values.nbytes
    assert len(split) < 0.94 * len(whole)


def test_zstd_is_left_out_where_it_saves_nothing() -> None:
    """The signs of gaussian values are as good as random; those of one sign are not."""
    plain, codec = (open_codec(CodecSection(name="sign", zstd=zstd)) for zstd in (False, True))
    values = gaussian(2**12)
    assert codec.encode(values) == b"\0" + plain.encode(values)
    assert len(codec.encode(values)) == codec.max_bytes(2**12) == plain.max_bytes(2**12) + 1
    assert codec.encode(values.abs())[:1] == b"\1"
    assert len(codec.encode(values.abs())) < 0.5 * plain.max_bytes(2**12)


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
    if len(payload) != codec.max_bytes(elements) or (codec in ZSTD and payload[0] != 0):
        assert refused


@each_block_codec
@given(elements=st.integers(1, 200), seed=st.integers(0, 2**32))
def test_random_codes_behind_good_headers(codec: BlockCodec, elements: int, seed: int) -> None:
    payload = bytearray(codec.encode(gaussian(elements, seed)))
    random = np.random.default_rng(seed)
    codes = len(payload) - -(-elements // codec.block) * codec.header_numbers * codec.header_dtype.itemsize
    payload[len(payload) - codes :] = random.bytes(codes)
    assert not refuses_or_decodes(codec, bytes(payload), elements)


@each_block_codec
@pytest.mark.parametrize("header", [float("nan"), float("inf"), float("-inf"), 2.0**121, -(2.0**121)])
def test_headers_that_are_none(codec: BlockCodec, header: float) -> None:
    raw = torch.tensor([header]).to(codec.header_dtype).view(torch.uint8).numpy().tobytes()
    payload = raw + codec.encode(gaussian(100))[len(raw) :]
    assert refuses_or_decodes(codec, payload, 100)
    total = gaussian(100)
    with pytest.raises(PayloadError):
        codec.fold(payload, 1.0, total)
    assert bits(total) == bits(gaussian(100))


@pytest.mark.parametrize("codec", [Int4Codec(4), E3M0Codec(4), SignCodec(8)], ids=lambda codec: codec.name)
def test_no_scale_is_negative(codec: BlockCodec) -> None:
    payload = codec.encode(gaussian(4))
    assert refuses_or_decodes(codec, payload[:1] + bytes([payload[1] | 0x80]) + payload[2:], 4)


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
    for elements in (1, 50, 99, 101, 150, 2**20):
        same_size = codec.max_bytes(elements) == codec.max_bytes(100)  # two or more codes share a byte
        assert refuses_or_decodes(codec, payload, elements) or same_size


@each_codec
def test_every_single_bit_flip(codec: Codec) -> None:
    payload = codec.encode(gaussian(70))
    for bit in range(8 * len(payload)):
        flipped = bytearray(payload)
        flipped[bit // 8] ^= 1 << bit % 8
        refuses_or_decodes(codec, bytes(flipped), 70)


@pytest.mark.parametrize("codec", ZSTD, ids=lambda codec: codec.name)
def test_every_flip_in_magic_and_stated_size_of_zstd(codec: Codec) -> None:
    payload = codec.encode(torch.zeros(700))
    assert payload[:5] == b"\1\x28\xb5\x2f\xfd"
    for bit in [*range(8, 5 * 8), *range(6 * 8, 7 * 8)]:
        flipped = bytearray(payload)
        flipped[bit // 8] ^= 1 << bit % 8
        assert refuses_or_decodes(codec, bytes(flipped), 700)


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
    payload = b"\1" + zeros_frame(stating(4 * 2**16), 4 * 2**16)
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


def peak_bytes_of_bombs() -> dict[str, int]:
    codec, peaks = open_codec(CodecSection(name="fp32", zstd=True)), {}
    tracemalloc.start()
    for name, bomb in BOMBS.items():
        before_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        assert refuses_or_decodes(codec, b"\1" + bomb, 2**16)
        peaks[name] = tracemalloc.get_traced_memory()[1] - before_bytes
    return peaks


def test_bombs_allocate_little() -> None:
    peaks = alone(peak_bytes_of_bombs)
    assert peaks.keys() == BOMBS.keys()
    assert {name: peak_bytes for name, peak_bytes in peaks.items() if peak_bytes >= 2**20} == {}
