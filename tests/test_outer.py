"""The outer optimizers against torch's own and against numbers on paper; the outer state, its digest and its copy."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from blake3 import blake3
from torch import Tensor

from diloco.base.errors import StateError
from diloco.config.contract import OuterSection
from diloco.outer.fragments import MIN_PART_ELEMENTS, Layout
from diloco.outer.optimizers import open_outer
from diloco.outer.state import (
    FragmentState,
    OuterOptimizer,
    OuterState,
    StateChunk,
    buffer_bytes,
    manifest_digest,
    part_bytes,
    places,
)

SECTIONS = {
    "sgd": OuterSection(optimizer="sgd", lr=0.7),
    "nesterov": OuterSection(optimizer="nesterov", lr=0.7, momentum=0.9),
    "delayed_nesterov": OuterSection(optimizer="delayed_nesterov", lr=0.7, momentum=0.9, buffer=2),
    "buffered_nesterov": OuterSection(optimizer="buffered_nesterov", lr=0.7, momentum=0.9, buffer=2),
    "adam": OuterSection(optimizer="adam", lr=0.3, betas=(0.9, 0.95), eps=0.1),
}
each_optimizer = pytest.mark.parametrize("name", SECTIONS)


def gaussians(elements: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(elements, generator=generator) for _ in range(count)]


def bits(state: FragmentState) -> list[list[int]]:
    return [buffer.view(torch.int32).tolist() for buffer in state.buffers().values()]


# ---------------------------------------------------------------- optimizers


def by_torch(name: str, parameter: Tensor) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam([parameter], lr=0.3, betas=(0.9, 0.95), eps=0.1)
    nesterov = name == "nesterov"
    return torch.optim.SGD([parameter], lr=0.7, momentum=0.9 if nesterov else 0.0, nesterov=nesterov)


@pytest.mark.parametrize("name", ["sgd", "nesterov", "adam"])
def test_fifty_steps_of_torch_s_optimizer(name: str) -> None:
    start, *means = gaussians(200, 51)
    optimizer = open_outer(SECTIONS[name])
    state = optimizer.start(start.clone())
    parameter = start.clone().requires_grad_()
    reference = by_torch(name, parameter)
    for mean in means:
        state = optimizer.step(state, mean)
        parameter.grad = mean.clone()
        reference.step()
        torch.testing.assert_close(state.anchor, parameter.detach(), rtol=1e-5, atol=1e-5)
    assert state.steps == 50
    assert tuple(state.slots) == optimizer.slot_names


def trajectory(section: OuterSection, steps: int) -> list[float]:
    """Weight 1.0, pseudo-gradient 2.0 at every step."""
    optimizer = open_outer(section)
    state = optimizer.start(torch.tensor([1.0]))
    anchors = []
    for _ in range(steps):
        state = optimizer.step(state, torch.tensor([2.0]))
        anchors.append(state.anchor.item())
    return anchors


def test_sgd_on_paper() -> None:
    assert trajectory(OuterSection(optimizer="sgd", lr=0.5), 3) == [0.0, -1.0, -2.0]


def test_nesterov_on_paper() -> None:
    """b = 2, 3, 3.5;  steps of 0.5 (2 + b / 2) = 1.5, 1.75, 1.875."""
    section = OuterSection(optimizer="nesterov", lr=0.5, momentum=0.5)
    assert trajectory(section, 3) == [-0.5, -2.25, -4.125]


def test_delayed_nesterov_on_paper() -> None:
    """Gradient 2, N = 2: steps of 0.5 · 1, then of 0.5 (1 + b / 2) with b = 2, then 3."""
    section = OuterSection(optimizer="delayed_nesterov", lr=0.5, momentum=0.5, buffer=2)
    assert trajectory(section, 4) == [0.5, -0.5, -1.0, -2.25]


def test_buffered_nesterov_on_paper() -> None:
    """Gradient 2, N = 2: nothing, then Nesterov's step of 0.5 (2 + b / 2) with b = 2, then 3."""
    section = OuterSection(optimizer="buffered_nesterov", lr=0.5, momentum=0.5, buffer=2)
    assert trajectory(section, 4) == [1.0, -0.5, -0.5, -2.25]


@pytest.mark.parametrize("name", ["delayed_nesterov", "buffered_nesterov"])
def test_a_buffer_of_one_is_nesterov(name: str) -> None:
    section = OuterSection(optimizer=name, lr=0.5, momentum=0.5, buffer=1)
    assert trajectory(section, 4) == trajectory(OuterSection(lr=0.5, momentum=0.5), 4)


def test_adam_on_paper() -> None:
    """A constant gradient has bias-corrected moments 2 and 4, so each step is 0.5 * 2 / (2 + 2)."""
    section = OuterSection(optimizer="adam", lr=0.5, betas=(0.5, 0.5), eps=2.0)
    assert trajectory(section, 3) == pytest.approx([0.75, 0.5, 0.25], abs=1e-6)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@each_optimizer
def test_bits_of_plain_numpy(name: str, threads: int) -> None:
    """Separately rounded fp32, whatever the vector width or the number of threads (100,003: no round number)."""
    start, *means = gaussians(100_003, 4)
    optimizer = open_outer(SECTIONS[name])
    state = optimizer.start(start)
    plain = {key: buffer.numpy().copy() for key, buffer in state.buffers().items()}
    for step, mean in enumerate(means, 1):
        state = optimizer.step(state, mean)
        in_numpy(name, plain, mean.numpy(), step)
        for key, buffer in state.buffers().items():
            assert buffer.numpy().tobytes() == plain[key].tobytes(), (key, step)


def in_numpy(name: str, state: dict[str, np.ndarray], g: np.ndarray, step: int) -> None:
    f = np.float32
    if name == "sgd":
        state["anchor"] = state["anchor"] - f(0.7) * g
    elif name == "nesterov":
        state["momentum"] = f(0.9) * state["momentum"] + g
        state["anchor"] = state["anchor"] - f(0.7) * (f(0.9) * state["momentum"] + g)
    elif name in ("delayed_nesterov", "buffered_nesterov"):
        fresh = f(0.5) * g
        accumulated = state["accumulated"] + fresh
        now = fresh if name == "delayed_nesterov" else f(0.0) * g
        if step % 2 == 0:
            state["momentum"] = f(0.9) * state["momentum"] + accumulated
            now = f(0.9) * state["momentum"] + (fresh if name == "delayed_nesterov" else accumulated)
            accumulated = f(0.0) * np.abs(g)
        state["accumulated"] = accumulated
        state["anchor"] = state["anchor"] - f(0.7) * now
    else:
        state["first_moment"] = f(0.9) * state["first_moment"] + f(1 - 0.9) * g
        state["second_moment"] = f(0.95) * state["second_moment"] + f(1 - 0.95) * (g * g)
        power1, power2 = 1.0, 1.0
        for _ in range(step):
            power1, power2 = power1 * 0.9, power2 * 0.95
        scale = np.sqrt(state["second_moment"]) / f(np.sqrt(1 - power2)) + f(0.1)
        state["anchor"] = state["anchor"] - (state["first_moment"] / scale) * f(0.3 / (1 - power1))


@each_optimizer
def test_a_step_writes_no_old_buffer(name: str) -> None:
    start, first, second = gaussians(50, 3)
    optimizer = open_outer(SECTIONS[name])
    state = optimizer.step(optimizer.start(start), first)
    before = bits(state)
    after = optimizer.step(state, second)
    assert bits(state) == before
    old = {buffer.data_ptr() for buffer in state.buffers().values()}
    assert not old & {buffer.data_ptr() for buffer in after.buffers().values()}


# ---------------------------------------------------------------- state


def two_fragments(name: str = "nesterov", elements: int = 40) -> tuple[OuterState, Layout, OuterOptimizer]:
    layout = Layout.of([("a.0.w", (elements,)), ("a.1.w", (30,))], 2)
    optimizer = open_outer(SECTIONS[name])
    means = gaussians(elements, 4)
    fragments = [optimizer.start(means[f.index][: f.elements].clone(), f) for f in layout.fragments]
    moved = optimizer.step(fragments[0], means[2])
    return OuterState(1, (moved, fragments[1])), layout, optimizer


def test_buffers_in_canonical_order() -> None:
    state, layout, optimizer = two_fragments()
    assert [name for name, _ in state.buffers()] == ["0/anchor", "0/momentum", "1/anchor", "1/momentum"]
    assert buffer_bytes(layout, optimizer) == {name: buffer.nbytes for name, buffer in state.buffers()}
    shuffled = FragmentState(state.fragments[0].anchor, {"z": torch.ones(1), "b": torch.ones(1)}, 0)
    assert list(shuffled.buffers()) == ["anchor", "b", "z"]


def test_replace_shares_the_other_fragments() -> None:
    state, _, optimizer = two_fragments()
    moved = optimizer.step(state.fragments[1], torch.ones(30))
    after = state.replace(1, moved, 2)
    assert after.version == 2
    assert after.fragments == (state.fragments[0], moved)
    assert state.fragments[1] is not moved


def test_digest_by_hand() -> None:
    anchor, momentum = torch.tensor([1.0, 2.0]), torch.tensor([0.0, -0.0])
    state = OuterState(7, (FragmentState(anchor, {"momentum": momentum}, 3),))
    hashes = [blake3(buffer.numpy().tobytes()).hexdigest() for buffer in (anchor, momentum)]
    text = f"steps 3\n0/anchor 0 {hashes[0]}\n0/momentum 0 {hashes[1]}"
    assert state.digest == hashlib.sha256(text.encode()).hexdigest()


def test_digest_sees_every_bit() -> None:
    state, _, _ = two_fragments()
    moved, other = state.fragments
    flipped = moved.anchor.clone()
    flipped.view(torch.int32)[39] ^= 1
    negative_zero = {"momentum": -other.slots["momentum"]}
    variants = [
        OuterState(1, (FragmentState(flipped, moved.slots, moved.steps), other)),
        OuterState(1, (FragmentState(moved.anchor, moved.slots, 2), other)),
        OuterState(1, (moved, FragmentState(other.anchor, negative_zero, other.steps))),
        OuterState(1, (moved,)),
    ]
    assert len({state.digest, *(variant.digest for variant in variants)}) == 5


def test_digest_is_the_same_for_the_same_bits() -> None:
    state, _, _ = two_fragments()
    copies = [
        FragmentState(f.anchor.clone(), {name: slot.clone() for name, slot in f.slots.items()}, f.steps)
        for f in state.fragments
    ]
    assert OuterState(1, tuple(copies)).digest == state.digest


def test_chunks_cover_every_buffer() -> None:
    state, layout, optimizer = two_fragments(elements=MIN_PART_ELEMENTS + 5)
    manifest = state.manifest()
    assert [(chunk.buffer, chunk.part) for chunk in manifest] == places(layout, optimizer)
    assert [(chunk.buffer, chunk.part) for chunk in manifest[:3]] == [
        ("0/anchor", 0),
        ("0/anchor", 1),
        ("0/momentum", 0),
    ]
    for name, buffer in state.buffers():
        data = [state.chunk(chunk) for chunk in manifest if chunk.buffer == name]
        assert b"".join(data) == buffer.numpy().tobytes()
        assert [len(piece) for piece in data] == [part_bytes(layout, name, part) for part in range(len(data))]
    assert all(blake3(state.chunk(chunk)).hexdigest() == chunk.digest for chunk in manifest)
    assert manifest_digest(manifest, [1, 0]) == state.digest != manifest_digest(manifest, [1, 1])


@pytest.mark.parametrize("place", [("2/anchor", 0), ("0/anchor", 1), ("0/anchor", -1), ("0/what", 0), ("", 0)])
def test_no_such_chunk(place: tuple[str, int]) -> None:
    state, _, _ = two_fragments()
    with pytest.raises(ValueError, match="no part"):
        state.chunk(StateChunk(*place, ""))


@each_optimizer
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_copy_goes_on_with_the_same_bits(name: str, kind: type) -> None:
    state, layout, optimizer = two_fragments(name)
    buffers = {key: kind(buffer.numpy().tobytes()) for key, buffer in state.buffers()}
    copy = OuterState.assemble(1, [1, 0], buffers, layout, optimizer)
    assert copy.digest == state.digest
    mean = gaussians(40, 1)[0]
    steps = [optimizer.step(which.fragments[0], mean) for which in (state, copy)]
    assert bits(steps[0]) == bits(steps[1])


def damaged(case: str, buffers: dict[str, bytes]) -> dict[str, bytes]:
    match case:
        case "missing":
            return {name: data for name, data in buffers.items() if name != "1/momentum"}
        case "unknown":
            return {**buffers, "../../etc/passwd": b""}
        case "short":
            return {**buffers, "0/anchor": buffers["0/anchor"][:-4]}
        case "long":
            return {**buffers, "0/anchor": buffers["0/anchor"] + bytes(4)}
    raise AssertionError(case)


@pytest.mark.parametrize("case", ["missing", "unknown", "short", "long"])
def test_copy_that_does_not_fit(case: str) -> None:
    state, layout, optimizer = two_fragments()
    buffers = {key: buffer.numpy().tobytes() for key, buffer in state.buffers()}
    with pytest.raises(StateError, match="does not fit"):
        OuterState.assemble(1, [1, 0], damaged(case, buffers), layout, optimizer)


@pytest.mark.parametrize("steps", [[1], [1, 0, 0], [1, -1], []])
def test_copy_with_wrong_steps(steps: list[int]) -> None:
    state, layout, optimizer = two_fragments()
    buffers = {key: buffer.numpy().tobytes() for key, buffer in state.buffers()}
    with pytest.raises(StateError, match="does not fit"):
        OuterState.assemble(1, steps, buffers, layout, optimizer)


def test_warm_up_averages_plainly_and_then_begins_afresh() -> None:
    """Weights 1.0, gradient 2: two plain steps, then the first Nesterov step as if there had been none before."""
    optimizer = open_outer(OuterSection(lr=0.5, momentum=0.9, warmup_steps=2))
    state = optimizer.start(torch.ones(3))
    for expected in (-1.0, -3.0):
        state = optimizer.step(state, torch.full((3,), 2.0))
        assert state.anchor.tolist() == [expected] * 3
        assert state.slots["momentum"].tolist() == [0.0] * 3
    state = optimizer.step(state, torch.full((3,), 2.0))
    assert state.steps == 3
    torch.testing.assert_close(state.anchor, torch.full((3,), -3.0 - 0.5 * (2.0 + 0.9 * 2.0)))
    assert state.slots["momentum"].tolist() == [2.0] * 3


def test_warm_up_leaves_adams_bias_correction_alone() -> None:
    section = OuterSection(optimizer="adam", lr=0.1)
    plain, warmed = open_outer(section), open_outer(section.model_copy(update={"warmup_steps": 4}))
    late = plain.start(torch.zeros(3))
    state = warmed.start(torch.zeros(3))
    for _ in range(4):
        state = warmed.step(state, torch.zeros(3))
    for gradient in (1.0, -2.0, 0.5):
        late, state = (each.step(of, torch.full((3,), gradient)) for each, of in ((plain, late), (warmed, state)))
        assert torch.equal(late.anchor, state.anchor)
