"""Train one model over several datacenters, over ordinary networks, with peers that come, go, stall and die.

import diloco

with diloco.join(address, model) as run:   # or diloco.found(contract, model)
    for batch in batches:
        ...                                # your own inner step
        run.step(tokens=batch.numel())     # every H-th call syncs
        if run.done:
            break
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own would take longer to import than all the rest of this file

if TYPE_CHECKING:
    from diloco.config.contract import Contract
    from diloco.run.door import found, join
    from diloco.run.run import Run

__version__ = "0.1.0"
__all__ = ["Contract", "Run", "found", "join"]


def __getattr__(name: str) -> object:
    """Import what is asked for only then: `Contract` needs pydantic, the others torch."""
    if name == "Contract":
        from diloco.config.contract import Contract

        return Contract
    if name in __all__:
        from diloco.run import door

        return getattr(door, name)
    raise AttributeError(f"module 'diloco' has no attribute {name!r}")
