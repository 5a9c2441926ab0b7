"""The outer state and the outer optimizers.

Every peer computes the outer step for itself and must get the same bits on any CPU: fp32 on the host, each
operation rounded on its own, element by element. So no `add_(alpha=...)`, `addcmul` or `lerp` (fused multiply-add
on some CPUs), no sum over elements, no `torch.sqrt` (MKL's, where torch has MKL: one bit off in 0.7 % of elements),
and scalars from IEEE operations only (no `pow`, which differs between C libraries). `torch.set_flush_denormal` must
be off, as it is by default.

A step makes new buffers, and a snapshot for a joiner or a checkpoint is a reference: that costs one fragment's anchor
and slots twice, while the step runs and for as long as somebody reads the old ones. Or it overwrites the old ones, when
nobody does (`diloco.round.Line.spare`).
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import repeat
from operator import mul

import numpy as np
import torch
from torch import Tensor

from diloco.base.errors import StateError
from diloco.base.hashing import content_hash
from diloco.base.memory import empty_as
from diloco.compress import kernels
from diloco.compress.codec import magnitude
from diloco.config.contract import OuterSection
from diloco.outer.fragments import Fragment, Layout

ELEMENT_BYTES = torch.float32.itemsize
TILE_ELEMENTS = 2**17
"""512 KiB of fp32: temporaries of this size stay in a core's cache and in the allocator. Whole ones are as large as the
fragment, and the kernel hands out, and clears, each of their pages: half of the time of an outer step."""


@dataclass(frozen=True, eq=False)
class FragmentState:
    """One fragment: flat fp32 host tensors of the fragment's length."""

    anchor: Tensor
    slots: Mapping[str, Tensor]
    """The outer optimizer's own buffers by name."""
    steps: int
    """Outer steps taken."""
    fragment: Fragment | None = None
    """Whose parts are hashed, and sent to a joiner, one by one; None: all is one part."""

    def buffers(self) -> dict[str, Tensor]:
        """The anchor, then the slots by name."""
        return {"anchor": self.anchor, **{name: self.slots[name] for name in sorted(self.slots)}}

    @property
    def cuts(self) -> Mapping[int, tuple[int, int]]:
        """Bounds, in elements, of the parts that are held here."""
        return self.fragment.cuts if self.fragment is not None else {0: (0, self.anchor.numel())}

    @cached_property
    def hashes(self) -> dict[str, list[str]]:
        """Hash of each part of each buffer. Kept here so that a version rehashes only the fragment it moved.

        Where several ranks hold the parts, they must have been told (`keep_hashes`).
        """
        assert self.fragment is None or self.fragment.lanes == 1
        return {name: list(hashes.values()) for name, hashes in self.own_hashes.items()}

    @cached_property
    def own_hashes(self) -> dict[str, dict[int, str]]:
        """Of the parts that are held here, by number."""
        return {
            name: {part: part_hash(buffer, *bounds) for part, bounds in self.cuts.items()}
            for name, buffer in self.buffers().items()
        }

    @cached_property
    def largest(self) -> float:
        """The largest absolute value of the anchor, as `magnitude` has it."""
        return magnitude(self.anchor)

    def keep(self, own_hashes: dict[str, dict[int, str]], largest: float) -> None:
        """Take what was found out while the buffers were filled, and still in a cache."""
        vars(self).update(own_hashes=own_hashes, largest=largest)

    def keep_hashes(self, hashes: dict[str, list[str]]) -> None:
        """Take `hashes` from those who hold the parts."""
        vars(self)["hashes"] = hashes

    def unfilled(self) -> FragmentState:
        """Buffers of the same sizes that hold nothing yet."""
        slots = {name: empty_as(slot) for name, slot in self.slots.items()}
        return FragmentState(empty_as(self.anchor), slots, self.steps, self.fragment)

    def part(self, start: int, stop: int) -> FragmentState:
        """A view of the elements from `start` to `stop`."""
        return FragmentState(
            self.anchor[start:stop], {name: slot[start:stop] for name, slot in self.slots.items()}, self.steps
        )


@dataclass(frozen=True, slots=True)
class StateChunk:
    """A line of the manifest."""

    buffer: str
    part: int
    digest: str
    """`content_hash`, hexadecimal."""


@dataclass(frozen=True, eq=False)
class OuterState:
    """Anchor and outer optimizer state of the whole model at one version: all that a joiner must copy."""

    version: int
    fragments: tuple[FragmentState, ...]

    def replace(self, index: int, state: FragmentState, version: int) -> OuterState:
        """This state with one fragment exchanged; the others are shared."""
        return OuterState(version, (*self.fragments[:index], state, *self.fragments[index + 1 :]))

    def buffers(self) -> list[tuple[str, Tensor]]:
        """All buffers by name ("0/anchor", "0/momentum", "1/anchor", ...) in canonical order."""
        return [
            (f"{index}/{name}", buffer)
            for index, fragment in enumerate(self.fragments)
            for name, buffer in fragment.buffers().items()
        ]

    def manifest(self) -> tuple[StateChunk, ...]:
        """Every part of every buffer, in order, with its hash."""
        hashes = [hashes for fragment in self.fragments for hashes in fragment.hashes.values()]
        return tuple(
            StateChunk(name, part, digest)
            for (name, _), of_buffer in zip(self.buffers(), hashes, strict=True)
            for part, digest in enumerate(of_buffer)
        )

    @cached_property
    def digest(self) -> str:
        """`manifest_digest` of this state (`Commit.state_digest`)."""
        return manifest_digest(self.manifest(), [fragment.steps for fragment in self.fragments])

    def chunk(self, entry: StateChunk) -> bytes:
        """The bytes of one part of a buffer. Raises ValueError when it is not held here."""
        index, _, name = entry.buffer.partition("/")
        fragment = self.fragments[int(index)] if index.isdecimal() and int(index) < len(self.fragments) else None
        buffer = fragment.buffers().get(name) if fragment is not None else None
        if fragment is None or buffer is None or entry.part not in fragment.cuts:
            raise ValueError(f"no part {entry.part} of a buffer {entry.buffer!r}"[:200])
        start, stop = fragment.cuts[entry.part]
        return bytes(memory_of(buffer[start:stop]))

    @staticmethod
    def assemble(
        version: int,
        steps: Sequence[int],
        buffers: Mapping[str, bytes | bytearray],
        layout: Layout,
        optimizer: OuterOptimizer,
    ) -> OuterState:
        """The state whose `buffers()` have these bytes. A bytearray is taken over, not copied.

        `steps`: outer steps of each fragment. Raises StateError unless names and sizes are what layout and
        optimizer call for; whether the content is right, `digest` tells.
        """
        expected = buffer_bytes(layout, optimizer)
        got = {name: len(data) for name, data in buffers.items()}
        if got != expected or len(steps) != len(layout.fragments) or min(steps) < 0:
            raise StateError("the outer state received does not fit the model", "is it from a run of this contract?")
        tensors = {name: _tensor(data) for name, data in buffers.items()}
        return OuterState(
            version,
            tuple(
                FragmentState(
                    tensors[f"{fragment.index}/anchor"],
                    {name: tensors[f"{fragment.index}/{name}"] for name in optimizer.slot_names},
                    count,
                    fragment,
                )
                for fragment, count in zip(layout.fragments, steps, strict=True)
            ),
        )


def tiles(elements: int) -> Iterator[slice]:
    """A flat buffer piece by piece."""
    return (slice(start, min(start + TILE_ELEMENTS, elements)) for start in range(0, elements, TILE_ELEMENTS))


def buffer_bytes(layout: Layout, optimizer: OuterOptimizer) -> dict[str, int]:
    """Name and size in bytes of every buffer of an outer state, in canonical order."""
    return {
        f"{fragment.index}/{name}": fragment.elements * ELEMENT_BYTES
        for fragment in layout.fragments
        for name in ("anchor", *sorted(optimizer.slot_names))
    }


def places(layout: Layout, optimizer: OuterOptimizer) -> list[tuple[str, int]]:
    """Buffer and part of every `StateChunk` of an outer state, in order."""
    return [
        (f"{fragment.index}/{name}", part)
        for fragment in layout.fragments
        for name in ("anchor", *sorted(optimizer.slot_names))
        for part in range(fragment.parts)
    ]


def part_bytes(layout: Layout, buffer: str, part: int) -> int:
    """Size of one part of a buffer."""
    return layout.fragments[int(buffer.partition("/")[0])].size_of(part) * ELEMENT_BYTES


def state_bytes(layout: Layout, optimizer: OuterOptimizer) -> int:
    """Size of an outer state."""
    return sum(buffer_bytes(layout, optimizer).values())


def part_hash(buffer: Tensor, start: int, stop: int) -> str:
    """`content_hash`, hexadecimal, of the elements from `start` to `stop`."""
    return content_hash(memory_of(buffer[start:stop])).hex()


def manifest_digest(manifest: Sequence[StateChunk], steps: Sequence[int]) -> str:
    """SHA-256, hexadecimal, of the steps and the manifest as text: a joiner checks a manifest before it downloads."""
    lines = ["steps " + " ".join(map(str, steps))]
    lines += [f"{chunk.buffer} {chunk.part} {chunk.digest}" for chunk in manifest]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def memory_of(buffer: Tensor) -> memoryview:
    """The bytes of a flat host tensor, where they are."""
    return buffer.numpy().data.cast("B")


def _tensor(data: bytes | bytearray) -> Tensor:
    return torch.frombuffer(data if isinstance(data, bytearray) else bytearray(data), dtype=torch.float32)


# ---------------------------------------------------------------- optimizers


class OuterOptimizer(ABC):
    """A pure function from a fragment's state and a mean pseudo-gradient to its next state."""

    @property
    @abstractmethod
    def slot_names(self) -> tuple[str, ...]:
        """Names of the buffers that it keeps beside the anchor."""

    def start(self, anchor: Tensor, fragment: Fragment | None = None) -> FragmentState:
        """The state before the first step: `anchor` (flat fp32, which is taken over) and zero slots."""
        return FragmentState(anchor, {name: torch.zeros_like(anchor) for name in self.slot_names}, 0, fragment)

    @abstractmethod
    def step(
        self, state: FragmentState, mean: Tensor, into: FragmentState | None = None, share: float = 1.0
    ) -> FragmentState:
        """The state after descending `mean`, the flat fp32 mean of pseudo-gradients.

        Its buffers are those of `into`, which are overwritten and may be those of `state`, or new ones. `share`, above
        0 and at most 1: how much of a step this is (`diloco.outer.weighing`). SGD and Nesterov only
        (`OuterSection.partial`)
        know of others than 1.
        """


@dataclass(frozen=True)
class Sgd(OuterOptimizer):
    """θ ← θ − s η g, s being the share. At s η = 1 the new anchor is the mean of the local weights (FedAvg)."""

    lr: float
    slot_names = ()

    def step(
        self, state: FragmentState, mean: Tensor, into: FragmentState | None = None, share: float = 1.0
    ) -> FragmentState:
        after = into or state.unfilled()
        torch.sub(state.anchor, mean * (self.lr * share), out=after.anchor)
        return replace(after, steps=state.steps + 1)


@dataclass(frozen=True)
class Nesterov(OuterOptimizer):
    """b ← μ b + g;  θ ← θ − η (g + μ b): `torch.optim.SGD(nesterov=True)`, DiLoCo's choice (arXiv 2311.08105).

    A share s of a step: b ← (1 − s (1 − μ)) b + s g;  θ ← θ − s η (g + μ b). Momentum fades by the work that is
    committed and not by the number of versions: each g moves θ by s η g / (1 − μ) in the end, as in whole steps.
    """

    lr: float
    momentum: float
    slot_names = ("momentum",)

    def step(
        self, state: FragmentState, mean: Tensor, into: FragmentState | None = None, share: float = 1.0
    ) -> FragmentState:
        after = into or state.unfilled()
        kept = self.momentum + (1 - share) * (1 - self.momentum)  # the momentum itself, to the bit, of a whole step
        old, new = ((one.slots["momentum"], one.anchor) for one in (state, after))
        if not kernels.nesterov(mean, old, new, kept, share, self.momentum, self.lr * share):
            for tile in tiles(mean.numel()):
                fresh = mean[tile] if share == 1 else mean[tile] * share
                momentum = torch.mul(old[0][tile], kept, out=new[0][tile]).add_(fresh)
                update = (momentum * self.momentum).add_(mean[tile]).mul_(self.lr * share)
                torch.sub(old[1][tile], update, out=new[1][tile])
        return replace(after, steps=state.steps + 1)


@dataclass(frozen=True)
class DelayedNesterov(OuterOptimizer):
    """Nesterov where a version has few contributions, and a momentum step each time would carry each of them on anew.

    Every N versions b ← μ b + mean of the N;  θ ← θ − η μ b. The contributions themselves enter `at_once`, at 1 / N,
    each when it comes: θ ← θ − η g / N (Async Local-SGD, arXiv 2401.09135, algorithm 3 with c = 0). Or they wait for
    the N-th: FedBuff (arXiv 2106.06639) with a Nesterov step. N = 1 is `Nesterov`.
    """

    lr: float
    momentum: float
    buffer: int
    """N."""
    at_once: bool
    slot_names = ("accumulated", "momentum")

    def step(
        self, state: FragmentState, mean: Tensor, into: FragmentState | None = None, share: float = 1.0
    ) -> FragmentState:
        after = into or state.unfilled()
        steps = state.steps + 1
        for tile in tiles(mean.numel()):
            accumulated, momentum = after.slots["accumulated"][tile], after.slots["momentum"][tile]
            fresh = mean[tile] * (1.0 / self.buffer)
            torch.add(state.slots["accumulated"][tile], fresh, out=accumulated)
            update = fresh if self.at_once else torch.zeros_like(fresh)
            if steps % self.buffer:
                momentum.copy_(state.slots["momentum"][tile])
            else:
                torch.mul(state.slots["momentum"][tile], self.momentum, out=momentum).add_(accumulated)
                update = (momentum * self.momentum).add_(fresh if self.at_once else accumulated)
                accumulated.zero_()
            torch.sub(state.anchor[tile], update.mul_(self.lr), out=after.anchor[tile])
        return replace(after, steps=steps)


@dataclass(frozen=True)
class Adam(OuterOptimizer):
    """m ← β₁ m + (1−β₁) g;  v ← β₂ v + (1−β₂) g²;  θ ← θ − η m̂ / (√v̂ + ε), m̂ and v̂ bias-corrected.

    `torch.optim.Adam`. DiLoCo found that ε must be large (0.1): a pseudo-gradient is no noisy gradient.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    slot_names = ("first_moment", "second_moment")

    def step(
        self, state: FragmentState, mean: Tensor, into: FragmentState | None = None, share: float = 1.0
    ) -> FragmentState:
        after, steps = into or state.unfilled(), state.steps + 1
        beta1, beta2 = self.betas
        first = torch.mul(state.slots["first_moment"], beta1, out=after.slots["first_moment"])
        first.add_(mean * (1 - beta1))
        second = torch.mul(state.slots["second_moment"], beta2, out=after.slots["second_moment"])
        second.add_((mean * mean).mul_(1 - beta2))
        scale = _sqrt(second).div_(math.sqrt(1 - _power(beta2, steps))).add_(self.eps)
        update = (first / scale).mul_(self.lr / (1 - _power(beta1, steps)))
        torch.sub(state.anchor, update, out=after.anchor)
        return replace(after, steps=steps)


@dataclass(frozen=True)
class WarmUp(OuterOptimizer):
    """θ ← θ − s g for the first `steps` outer steps of a fragment: plain averaging. Then `after`, from zero slots.

    From random weights the first displacements point nowhere in particular, and momentum would carry them on for
    1 / (1 − μ) steps. DiLoCo's main results begin from a pretrained model (arXiv 2311.08105, section 3).
    """

    after: OuterOptimizer
    steps: int

    @property
    def slot_names(self) -> tuple[str, ...]:
        return self.after.slot_names

    def step(
        self, state: FragmentState, mean: Tensor, into: FragmentState | None = None, share: float = 1.0
    ) -> FragmentState:
        if state.steps < self.steps:
            after = into or state.unfilled()
            torch.sub(state.anchor, mean if share == 1 else mean * share, out=after.anchor)
            for name, slot in state.slots.items():
                after.slots[name].copy_(slot)
        else:
            after = self.after.step(replace(state, steps=state.steps - self.steps), mean, into, share)
        return replace(after, steps=state.steps + 1)


def open_outer(section: OuterSection) -> OuterOptimizer:
    """The outer optimizer that a contract asks for."""
    optimizer = _open(section)
    return WarmUp(optimizer, section.warmup_steps) if section.warmup_steps else optimizer


def _open(section: OuterSection) -> OuterOptimizer:
    match section.optimizer:
        case "sgd":
            return Sgd(section.lr)
        case "nesterov":
            return Nesterov(section.lr, section.momentum)
        case "delayed_nesterov" | "buffered_nesterov":
            at_once = section.optimizer == "delayed_nesterov"
            return DelayedNesterov(section.lr, section.momentum, section.buffer, at_once)
        case "adam":
            return Adam(section.lr, section.betas, section.eps)


def _sqrt(values: Tensor) -> Tensor:
    """Correctly rounded square roots: numpy takes the CPU's instruction."""
    return torch.from_numpy(np.sqrt(values.numpy()))


def _power(base: float, exponent: int) -> float:
    """base ** exponent by multiplication: the same bits whatever the C library's `pow` does."""
    return reduce(mul, repeat(base, exponent), 1.0)
