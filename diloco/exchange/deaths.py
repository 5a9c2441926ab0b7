"""Proof that a life of a peer is over: the process that it named while it lived is gone from this very machine."""

from __future__ import annotations

from diloco.base.errors import UsageError
from diloco.base.types import MAX_LIST, Member
from diloco.protocol.streams import ProcessId
from diloco.transport.link import Link, LinkDown, LinkRefused, LinkSlow


class Deaths:
    """The processes of other lives, as far as they are of this machine; each life is asked once, when it is heard.

    A refused connection is no proof, on loopback neither: a forwarder (`ssh -L`, `kubectl port-forward`, stunnel, a
    container's port) refuses for a peer that lives elsewhere. So evidence comes from the far end of a connection, which
    answers as the very life that is asked for, and counts only if its process is seen here at that moment.
    """

    def __init__(self, link: Link, timeout_s: float) -> None:
        self._link, self._timeout_s = link, timeout_s
        self._processes: dict[tuple[str, int], ProcessId | None] = {}
        """By peer and incarnation. None: it is being asked, or its death has no proof."""

    def asked(self, member: Member) -> bool:
        """Whether this life was asked for its process, or need not be: its address is elsewhere."""
        return (member.peer, member.incarnation) in self._processes or not self._may_be_here(member.address)

    async def ask(self, member: Member) -> None:
        """Ask a life for its process. No answer: its next message asks again."""
        if self.asked(member):
            return
        life = member.peer, member.incarnation
        self._processes[life] = None
        if len(self._processes) > MAX_LIST:
            del self._processes[next(iter(self._processes))]
        try:
            welcome = await self._link.hello(member.address, self._timeout_s)
        except (LinkDown, LinkSlow, LinkRefused):
            self._processes.pop(life, None)
            return
        there = welcome.members[0]
        if (there.peer, there.incarnation) == life and welcome.process and self._link.lives(welcome.process):
            self._processes[life] = welcome.process

    def proven(self, member: Member) -> bool:
        """Whether this life is over for certain."""
        process = self._processes.get((member.peer, member.incarnation))
        return process is not None and self._link.lives(process) is False

    async def gone(self, member: Member) -> bool:
        """Whether nobody takes another connection after one broke: damaged bytes break one, too."""
        if self.proven(member):
            return True
        try:
            await self._link.hello(member.address, self._timeout_s)
        except LinkDown:
            return True
        except (LinkSlow, LinkRefused):
            pass  # or it is silent, which its missing heartbeats will show
        return False

    def _may_be_here(self, address: str) -> bool:
        try:
            return self._link.near(address)
        except UsageError:
            return False
