"""Parts encoded on another thread: which comes first, and what becomes of those that are never made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from threading import Event

import pytest
import torch
from torch import Tensor

from diloco.compress import PayloadError
from diloco.compress.codec import FloatCodec
from diloco.compress.encoding import Encoder, Piece, encode_now

PARTS = 8
CODEC = FloatCodec("fp32", torch.float32)
PATIENCE_S = 60.0


class Bench:
    """An encoder with eight parts, of which the last is held elsewhere. The first is held up until `go`."""

    def __init__(self) -> None:
        self.encoder = Encoder()
        self.order: list[int] = []
        self.begun, self.go = Event(), Event()
        pieces = [(part, CODEC, self._values(part)) for part in range(PARTS - 1)]
        self.parts = self.encoder(PARTS, pieces)
        assert self.begun.wait(PATIENCE_S)

    def _values(self, part: int) -> Callable[[], Tensor]:
        def values() -> Tensor:
            if part == 0:
                self.begun.set()
                assert self.go.wait(PATIENCE_S)
            self.order.append(part)
            return torch.full((4,), float(part))

        return values


def test_what_is_asked_for_is_encoded_first() -> None:
    bench = Bench()
    assert [bench.parts.ready(part) for part in (0, PARTS - 1)] == [False, True]
    with ThreadPoolExecutor(3) as readers:
        asked = []
        for part in (5, 2, 5):
            asked.append(readers.submit(bench.parts.__getitem__, part))
            while len(bench.parts._asked) < len(asked):
                assert not asked[-1].done()
        bench.go.set()
        payloads = [CODEC.encode(torch.full((4,), float(part))) for part in (5, 2, 5)]
        assert [one.result(PATIENCE_S) for one in asked] == payloads
    whole = encode_now(PARTS, [(n, CODEC, lambda n=n: torch.full((4,), float(n))) for n in range(PARTS - 1)])
    assert list(bench.parts) == whole
    assert all(map(bench.parts.ready, range(PARTS)))
    assert whole[-1] == b""
    assert bench.order == [0, 5, 2, 1, 3, 4, 6]
    bench.encoder.close()


def test_pieces_may_wait_for_earlier_ones_to_be_encoded() -> None:
    """As those of an island's weights do, which are gathered from all ranks."""
    encoder, encoded = Encoder(), Event()

    def first() -> Tensor:
        encoded.set()
        return torch.zeros(4)

    def pieces() -> Iterator[Piece]:
        yield 0, CODEC, first
        assert encoded.wait(PATIENCE_S)
        yield 1, CODEC, lambda: torch.ones(4)

    assert list(encoder(2, pieces())) == [CODEC.encode(torch.zeros(4)), CODEC.encode(torch.ones(4))]
    encoder.close()


def test_nobody_waits_for_what_is_not_encoded_any_more() -> None:
    bench = Bench()
    with ThreadPoolExecutor(1) as readers:
        asked = readers.submit(bench.parts.__getitem__, 6)
        bench.encoder.close()
        with pytest.raises(CancelledError):
            asked.result(PATIENCE_S)
        bench.go.set()
        assert bench.parts[0] == CODEC.encode(torch.zeros(4))
        with pytest.raises(CancelledError):
            bench.parts[1]


def test_what_cannot_be_encoded_is_told_to_who_asks_for_it() -> None:
    encoder = Encoder()
    parts = encoder(2, [(0, CODEC, lambda: torch.full((4,), torch.inf)), (1, CODEC, lambda: torch.ones(4))])
    with pytest.raises(PayloadError):
        parts[0]
    assert parts[1] == CODEC.encode(torch.ones(4))
    encoder.close()
