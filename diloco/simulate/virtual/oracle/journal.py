"""The oracle follows the journal of a simulated peer: records of its ledger, and the states in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from diloco.base.types import Closed, Commit, Counted
from diloco.protocol.messages import Fork

if TYPE_CHECKING:
    from diloco.peer.peer import Peer
    from diloco.simulate.virtual.process import SimulatedProcess


def observe_journal(process: SimulatedProcess, peer: Peer) -> None:
    """Have the oracle follow what this simulated life notes. Its progress is followed already."""
    journal, progress = peer.journal, process.progress
    assert progress is not None
    opened, committed, adopted, discarded = journal.opened, journal.committed, journal.adopted, journal.discarded
    closed, line = journal.closed, peer.line
    before: Commit | None = None

    def on_opened(contract: Any) -> None:
        nonlocal before
        come_together()
        opened(contract)
        progress.opened()
        before = line.commit  # of a life that resumes: a copy may take it out of that lineage

    def on_committed(commit: Commit, mine: Counted | None, state_digest: str = "") -> None:
        if commit.fragment < 0 and not state_digest:
            come_together()  # before the record: whoever looks meanwhile finds none that the oracle lacks
        committed(commit, mine, state_digest)
        if state_digest:  # it was applied again, before this life began
            progress.redone(commit, state_digest)
            return
        progress.applied(commit, mine)
        if process.ranks and commit.fragment >= 0 and (parts := process.mean(commit.mean_digest)) is not None:
            process.world.invariants.on_mean(process, Closed(commit, parts))
        stands()

    def on_adopted(mine: Counted | None, discarded: int, forks: Sequence[Fork]) -> None:
        adopted(mine, discarded, forks)
        progress.adopted(mine, discarded, before)
        process.world.log(process.name, f"has copied version {line.state.version}")
        stands()

    def on_discarded(tokens: int, reason: str) -> None:
        discarded(tokens, reason)
        progress.dropped(tokens, peer.done)

    def on_closed(reason: str) -> None:
        closed(reason)
        progress.closes()

    def come_together() -> None:
        """The other ranks have done what rank 0 said, also where they need not meet for it."""
        if process.ranks is not None:
            process.ranks.come_together()

    def stands() -> None:
        """The line of the simulated peer stands at another version, or state."""
        nonlocal before
        before = process.line.commit
        if process.ranks is not None and not process.world.drifts:
            process.line.check()  # type: ignore[attr-defined]
        process.world.invariants.on_state(process, process.line)

    journal.opened, journal.committed = on_opened, on_committed  # type: ignore[method-assign]
    journal.adopted, journal.discarded = on_adopted, on_discarded  # type: ignore[method-assign]
    journal.closed = on_closed  # type: ignore[method-assign]
