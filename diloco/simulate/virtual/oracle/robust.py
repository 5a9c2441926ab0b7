"""The simulator's check of robust means: the rules of `diloco.outer.robust` once more, on whole arrays in numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diloco.compress import Codec
from diloco.outer.robust import Rule

STEPS, LONG = 3, 1.5


def plain_robust(terms: Sequence[tuple[int, bytes]], elements: int, codec: Codec, rule: Rule) -> np.ndarray | None:
    """A part's robust mean in fp64; None where the rule is another, or fewer than three contributions count."""
    if rule in ("mean", "radial") or sum(weight > 0 for weight, _ in terms) < 3:
        return None
    counted = [(weight, codec.decode(payload, elements)) for weight, payload in terms if weight > 0]
    values = np.stack([value.double().numpy() for _, value in counted])
    most = 2 * sorted(weight for weight, _ in counted)[(len(counted) - 1) // 2]
    weights = np.array([float(min(weight, most)) for weight, _ in counted])[:, None]
    weights = weights / weights.sum()
    middle: np.ndarray = np.median(values, axis=0)
    match rule:
        case "clip":
            lengths = _lengths(values)
            moved = np.sort(lengths[lengths > 0]) if lengths.any() else np.zeros(1)
            usual = moved[(len(moved) - 1) // 2]
            factors = np.minimum(1.0, LONG * usual / np.where(lengths == 0, 1.0, lengths))
            middle = (weights * values * factors[:, None]).sum(axis=0)
        case "centred":
            for _ in range(STEPS):
                away = _lengths(values - middle)
                radius = np.sort(away)[(len(away) - 1) // 2]
                factors = np.minimum(1.0, radius / np.where(away == 0, 1.0, away))
                middle = middle + (weights * (values - middle) * factors[:, None]).sum(axis=0)
        case "trimmed":
            ordered, ends = np.sort(values, axis=0), max(1, len(values) // 4)
            left = (values >= ordered[ends]) & (values <= ordered[-1 - ends])
            middle = (weights * values * left).sum(axis=0) / (weights * left).sum(axis=0)
    return middle


def _lengths(rows: np.ndarray) -> np.ndarray:
    lengths: np.ndarray = np.sqrt((rows**2).sum(axis=1))
    return lengths
