"""Codecs whose contributions are gathered: what is kept, sizes, means, bundles, and bytes that are none of ours."""

from __future__ import annotations

import hashlib
import math
import random
import re
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.compress import Codec, PayloadError, bundle, open_codec
from diloco.compress.codec import FloatCodec
from diloco.compress.extra.dct import DctCodec
from diloco.compress.extra.dct import _basis as basis
from diloco.compress.extra.lowrank import LowRankCodec
from diloco.compress.topk import CHUNK, TopKCodec, kept_of
from diloco.config.codec import CodecSection

FP16 = FloatCodec("fp16", torch.float16)
FP32 = FloatCodec("fp32", torch.float32)
FP32_MAX = torch.finfo(torch.float32).max
ELEMENTS = CHUNK + 1000
VALUES = ("fp16", "int8", "two_bit")


def opened(name: str, zstd: bool = False, **keys: object) -> Codec:
    return open_codec(CodecSection.model_validate({"name": name, "zstd": zstd, **keys}))


CODECS = {
    **{f"topk-{values}": opened("topk", values=values) for values in VALUES},
    "topk-two_bit+zstd": opened("topk", zstd=True),
    "dct": opened("dct"),
    "lowrank": opened("lowrank", rank=3, columns=64),
    "lowrank+zstd": opened("lowrank", zstd=True, rank=3, columns=64),
}
each_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
SMALL = {
    "topk": TopKCodec(0.5, FP16, chunk=8),
    "topk-all": TopKCodec(0.25, FP16, "all", chunk=8),
    "dct": DctCodec(0.5, FP16, chunk=16),
    "lowrank": LowRankCodec(2, 5),
}
"""With chunks so small that hypothesis reaches all corners."""
each_small = pytest.mark.parametrize("codec", SMALL.values(), ids=SMALL)
vectors = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=60).map(torch.tensor)


def gaussian(elements: int, seed: int = 0) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed)) * 1e-3


def bits(values: Tensor) -> list[int]:
    return values.view(torch.int32).tolist()


def relative_error(codec: Codec, values: Tensor) -> float:
    decoded = codec.decode(codec.encode(values), values.numel())
    return float((decoded - values).norm() / values.norm())


def refuses_or_decodes(codec: Codec, payload: bytes, elements: int) -> bool:
    """Whether refused. Anything but PayloadError or finite values fails the test."""
    try:
        values = codec.decode(payload, elements)
    except PayloadError:
        return True
    assert values.isfinite().all()
    assert not math.isnan(codec.squares(payload, elements))
    return False


def refuses_mean(codec: Codec, joined: bytes, elements: int) -> bool:
    """Whether there is no mean, which who only checks it must find, too. Anything but finite values fails the test."""
    out = torch.empty(elements)
    try:
        bundle.check(joined, codec, elements)
    except PayloadError as error:
        with pytest.raises(PayloadError, match=re.escape(str(error))):
            bundle.mean_into(joined, codec, out)
        return True
    bundle.mean_into(joined, codec, out)
    assert out.isfinite().all()
    return False


def mean_of(codec: Codec, terms: Sequence[tuple[int, bytes]], elements: int) -> Tensor:
    out = torch.full((elements,), torch.nan)
    bundle.mean_into(bundle.join(terms), codec, out)
    return out


# ---------------------------------------------------------------- what is kept


@given(values=vectors, density=st.floats(0.01, 1), chunk=st.integers(1, 20))
def test_topk_keeps_exactly_the_largest_of_each_chunk(values: Tensor, density: float, chunk: int) -> None:
    codec = TopKCodec(density, FP32, chunk=chunk)
    decoded = codec.decode(codec.encode(values), values.numel())
    for sent, got in zip(torch.split(values, chunk), torch.split(decoded, chunk), strict=True):
        kept = kept_of(len(sent), density)
        same = got.view(torch.int32) == sent.view(torch.int32)
        assert ((got == 0) | same).all()
        assert sorted(got.abs().tolist())[-kept:] == sorted(sent.abs().tolist())[-kept:]
        assert got.count_nonzero() <= kept


@each_small
@given(values=vectors)
def test_sizes_are_fixed_and_values_finite(codec: Codec, values: Tensor) -> None:
    payload = codec.encode(values)
    assert len(payload) == codec.max_bytes(values.numel())
    decoded = codec.decode(payload, values.numel())
    assert (decoded.dtype, decoded.shape) == (torch.float32, values.shape)
    assert decoded.isfinite().all()
    assert codec.squares(payload, values.numel()) == pytest.approx(float(decoded.square().sum()), rel=1e-2, abs=1e-6)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        (128, {"fp16": 0.875, "int8": 0.625 + 32 / 4096, "two_bit": 0.4375 + 64 / 4096}),
        (512, {"fp16": 3.5, "int8": 2.5 + 32 / 4096, "two_bit": 1.75 + 64 / 4096}),
    ],
)
def test_bits_for_each_value(values: str, kept: int, expected: dict[str, float]) -> None:
    """SparseLoCo's 14 bits for each kept value, and four bf16 bin means for each chunk."""
    codec = opened("topk", values=values, density=kept / CHUNK)
    assert len(codec.encode(gaussian(2**16))) * 8 / 2**16 == expected[values]


@pytest.mark.parametrize("density", [1e-6, 0.0001, 0.013, 0.03, 0.1, 0.97, 1.0])
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("name", ["topk", "dct"])
def test_any_density(name: str, values: str, density: float) -> None:
    codec = opened(name, values=values, density=density)
    for elements in (1, 63, 2 * CHUNK, 2 * CHUNK + 777):
        vector = gaussian(elements)
        assert relative_error(codec, vector) < 1.0 + 1e-6
        assert len(codec.encode(vector)) == codec.max_bytes(elements)


def kept_share(density: float) -> float:
    """Share of the squares of gaussian values that the largest hold: 2 (t phi(t) + Q(t)), where 2 Q(t) = density."""
    low, high = 0.0, 10.0
    for _ in range(60):
        t = (low + high) / 2
        low, high = (t, high) if math.erfc(t / math.sqrt(2)) > density else (low, t)
    return 2 * t * math.exp(-t * t / 2) / math.sqrt(2 * math.pi) + density


@pytest.mark.parametrize("name", ["topk", "dct"])
@pytest.mark.parametrize("density", [0.03125, 0.125])
def test_error_on_gaussian_values(name: str, density: float) -> None:
    """The error is the dropped values'; two bits for the kept ones add little. The cosine transform of noise is
    noise."""
    values, dropped = gaussian(2**18), 1 - kept_share(density)
    assert relative_error(opened(name, values="fp16", density=density), values) ** 2 == pytest.approx(dropped, rel=0.01)
    coarse = relative_error(opened(name, values="two_bit", density=density), values) ** 2
    assert dropped < coarse < dropped + 0.04 * (1 - dropped)


def test_two_bits_keep_both_sizes() -> None:
    """Humps on either side of zero, as top-k leaves them: four bins with their means."""
    values = torch.zeros(CHUNK)
    values[:128] = torch.tensor([-3.0, -1.0, 1.0, 3.0]).repeat(32)
    assert relative_error(opened("topk", values="two_bit"), values) == 0


def test_dct_sends_a_slow_wave_in_a_few_numbers() -> None:
    """Top-k among the values loses the wave; fp16 alone is the whole cost here."""
    grid = torch.arange(64) / 64
    wave = (torch.cos(3 * grid)[:, None] * torch.sin(2 * grid)[None, :] * 1e-2).flatten()
    assert relative_error(opened("dct", values="fp16"), wave) < 0.01
    assert relative_error(opened("topk", values="fp16"), wave) > 0.8


# ---------------------------------------------------------------- the cosine transform


@pytest.mark.parametrize("size", [1, 2, 3, 15, 64])
def test_cosine_basis(size: int) -> None:
    j, k = np.arange(size), np.arange(size)[:, None]
    expected = np.cos(np.pi * k * (2 * j + 1) / (2 * size)) * np.where(k == 0, 1, math.sqrt(2)) / math.sqrt(size)
    assert np.abs(basis(size).double().numpy() - expected).max() < 2.0**-24
    assert torch.allclose(basis(size) @ basis(size).T, torch.eye(size), atol=1e-6)


def test_cosine_basis_is_the_same_bits_everywhere() -> None:
    assert hashlib.sha256(basis(64).numpy().tobytes()).hexdigest() == BASIS_SHA256


BASIS_SHA256 = "23ad299315db91c9add281483667443d43edf415e0aed3ff813870eb737b8a4b"


@pytest.mark.parametrize("elements", [1, 63, 64, 65, 1024, CHUNK, CHUNK + 64 * 5 + 3])
def test_all_coefficients_are_the_values_again(elements: int) -> None:
    values = gaussian(elements)
    codec = DctCodec(1.0, FP32)
    assert torch.allclose(codec.decode(codec.encode(values), elements), values, atol=1e-8)


def test_dct_decodes_by_its_definition() -> None:
    """64 products and sums in each dimension, one numpy fp32 operation at a time."""
    codec = DctCodec(0.125, FP16)
    payload = codec.encode(gaussian(CHUNK))
    tile = TopKCodec(0.125, FP16).decode(payload, CHUNK).view(64, 64).numpy()
    matrix = basis(64).numpy()
    half, whole = np.zeros((64, 64), np.float32), np.zeros((64, 64), np.float32)
    for k in range(64):
        half = half + matrix[k][:, None] * tile[k][None, :]
    for k in range(64):
        whole = whole + half[:, k][:, None] * matrix[k][None, :]
    assert bits(codec.decode(payload, CHUNK)) == bits(torch.from_numpy(whole.flatten()))


# ---------------------------------------------------------------- low rank


@pytest.mark.parametrize("elements", [1, 64 * 64, 64 * 64 - 1, 64 * 100, 64 * 100 + 1])
def test_a_matrix_of_that_rank_is_kept(elements: int) -> None:
    codec = LowRankCodec(3, 64)
    rows = math.ceil(elements / 64)
    matrix = gaussian(rows * 2).view(rows, 2) @ gaussian(128, 1).view(2, 64)
    assert relative_error(codec, matrix.flatten()[:elements].contiguous()) < (2e-3 if elements % 64 == 0 else 0.02)


def test_low_rank_of_parts_of_any_size() -> None:
    """No wider than a square: a small part is not sent as one long row."""
    codec = LowRankCodec(8, 1024)
    assert codec.max_bytes(2**20) * 8 / 2**20 == 16 * 8 * 2048 / 2**20 + 32 * 8 / 2**20
    assert codec.max_bytes(4096) == 8 * (2 * 128 + 4)
    for elements in (1, 2, 3, 5, 99, 101, 4097):
        assert relative_error(codec, gaussian(elements)) < 1


def test_low_rank_is_nearly_the_best() -> None:
    left, right = (torch.linalg.qr(gaussian(128 * 128, seed).view(128, 128))[0] for seed in (1, 2))
    sizes = torch.logspace(0, -3, 128)
    values = (left * sizes @ right).flatten()
    best = float(sizes[8:].norm() / sizes.norm())
    assert best <= relative_error(LowRankCodec(8, 128), values) < 1.1 * best


def test_low_rank_decodes_by_its_definition() -> None:
    codec = LowRankCodec(2, 4)
    payload = codec.encode(gaussian(10))
    rows, columns, rank = 3, 4, 2
    scales = np.frombuffer(payload[:8], "<f4")
    left = np.frombuffer(payload[8 : 8 + 12], "<f2").reshape(rank, rows).astype(np.float32)
    right = np.frombuffer(payload[20:], "<f2").reshape(rank, columns).astype(np.float32) * scales[:, None]
    expected = np.zeros((rows, columns), np.float32)
    for term in range(rank):
        expected = expected + left[term][:, None] * right[term][None, :]
    assert bits(codec.decode(payload, 10)) == bits(torch.from_numpy(expected.flatten()[:10].copy()))


@pytest.mark.parametrize("scale", [1e-30, 1e30, 3e38])
def test_low_rank_of_tiny_and_huge_values(scale: float) -> None:
    values = (gaussian(8, 1).sign()[:, None] * torch.ones(8)).flatten() * scale
    decoded = LowRankCodec(2, 8).decode(LowRankCodec(2, 8).encode(values), 64)
    assert torch.allclose(decoded, values.clamp(-(2.0**60), 2.0**60), rtol=1e-2)


# ---------------------------------------------------------------- all of them


@each_codec
def test_threads_may_share_a_codec(codec: Codec) -> None:
    batches = [gaussian(ELEMENTS, seed) for seed in range(4)]
    expected = [codec.encode(values) for values in batches]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(codec.encode, batches * 2)) == expected * 2
        decoded = pool.map(lambda payload: bits(codec.decode(payload, ELEMENTS)), expected * 2)
        assert list(decoded) == [bits(codec.decode(payload, ELEMENTS)) for payload in expected] * 2


@each_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_not_sent(codec: Codec, bad: float) -> None:
    for place in (0, 700, ELEMENTS - 1):
        values = gaussian(ELEMENTS)
        values[place] = bad
        with pytest.raises(PayloadError, match="not finite"):
            codec.encode(values)


@each_codec
def test_the_largest_values_saturate(codec: Codec) -> None:
    values = torch.full((64,), FP32_MAX)
    decoded = codec.decode(codec.encode(values), 64)
    assert decoded.isfinite().all()
    assert decoded.max() > 1000


@each_codec
def test_zeros_stay_zeros(codec: Codec) -> None:
    assert codec.decode(codec.encode(torch.zeros(ELEMENTS)), ELEMENTS).count_nonzero() == 0


# ---------------------------------------------------------------- means of what was gathered


@each_small
@settings(max_examples=50)
@given(data=st.data())
def test_mean_is_that_of_a_float64_reference(codec: Codec, data: st.DataObject) -> None:
    elements = data.draw(st.integers(1, 60))
    weights = data.draw(st.lists(st.integers(1, 10**6), min_size=1, max_size=5))
    payloads = [codec.encode(gaussian(elements, seed) * 1e3) for seed in range(len(weights))]
    mean = mean_of(codec, list(zip(weights, payloads, strict=True)), elements)
    assert torch.allclose(mean.double(), reference(codec, weights, payloads, elements), rtol=1e-5, atol=1e-5)


def reference(codec: Codec, weights: list[int], payloads: list[bytes], elements: int) -> Tensor:
    """In fp64; of cosine coefficients among these, then turned back."""
    plain = TopKCodec(codec.density, codec.kept, chunk=codec.chunk) if isinstance(codec, DctCodec) else codec
    values = torch.stack([plain.decode(payload, elements).double() for payload in payloads])
    weight = torch.tensor(weights, dtype=torch.float64)[:, None]
    by_senders = isinstance(codec, TopKCodec) and codec.divide_by == "senders"
    divisor = (weight * (values != 0)).sum(0) if by_senders else weight.sum(0)
    mean = (weight * values).sum(0) / divisor.masked_fill(divisor == 0, 1.0)
    if isinstance(codec, DctCodec):
        all_of_them = DctCodec(1.0, FP32, chunk=codec.chunk)
        mean = all_of_them.decode(TopKCodec(1.0, FP32, chunk=codec.chunk).encode(mean.float()), elements).double()
    return mean


def test_senders_or_all() -> None:
    values = [torch.tensor([4.0, 0.0, 0.0, 1.0]), torch.tensor([0.0, 0.0, 2.0, 3.0])]
    for divide_by, expected in (("senders", [4.0, 0.0, 2.0, 2.5]), ("all", [1.0, 0.0, 1.5, 2.5])):
        codec = TopKCodec(0.5, FP32, divide_by, chunk=4)  # type: ignore[arg-type]
        terms = [(weight, codec.encode(v)) for weight, v in zip((1, 3), values, strict=True)]
        assert mean_of(codec, terms, 4).tolist() == expected


@each_codec
def test_order_of_the_view_and_weights(codec: Codec) -> None:
    payloads = [codec.encode(gaussian(ELEMENTS, seed)) for seed in range(4)]
    terms = list(zip((1, 2, 3, 4), payloads, strict=True))
    mean = mean_of(codec, terms, ELEMENTS)
    assert bits(mean) == bits(mean_of(codec, [(weight * 51_200, payload) for weight, payload in terms], ELEMENTS))
    assert torch.allclose(mean, mean_of(codec, terms[::-1], ELEMENTS), atol=1e-6)
    assert mean_of(codec, [(0, payload) for payload in payloads], ELEMENTS).count_nonzero() == 0
    alone = codec.decode(payloads[0], ELEMENTS)
    assert torch.equal(mean_of(codec, [(7, payloads[0]), (0, payloads[1])], ELEMENTS), alone)


def test_a_huge_sum_saturates() -> None:
    """A mean that nobody can use would be a way to stop a run."""
    for codec in (TopKCodec(1.0, FP32, chunk=16), DctCodec(1.0, FP32, chunk=16), LowRankCodec(2, 4)):
        payload = codec.encode(torch.full((16,), FP32_MAX))
        assert mean_of(codec, [(2**63, payload), (2**63 - 1, payload)], 16).isfinite().all()


# ---------------------------------------------------------------- bundles

some_terms = st.lists(st.tuples(st.integers(0, 2**64 - 1), st.binary(max_size=20)), min_size=1, max_size=64)


@given(terms=some_terms)
def test_bundles_come_apart_as_they_were_joined(terms: list[tuple[int, bytes]]) -> None:
    assert bundle.split(bundle.join(terms), 20) == terms
    assert len(bundle.join([(weight, bytes(20)) for weight, _ in terms])) == bundle.max_bytes(
        FloatCodec("fp32", torch.float32), 5, len(terms)
    )


@given(terms=some_terms, data=st.data())
def test_who_has_its_own_payload_gets_the_bundle_without(terms: list[tuple[int, bytes]], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(terms) - 1))
    joined, own = bundle.join(terms), terms[place][1]
    sent = bundle.without(joined, place)
    assert len(sent) == len(joined) - len(own)
    assert bundle.restored(sent, place, own) == joined
    for wild in (sent[: data.draw(st.integers(0, 3))], joined[: 4 + 12 * place]):
        with pytest.raises(PayloadError):
            bundle.restored(wild, place, own)
    with pytest.raises(PayloadError):
        bundle.restored(sent, place, own + b"more")
    with pytest.raises(PayloadError):
        bundle.restored(sent, len(terms), own)


@given(payload=st.binary(max_size=120), place=st.integers(0, 3), own=st.binary(max_size=9))
def test_random_bundles_without_our_own(payload: bytes, place: int, own: bytes) -> None:
    for data in (payload, struct.pack("<I", 2) + payload):
        try:
            assert len(bundle.restored(data, place, own)) == len(data) + len(own)
        except PayloadError:
            continue


def test_fixed_bytes_of_a_bundle() -> None:
    joined = bundle.join([(3, b"one"), (2**63, b"")])
    assert joined.hex() == "02000000" + "0300000000000000" + "03000000" + "0000000000000080" + "00000000" + b"one".hex()


def test_wild_counts_and_sizes() -> None:
    term = struct.pack("<QI", 1, 4)
    for wild in (
        b"",
        b"\1\0\0",
        bytes(4),
        struct.pack("<I", 2**32 - 1),
        struct.pack("<I", 1) + term[:-1],
        struct.pack("<I", 2) + term + b"four",
        struct.pack("<I", 1) + term + b"thr",
        struct.pack("<I", 1) + term + b"fives",
        struct.pack("<I", 1) + struct.pack("<QI", 1, 2**32 - 1) + b"four",
        struct.pack("<I", 65) + term * 65 + b"four" * 65,
    ):
        with pytest.raises(PayloadError):
            bundle.split(wild, 4)
    with pytest.raises(PayloadError):
        bundle.split(struct.pack("<I", 1) + term + b"four", 3)


@given(payload=st.binary(max_size=120), count=st.integers(0, 3))
def test_random_bundles(payload: bytes, count: int) -> None:
    for data in (payload, struct.pack("<I", count) + payload):
        refuses_mean(SMALL["topk"], data, 9)


@each_small
def test_flips_and_cuts_of_a_bundle(codec: Codec) -> None:
    joined = bundle.join([(seed + 1, codec.encode(gaussian(20, seed))) for seed in range(3)])
    for cut in range(len(joined)):
        assert refuses_mean(codec, joined[:cut], 20)
    assert refuses_mean(codec, joined + b"\0", 20)
    for bit in range(8 * len(joined)):
        flipped = bytearray(joined)
        flipped[bit // 8] ^= 1 << bit % 8
        refuses_mean(codec, bytes(flipped), 20)


# ---------------------------------------------------------------- hostile bytes


@each_small
@given(payload=st.binary(max_size=120), elements=st.integers(1, 40))
def test_random_bytes(codec: Codec, payload: bytes, elements: int) -> None:
    if len(payload) != codec.max_bytes(elements):
        assert refuses_or_decodes(codec, payload, elements)
    refuses_or_decodes(codec, random.Random(payload).randbytes(codec.max_bytes(elements)), elements)


@each_codec
def test_cut_short_too_long_or_for_another_part(codec: Codec) -> None:
    payload = codec.encode(gaussian(ELEMENTS))
    for cut in range(0, len(payload), 37):
        assert refuses_or_decodes(codec, payload[:cut], ELEMENTS)
    for more in (b"\0", payload, bytes(10_000)):
        assert refuses_or_decodes(codec, payload + more, ELEMENTS)
    for elements in (1, 2 * ELEMENTS, 2**20):
        assert refuses_or_decodes(codec, payload, elements)


@each_small
def test_every_single_bit_flip(codec: Codec) -> None:
    payload = codec.encode(gaussian(21))
    for bit in range(8 * len(payload)):
        flipped = bytearray(payload)
        flipped[bit // 8] ^= 1 << bit % 8
        refuses_or_decodes(codec, bytes(flipped), 21)


def packed(*indices: int) -> bytes:
    """12 bits each, the lowest first; an odd one is followed by zero."""
    number = sum(index << 12 * place for place, index in enumerate(indices))
    return number.to_bytes(3 * math.ceil(len(indices) / 2), "little")


@pytest.mark.parametrize(
    "indices", [(1, 1, 0), (2, 1, 0), (3, 8, 0), (0, 4095, 0), (4095, 4095, 0), (0, 1, 3), (0, 1, 4095)]
)
def test_indices_that_are_none(indices: tuple[int, ...]) -> None:
    """Twice, falling, beyond the chunk of 8, beyond the short one of 3."""
    codec = TopKCodec(0.25, FP16, chunk=8)
    values = np.arange(1, 4, dtype="<f2").tobytes()
    assert codec.decode(packed(0, 7, 2) + values, 11).tolist() == [1, 0, 0, 0, 0, 0, 0, 2, 0, 0, 3]
    assert refuses_or_decodes(codec, packed(*indices) + values, 11)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, 2.0**81])
def test_scales_and_codebooks_that_are_none(bad: float) -> None:
    codec = LowRankCodec(1, 2)
    payload = codec.encode(torch.ones(4))
    assert refuses_or_decodes(codec, struct.pack("<f", bad) + payload[4:], 4)
    assert refuses_or_decodes(codec, payload[:-2] + np.array([np.inf], "<f2").tobytes(), 4)
    if not math.isfinite(bad):
        two_bit = opened("topk")
        payload = two_bit.encode(gaussian(100))
        book = np.frombuffer(np.float32(bad).tobytes()[2:], np.uint8).tobytes()
        start = len(payload) - two_bit.max_bytes(100) + 6
        assert refuses_or_decodes(two_bit, payload[:start] + book + payload[start + 2 :], 100)


def test_hostile_coefficients_stay_finite() -> None:
    """All of the largest size, with the signs that add up in one corner."""
    codec = DctCodec(1.0, FP32)
    signs = torch.where(basis(64)[:, 0] >= 0, 1.0, -1.0)
    coefficients = (signs[:, None] * signs[None, :]).flatten() * FP32_MAX
    assert not refuses_or_decodes(codec, TopKCodec(1.0, FP32).encode(coefficients), CHUNK)
