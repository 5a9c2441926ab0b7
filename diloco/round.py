"""The straight line of DiLoCo (arXiv 2311.08105, algorithm 1), in the order in which it happens:

    inner steps -> pseudo-gradient -> compress -> exchange -> average -> outer step -> merge

`run_round` is one round on rank 0. What it decides, every rank of an island does to its own parts: `measure` (2, 3) and
`apply` (5 to 7). Everything that makes it survive dead peers, slow links and late joiners is behind `exchanged`;
everything about tensors is a pure function of one file of `outer/` with the step's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from diloco.base import failpoints
from diloco.base.clock import monotonic_s
from diloco.base.decisions import Apply, Measure
from diloco.base.life import Life, answered
from diloco.base.memory import empty_as
from diloco.base.types import Closed, Contribution, Skip
from diloco.compress import PayloadError
from diloco.compress.encoding import Encoded
from diloco.observe.events import FLIGHT, timed
from diloco.outer.line import MAX_VALUE, Line, PendingContribution, complete, fade_residual, keep_residual
from diloco.outer.optimizers import Stepped
from diloco.outer.pseudograd import aligned, gradients, pseudo_gradient, with_residual

Seconds = dict[str, float]
"""Time by step of the line, each measured on the thread that did the work."""


class Rounds(Protocol):
    """The interface of a peer's life (`diloco.peer.life`) to its rounds. Every method is a piece of life."""

    line: Line

    def train(self, steps: int) -> Life[None]:
        """The round's inner steps, so many, by whoever trains; fewer where others wait, or this peer leaves."""

    def offered(self, overlaps: bool, seconds: Seconds) -> Life[None]:
        """The round's pseudo-gradient, measured by every rank, and given to the exchange."""

    def exchanged(self) -> Life[Sequence[Closed] | Skip]:
        """The round's exchange: versions that closed, the contribution counted or not; or why none did."""

    def withdrawn(self) -> Life[None]:
        """A round without a version: nobody holds the contribution, and it is progress again."""

    def applied(self, closed: Closed, seconds: Seconds) -> Life[None]:
        """A version that closed in the round, applied by every rank."""


def run_round(peer: Rounds, steps: int, overlap: int) -> Life[Sequence[Closed] | Skip]:
    """One round. Returns the versions that closed, this peer counted or not, or why none did: then nothing is lost.

    `steps`: inner steps before the contribution is measured; `overlap`: while it is on its way. Whoever trains on after
    it, however it ended, keeps the local weights first. Raises Diverged, and PayloadError where the progress is not
    finite.
    """
    seconds: Seconds = {}
    with timed(seconds, "inner"):
        yield from peer.train(steps)  # 1 inner steps
    yield from peer.offered(overlap > 0, seconds)  # 2 pseudo-gradient, 3 compress: `measure`
    with timed(seconds, "inner"):
        yield from peer.train(overlap)
    with timed(seconds, "exchange"):
        outcome = yield from peer.exchanged()  # 4 exchange
    if isinstance(outcome, Skip):
        if not outcome.exposed:
            yield from peer.withdrawn()
        return outcome
    for closed in outcome:
        yield from peer.applied(closed, seconds)  # 5 average, 6 outer step, 7 merge: `apply`
    return outcome


def measure(line: Line, how: Measure, seconds: Seconds) -> PendingContribution:
    """Steps 2 and 3 of a round on one rank: the due fragment's pseudo-gradient, compressed. It becomes `line.sent`.

    Raises PayloadError, on all ranks alike, when it is not finite. Where nobody needs it whole it is made part by part
    by whoever encodes it; and where nothing overlaps, of the weights themselves, which must not change until
    `keep_local`. `eager` also moves the local weights to where the outer step will have them, as far as is known.
    """
    fragment = line.layout.fragments[how.fragment]
    before = line.state.fragments[fragment.index]
    with timed(seconds, "pseudo_gradient"):
        if not line.ranks.all(line.weights.within(fragment, MAX_VALUE) and before.largest <= MAX_VALUE):
            raise PayloadError("the pseudo-gradient is not finite")
        anchor = line.weights.rounded(fragment, before.anchor)
        whole = line.feedback is not None or line.merge.needs_gradient or line.align
        local = line.weights.read(fragment, empty_as(anchor)) if whole or how.overlaps else None
        gradient = pseudo_gradient(anchor, local, empty_as(anchor)) if whole and local is not None else None
    with timed(seconds, "compress"):
        target = gradient
        if target is not None and line.align:
            target = aligned(target, before.slots["momentum"], fragment, how.staleness, line.ranks.total)
        if target is not None and line.feedback is not None:
            flat = target
            target = empty_as(flat) if line.merge.needs_gradient else flat  # the gradient itself is needed once more
            finite = with_residual(flat, line.residuals.get(fragment.index), line.feedback, target)
            if not line.ranks.all(finite):
                raise PayloadError("the pseudo-gradient with what was dropped before is not finite")
        pieces = gradients(line.weights, fragment, line.codecs, anchor, local, target)
        parts = line.encode(fragment.parts, pieces)
    trained = line.trained
    weight = line.weighing.weight(trained.tokens, how.staleness, line.turns.leaves_over(line.committed))
    contribution = Contribution(
        fragment.index, line.boot, line.state.version, weight, trained.tokens, trained.blocks, parts
    )
    sent = PendingContribution(contribution, local, anchor, None if line.feedback is None else target)
    line.sent = line.merge.sent(line, sent, fragment, gradient, 1.0 / how.trainers)
    return line.sent


def apply(line: Line, version: Stepped, how: Apply, seconds: Seconds) -> Life[None]:
    """Steps 5 to 7 of a round on one rank. The lane makes average and outer step, part by part as the mean arrives,
    where it could begin before the commit; here they are awaited. Raises PayloadError when the mean is no mean."""
    commit = version.commit
    fragment = line.layout.fragments[commit.fragment]
    before = line.state.fragments[fragment.index]
    old, steps = before.anchor, before.steps
    yield from answered(version.averaged())  # 5 average
    after = yield from answered(version.outer(how.in_place))  # 6 outer step
    for name, spent_s in version.seconds.items():
        seconds[name] = seconds.get(name, 0.0) + spent_s
    failpoints.hit("before-merge")
    with timed(seconds, "merge"):
        line.merge.land(line, commit, fragment, how.counted, old, after.anchor)  # 7 merge
        line.state = line.state.replace(fragment.index, after, commit.version)
        if how.counted and line.sent is not None:
            _book_encoding(line.sent, seconds)
            keep_residual(line, line.sent, fragment, commit)
            line.merge.counted(line, line.sent, commit, fragment, steps)
        else:
            fade_residual(line, commit, fragment)
            line.merge.uncounted(line, fragment, steps)
        complete(line, after)
    line.commit, line.sent = commit, None


def _book_encoding(sent: PendingContribution, seconds: Seconds) -> None:
    """Book a round's steps 2 and 3 as far as another thread made them, and the time the contribution was on its way."""
    parts = sent.contribution.parts
    if isinstance(parts, Encoded):
        seconds["pseudo_gradient"] = seconds.get("pseudo_gradient", 0.0) + parts.made_s
        seconds["compress"] = seconds.get("compress", 0.0) + parts.encoded_s
    seconds[FLIGHT] = monotonic_s() - sent.since_s
