"""The lines that a peer prints: one for each event that a person wants to see, on a thread that nothing waits for."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from diloco.observe.readable import printable

if TYPE_CHECKING:
    from diloco.observe.event_log import EventLine as Event

MAX_LINES = 10_000
"""Of a peer, kept for whoever does not read them."""
LAST_LINES_S = 5.0
"""How long the end of a peer waits for them to be read."""


@contextmanager
def saying() -> Iterator[Callable[[str], None]]:
    """A way to print lines that nothing waits for, and that cannot fail: a peer's life does not hang on a full disk, a
    closed pipe, or a terminal that is gone or held (Ctrl-S). What is not taken is not kept for ever."""
    waiting: queue.Queue[str | None] = queue.Queue(MAX_LINES)

    def write() -> None:
        try:
            for line in iter(waiting.get, None):
                data = f"{line}\n".encode(sys.stdout.encoding or "utf-8", "backslashreplace")
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
    """One line for each event that a person wants to see."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._total_tokens = 0

    def __call__(self, event: Event) -> None:
        line = self._line(_printable(event))
        if line:
            self._say(line)

    def _line(self, event: Event) -> str:
        kind = event["kind"]
        if kind == "start":
            self._total_tokens = event["total_tokens"]
            size = f"{event['parameters']:,} parameters, from version {event['resumed_version']}"
            return f"run {event['run']}, peer {event['peer']}: {size}"
        if kind == "listening":
            return f"listening on {event['address']}\njoin with:  diloco peer --join {event['ticket']}"
        lines: dict[str, Callable[[Any], str]] = {
            "version": self._version,
            "swap": self._swap,
            "witnessed": lambda e: f"v{e['version']}  {e['tokens']:,} tokens  counted {', '.join(e['counted'])}",
            "lineage": lambda e: f"lineage {e['lineage']} goes on; {e['void_tokens']:,} tokens of ours are void",
            "skip": lambda e: f"round for version {e['version']} skipped: {e['reason']}",
            "view": lambda e: f"v{e['version']}  view changed: {_changes(e)}",
            "eval": lambda e: f"v{e['version']}  held-out loss {e['val_loss']:.4f}",
            "copying": lambda e: f"copying the state: {e['done_bytes']:,} of {e['total_bytes']:,} bytes",
            "state": lambda e: f"state of version {e['version']} is here",
            "reason": lambda e: "" if e["routine"] else f"      {e['text']}",
            "warning": lambda e: f"warning: {e['text']}",
            "profile": _profile_line,
        }
        return lines[kind](event) if kind in lines else ""

    def _version(self, event: Any) -> str:
        loss = f"loss {event['loss']:.4f}  " if event["loss"] is not None else ""
        share = 100 * event["tokens"] / self._total_tokens if self._total_tokens else 0
        mine = "" if event["own"] else "  (not ours)"
        names = ", ".join(event["counted"])
        speed = f"{event['tokens_per_s']:,.0f} tok/s"
        counted = f"counted {names}{mine}"
        return f"v{event['version']}  {share:3.0f}%  {event['tokens']:,} tokens  {loss}{speed}  {counted}"

    def _swap(self, event: Any) -> str:
        from diloco.observe.readable import readable_share

        loss = f"loss {event['loss']:.4f}  " if event["loss"] is not None else ""
        share = 100 * event["tokens"] / self._total_tokens if self._total_tokens else 0
        how = "averaged with" if event["final"] else "swapped with"
        met = f"{how} {event['partner']}, spread {readable_share(event['spread'])}"
        return f"v{event['version']}  {share:3.0f}%  {event['tokens']:,} tokens  {loss}{met}"


def _printable(value: Any) -> Any:
    """Names and reasons come from other machines."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {key: _printable(entry) for key, entry in value.items()}
    return list(map(_printable, value)) if isinstance(value, list) else value


def _profile_line(event: Event) -> str:
    each = f", and beside it one for each of {event['ranks']} ranks" if event["ranks"] > 1 else ""
    return f"trace of the inner steps: {event['path']}{each}; open it in ui.perfetto.dev or chrome://tracing"


def _changes(event: Event) -> str:
    joined = [f"{name} joined" for name in event["joined"]]
    return ", ".join([*joined, *(f"{one['peer']} {one['reason']}" for one in event["left"])])
