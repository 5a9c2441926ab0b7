"""Encoding the parts of a contribution while the first of them are already on their way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import overload

from torch import Tensor

from diloco.compress import Codec

Piece = tuple[Codec, Callable[[], Tensor]]
"""Of a part: its codec, and what makes its values, flat fp32."""
Pieces = Sequence[Piece | None]
"""By part; None: another rank holds it, and what is encoded of it is empty."""
Encode = Callable[[Pieces], Sequence[bytes]]


def encode_now(pieces: Pieces) -> list[bytes]:
    """Each piece encoded. Raises PayloadError when a value is not finite."""
    return [_encode(piece) for piece in pieces]


def _encode(piece: Piece | None) -> bytes:
    if piece is None:
        return b""
    codec, values = piece
    return codec.encode(values())


class Encoder:
    """A thread that encodes one contribution after the other, so that the training thread need not."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="encode")

    def __call__(self, pieces: Pieces) -> Encoded:
        """As `encode_now`, but at once; what the values are made of must not change any more. They must be finite."""
        return Encoded([self._pool.submit(_encode, piece) for piece in pieces])

    def close(self) -> None:
        """Encode no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Encoded(Sequence[bytes]):
    """Encoded parts, of which the later ones may not be ready: asking for one waits for it."""

    def __init__(self, parts: Sequence[Future[bytes]]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return len(self._parts)

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(index, slice):
            return [part.result() for part in self._parts[index]]
        return self._parts[index].result()
