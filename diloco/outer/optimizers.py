"""The outer optimizers, from a fragment's outer state and the mean pseudo-gradient to its next state; the outer step.

Every peer computes the outer step for itself and must get the same bits on any CPU: fp32 on the host, each
operation rounded on its own, element by element. So no `add_(alpha=...)`, `addcmul` or `lerp` (fused multiply-add
on some CPUs), no sum over elements, no `torch.sqrt` (MKL's, where torch has MKL: one bit off in 0.7 % of elements),
and scalars from IEEE operations only (no `pow`, which differs between C libraries). `torch.set_flush_denormal` must
be off, as it is by default.

A step makes new buffers, and a snapshot for a joiner or a checkpoint is a reference: that costs one fragment's anchor
and slots twice, while the step runs and for as long as somebody reads the old ones. Or it overwrites the old ones, when
nobody does (`Apply.in_place`).

`Stepping` makes average and outer step of a version part by part. Ahead of its commit, each part is stepped as its mean
arrives, into new buffers; so the step is over when the exchange is. That takes a fragment once more for the anchor, and
once for each slot. In place it waits for the commit, and overwrites the state before it; a mean that arrives is only
checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from diloco.base.life import done
from diloco.base.memory import floats
from diloco.base.types import Closed, Commit
from diloco.compress import Codec, kernels
from diloco.compress.codec import magnitude
from diloco.config.contract import OuterSection
from diloco.observe.events import timed
from diloco.outer.average import check_mean, mean_into
from diloco.outer.fragments import Fragment
from diloco.outer.state import FragmentState, OuterOptimizer, OuterState, part_hash, tiles

if TYPE_CHECKING:
    from concurrent.futures import Future

    from diloco.outer.line import Line


@dataclass(frozen=True)
class Sgd(OuterOptimizer):
    """θ ← θ − s η g, s being the share. At s η = 1 the new anchor is the mean of the local weights (FedAvg)."""

    lr: float
    slot_names = ()

    def fill(self, after: FragmentState, state: FragmentState, mean: Tensor, share: float) -> None:
        torch.sub(state.anchor, mean * (self.lr * share), out=after.anchor)


@dataclass(frozen=True)
class Nesterov(OuterOptimizer):
    """b ← μ b + g;  θ ← θ − η (g + μ b): `torch.optim.SGD(nesterov=True)`, DiLoCo's choice (arXiv 2311.08105).

    A share s of a step: b ← (1 − s (1 − μ)) b + s g;  θ ← θ − s η (g + μ b). Momentum fades by the work that is
    committed and not by the number of versions: each g moves θ by s η g / (1 − μ) in the end, as in whole steps.
    """

    lr: float
    momentum: float
    slot_names = ("momentum",)

    def fill(self, after: FragmentState, state: FragmentState, mean: Tensor, share: float) -> None:
        kept = self.momentum + (1 - share) * (1 - self.momentum)  # the momentum itself, to the bit, of a whole step
        old, new = ((one.slots["momentum"], one.anchor) for one in (state, after))
        if not kernels.nesterov(mean, old, new, kept, share, self.momentum, self.lr * share):
            for tile in tiles(mean.numel()):
                fresh = mean[tile] if share == 1 else mean[tile] * share
                momentum = torch.mul(old[0][tile], kept, out=new[0][tile]).add_(fresh)
                update = (momentum * self.momentum).add_(mean[tile]).mul_(self.lr * share)
                torch.sub(old[1][tile], update, out=new[1][tile])


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

    def fill(self, after: FragmentState, state: FragmentState, mean: Tensor, share: float) -> None:
        for tile in tiles(mean.numel()):
            accumulated, momentum = after.slots["accumulated"][tile], after.slots["momentum"][tile]
            fresh = mean[tile] * (1.0 / self.buffer)
            torch.add(state.slots["accumulated"][tile], fresh, out=accumulated)
            update = fresh if self.at_once else torch.zeros_like(fresh)
            if (state.steps + 1) % self.buffer:
                momentum.copy_(state.slots["momentum"][tile])
            else:
                torch.mul(state.slots["momentum"][tile], self.momentum, out=momentum).add_(accumulated)
                update = (momentum * self.momentum).add_(fresh if self.at_once else accumulated)
                accumulated.zero_()
            torch.sub(state.anchor[tile], update.mul_(self.lr), out=after.anchor[tile])


@dataclass(frozen=True)
class Adam(OuterOptimizer):
    """m ← β₁ m + (1−β₁) g;  v ← β₂ v + (1−β₂) g²;  θ ← θ − η m̂ / (√v̂ + ε), m̂ and v̂ bias-corrected.

    `torch.optim.Adam`. DiLoCo found that ε must be large (0.1): a pseudo-gradient is no noisy gradient.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    slot_names = ("first_moment", "second_moment")

    def fill(self, after: FragmentState, state: FragmentState, mean: Tensor, share: float) -> None:
        (beta1, beta2), steps = self.betas, state.steps + 1
        first = torch.mul(state.slots["first_moment"], beta1, out=after.slots["first_moment"])
        first.add_(mean * (1 - beta1))
        second = torch.mul(state.slots["second_moment"], beta2, out=after.slots["second_moment"])
        second.add_((mean * mean).mul_(1 - beta2))
        root = torch.from_numpy(np.sqrt(second.numpy()))  # correctly rounded: numpy takes the CPU's instruction
        scale = root.div_(math.sqrt(1 - _power(beta2, steps))).add_(self.eps)
        update = (first / scale).mul_(self.lr / (1 - _power(beta1, steps)))
        torch.sub(state.anchor, update, out=after.anchor)


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

    def fill(self, after: FragmentState, state: FragmentState, mean: Tensor, share: float) -> None:
        if state.steps < self.steps:
            torch.sub(state.anchor, mean if share == 1 else mean * share, out=after.anchor)
            for name, slot in state.slots.items():
                after.slots[name].copy_(slot)
        else:
            self.after.fill(after, replace(state, steps=state.steps - self.steps), mean, share)


def open_outer(section: OuterSection) -> OuterOptimizer:
    """The outer optimizer that a contract asks for, with its warm-up."""
    optimizer: OuterOptimizer
    match section.optimizer:
        case "sgd":
            optimizer = Sgd(section.lr)
        case "nesterov":
            optimizer = Nesterov(section.lr, section.momentum)
        case "delayed_nesterov" | "buffered_nesterov":
            at_once = section.optimizer == "delayed_nesterov"
            optimizer = DelayedNesterov(section.lr, section.momentum, section.buffer, at_once)
        case "adam":
            optimizer = Adam(section.lr, section.betas, section.eps)
    return WarmUp(optimizer, section.warmup_steps) if section.warmup_steps else optimizer


def _power(base: float, exponent: int) -> float:
    """base ** exponent by multiplication, for outer optimizers: the same bits whatever the C library's `pow` does."""
    return math.prod(repeat(base, exponent), start=1.0)


@dataclass(eq=False)
class Stepping:
    """Outer step of one fragment, part by part as its mean arrives. Not for several threads at once.

    Outer steps go element by element (`diloco.outer.optimizers`), so a part takes no more than its own mean, the bits
    are those of one step over all, and they are hashed at once. A part that a repair changes is stepped again. Host
    memory: 4 bytes per parameter and buffer, which become the next state; in place, of one part.
    """

    state: OuterState
    """The outer state that the version is made on."""
    fragment: Fragment
    codecs: Sequence[Codec]
    """By group of parameters."""
    optimizer: OuterOptimizer
    share: float = 1.0
    """Share of an outer step (`diloco.outer.line.Weighing`)."""
    ahead: bool = True
    """Each part is stepped as its mean arrives; else all in place, when the version is applied."""
    seconds: dict[str, float] = field(default_factory=lambda: {"average": 0.0, "outer": 0.0})
    """Seconds spent so far on decoding means, and on outer steps."""
    _after: FragmentState | None = None
    _means: dict[int, bytes] = field(default_factory=dict)
    """Mean by which each part was stepped, or, if not ahead, that is known to be decodable."""
    _hashes: dict[str, dict[int, str]] = field(default_factory=dict)
    _largest: dict[int, float] = field(default_factory=dict)
    """Largest absolute value of each part's anchor."""

    @property
    def _before(self) -> FragmentState:
        return self.state.fragments[self.fragment.index]

    def take(self, part: int, mean: bytes) -> None:
        """Make the outer step of one part, if ahead. Raises PayloadError when these bytes are no mean."""
        if self.ahead:
            self._step(part, mean)
        else:
            with timed(self.seconds, "average"):
                check_mean(mean, self.codecs[self.fragment.group_of(part)], self.fragment.size_of(part))
        self._means[part] = mean

    def average(self, means: Sequence[bytes]) -> None:
        """Decode the mean for the outer step, as far as it did not arrive part by part. Raises PayloadError when a part
        is no mean, with nothing overwritten."""
        for part in self.fragment.cuts:
            if self._means.get(part) is not means[part]:
                self.take(part, means[part])

    def outer(self, means: Sequence[bytes], in_place: bool = False) -> FragmentState:
        """The fragment's outer state after the outer step on these means. Nothing may be taken afterwards.

        `in_place`: the state before may be overwritten, if nothing was done ahead.
        """
        if not self.ahead:
            self._after = self._before if in_place else None
            for part in self.fragment.cuts:
                self._step(part, means[part])
        after = replace(self._after or self._before.unfilled(), steps=self._before.steps + 1)
        hashes = {name: dict(sorted(self._hashes.get(name, {}).items())) for name in after.buffers()}
        # Not by max(), which drops a nan where it is not the first.
        largest = magnitude(torch.tensor(list(self._largest.values()), dtype=torch.float32, device="cpu"))
        after.keep(own_hashes=hashes, largest=largest)
        return after

    def _step(self, part: int, mean: bytes) -> None:
        with timed(self.seconds, "average"):
            values = floats(self.fragment.size_of(part))
            mean_into(mean, self.codecs[self.fragment.group_of(part)], values)
        with timed(self.seconds, "outer"):
            start, stop = self.fragment.part_bounds(part)
            if self._after is None:
                self._after = self._before.unfilled()
            into = self._after.part(start, stop)
            self.optimizer.step(self._before.part(start, stop), values, into, self.share)
            self._largest[part] = magnitude(into.anchor)
            for name, buffer in into.buffers().items():
                self._hashes.setdefault(name, {})[part] = part_hash(buffer, 0, stop - start)


class Stepped(Protocol):
    """A version on its way into the outer state: average and outer step, made on another thread or at once."""

    @property
    def commit(self) -> Commit:
        """Commit of the version that the outer step makes."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of `average` and `outer` so far, on the thread that makes the outer step."""

    def averaged(self) -> Future[None]:
        """Done when every part of the mean held here is decoded, ahead of the outer step. PayloadError: no mean."""

    def outer(self, in_place: bool) -> Future[FragmentState]:
        """The fragment's next state. `in_place`: the one before may be overwritten, once all parts are decoded."""


class SteppedHere:
    """A version whose average and outer step are made at once, on the thread that asks (`Stepped`)."""

    def __init__(self, line: Line, closed: Closed) -> None:
        """`line`: the line that the version is applied to next."""
        self.commit, self._parts = closed.commit, closed.parts
        share = line.weighing.share(closed.commit.counted, closed.commit.view)
        fragment = line.layout.fragments[closed.commit.fragment]
        self._stepping = Stepping(line.state, fragment, line.codecs, line.optimizer, share, ahead=False)
        self.seconds: Mapping[str, float] = self._stepping.seconds
        """Seconds spent so far on decoding means, and on outer steps."""

    def averaged(self) -> Future[None]:
        """Decode the mean before the outer step. Raises PayloadError when it is no mean."""
        self._stepping.average(self._parts)
        return done(None)

    def outer(self, in_place: bool) -> Future[FragmentState]:
        """The fragment's outer state after the outer step, in new buffers or in those of the one before."""
        return done(self._stepping.outer(self._parts, in_place))
