"""Leases of data blocks to peers: a pure function from one version's leases to the next.

Leases travel in the commits, so all members agree on them whatever happens to the view, and no two peers ever hold
the same position. Positions count blocks over all epochs; `diloco.data.reader` maps a position to a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from diloco.base.types import Blocks, Commit, Leases


def found(view: Sequence[str], need: int) -> Leases:
    """The first leases of a run: `need` data blocks for each peer of the founding view."""
    return advance(Leases(cursor=0, held={}), {}, view, need)


def advance(
    leases: Leases,
    used: Mapping[str, int],
    view: Sequence[str],
    need: int,
    leaving: AbstractSet[str] = frozenset(),
) -> Leases:
    """The leases after a commit that counts the first `used[peer]` blocks of each peer's lease.

    Blocks that a peer outside `view` did not use go to `returned` if the peer is one of `leaving`. Else they are lost,
    for nobody knows which of them it trained on. Then every peer in `view`, in that order, is topped up to `need`
    blocks, from `returned` before new ones. A member's blocks only lose their front and grow at their end, so that the
    place where it reads stays valid. Raises ValueError when more is used than held.
    """
    rest = {peer: without_front(held, used.get(peer, 0)) for peer, held in leases.held.items()}
    if any(count for peer, count in used.items() if peer not in rest):
        raise ValueError(f"blocks used by peers without a lease: {sorted(set(used) - set(rest))}")
    gone = [peer for peer in rest if peer not in view]
    handed_back = [blocks for peer in gone if peer in leaving for blocks in rest[peer]]
    lost = leases.lost + sum(count(rest[peer]) for peer in gone if peer not in leaving)
    returned = joined(sorted([*leases.returned, *handed_back], key=lambda blocks: blocks.start))
    cursor, held = leases.cursor, {}
    for peer in view:
        mine = rest.get(peer, ())
        missing = max(0, need - count(mine))
        again, returned = front(returned, missing), without_front(returned, min(missing, count(returned)))
        new = Blocks(cursor, cursor + missing - count(again))
        cursor = new.stop
        held[peer] = joined([*mine, *again, new])
    return Leases(cursor, held, returned, lost)


def handed_back(before: Leases, used: Mapping[str, int], after: Leases) -> dict[str, bool]:
    """Peers whose lease of data blocks ended with a commit; True where others may lease the blocks that it left.

    True for leavers, False for the dead (`advance`). Peers that had used all of their blocks are not among the keys.
    """
    there = [*after.returned, *(blocks for held in after.held.values() for blocks in held)]
    gone = {peer: held for peer, held in before.held.items() if peer not in after.held}
    unused = {peer: held[-1].stop - 1 for peer, held in gone.items() if used.get(peer, 0) < count(held)}
    return {peer: any(blocks.start <= last < blocks.stop for blocks in there) for peer, last in unused.items()}


def ended_leases(before: Commit, after: Commit) -> dict[str, bool]:
    """Peers whose leases ended with a commit; True where their data went back to the others (`handed_back`)."""
    return handed_back(before.leases, {counted.peer: counted.blocks for counted in after.counted}, after.leases)


def count(held: Iterable[Blocks]) -> int:
    """Number of data blocks in the runs of a lease."""
    return sum(map(len, held))


def front(held: Iterable[Blocks], blocks: int) -> tuple[Blocks, ...]:
    """The first `blocks` data blocks of the lease `held`, or all of it when it has fewer."""
    taken = []
    for run in held:
        taken.append(Blocks(run.start, min(run.stop, run.start + blocks)))
        blocks -= len(taken[-1])
    return joined(taken)


def without_front(held: Iterable[Blocks], blocks: int) -> tuple[Blocks, ...]:
    """The lease `held` without its first `blocks` data blocks. Raises ValueError when it has fewer."""
    left = []
    for run in held:
        dropped = min(blocks, len(run))
        left.append(Blocks(run.start + dropped, run.stop))
        blocks -= dropped
    if blocks:
        raise ValueError(f"{blocks} blocks more than are held")
    return joined(left)


def joined(held: Iterable[Blocks]) -> tuple[Blocks, ...]:
    """A lease's data blocks in the same order, in as few runs as possible."""
    runs: list[Blocks] = []
    for run in held:
        if runs and runs[-1].stop == run.start:
            runs[-1] = Blocks(runs[-1].start, run.stop)
        elif len(run):
            runs.append(run)
    return tuple(runs)
