"""One fault of a drill."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class DrillFault:
    """Something that was done to peers. Times are unix seconds."""

    kind: str
    victims: tuple[str, ...]
    began_s: float
    ended_s: float = 0.0
    """When it was mended: the end of a stop or a cut, the start of the next life. 0 while it lasts."""
    back_s: float = 0.0
    """When a version counted all of them again."""
    cut: tuple[str, ...] = ()
    """Peers that could not reach everybody while it lasted."""
