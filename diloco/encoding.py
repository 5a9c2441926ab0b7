"""Encoding the parts of a contribution while the first of them are already on their way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import overload

from torch import Tensor

from diloco.compress import Codec

Piece = tuple[int, Codec, Callable[[], Tensor]]
"""A part's number, its codec, and what makes its values, flat fp32."""
Encode = Callable[[int, Iterable[Piece]], Sequence[bytes]]
"""Given how many parts there are, and pieces of them: what another rank holds is no piece, and comes out empty."""


def encode_now(parts: int, pieces: Iterable[Piece]) -> list[bytes]:
    """Each piece encoded. Raises PayloadError when a value is not finite."""
    encoded = [b""] * parts
    for part, codec, values in pieces:
        encoded[part] = _encode(codec, values)
    return encoded


def _encode(codec: Codec, values: Callable[[], Tensor]) -> bytes:
    return codec.encode(values())


class Encoder:
    """A thread that encodes one contribution after the other, so that the training thread need not."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="encode")

    def __call__(self, parts: int, pieces: Iterable[Piece]) -> Encoded:
        """As `encode_now`, but at once; what the values are made of must not change before they are encoded.
        They must be finite."""
        return Encoded(parts, {part: self._pool.submit(_encode, codec, values) for part, codec, values in pieces})

    def close(self) -> None:
        """Encode no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Encoded(Sequence[bytes]):
    """Encoded parts, of which the later ones may not be ready: asking for one waits for it."""

    def __init__(self, parts: int, pieces: Mapping[int, Future[bytes]]) -> None:
        self._length, self._pieces = parts, pieces

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
        return self._pieces[part].result() if part in self._pieces else b""
