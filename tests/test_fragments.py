"""The layout: every element in exactly one fragment and one part, the same on every peer."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from diloco.base.errors import ConfigError
from diloco.outer.fragments import Layout, Weights, named_parameters, read_fragment, write_fragment

SHAPE = st.lists(st.integers(1, 9), max_size=3).map(tuple)


@st.composite
def models(draw: st.DrawFn) -> tuple[list[tuple[str, tuple[int, ...]]], int]:
    """Names and shapes in model order, and how many layers there are."""
    layers = draw(st.integers(1, 6))
    named = [("embedding.weight", draw(SHAPE))]
    for i in range(layers):
        named += [(f"blocks.{i}.{leaf}", draw(SHAPE)) for leaf in ("attention.0.weight", "ffn.weight", "norm")]
    return [*named, ("norm.weight", draw(SHAPE)), ("head.weight", draw(SHAPE))], layers


@given(models(), st.data())
def test_every_element_exactly_once(model: tuple[list[tuple[str, tuple[int, ...]]], int], data: st.DataObject) -> None:
    named, layers = model
    fragments = data.draw(st.integers(1, layers))
    part_elements = data.draw(st.none() | st.integers(1, 50))
    layout = Layout.of(named, fragments, data.draw(st.sampled_from(["strided", "sequential"])), part_elements)

    entries = [(entry.name, entry.shape) for fragment in layout.fragments for entry in fragment.entries]
    assert sorted(entries) == sorted(named)
    for index, fragment in enumerate(layout.fragments):
        assert fragment.index == index
        covered = [element for e in fragment.entries for element in range(e.offset, e.offset + e.elements)]
        assert covered == list(range(fragment.elements))
        parts = [fragment.part_bounds(part) for part in range(fragment.parts)]
        assert [element for start, stop in parts for element in range(start, stop)] == covered
        assert all(stop - start == fragment.part_elements for start, stop in parts[:-1])


@given(models(), st.data())
def test_a_layer_stays_in_one_piece(model: tuple[list[tuple[str, tuple[int, ...]]], int], data: st.DataObject) -> None:
    named, layers = model
    fragments = data.draw(st.integers(1, layers))
    for order, expected in (("strided", lambda i: i % fragments), ("sequential", lambda i: i * fragments // layers)):
        homes = {e.name: f.index for f in Layout.of(named, fragments, order).fragments for e in f.entries}
        for i in range(layers):
            assert {homes[name] for name in homes if name.startswith(f"blocks.{i}.")} == {expected(i)}


def test_what_is_in_no_layer_balances_the_fragments() -> None:
    """The largest first: 30 to the smaller fragment, then 22, then 4. Inside a fragment the model's order stays."""
    named = [("norm", (4,)), ("blocks.0.w", (10,)), ("blocks.1.w", (12,)), ("embedding", (30,)), ("head", (22,))]
    first, second = Layout.of(named, 2).fragments
    assert [entry.name for entry in first.entries] == ["blocks.0.w", "embedding"]
    assert [entry.name for entry in second.entries] == ["norm", "blocks.1.w", "head"]
    assert (first.elements, second.elements) == (40, 38)


@pytest.mark.parametrize(
    ("elements", "part_elements", "parts"),
    [(1, 4096, 1), (64 * 4096, 4096, 64), (64 * 4096 + 1, 8192, 33), (10_000_000, 2**18, 39), (2**27, 2**20, 128)],
)
def test_part_size_when_none_is_given(elements: int, part_elements: int, parts: int) -> None:
    (fragment,) = Layout.of([("w", (elements,))]).fragments
    assert (fragment.part_elements, fragment.parts) == (part_elements, parts)


BASE = [("a.0.w", (2, 3)), ("a.1.w", (4,))]


@pytest.mark.parametrize(
    ("named", "options"),
    [
        ([("b.0.w", (2, 3)), ("a.1.w", (4,))], {}),
        ([("a.0.w", (3, 2)), ("a.1.w", (4,))], {}),
        ([("a.1.w", (4,)), ("a.0.w", (2, 3))], {}),
        (BASE, {"fragments": 2}),
        (BASE, {"part_elements": 1024}),
    ],
)
def test_digest_tells_models_apart(named: list[tuple[str, tuple[int, ...]]], options: dict[str, int]) -> None:
    assert Layout.of(named, **options).digest != Layout.of(BASE).digest


def test_digest_is_fixed() -> None:
    """Peers of different releases compare digests: a change here needs a new contract version."""
    text = b'[[1024, [["a.0.w", [2, 3]]]], [1024, [["a.1.w", [4]]]]]'
    for order in ("strided", "sequential"):  # the same with two layers in two fragments
        assert Layout.of(BASE, 2, order, 1024).digest == hashlib.sha256(text).hexdigest()


@pytest.mark.parametrize(
    ("named", "options", "cause"),
    [
        (BASE, {"fragments": 3}, "2 layers"),
        (BASE, {"fragments": 0}, "sync.fragments is 0"),
        ([("w", (3,))], {"fragments": 2}, "0 layers"),
        (BASE, {"order": "random"}, "'random'"),
        (BASE, {"part_elements": 0}, "part_elements is 0"),
        ([], {}, "no trainable"),
    ],
)
def test_refused(named: list[tuple[str, tuple[int, ...]]], options: dict[str, int | str], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        Layout.of(named, **options)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)


class Compiled(nn.Module):
    """Names as `torch.compile` makes them, without the 4 s that it takes to import."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def test_trainable_parameters_tied_ones_once() -> None:
    names = ["embedding.weight", "blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias"]
    model = Tied()
    assert list(named_parameters(model)) == names
    model.blocks[0] = Compiled(model.blocks[0])
    assert list(named_parameters(Compiled(model))) == names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_write_then_read(dtype: torch.dtype) -> None:
    model = Tied().to(dtype)
    with torch.no_grad():
        model.blocks[1].weight.set_(model.blocks[1].weight.t())  # not contiguous
    parameters = named_parameters(model)
    layout = Layout.of([(name, tuple(p.shape)) for name, p in parameters.items()], 2)
    for fragment in layout.fragments:
        before = read_fragment(parameters, fragment)
        expected = torch.cat([parameters[entry.name].detach().float().flatten() for entry in fragment.entries])
        assert before.dtype == torch.float32
        assert torch.equal(before, expected)

        flat = torch.arange(fragment.elements, dtype=torch.float32)
        write_fragment(parameters, fragment, flat)
        assert torch.equal(read_fragment(parameters, fragment), flat)
        assert torch.equal(before, expected)
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize("lanes", [1, 3])
def test_rounded_is_what_is_read_after_a_write(lanes: int) -> None:
    """One fragment has parameters of several dtypes; fp32 is not copied."""
    dtypes = {"a": torch.bfloat16, "b": torch.float32, "c": torch.float16, "d": torch.float64}
    parameters = {name: torch.empty(40, 33, dtype=dtype) for name, dtype in dtypes.items()}
    (whole,) = Layout.of([(name, (40, 33)) for name in dtypes], part_elements=1024).fragments
    flat = torch.randn(whole.elements, generator=torch.Generator().manual_seed(0))
    write_fragment(parameters, whole, flat)
    read = read_fragment(parameters, whole)
    assert not torch.equal(read, flat)
    for fragment in (whole.on_lane(lane, lanes) for lane in range(lanes + 1)):
        held, expected = (
            torch.cat([of[slice(*whole.place_of(part))] for part in fragment.cuts] or [torch.empty(0)])
            for of in (flat, read)
        )
        before = held.clone()
        assert torch.equal(Weights(parameters).rounded(fragment, held), expected)
        assert torch.equal(held, before)
        wide = Weights({name: value.to(torch.float32) for name, value in parameters.items()})
        assert wide.rounded(fragment, held) is held


def test_another_shape_is_not_broadcast() -> None:
    (fragment,) = Layout.of([("w", (3, 1))]).fragments
    with pytest.raises(AssertionError, match="w"):
        write_fragment({"w": torch.zeros(3, 3)}, fragment, torch.ones(3))
