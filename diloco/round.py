"""The straight line of DiLoCo (arXiv 2311.08105, algorithm 1), in the order in which it happens:

    inner steps -> pseudo-gradient -> compress -> exchange -> average -> outer step -> merge

Read `run_round` first. Everything that makes it survive dead peers, slow links and late joiners is behind
`exchange`; everything about tensors is a pure function of one file with the step's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from diloco import failpoints
from diloco.average import unpack
from diloco.compress import Codec
from diloco.fragments import Fragment, Layout, read_fragment, write_fragment
from diloco.merge import carry
from diloco.outer import OuterOptimizer, OuterState
from diloco.pseudograd import pseudo_gradient
from diloco.telemetry import timed
from diloco.types import Closed, Commit, Contribution, Counted, Skip

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
    """A contribution and the local weights it was measured at (flat fp32)."""

    contribution: Contribution
    local: Tensor


class Exchanger(Protocol):
    """The part of the exchange that a round needs."""

    def run(
        self, contribution: Contribution, leaving: bool, patience: Callable[[], bool]
    ) -> Sequence[Closed] | Skip: ...


@dataclass
class Line:
    """What a round works on: one peer's weights, the outer state, and what is between them.

    Invariant: local weights = anchor + progress that is not committed yet; `trained` counts that progress.
    """

    peer: str
    parameters: Mapping[str, Tensor]
    """The model's own, by name: read and written in place."""
    layout: Layout
    codec: Codec
    optimizer: OuterOptimizer
    by_tokens: bool
    """Contributions weigh as many as their tokens; else all weigh the same."""
    state: OuterState
    commit: Commit | None = None
    trained: Trained = field(default_factory=Trained)
    sent: Sent | None = None
    """The contribution that others may hold already: until its version closes it is offered again unchanged."""

    @property
    def due(self) -> Fragment:
        """The fragment that the next version moves."""
        return self.layout.fragments[self.state.version % len(self.layout.fragments)]


def run_round(
    line: Line,
    inner_steps: Callable[[], None],
    exchange: Exchanger,
    apply: Callable[[Closed, dict[str, float]], None],
    patience: Callable[[], bool],
    leaving: Callable[[], bool],
    seconds: dict[str, float],
) -> Sequence[Closed] | Skip:
    """One round. Returns the versions that closed, ours counted or not, or why none did; nothing is lost either way.

    `apply` is called for each version that closed and calls `step_outer` (it may add telemetry and checkpoints);
    `seconds` collects the time of each step.
    """
    with timed(seconds, "inner"):
        inner_steps()
    if line.sent is None:
        line.sent = measure(line, seconds)
    with timed(seconds, "exchange"):
        outcome = exchange.run(line.sent.contribution, leaving(), patience)
    if isinstance(outcome, Skip):
        line.sent = line.sent if outcome.exposed else None
        return outcome
    for closed in outcome:
        apply(closed, seconds)
    return outcome


def measure(line: Line, seconds: dict[str, float]) -> Sent:
    """Pseudo-gradient of the due fragment, compressed. Raises PayloadError when it is not finite."""
    fragment = line.due
    with timed(seconds, "pseudo_gradient"):
        local = read_fragment(line.parameters, fragment)
        gradient = pseudo_gradient(line.state.fragments[fragment.index].anchor, local)
    with timed(seconds, "compress"):
        bounds = [fragment.part_bounds(part) for part in range(fragment.parts)]
        parts = [line.codec.encode(gradient[start:stop]) for start, stop in bounds]
    trained = line.trained
    weight = max(trained.tokens, 1) if line.by_tokens else 1
    version = line.state.version
    return Sent(Contribution(fragment.index, version, weight, trained.tokens, trained.blocks, parts), local)


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
        line.sent = line.sent if mine is not None else None  # not counted for certain: all of it is still progress
        raise Diverged(commit.version)
    _move_anchor(line, closed, mine, seconds)
    line.commit = commit
    line.sent = None
    if mine is not None:
        line.trained.subtract(mine)
    return mine


def _move_anchor(line: Line, closed: Closed, mine: Counted | None, seconds: dict[str, float]) -> None:
    fragment = line.layout.fragments[closed.commit.fragment]
    before = line.state.fragments[fragment.index]
    with timed(seconds, "average"):
        mean = unpack(closed.parts, fragment, line.codec)
    with timed(seconds, "outer"):
        after = line.optimizer.step(before, mean)
    failpoints.hit("before-merge")
    with timed(seconds, "merge"):
        base = _counted_from(line, closed.commit, fragment, before.anchor) if mine is not None else before.anchor
        local = carry(read_fragment(line.parameters, fragment), base, after.anchor)
        write_fragment(line.parameters, fragment, local)
        line.state = line.state.replace(fragment.index, after, closed.commit.version)


def _counted_from(line: Line, commit: Commit, fragment: Fragment, anchor: Tensor) -> Tensor:
    """What to carry progress from: where we counted, the weights that we sent; where a part omitted us, the anchor."""
    assert line.sent is not None
    omitted = [entry for entry in commit.omitted if entry.peer == line.peer]
    base = line.sent.local.clone() if omitted else line.sent.local
    for entry in omitted:
        start, stop = fragment.part_bounds(entry.start)[0], fragment.part_bounds(entry.stop - 1)[1]
        base[start:stop] = anchor[start:stop]
    return base


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
        local = carry(read_fragment(line.parameters, fragment), base, state.fragments[fragment.index].anchor)
        write_fragment(line.parameters, fragment, local)
    line.state, line.commit, line.sent = state, commit, None
    line.trained = Trained(line.trained.tokens - discarded, 0)  # the lease is another one, too
    return discarded


def drop_progress(line: Line) -> int:
    """Go back to the anchor. Returns the tokens that are discarded by that; their data blocks stay used."""
    for fragment in line.layout.fragments:
        write_fragment(line.parameters, fragment, line.state.fragments[fragment.index].anchor)
    discarded, line.trained.tokens, line.sent = line.trained.tokens, 0, None
    return discarded


class Diverged(Exception):
    """Our state is not the one that a version was made on: it must be copied anew."""

    def __init__(self, version: int) -> None:
        super().__init__(f"version {version} was made on another state than ours")
