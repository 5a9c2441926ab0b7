"""The bound on bytes under way, over a link in the numbers only: a rate, a way, and a queue that never drops."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import pytest

from diloco.transport.pace import MAX_FIRST_BYTES, MIN_UNDER_WAY_BYTES, QUEUE_S, UnderWay

MESSAGE_BYTES = 1 << 16
REPORT_S = 0.02


class Link:
    """Streams of messages over one link, which passes on one byte after the other. Time is virtual.

    Args:
        rates: bytes per second, each from a time on.
        way_s: from sender to receiver and back, with nothing in the queue.
        streams: bounds of streams that always have more to send.
        bucket_bytes: bytes that pass at once after a pause, as shapers with a token bucket let them.
    """

    def __init__(
        self, rates: Sequence[tuple[float, float]], way_s: float, *streams: UnderWay, bucket_bytes: int = 0
    ) -> None:
        self._rates, self._way_s, self._streams, self._bucket_bytes = rates, way_s, streams, bucket_bytes
        self._free_s = -math.inf
        self._reports: list[tuple[float, int, int]] = []
        """When each comes back, of which stream, and the bytes taken until then."""
        self._sent = [0] * len(streams)
        self.taken_bytes = 0
        self.waits: list[tuple[float, float]] = []
        """When a message was sent, and how long it waited in the queue."""

    def run(self, until_s: float) -> None:
        """Send as much as the bounds allow."""
        now_s = 0.0
        while now_s < until_s:
            for index, stream in enumerate(self._streams):
                size = stream.fitting(MESSAGE_BYTES)
                while stream.allows(size):
                    self._send(index, stream, size, now_s)
            now_s, index, taken = heapq.heappop(self._reports)
            self.taken_bytes += taken - self._streams[index].taken_bytes
            self._streams[index].took(taken, 0.0, now_s)

    def _send(self, index: int, stream: UnderWay, size: int, now_s: float) -> None:
        rate = [rate for since_s, rate in self._rates if since_s <= max(now_s, self._free_s)][-1]
        self.waits.append((now_s, max(self._free_s - now_s, 0.0)))
        self._free_s = max(self._free_s, now_s - self._bucket_bytes / rate) + size / rate
        stream.sent(size, now_s)
        self._sent[index] += size
        comes_s = max(self._free_s, now_s) + self._way_s
        comes_s = math.ceil(comes_s / REPORT_S) * REPORT_S  # several messages may be in one report
        if any(report[:2] == (comes_s, index) for report in self._reports):
            self._reports = [report for report in self._reports if report[:2] != (comes_s, index)]
            heapq.heapify(self._reports)
        heapq.heappush(self._reports, (comes_s, index, self._sent[index]))


@pytest.mark.parametrize("way_s", [0.001, 0.1, 0.6])
@pytest.mark.parametrize("mbit", [2.0, 100.0, 1000.0])
@pytest.mark.parametrize("streams", [1, 4])
def test_streams_fill_a_link_and_nothing_waits_long_behind_them(streams: int, mbit: float, way_s: float) -> None:
    rate = mbit * 1e6 / 8
    link = Link([(0.0, rate)], way_s, *(UnderWay(2 * MESSAGE_BYTES) for _ in range(streams)))
    began_s = 14 * (way_s + REPORT_S)
    link.run(began_s + 5.0)
    end_s = link.waits[-1][0]
    most_s = QUEUE_S + REPORT_S + streams * MESSAGE_BYTES / rate
    assert max(wait_s for sent_s, wait_s in link.waits if sent_s > began_s) <= 2 * most_s
    assert link.taken_bytes >= 0.95 * rate * (end_s - began_s)


def test_a_link_that_becomes_slow_has_a_short_queue_again_soon() -> None:
    link = Link([(0.0, 12.5e6), (4.0, 0.25e6)], 0.05, UnderWay(2 * MESSAGE_BYTES))
    link.run(60.0)
    assert max(wait_s for sent_s, wait_s in link.waits if sent_s < 3.0) <= 1.0
    assert max(wait_s for sent_s, wait_s in link.waits if sent_s > 45.0) <= 1.0


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_what_a_shaper_lets_pass_at_once_is_not_taken_for_its_rate(streams: int) -> None:
    first, rate = MIN_UNDER_WAY_BYTES, 0.25e6
    link = Link([(0.0, rate)], 0.01, *(UnderWay(first) for _ in range(streams)), bucket_bytes=MESSAGE_BYTES)
    link.run(20.0)
    assert max(wait_s for _, wait_s in link.waits) <= 2 * (QUEUE_S + streams * first / rate)
    assert link.taken_bytes >= 0.9 * rate * link.waits[-1][0]


def test_a_stream_that_begins_behind_others_knows_the_way_without_them() -> None:
    before = UnderWay(MESSAGE_BYTES)
    before.sent(MESSAGE_BYTES, 0.0)
    before.took(MESSAGE_BYTES, 0.0, 0.1)
    way = before.anew()
    for index in range(1, 5):  # each message waits for 1.5 s behind those of other streams
        way.sent(way.limit_bytes, 2.0 * index)
        way.took(way.taken_bytes + way.bytes, 0.0, 2.0 * index + 1.5)
        way = way.anew()  # so does the next stream
    assert way.limit_bytes == MIN_UNDER_WAY_BYTES


@pytest.mark.parametrize("way_s", [0.3, 0.6])
def test_a_way_that_becomes_longer_is_found(way_s: float) -> None:
    rate = 12.5e6
    first = UnderWay(2 * MESSAGE_BYTES)
    Link([(0.0, rate)], 0.01, first).run(5.0)
    link = Link([(0.0, rate)], way_s, first.anew())
    link.run(40.0)
    assert link.taken_bytes >= 0.5 * rate * 40.0


def test_what_has_no_more_to_send_is_not_taken_for_slow_and_may_grow() -> None:
    way = UnderWay(2 * MESSAGE_BYTES)
    way.sent(MAX_FIRST_BYTES, 1.0)
    way.took(MAX_FIRST_BYTES, math.inf, 1.01)
    grown = way.limit_bytes
    assert grown > MAX_FIRST_BYTES
    way.sent(1000, 2.0)
    way.took(MAX_FIRST_BYTES + 1000, math.inf, 2.01)
    assert way.limit_bytes == grown
    assert way.anew().limit_bytes == MAX_FIRST_BYTES  # it may have become slow since
    assert UnderWay(MIN_UNDER_WAY_BYTES).anew().limit_bytes == MIN_UNDER_WAY_BYTES


def test_the_bound_does_not_grow_beyond_what_is_under_way() -> None:
    """As on the network of one machine, where other buffers are full first."""
    way = UnderWay(2 * MESSAGE_BYTES)
    for index in range(1, 10_000):
        way.sent(MESSAGE_BYTES, index / 1000)
        way.took(index * MESSAGE_BYTES, 0.0, index / 1000 + 0.001)
    assert way.limit_bytes <= 3 * MESSAGE_BYTES


def test_one_message_may_always_be_under_way() -> None:
    way = UnderWay(MIN_UNDER_WAY_BYTES)
    assert way.allows(10 * MIN_UNDER_WAY_BYTES)
    way.sent(1, 0.0)
    assert way.allows(MIN_UNDER_WAY_BYTES - 1)
    assert not way.allows(MIN_UNDER_WAY_BYTES)
