"""Compiled codecs: the bits of eager torch, in every codec, and eager torch where they cannot be had."""

from __future__ import annotations

import logging
import math
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.base.errors import ConfigError
from diloco.compress import Codec, PayloadError, kernels
from diloco.compress.blocks import WHOLE_PART, BinnedCodec, BlockCodec, E3M0Codec, Int4Codec, Int8Codec
from diloco.compress.codec import FloatCodec, magnitude
from diloco.compress.extra.dct import DctCodec
from diloco.compress.extra.sign import SignCodec
from diloco.compress.topk import DivideBy, TopKCodec, kept_of
from diloco.kernels import build
from diloco.outer.fragments import Layout
from diloco.outer.optimizers import Nesterov
from diloco.outer.pseudograd import left_over, with_residual
from diloco.outer.state import FragmentState
from tests.peers import DEADLINE_S

CODECS: list[BlockCodec] = [
    *(kind(block) for kind in (Int8Codec, Int4Codec, E3M0Codec) for block in (8, 64)),
    *(kind(64, stochastic=True) for kind in (Int8Codec, Int4Codec, E3M0Codec)),
    Int8Codec(256),
    Int4Codec(1024),
    SignCodec(8),
    SignCodec(256),
    *(BinnedCodec(block, bits) for bits in (2, 4) for block in (4, 256, 1024)),
    BinnedCodec(64, 8),
    BinnedCodec(WHOLE_PART, 8),
]
slow = pytest.mark.slow(queued=False)
each_codec = pytest.mark.parametrize("codec", CODECS, ids=str)
each_kind = pytest.mark.parametrize(
    "codec", [pytest.param(codec, marks=() if codec.block in (64, 256) else slow) for codec in CODECS], ids=str
)
"""The same, quick with two sizes of a block."""
any_fp32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


class Outcome(NamedTuple):
    payload: bytes
    decoded: bytes
    total: bytes
    squares: float


@pytest.fixture(scope="module")
def library() -> CDLL:
    try:
        build.use_compiled("on")
    except ConfigError as error:
        pytest.skip(str(error))
    found = kernels.installed()
    kernels.install(None)
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def eager_afterwards() -> Iterator[None]:
    yield
    kernels.install(None)


def outcome(codec: BlockCodec, values: Tensor, weight: float = 3.0, library: CDLL | None = None) -> Outcome:
    """Every result of the codec for the values, with this library or without any."""
    kernels.install(library)
    try:
        payload = codec.encode(values)
        total = values.flip(0).clone()
        squares = codec.fold(payload, weight, total)
        decoded = codec.decode(payload, values.numel())
    finally:
        kernels.install(None)
    return Outcome(payload, decoded.numpy().tobytes(), total.numpy().tobytes(), squares)


def assert_same(codec: BlockCodec, values: Tensor, library: CDLL, weight: float = 3.0) -> None:
    eager, compiled = outcome(codec, values, weight), outcome(codec, values, weight, library)
    assert compiled[:3] == eager[:3]
    assert compiled.squares == pytest.approx(eager.squares, rel=1e-4) or not np.isfinite(eager.squares)


def gaussian(elements: int, seed: int = 0) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed)) * 1e-3


# ---------------------------------------------------------------- the same bits


@each_codec
@pytest.mark.parametrize("elements", [1, 7, 8, 9, 255, 257, 1023, 1025, 5000, 2**17 + 300])
def test_any_length(codec: BlockCodec, elements: int, library: CDLL) -> None:
    assert_same(codec, gaussian(elements), library)


@each_codec
def test_sizes_that_differ_wildly_and_weights_that_round(codec: BlockCodec, library: CDLL) -> None:
    spread = gaussian(4096).mul_(torch.exp2(torch.linspace(-60, 60, 4096)))
    for weight in (1.0, 7.0, 16_777_217.0, 1e-3):
        assert_same(codec, spread, library, weight)


@each_kind
@given(values=st.lists(any_fp32, min_size=1, max_size=80))
def test_any_values(codec: BlockCodec, values: list[float], library: CDLL) -> None:
    assert_same(codec, torch.tensor(values), library)


@pytest.mark.slow(queued=False)
@each_kind
@given(seed=st.integers(0, 2**32), elements=st.integers(1, 600))
def test_any_codes(codec: BlockCodec, seed: int, elements: int, library: CDLL) -> None:
    """Bytes that `encode` never makes, behind headers that it may make."""
    raw = bytearray(codec.encode(gaussian(elements, seed % 7)))
    random = np.random.default_rng(seed)
    header_bytes = -(-elements // codec.block) * codec.header_numbers * codec.header_dtype.itemsize
    raw[header_bytes:] = random.bytes(len(raw) - header_bytes)
    payload, totals, values = bytes(raw), [], []
    for used in (None, library):
        kernels.install(used)
        total = gaussian(elements, 99)
        codec.fold(payload, 5.0, total)
        totals.append(total.numpy().tobytes())
        values.append(codec.decode(payload, elements).numpy().tobytes())
    assert totals[0] == totals[1]
    assert values[0] == values[1]


def test_ties_and_steps_of_the_grid(library: CDLL) -> None:
    """Half-way between codes, where one bit in a quotient would show."""
    for codec, largest in ((Int8Codec(256), 127), (Int4Codec(64), 7)):
        halves = torch.arange(-largest, largest + 0.25, 0.25)
        assert_same(codec, torch.cat([halves, halves * 0.1, halves / 3, halves * 1e-20]), library)
    levels = torch.cat([torch.tensor([0.0, 1.0]), 2.0 ** torch.arange(-9, 1), 1.5 * 2.0 ** torch.arange(-9, 0)])
    for scale in (1.0, 0.1, 1 / 3, 1e-20):
        assert_same(E3M0Codec(64), torch.cat([levels, -levels]) * scale, library)


def test_no_multiplication_is_fused_with_the_sum(library: CDLL) -> None:
    """Values for which a fused multiply-add has another last bit, and the definition in numpy to compare with."""
    codec, values, weight = Int8Codec(256), gaussian(2**14), 3.0
    payload = codec.encode(values)
    start, decoded = gaussian(2**14, 1).numpy(), codec.decode(payload, 2**14).numpy()
    separate = start + decoded * np.float32(weight)
    fused = (start.astype(np.float64) + decoded.astype(np.float64) * weight).astype(np.float32)
    assert (separate != fused).any()
    for used in (None, library):
        kernels.install(used)
        total = torch.from_numpy(start.copy())
        codec.fold(payload, weight, total)
        assert total.numpy().tobytes() == separate.tobytes()


@each_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(codec: BlockCodec, bad: float, library: CDLL) -> None:
    kernels.install(library)
    for place in (0, 299, 599):
        values = gaussian(600)
        values[place] = bad
        with pytest.raises(PayloadError, match="not finite"):
            codec.encode(values)


def test_every_nan_is_refused(library: CDLL) -> None:
    """Quiet, signalling, negative, and with all bits set: a rounding up of bits would make a zero of the last."""
    for pattern in (0x7FC00000, 0x7F800001, -1, 0x7FFFFFFF):
        values = torch.zeros(64)
        values.view(torch.int32)[9] = pattern
        for used in (None, library):
            kernels.install(used)
            with pytest.raises(PayloadError, match="not finite"):
                Int4Codec(64).encode(values)


@each_codec
def test_views_that_begin_anywhere(codec: BlockCodec, library: CDLL) -> None:
    """Parts are slices of one buffer, aligned to nothing but 4 bytes, and what lies beside them is left alone."""
    buffer = gaussian(3000)
    eager = outcome(codec, buffer[1:2050].clone())
    kernels.install(library)
    assert codec.encode(buffer[1:2050]) == eager.payload
    target = torch.full((3000,), 7.0)
    codec.decode_into(eager.payload, target[1:2050])
    assert target[1:2050].numpy().tobytes() == eager.decoded
    assert target[0] == 7.0
    assert torch.all(target[2050:] == 7.0)


def test_threads_share_the_kernels(library: CDLL) -> None:
    batches = [gaussian(50_000, seed) for seed in range(8)]
    for codec in (Int8Codec(64, stochastic=True), SignCodec(8)):
        expected = [outcome(codec, values) for values in batches]
        kernels.install(library)
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(codec.encode, batches * 2)) == [each.payload for each in expected] * 2
            decoded = pool.map(lambda each, codec=codec: codec.decode(each.payload, 50_000), expected)
            assert [values.numpy().tobytes() for values in decoded] == [each.decoded for each in expected]


def test_blocks_too_large_for_a_kernel_go_without(library: CDLL) -> None:
    assert_same(BinnedCodec(4096, 2), gaussian(10_000), library)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@each_codec
def test_the_same_bytes_from_a_cuda_device(codec: BlockCodec, library: CDLL) -> None:
    kernels.install(library)
    assert codec.encode(gaussian(5000).cuda()) == codec.encode(gaussian(5000))


# ---------------------------------------------------------------- top-k


class Gathered(NamedTuple):
    """All bits of what a codec makes of a payload, or the reason for which it refuses it."""

    decoded: bytes | str
    total: bytes | str
    mean: bytes | str


def bits_or_reason(work: Callable[[], Tensor]) -> bytes | str:
    try:
        return work().numpy().tobytes()
    except PayloadError as error:
        return str(error)


def gathered(codec: Codec, terms: list[tuple[int, bytes]], elements: int) -> Gathered:
    """Means of the first payload, and of all."""

    def folded() -> Tensor:
        total = gaussian(elements, 9)
        codec.fold(terms[0][1], 3.0, total)
        return total

    def mean() -> Tensor:
        out = torch.full((elements,), torch.nan)
        codec.mean_into(terms, out)
        return out

    return Gathered(*map(bits_or_reason, (lambda: codec.decode(terms[0][1], elements), folded, mean)))


def assert_same_gathered(codec: Codec, terms: list[tuple[int, bytes]], elements: int, library: CDLL) -> Gathered:
    eager = gathered(codec, terms, elements)
    kernels.install(library)
    try:
        assert gathered(codec, terms, elements) == eager
    finally:
        kernels.install(None)
    return eager


def encoded(codec: Codec, values: Tensor, library: CDLL) -> bytes | str:
    """The payload of values, or why there is none: the same with kernels as without."""
    payloads = []
    for used in (None, library):
        kernels.install(used)
        try:
            payloads.append(codec.encode(values))
        except PayloadError as error:
            payloads.append(str(error))
        finally:
            kernels.install(None)
    assert payloads[0] == payloads[1]
    return payloads[0]


def assert_same_topk(
    codec: TopKCodec, batches: Sequence[Tensor], library: CDLL, weights: Sequence[int] = (3, 5)
) -> None:
    payloads = [encoded(codec, values, library) for values in batches]
    terms = [(weight, payload) for weight, payload in zip(weights, payloads, strict=True) if isinstance(payload, bytes)]
    assert len(terms) == len(payloads)
    made = assert_same_gathered(codec, terms, batches[0].numel(), library)
    assert all(isinstance(one, bytes) for one in made)


TOPK: dict[str, TopKCodec] = {
    "two_bit": TopKCodec(0.125, BinnedCodec(512, 2)),
    "int8-odd": TopKCodec(0.01, Int8Codec(128)),
    "fp16-all": TopKCodec(0.03125, FloatCodec("fp16", torch.float16), "all"),
    "one": TopKCodec(1e-6, FloatCodec("fp32", torch.float32)),
    "each": TopKCodec(1.0, FloatCodec("fp32", torch.float32)),
    "small": TopKCodec(0.4, FloatCodec("fp32", torch.float32), chunk=13),
    "dct": DctCodec(0.125, BinnedCodec(512, 2)),
}
each_topk = pytest.mark.parametrize("topk", TOPK.values(), ids=TOPK)
small_topk = TopKCodec(0.3, FloatCodec("fp32", torch.float32), chunk=11)


@each_topk
@pytest.mark.parametrize("elements", [1, 2, 9, 4095, 4096, 4097, 3 * 4096 + 777, 2**17])
def test_topk_of_any_length(topk: TopKCodec, elements: int, library: CDLL) -> None:
    assert_same_topk(topk, [gaussian(elements), gaussian(elements, 1)], library)


@each_topk
def test_topk_of_sizes_that_differ_wildly(topk: TopKCodec, library: CDLL) -> None:
    """Values that would lead a search astray: of each chunk other sizes, and steps between them that nobody guesses."""
    noise = gaussian(2 * 4096)
    spread = noise * torch.exp2(torch.linspace(-90, 90, 2 * 4096))
    steps = torch.where(torch.arange(2 * 4096) % 7 == 0, 1e30, 1e-30) * noise.sign()
    few = torch.where(torch.arange(2 * 4096) % 50 == 0, noise, 0.0)
    tiny = noise * 1e-38
    values = torch.cat([noise, spread, few, steps, tiny, torch.zeros(4096), noise * 1e9])
    assert_same_topk(topk, [values, values.flip(0), gaussian(len(values))], library, (1, 2**63, 2**64 - 1))


@given(values=st.lists(st.floats(width=32), min_size=1, max_size=40), density=st.floats(0.01, 1))
def test_topk_of_any_values(values: list[float], density: float, library: CDLL) -> None:
    """A value that is not finite is refused by the codec of the kept values."""
    encoded(replace(small_topk, density=density), torch.tensor(values), library)


@given(values=st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 3.0]), min_size=1, max_size=40))
def test_of_values_as_large_as_each_other_the_first_are_sent(values: list[float], library: CDLL) -> None:
    payload = encoded(small_topk, torch.tensor(values), library)
    assert isinstance(payload, bytes)
    decoded = small_topk.decode(payload, len(values)).tolist()
    for start in range(0, len(values), 11):
        chunk = values[start : start + 11]
        order = sorted(range(len(chunk)), key=lambda index: (-abs(chunk[index]), index))
        sent = set(order[: kept_of(len(chunk), small_topk.density)])
        assert decoded[start : start + 11] == [value if index in sent else 0.0 for index, value in enumerate(chunk)]


def test_c_gets_no_tensor_that_it_would_go_astray_with(library: CDLL) -> None:
    """A tensor of another dtype, too short, not contiguous, or elsewhere; and no payload that is cut."""
    kernels.install(library)
    cut = kernels.TopkShape(100, 40, 10, 5)
    assert (cut.sent, cut.packed_bytes) == (25, 39)
    values, payload = gaussian(100), bytes(cut.packed_bytes)
    good = torch.zeros(25)
    wrong = [values.double(), values.bfloat16(), values[:99], gaussian(200)[::2], values.to("meta")]
    for bad in wrong:
        with pytest.raises(TypeError):
            kernels.topk_select(bad, cut)
        with pytest.raises(TypeError):
            kernels.topk_decode(payload, good, cut, bad)
    for sent in (good.double(), good.bfloat16(), good[:24], torch.zeros(50)[::2], good.to("meta")):
        for call in (
            lambda sent=sent: kernels.topk_decode(payload, sent, cut, values),
            lambda sent=sent: kernels.topk_fold(payload, sent, cut, 1.0, values),
            lambda sent=sent: kernels.topk_mean([(1.0, payload, good), (1.0, payload, sent)], None, cut, values),
        ):
            with pytest.raises(TypeError):
                call()
    with pytest.raises(TypeError):
        kernels.topk_good(payload[:-1], cut)
    kernels.install(None)
    with pytest.raises(TypeError, match="no kernels"):
        kernels.topk_select(values, cut)


def test_ties_in_chunks_of_full_width(library: CDLL) -> None:
    rounded = (gaussian(3 * 4096) * 3e3).round()
    for topk in TOPK.values():
        assert_same_topk(topk, [rounded, torch.zeros(3 * 4096), torch.ones(3 * 4096)], library, (1, 2, 3))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@each_topk
def test_topk_refuses_what_is_not_finite(topk: TopKCodec, bad: float, library: CDLL) -> None:
    for place in (0, 4095, 4999):
        values = gaussian(5000)
        values[place] = bad
        assert "not finite" in str(encoded(topk, values, library))
    every_bit = gaussian(5000).view(torch.int32)
    every_bit[4097] = -1
    assert "not finite" in str(encoded(topk, every_bit.view(torch.float32), library))


@pytest.mark.slow(queued=False)
@pytest.mark.parametrize("divide_by", ["senders", "all"])
@given(
    batches=st.lists(st.lists(any_fp32, min_size=25, max_size=25), min_size=1, max_size=4),
    weights=st.lists(st.sampled_from([0, 1, 7, 2**24 + 1, 2**63, 2**64 - 1]), min_size=4, max_size=4),
)
def test_topk_means_of_any_values(
    divide_by: DivideBy, batches: list[list[float]], weights: list[int], library: CDLL
) -> None:
    """Sums that overflow, zeros that were sent, and weights that round, among them."""
    codec = replace(small_topk, divide_by=divide_by)
    assert_same_topk(codec, [torch.tensor(values) for values in batches], library, weights[: len(batches)])


@each_topk
@given(seed=st.integers(0, 2**32), elements=st.sampled_from([1, 3, 100, 4096, 4100, 5000]))
@settings(max_examples=15)
def test_topk_refuses_the_same_bytes(topk: TopKCodec, seed: int, elements: int, library: CDLL) -> None:
    """Flipped bits, random indices, and indices beyond the short chunk."""
    random = Random(seed)
    good = topk.encode(gaussian(elements, seed % 7))
    flipped = bytearray(good)
    for _ in range(random.randint(1, 3)):
        flipped[random.randrange(len(flipped))] ^= 1 << random.randrange(8)
    for bad in (bytes(flipped), random.randbytes(len(good)), good[:-1], good + b"\0", b"", b"\xff" * len(good)):
        assert_same_gathered(topk, [(1, bad), (1, good)], elements, library)
        assert_same_gathered(topk, [(1, good), (1, bad)], elements, library)


@pytest.mark.parametrize(("last", "refused"), [(902, False), (903, True), (904, True), (4095, True)])
def test_no_index_is_beyond_the_short_chunk(last: int, refused: bool, library: CDLL) -> None:
    """903 values behind a whole chunk: nothing is written there, for it is refused before."""
    topk = TopKCodec(1e-6, FloatCodec("fp32", torch.float32))
    payload = (4095 | last << 12).to_bytes(3, "little") + torch.ones(2).numpy().tobytes()
    made = assert_same_gathered(topk, [(1, payload)], 4096 + 903, library)
    assert all(isinstance(one, str) == refused for one in made)


@each_topk
def test_topk_views_that_begin_anywhere(topk: TopKCodec, library: CDLL) -> None:
    buffer = gaussian(3 * 4096)
    payload = encoded(topk, buffer[1:9001], library)
    assert isinstance(payload, bytes)
    eager = gathered(topk, [(3, payload)], 9000)
    kernels.install(library)
    fills = (lambda out: topk.decode_into(payload, out), lambda out: topk.mean_into([(3, payload)], out))
    for fill, expected in zip(fills, (eager.decoded, eager.mean), strict=True):
        target = torch.full((3 * 4096,), 7.0)
        fill(target[1:9001])
        assert target[1:9001].numpy().tobytes() == expected
        assert target[0] == 7.0
        assert torch.all(target[9001:] == 7.0)


def test_threads_share_topk(library: CDLL) -> None:
    topk, batches = TOPK["two_bit"], [gaussian(50_000, seed) for seed in range(8)]
    expected = [topk.encode(values) for values in batches]
    kernels.install(library)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(topk.encode, batches * 2)) == expected * 2


def test_topk_chunks_too_large_for_a_kernel_are_not_asked_of_it(library: CDLL) -> None:
    kernels.install(library)
    assert kernels.has_topk(kernels.TopkShape(10_000, kernels.MAX_CHUNK, 5, 5))
    assert not kernels.has_topk(kernels.TopkShape(10_000, kernels.MAX_CHUNK + 1, 5, 5))


# ---------------------------------------------------------------- error feedback


@given(
    values=st.lists(st.tuples(any_fp32, any_fp32), min_size=1, max_size=70),
    decay=st.sampled_from([1.0, 0.95, 1 / 3, 0.0]),
    in_place=st.booleans(),
)
def test_a_residual_is_added_with_the_same_bits(
    values: list[tuple[float, float]], decay: float, in_place: bool, library: CDLL
) -> None:
    gradient, residual = torch.tensor(values).T.contiguous()
    expected = gradient + residual * decay
    for used in (None, library):
        kernels.install(used)
        source = gradient.clone()
        out = source if in_place else torch.empty_like(source)
        try:
            finite = with_residual(source, residual, decay, out)
        finally:
            kernels.install(None)
        assert out.numpy().tobytes() == expected.numpy().tobytes()
        assert finite == bool(expected.isfinite().all())
        assert in_place or torch.equal(source, gradient)


@pytest.mark.parametrize("last", [0.0, -0.0, 1e-45, -3.5, math.inf, -math.inf, math.nan, -math.nan])
@pytest.mark.parametrize("size", [1, 17, 5000])
def test_the_largest_value_is_the_same(last: float, size: int, library: CDLL) -> None:
    values = gaussian(size)
    values[-1] = last
    expected = magnitude(values)
    kernels.install(library)
    try:
        found = [magnitude(values), magnitude(values.double()), magnitude(values[-1:]), magnitude(torch.empty(0))]
    finally:
        kernels.install(None)
    assert repr(found) == repr([expected, expected, abs(values[-1].item()), 0.0])


@pytest.mark.parametrize(
    "codec", [*TOPK.values(), *CODECS[::4], FloatCodec("bf16", torch.bfloat16)], ids=lambda codec: codec.name
)
def test_what_is_left_over_has_the_bits_of_a_difference(codec: Codec, library: CDLL) -> None:
    (fragment,) = Layout.of([("weight", (3 * 4096 + 100,))], part_elements=4096).fragments
    target, before = gaussian(fragment.elements), gaussian(fragment.elements, 1)
    target[::5] = -0.0
    parts = [codec.encode(target[start:stop]) for start, stop in fragment.cuts.values()]
    sent = torch.cat([codec.decode(parts[part], fragment.size_of(part)) for part in fragment.cuts])
    expected = target - sent
    start, stop = fragment.part_bounds(2)
    for used in (None, library):
        kernels.install(used)
        for residual in (None, before):
            expected[start:stop] = 0.0 if residual is None else residual[start:stop]
            left = left_over(target.clone(), parts, fragment, [codec], lambda part: part != 2, residual)
            assert left.numpy().tobytes() == expected.numpy().tobytes()


# ---------------------------------------------------------------- having them, or not


@slow
def test_a_library_is_compiled_once(tmp_path: Path, library: CDLL) -> None:
    assert build.use_compiled("on", tmp_path) == "compiled codecs"
    made = list(tmp_path.iterdir())
    assert len(made) == 1
    stamp = made[0].stat().st_mtime_ns
    build.use_compiled("auto", tmp_path)
    assert [(path, path.stat().st_mtime_ns) for path in tmp_path.iterdir()] == [(made[0], stamp)]
    assert kernels.installed() is not None
    assert build.use_compiled("off") == "eager codecs"
    assert kernels.installed() is None


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert build.use_compiled("auto", tmp_path).startswith("eager codecs: no C compiler found")
    assert len(caplog.records) == 1
    assert kernels.installed() is None
    with pytest.raises(ConfigError, match="compile_codecs"):
        build.use_compiled("on", tmp_path)


def compiler(path: Path, lines: str) -> Path:
    """A program in the place of a compiler: a shell's `lines`."""
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return path


BROKEN = r"printf 'out of order \377\n' >&2; exit 1"
"""Its words are in no encoding."""


@pytest.fixture
def quick_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: CDLL) -> Path:
    """The last of the compilers tried, and the only one: it copies what another has made, and notes what it is told."""
    folder, name = tmp_path / "bin", build.COMPILERS[-1]
    folder.mkdir()
    copying = f'for word; do [ "$before" = -o ] && cp "{library._name}" "$word"; before=$word; done; exit 0'
    made = compiler(folder / name, f'echo "$@" >> "{tmp_path}/told"\n{copying}')
    monkeypatch.setattr(build, "COMPILERS", (name,))
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")
    return made


def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path / "cc", BROKEN)
    monkeypatch.setattr(build, "COMPILERS", ("cc",))
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert "out of order" in build.use_compiled("auto", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_behind_a_compiler_that_fails_the_next_is_tried(
    quick_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cc", "gcc"):
        compiler(quick_compiler.with_name(name), BROKEN)
    monkeypatch.setattr(build, "COMPILERS", ("cc", "gcc", quick_compiler.name))
    assert build.use_compiled("auto", tmp_path / "cache") == "compiled codecs"


def test_a_compiler_with_two_names_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cc").symlink_to(compiler(tmp_path / "gcc", f'echo "$@" >> "{tmp_path}/told"\n{BROKEN}'))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build, "COMPILERS", ("cc", "gcc"))
    build.use_compiled("auto", tmp_path / "cache")
    assert (tmp_path / "told").read_text().count("--version") == 1


@pytest.mark.parametrize("damaged", [b"", b"\x7fELF and no more", b"\0" * 10_000], ids=["empty", "short", "zeros"])
def test_a_damaged_library_is_made_anew(quick_compiler: Path, tmp_path: Path, damaged: bytes) -> None:
    build.use_compiled("on", tmp_path / "good")
    (good,) = (tmp_path / "good").iterdir()
    bad = tmp_path / "bad" / good.name  # what was loaded once is found by its path, whatever is there now
    bad.parent.mkdir(mode=0o700)
    bad.write_bytes(damaged)
    bad.chmod(0o700)
    assert build.use_compiled("on", bad.parent) == "compiled codecs"
    healed = bad.read_bytes() == good.read_bytes()
    assert healed


def test_a_library_is_on_the_disk_before_it_has_its_name(
    quick_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []

    def sync(path: Path) -> None:
        assert list((tmp_path / "cache").glob("*.so")) == []
        synced.append(path.name)

    monkeypatch.setattr(build, "sync_path", sync)
    build.use_compiled("on", tmp_path / "cache")
    assert synced == [path.name for path in (tmp_path / "cache").iterdir()]


def test_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert "XDG_CACHE_HOME" in build.use_compiled("auto")
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        build.use_compiled("on")


@pytest.mark.parametrize("known", [True, False])
def test_a_processor_that_cannot_be_told_from_others_is_not_compiled_for(
    known: bool, quick_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home directory may be shared with others."""
    monkeypatch.setattr(build, "CPUINFO", tmp_path / "cpuinfo")
    if known:
        build.CPUINFO.write_text("model name: one of many\n\n")
    build.use_compiled("on", tmp_path / "cache")
    assert ("-march=native" in (tmp_path / "told").read_text()) == known


def test_the_source_is_iso_c() -> None:
    found = next(filter(None, map(shutil.which, build.COMPILERS)), None)
    if found is None:
        pytest.skip("no C compiler")
    strict = [found, "-std=c11", "-pedantic-errors", "-fopenmp-simd", "-fsyntax-only", str(build.SOURCE)]
    run = subprocess.run(strict, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot compile" in build.use_compiled("auto", tmp_path / "file" / "cache")


@pytest.mark.parametrize("shared", ["cache", "library"])
def test_what_others_may_write_is_not_loaded(shared: str, quick_compiler: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    build.use_compiled("on", cache)
    (cache if shared == "cache" else next(cache.iterdir())).chmod(0o722)
    assert "can be written by others" in build.use_compiled("auto", cache)
    assert kernels.installed() is None


def test_nothing_is_compiled_where_others_may_write(quick_compiler: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    assert "can be written by others" in build.use_compiled("auto", tmp_path / "cache")
    assert not (tmp_path / "told").exists()


@pytest.mark.parametrize(
    ("right", "wrong", "codec"),
    [
        ("found.largest / 127", "found.largest * (1.0f / 127)", "int8"),
        pytest.param("return rintf(ratio)", "return floorf(ratio + 0.5f)", "int", marks=slow),
        pytest.param("weight * values[i]", "weight * 0.99999994f * values[i]", "int8", marks=slow),
        pytest.param("0x45D9F3B", "0x45D9F3D", "int8-stochastic", marks=slow),
        pytest.param("&& room-- > 0", "&& room-- >= 0", "topk", marks=slow),
        pytest.param("values[i] != 0 ? weight : 0", "weight", "topk", marks=slow),
        pytest.param("largest < 0x7F800000", "largest >= 0", "error feedback", marks=slow),
        pytest.param("memcpy(header, &scale, 4);", "float no = -scale; memcpy(header, &no, 4);", "", marks=slow),
    ],
)
def test_a_library_with_other_bits_is_not_used(
    right: str, wrong: str, codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: CDLL
) -> None:
    source = build.SOURCE.read_text()
    assert right in source
    changed = tmp_path / "kernels.c"
    changed.write_text(source.replace(right, wrong))
    monkeypatch.setattr(build, "SOURCE", changed)
    assert f"the compiled {codec}" in build.use_compiled("auto", tmp_path / "cache")
    assert kernels.installed() is None


@pytest.mark.parametrize("error", [PayloadError, OSError, ZeroDivisionError])
def test_a_library_that_refuses_what_it_made_is_not_used(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, library: CDLL
) -> None:
    def stepped(values: Tensor) -> list[bytes]:
        if kernels.installed() is not None:
            raise error("that is none of mine")
        return []

    monkeypatch.setattr(build, "_stepped", stepped)
    assert "the compiled outer step makes other bits" in build.use_compiled("auto")
    with pytest.raises(ConfigError, match="other bits"):
        build.use_compiled("on")


# ---------------------------------------------------------------- several peers in one process


def test_a_check_leaves_other_threads_alone(monkeypatch: pytest.MonkeyPatch, library: CDLL) -> None:
    """They may be encoding."""
    kernels.install(library)
    seen, here, stepped = [], [], build._stepped
    with ThreadPoolExecutor(1) as pool:

        def watched(values: Tensor) -> Sequence[bytes]:
            here.append(kernels.installed())
            seen.append(pool.submit(kernels.installed).result())
            return stepped(values)

        monkeypatch.setattr(build, "_stepped", watched)
        assert build.use_compiled("on") == "compiled codecs"
    assert seen == [library, library]
    assert here[0] is None
    assert here[1] is kernels.installed()


def test_threads_that_compile_at_once(library: CDLL) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(build.use_compiled, ["on"] * 8)) == ["compiled codecs"] * 8


def test_the_first_peer_decides(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, library: CDLL
) -> None:
    monkeypatch.setattr(build, "_used", None)
    calls, begin = [], threading.Barrier(4)

    def counted(mode: str) -> str:
        calls.append(mode)
        kernels.install(library)
        return build.COMPILED

    def asked(_: int) -> str:
        begin.wait(DEADLINE_S)
        return build.compiled_codecs("auto")

    monkeypatch.setattr(build, "use_compiled", counted)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(asked, range(4))) == [build.COMPILED] * 4
    assert calls == ["auto"]
    with caplog.at_level(logging.WARNING):
        assert build.compiled_codecs("off") == build.compiled_codecs("on") == build.COMPILED
    assert len(caplog.records) == 1
    assert kernels.installed() is library


def test_a_later_peer_cannot_have_what_the_first_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_used", None)
    assert build.compiled_codecs("off") == build.compiled_codecs("auto") == build.EAGER
    with pytest.raises(ConfigError, match="another peer of this process has eager codecs"):
        build.compiled_codecs("on")
    assert kernels.installed() is None


# ---------------------------------------------------------------- the outer step


@given(
    size=st.integers(0, 300),
    share=st.sampled_from([1.0, 0.25, 1 / 3]),
    momentum=st.floats(0, 0.99),
    lr=st.floats(0.01, 2),
    scale=st.sampled_from([1e-42, 1e-3, 1.0, 3e38]),
    in_place=st.booleans(),
)
def test_an_outer_step_has_the_same_bits(
    library: CDLL, size: int, share: float, momentum: float, lr: float, scale: float, in_place: bool
) -> None:
    anchor, slot, mean = torch.randn(3, size, generator=torch.Generator().manual_seed(size)).mul_(scale)
    optimizer = Nesterov(lr, momentum)
    kernels.install(None)
    expected = optimizer.step(FragmentState(anchor.clone(), {"momentum": slot.clone()}, 1), mean, share=share)
    kernels.install(library)
    try:
        state = FragmentState(anchor.clone(), {"momentum": slot.clone()}, 1)
        got = optimizer.step(state, mean, state if in_place else None, share)
    finally:
        kernels.install(None)
    finite = expected.anchor.isfinite() & expected.slots["momentum"].isfinite()
    for name, buffer in expected.buffers().items():
        assert torch.equal(got.buffers()[name][finite].view(torch.int32), buffer[finite].view(torch.int32))
