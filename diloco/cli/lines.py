"""The lines that a peer prints: one for each event that a person wants to see, on a thread that nothing waits for."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from diloco.base.readable import NOTHING, printable, readable_share
from diloco.observe import events
from diloco.observe.events import Event, Stamped
from diloco.observe.run_state import RunState

MAX_LINES = 10_000
"""Lines of a peer that are kept while nobody reads them; later ones are dropped."""
LAST_LINES_S = 5.0
"""Seconds that the end of a peer waits for these lines to be read."""


@contextmanager
def saying() -> Iterator[Callable[[str], None]]:
    """A way for a command to print lines that nothing waits for, and that cannot fail: a peer's life does not hang on a
    full disk, a closed pipe, or a terminal that is gone or held (Ctrl-S). The rest is not kept for ever."""
    waiting: queue.Queue[str | None] = queue.Queue(MAX_LINES)

    def write() -> None:
        try:
            for line in iter(waiting.get, None):
                shown = "\n".join(map(printable, line.split("\n")))
                data = f"{shown}\n".encode(sys.stdout.encoding or "utf-8", "backslashreplace")
                while data:
                    data = data[os.write(1, data) :]
        except OSError as error:
            logging.warning("nothing more is printed: %s", error.strerror)

    def say(line: str) -> None:
        with suppress(queue.Full):
            waiting.put_nowait(line)

    thread = threading.Thread(target=write, name="lines", daemon=True)
    thread.start()
    try:
        yield say
    finally:
        with suppress(queue.Full):
            waiting.put_nowait(None)
            thread.join(LAST_LINES_S)


class PeerLines:
    """One printed line for each event of a peer that a person wants to see."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._state = RunState(kept=1)

    def __call__(self, stamped: Stamped) -> None:
        self._state.fold(stamped)
        if lines := self._lines(stamped.peer, stamped.event):
            self._say("\n".join(map(printable, lines)))  # names and reasons come from other machines

    def _lines(self, peer: str, event: Event) -> Sequence[str]:
        match event:
            case events.Started():
                size = f"{event.parameters or 0:,} parameters, from version {event.resumed_version or 0}"
                return [f"run {event.run}, peer {peer}: {size}"]
            case events.Listening():
                return [f"listening on {event.address}", f"join with:  diloco peer --join {event.ticket}"]
            case events.VersionClosed():
                counted = f"counted {', '.join(event.counted)}{'' if event.own else '  (not ours)'}"
                return [f"{self._at(event)}{event.tokens_per_s or 0:,.0f} tok/s  {counted}"]
            case events.SwapApplied():
                how = "averaged with" if event.final else "swapped with"
                return [f"{self._at(event)}{how} {event.partner}, spread {readable_share(event.spread)}"]
            case events.VersionWitnessed():
                return [f"v{event.version}  {event.tokens:,} tokens  counted {', '.join(event.counted)}"]
            case events.LineageReplaced():
                return [f"lineage {event.lineage} goes on; {event.void_tokens:,} tokens of ours are void"]
            case events.RoundSkipped():
                return [f"round for version {event.version} skipped: {event.reason}"]
            case events.ViewChanged():
                changes = [f"{name} joined" for name in event.joined]
                changes += [f"{departure.peer} {departure.reason}" for departure in event.left]
                return [f"v{event.version}  view changed: {', '.join(changes)}"]
            case events.Evaluated():
                return [f"v{event.version}  held-out loss {_loss(event.val_loss)}"]
            case events.StateCopying():
                return [f"copying the state: {event.done_bytes:,} of {event.total_bytes:,} bytes"]
            case events.StateCopied():
                return [f"state of version {event.version} is here"]
            case events.Remark(routine=False):
                return [f"      {event.text}"]
            case events.Warned():
                return [f"warning: {event.text}"]
            case events.ProfileWritten():
                each = f", and beside it one for each of {event.ranks} ranks" if event.ranks > 1 else ""
                return [f"trace of the inner steps: {event.path}{each}; open it in ui.perfetto.dev or chrome://tracing"]
        return []

    def _at(self, event: events.VersionClosed | events.SwapApplied) -> str:
        """The beginning of a version's printed line."""
        share = 100 * event.tokens / self._state.total_tokens if self._state.total_tokens else 0
        loss = f"loss {_loss(event.loss)}  " if event.loss is not None else ""
        return f"v{event.version}  {share:3.0f}%  {event.tokens:,} tokens  {loss}"


def _loss(loss: float | None) -> str:
    return NOTHING if loss is None else f"{loss:.4f}"
