"""Torch's default dtype and device, which a user's own script may set: no bit of a run hangs on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from ctypes import CDLL

import pytest
import torch
from torch import Tensor

from diloco.base.errors import ConfigError
from diloco.base.memory import MIN_BYTES, empty_as, floats
from diloco.compress import Codec, kernels, open_codec
from diloco.compress.extra import dct
from diloco.config.codec import CodecSection
from diloco.island import Island
from diloco.island.slices import Pieces, Slice
from diloco.kernels import build
from diloco.outer.average import Terms, fold, mean_into, unpack
from diloco.outer.fragments import Layout
from diloco.outer.optimizers import Nesterov, Stepping
from diloco.outer.pseudograd import aligned
from diloco.outer.robust import ROBUST, Rule
from diloco.outer.state import FragmentState, OuterState
from tests.local import LocalWorld

DTYPES = [torch.float64, torch.bfloat16]
KINDS = [
    *({"name": name} for name in ("fp32", "fp16", "bf16", "int8", "int4", "e3m0", "two_bit", "sign", "lowrank")),
    *({"name": name, "rounding": "stochastic"} for name in ("int8", "int4", "e3m0")),
    *({"name": name, "scale": "statistical"} for name in ("int8", "int4")),
    *({"name": name, "values": values} for name in ("topk", "dct") for values in ("fp16", "int8", "two_bit")),
    {"name": "topk", "mean": "all"},
]
ELEMENTS = 5000


def codec_of(kind: dict[str, str]) -> Codec:
    return open_codec(CodecSection.model_validate({**kind, "zstd": False}))


CODECS = {"-".join(kind.values()): codec_of(kind) for kind in KINDS}
each_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


@pytest.fixture
def values() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, ELEMENTS, generator=generator, dtype=torch.float32, device="cpu")


@pytest.fixture(params=["eager", "compiled"])
def library(request: pytest.FixtureRequest) -> Iterator[CDLL | None]:
    found = None
    if request.param == "compiled":
        try:
            build.use_compiled("on")
        except ConfigError as error:
            pytest.skip(str(error))
        found = kernels.installed()
    yield found
    kernels.install(None)


@pytest.fixture(params=[*DTYPES, "meta"], ids=str)
def changed(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """Makes another dtype the default, or another device, until the end of the test."""
    dct._basis.cache_clear()  # it could have been made before
    before = torch.get_default_dtype()
    change = torch.set_default_device if request.param == "meta" else torch.set_default_dtype
    yield lambda: change(request.param)
    torch.set_default_dtype(before)
    torch.set_default_device(None)
    dct._basis.cache_clear()


def alike(work: Callable[[], object], changed: Callable[[], None]) -> None:
    expected = work()
    dct._basis.cache_clear()
    changed()
    assert work() == expected


def raw(tensor: Tensor) -> bytes:
    assert tensor.dtype == torch.float32
    return tensor.numpy().tobytes()


# ---------------------------------------------------------------- the parts of a round


@each_codec
def test_codecs_make_the_same_bytes(
    codec: Codec, values: Tensor, library: CDLL | None, changed: Callable[[], None]
) -> None:
    def made() -> list[bytes]:
        payloads = [codec.encode(one) for one in values]
        total, mean = values[0].clone(), torch.empty_like(values[0])
        codec.fold(payloads[1], 3.0, total)
        codec.mean_into([(3, payloads[0]), (4, payloads[1])], mean)
        return [*payloads, raw(codec.decode(payloads[0], ELEMENTS)), raw(total), raw(mean)]

    alike(made, changed)


@pytest.mark.parametrize(
    ("codec", "rule"),
    [
        pytest.param(codec, rule, id=f"{name}-{rule}")
        for name, codec in CODECS.items()
        for rule in (("mean",) if codec.gathered else ("mean", "radial", *ROBUST))  # a bundle is no radial mean
    ],
)
def test_means_are_the_same_bytes(codec: Codec, rule: Rule, values: Tensor, changed: Callable[[], None]) -> None:
    payloads: Terms = [(weight, codec.encode(one)) for weight, one in zip((3, 5, 7), values, strict=True)]

    def made() -> tuple[bytes, bytes]:
        mean = fold(payloads, ELEMENTS, codec, max_norm_ratio=10.0, rule=rule)
        out = torch.empty_like(values[0])
        mean_into(mean, codec, out)
        return mean, raw(out)

    alike(made, changed)


def test_the_outer_step_has_the_same_bits(values: Tensor, changed: Callable[[], None]) -> None:
    codec, optimizer = codec_of({"name": "int8"}), Nesterov(0.7, 0.9)
    layout = Layout.of([("w", (ELEMENTS,))], part_elements=1024)
    (fragment,) = layout.fragments
    parts = [codec.encode(values[0][start:stop]) for start, stop in fragment.cuts.values()]

    def stepped() -> list[bytes]:
        state = OuterState(0, (FragmentState(values[1].clone(), {"momentum": values[2].clone()}, 1),))
        made = []
        for ahead in (True, False):
            stepping = Stepping(state, fragment, [codec], optimizer, ahead=ahead)
            stepping.average(parts)
            after = stepping.outer(parts)
            made += [raw(buffer) for buffer in after.buffers().values()]
        return [*made, raw(unpack(parts, fragment, [codec])), raw(aligned(values[0], values[1], fragment, 2.0))]

    alike(stepped, changed)


def test_memory_is_on_the_host(values: Tensor, changed: Callable[[], None]) -> None:
    def made() -> list[object]:
        large = empty_as(values.new_zeros(MIN_BYTES))  # fp32
        box = Slice.whole("w", values[0])
        halves = [Slice.of("w", [ELEMENTS], [at], values[0][at : at + 2500]) for at in (0, 2500)]
        whole = Pieces.of(halves)["w"]
        some = [floats(9), large, box.local, whole]
        return [(one.dtype, one.device, one.shape) for one in some] + [raw(whole)]

    alike(made, changed)


def test_an_island_of_one_says_the_same(changed: Callable[[], None]) -> None:
    island = Island(0, 1, torch.device("cpu"))
    alike(lambda: (island.all(True), island.all(False), island.mean(0.1)), changed)


def test_compiled_codecs_pass_their_check(library: CDLL | None, changed: Callable[[], None]) -> None:
    changed()
    if library is not None:
        assert build.use_compiled("on") == build.COMPILED


# ---------------------------------------------------------------- a whole round


def two_rounds(codec: dict[str, object]) -> set[str]:
    """Two peers, two versions: digests of their states."""
    world = LocalWorld(2, codec=codec)
    try:
        world.rounds(world.peers, 2)
        return world.settle(world.peers)
    finally:
        world.close()


@pytest.mark.parametrize(
    "codec",
    [{"name": "int8"}, {"name": "topk", "density": 0.1, "error_feedback": 0.5}, {"name": "lowrank", "rank": 2}],
    ids=lambda codec: codec["name"],
)
def test_a_round_makes_the_same_state(
    codec: dict[str, object], changed: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All threads have the default device, which torch keeps by thread; the models have a dtype and a device."""
    run = threading.Thread.run

    def with_defaults(self: threading.Thread) -> None:
        changed()
        run(self)

    expected = two_rounds(codec)
    assert len(expected) == 1
    monkeypatch.setattr(threading.Thread, "run", with_defaults)
    assert two_rounds(codec) == expected
