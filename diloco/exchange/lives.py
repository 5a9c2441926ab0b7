"""Lives of other peers: that one can be reached, and proof that one is over, its process gone from this machine."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diloco.base.clock import monotonic_s
from diloco.base.types import MAX_LIST, Member
from diloco.protocol.machine import Machine
from diloco.protocol.messages import Event, Reached, Reply, Unreachable
from diloco.protocol.streams import ProcessId, Welcome
from diloco.protocol.view import Timing
from diloco.transport.link import Link, LinkDown, LinkRefused, LinkSlow

logger = logging.getLogger(__name__)

MAX_ASKING = 64
"""Strangers that are asked at once: those of which only their own word says where they are."""
STRANGERS, STRANGERS_PER_S = 256.0, 16.0
"""Strangers that may come at once, as after a power cut of all, and how many more each second. A flood of them makes
this peer dial no more addresses than that, which are perhaps of somebody who has no part in it."""
MAX_LISTED = 64
"""Addresses of the directory that are asked at once: outsiders may list any, and keep no stranger from being asked."""
MAX_PAUSE_BEATS = 8
"""The longest pause, in heartbeats, before a stranger that did not answer is asked again. Pauses begin with one and
double."""


@dataclass(slots=True)
class Answer:
    """The latest process of a life that answered at its address."""

    boot: int
    address: str
    process: ProcessId | None
    """It tells of the end. None: that will have no proof."""
    at_s: float
    """Time of its latest answer."""


class Lives:
    """Lives of peers that answered as themselves, and their processes; each is asked once, when it is heard.

    An answer alone does not show that a life can be reached: at the address that it gives, another peer may listen,
    or this one, as where two networks have the same private addresses.

    A refused connection is no proof, on loopback neither: a forwarder (`ssh -L`, `kubectl port-forward`, stunnel, a
    container's port) refuses for a peer that lives elsewhere. So evidence comes from the far end of a connection, which
    answers as the very life that is asked for, and counts only if its process is seen here at that moment.
    """

    def __init__(self, link: Link, timing: Timing) -> None:
        self._link = link
        self._heartbeat_s, self.suspect_s, self._stall_s = timing.heartbeat_s, timing.suspect_s, timing.stall_s
        self._answers: dict[tuple[str, int], Answer] = {}
        """By peer and incarnation, of lives that answered."""
        self._asking: set[tuple[str, int, str]] = set()
        """Peer, incarnation and address, of lives that are being asked."""
        self._unanswered: dict[tuple[str, int, str], tuple[float, float]] = {}
        """Strangers that did not answer: when each may be asked again, and the pause after that."""
        self._listed: set[str] = set()
        """Addresses of the directory that are being asked."""
        self._spare, self._spare_at_s = STRANGERS, monotonic_s()
        """Strangers that may be asked now, and the time at which so many might."""
        self._replies: dict[str, tuple[Reply, float]] = {}
        """The latest reply of each peer to a message of ours, and its time."""

    def met(self, member: Member, boot: int) -> bool:
        """Whether this very process of a life, or a later one, has answered at its address."""
        known = self._answers.get((member.peer, member.incarnation))
        return known is not None and known.boot >= boot and known.address == member.address

    def answered_since(self, member: Member, since_s: float) -> bool:
        """Whether a life has answered a message since then."""
        known = self._answers.get((member.peer, member.incarnation))
        return known is not None and known.at_s >= since_s

    async def ask(self, member: Member, boot: int, stranger: bool = False) -> bool:
        """Whether a life that answered a message, or spoke, answers at its address: each process of it that is heard is
        asked once for its name. False: it is being asked, or did not answer. `stranger`: the address is its own word,
        and so the times that it is asked are bounded."""
        life, place = (member.peer, member.incarnation), (member.peer, member.incarnation, member.address)
        if self.met(member, boot) and not stranger:
            self._answers[life].at_s = monotonic_s()
            return True
        if place in self._asking or (stranger and not self._may_ask(place)):
            return False
        self._asking.add(place)
        try:
            welcome = await self._link.hello(member.address, self._stall_s)
        except (LinkDown, LinkSlow, LinkRefused):
            return False
        finally:
            self._asking.discard(place)
        there = welcome.members[0]
        if (there.peer, there.incarnation) == life and welcome.boot < boot:
            return False  # an earlier process still answers
        if (there.peer, there.incarnation) != life:
            logger.warning("at %s, the address of %s, %s answers", member.address, member.peer, there.peer)
            return False
        lives = welcome.process is not None and self._link.lives(welcome.process)
        self._answers[life] = Answer(welcome.boot, member.address, welcome.process if lives else None, monotonic_s())
        if len(self._answers) > MAX_LIST:
            del self._answers[next(iter(self._answers))]
        self._unanswered.pop(place, None)
        return True

    async def welcome_at(self, address: str) -> Welcome | None:
        """The welcome of the life that answers at an address of the directory, and says that this is where it is. None:
        there is none, or the address is being asked, or many others are."""
        if address in self._listed or len(self._listed) >= MAX_LISTED:
            return None
        self._listed.add(address)
        try:
            welcome = await self._link.hello(address, self.suspect_s)
        except (LinkDown, LinkSlow, LinkRefused):
            return None
        finally:
            self._listed.discard(address)
        return welcome if welcome.members[0].address == address else None

    def _may_ask(self, place: tuple[str, int, str]) -> bool:
        """Whether a stranger may be asked now. From then on it may not, for twice as long each time."""
        now_s = monotonic_s()
        due_s, pause_s = self._unanswered.get(place, (now_s, self._heartbeat_s))
        self._spare = min(STRANGERS, self._spare + STRANGERS_PER_S * (now_s - self._spare_at_s))
        self._spare_at_s = now_s
        if now_s < due_s or self._spare < 1 or len(self._asking) >= MAX_ASKING:
            return False
        self._spare -= 1
        self._unanswered.pop(place, None)
        self._unanswered[place] = now_s + pause_s, min(2 * pause_s, MAX_PAUSE_BEATS * self._heartbeat_s)
        if len(self._unanswered) > MAX_LIST:
            del self._unanswered[next(iter(self._unanswered))]
        return True

    def replied(self, peer: str, reply: Reply) -> None:
        """Note what a peer replied to a message."""
        if reply in (Reply.STALE, Reply.REPLAYED):
            return  # it has only moved on meanwhile
        before, _ = self._replies.pop(peer, (Reply.OK, 0.0))
        if reply not in (Reply.OK, before):
            logger.warning("%s refuses: %s", peer, reply.name)
        self._replies[peer] = reply, monotonic_s()
        if len(self._replies) > MAX_LIST:
            del self._replies[next(iter(self._replies))]

    def refusal(self) -> Reply:
        """The refusal in which all agree who replied lately; OK where they do not. Any thread may ask."""
        since_s = monotonic_s() - self.suspect_s
        replies = {reply for reply, at_s in list(self._replies.values()) if at_s >= since_s}  # one step, under the GIL
        return replies.pop() if len(replies) == 1 else Reply.OK

    def proven(self, member: Member) -> int | None:
        """The process of this life that is over for certain; None: the latest that answered may live."""
        known = self._answers.get((member.peer, member.incarnation))
        dead = known is not None and known.process is not None and self._link.lives(known.process) is False
        return known.boot if known is not None and dead else None

    async def gone(self, member: Member) -> bool:
        """Whether nobody takes another connection after one broke: damaged bytes break one, too."""
        if self.proven(member) is not None:
            return True
        try:
            await self._link.hello(member.address, self._heartbeat_s)
        except LinkDown:
            return True
        except (LinkSlow, LinkRefused):
            pass  # or it is silent, which its missing heartbeats will show
        return False


class Meetings:
    """Asks peers that the exchange hears, or that the directory lists, whether they are where they are said to be."""

    def __init__(self, contract: bytes, lives: Lives, machine: Machine, feed: Callable[[Event], None]) -> None:
        """`contract`: canonical JSON of the run's; `feed`: gives an event to the state machine."""
        self._contract, self._lives, self._machine, self._feed = contract, lives, machine, feed
        self._asked, self._ask_at_s = 0, -math.inf
        """Members asked where others are, and the time from which the next may be."""

    async def meet(self, member: Member, boot: int) -> None:
        """Note that a life can be reached, once that process of it, or a later one, has answered."""
        roster = self._machine.roster
        answers = await self._lives.ask(member, boot, stranger=roster.awaits(member))
        if answers and not roster.reaches(member):
            self._feed(Reached(member))

    async def miss(self, member: Member) -> None:
        """Note that a life cannot be reached, once nobody takes a connection at its address. It may have gone on at
        another one, and not know where we are: where two of three are restarted at once, the third hears from both."""
        if not await self._lives.gone(member):
            return
        self._feed(Unreachable(member, self._lives.proven(member)))
        others = self._machine.others()
        if others and monotonic_s() >= self._ask_at_s:
            self._asked, self._ask_at_s = self._asked + 1, monotonic_s() + self._lives.suspect_s
            welcome = await self._lives.welcome_at(others[self._asked % len(others)].address)
            await self.seek(welcome.members if welcome is not None else ())

    async def seek(self, listed: Sequence[Member]) -> None:
        """Ask at addresses that the directory or a member names, where the roster has not got these lives there."""
        me, is_located = self._machine.me, self._machine.roster.is_located
        await asyncio.gather(*(self._seek(one) for one in listed if one.peer != me.peer and not is_located(one)))

    async def _seek(self, listed: Member) -> None:
        """Meet the peer of the run that answers there. All else that was said of it may be an outsider's word."""
        welcome = await self._lives.welcome_at(listed.address)
        if welcome is not None and welcome.contract == self._contract:
            self._machine.roster.meet(welcome.members[:1], monotonic_s())
