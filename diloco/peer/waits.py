"""The waits of a peer or witness that joins, copies a state or leaves: each ends by itself, and says why."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from diloco.base.clock import monotonic_s
from diloco.base.errors import DilocoError, EvictedError, Interrupted, StateError, UnreachableError
from diloco.base.life import POLL_S, Life, Wait, answered
from diloco.config.site import Site
from diloco.exchange.engine import Exchange
from diloco.protocol.messages import Reply

T = TypeVar("T")

COUNTED_SHARE = 0.6
"""Part of `leave_s` in which a peer that leaves waits to be counted. In the rest it votes until others can do without
it: a view commit takes a few heartbeats, and longer where another peer is just found missing."""
GOODBYE_SHARE = 0.1
"""Largest part of `leave_s` that it waits at the end until the others have heard that it goes."""
SETTLE_POLL_S = 0.05
MAX_LATE_S = 1.0
"""A joiner that nobody reaches ends with the second reply that says so, which comes so long after a heartbeat."""


class Refusal:
    """Watch on the members' refusals of a peer that waits to be taken in: some of them only a person can mend."""

    def __init__(self, exchange: Exchange, site: Site) -> None:
        self._exchange, self._timeouts = exchange, site.timeouts
        self._since_s, self._reply = monotonic_s(), exchange.lives.refusal()

    def check(self) -> None:
        """Raises EvictedError or UnreachableError, once the members have refused this peer for long enough."""
        exchange, now_s = self._exchange, monotonic_s()
        reply = exchange.lives.refusal()
        if reply is not self._reply:
            self._since_s, self._reply = now_s, reply
        refused_s = now_s - self._since_s
        if self._reply is Reply.FENCED and refused_s > 3 * self._timeouts.suspect_s:
            raise EvictedError(f"the run has a live peer named {exchange.me.peer}", "choose another peer.name")
        heartbeat_s = self._timeouts.heartbeat_s
        if self._reply is Reply.UNREACHED and refused_s > heartbeat_s + min(heartbeat_s, MAX_LATE_S):
            cause = f"nobody reaches {exchange.me.address}: the members hear this peer, and it does not hear them"
            fix = "let connections in at that port, or set network.advertise to an address and port that others reach"
            raise UnreachableError(cause, fix)


def settled(exchange: Exchange, site: Site, by_s: float) -> Life[None]:
    """A peer that leaves waits until the others have the latest version too, so that it does not die with this peer:
    `suspect_s`, and up to twice that for a version that closes meanwhile; half of the time until `by_s` at most."""
    suspect_s, version = site.timeouts.suspect_s, exchange.machine.version
    began_s = monotonic_s()
    deadline_s, half_s = began_s + suspect_s, (began_s + by_s) / 2
    while not (yield from answered(exchange.settled())):
        if exchange.machine.version != version:
            version, deadline_s = exchange.machine.version, min(monotonic_s(), began_s + suspect_s) + suspect_s
        if monotonic_s() >= min(deadline_s, half_s):
            break
        yield Wait(None, SETTLE_POLL_S)


def left(exchange: Exchange, site: Site, by_s: float) -> Life[None]:
    """A peer that leaves votes and serves until most voters can do without it; then it goes, and waits a little until
    the others have heard so. It is gone at `by_s`."""
    left = exchange.leave()
    goodbye_s = min(site.timeouts.rpc_s + 1.0, site.timeouts.leave_s * GOODBYE_SHARE)
    for deadline_s in (by_s - goodbye_s, by_s):
        while not left.done() and monotonic_s() < deadline_s:
            yield Wait(left, POLL_S)
        if not left.done():
            exchange.go()


def in_time(
    copying: Future[T],
    timeout_s: float,
    asked_to_leave: Callable[[], bool],
    check: Callable[[], None] = lambda: None,
    came_s: Callable[[], float] = lambda: 0.0,
) -> Life[T]:
    """The state a peer copies, and its offer. Raises StateError, also where no bytes came (`came_s`) for `timeout_s`;
    Interrupted once it is to leave; and what `check` raises meanwhile."""
    since_s = monotonic_s()
    while not copying.done():
        yield Wait(copying, POLL_S)
        if copying.done():
            break
        try:
            check()
        except DilocoError:
            copying.cancel()
            raise
        if monotonic_s() > max(since_s, came_s()) + timeout_s:
            copying.cancel()
            fix = "raise timeouts.join_s; or membership.backlog_versions, where so many versions close meanwhile"
            raise StateError(f"no more of the state came for {timeout_s:g} s", fix)
        if asked_to_leave():
            copying.cancel()
            raise Interrupted("asked to leave while the state was copied", "join again")
    return (yield from answered(copying))
