"""What a round works on: one peer's weights, the outer state, and what is between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from diloco.base.clock import monotonic_s
from diloco.base.decisions import Apply, Measure
from diloco.base.ranks import Alone, Ranks
from diloco.base.types import Commit, Contribution, Counted
from diloco.compress import Codec
from diloco.compress.encoding import Encode, encode_now
from diloco.outer.fragments import Fragment, Layout, Weights
from diloco.outer.merge import Carry, carry, carry_fragment
from diloco.outer.pseudograd import left_over
from diloco.outer.state import FragmentState, OuterOptimizer, OuterState
from diloco.outer.weighing import Weighing

MAX_VALUE = torch.finfo(torch.float32).max / 2
"""Of anchor and local weights: the difference of two such is finite."""


@dataclass
class UncommittedProgress:
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
class PendingContribution:
    """A contribution on its way. Tensors are flat fp32, of its fragment."""

    contribution: Contribution
    local: Tensor | None
    """The local weights just after it was sent: what has changed since is progress of the next contribution. None
    while nothing has (`keep_local`)."""
    base_if_skipped: Tensor
    """In place of `local` when it comes to nothing: what has changed since *this* is all progress."""
    target: Tensor | None = None
    """What was encoded, when the codec's error is fed back. It becomes the residual (`left_over`)."""
    own_share: FragmentState | None = None
    """What `eager` took ahead of the outer step."""
    passed: Commit | None = None
    """The first version that we could not apply and that counts it, for all we know: it is no progress any more,
    whatever comes of the rounds until a state is copied."""
    since_s: float = field(default_factory=monotonic_s)
    """When it was measured."""


@dataclass
class Line:
    """What a round works on: one peer's weights, the outer state, and what is between them.

    Invariant: local weights = anchor + progress that is not committed yet; `trained` counts that progress. For this the
    anchor is taken as the parameters' dtype holds it (`Weights.rounded`).

    Where the ranks of an island divide the outer state, each has a line of the parts that it holds, and does to it what
    rank 0 decides (`diloco.base.decisions`). Only rank 0's knows commit, tokens and staleness.
    """

    peer: str
    weights: Weights
    layout: Layout
    codecs: Sequence[Codec]
    """By group of parameters (`Fragment.group_of`)."""
    optimizer: OuterOptimizer
    weighing: Weighing
    state: OuterState
    commit: Commit | None = None
    diverged: bool = False
    """Our state turned out to be another than that of `commit`."""
    trained: UncommittedProgress = field(default_factory=UncommittedProgress)
    sent: PendingContribution | None = None
    """The contribution that others may hold already: until its version closes it is offered again unchanged."""
    ranks: Ranks = field(default_factory=Alone)
    merge: Carry = field(default_factory=Carry)
    """`SyncSection.merge`: what becomes of the local weights when a version closes."""
    feedback: float | None = None
    """Decay of the residual; None: no error feedback (`CodecSection.error_feedback`)."""
    residual_after_rejoin: float = 0.0
    residuals: dict[int, Tensor] = field(default_factory=dict)
    """By fragment, flat fp32; a fragment without an entry has none yet."""
    encode: Encode = encode_now
    """On this thread, or ahead of the exchange on another (`Encoder`)."""
    align: bool = False
    """Late pseudo-gradients are turned towards the outer momentum (`diloco.outer.pseudograd`)."""
    since: int = field(init=False)
    """The version at which the progress that is not committed yet began."""

    def __post_init__(self) -> None:
        self.since = self.state.version
        for fragment in self.state.fragments:
            complete(self, fragment)

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The model's own, by name."""
        return self.weights.parameters

    @property
    def stands_at(self) -> Commit | None:
        """Before whose version no state is copied. None: there is none, or our state is wrong and any is better."""
        return None if self.diverged else self.commit

    @property
    def due(self) -> Fragment:
        """The fragment that the next version moves."""
        return self.layout.fragments[self.state.version % len(self.layout.fragments)]

    @property
    def trainers(self) -> int:
        """Members that contribute, as far as we know: with us at least one, also where a view has witnesses only."""
        return max(sum(not member.witness for member in self.commit.view), 1) if self.commit else 1

    @property
    def staleness(self) -> float:
        """Versions that closed since our progress began, over the trainers."""
        return (self.state.version - self.since) / self.trainers

    def measuring(self, overlaps: bool) -> Measure:
        """How a contribution is to be measured now. Rank 0. `overlaps`: inner steps follow while it is on its way."""
        return Measure(self.staleness, self.trainers, overlaps)

    def applying(self, commit: Commit, counted: bool, state_unused: bool) -> Apply:
        """How a version is to be applied now. Rank 0. `state_unused`: nobody else reads the state before it."""
        omitted = any(entry.peer == self.peer for entry in commit.omitted)
        in_place = state_unused and counted and not (omitted or self.merge.needs_gradient)
        return Apply(commit.to_bytes().decode(), counted, in_place)


def keep_local(line: Line) -> None:
    """Inner steps follow while a contribution is on its way: what they change is progress of the next one."""
    if line.sent is not None and line.sent.local is None:
        contribution = line.sent.contribution
        len(contribution.parts[:])  # waits: it may be made of these very weights
        line.sent = replace(line.sent, local=line.weights.read(line.layout.fragments[contribution.fragment]))


def withdraw(line: Line) -> None:
    """What was sent comes to nothing, and nobody holds it: it is progress again."""
    sent, line.sent = line.sent, None
    if sent is not None:
        line.merge.withdrawn(line, sent)


def keep_residual(line: Line, sent: PendingContribution, fragment: Fragment, commit: Commit | None = None) -> None:
    """What the codec dropped of what was sent is the residual; of the parts that `commit` counts, or of all."""
    if sent.target is not None:
        counts = [commit is None or commit.counts(line.peer, part) for part in range(fragment.parts)]
        before = line.residuals.get(fragment.index)
        left = left_over(sent.target, sent.contribution.parts, fragment, line.codecs, counts.__getitem__, before)
        line.residuals[fragment.index] = left


def fade_residual(line: Line, commit: Commit, fragment: Fragment) -> None:
    """A version counts nothing that this life sent: an entry of its name is that of an earlier life.

    What that life sent had in it what the codec had dropped before, so that of the residual as much stays as after a
    copy of the state.
    """
    residual = line.residuals.get(fragment.index)
    if residual is None or entry_in(line, commit) is None:
        return
    left = residual.clone()  # a checkpoint may hold the other
    for part, (start, stop) in fragment.cuts.items():
        if commit.counts(line.peer, part):
            left[start:stop] *= line.residual_after_rejoin
    line.residuals[fragment.index] = left


def entry_in(line: Line, commit: Commit) -> Counted | None:
    """The contribution of this peer's name that a version counts."""
    return next((counted for counted in commit.counted if counted.peer == line.peer), None)


@contextmanager
def weights_at_anchor(line: Line) -> Iterator[None]:
    """Meanwhile the model holds the anchor. All ranks enter and leave together."""
    local = [line.weights.read(fragment) for fragment in line.layout.fragments]
    try:
        for fragment in line.layout.fragments:
            line.weights.write(fragment, line.state.fragments[fragment.index].anchor)
        yield
    finally:
        for fragment, weights in zip(line.layout.fragments, local, strict=True):
            line.weights.write(fragment, weights)


@contextmanager
def weights_to_keep(line: Line) -> Iterator[None]:
    """Meanwhile the model holds anchor plus all progress that is not committed: without what `eager` foresees.

    A checkpoint holds these, for a contribution that is on its way is progress after a restart. All ranks together.
    """
    sent = line.sent
    if sent is None or sent.own_share is None:
        yield
        return
    fragment = line.layout.fragments[sent.contribution.fragment]
    local = line.weights.read(fragment)
    line.merge.withdrawn(line, sent)
    try:
        yield
    finally:
        line.weights.write(fragment, local)


def expect(line: Line, commit: Commit) -> Counted | None:
    """Before a version is applied: this life's entry in it, if it counts one. Rank 0.

    Raises Diverged when the version was made on another state than this.
    """
    mine = entry_in(line, commit) if line.sent is not None else None  # else it is that of an earlier life of this peer
    if commit.state_digest == line.state.digest:
        return mine
    line.diverged = True
    uncounted = mine is None and commit.version == line.state.version + 1
    if not uncounted and line.sent is not None:  # counted by this version, or perhaps by one that we have not seen
        line.sent = replace(line.sent, passed=line.sent.passed or commit)
    raise Diverged(commit.version, uncounted)


def book(line: Line, commit: Commit, mine: Counted | None) -> None:
    """After a version was applied that counts `mine`. Rank 0."""
    if mine is not None:
        line.trained.subtract(mine)
    if mine is not None or not line.trained.tokens:
        line.since = commit.version


def complete(line: Line, state: FragmentState) -> None:
    """The ranks tell each other the hashes of the parts that they hold."""
    fragment = state.fragment
    if fragment is None or fragment.lanes == 1:
        return
    own = state.own_hashes
    reported = line.ranks.gather(" ".join(text for name in own for text in own[name].values()))
    hashes = {name: [""] * fragment.parts for name in own}
    for lane, text in enumerate(reported):
        cuts = fragment.on_lane(lane, fragment.lanes).cuts
        for (name, part), digest in zip(((name, part) for name in own for part in cuts), text.split(), strict=True):
            hashes[name][part] = digest
    state.keep_hashes(hashes)


class Diverged(Exception):
    """Our state is not the one that a version was made on: it must be copied anew."""

    def __init__(self, version: int, uncounted: bool) -> None:
        """`uncounted`: for certain no version counts what was sent."""
        super().__init__(f"version {version} was made on another state than ours")
        self.uncounted = uncounted


@dataclass(frozen=True)
class Adoption:
    """What a copied state means for what was trained and sent: fixed before it is adopted, booked afterwards."""

    commit: Commit | None
    """That of the state."""
    stays: bool
    """It is of the version at which the line stands: what was sent stays sent, and the next version may count it."""
    mine: Counted | None
    """What was sent, as a version counts it that leads there."""
    given_up: int
    """Tokens sent that may be counted in versions that were skipped, and must not count twice: they are not carried."""

    @property
    def discarded(self) -> int:
        """Tokens of those that no known version counts."""
        return 0 if self.mine is not None else self.given_up


def adoption(line: Line, commit: Commit | None) -> Adoption:
    """The copied state of `commit` is to be adopted. Rank 0."""
    stays = commit is not None and commit == line.commit
    given_up = line.sent.contribution.tokens if line.sent is not None and not stays else 0
    return Adoption(commit, stays, None if stays else _counted_on_the_way_to(line, commit), given_up)


def _counted_on_the_way_to(line: Line, commit: Commit | None) -> Counted | None:
    """What was sent, as a version counts it that leads to the state of `commit`: that version itself, or one that we
    could not apply. None: it is not counted, or nobody told us."""
    if line.sent is None or commit is None:
        return None
    sent = line.sent.contribution
    mine = Counted(line.peer, sent.base_version, sent.weight, sent.tokens, sent.blocks)
    reported = [line.sent.passed] if line.sent.passed is not None and line.sent.passed.lineage == commit.lineage else []
    return mine if any(mine in version.counted for version in (*reported, commit)) else None


def book_adoption(line: Line, adoption: Adoption) -> None:
    """After it was adopted. Rank 0."""
    line.diverged = False
    if adoption.stays:
        return
    line.commit = adoption.commit
    line.trained = UncommittedProgress(line.trained.tokens - adoption.given_up, 0)  # the lease is another one, too
    if not line.trained.tokens:
        line.since = line.state.version


def adopt(line: Line, state: OuterState, stays: bool = False) -> None:
    """Take over a copied state; progress that is not committed yet is carried onto the new anchor.

    `stays`: it is of the same version, and what was sent stays sent. Else what was sent is the run's or given up, and
    the residual with it: what the codec dropped of it remains.
    """
    if stays:
        keep_local(line)
    sent, line.sent = line.sent, None
    for fragment, before, after in zip(line.layout.fragments, line.state.fragments, state.fragments, strict=True):
        base: Tensor | None = line.weights.rounded(fragment, before.anchor)
        if sent is not None and sent.contribution.fragment == fragment.index:
            if stays:
                line.sent = _moved(line, fragment, sent, before.anchor, after.anchor)
            else:
                base = sent.local
                keep_residual(line, sent, fragment)
        carry_fragment(line.weights, fragment, base, after.anchor)
        complete(line, after)
    line.state = state
    if stays:
        return
    line.merge.copied()
    kept = line.residual_after_rejoin
    line.residuals = {index: residual * kept for index, residual in line.residuals.items()} if kept else {}


def _moved(line: Line, fragment: Fragment, sent: PendingContribution, old: Tensor, new: Tensor) -> PendingContribution:
    """What was sent stays sent, and the anchor under it turned out to be another."""
    rounded = partial(line.weights.rounded, fragment)
    base, onto = rounded(old), rounded(new)
    local = None if sent.local is None else rounded(carry(sent.local, base, onto))
    return replace(sent, local=local, base_if_skipped=carry(sent.base_if_skipped, base, onto))


def drop(line: Line) -> None:
    """Go back to the anchor."""
    for fragment in line.layout.fragments:
        line.weights.write(fragment, line.state.fragments[fragment.index].anchor)
    line.sent = None


def book_drop(line: Line) -> int:
    """After that. Returns the tokens that are discarded by it; their data blocks stay used. Rank 0."""
    discarded, line.trained.tokens = line.trained.tokens, 0
    line.since = line.state.version
    return discarded
