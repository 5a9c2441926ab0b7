"""Sending of parts: the outbox that collects them, limits of the rate, of what is under way and of each sender's
streams, and the uplink's measurement. No I/O.

The state for a joiner shares a peer's uplink and cores with its training, which goes first; and a peer's rounds may
share an uplink with the peer's owner.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from statistics import median

from diloco.protocol.messages import Reply
from diloco.protocol.streams import Part
from diloco.transport.link import LinkRefused

SERVE_BPS_PER_CORE = 80e6
"""Bits per second to joiners that cost 5 % of a core: checksum, gRPC, TLS and TCP take 5 ns a byte beside training
(`scripts/bench-join`)."""

BURST_S = 0.1
"""Unused allowance older than this is not made up for: a busy event loop wakes up that late."""

MEASURED_S = 0.5
"""Seconds of sending in one sample of the rate: shorter ones measure busy cores more than the link."""
MEASURED_VERSIONS, MIN_VERSIONS = 4, 3
"""Versions with samples that are kept, and versions that are needed for a rate: a process's first syncs are slow."""

MAX_STREAMS = 64
"""Streams of parts that one peer may have open at a server at once, and all strangers together: four times
`network.streams`, for a contribution and a mean, and as many that are about to end. A stream costs 180 kB."""


class RateLimit:
    """Pacing of several senders that share one sending rate: the first that asks is served first.

    It is a token bucket after the generic cell rate algorithm.

    Args:
        bps: bits per second over all senders; 0: no limit.
    """

    def __init__(self, bps: float) -> None:
        self._bps = bps
        self._free_at_s = float("-inf")

    def delay_s(self, size_bytes: int, now_s: float) -> float:
        """Pacing: seconds to wait before sending so many bytes, which count as sent from now on. `now_s`: monotonic."""
        if not self._bps:
            return 0.0
        turn_s = max(self._free_at_s, now_s - BURST_S)
        self._free_at_s = turn_s + 8 * size_bytes / self._bps
        return max(turn_s - now_s, 0.0)


class StreamQuota:
    """Streams of parts that are open at one server of a peer, by sender: rank 0's, a lane's, or a gossiping peer's."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    @contextmanager
    def open(self, sender: str) -> Iterator[None]:
        """A stream while it is open; of strangers, `sender` is empty. Raises LinkRefused (TOO_EARLY) where the sender
        has as many as it may have."""
        if self._open[sender] >= MAX_STREAMS:
            raise LinkRefused(Reply.TOO_EARLY, f"{MAX_STREAMS} streams of this sender are open")
        self._open[sender] += 1
        try:
            yield
        finally:
            self._open[sender] -= 1
            self._open += Counter()  # without the names of those that have none


class Uplink:
    """Measured rate of this peer's network uplink: bytes that others take over all streams together.

    What was taken is divided by the time in which any stream had something to send: streams share the uplink. Such a
    rate is that of the uplink only while nothing else holds the streams up. Receivers with full downlinks, or cores
    that are busy, make it less, nothing makes it more for long; so a version's fastest MEASURED_S count (as in BBR,
    Cardwell et al. 2016), and of versions the median. By the mean of all, four equal peers at 100 Mbit/s differed by
    1.4, and what they owned of the fragment with them.

    Args:
        limit_bps: of a `RateLimit` before it, which no estimate exceeds; 0: none.
    """

    def __init__(self, limit_bps: float) -> None:
        self._limit_bps = limit_bps or math.inf
        self._version = -1
        self._bits = 0.0
        self._busy_s = 0.0
        self._busy_until_s = float("-inf")
        self._fastest: dict[int, float] = {}
        """By version, bits per second."""

    def begin(self, version: int) -> None:
        """Measure the network uplink for this version from now on."""
        self._version = version

    def took(self, size_bytes: int, since_s: float, now_s: float) -> None:
        """Measure the uplink: a receiver took so many bytes since then, with more to send all the time."""
        self._bits += 8 * size_bytes
        self._busy_s += max(now_s - max(since_s, self._busy_until_s), 0.0)
        self._busy_until_s = max(now_s, self._busy_until_s)
        if self._busy_s >= MEASURED_S:
            bps = self._bits / self._busy_s
            self._fastest[self._version] = max(bps, self._fastest.get(self._version, 0.0))
            if len(self._fastest) > MEASURED_VERSIONS:
                del self._fastest[next(iter(self._fastest))]  # the version that was begun first
            self._bits = self._busy_s = 0.0

    @property
    def bps(self) -> int:
        """Measured rate of the network uplink in bits per second; at first the limit, or 0 where there is none."""
        measured_bps = median(self._fastest.values()) if len(self._fastest) >= MIN_VERSIONS else math.inf
        bps = min(measured_bps, self._limit_bps)
        return int(bps) if math.isfinite(bps) else 0


QUEUE_S = 0.25
"""Seconds of a stream's bytes that may wait on their way: in buffers of this machine, of a router, of the receiver.
Routers hold back seconds of traffic, and heartbeats, votes and reports wait behind it."""
MIN_UNDER_WAY_BYTES = 1 << 15
"""Least that may be under way: eight streams of that are a second of a link of 2 Mbit/s."""
MAX_FIRST_BYTES = 1 << 19
"""Most that may be under way when a stream begins: the network may have become slow since the last one. At 1 Mb/s it
takes 4 s."""
SAMPLES = 8
"""Reports of a receiver of which the fastest counts, for a rate and for a new way: that of a busy one comes late."""
AS_LONG = 0.8
"""Share of a time that counts as no shorter, where the bytes under way are half."""
SAMPLE_S = QUEUE_S / 2
"""Least time over which a rate is measured: shapers let 64 KB pass at once after a pause."""


class UnderWay:
    """Bound on the bytes of one stream that were sent, and that its receiver has not reported as taken.

    It is the stream's rate times the sum of QUEUE_S and the time of the way itself. The rate of a report is what the
    receiver took from the moment when the last bytes in it were sent, divided by that time (a delivery rate as in BBR,
    Cardwell et al. 2016), or by SAMPLE_S: so bytes that come in bursts do not look fast. Streams that share a link have
    shares of its rate, so that all together keep it full, and hold up what comes behind them by QUEUE_S. As long as
    reports come back as if nothing waited, what was under way may grow by what was taken, as in TCP's slow start.

    The way is the least time from sending to report. Where half as much is under way and reports still take as long,
    they do not wait for this stream's bytes: the way became longer, and is measured anew.

    Args:
        limit_bytes: bound at the beginning, before anything is measured.
        way_s: time of the way, as the stream before knew it. One that begins behind others sees none without their
            queue, and would add its own to it.
    """

    def __init__(self, limit_bytes: int, way_s: float = math.inf) -> None:
        self.limit_bytes = limit_bytes
        self._way_s = way_s
        self._took_s: deque[float] = deque(maxlen=SAMPLES)
        """Times from sending to report."""
        self._longer: tuple[int, float] | None = None
        """Bytes under way, and the least time of the latest reports, since these take longer than the bound allows."""
        self._sent_bytes = self.taken_bytes = 0
        self._sent: deque[tuple[int, int, float]] = deque()
        """By message: bytes sent with it, bytes taken before it, and when it was sent."""
        self._rates: deque[float] = deque(maxlen=SAMPLES)
        """Bytes per second."""

    @property
    def bytes(self) -> int:
        """Bytes of the stream that are under way."""
        return self._sent_bytes - self.taken_bytes

    def anew(self) -> UnderWay:
        """The bound for the next stream to the same address, at first that of this one or MAX_FIRST_BYTES."""
        return UnderWay(min(self.limit_bytes, MAX_FIRST_BYTES), self._way_s)

    def allows(self, size_bytes: int) -> bool:
        """Whether so many bytes more may be under way in the stream; one message always may."""
        return not self.bytes or self.bytes + size_bytes <= self.limit_bytes

    def fitting(self, message_bytes: int) -> int:
        """Size of a stream's message, such that two of them may be under way."""
        return min(message_bytes, self.limit_bytes // 2)

    def sent(self, size_bytes: int, now_s: float) -> None:
        """A message of the stream with so many bytes of parts is sent."""
        self._sent_bytes += size_bytes
        self._sent.append((self._sent_bytes, self.taken_bytes, now_s))

    def took(self, taken_bytes: int, fed_since_s: float, now_s: float) -> None:
        """The stream's receiver has taken so many bytes in all. `fed_since_s`: since then there was more to send."""
        newly_bytes, self.taken_bytes = taken_bytes - self.taken_bytes, taken_bytes
        last = None
        while self._sent and self._sent[0][0] <= taken_bytes:
            last = self._sent.popleft()
        if last is None:
            return
        sent_bytes, before_bytes, sent_at_s = last
        took_s = now_s - sent_at_s
        self._took_s.append(took_s)
        self._way_s = min(self._way_s, took_s)
        self._look(sent_bytes - before_bytes, min(self._took_s))
        rate, within_s = (taken_bytes - before_bytes) / max(took_s, SAMPLE_S), self._way_s + QUEUE_S
        if fed_since_s <= sent_at_s or rate * within_s > self.limit_bytes:  # else it had no more to take
            self._rates.append(rate)
            waited = took_s > self._way_s + QUEUE_S / 2
            grown_bytes = 0 if waited else sent_bytes - before_bytes + newly_bytes
            self.limit_bytes = max(int(max(self._rates) * within_s), grown_bytes, MIN_UNDER_WAY_BYTES)

    def _look(self, under_way_bytes: int, took_s: float) -> None:
        """Look whether the way became longer: whether less of the stream's bytes under way made no report quicker."""
        if len(self._took_s) < SAMPLES or took_s <= self._way_s + QUEUE_S:
            self._longer = None
        elif self._longer is None:
            self._longer = under_way_bytes, took_s
        elif 2 * under_way_bytes <= self._longer[0]:
            if took_s > AS_LONG * self._longer[1]:
                self._way_s = took_s
            self._longer = None


AHEAD_BYTES = 1 << 20
"""Bytes that an outbox takes before earlier parts are sent: enough that parts of 16 KB fill a message of any size."""


class Outbox:
    """Parts to send over the network: collected from their maker, a little ahead of the streams that send them.

    A task of its own takes from `parts`, so that small ones that are ready at once can share a message, and those that
    are not yet ready hold up no others. Several streams may take from one outbox.
    """

    def __init__(self, parts: AsyncGenerator[Part]) -> None:
        self._ready: deque[Part] = deque()
        self._ready_bytes = 0
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._closed = False
        self._task = asyncio.create_task(self._fill(parts))
        self._task.add_done_callback(lambda _: self._news.set())

    @property
    def starved(self) -> bool:
        """Whether the network streams have no part to send: `take` would wait for the maker of the parts."""
        return not (self._ready or self._task.done() or self._closed)

    async def take(self, max_bytes: int) -> list[Part]:
        """Parts for a network stream to send: one or more, otherwise at most about `max_bytes`; waits for the first.

        Empty at the end or once closed. Raises what `parts` raised.
        """
        while self.starved:
            self._news.clear()
            await self._news.wait()
        if self._closed:
            return []
        taken: list[Part] = []
        taken_bytes = 0
        while self._ready and taken_bytes < max_bytes:
            taken.append(self._ready.popleft())
            taken_bytes += len(taken[-1].payload)
        self._ready_bytes -= taken_bytes
        self._room.set()
        if not taken:
            self._task.result()
        return taken

    def close(self) -> None:
        """Drop the parts that were not sent, and close `parts`: no network stream takes more."""
        self._closed = True
        self._task.cancel()
        self._news.set()

    async def _fill(self, parts: AsyncGenerator[Part]) -> None:
        async with aclosing(parts):  # or it lives until the garbage collector finds it, with all that it holds up
            async for part in parts:
                self._ready.append(part)
                self._ready_bytes += len(part.payload)
                self._news.set()
                while self._ready_bytes >= AHEAD_BYTES:
                    self._room.clear()
                    await self._room.wait()
