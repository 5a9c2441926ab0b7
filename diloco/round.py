"""The straight line of DiLoCo (arXiv 2311.08105, algorithm 1), in the order in which it happens:

    inner steps -> pseudo-gradient -> compress -> exchange -> average -> outer step -> merge

Read `run_round` first. Everything that makes it survive dead peers, slow links and late joiners is behind
`exchange`; everything about tensors is a pure function of one file with the step's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from diloco.base import failpoints
from diloco.base.clock import monotonic_s
from diloco.base.memory import empty_as
from diloco.base.types import Closed, Commit, Contribution, Counted, Skip
from diloco.compress import PayloadError
from diloco.observe.events import FLIGHT, timed
from diloco.outer.align import aligned
from diloco.outer.average import unpack
from diloco.outer.eager import look_ahead, withdraw
from diloco.outer.feedback import with_residual
from diloco.outer.gradients import cut, gradients
from diloco.outer.landing import merge_local, pass_over, settle
from diloco.outer.line import MAX_VALUE, Diverged, Sent, complete, keep_local
from diloco.outer.pseudograd import pseudo_gradient
from diloco.outer.stepping import Ahead

if TYPE_CHECKING:
    from diloco.outer.line import Exchanger, Line


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
        if not line.ranks.all(line.weights.within(fragment, MAX_VALUE) and before.largest <= MAX_VALUE):
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
        made = gradients(line, fragment, anchor, local) if target is None else cut(target, fragment)
        pieces = ((part, line.codecs[fragment.group_of(part)], values) for part, values in made)
        parts = line.encode(fragment.parts, pieces)
    contribution = Contribution(fragment.index, line.state.version, 0, 0, 0, parts)
    sent = Sent(contribution, local, anchor, None if line.feedback is None else target)
    if line.merge != "eager" or gradient is None:
        return sent
    return look_ahead(line, sent, fragment, gradient, 1.0 / trainers)


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
        merge_local(line, closed.commit, fragment, counted, before.anchor, after.anchor)
        line.state = line.state.replace(fragment.index, after, closed.commit.version)
        if counted:
            settle(line, closed.commit, fragment, before.steps)
        else:
            pass_over(line, closed.commit, fragment, before.steps)
        complete(line, after)
    line.commit, line.sent = closed.commit, None
