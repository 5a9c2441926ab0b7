"""Checks of the versions that a simulated peer applies, the states that it copies, the data blocks that it reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from diloco.base.life import Life
from diloco.base.types import Blocks, Closed, Commit, Contribution, Member, Skip
from diloco.outer.line import Diverged, Line
from diloco.outer.state import OuterState
from diloco.simulate.virtual.oracle.copies import SimulatedCopies, founded_here
from diloco.simulate.virtual.oracle.gate import Violation
from diloco.simulate.virtual.oracle.lanes import SimulatedLane

if TYPE_CHECKING:
    from diloco.peer.peer import Peer
    from diloco.simulate.virtual.process import SimulatedProcess

SOON_S = 0.3
"""A version that closed within this time may not have reached others."""
LEAVING_S = 1.5
"""Longest time that a peer which is to leave takes to give up a round."""


def bits(mask: int) -> Iterator[int]:
    """Numbers of the bits that are set."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


class SimulatedSteps:
    """Versions and states of one life of a simulated peer."""

    def __init__(self, process: SimulatedProcess, peer: Peer) -> None:
        """Look at each version just before it is applied."""
        self._process, self._line, self._exchange = process, peer.line, peer.exchange
        self._closed_s = -math.inf
        """When the latest version closed here."""
        self._copied = False
        """It has copied a state since it last began to."""
        self._outside_s = math.inf
        """Since when it waits in a round that cannot count it, and is to leave."""
        self._last: Contribution | None = None
        """Its latest offer, if it was to leave by then."""
        self._look_at_versions(peer)
        self._look_at_rounds(peer)
        SimulatedLane(process, peer.exchange)
        SimulatedCopies(process, peer.exchange)

    def _look_at_versions(self, peer: Peer) -> None:
        apply, process = peer.apply, self._process

        def on_apply(closed: Closed, seconds: dict[str, float]) -> Life[None]:
            misfit, before = self.applies(closed.commit), self._line.commit
            try:
                yield from apply(closed, seconds)
            except Diverged:
                self._diverges(closed.commit, before)
                raise
            if misfit:
                raise Violation("I1", misfit)

        peer.apply = on_apply  # type: ignore[method-assign]
        copy_again, untaken = peer.copy_again, peer.exchange.untaken
        restart = untaken.restart

        def on_copy_again(why: str) -> Life[None]:
            self._copied = False
            yield from copy_again(why)
            if not (self._copied or peer.exchange.behind or founded_here(peer.exchange)):
                raise Violation("I7", f"{process.name} got no state, and does not ask for one again")

        def on_restart(version: int, commit: Commit | None) -> tuple[Sequence[Commit], bool]:
            later, missing = restart(version, commit)
            self._goes_on(version, commit, later, missing)
            return later, missing

        peer.copy_again, untaken.restart = on_copy_again, on_restart  # type: ignore[method-assign]

    def _look_at_rounds(self, peer: Peer) -> None:
        exchange, process = peer.exchange, self._process
        leave_lineage = exchange._leave_lineage
        close, leave, go, offer, withdraw = exchange._close, exchange.leave, exchange.go, exchange.offer, peer.withdraw
        hold = exchange.archive.hold

        def on_hold(state: OuterState, commit: Commit | None, number: int) -> None:
            hold(state, commit, number)
            self._check_archive()

        def on_offer(contribution: Contribution, leaving: bool) -> Future[Skip | None]:
            self._offers(contribution, leaving)
            return offer(contribution, leaving)

        def on_withdraw() -> None:
            withdraw()
            if process.progress is not None:
                process.progress.pending = peer.line.sent is not None

        def on_close(commit: Commit) -> None:
            self._closed_s = process.world.now
            close(commit)
            self._check_untaken()

        def on_leave_lineage(source: Member, discarded_tokens: int) -> None:
            leave_lineage(source, discarded_tokens)
            if exchange.untaken:
                raise Violation("I8", f"{process.name} keeps versions of a lineage that ended, to apply them")
            if exchange.archive.backlog.after(-1):
                raise Violation("I8", f"{process.name} keeps versions of a lineage that ended, to give them to others")

        def on_leave() -> Future[None]:
            self.says_goodbye()
            left = leave()
            left.add_done_callback(gone)
            return left

        def on_go() -> None:
            go()
            gone()

        def gone(left: Future[None] | None = None) -> None:
            process.gone = True  # also where there is nobody to say it to

        exchange._leave_lineage = on_leave_lineage  # type: ignore[method-assign]
        exchange._close, exchange.leave, exchange.go = on_close, on_leave, on_go  # type: ignore[method-assign]
        exchange.offer, peer.withdraw = on_offer, on_withdraw  # type: ignore[method-assign]
        exchange.archive.hold = on_hold  # type: ignore[method-assign]

    def applies(self, commit: Commit) -> str:
        """I1: a version is applied to the state that it was made on, and after the commit before it.

        Returns why this one is not to be applied; empty if it may be. What follows a version that was made on another
        state is taken, too, where no state could be copied in between: then it is to be refused like that one.
        """
        line, name = self._line, self._process.name
        before = line.commit
        if before is None or commit.fragment < 0 or commit.version <= before.version:
            return ""
        other_state = commit.state_digest != line.state.digest and not self._process.drifted
        if commit.previous != before.digest or other_state:
            what = f"applies version {commit.version} at version {line.state.version}, which is not the one before it"
            return f"{name} {what}"
        return ""

    def _diverges(self, commit: Commit, before: Commit | None) -> None:
        """I1: a version that the copied state has is not taken for one that was made on another state."""
        if before is not None and commit.version <= before.version and commit.lineage == before.lineage:
            raise Violation("I1", f"{self._process.name} applies version {commit.version} again, at {before.version}")

    def _goes_on(self, version: int, commit: Commit | None, later: Sequence[Commit], missing: bool) -> None:
        """I5: after a copied state the peer applies what closed meanwhile, or copies a later one. Several view commits
        of the copied version may follow it, each on the one before."""
        closed = [one.commit for one in self._exchange.archive.backlog.after(version - 1)]
        leads_on = all(one.version <= version for one in closed) or any(one.version == version + 1 for one in closed)
        last, kept = commit.digest if commit is not None else "", []
        for one in closed:
            if one.version > version or (one.fragment < 0 and one.previous == last):
                last = one.digest
                kept.append(one)
        if missing == leads_on or (leads_on and later != kept):
            what = f"has copied version {version}, and goes on with {[commit.version for commit in later]}"
            raise Violation("I5", f"{self._process.name} {what} of {[commit.version for commit in kept]}")

    def says_goodbye(self) -> None:
        """I5: a peer leaves when others have the latest version, too, or did not take it for a while."""
        machine, world = self._exchange.machine, self._process.world
        if world.now - self._closed_s > SOON_S or self._process.gone:
            return
        there = [world.at(member) for member in machine.view if member != machine.me]
        others = [host for host in there if host is not None and host.working and not host.machine.gone]
        near = [host for host in others if world.network.connected(self._process.name, host.name)]
        if near and not any(host.machine.version >= machine.version for host in others):
            raise Violation("I5", f"{self._process.name} leaves with version {machine.version}, which nobody else has")

    def _offers(self, contribution: Contribution, leaving: bool) -> None:
        """I7: who leaves measures nothing more where no version can count it, as it is out of the view."""
        last, self._last = self._last, contribution if leaving else None
        outside = not self._exchange.machine.in_view and self._process.world.now - self._closed_s > SOON_S
        if outside and last is not None and self._last is not last:
            raise Violation("I7", f"{self._process.name} leaves, and measures once more out of the view")

    def waits(self) -> None:
        """I7: who leaves waits for no version that cannot count it, as it is out of the view."""
        process, now = self._process, self._process.world.now
        outside = process.leaving and process.waiting_since_s is not None and not self._exchange.machine.in_view
        self._outside_s = min(self._outside_s, now) if outside else math.inf
        if now - max(self._outside_s, process.thawed_s) > LEAVING_S:
            raise Violation("I7", f"{process.name} leaves, and waits for a version out of the view")

    def _check_untaken(self) -> None:
        """I7: versions wait for the training side as long as the backlog has them; else a copy of the state comes."""
        waiting = [closed.commit.version for closed in self._exchange.untaken._closed]
        kept = [closed.commit.version for closed in self._exchange.archive.backlog.after(-1)]
        if waiting and waiting[0] not in kept:
            raise Violation("I7", f"{self._process.name} is to apply versions {waiting}, and keeps {kept}")

    def _check_archive(self) -> None:
        """A simulated peer offers no state of a lineage that ended: nobody takes one, and it stays for ever. It keeps
        no more versions than it has to, or than fit in the memory of one state."""
        archive: Any = self._exchange.archive
        kept = [closed for closed in archive.backlog.after(-1) if closed.commit.moves]
        room = sum(buffer.nbytes for _, buffer in self._line.state.buffers())
        if len(kept) > self._process.world.setup.rules.backlog_versions:
            size = sum(len(part) for closed in kept for part in closed.parts)
            if size > room:
                raise Violation("I7", f"{self._process.name} keeps {len(kept)} versions with {size} bytes of means")
        here = archive.commit.lineage if archive.commit is not None else ""
        for snapshot in archive.snapshots._kept.values():
            commit = snapshot.offer.commit
            if here and commit is not None and commit.lineage != here:
                what = f"keeps a state of {commit.lineage} for others, which ended"
                raise Violation("I7", f"{self._process.name} {what}")

    def copied(self, before: Commit | None) -> None:
        """I5: a copied state is no earlier one of the same lineage. An offer of the one that is here costs no bytes."""
        self._copied = True
        after = self._line.commit
        if before is None or after is None or after.lineage != before.lineage:
            return
        if after.version < before.version:
            what = f"goes back from version {before.version} to version {after.version}"
            raise Violation("I5", f"{self._process.name} {what}")


class SimulatedBlocks:
    """Data blocks that all simulated peers read, and the pieces of progress that they were read for.

    Two lineages that parted lease the same blocks, and who comes back from one that ended may read some once more: only
    there a block is read for two pieces.
    """

    def __init__(self, back_from: Callable[[Commit], Iterator[str]]) -> None:
        """`back_from`: returns digests of the commits that led to one, and its own."""
        self._back_from = back_from
        self._pieces: dict[int, int] = {}
        """By block, as a bit mask."""
        self._read_at: dict[int, str] = {}
        """By piece: the commit at which its block was read."""
        self.brought = 0
        """Pieces that lives kept as they left a lineage for another, where their blocks may be leased anew."""

    def reads(self, name: str, line: Line, block: int, piece: int, counted: int) -> None:
        """I2: a simulated peer reads a block for a piece of progress. It is leased to it, and none of the pieces that
        are `counted`, or its own, was made of it. Who is out of the view reads on in a lease that others may have."""
        held = self._held(line, name)
        if held is None:
            return
        if not any(run.start <= block < run.stop for run in held):
            version = line.commit.version if line.commit is not None else -1
            raise Violation("I2", f"{name} reads block {block}, which version {version} does not lease to it")
        earlier = self._pieces.get(block, 0)
        again = earlier & counted & ~self.brought
        if again and not self._parted(line, again):
            raise Violation("I2", f"{name} reads block {block} once more, and its progress is counted or kept")
        self._pieces[block] = earlier | 1 << piece
        self._read_at[piece] = line.commit.digest if line.commit is not None else ""

    def sends(self, name: str, line: Line, contribution: Contribution, uncommitted: int) -> None:
        """I2: the blocks of a contribution, at the front of the lease, are those that were read for it."""
        held = self._held(line, name)
        if held is None:
            return
        blocks = [block for run in held for block in range(run.start, run.stop)]
        unread = [block for block in blocks[: contribution.blocks] if block not in self._pieces]
        own = uncommitted & ~self.brought
        read = ((block, self._pieces.get(block, 0) & own) for block in blocks[contribution.blocks :])
        rest = [block for block, mine in read if mine and not self._parted(line, mine)]  # it reads on until it copies
        if unread or rest:
            what = f"sends {contribution.blocks} blocks: {unread} of them it did not read, and not {rest}"
            raise Violation("I2", f"{name} {what}")

    def _parted(self, line: Line, pieces: int) -> bool:
        """Whether each of these pieces was read in a lineage that parted from that of the line."""
        shared = set(self._back_from(line.commit)) if line.commit is not None else set()
        return all(self._read_at[piece] not in shared for piece in bits(pieces))

    def _held(self, line: Line, name: str) -> Sequence[Blocks] | None:
        return line.commit.leases.held.get(name) if line.commit is not None else None
