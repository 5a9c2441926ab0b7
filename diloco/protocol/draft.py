"""Drafting the next commit: what a coordinator proposes to the voters, of all that it knows of members and leases."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from diloco.base.types import Commit, Member, Voter
from diloco.protocol import leases
from diloco.protocol.reduction import Reduction
from diloco.protocol.view import Rules
from diloco.protocol.vote import most_named

if TYPE_CHECKING:
    from diloco.protocol.chain import Chain
    from diloco.protocol.lineage import Lineage
    from diloco.protocol.membership import Membership


class Drafter:
    """The drafter's role in the protocol: the content of commits. It decides nothing, and has no state."""

    chain: Chain
    lineage: Lineage
    membership: Membership

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def version_commit(self, reduction: Reduction) -> Commit:
        """The commit that makes the next version of a complete mean: contributions, next view and voters, leases."""
        before, membership = self._head(), self.membership
        counted, omitted = reduction.counted()
        used = {entry.peer: entry.blocks for entry in counted}
        leaving = membership.leavers() | ({*reduction.begin.leaving} & used.keys())  # one not counted offers it again
        left = leaving | (before.leases.held.keys() - {member.peer for member in before.view})  # by view commits
        left -= membership.electorate.evicted | self.chain.evicted  # nobody knows on which data those trained
        view, voters = self._next_view(leaving)
        names = [member.peer for member in view if not member.witness]
        return Commit(
            version=self.chain.making,
            height=before.height + 1,
            previous=before.digest,
            lineage=self.lineage.name,
            fragment=self.chain.fragment,
            view=tuple(view),
            voters=voters,
            evicted=tuple(sorted(membership.electorate.evicted)),
            counted=counted,
            omitted=omitted,
            mean_digest=reduction.mean_digest,
            tokens=before.tokens + sum(entry.tokens for entry in counted),
            leases=leases.advance(before.leases, used, names, self._rules.bounds.lease_blocks, left),
            state_digest=reduction.begin.state_digest,
        )

    def _head(self) -> Commit:
        assert self.chain.commit is not None
        return self.chain.commit

    def _next_view(self, leaving: Collection[str]) -> tuple[list[Member], tuple[Voter, ...]]:
        """View and voters that the next version commit names: members that stay, in their order, then those that join.

        It names learners as voters (rules 8 and 9 of `docs/how/protocol.md`), or else keeps a silent voter.
        """
        membership, before = self.membership, self._head()
        alive = [member for member in membership.alive() if not membership.roster.barred(member.peer)]
        alive = alive or membership.alive()
        stay = [member for member in alive if member.peer not in leaving]
        join = [member for member in membership.newcomers() if member.peer not in leaving]
        voting = {*before.voting}
        successors = membership.successors(leaving)
        if not successors and all(member.witness for member in stay if member in voting):
            stay = membership.alive()  # somebody must go on training, and vote
        kept = {member.peer for member in stay if member in voting}
        earlier = {voter.peer for voter in before.voters if voter.since < before.version}
        proven = [one for one in stay if one in voting and one.peer in earlier and membership.is_here(one)]
        learners = [member for member in stay if member not in voting and membership.is_reached(member)]
        named = successors or learners[: most_named(len(kept), len(proven))]
        silent = None if named or len(kept) % 2 else self._keep_one_silent_voter(kept, leaving)
        stays = (member for member in before.view if member in stay or member == silent)
        view = [*map(membership.roster.latest, stays), *join]
        old = {*kept, *([silent.peer] if silent is not None else [])}
        voters = [self._named_again(voter) for voter in before.voters if voter.peer in old]
        return view, (*voters, *(Voter(one.peer, membership.boot_of(one), self.chain.making) for one in named))

    def _voters_without(self, leaving: Collection[str]) -> list[Voter]:
        """Voters that stay when some leave; without the silent ones, where those that live would be no majority. Where
        none of them trains and lives, learners vote from now on."""
        before, membership = self._head(), self.membership
        stay = [voter for voter in before.voters if voter.peer not in leaving]
        alive = {member.peer for member in membership.alive()}
        live = [voter for voter in stay if voter.peer in alive]
        if not leaving:
            return stay
        new = [Voter(one.peer, membership.boot_of(one), before.version) for one in membership.successors(leaving)]
        return [*(stay if 2 * len(live) > len(stay) and not new else live), *new]

    def _named_again(self, voter: Voter) -> Voter:
        """A voter with the latest process of its life that is known here."""
        member = self._head().member(voter.peer)
        known = self.membership.boot_of(member) if member is not None else 0
        return replace(voter, boot=max(voter.boot, known))

    def _keep_one_silent_voter(self, kept: Collection[str], leaving: Collection[str]) -> Member | None:
        """One lost voter to keep in the next view, at no cost in votes: two of three decide as two of two would.

        It may only be out of reach. When it is back it has its place and its vote; if another died meanwhile, those
        two decide.
        """
        membership = self.membership
        gone = membership.electorate.voters() - set(kept) - set(leaving)
        silent = {one for one in self._head().voting if one.peer in gone and not membership.is_dead(one)}
        heard = {member: membership.roster.last_heard_s(member) for member in silent}
        lost = {member: at_s for member, at_s in heard.items() if at_s is not None}
        return max(lost, key=lambda member: lost[member], default=None)

    def view_commit(self) -> Commit:
        """The commit that changes members while the version is being made, and nothing else."""
        before, membership = self._head(), self.membership
        leaving, join = membership.leavers(), membership.learners()
        trainers = [member.peer for member in join if not member.witness]
        return replace(
            before,
            height=before.height + 1,
            previous=before.digest,
            fragment=-1,
            drafter=membership.me.peer,
            view=(*(membership.roster.latest(one) for one in before.view if one.peer not in leaving), *join),
            voters=tuple(map(self._named_again, self._voters_without(leaving))),
            evicted=tuple(sorted(membership.electorate.evicted)),
            counted=(),
            omitted=(),
            mean_digest="",
            leases=leases.advance(before.leases, {}, [*before.leases.held, *trainers], self._rules.bounds.lease_blocks),
            state_digest="",
        )
