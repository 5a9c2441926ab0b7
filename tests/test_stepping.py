"""The outer step part by part gives the bits of one step over all, whatever comes when, and comes again."""

from __future__ import annotations

import random

import pytest
import torch

from diloco.compress import PayloadError, open_codec
from diloco.config.codec import CodecChoice
from diloco.outer.average import unpack
from diloco.outer.fragments import Layout
from diloco.outer.optimizers import Adam, DelayedNesterov, Nesterov, Sgd, Stepping, WarmUp
from diloco.outer.state import FragmentState, OuterOptimizer, OuterState

OPTIMIZERS = [
    Sgd(0.7),
    Nesterov(0.7, 0.9),
    DelayedNesterov(0.7, 0.9, 4, at_once=True),
    Adam(0.3, (0.9, 0.95), 0.1),
    WarmUp(Nesterov(0.7, 0.9), 2),
]
SHAPES = [("a.weight", (700, 1000)), ("b.weight", (900, 1000)), ("b.bias", (77,))]
"""Two groups of parameters, each with a last part that is shorter."""
LAYOUT = Layout.of(SHAPES, part_elements=2**16, groups=[["b.*"]])
CODECS = [open_codec(CodecChoice(name=name)) for name in ("int8", "fp16")]


def state(optimizer: OuterOptimizer) -> OuterState:
    generator = torch.Generator().manual_seed(1)
    fragment = optimizer.start(torch.randn(LAYOUT.fragments[0].elements, generator=generator), LAYOUT.fragments[0])
    slots = {name: slot + 0.01 for name, slot in fragment.slots.items()}
    return OuterState(3, (FragmentState(fragment.anchor, slots, 3, LAYOUT.fragments[0]),))


def means(seed: int) -> list[bytes]:
    fragment = LAYOUT.fragments[0]
    values = torch.randn(fragment.elements, generator=torch.Generator().manual_seed(seed))
    bounds = map(fragment.part_bounds, range(fragment.parts))
    return [CODECS[fragment.group_of(part)].encode(values[slice(*ends)]) for part, ends in enumerate(bounds)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
def test_the_bits_are_those_of_one_step(optimizer: OuterOptimizer) -> None:
    before, fragment, final, earlier = state(optimizer), LAYOUT.fragments[0], means(2), means(3)
    stepping = Stepping(before, fragment, CODECS, optimizer)
    parts = list(range(fragment.parts))
    random.Random(4).shuffle(parts)
    for part in parts[:20]:
        stepping.take(part, earlier[part])  # of owners that are gone: half of these parts come again
    for part in parts[10:-5]:
        stepping.take(part, final[part])
    stepping.average(final)
    after = stepping.outer(final)
    expected = optimizer.step(before.fragments[0], unpack(final, fragment, CODECS))
    assert after.steps == expected.steps
    assert list(after.buffers()) == list(expected.buffers())
    for name, buffer in expected.buffers().items():
        assert torch.equal(after.buffers()[name], buffer)
    assert (after.hashes, after.largest) == (expected.hashes, expected.largest)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
def test_not_ahead_the_bits_are_the_same_and_memory_too_if_it_may_be(optimizer: OuterOptimizer, in_place: bool) -> None:
    before, fragment, final = state(optimizer), LAYOUT.fragments[0], means(2)
    expected = optimizer.step(before.fragments[0], unpack(final, fragment, CODECS))
    kept = {name: buffer.clone() for name, buffer in before.fragments[0].buffers().items()}
    stepping = Stepping(before, fragment, CODECS, optimizer, ahead=False)
    for part in range(5):
        stepping.take(part, final[part])
    assert all(torch.equal(buffer, kept[name]) for name, buffer in before.fragments[0].buffers().items())
    stepping.average(final)
    after = stepping.outer(final, in_place)
    assert after.steps == expected.steps
    for name, buffer in before.fragments[0].buffers().items():
        assert torch.equal(after.buffers()[name], expected.buffers()[name])
        assert (after.buffers()[name].data_ptr() == buffer.data_ptr()) == in_place
        assert in_place or torch.equal(buffer, kept[name])
    assert (after.hashes, after.largest) == (expected.hashes, expected.largest)


def test_in_place_nothing_is_overwritten_when_one_part_is_no_mean() -> None:
    final, before = means(2), state(OPTIMIZERS[1])
    kept = {name: buffer.clone() for name, buffer in before.fragments[0].buffers().items()}
    stepping = Stepping(before, LAYOUT.fragments[0], CODECS, OPTIMIZERS[1], ahead=False)
    with pytest.raises(PayloadError):
        stepping.average([*final[:-1], b"no mean"])
    assert all(torch.equal(buffer, kept[name]) for name, buffer in before.fragments[0].buffers().items())


def test_a_share_of_a_step() -> None:
    optimizer, before, final = OPTIMIZERS[1], state(OPTIMIZERS[1]), means(2)
    stepping = Stepping(before, LAYOUT.fragments[0], CODECS, optimizer, share=0.25)
    stepping.average(final)
    after = stepping.outer(final)
    mean = unpack(final, LAYOUT.fragments[0], CODECS)
    assert torch.equal(after.anchor, optimizer.step(before.fragments[0], mean, share=0.25).anchor)
    assert not torch.equal(after.anchor, optimizer.step(before.fragments[0], mean).anchor)


def test_what_is_no_mean_is_refused_and_can_come_again() -> None:
    final = means(2)
    stepping = Stepping(state(OPTIMIZERS[1]), LAYOUT.fragments[0], CODECS, OPTIMIZERS[1])
    with pytest.raises(PayloadError):
        stepping.take(0, b"no mean")
    stepping.take(0, final[0])
    with pytest.raises(PayloadError):
        stepping.average([final[0], b"no mean", *final[2:]])
