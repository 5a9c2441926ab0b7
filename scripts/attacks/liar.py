"""A member that lies: `diloco peer` with one thing changed. `python -m scripts.attacks.liar LIE peer ...`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from diloco.__main__ import main as diloco
from diloco.exchange.engine import Exchange
from diloco.protocol import messages as m

LIES: dict[str, Callable[[], None]] = {}
"""Each changes this process before it becomes a peer."""


def lie(tell: Callable[[], None]) -> Callable[[], None]:
    """Register a lie by the name of its function."""
    LIES[tell.__name__.replace("_", "-")] = tell
    return tell


def _offers(**changed: Any) -> None:
    """All our offers say that."""
    feed = Exchange._feed

    def fed(exchange: Exchange, event: m.Event) -> None:
        feed(exchange, m.Offered(replace(event.offer, **changed)) if isinstance(event, m.Offered) else event)

    setattr(Exchange, "_feed", fed)  # noqa: B010


@lie
def many_tokens() -> None:
    """A contribution of more tokens than a run has ends that run at its first version."""
    _offers(tokens=10**15)


@lie
def much_weight() -> None:
    """The mean is the liar's."""
    _offers(weight=2**40)


if __name__ == "__main__":
    LIES[sys.argv.pop(1)]()
    diloco()
