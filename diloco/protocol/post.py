"""The way out of the protocol's state machine: messages and other effects of one step, and its reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from diloco.base.types import Commit, Member
from diloco.protocol import effects as fx
from diloco.protocol import messages as m
from diloco.protocol.view import Rules
from diloco.protocol.vote import VoteRecord

if TYPE_CHECKING:
    from diloco.protocol.chain import Chain
    from diloco.protocol.contributor import Contributor
    from diloco.protocol.lineage import Lineage
    from diloco.protocol.membership import Membership


class Post:
    """Time and effects of one step of the protocol's state machine. All roles send by it.

    It is also how a role has several others go on at once: in an order that the router of the machine knows.
    """

    chain: Chain
    contributor: Contributor
    lineage: Lineage
    membership: Membership
    deliver: Callable[[m.Body], None]
    """Handles a message of this peer to itself, at once."""
    next_attempt: Callable[[int, str], None]
    """All roles move on to a later attempt, for a reason."""
    adopt: Callable[[Commit], None]
    """All roles move on to a commit's version, and to its view, voters and lineage."""
    leave_lineage: Callable[[str, tuple[m.Fork, ...], tuple[m.Fork, ...]], None]
    """All roles leave this lineage for that one; with the forks that led to it, and its history with its own tokens."""

    def __init__(self, rules: Rules, now: float, boot: int, before: int) -> None:
        """`boot`: this process; `before`: times that the disk had been written to when it began."""
        self._rules = rules
        self.boot = boot
        self._before = before
        self.saved = before
        """Number of the latest `Save` that is on the disk."""
        self.now = now
        self.effects: list[fx.Effect] = []
        """Effects of this step, in order."""
        self.reason = ""
        """The reason of the latest decision."""
        self.waiting_for = ""
        """The latest reason while this peer had an offer: why that is not committed yet."""
        self._sequence = 0
        self._saves = before

    def begin(self, now: float) -> None:
        """Begin a step of the protocol at that local time."""
        self.now, self.effects = now, []

    def emit(self, effect: fx.Effect) -> None:
        """Have the driver of the protocol carry out an effect."""
        self.effects.append(effect)

    def save(self, record: VoteRecord, accepted: Commit | None, head: Commit | None = None) -> int:
        """Emit `Save`. Returns its number."""
        self._saves += 1
        self.emit(fx.Save(self._saves, self.membership.me.incarnation, record, accepted, head))
        return self._saves

    def on_saved(self, number: int) -> None:
        """All up to this number is on the disk."""
        self.saved = max(self.saved, number)

    def send_all(self, members: Sequence[Member], body: m.Body) -> None:
        """Emit a protocol message to members, to myself last: what I then do must not overtake what the others hear."""
        for member in sorted(members, key=lambda member: member == self.membership.me):
            self.send(member, body)

    def send(self, to: Member, body: m.Body) -> None:
        """Emit a protocol message as an effect; one to this peer itself is handled at once, and none goes to an address
        that is a stranger's own word. A commit may have an old address of a member."""
        to = self.membership.roster.latest(to)
        me, commit, rules = self.membership.me, self.chain.commit, self._rules
        if to == me:
            self.deliver(body)
            return
        if not self.membership.may_call(to):
            return
        self._sequence += 1
        head = commit.digest if commit else ""
        envelope = m.Envelope(
            rules.run, rules.contract, self.lineage.name, me, self.boot, self._before, self.saved, head,
            self._sequence, body,
        )  # fmt: skip
        self.emit(fx.Send(to, envelope))

    def note(self, reason: str, routine: bool = False) -> None:
        """Emit the reason of a protocol decision as `Note`, when it changed."""
        if self.contributor.offer is not None:
            self.waiting_for = reason
        if reason != self.reason:
            self.reason = reason
            self.emit(fx.Note(reason, routine))
