"""Parameters that hold less than fp32: their anchor is exact, and what rounding does to them is no progress."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from diloco.base.turns import Turns
from diloco.base.types import Counted, Omitted
from diloco.compress import open_codec
from diloco.config.codec import CodecSection
from diloco.config.contract import OuterSection
from diloco.outer.fragments import Fragment, Layout, Weights
from diloco.outer.line import Line, PendingContribution, Weighing, keep_local, weights_at_anchor
from diloco.outer.merge import open_merge
from diloco.outer.optimizers import open_outer
from diloco.outer.state import OuterState
from tests.gossips import World
from tests.lines import adopt_state, drop_progress, measured, step_outer, take_back
from tests.local import LocalPeer, LocalWorld
from tests.test_schedule import close, commit_of

NARROW = [torch.bfloat16, torch.float16]
SHAPES = [("a", (3000,)), ("b", (50, 60))]
FP32 = {"name": "fp32", "zstd": False}


def line_of(
    name: str, dtype: torch.dtype, outer: OuterSection | None = None, merge: str = "carry", **settings: object
) -> Line:
    """`a` is of this dtype and `b` of fp32; the anchor is nothing that `a` can hold."""
    layout, optimizer = Layout.of(SHAPES, part_elements=1024), open_outer(outer or OuterSection(lr=0.4))
    fragment = layout.fragments[0]
    state = OuterState(0, (optimizer.start(torch.linspace(1, 2, fragment.elements), fragment),))
    weights = Weights({"a": torch.empty(3000, dtype=dtype), "b": torch.empty(50, 60)})
    weights.write(fragment, state.fragments[0].anchor)
    return Line(
        name,
        weights,
        layout,
        [open_codec(CodecSection(name="fp32", zstd=False))],
        optimizer,
        Weighing(),
        Turns(),
        state,
        commit_of(0, counted=tuple(Counted(each, 0, 0, 1, 0, 0) for each in "xy")),
        merge=open_merge(merge, 0.5),
        boot=0,
        **settings,  # type: ignore[arg-type]
    )


def fragment_of(line: Line) -> Fragment:
    return line.layout.fragments[0]


def local_of(line: Line) -> Tensor:
    return line.weights.read(fragment_of(line))


def held(line: Line) -> Tensor:
    """The anchor, as the parameters hold it."""
    anchor = line.state.fragments[0].anchor.clone()
    anchor[:3000] = anchor[:3000].to(line.parameters["a"].dtype)
    return anchor


def gradient(line: Line, sent: PendingContribution) -> Tensor:
    """The contribution that was sent, decoded."""
    cuts, parts = fragment_of(line).cuts, sent.contribution.parts
    return torch.cat([line.codecs[0].decode(parts[part], stop - start) for part, (start, stop) in cuts.items()])


def ulps(line: Line, count: float) -> Tensor:
    """So many steps from one value of `a` to the next, of 1.0."""
    return torch.full((fragment_of(line).elements,), count * torch.finfo(line.parameters["a"].dtype).eps)


def train(line: Line, count: float) -> None:
    line.weights.write(fragment_of(line), local_of(line) + ulps(line, count))


def close_without(line: Line, other: Line, count: float) -> None:
    """A version that counts only the other, which has trained."""
    train(other, count)
    other.sent = measured(other)
    closed = close([other], [other.sent])
    step_outer(other, closed)
    step_outer(line, closed)


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
def test_outer_steps_smaller_than_what_weights_can_hold_add_up(dtype: torch.dtype) -> None:
    """One of two peers trains a step of bf16 in every round and the other nothing; at outer SGD of rate 1 the anchor
    moves by half of it."""
    world = LocalWorld(2, dtype=dtype, codec=FP32, outer={"optimizer": "sgd", "lr": 1.0})
    step = torch.finfo(torch.bfloat16).eps

    def train(peer: LocalPeer) -> None:
        with torch.no_grad():
            peer.model.weight.add_(1.0 if peer.version == 0 else step if peer.name == "p0" else 0.0)
        peer.life.trained(10, 0, 0.001, None)

    for peer in world.peers:
        peer.inner_step = lambda peer=peer: train(peer)  # type: ignore[method-assign, misc]
    try:
        world.rounds(world.peers, 9)
        assert len(world.settle(world.peers)) == 1
        for peer in world.peers:
            anchor = peer.peer.line.state.fragments[0].anchor
            assert torch.equal(anchor, torch.full_like(anchor, 1 + 8 * step / 2))
            assert torch.equal(peer.model.weight.flatten().float(), anchor.to(dtype).float())
    finally:
        world.close()


def test_gossip_keeps_what_weights_cannot_hold() -> None:
    """One peer alone trains a step of its dtype between two swaps with itself, at an outer rate of a quarter."""
    world = World(True, 1, dtype=torch.bfloat16, outer={"lr": 0.25, "momentum": 0.0})
    (peer,) = world.peers
    step, start = torch.finfo(torch.bfloat16).eps, peer.anchor.clone()
    try:
        for count in range(1, 9):
            with torch.no_grad():
                peer.model.weight.add_(step)
            peer.peer.trained(10, 0.001)
            peer.peer.between_steps()
            assert peer.version == count
            assert torch.equal(peer.anchor, start + count * step / 4)
            assert torch.equal(peer.local, peer.anchor.to(torch.bfloat16).float())
    finally:
        world.close()


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("dtype", NARROW)
def test_weights_without_progress_have_no_pseudo_gradient(dtype: torch.dtype, overlaps: bool) -> None:
    line, other = line_of("x", dtype), line_of("y", dtype)

    def nothing() -> None:
        sent = measured(line, overlaps=overlaps)
        assert not gradient(line, sent).any()
        assert torch.equal(local_of(line), held(line))
        assert not torch.equal(held(line), line.state.fragments[0].anchor)

    nothing()
    close_without(line, other, 3.0)
    nothing()
    train(line, 5.0)
    line.sent = measured(line, overlaps=overlaps)
    step_outer(line, close([line], [line.sent]))
    nothing()
    train(line, 5.0)
    with weights_at_anchor(line):
        assert torch.equal(local_of(line), held(line))
    drop_progress(line)
    nothing()
    adopt_state(line, other.state, None)
    nothing()


@pytest.mark.parametrize("merge", ["carry", "eager"])
@pytest.mark.parametrize("dtype", NARROW)
def test_progress_is_the_same_on_a_new_anchor(dtype: torch.dtype, merge: str) -> None:
    """Progress that was made while a contribution was on its way is the next one, where the sum can hold it."""
    lines = [line_of(name, dtype, merge=merge) for name in "xy"]
    for count, line in enumerate(lines, 1):
        train(line, 4.0 * count)
        line.sent = measured(line)
    closed = close(lines, [line.sent for line in lines if line.sent])
    for line in lines:
        train(line, 16.0)
        step_outer(line, closed)
        assert torch.equal(local_of(line)[:3000], (held(line) + ulps(line, 16.0))[:3000])
        progress = gradient(line, measured(line))
        assert torch.equal(progress[:3000], -ulps(line, 16.0)[:3000])
        torch.testing.assert_close(progress, -ulps(line, 16.0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("omitted", [False, True])
@pytest.mark.parametrize("dtype", NARROW)
def test_what_is_not_counted_stays_progress(dtype: torch.dtype, omitted: bool) -> None:
    """By the version, or by the mean of one part."""
    line, other = line_of("x", dtype), line_of("y", dtype)
    train(line, 8.0)
    train(other, 2.5)
    line.sent, other.sent = measured(line), measured(other)
    both = close([line, other], [line.sent, other.sent])
    alone = close([other], [other.sent])
    if omitted:
        only = replace(both.commit, omitted=(Omitted("x", 0, 1),))
        alone = replace(both, commit=only)
    step_outer(line, alone)
    progress, part = gradient(line, measured(line)), slice(0, 1024) if omitted else slice(0, 2000)
    assert torch.equal(progress[part], -ulps(line, 8.0)[part])
    assert bool(progress[1024:].any()) is not omitted


@pytest.mark.parametrize("dtype", NARROW)
def test_what_eager_foresaw_is_taken_back_without_a_trace(dtype: torch.dtype) -> None:
    line = line_of("x", dtype, merge="eager")
    train(line, 8.0)
    trained = local_of(line)
    line.sent = measured(line)
    assert not torch.equal(local_of(line), trained)
    take_back(line)
    assert torch.equal(local_of(line)[:3000], trained[:3000])
    torch.testing.assert_close(local_of(line), trained)


@pytest.mark.parametrize("dtype", NARROW)
def test_what_was_sent_stays_sent_on_a_copied_state(dtype: torch.dtype) -> None:
    line, other = line_of("x", dtype), line_of("y", dtype)
    wrong = replace(other.state.fragments[0], anchor=other.state.fragments[0].anchor + ulps(line, 3.3))
    train(line, 8.0)
    line.sent = measured(line)
    keep_local(line)
    adopt_state(line, other.state.replace(0, wrong, 0), line.commit)
    assert line.sent is not None
    assert line.sent.local is not None
    assert torch.equal(line.sent.local, local_of(line))
    assert torch.equal(line.sent.base_if_skipped, held(line))
