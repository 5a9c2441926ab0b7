"""The published table of bandwidth for a compute utilisation (Streaming DiLoCo, arXiv 2501.18512), beside ours.

All published cells lie on 50 bandwidths from 0.1 to 1000 Gbit/s in equal ratios of 1.207; two peers, H = 100, 16 bits a
value, and 4 in the last row. Ours are the bandwidths of that grid whose utilisation, by `diloco.plan.timeline`, is
nearest to the wanted one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from diloco.plan.timeline import methods, nearest_bandwidth

UTILISATIONS = (0.5, 0.8, 0.9, 0.95, 0.99)
GRID_GBIT_S = tuple(10 ** (-1 + 4 * index / 49) for index in range(50))
PEERS = 2

MODELS: Mapping[str, tuple[float, float, int]] = {"1B": (1e9, 0.1, 8), "10B": (1e10, 0.8, 16), "100B": (1e11, 4.9, 36)}
"""Parameters, seconds of an inner step, and fragments of three layers."""

PUBLISHED: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "data-parallel": {
        "1B": (86.8, 152.6, 184.2, 222.3, 569.0),
        "10B": (104.8, 222.3, 222.3, 268.3, 471.5),
        "100B": (184.2, 323.8, 390.7, 390.7, 471.5),
    },
    "diloco": {
        "1B": (1.4, 6.2, 13.3, 23.3, 86.8),
        "10B": (1.7, 7.5, 16.0, 33.9, 104.8),
        "100B": (3.0, 11.0, 23.3, 49.4, 184.2),
    },
    "streaming": {
        "1B": (1.4, 5.2, 9.1, 16.0, 28.1),
        "10B": (1.7, 5.2, 9.1, 13.3, 19.3),
        "100B": (2.4, 6.2, 9.1, 11.0, 19.3),
    },
    "streaming-overlap": {
        "1B": (1.4, 4.3, 6.2, 9.1, 11.0),
        "10B": (1.7, 3.6, 5.2, 6.2, 7.5),
        "100B": (1.7, 3.6, 4.3, 5.2, 5.2),
    },
    "streaming-overlap-fp4": {
        "1B": (0.4, 0.9, 1.7, 2.0, 3.0),
        "10B": (0.4, 0.9, 1.4, 1.4, 1.7),
        "100B": (0.5, 0.9, 1.1, 1.1, 1.4),
    },
}
"""Gbit/s by method, model and utilisation."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One bandwidth of the table."""

    method: str
    model: str
    utilisation: float
    gbit_s: float
    """Ours, on the grid."""
    published_gbit_s: float
    grid_steps_apart: int
    """Ours minus the published one."""


def bandwidth_table() -> Iterator[Cell]:
    """All 75 cells, by method, model and utilisation."""
    grid_bps = [gbit_s * 1e9 for gbit_s in GRID_GBIT_S]
    for method, by_model in PUBLISHED.items():
        for model, row in by_model.items():
            parameters, step_s, fragments = MODELS[model]
            (sync,) = (one for one in methods(fragments=fragments) if one.method == method)
            for wanted, published in zip(UTILISATIONS, row, strict=True):
                index = nearest_bandwidth(wanted, sync, parameters, PEERS, step_s, grid_bps)
                apart = index - nearest_on_grid(published)
                yield Cell(method, model, wanted, GRID_GBIT_S[index], published, apart)


def nearest_on_grid(gbit_s: float) -> int:
    """Index of the nearest bandwidth by ratio: the published ones are rounded to a tenth."""
    return min(range(len(GRID_GBIT_S)), key=lambda index: abs(math.log(gbit_s / GRID_GBIT_S[index])))
