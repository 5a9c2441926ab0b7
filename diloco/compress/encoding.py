"""Encoding the parts of a contribution while the first of them are already on their way."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from threading import Lock
from typing import overload

from torch import Tensor

from diloco.base.clock import monotonic_s
from diloco.base.threads import one_thread
from diloco.compress import Codec

Piece = tuple[int, Codec, Callable[[], Tensor]]
"""A part's number, its codec, and what makes its values, flat fp32."""
Encode = Callable[[int, Iterable[Piece]], Sequence[bytes]]
"""Given how many parts there are, and pieces of them: what another rank holds is no piece, and comes out empty."""


def encode_now(parts: int, pieces: Iterable[Piece]) -> list[bytes]:
    """Payloads of all parts, each piece encoded by its codec. Raises PayloadError when a value is not finite."""
    encoded = [b""] * parts
    for part, codec, values in pieces:
        encoded[part] = codec.encode(values())
    return encoded


class Encoder:
    """A thread that runs codecs: it encodes one contribution after the other, so that the training thread need not."""

    def __init__(self) -> None:
        self._pool = one_thread("encode")

    def __call__(self, parts: int, pieces: Iterable[Piece]) -> Encoded:
        """Encode as `encode_now` does, but return at once. Until they are encoded, what the values are made of must not
        change. They must be finite."""
        encoded = Encoded(parts)
        for piece in pieces:  # the next one may only come once some of these are encoded
            encoded.add(*piece)
            self._pool.submit(encoded.make_one).add_done_callback(encoded.closed)
        return encoded

    def close(self) -> None:
        """Stop the thread that runs the codecs."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Encoded(Sequence[bytes]):
    """Payloads of a contribution's parts, some not yet encoded: asking for one waits for it, and has it encoded next.

    For which parts go out first is only known when the version begins: whoever owns those in front sends those behind.
    """

    def __init__(self, parts: int) -> None:
        self._length = parts
        self._waiting: OrderedDict[int, tuple[Codec, Callable[[], Tensor]]] = OrderedDict()
        self._asked: deque[int] = deque()
        self._lock = Lock()
        self._made: dict[int, Future[bytes]] = {}
        """Encoded parts that are not empty."""
        self.made_s = self.encoded_s = 0.0
        """Spent so far on making values, and on encoding them."""

    def add(self, part: int, codec: Codec, values: Callable[[], Tensor]) -> None:
        """Add a part for its codec to encode, by one more call of `make_one`. None after anybody asked for a part."""
        with self._lock:
            self._made[part] = Future()
            self._waiting[part] = codec, values

    def make_one(self) -> None:
        """Encode one more part with its codec: the first that was asked for, or else the first of all."""
        with self._lock:
            while self._asked and self._asked[0] not in self._waiting:
                self._asked.popleft()
            part = self._asked[0] if self._asked else next(iter(self._waiting))
            codec, values = self._waiting.pop(part)
        try:
            began_s = monotonic_s()
            made = values()
            made_s = monotonic_s()
            encoded = codec.encode(made)
            self.made_s += made_s - began_s
            self.encoded_s += monotonic_s() - made_s
            self._made[part].set_result(encoded)
        except BaseException as error:
            self._made[part].set_exception(error)

    def closed(self, task: Future[None]) -> None:
        """A task that encodes was cancelled: those who wait for payloads that no codec will make wait no more."""
        if task.cancelled():
            with self._lock:
                never, self._waiting = self._waiting, OrderedDict()
            for part in never:
                self._made[part].cancel()

    def ready(self, part: int) -> bool:
        """Whether the codec's payload of this part can be read without waiting."""
        return part not in self._made or self._made[part].done()

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(index, slice):
            return [self[part] for part in range(*index.indices(self._length))]
        part = range(self._length)[index]
        if part not in self._made:
            return b""
        if not self.ready(part):
            with self._lock:
                self._asked.append(part)
        return self._made[part].result()
