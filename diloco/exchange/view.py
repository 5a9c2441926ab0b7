"""Pure decisions about who does what in a version: coordinator, majority, spans, and when a group is complete.

Every function takes all that it needs as arguments and, where it decides, returns the reason with the decision.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from diloco.exchange.messages import Ready, Span
from diloco.types import Member


def coordinator(run: str, version: int, attempt: int, view: Sequence[Member]) -> Member:
    """Who coordinates an attempt: a different member each time, by hash; nobody is special for ever."""
    seed = hashlib.sha256(f"{run}/{version}".encode()).digest()
    first = int.from_bytes(seed[:8], "big")
    return view[(first + attempt) % len(view)]


def votes_needed(members: int, gone: int) -> int:
    """How many votes of a view of `members` decide when `gone` of them are dead for certain and vote no more.

    A majority of the living, and so many that every earlier majority of all members has somebody among them: what it
    accepted is then known. Two of two, one of two when the other is gone; three of five, also when two are gone.
    """
    majority = members // 2 + 1
    return max(members - majority + 1, (members - gone) // 2 + 1)


def spans(parts: int, owners: Sequence[str]) -> tuple[Span, ...]:
    """Cut `parts` parts into consecutive spans of nearly equal length, one per owner."""
    bounds = [parts * i // len(owners) for i in range(len(owners) + 1)]
    pieces = zip(owners, bounds, bounds[1:], strict=False)
    return tuple(Span(owner, start, stop) for owner, start, stop in pieces if stop > start)


@dataclass(frozen=True, slots=True)
class Decision:
    """The contributors of an attempt, or None to wait; and why."""

    group: tuple[str, ...] | None
    reason: str
    routine: bool = False
    """Nothing that anybody needs to know."""


def decide_sync(
    waited_s: float,
    deadline_s: float,
    view: Sequence[str],
    alive: Collection[str],
    ready: Mapping[str, Ready],
    without: Collection[str],
) -> Decision:
    """Policy `sync`: everybody alive contributes; after the deadline, those who are ready.

    `waited_s` counts from the first offer; `without` are peers whose contributions failed in the attempt before.
    Peers whose state digest differs from that of most others are left out: their pseudo-gradient is measured against
    another anchor.
    """
    expected = [peer for peer in view if peer in alive and peer not in without]
    offering = [peer for peer in expected if peer in ready and ready[peer].offer is not None]
    agreed = _same_state(offering, ready)
    late = [peer for peer in expected if peer not in offering]
    if not agreed:
        return Decision(None, "nobody has a contribution yet")
    if not late:
        reason = _because(f"all {len(agreed)} live members are ready", view, agreed)
        return Decision(tuple(agreed), reason, routine=len(agreed) == len(view))
    if waited_s >= deadline_s:
        return Decision(tuple(agreed), f"closing without {', '.join(late)} after {deadline_s:g} s")
    return Decision(None, f"waiting for {', '.join(late)}", routine=True)


def _same_state(peers: Sequence[str], ready: Mapping[str, Ready]) -> list[str]:
    """The largest set of peers that hold the same anchor and outer state."""
    groups: dict[str, list[str]] = {}
    for peer in peers:
        groups.setdefault(ready[peer].state_digest, []).append(peer)
    return max(groups.values(), key=len, default=[])


def _because(reason: str, view: Sequence[str], group: Sequence[str]) -> str:
    missing = [peer for peer in view if peer not in group]
    return f"{reason}; without {', '.join(missing)}" if missing else reason
