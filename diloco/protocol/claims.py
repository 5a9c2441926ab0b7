"""Checks of what everybody can compute: a contribution's numbers, and what follows from one commit in the next.

Each returns the reason why no honest peer says so; empty: an honest peer may. A coordinator asks for each offer, a
contributor for each `Begin`, a voter for each proposal, every peer for each commit that it learns of or copies, and
`diloco audit` for all that ledgers have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from diloco.base.turns import Turns
from diloco.base.types import Commit, Counted, Leases
from diloco.protocol import leases

if TYPE_CHECKING:
    from diloco.config.contract import Contract

CLAIMED_ROUNDS: Final = 64
"""Rounds of tokens that one contribution may claim. A peer that was alone for longer gives up the credit for the rest
(`Peer.limit_claim`); its progress counts all the same."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Settings of the contract for what a peer may claim, and for what follows a commit."""

    contract: str
    """Digest of the contract."""
    turns: Turns
    lease_blocks: int
    """Data blocks that every trainer holds at least after a commit."""
    by_tokens: bool = False
    """Contributions weigh as many as their tokens, but those of what is left over; else all weigh the same."""
    whole: int = 1
    """Weight of one that is not late, where tokens do not decide."""
    late_weigh_less: bool = False
    max_tokens: int = 2**53
    """Most tokens of one contribution."""

    @staticmethod
    def of(contract: Contract) -> Bounds:
        """A contract's bounds. It does not know the tokens of an own loop's step: those have the run's as their end."""
        rounds = CLAIMED_ROUNDS * contract.max_steps_per_round * contract.tokens_per_step
        most = max(rounds, contract.run.total_tokens) if contract.model.kind == "external" else rounds
        outer = contract.outer
        weights = outer.weighting == "tokens", contract.whole_weight, outer.staleness_power > 0
        return Bounds(contract.digest, Turns.of(contract), contract.lease_blocks, *weights, most)


# ---------------------------------------------------------------- a contribution


def why_not_counted(claim: Counted, before: Commit, bounds: Bounds) -> str:
    """Reason why the version after `before` counts no such contribution; empty: it may."""
    held = before.leases.held.get(claim.peer)
    if held is None:
        return f"{claim.peer} holds no lease: it is no trainer"
    if claim.blocks > leases.count(held):
        return f"{claim.peer} claims {claim.blocks} data blocks, and its lease has {leases.count(held)}"
    if claim.base_version != before.version:
        return f"{claim.peer} measured on version {claim.base_version}, and not on {before.version}"
    return _why_not_so_much(claim, before.tokens, bounds)


def _why_not_so_much(claim: Counted, before_tokens: int, bounds: Bounds) -> str:
    """Reason why no contribution has these numbers after a commit with `before_tokens`."""
    if claim.tokens > bounds.max_tokens:
        return f"{claim.peer} claims {claim.tokens:,} tokens, and a contribution has {bounds.max_tokens:,} at most"
    by_tokens = bounds.by_tokens and not bounds.turns.leaves_over(before_tokens)
    most = max(claim.tokens if by_tokens else bounds.whole, 1)
    least = 1 if bounds.late_weigh_less else most
    if not least <= claim.weight <= most:
        return f"{claim.peer} claims weight {claim.weight:,}, and {claim.tokens:,} tokens weigh {least:,} to {most:,}"
    return ""


# ---------------------------------------------------------------- a commit


def why_malformed(commit: Commit, bounds: Bounds) -> str:
    """Reason why no honest peer drafts such a commit, whatever was before it; empty: one may."""
    voters, view = [voter.peer for voter in commit.voters], [member.peer for member in commit.view]
    if len({*view}) < len(view) or len({*voters}) < len(voters):
        return "it names a member or a voter twice"
    if not voters or not {*voters} <= {*view}:
        return "it has no voters, or some that are no members"
    if all(member.witness for member in commit.voting):
        return "no voter of it trains"
    if commit.height == 0:
        return _why_no_beginning(commit, bounds)
    return _why_no_version(commit, bounds) if commit.moves else _why_no_mean(commit)


def _why_no_beginning(commit: Commit, bounds: Bounds) -> str:
    trainers = [member.peer for member in commit.view if not member.witness]
    first = (bounds.contract, 0, 0, leases.found(trainers, bounds.lease_blocks))
    if not commit.founds or first != (commit.previous, commit.version, commit.tokens, commit.leases):
        return "it is the first of a run, and does not found it on version 0 with the contract's leases"
    return _why_no_mean(commit)


def _why_no_version(commit: Commit, bounds: Bounds) -> str:
    counted = {entry.peer: entry for entry in commit.counted}
    tokens = commit.tokens - sum(entry.tokens for entry in commit.counted)
    if commit.drafter or commit.fragment != bounds.turns.next(commit.version - 1, tokens):
        return f"version {commit.version} does not move fragment {commit.fragment}, and has no drafter"
    if not (commit.mean_digest and commit.state_digest):
        return "it makes a version and names no mean, or not the state before"
    if not counted or len(counted) < len(commit.counted):
        return "it counts nobody, or somebody twice"
    if any(entry.base_version != commit.version - 1 for entry in commit.counted):
        return "it counts a contribution that was measured on another version than the one before"
    if any(entry.peer not in counted or entry.start >= entry.stop for entry in commit.omitted):
        return "it omits parts of a contribution that it does not count"
    return next(filter(None, (_why_not_so_much(entry, tokens, bounds) for entry in commit.counted)), "")


def _why_no_mean(commit: Commit) -> str:
    """Reason why a commit is neither a view commit nor a founding."""
    if commit.counted or commit.omitted or commit.mean_digest:
        return "it makes no version, and counts contributions"
    if bool(commit.drafter) == bool(commit.state_digest):
        return "it is neither a view commit nor a founding"
    if commit.founds and [voter.since for voter in commit.voters] != [commit.version - 1]:
        return "a founding has one voter, the founder"
    return ""


def why_no_successor(before: Commit, commit: Commit, bounds: Bounds) -> str:
    """Reason why no honest peer drafts `commit` as the successor of `before`; empty: one may."""
    if (commit.previous, commit.height) != (before.digest, before.height + 1):
        return f"height {commit.height} does not follow height {before.height}"
    if reason := why_malformed(commit, bounds):
        return reason
    if commit.version != before.version + commit.moves:
        return f"version {commit.version} does not follow version {before.version}"
    if commit.founds == (commit.lineage == before.lineage):
        return "only a founding begins a lineage, and each begins another"
    if commit.tokens != before.tokens + sum(entry.tokens for entry in commit.counted):
        return f"{commit.tokens:,} tokens are not the {before.tokens:,} before and those that it counts"
    kinds = {member: member.witness for member in before.view}
    if any(kinds.get(member, member.witness) != member.witness for member in commit.view):
        return "it names a trainer as a witness, or a witness as a trainer"
    if not {*commit.evicted} <= {voter.peer for voter in before.voters}:
        return "it evicts one that is no voter"
    claims = (why_not_counted(entry, before, bounds) for entry in commit.counted)
    return next(filter(None, claims), "") or _why_no_leases(before, commit, bounds) or _why_no_voters(before, commit)


def _why_no_leases(before: Commit, commit: Commit, bounds: Bounds) -> str:
    """Reason why the leases of a commit are not those that follow from the leases before (`leases.advance`)."""
    trainers = [member.peer for member in commit.view if not member.witness]
    used = {entry.peer: entry.blocks for entry in commit.counted}
    if commit.drafter:
        stay = {member.peer: member for member in before.view}
        new = [peer for peer in trainers if peer not in stay]
        if commit.drafter not in {member.peer for member in before.voting}:
            return f"{commit.drafter}, which drafted it, is no voter"
        if any(stay.get(member.peer, member) != member for member in commit.view) or {*new} & {*before.leases.held}:
            return "it names another life of a peer that is a member or holds a lease"
        trainers = [*before.leases.held, *new]
    # It alone says who of those that are gone left in good order, which is no matter of arithmetic.
    back = leases.handed_back(before.leases, used, commit.leases) if commit.moves else {}
    left = {peer for peer, is_back in back.items() if is_back}
    follows: Leases = leases.advance(before.leases, used, trainers, bounds.lease_blocks, left)
    return "" if follows == commit.leases else "its leases are not those that follow from the leases before"


def _why_no_voters(before: Commit, commit: Commit) -> str:
    """Reason why the voters of a commit do not follow from those before (rules 8 and 9 of `docs/how/protocol.md`)."""
    if commit.founds:
        return ""
    old, lives = {voter.peer: voter for voter in before.voters}, {*before.view}
    kept = [voter for voter in commit.voters if voter.peer in old]
    new = [voter for voter in commit.voters if voter.peer not in old]
    if any(voter.since != old[voter.peer].since or voter.boot < old[voter.peer].boot for voter in kept):
        return "it names a voter with another history"
    if any(voter.since != commit.version for voter in new) or not lives.issuperset(commit.voting):
        return "it names a voter that was no member"
    names = {voter.peer for voter in kept}
    train = any(member.peer in names and not member.witness for member in commit.view)
    if train and len(new) > (0 if commit.drafter else max(len(kept) // 2, 1)):
        return f"it names {len(new)} voters beside the {len(kept)} that stay"
    return ""
