"""Train one model over several datacenters, over ordinary networks, with peers that come, go, stall and die.

import diloco

with diloco.join(address, model) as run:   # or diloco.found(contract, model)
    for batch in batches:
        ...                                # your own inner step
        run.step(tokens=batch.numel())     # every H-th call syncs
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco.run.library import Run, found, join

__all__ = ["Run", "found", "join"]


def __getattr__(name: str) -> Any:
    """Import torch only when something that needs it is asked for."""
    if name in __all__:
        from diloco.run import library

        return getattr(library, name)
    raise AttributeError(f"module 'diloco' has no attribute {name!r}")
