"""The straight line of DiLoCo (arXiv 2311.08105, algorithm 1), in the order in which it happens:

    inner steps -> pseudo-gradient -> compress -> exchange -> average -> outer step -> merge

Read `run_round` first. Everything that makes it survive dead peers, slow links and late joiners is behind
`exchange`; everything about tensors is a pure function of one file with the step's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from diloco import failpoints
from diloco.align import aligned
from diloco.average import unpack
from diloco.compress import Codec, PayloadError
from diloco.compress.codec import magnitude
from diloco.encoding import Encode, Pieces, encode_now
from diloco.feedback import left_over, with_residual
from diloco.fragments import Fragment, Layout, read_fragment, write_fragment
from diloco.memory import empty_as
from diloco.merge import carry, carry_fragment, foresee, mix
from diloco.outer import FragmentState, OuterOptimizer, OuterState
from diloco.pseudograd import pseudo_gradient
from diloco.telemetry import timed
from diloco.types import Closed, Commit, Contribution, Counted, Skip
from diloco.weighing import Weighing

LARGEST = torch.finfo(torch.float32).max
STEPS_OF_THE_LINE = ("inner", "pseudo_gradient", "compress", "exchange", "average", "outer", "merge")


@dataclass
class Trained:
    """What inner steps were done since a commit counted us last."""

    tokens: int = 0
    blocks: int = 0

    def add(self, tokens: int, blocks: int) -> None:
        self.tokens += tokens
        self.blocks += blocks

    def subtract(self, counted: Counted) -> None:
        self.tokens -= counted.tokens
        self.blocks -= counted.blocks


@dataclass(frozen=True)
class Sent:
    """A contribution on its way. Tensors are flat fp32, of its fragment."""

    contribution: Contribution
    local: Tensor
    """The local weights just after it was sent: what has changed since is progress of the next contribution."""
    unsent: Tensor
    """In place of `local` when it comes to nothing: what has changed since *this* is all progress."""
    target: Tensor | None = None
    """What was encoded, when the codec's error is fed back."""
    foreseen: FragmentState | None = None
    """What `eager` took ahead of the outer step."""


@dataclass(frozen=True, slots=True)
class Ahead(Closed):
    """A version whose average and outer step are made on another thread, from the state that its commit names."""

    after: Callable[[], FragmentState]
    """Waits for the fragment's next state. Raises PayloadError when the mean is no mean."""


class Exchanger(Protocol):
    """The part of the exchange that a round needs."""

    def offer(self, contribution: Contribution, leaving: bool) -> None: ...

    def outcome(self, patience: Callable[[], bool]) -> Sequence[Closed] | Skip: ...


@dataclass
class Line:
    """What a round works on: one peer's weights, the outer state, and what is between them.

    Invariant: local weights = anchor + progress that is not committed yet; `trained` counts that progress.
    """

    peer: str
    parameters: Mapping[str, Tensor]
    """The model's own, by name: read and written in place."""
    layout: Layout
    codecs: Sequence[Codec]
    """By group of parameters (`Fragment.group_of`)."""
    optimizer: OuterOptimizer
    weighing: Weighing
    state: OuterState
    commit: Commit | None = None
    trained: Trained = field(default_factory=Trained)
    sent: Sent | None = None
    """The contribution that others may hold already: until its version closes it is offered again unchanged."""
    fetch: Callable[[Fragment], None] = lambda _: None
    """Called before a fragment's `parameters` are read (`Weights.fetch`)."""
    flush: Callable[[Fragment], None] = lambda _: None
    """Called after they were written (`Weights.flush`)."""
    merge: str = "carry"
    mix_alpha: float = 0.5
    """`SyncSection.merge` and `mix_alpha`."""
    feedback: float | None = None
    """Decay of the residual; None: no error feedback (`CodecSection.error_feedback`)."""
    residual_after_rejoin: float = 0.0
    residuals: dict[int, Tensor] = field(default_factory=dict)
    """By fragment, flat fp32; a fragment without an entry has none yet."""
    encode: Encode = encode_now
    """On this thread, or ahead of the exchange on another (`Encoder`)."""
    align: bool = False
    """Late pseudo-gradients are turned towards the outer momentum (`diloco.align`)."""
    since: int = field(init=False)
    """The version at which the progress that is not committed yet began."""
    own: dict[int, FragmentState] = field(default_factory=dict)
    """By fragment, for `eager`: the outer steps that our contributions alone would have made."""

    def __post_init__(self) -> None:
        self.since = self.state.version

    @property
    def due(self) -> Fragment:
        """The fragment that the next version moves."""
        return self.layout.fragments[self.state.version % len(self.layout.fragments)]

    @property
    def trainers(self) -> int:
        """Members that contribute, as far as we know."""
        return sum(not member.witness for member in self.commit.view) if self.commit else 1

    @property
    def staleness(self) -> float:
        """Versions that closed since our progress began, over the trainers."""
        return (self.state.version - self.since) / max(self.trainers, 1)


def run_round(
    line: Line,
    inner_steps: Callable[[], None],
    exchange: Exchanger,
    apply: Callable[[Closed, dict[str, float]], None],
    patience: Callable[[], bool],
    leaving: Callable[[], bool],
    seconds: dict[str, float],
    overlapped_steps: Callable[[], None] = lambda: None,
) -> Sequence[Closed] | Skip:
    """One round. Returns the versions that closed, ours counted or not, or why none did; nothing is lost either way.

    `apply` is called for each version that closed and calls `step_outer` (it may add telemetry and checkpoints);
    `overlapped_steps` are inner steps to do while the bytes are on their way; `seconds` collects the time of each step.
    """
    with timed(seconds, "inner"):
        inner_steps()
    begin_round(line, exchange, leaving(), seconds)
    with timed(seconds, "inner"):
        overlapped_steps()
    return finish_round(line, exchange, apply, patience, seconds)


def begin_round(line: Line, exchange: Exchanger, leaving: bool, seconds: dict[str, float]) -> None:
    """Pseudo-gradient and compress; the exchange begins. Raises PayloadError when the progress is not finite."""
    if line.sent is None:
        line.sent = measure(line, seconds)
    exchange.offer(line.sent.contribution, leaving)


def finish_round(
    line: Line,
    exchange: Exchanger,
    apply: Callable[[Closed, dict[str, float]], None],
    patience: Callable[[], bool],
    seconds: dict[str, float],
) -> Sequence[Closed] | Skip:
    """The exchange ends; average, outer step and merge."""
    with timed(seconds, "exchange"):
        outcome = exchange.outcome(patience)
    if isinstance(outcome, Skip):
        if not outcome.exposed:
            withdraw(line)
        return outcome
    for closed in outcome:
        apply(closed, seconds)
    return outcome


def measure(line: Line, seconds: dict[str, float]) -> Sent:
    """Pseudo-gradient of the due fragment, compressed. Raises PayloadError when it is not finite.

    Where nobody needs it whole, it is made part by part by whoever encodes it.
    `eager` also moves the fragment's local weights to where the outer step will have them, as far as we know.
    """
    fragment = line.due
    anchor = line.state.fragments[fragment.index].anchor
    with timed(seconds, "pseudo_gradient"):
        line.fetch(fragment)
        local = read_fragment(line.parameters, fragment, empty_as(anchor))
        if not magnitude(anchor) + magnitude(local) <= LARGEST:
            raise PayloadError("the pseudo-gradient is not finite")
        whole = line.feedback is not None or line.merge == "eager" or line.align
        gradient = pseudo_gradient(anchor, local) if whole else None
    with timed(seconds, "compress"):
        target = gradient
        if target is not None and line.align:
            momentum = line.state.fragments[fragment.index].slots["momentum"]
            target = aligned(target, momentum, fragment, line.staleness)
        if target is not None and line.feedback is not None:
            target = with_residual(target, line.residuals.get(fragment.index), line.feedback)
            if not math.isfinite(magnitude(target)):
                raise PayloadError("the pseudo-gradient with what was dropped before is not finite")

        def values(start: int, stop: int) -> Tensor:
            return pseudo_gradient(anchor[start:stop], local[start:stop]) if target is None else target[start:stop]

        parts = line.encode(_pieces(values, fragment, line.codecs))
    trained = line.trained
    weight = line.weighing.weight(trained.tokens, line.staleness)
    contribution = Contribution(fragment.index, line.state.version, weight, trained.tokens, trained.blocks, parts)
    sent = Sent(contribution, local, anchor, None if line.feedback is None else target)
    return sent if line.merge != "eager" or gradient is None else _look_ahead(line, sent, fragment, gradient)


def _pieces(values: Callable[[int, int], Tensor], fragment: Fragment, codecs: Sequence[Codec]) -> Pieces:
    """The codec of each part and what makes its values, given its bounds."""
    bounds = map(fragment.part_bounds, range(fragment.parts))
    return [(codecs[fragment.group_of(part)], partial(values, *ends)) for part, ends in enumerate(bounds)]


def _look_ahead(line: Line, sent: Sent, fragment: Fragment, gradient: Tensor) -> Sent:
    before = line.state.fragments[fragment.index]
    own = line.own.get(fragment.index) or line.optimizer.start(torch.zeros_like(gradient))
    foreseen = foresee(replace(own, steps=before.steps), gradient, 1.0 / line.trainers, line.optimizer)
    write_fragment(line.parameters, fragment, before.anchor + foreseen.anchor)
    line.flush(fragment)
    local = read_fragment(line.parameters, fragment)  # as rounded to the parameters' dtype
    return replace(sent, local=local, unsent=local + gradient, foreseen=foreseen)


def withdraw(line: Line) -> None:
    """What was sent comes to nothing, and nobody holds it: it is progress again."""
    if line.sent is not None and line.sent.foreseen is not None:
        fragment = line.layout.fragments[line.sent.contribution.fragment]
        line.fetch(fragment)
        kept = weights_to_keep(line)
        for entry in fragment.entries:
            line.parameters[entry.name].data.copy_(kept[entry.name])
        line.flush(fragment)
    line.sent = None


def weights_to_keep(line: Line) -> dict[str, Tensor]:
    """The local weights by name, as anchor plus all progress that is not committed: without what `eager` foresees.

    A checkpoint holds these, for a contribution that is on its way is progress after a restart. Not copies, but where
    they differ from the parameters, which the caller has fetched.
    """
    weights, sent = dict(line.parameters), line.sent
    if sent is not None and sent.foreseen is not None:
        fragment = line.layout.fragments[sent.contribution.fragment]
        anchor = line.state.fragments[fragment.index].anchor
        weights |= {entry.name: weights[entry.name].detach().clone() for entry in fragment.entries}
        write_fragment(weights, fragment, carry(read_fragment(line.parameters, fragment), sent.unsent, anchor))
    return weights


def step_outer(line: Line, closed: Closed, seconds: dict[str, float]) -> Counted | None:
    """Apply a version that closed: average, outer step, merge. Returns our entry in it, if it counts us.

    Raises Diverged when the version was made on another state than ours, and PayloadError when the mean is no mean.
    """
    commit = closed.commit
    if commit.fragment < 0:  # a founding moves no anchor: what was sent stays what it is
        line.commit = commit
        return None
    ours = (counted for counted in commit.counted if counted.peer == line.peer)
    mine = next(ours, None) if line.sent is not None else None  # else it is that of an earlier life of this peer
    if commit.state_digest != line.state.digest:
        if mine is None:
            withdraw(line)  # not counted for certain: all of it is still progress
        raise Diverged(commit.version)
    _move_anchor(line, closed, mine, seconds)
    line.commit = commit
    line.sent = None
    if mine is not None:
        line.trained.subtract(mine)
        line.since = commit.version
    return mine


def _move_anchor(line: Line, closed: Closed, mine: Counted | None, seconds: dict[str, float]) -> None:
    fragment = line.layout.fragments[closed.commit.fragment]
    before = line.state.fragments[fragment.index]
    if isinstance(closed, Ahead):
        with timed(seconds, "outer"):
            after = closed.after()
    else:
        with timed(seconds, "average"):
            mean = unpack(closed.parts, fragment, line.codecs)
        with timed(seconds, "outer"):
            share = line.weighing.share(closed.commit.counted, closed.commit.view)
            after = line.optimizer.step(before, mean, share=share)
    failpoints.hit("before-merge")
    with timed(seconds, "merge"):
        _merge(line, closed.commit, fragment, mine is not None, before.anchor, after.anchor)
        line.state = line.state.replace(fragment.index, after, closed.commit.version)
        if mine is not None:
            _settle(line, closed.commit, fragment)


def _merge(line: Line, commit: Commit, fragment: Fragment, counted: bool, old: Tensor, new: Tensor) -> None:
    """The local weights onto the new anchor. A part that omits us, or a version, leaves what we sent progress."""
    sent = line.sent
    base = old if sent is None else sent.local if counted else sent.unsent
    omitted = _omitted(line, commit, fragment) if counted else []
    if sent is not None and omitted:
        base = base.clone()
        for start, stop in omitted:
            base[start:stop] = sent.unsent[start:stop]
    line.fetch(fragment)
    if counted and line.merge == "mix":
        local = read_fragment(line.parameters, fragment)
        mixed = mix(local, new, line.mix_alpha)
        for start, stop in omitted:
            mixed[start:stop] = carry(local[start:stop], base[start:stop], new[start:stop])
        write_fragment(line.parameters, fragment, mixed)
    else:
        carry_fragment(line.parameters, fragment, base, new)
    line.flush(fragment)


def _omitted(line: Line, commit: Commit, fragment: Fragment) -> list[tuple[int, int]]:
    """Bounds of the parts whose mean leaves us out, though the version counts us."""
    return [fragment.part_bounds(part) for part in range(fragment.parts) if not commit.counts(line.peer, part)]


def _settle(line: Line, commit: Commit, fragment: Fragment) -> None:
    """What we sent is counted: what the codec dropped of it is the residual, what we foresaw has happened."""
    sent = line.sent
    assert sent is not None
    if sent.target is not None:
        parts, before = sent.contribution.parts, line.residuals.get(fragment.index)
        line.residuals[fragment.index] = left_over(
            sent.target, parts, fragment, line.codecs, lambda part: commit.counts(line.peer, part), before
        )
    if sent.foreseen is not None:
        line.own[fragment.index] = sent.foreseen


def adopt_state(line: Line, state: OuterState, commit: Commit | None) -> int:
    """Take over a copied state; progress that is not committed yet is carried onto the new anchor.

    A contribution that was sent may be counted in the versions that were skipped, and must not count twice: it is not
    carried. Returns its tokens, which are discarded if it was not counted.
    """
    sent, discarded = line.sent, 0
    for fragment in line.layout.fragments:
        base = line.state.fragments[fragment.index].anchor
        if sent is not None and sent.contribution.fragment == fragment.index:
            base, discarded = sent.local, sent.contribution.tokens
        line.fetch(fragment)
        local = carry(read_fragment(line.parameters, fragment), base, state.fragments[fragment.index].anchor)
        write_fragment(line.parameters, fragment, local)
        line.flush(fragment)
    line.state, line.commit, line.sent = state, commit, None
    line.trained = Trained(line.trained.tokens - discarded, 0)  # the lease is another one, too
    if not line.trained.tokens:
        line.since = state.version
    line.own.clear()
    kept = line.residual_after_rejoin
    line.residuals = {index: residual * kept for index, residual in line.residuals.items()} if kept else {}
    return discarded


def drop_progress(line: Line) -> int:
    """Go back to the anchor. Returns the tokens that are discarded by that; their data blocks stay used."""
    for fragment in line.layout.fragments:
        write_fragment(line.parameters, fragment, line.state.fragments[fragment.index].anchor)
        line.flush(fragment)
    discarded, line.trained.tokens, line.sent = line.trained.tokens, 0, None
    return discarded


class Diverged(Exception):
    """Our state is not the one that a version was made on: it must be copied anew."""

    def __init__(self, version: int) -> None:
        super().__init__(f"version {version} was made on another state than ours")
