"""The line of one peer, which a round works on: its weights, the outer state, and what is between them.

Beside it are the weighing of contributions, checkpoints' and evaluation's views of the weights, and the two ways onto
another state: a copied one (`adopt`), or back to the anchor (`drop`). What every rank does to its parts is one
function; the bookkeeping of rank 0, which knows commits and tokens, is another (`book`, `book_adoption`, `book_drop`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diloco.base.clock import monotonic_s, new_incarnation
from diloco.base.decisions import Apply, Measure
from diloco.base.ranks import Alone, Ranks
from diloco.base.turns import Turns
from diloco.base.types import Commit, Contribution, Counted, Member
from diloco.compress import Codec
from diloco.compress.encoding import Encode, encode_now
from diloco.outer.fragments import Fragment, Layout, Weights
from diloco.outer.merge import Carry, carry, carry_fragment
from diloco.outer.pseudograd import left_over
from diloco.outer.state import FragmentState, OuterOptimizer, OuterState
from diloco.protocol.messages import Fork

if TYPE_CHECKING:
    from diloco.config.contract import Contract

MAX_VALUE = torch.finfo(torch.float32).max / 2
"""Largest |value| accepted in anchor or weights, so that their difference stays finite."""


@dataclass(frozen=True, slots=True)
class Weighing:
    """The contract's rule for the weight of a contribution, and for the size of a version's outer step.

    It is the same for all peers: the share that follows from a commit goes into the outer state.
    """

    by_tokens: bool = False
    """Contributions weigh as many as their tokens, but those of what is left over; else all weigh the same."""
    whole: int = 1
    """Weight of one with a round's inner steps that is not late."""
    staleness_power: float = 0.0
    """`OuterSection.staleness_power`."""
    shares: bool = False
    """A version's outer step is in proportion to what it counts (`OuterSection.partial`)."""

    @staticmethod
    def of(contract: Contract) -> Weighing:
        """A contract's rule for the weight of contributions and the size of outer steps."""
        outer = contract.outer
        by_tokens, shares = outer.weighting == "tokens", contract.partial == "share"
        return Weighing(by_tokens, contract.whole_weight, outer.staleness_power, shares)

    def weight(self, tokens: int, staleness: float, left_over: bool = False) -> int:
        """Weight in the mean of a contribution of so many tokens. `staleness`: versions that closed while it was made,
        over the trainers: one that is not slower than the others has at most about 1. `left_over`: the tokens say
        nothing of its progress (`Turns.leaves_over`), so that it weighs as a round's."""
        late: float = max(staleness, 1.0) ** -self.staleness_power
        return max(round((tokens if self.by_tokens and not left_over else self.whole) * late), 1)

    def share(self, counted: Sequence[Counted], view: Sequence[Member]) -> float:
        """Share of an outer step that a version makes: the weights that it counts over the whole weight of all
        trainers, those in the `view` and those that it counts. Always 1 where `shares` is off.

        At most their share of the trainers: who trained longer than a round also went further, which the mean has."""
        if not self.shares:
            return 1.0
        trainers = {member.peer for member in view if not member.witness} | {entry.peer for entry in counted}
        by_weight = sum(entry.weight for entry in counted) / (len(trainers) * self.whole)
        return min(by_weight, len(counted) / len(trainers))


@dataclass
class UncommittedProgress:
    """A line's progress: tokens and data blocks that its peer trained since a commit counted it last."""

    tokens: int = 0
    blocks: int = 0

    def add(self, tokens: int, blocks: int) -> None:
        self.tokens += tokens
        self.blocks += blocks


@dataclass(frozen=True)
class PendingContribution:
    """Contribution of a line on its way. Tensors are flat fp32, of its fragment."""

    contribution: Contribution
    local: Tensor | None
    """The local weights just after it was sent: what has changed since is progress of the next contribution. None
    while nothing has (`keep_local`)."""
    base_if_skipped: Tensor
    """In place of `local` when it comes to nothing: what has changed since *this* is all progress."""
    target: Tensor | None = None
    """Values that were encoded, when the codec's error is fed back. They become the residual (`left_over`)."""
    own_share: FragmentState | None = None
    """Outer step of the contribution alone, which `eager` made ahead."""
    passed: Commit | None = None
    """The first version that we could not apply and that counts it, for all we know: it is no progress any more,
    whatever comes of the rounds until a state is copied."""
    since_s: float = field(default_factory=monotonic_s)
    """When it was measured."""


@dataclass
class Line:
    """State of one peer between two rounds: its weights, the outer state, and the contribution on its way.

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
    turns: Turns
    state: OuterState
    commit: Commit | None = None
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
    remainder: bool = False
    """Progress may be left whose tokens are committed: that of other fragments than the latest version's that counted
    us, or of parts that it omitted. Rank 0's."""
    boot: int = field(default_factory=new_incarnation)
    """This process of the peer (`Counted`), which has the progress. Rank 0's."""
    since: int = field(init=False)
    """Version at which the progress that is not committed yet began."""

    def __post_init__(self) -> None:
        self.since = self.state.version
        for fragment in self.state.fragments:
            complete(self, fragment)

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The model's parameters that the line holds as local weights, by name."""
        return self.weights.parameters

    @property
    def due(self) -> Fragment:
        """The fragment that the line's next outer step moves. Rank 0."""
        return self.layout.fragments[self.turns.next(self.state.version, self.committed)]

    @property
    def committed(self) -> int:
        """Tokens that all peers committed. Rank 0."""
        return self.commit.tokens if self.commit else 0

    @property
    def trainers(self) -> int:
        """Members that contribute to the mean after a line's commit: at least one, also in a view of witnesses."""
        return max(sum(not member.witness for member in self.commit.view), 1) if self.commit else 1

    @property
    def staleness(self) -> float:
        """Versions that closed since the line's uncommitted progress began, over the trainers."""
        return (self.state.version - self.since) / self.trainers

    def measuring(self, overlaps: bool) -> Measure:
        """Decision to measure a contribution of the line. Rank 0. `overlaps`: inner steps follow meanwhile."""
        return Measure(self.due.index, self.staleness, self.trainers, overlaps)

    def applying(self, commit: Commit, counted: bool, state_unused: bool) -> Apply:
        """Decision to apply a version to the line. Rank 0. `state_unused`: nobody else reads its state before that."""
        in_place = state_unused and counted and not (commit.omits(self.peer) or self.merge.needs_gradient)
        return Apply(commit.to_bytes().decode(), counted, in_place)


def keep_local(line: Line) -> None:
    """Copy the line's local weights under the contribution on its way, before inner steps change them: that is progress
    of the next one."""
    if line.sent is not None and line.sent.local is None:
        contribution = line.sent.contribution
        len(contribution.parts[:])  # waits: it may be made of these very weights
        line.sent = replace(line.sent, local=line.weights.read(line.layout.fragments[contribution.fragment]))


def withdraw(line: Line) -> None:
    """Make the line's contribution on its way progress again: it comes to nothing, and nobody holds it."""
    sent, line.sent = line.sent, None
    if sent is not None:
        line.merge.withdrawn(line, sent)


def keep_residual(line: Line, sent: PendingContribution, fragment: Fragment, commit: Commit | None = None) -> None:
    """Make the line's residual (error feedback) of what the codec dropped: in parts that `commit` counts, or in all."""
    if sent.target is not None:
        counts = [commit is None or commit.counts(line.peer, part) for part in range(fragment.parts)]
        before = line.residuals.get(fragment.index)
        left = left_over(sent.target, sent.contribution.parts, fragment, line.codecs, counts.__getitem__, before)
        line.residuals[fragment.index] = left


def fade_residual(line: Line, commit: Commit, fragment: Fragment) -> None:
    """Fade the line's residual where a version counts a contribution of this peer's name, and none of this life.

    It is that of an earlier life. It had in it what the codec had dropped before, so that of the residual as much stays
    as after a copy of the state.
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
    """The entry under the name of the line's peer among the contributions that a version counts."""
    return next((counted for counted in commit.counted if counted.peer == line.peer), None)


@contextmanager
def weights_at_anchor(line: Line) -> Iterator[None]:
    """Context in which the line's model holds the anchor of the outer state. All ranks enter and leave together."""
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
    """Context in which the line's model holds anchor plus uncommitted progress, without what merge `eager` added ahead.

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
    """Entry of the line's contribution in a version that is about to be applied, if it counts one. Rank 0.

    Raises Diverged when the version was made on another state than this.
    """
    mine = entry_in(line, commit) if line.sent is not None else None
    if mine is not None and mine.boot != line.boot:
        mine = None  # an earlier process of this peer trained it
    if commit.state_digest == line.state.digest:
        return mine
    uncounted = mine is None and commit.version == line.state.version + 1
    if not uncounted and line.sent is not None:  # counted by this version, or perhaps by one that we have not seen
        line.sent = replace(line.sent, passed=line.sent.passed or commit)
    raise Diverged(commit.version, uncounted)


def book(line: Line, commit: Commit, mine: Counted | None) -> None:
    """Take `mine`, the contribution that a version counts, off the line's progress, after it was applied. Rank 0."""
    if mine is not None:
        line.trained.add(-mine.tokens, -mine.blocks)
        line.remainder = commit.omits(line.peer) or len(line.layout.fragments) > 1
    if mine is not None or not line.trained.tokens:
        line.since = commit.version


def complete(line: Line, state: FragmentState) -> None:
    """Complete a fragment's outer state: ranks exchange the hashes of the parts that each holds."""
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


def rehash(line: Line) -> None:
    """Hash a line's outer state as it is in memory now: it may have changed there since its hashes were taken."""
    fragments = tuple(replace(state) for state in line.state.fragments)  # without what they keep
    for state in fragments:
        complete(line, state)
    line.state = OuterState(line.state.version, fragments)


class Diverged(Exception):
    """The line's outer state is not the one that a version was made on: it must be copied anew."""

    def __init__(self, version: int, uncounted: bool) -> None:
        """`uncounted`: for certain no version counts what was sent."""
        super().__init__(f"version {version} was made on another state than ours")
        self.uncounted = uncounted


@dataclass(frozen=True)
class Adoption:
    """Fate of a line's progress and contribution if it adopts a copied outer state: fixed before, booked afterwards."""

    commit: Commit | None
    """Commit of the state; of two of its version, between which members changed, the later one."""
    stays: bool
    """The state is of the version of the line: what was sent stays sent, and the next version may count it."""
    mine: Counted | None
    """The contribution, as a version counts it that leads to the state. None: none does, as far as we know."""
    given_up: int
    """Tokens sent that may be counted in versions that were skipped, and must not count twice: they are not carried."""

    @property
    def discarded(self) -> int:
        """Tokens that the line gives up for a copied outer state, and that no known version counts."""
        return 0 if self.mine is not None else self.given_up


def adoption(line: Line, commit: Commit | None, forks: Sequence[Fork]) -> Adoption:
    """Fate of the line's progress and contribution if it adopts the copied outer state of `commit`. Rank 0.

    `forks`: lineages that led to that of `commit`.
    """
    before = line.commit
    if commit and before and (commit.lineage, commit.version) == (before.lineage, before.version):
        return Adoption(max(before, commit, key=lambda one: one.height), True, None, 0)
    if line.sent is None:
        return Adoption(commit, False, None, 0)
    sent, passed = line.sent.contribution, line.sent.passed
    mine = Counted(line.peer, sent.boot, sent.base_version, sent.weight, sent.tokens, sent.blocks)
    # A version that leads to the state may count it: its own, or one that we could not apply.
    counts = commit is not None and (
        mine in commit.counted or (passed is not None and leads_to(passed, commit, forks) and mine in passed.counted)
    )
    return Adoption(commit, False, mine if counts else None, sent.tokens)


def leads_to(passed: Commit, commit: Commit, forks: Sequence[Fork]) -> bool:
    """Whether a version that closed here before `commit` is of its lineage, or of one before that parted later."""
    earlier = any(fork.lineage == passed.lineage and passed.tokens <= fork.tokens for fork in forks)
    return earlier or passed.lineage == commit.lineage


def book_adoption(line: Line, adoption: Adoption) -> None:
    """Set the line's commit and progress after it adopted a copied outer state. Rank 0."""
    line.commit = adoption.commit
    if adoption.stays:
        return
    line.trained = UncommittedProgress(line.trained.tokens - adoption.given_up, 0)  # the lease is another one, too
    if adoption.given_up:
        line.remainder = len(line.layout.fragments) > 1
    if not line.trained.tokens:
        line.since = line.state.version


def adopt(line: Line, state: OuterState, stays: bool = False) -> None:
    """Put a line onto a copied outer state; progress that is not committed yet is carried onto the new anchor.

    `stays`: it is of the same version, and what was sent stays sent. Else what was sent is the run's or given up, and
    the residual with it: what the codec dropped of it remains.
    """
    if stays:
        keep_local(line)
    sent, line.sent = line.sent, None
    for fragment, before, after in zip(line.layout.fragments, line.state.fragments, state.fragments, strict=True):
        old = line.weights.rounded(fragment, before.anchor)
        base: Tensor | None = old
        if sent is not None and sent.contribution.fragment == fragment.index:
            if stays:  # the anchor under the contribution turned out to be another
                assert sent.local is not None
                new = line.weights.rounded(fragment, after.anchor)
                local = line.weights.rounded(fragment, carry(sent.local, old, new))
                line.sent = replace(sent, local=local, base_if_skipped=carry(sent.base_if_skipped, old, new))
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


def drop(line: Line) -> None:
    """Give up all progress of a line: its local weights go back to the anchor."""
    for fragment in line.layout.fragments:
        line.weights.write(fragment, line.state.fragments[fragment.index].anchor)
    line.sent = None


def book_drop(line: Line) -> int:
    """Set the line's progress to none after `drop`. Returns the discarded tokens; data blocks stay used. Rank 0."""
    discarded, line.trained.tokens = line.trained.tokens, 0
    line.remainder, line.since = False, line.state.version
    return discarded
