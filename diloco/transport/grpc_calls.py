"""Shared by both ends of a gRPC call: a deadline on the other side's progress, and messages that are not trusted."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read at import; a lost peer is weather: no line on stderr for it


from diloco.protocol.messages import Reply
from diloco.transport.link import LinkRefused, LinkSlow
from diloco.wire.chunks import Damaged

REPLY_KEY: Final = "diloco-reply"
"""Metadata of a refusal: the name of the reply."""

T = TypeVar("T")
M = TypeVar("M")


@asynccontextmanager
async def progress(within_s: float) -> AsyncIterator[None]:
    """Raises LinkSlow, should what is inside take longer."""
    try:
        async with asyncio.timeout(within_s):
            yield
    except TimeoutError:
        raise LinkSlow(f"no progress for {within_s:g} s") from None


def parsed(convert_: Callable[[M], T], message: M) -> T:
    """`message` as `convert_` reads it. Raises LinkRefused: it was damaged on its way, or is none that may be sent."""
    try:
        return convert_(message)
    except Damaged as error:
        raise LinkRefused(Reply.DAMAGED, str(error)) from error
    except ValueError as error:
        raise LinkRefused(Reply.MALFORMED, str(error)) from error


def keep_freed_memory() -> None:
    """Make glibc keep freed blocks of up to 16 MiB instead of giving their pages back to the kernel.

    It raises its thresholds (mallopt(3), M_MMAP_THRESHOLD) to the largest block ever freed. Before that, the pages of
    every message are faulted in anew: 1.5 instead of 0.6 CPU-s per GB sent.
    """
    bytes(16 << 20)
