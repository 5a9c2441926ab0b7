"""The vote on the successor of each head, under crashes and restarts with the disk.

Peers are numbered, and so are trainers before witnesses; each has what `diloco.protocol.vote` says a voter keeps. A
commit is named by its place: a head is the tuple of values decided so far. A value is `V/<i>.<a>`, a view commit that
peer i drafted in attempt a, or `M<x>/<i>.<a>`, a commit with the mean x; behind `|` are the boots of the voters as the
drafter knew them, where half of the voters may decide. Messages are growing sets: each may come late, twice or never.

Simpler than production: a seat gets the promises of a majority in one step, as each alone commutes with it; a word
and the sync before it are one step, unless a case leaves that sync out; who is up and stands ahead tells the others;
what a peer fetches it fetches from one that is up and holds it; a proof of death is the truth, or was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

from diloco.protocol import vote
from diloco.protocol.vote import Promised, VoteRecord, Voters
from scripts.models.search import Model

Head = tuple[str, ...]
Step = tuple[str, "World", bool]
REDUCED = "r"
"""The mean of the reduction under way."""
WITNESSES = -2
"""In place of a peer: the proposal has gone to witnesses, too."""


class Lead(NamedTuple):
    """Lead of a seat in this boot."""

    attempt: int
    options: tuple[str, ...]
    """Values that the promises leave it."""
    value: str = ""
    """The proposal; empty: none yet."""


class Peer(NamedTuple):
    """One peer."""

    record: VoteRecord
    unsynced: VoteRecord | None = None
    """The record that its disk may still have, where the last word went out before the sync."""
    head: Head = ()
    up: bool = True
    gone: bool = False
    lost: bool = False
    """It is down, and its disk never comes back."""
    boot: int = 0
    lead: Lead | None = None
    means: frozenset[str] = frozenset()
    log: frozenset[str] = frozenset()
    """Those that are on its disk."""


class Ballot(NamedTuple):
    """A proposal, or a vote on one."""

    head: Head
    attempt: int
    value: str
    peer: int = -1
    boot: int = -1


class World(NamedTuple):
    """A state of the model."""

    peers: tuple[Peer, ...]
    crashes: int
    disks: int
    """Disks that may still be lost."""
    moving: bool
    proposals: frozenset[Ballot] = frozenset()
    votes: frozenset[Ballot] = frozenset()
    decided: frozenset[tuple[Head, str]] = frozenset()


@dataclass(frozen=True)
class Agreement:
    """A case to search. The fields below `attempts` leave rules out, or choose the faults."""

    trainers: int = 3
    witnesses: int = 0
    leavers: tuple[int, ...] = ()
    """Peers that leave: the next commit leaves them out. All: it keeps its drafter, which goes when it is alone."""
    learners: tuple[int, ...] = ()
    """Members that have no vote before all voters leave: the commit that leaves those out names them."""
    views: bool = False
    """View commits take place: for leavers, or for a joiner, which has no vote."""
    versions: int = 1
    """Version commits after which a story ends."""
    attempts: int = 2
    crashes: int = 1
    disks: int = 0
    mortal: tuple[int, ...] | None = None
    """Peers that may crash. None: all."""
    forever: bool = False
    """A peer that crashed may not come back: a restart is not counted on."""
    reduction: bool = False
    """A reduction is under way, begun by peer 0, which leads it."""
    halves: bool = False
    """Half of the voters may decide on a proof of the others' death."""
    late_proofs: bool = False
    """A proof of death is still believed when the peer is up again."""
    go: str = "stands"
    """When a leaver goes: others `stand` on the commit without it; it `knows` the commit; `leave_s` is over."""
    fetches: bool = True
    """A seat fetches the mean that somebody holds."""
    anew: bool = True
    """A seat begins a reduction anew where there is none."""
    mean_first: bool = True
    """A mean that is there goes before a view commit."""
    mean_logged: bool = True
    """A vote, and a proposal, say that the mean is on the disk."""
    witness_last: bool = True
    """Witnesses are asked when every trainer that is up has voted."""
    commit_first: bool = True
    """A decided commit is on the disk before the record of its own vote takes the old one's place."""
    late_sync: str = ""
    """The word that goes out before its record is on the disk, by the field of `VoteRecord`: `promised`, `attempt` or
    `led`. Empty: none does."""
    heads_named: bool = True
    """Promises name the head: what was promised under another does not count."""

    def model(self) -> Model[World]:
        """The model to search."""
        count = self.trainers + self.witnesses
        start = World((Peer(VoteRecord(named(()))),) * count, self.crashes, self.disks, self.reduction)
        return Model(start, self.steps, self.fork, self.is_good, self.is_judged)

    # ------------------------------------------------------------ who votes

    @cached_property
    def final(self) -> bool:
        """Whether all leave."""
        return len(self.leavers) == self.trainers + self.witnesses

    def voting(self, head: Head) -> tuple[int, ...]:
        """Peers that vote on the successor of a head."""
        everybody = range(self.trainers + self.witnesses)
        if self.final and head:
            return (_drafter(head[0]),)
        return tuple(i for i in everybody if i not in (self.leavers if head else self.learners))

    def voters(self, head: Head) -> Voters:
        """The same, with the boots that the head names."""
        boots = _boots(head[-1]) if head else ()
        return Voters({str(i): boots[i] if boots else 0 for i in self.voting(head)})

    def seat(self, head: Head, attempt: int) -> int:
        """The peer that may propose in an attempt."""
        voters = [str(i) for i in self.voting(head) if i < self.trainers]
        drafter = str(_drafter(head[-1])) if head and head[-1][0] == "V" else ""
        return int(vote.seat(voters, attempt, drafter, f"{len(head):016x}" if head else "0" * 16))

    def dead(self, world: World) -> set[tuple[str, int]]:
        """Boots that are over by proof."""
        if not self.halves:
            return set()
        over = {(str(i), peer.boot) for i, peer in enumerate(world.peers) if not peer.up}
        former = {(str(i), boot) for i, peer in enumerate(world.peers) for boot in range(peer.boot)}
        return over | former if self.late_proofs else over

    # ------------------------------------------------------------ what may happen

    def steps(self, world: World) -> Iterator[Step]:
        """Steps that may happen in a state."""
        for i, peer in enumerate(world.peers):
            if peer.gone or peer.lost:
                continue
            if not peer.up:
                yield from self._restarts(world, i, peer)
                continue
            if world.crashes and (self.mortal is None or i in self.mortal):
                yield from self._dies(world, i, peer)
            if i in self.leavers:
                yield from self._goes(world, i, peer)
            yield from self._learns(world, i, peer)
            if sum(value[0] == "M" for value in peer.head) >= self.versions:
                continue
            if world.moving and i < self.trainers and REDUCED not in peer.means:
                yield f"p{i} has the mean", _put(world, i, peer._replace(means=peer.means | {REDUCED})), False
            if i in self.voting(peer.head):
                yield from self._gathers(world, i, peer)
                yield from self._proposes(world, i, peer)
                yield from self._asks_witnesses(world, i, peer)
                yield from self._votes(world, i, peer)
                yield from self._decides(world, i, peer)

    def _dies(self, world: World, i: int, peer: Peer) -> Iterator[Step]:
        down = peer._replace(up=False, lead=None, means=frozenset(), unsynced=None)
        after = world._replace(crashes=world.crashes - 1, moving=world.moving and i != 0)
        yield f"p{i} dies", _put(after, i, down), True
        if peer.unsynced:
            yield f"p{i} dies before the sync", _put(after, i, down._replace(record=peer.unsynced)), True

    def _says(self, peer: Peer, word: str, record: VoteRecord) -> Peer:
        """The peer with the record that this word follows from."""
        late = word == self.late_sync and record != peer.record
        return peer._replace(record=record, unsynced=peer.record if late else None)

    def _restarts(self, world: World, i: int, peer: Peer) -> Iterator[Step]:
        back = peer._replace(up=True, boot=peer.boot + 1, means=peer.log)
        if not self.commit_first and peer.head and peer.record != VoteRecord(named(peer.head)):
            back = back._replace(head=peer.head[:-1], record=VoteRecord(named(peer.head[:-1])))
        yield f"p{i} restarts", _put(world, i, back), self.forever
        if world.disks and i < self.trainers:
            yield f"the disk of p{i} is lost", _put(world, i, peer._replace(lost=True))._replace(disks=0), True

    def _goes(self, world: World, i: int, peer: Peer) -> Iterator[Step]:
        out = bool(peer.head) and not (self.final and i in self.voting(peer.head))
        left = _put(world, i, peer._replace(gone=True))._replace(moving=world.moving and i != 0)
        if self.go == "leave_s":
            yield f"p{i} goes, for `leave_s` is over", left, True
        elif out:
            voters = self.voting(peer.head)
            others = {j: world.peers[j] for j in voters}
            stand = [str(j) for j, one in others.items() if one.gone or (one.up and len(one.head) >= len(peer.head))]
            if self.go == "knows" or vote.may_go(stand, [str(j) for j in voters]):
                yield f"p{i} goes", left, True

    def _learns(self, world: World, i: int, peer: Peer) -> Iterator[Step]:
        height = len(peer.head)
        ahead = {other.head[height] for other in world.peers if _ahead(other, peer.head)}
        for value in sorted(ahead):
            if value[0] == "V" or i >= self.trainers or self._here(world, i, value):
                learned = peer._replace(means=peer.means | _mean(value), log=peer.log | _mean(value))
                yield f"p{i} learns {value}", _put(world, i, self._stands(learned, (*peer.head, value))), False

    def _stands(self, peer: Peer, head: Head) -> Peer:
        return peer._replace(head=head, record=peer.record.stand(named(head)), lead=None, unsynced=None)

    def _gathers(self, world: World, i: int, peer: Peer) -> Iterator[Step]:
        voters, dead = self.voters(peer.head), self.dead(world)
        for attempt in range(1, self.attempts):
            may_lead = peer.record.lead(attempt) is not None and self.seat(peer.head, attempt) == i
            if not may_lead or (peer.lead and peer.lead.attempt >= attempt):
                continue
            asked = [j for j in self.voting(peer.head) if j != i and self._promises(world.peers[j], peer.head, attempt)]
            for size in range(len(voters.boots)):
                for some in combinations(asked, size):
                    yield from self._gathered(world, i, attempt, some, voters, dead)

    def _promises(self, peer: Peer, head: Head, attempt: int) -> bool:
        here = peer.head == head or not self.heads_named
        return here and peer.up and not peer.gone and peer.record.promise(attempt) is not None

    def _gathered(
        self, world: World, i: int, attempt: int, some: tuple[int, ...], voters: Voters, dead: set[tuple[str, int]]
    ) -> Iterator[Step]:
        promises, after = dict[str, Promised](), world
        for j in (i, *some):
            one = world.peers[j]
            record = one.record.promise(attempt)
            assert record is not None
            promises[str(j)] = Promised(one.boot, one.record.attempt, one.record.value)
            after = _put(after, j, self._says(one, "promised", record))
        options = vote.choices(promises, voters, dead)
        if options:
            lead = Lead(attempt, tuple(options))
            after = _put(after, i, after.peers[i]._replace(lead=lead))
            yield f"p{i} gathers promises for attempt {attempt} of {', '.join(f'p{j}' for j in some)}", after, False

    def _proposes(self, world: World, i: int, peer: Peer) -> Iterator[Step]:
        for attempt in range(self.attempts):
            record = peer.record.lead(attempt)
            lead = peer.lead if peer.lead is not None and peer.lead.attempt == attempt else None
            if record is None or self.seat(peer.head, attempt) != i or (attempt and (lead is None or lead.value)):
                continue
            forced = vote.choose(list(lead.options), lambda value: self._here(world, i, value)) if lead else ""
            for value in [forced] if forced else self._values(world, i, peer, attempt):
                log = peer.log if forced or not self.mean_logged else peer.log | _mean(value)
                new = frozenset() if forced else _mean(value)
                leads = Lead(attempt, lead.options if lead else (), value)
                leader = self._says(peer, "led", record)._replace(lead=leads, means=peer.means | new, log=log)
                after = _put(world, i, leader)
                after = after._replace(proposals=world.proposals | {Ballot(peer.head, attempt, value)})
                yield f"p{i} proposes {value} in attempt {attempt} after {named(peer.head)}", after, False

    def _values(self, world: World, i: int, peer: Peer, attempt: int) -> list[str]:
        """Values of its own that a seat may propose."""
        closed = {mean for value in peer.head for mean in _mean(value)}
        there = (
            {mean for one in world.peers if one.up and not one.gone for mean in one.means}
            if self.fetches
            else peer.means
        )
        boots = "|" + "".join(str(one.boot) for one in world.peers) if self.halves else ""
        drafted = f"/{i}.{attempt}{boots}"
        means = [f"M{mean}{drafted}" for mean in sorted(there - closed)]
        views = [f"V{drafted}"] if self.views and not any(value[0] == "V" for value in peer.head) else []
        mean = f"{i}{len(peer.head)}{attempt}{peer.boot}"
        new = [f"M{mean}{drafted}"] if self.anew and not world.moving and not means else []
        return (means or views + new) if self.mean_first else means + views + new

    def _asks_witnesses(self, world: World, i: int, peer: Peer) -> Iterator[Step]:
        if not self.witnesses or not self.witness_last or peer.lead is None or not peer.lead.value:
            return
        ballot = Ballot(peer.head, peer.lead.attempt, peer.lead.value)
        live = {j for j, one in enumerate(world.peers[: self.trainers]) if one.up and not one.gone}
        asks = ballot._replace(peer=WITNESSES)
        if asks not in world.proposals and live <= {one.peer for one in world.votes if one[:3] == ballot[:3]}:
            yield f"p{i} asks witnesses", world._replace(proposals=world.proposals | {asks}), False

    def _votes(self, world: World, i: int, peer: Peer) -> Iterator[Step]:
        asked = WITNESSES if i >= self.trainers and self.witness_last else -1
        for ballot in world.proposals:
            head, attempt, value = ballot[:3]
            if ballot.peer != asked:
                continue
            record = peer.record.accept(attempt, value)
            if head != peer.head or record is None or (peer.record.attempt, peer.record.value) == (attempt, value):
                continue
            if self.seat(head, attempt) == i and (peer.lead is None or peer.lead[::2] != (attempt, value)):
                continue  # nobody hears itself of an earlier boot
            if i >= self.trainers:
                voted = self._says(peer, "attempt", record)
            else:
                if value[0] == "M" and not self._here(world, i, value):
                    continue
                log = peer.log | _mean(value) if self.mean_logged else peer.log
                voted = self._says(peer, "attempt", record)._replace(means=peer.means | _mean(value), log=log)
            after = _put(world, i, voted)._replace(votes=world.votes | {Ballot(head, attempt, value, i, peer.boot)})
            yield f"p{i} votes for {value} in attempt {attempt}", after, False

    def _decides(self, world: World, i: int, peer: Peer) -> Iterator[Step]:
        lead = peer.lead
        if lead is None or not lead.value or not (_mean(lead.value) <= peer.means):
            return
        votes = {str(one.peer): one.boot for one in world.votes if one[:3] == (peer.head, lead.attempt, lead.value)}
        if self.voters(peer.head).suffice(votes, self.dead(world)):
            after = _put(world, i, self._stands(peer, (*peer.head, lead.value)))
            decided = world.decided | {(peer.head, lead.value)}
            yield f"p{i} decides {lead.value} after {named(peer.head)}", after._replace(decided=decided), False

    def _here(self, world: World, i: int, value: str) -> bool:
        """Whether peer i holds the mean of a value, or somebody from whom it can fetch it."""
        means = _mean(value)
        return means <= world.peers[i].means or any(
            means <= one.means for one in world.peers if one.up and not one.gone
        )

    # ------------------------------------------------------------ what must hold

    def fork(self, world: World) -> str:
        """Two values that were decided after one head, or that a majority voted for."""
        chosen = dict(world.decided)
        if len(chosen) < len(world.decided):
            return "FORK"
        tallies = dict[tuple[Head, int, str], set[int]]()
        for ballot in world.votes:
            tallies.setdefault(ballot[:3], set()).add(ballot.peer)
        for (head, _, value), peers in tallies.items():
            if 2 * len(peers) > len(self.voting(head)) and chosen.setdefault(head, value) != value:
                return f"FORK after {named(head)}"
        return ""

    def is_good(self, world: World) -> bool:
        """Whether somebody that stays stands on the last version; or where all leave, one is left that may go."""
        here = [(i, peer) for i, peer in enumerate(world.peers) if peer.up and not peer.gone]
        if self.final:
            return any(peer.head and i in self.voting(peer.head) for i, peer in here)
        done = [i for i, peer in here if sum(value[0] == "M" for value in peer.head) >= self.versions]
        return any(i in self.voting(world.peers[i].head) for i in done)

    def is_judged(self, world: World) -> bool:
        """Whether an attempt is left at the furthest head that nobody has promised or led, of a seat that may come."""
        top = max((peer.head for peer in world.peers), key=len)
        there = [peer for peer in world.peers if len(peer.head) == len(top) or not peer.gone]
        used = max(max(peer.record.promised, peer.record.led) for peer in there)
        seats = {self.seat(top, attempt) for attempt in range(used + 1, self.attempts)}
        return any(self._comes(world.peers[i]) for i in seats)

    def _comes(self, peer: Peer) -> bool:
        return not peer.gone and not peer.lost and (peer.up or not self.forever)


def named(head: Head) -> str:
    """Name of a head, in place of its digest."""
    return ".".join(head) or "root"


def _put(world: World, i: int, peer: Peer) -> World:
    return world._replace(peers=(*world.peers[:i], peer, *world.peers[i + 1 :]))


def _ahead(peer: Peer, head: Head) -> bool:
    return peer.up and not peer.gone and len(peer.head) > len(head) and peer.head[: len(head)] == head


def _mean(value: str) -> frozenset[str]:
    return frozenset({value[1:].partition("/")[0]}) if value[0] == "M" else frozenset()


def _drafter(value: str) -> int:
    return int(value.partition("/")[2].partition(".")[0])


def _boots(value: str) -> tuple[int, ...]:
    return tuple(map(int, value.partition("|")[2]))
