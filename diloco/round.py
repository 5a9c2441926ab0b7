"""The straight line of DiLoCo (arXiv 2311.08105, algorithm 1), in the order in which it happens:

    inner steps -> pseudo-gradient -> compress -> exchange -> average -> outer step -> merge

Read `run_round` first. Everything that makes it survive dead peers, slow links and late joiners is behind
`exchange`; everything about tensors is a pure function of one file with the step's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from diloco.base import failpoints
from diloco.base.clock import monotonic_s
from diloco.base.memory import empty_as
from diloco.base.ranks import Alone, Ranks
from diloco.base.types import Closed, Commit, Contribution, Counted, Skip
from diloco.compress import Codec, PayloadError
from diloco.compress.encoding import Encode, encode_now
from diloco.observe.telemetry import FLIGHT, timed
from diloco.outer.align import aligned
from diloco.outer.average import unpack
from diloco.outer.feedback import left_over, with_residual
from diloco.outer.fragments import Fragment, Layout, Weights
from diloco.outer.merge import carry, carry_fragment, carry_piece, foresee, mix
from diloco.outer.optimizers import FragmentState, OuterOptimizer, OuterState
from diloco.outer.pseudograd import pseudo_gradient
from diloco.outer.weighing import Weighing

LARGEST = torch.finfo(torch.float32).max / 2
"""Of anchor and local weights: the difference of two such is finite."""


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
    local: Tensor | None
    """The local weights just after it was sent: what has changed since is progress of the next contribution. None
    while nothing has (`keep_local`)."""
    unsent: Tensor
    """In place of `local` when it comes to nothing: what has changed since *this* is all progress."""
    target: Tensor | None = None
    """What was encoded, when the codec's error is fed back. It becomes the residual (`left_over`)."""
    foreseen: FragmentState | None = None
    """What `eager` took ahead of the outer step."""
    passed: Commit | None = None
    """The first version that we could not apply and that counts it, for all we know: it is no progress any more,
    whatever comes of the rounds until a state is copied."""
    since_s: float = field(default_factory=monotonic_s)
    """When it was measured."""


@dataclass(frozen=True, slots=True)
class Ahead(Closed):
    """A version whose average and outer step are made on another thread, from the state that its commit names."""

    after: Callable[[bool], FragmentState]
    """Waits for the fragment's next state; told whether that may take the place of the one before, whose buffers are
    then overwritten. Raises PayloadError when the mean is no mean, and has overwritten nothing."""


class Exchanger(Protocol):
    """The part of the exchange that a round needs."""

    def offer(self, contribution: Contribution, leaving: bool) -> None: ...

    def outcome(self, patience: Callable[[], bool]) -> Sequence[Closed] | Skip: ...


@dataclass
class Line:
    """What a round works on: one peer's weights, the outer state, and what is between them.

    Invariant: local weights = anchor + progress that is not committed yet; `trained` counts that progress. For this the
    anchor is taken as the parameters' dtype holds it (`Weights.rounded`).

    Where the ranks of an island divide the outer state, each has a line of the parts that it holds. What the functions
    of this file do to the first's they have the others do to theirs (`Ranks.announce`).
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
    trained: Trained = field(default_factory=Trained)
    sent: Sent | None = None
    """The contribution that others may hold already: until its version closes it is offered again unchanged."""
    ranks: Ranks = field(default_factory=Alone)
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
    """Late pseudo-gradients are turned towards the outer momentum (`diloco.outer.align`)."""
    since: int = field(init=False)
    """The version at which the progress that is not committed yet began."""
    own: dict[int, FragmentState] = field(default_factory=dict)
    """By fragment, for `eager`: the outer steps that our contributions alone would have made."""
    spare: Callable[[], bool] = lambda: False
    """Whether nobody else needs the outer state any more, so that the next outer step may overwrite it."""

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


def run_round(
    line: Line,
    inner_steps: Callable[[], None],
    exchange: Exchanger,
    apply: Callable[[Closed, dict[str, float]], None],
    patience: Callable[[], bool],
    leaving: Callable[[], bool],
    seconds: dict[str, float],
    overlapped_steps: Callable[[], None] | None = None,
) -> Sequence[Closed] | Skip:
    """One round. Returns the versions that closed, ours counted or not, or why none did; nothing is lost either way.

    `apply` is called for each version that closed and calls `step_outer` (it may add telemetry and checkpoints);
    `overlapped_steps` are inner steps to do while the bytes are on their way; `seconds` collects the time of each step.
    Who does inner steps after it, however it ended, calls `keep_local` before.
    """
    with timed(seconds, "inner"):
        inner_steps()
    begin_round(line, exchange, leaving(), seconds, overlaps=overlapped_steps is not None)
    if overlapped_steps is not None:
        with timed(seconds, "inner"):
            overlapped_steps()
    return finish_round(line, exchange, apply, patience, seconds)


def begin_round(
    line: Line, exchange: Exchanger, leaving: bool, seconds: dict[str, float], *, overlaps: bool = True
) -> None:
    """Pseudo-gradient and compress; the exchange begins. Raises PayloadError when the progress is not finite.

    `overlaps`: inner steps follow while the bytes are on their way.
    """
    if line.sent is None:
        line.sent = measure(line, seconds, overlaps=overlaps)
    elif overlaps:
        keep_local(line)
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


def measure(line: Line, seconds: dict[str, float], *, overlaps: bool = True) -> Sent:
    """Pseudo-gradient of the due fragment, compressed. Raises PayloadError when it is not finite.

    Where nobody needs it whole, it is made part by part by whoever encodes it; and where nothing `overlaps`, of the
    weights themselves, which must not change until `keep_local`.
    `eager` also moves the fragment's local weights to where the outer step will have them, as far as we know.
    """
    trained, staleness, trainers = line.trained, line.staleness, line.trainers
    line.ranks.announce("measure", staleness=staleness, trainers=trainers, overlaps=overlaps)
    sent = measured(line, staleness, trainers, overlaps, seconds)
    weight = line.weighing.weight(trained.tokens, staleness)
    counted = replace(sent.contribution, weight=weight, tokens=trained.tokens, blocks=trained.blocks)
    line.ranks.all(True)  # have it, too, before anybody asks for it
    return replace(sent, contribution=counted)


def measured(line: Line, staleness: float, trainers: int, overlaps: bool, seconds: dict[str, float]) -> Sent:
    """`measure` on one rank: what it sends, without weight."""
    fragment = line.due
    before = line.state.fragments[fragment.index]
    with timed(seconds, "pseudo_gradient"):
        if not line.ranks.all(line.weights.within(fragment, LARGEST) and before.largest <= LARGEST):
            raise PayloadError("the pseudo-gradient is not finite")
        anchor = line.weights.rounded(fragment, before.anchor)
        whole = line.feedback is not None or line.merge == "eager" or line.align
        local = line.weights.read(fragment, empty_as(anchor)) if whole or overlaps else None
        gradient = pseudo_gradient(anchor, local, empty_as(anchor)) if whole and local is not None else None
    with timed(seconds, "compress"):
        target = gradient
        if target is not None and line.align:
            target = aligned(target, before.slots["momentum"], fragment, staleness, line.ranks.total)
        if target is not None and line.feedback is not None:
            flat = target
            target = empty_as(flat) if line.merge == "eager" else flat  # the gradient itself is needed once more
            finite = with_residual(flat, line.residuals.get(fragment.index), line.feedback, target)
            if not line.ranks.all(finite):
                raise PayloadError("the pseudo-gradient with what was dropped before is not finite")
        made = _gradients(line, fragment, anchor, local) if target is None else _cut(target, fragment)
        pieces = ((part, line.codecs[fragment.group_of(part)], values) for part, values in made)
        parts = line.encode(fragment.parts, pieces)
    contribution = Contribution(fragment.index, line.state.version, 0, 0, 0, parts)
    sent = Sent(contribution, local, anchor, None if line.feedback is None else target)
    if line.merge != "eager" or gradient is None:
        return sent
    return _look_ahead(line, sent, fragment, gradient, 1.0 / trainers)


Made = Iterable[tuple[int, Callable[[], Tensor]]]
"""The number of each part that is held here, and what makes its values."""


def _cut(flat: Tensor, fragment: Fragment) -> Made:
    return ((part, partial(flat.__getitem__, slice(*bounds))) for part, bounds in fragment.cuts.items())


def _gradients(line: Line, fragment: Fragment, anchor: Tensor, local: Tensor | None) -> Made:
    """`local` None: of the weights as they stand."""

    def gradient(at: slice, weights: Callable[[], Tensor]) -> Tensor:
        return pseudo_gradient(anchor[at], weights())

    cuts = fragment.cuts
    made = line.weights.parts(fragment) if local is None else _cut(local, fragment)
    return ((part, partial(gradient, slice(*cuts[part]), weights)) for part, weights in made)


def keep_local(line: Line) -> None:
    """Inner steps follow while a contribution is on its way: what they change is progress of the next one."""
    if line.sent is not None and line.sent.local is None:
        line.ranks.announce("keep_local")
        kept_local(line)


def kept_local(line: Line) -> None:
    """`keep_local` on one rank."""
    if line.sent is not None:
        contribution = line.sent.contribution
        len(contribution.parts[:])  # waits: it may be made of these very weights
        line.sent = replace(line.sent, local=line.weights.read(line.layout.fragments[contribution.fragment]))


def _look_ahead(line: Line, sent: Sent, fragment: Fragment, gradient: Tensor, share: float) -> Sent:
    before = line.state.fragments[fragment.index]
    own = line.own.get(fragment.index) or line.optimizer.start(torch.zeros_like(gradient))
    foreseen = foresee(replace(own, steps=before.steps), gradient, share, line.optimizer)
    line.weights.write(fragment, before.anchor + foreseen.anchor)
    local = line.weights.read(fragment)  # as rounded to the parameters' dtype
    return replace(sent, local=local, unsent=local + gradient, foreseen=foreseen)


def withdraw(line: Line) -> None:
    """What was sent comes to nothing, and nobody holds it: it is progress again, unless a version counts it."""
    sent = line.sent
    if sent is not None and sent.passed is not None:
        return
    line.ranks.announce("withdraw")
    if sent is not None and sent.foreseen is not None:
        _forget_foreseen(line, sent)
    line.sent = None


def _forget_foreseen(line: Line, sent: Sent) -> None:
    """Take out of the local weights what `eager` foresees."""
    fragment = line.layout.fragments[sent.contribution.fragment]
    anchor = line.weights.rounded(fragment, line.state.fragments[fragment.index].anchor)
    line.weights.write(fragment, carry(line.weights.read(fragment), sent.unsent, anchor))


@contextmanager
def weights_to_keep(line: Line) -> Iterator[None]:
    """Meanwhile the model holds anchor plus all progress that is not committed: without what `eager` foresees.

    A checkpoint holds these, for a contribution that is on its way is progress after a restart.
    """
    line.ranks.announce("stand_without_foreseen")
    sent = line.sent
    if sent is None or sent.foreseen is None:
        try:
            yield
        finally:
            line.ranks.announce("stand_back")
        return
    fragment = line.layout.fragments[sent.contribution.fragment]
    local = line.weights.read(fragment)
    _forget_foreseen(line, sent)
    try:
        yield
    finally:
        line.ranks.announce("stand_back")
        line.weights.write(fragment, local)


@contextmanager
def weights_at_anchor(line: Line) -> Iterator[None]:
    """Meanwhile the model holds the anchor."""
    line.ranks.announce("stand_at_anchor")
    local = [line.weights.read(fragment) for fragment in line.layout.fragments]
    try:
        for fragment in line.layout.fragments:
            line.weights.write(fragment, line.state.fragments[fragment.index].anchor)
        yield
    finally:
        line.ranks.announce("stand_back")
        for fragment, weights in zip(line.layout.fragments, local, strict=True):
            line.weights.write(fragment, weights)


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
        if mine is None and commit.version == line.state.version + 1:
            withdraw(line)  # not counted for certain: all of it is still progress
        elif line.sent is not None:  # by this version, or perhaps by one that we have not seen
            line.sent = replace(line.sent, passed=line.sent.passed or commit)
        line.diverged = True
        raise Diverged(commit.version)
    sent = line.sent
    in_place = mine is not None and _needs_no_anchor(line, commit) and line.spare()
    counted = mine is not None
    line.ranks.announce("apply", commit=commit.to_bytes().decode(), counted=counted, in_place=in_place)
    move_anchor(line, closed, counted, in_place, seconds)
    line.ranks.all(True)  # stand there, too, before anybody asks for it
    if mine is not None and sent is not None:
        seconds[FLIGHT] = monotonic_s() - sent.since_s
        line.trained.subtract(mine)
    if mine is not None or not line.trained.tokens:
        line.since = commit.version
    return mine


def _needs_no_anchor(line: Line, commit: Commit) -> bool:
    """Whether the merge of a version that counts us can do without the anchor before it."""
    return line.merge != "eager" and not any(entry.peer == line.peer for entry in commit.omitted)


def move_anchor(line: Line, closed: Closed, counted: bool, in_place: bool, seconds: dict[str, float]) -> None:
    """What `step_outer` does on one rank; `counted`: the version counts what was sent; `in_place`: the outer state
    before it is needed by nobody."""
    fragment = line.layout.fragments[closed.commit.fragment]
    before = line.state.fragments[fragment.index]
    if isinstance(closed, Ahead):
        with timed(seconds, "outer"):
            after = closed.after(in_place)
    else:
        with timed(seconds, "average"):
            mean = unpack(closed.parts, fragment, line.codecs)
        with timed(seconds, "outer"):
            share = line.weighing.share(closed.commit.counted, closed.commit.view)
            after = line.optimizer.step(before, mean, share=share)
    failpoints.hit("before-merge")
    with timed(seconds, "merge"):
        _merge(line, closed.commit, fragment, counted, before.anchor, after.anchor)
        line.state = line.state.replace(fragment.index, after, closed.commit.version)
        if counted:
            _settle(line, closed.commit, fragment, before.steps)
        else:
            _pass_over(line, closed.commit, fragment, before.steps)
        complete(line, after)
    line.commit, line.sent = closed.commit, None


def complete(line: Line, state: FragmentState) -> None:
    """The ranks tell each other the hashes of the parts that they hold."""
    fragment = state.fragment
    if fragment is None or fragment.lanes == 1:
        return
    own = state.own_hashes
    told = line.ranks.gather(" ".join(text for name in own for text in own[name].values()))
    hashes = {name: [""] * fragment.parts for name in own}
    for lane, text in enumerate(told):
        cuts = fragment.on_lane(lane, fragment.lanes).cuts
        for (name, part), digest in zip(((name, part) for name in own for part in cuts), text.split(), strict=True):
            hashes[name][part] = digest
    state.keep_hashes(hashes)


def _merge(line: Line, commit: Commit, fragment: Fragment, counted: bool, old: Tensor, new: Tensor) -> None:
    """The local weights onto the new anchor. A part that omits us, or a version, leaves what we sent progress."""
    sent = line.sent
    unsent = line.weights.rounded(fragment, old) if sent is None else sent.unsent
    base = sent.local if counted and sent is not None else unsent
    omitted = _omitted(line, commit, fragment) if counted else []
    mixes = counted and line.merge == "mix"
    if not omitted and not mixes:
        carry_fragment(line.weights, fragment, base, new)
        return
    onto = line.weights.rounded(fragment, new)

    def merged(local: Tensor, at: slice) -> Tensor:
        anchor = onto[at]
        after = mix(local, anchor, line.mix_alpha) if mixes else carry_piece(local, base, onto, at).clone()
        for start, stop in omitted:
            here = slice(max(start - at.start, 0), max(stop - at.start, 0))
            after[here] = carry(local[here], unsent[at][here], anchor[here])
        return after

    line.weights.change(fragment, merged)


def _omitted(line: Line, commit: Commit, fragment: Fragment) -> list[tuple[int, int]]:
    """Bounds of the parts whose mean leaves us out, though the version counts us."""
    return [bounds for part, bounds in fragment.cuts.items() if not commit.counts(line.peer, part)]


def _settle(line: Line, commit: Commit, fragment: Fragment, steps: int) -> None:
    """What we sent is counted: what the codec dropped of it is the residual, what we foresaw has happened; not so in
    parts that omit us. `steps`: of the state before."""
    sent = line.sent
    assert sent is not None
    _leave_over(line, sent, fragment, lambda part: commit.counts(line.peer, part))
    if sent.foreseen is not None:
        own = line.own.get(fragment.index) or line.optimizer.start(torch.zeros_like(sent.unsent))
        for start, stop in _omitted(line, commit, fragment):
            _fade(line, own.part(start, stop), steps, sent.foreseen.part(start, stop))
        line.own[fragment.index] = sent.foreseen


def _leave_over(line: Line, sent: Sent, fragment: Fragment, counted: Callable[[int], bool]) -> None:
    """Of the parts that are `counted`, what the codec dropped of what was sent is the residual."""
    if sent.target is not None:
        before = line.residuals.get(fragment.index)
        left = left_over(sent.target, sent.contribution.parts, fragment, line.codecs, counted, before)
        line.residuals[fragment.index] = left


def _fade(line: Line, own: FragmentState, steps: int, into: FragmentState | None = None) -> FragmentState:
    """What our contributions made of the outer state, to `eager`, where a version has none: only momentum goes on."""
    return line.optimizer.step(replace(own, steps=steps), torch.zeros_like(own.anchor), into)


def _pass_over(line: Line, commit: Commit, fragment: Fragment, steps: int) -> None:
    """The version counts nothing that we know to have sent. `steps`: of the state before.

    An entry of our name is that of an earlier life, whose contribution had in it what the codec had dropped before: of
    the residual as much stays as after a copy of the state.
    """
    own, residual = line.own.get(fragment.index), line.residuals.get(fragment.index)
    if own is not None:
        line.own[fragment.index] = _fade(line, own, steps)
    if residual is None or not any(entry.peer == line.peer for entry in commit.counted):
        return
    left = residual.clone()  # a checkpoint may hold the other
    for part, (start, stop) in fragment.cuts.items():
        if commit.counts(line.peer, part):
            left[start:stop] *= line.residual_after_rejoin
    line.residuals[fragment.index] = left


def adopt_state(line: Line, state: OuterState, commit: Commit | None) -> tuple[Counted | None, int]:
    """Take over a copied state; progress that is not committed yet is carried onto the new anchor.

    A contribution that was sent may be counted in the versions that were skipped, and must not count twice: it is not
    carried. Returns its entry, if a version that we know counts it; else None, and its tokens, which are discarded.
    Where none was skipped, as the state is that of the version at which we stand, it stays sent: the next version may
    still count it, and nothing in its place.
    """
    stays = commit is not None and commit == line.commit
    if stays:
        keep_local(line)
    given_up = line.sent.contribution.tokens if line.sent is not None and not stays else 0
    mine = _counted_on_the_way_to(line, commit)
    steps = [fragment.steps for fragment in state.fragments]
    line.ranks.announce("adopt", version=state.version, steps=steps, stays=stays)
    adopted(line, state, stays)
    line.diverged = False
    line.ranks.all(True)
    if stays:
        return None, 0
    line.commit = commit
    line.trained = Trained(line.trained.tokens - given_up, 0)  # the lease is another one, too
    if not line.trained.tokens:
        line.since = state.version
    return mine, 0 if mine is not None else given_up


def _counted_on_the_way_to(line: Line, commit: Commit | None) -> Counted | None:
    """What was sent, as a version counts it that leads to the state of `commit`: that version itself, or one that we
    could not apply. None: it is not counted, or nobody told us."""
    if line.sent is None or commit is None:
        return None
    sent = line.sent.contribution
    mine = Counted(line.peer, sent.base_version, sent.weight, sent.tokens, sent.blocks)
    told = [line.sent.passed] if line.sent.passed is not None and line.sent.passed.lineage == commit.lineage else []
    return mine if any(mine in version.counted for version in (*told, commit)) else None


def adopted(line: Line, state: OuterState, stays: bool = False) -> None:
    """`adopt_state` on one rank. `stays`: it is of the same version, and what was sent stays sent.

    Else what was sent is the run's or given up, and the residual with it: what the codec dropped of it remains.
    """
    sent, line.sent = line.sent, None
    for fragment, before, after in zip(line.layout.fragments, line.state.fragments, state.fragments, strict=True):
        base: Tensor | None = line.weights.rounded(fragment, before.anchor)
        if sent is not None and sent.contribution.fragment == fragment.index:
            if stays:
                line.sent = _moved(line, fragment, sent, before.anchor, after.anchor)
            else:
                base = sent.local
                _leave_over(line, sent, fragment, lambda part: True)
        carry_fragment(line.weights, fragment, base, after.anchor)
        complete(line, after)
    line.state = state
    if stays:
        return
    line.own.clear()
    kept = line.residual_after_rejoin
    line.residuals = {index: residual * kept for index, residual in line.residuals.items()} if kept else {}


def _moved(line: Line, fragment: Fragment, sent: Sent, old: Tensor, new: Tensor) -> Sent:
    """What was sent stays sent, and the anchor under it turned out to be another."""
    rounded = partial(line.weights.rounded, fragment)
    base, onto = rounded(old), rounded(new)
    local = None if sent.local is None else rounded(carry(sent.local, base, onto))
    return replace(sent, local=local, unsent=carry(sent.unsent, base, onto))


def drop_progress(line: Line) -> int:
    """Go back to the anchor. Returns the tokens that are discarded by that; their data blocks stay used."""
    line.ranks.announce("drop")
    dropped(line)
    discarded, line.trained.tokens = line.trained.tokens, 0
    line.since = line.state.version
    return discarded


def dropped(line: Line) -> None:
    """`drop_progress` on one rank."""
    for fragment in line.layout.fragments:
        line.weights.write(fragment, line.state.fragments[fragment.index].anchor)
    line.sent = None


class Diverged(Exception):
    """Our state is not the one that a version was made on: it must be copied anew."""

    def __init__(self, version: int) -> None:
        super().__init__(f"version {version} was made on another state than ours")
