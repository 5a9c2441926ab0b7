"""Pure decisions about who does what in a version: coordinator, majority, spans, and when a group is complete.

Every function takes all that it needs as arguments and, where it decides, returns the reason with the decision.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from diloco.exchange.messages import Span
from diloco.types import Member


def coordinator(run: str, version: int, attempt: int, view: Sequence[Member]) -> Member:
    """Who coordinates an attempt: a different member each time, by hash; nobody is special for ever."""
    seed = hashlib.sha256(f"{run}/{version}".encode()).digest()
    first = int.from_bytes(seed[:8], "big")
    trainers = [member for member in view if not member.witness]
    return trainers[(first + attempt) % len(trainers)]


def votes_needed(members: int, gone: int) -> int:
    """How many votes of a view of `members` decide when `gone` of them are dead for certain and vote no more.

    A majority of all, and where a half of an even view is dead for certain, the other half: its votes are then all
    that there are. Two coordinators may know of different deaths; whichever they know of, what one decided the other
    finds among its own votes. Two of two, one of two when the other is dead; three of five, also when two are dead.
    """
    halved = members % 2 == 0 and gone >= members // 2
    return members // 2 if halved else members // 2 + 1


def spans(parts: int, owners: Sequence[str]) -> tuple[Span, ...]:
    """Cut `parts` parts into consecutive spans of nearly equal length, one per owner."""
    bounds = [parts * i // len(owners) for i in range(len(owners) + 1)]
    pieces = zip(owners, bounds, bounds[1:], strict=False)
    return tuple(Span(owner, start, stop) for owner, start, stop in pieces if stop > start)


def respan(
    current: Sequence[Span], wanted: Collection[int], gone: Collection[str], owners: Sequence[str]
) -> list[Span]:
    """The spans of a repair: parts of `gone` that are still `wanted` go to `owners`, in turn; all others stay."""
    owner = {part: span.owner for span in current for part in range(span.start, span.stop)}
    lost = [part for part, peer in owner.items() if peer in gone and part in wanted]
    for piece in spans(len(lost), owners):
        owner |= dict.fromkeys(lost[piece.start : piece.stop], piece.owner)
    return as_spans(owner)


def as_spans(owner: Mapping[int, str]) -> list[Span]:
    """Runs of consecutive parts with one owner."""
    found: list[Span] = []
    for part in sorted(owner):
        last = found[-1] if found else None
        if last is not None and last.stop == part and last.owner == owner[part]:
            found[-1] = Span(last.owner, last.start, part + 1)
        else:
            found.append(Span(owner[part], part, part + 1))
    return found


@dataclass(frozen=True, slots=True)
class Policy:
    """When a version closes."""

    quorum_peers: int | None
    """None: `sync`, all live members. K: `quorum`, K of them and whoever comes within `grace_s` of the K-th."""
    grace_s: float
    match_deadline_s: float
    most_peers: int | None = None
    """More do not contribute to one version: they take turns. None: no limit."""
    """How long the first to be ready waits for a live member under `sync`."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The contributors of an attempt, or None to wait; and why."""

    group: tuple[str, ...] | None
    reason: str
    routine: bool = False
    """Nothing that anybody needs to know."""


def decide(
    policy: Policy,
    now: float,
    view: Sequence[str],
    expected: Sequence[str],
    offered_at: Mapping[str, float],
    state_digests: Mapping[str, str],
) -> Decision:
    """Who contributes to the attempt, as soon as it may begin.

    `view`: its trainers, in order; `expected`: those of them that live and whose contribution did not fail before.
    `offered_at` says when those who are ready offered, `state_digests` what they stand on: peers that stand on
    another state than most others are left out, for their pseudo-gradient is measured against another anchor.
    """
    offering = [peer for peer in expected if peer in offered_at]
    agreed = _same_state(offering, state_digests)
    late = [peer for peer in expected if peer not in offering]
    if not agreed:
        return Decision(None, "nobody has a contribution yet")
    if not late:
        missing = [peer for peer in view if peer not in agreed]
        without = f"; without {', '.join(missing)}" if missing else ""
        return Decision(tuple(agreed), f"all {len(agreed)} live members are ready{without}", routine=not missing)
    times = sorted(offered_at[peer] for peer in agreed)
    if policy.quorum_peers is None:
        return _decide_sync(policy, now - times[0], agreed, late)
    return _decide_quorum(policy.quorum_peers, policy.grace_s, now, times, agreed, late)


def in_turn(group: Sequence[str], most: int | None, version: int) -> tuple[str, ...]:
    """At most so many of a group, in its order; the next version begins where this one ends."""
    if most is None or len(group) <= most:
        return tuple(group)
    start = version * most % len(group)
    chosen = {*group[start : start + most], *group[: max(start + most - len(group), 0)]}
    return tuple(peer for peer in group if peer in chosen)


def _decide_sync(policy: Policy, waited_s: float, agreed: Sequence[str], late: Sequence[str]) -> Decision:
    if waited_s >= policy.match_deadline_s:
        return Decision(tuple(agreed), f"closing without {', '.join(late)} after {policy.match_deadline_s:g} s")
    return Decision(None, f"waiting for {', '.join(late)}", routine=True)


def _decide_quorum(
    quorum: int, grace_s: float, now: float, times: Sequence[float], agreed: Sequence[str], late: Sequence[str]
) -> Decision:
    if len(agreed) < quorum:
        return Decision(None, f"{len(agreed)} of a quorum of {quorum} are ready", routine=True)
    if now - times[quorum - 1] >= grace_s:
        reason = f"a quorum of {quorum} and {grace_s:g} s of grace; without {', '.join(late)}"
        return Decision(tuple(agreed), reason, routine=True)
    return Decision(None, f"a quorum is ready; {grace_s:g} s of grace for {', '.join(late)}", routine=True)


def _same_state(peers: Sequence[str], state_digests: Mapping[str, str]) -> list[str]:
    """The largest set of peers that hold the same anchor and outer state."""
    groups: dict[str, list[str]] = {}
    for peer in peers:
        groups.setdefault(state_digests[peer], []).append(peer)
    return max(groups.values(), key=len, default=[])
