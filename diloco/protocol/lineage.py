"""Lineages: a run that was cut in parts under `without_majority = "continue"` is several chains until they meet.

A lineage is named by its founding commit. Where two meet, the one with more committed tokens goes on; the others copy
its state, keep their uncommitted progress and say how many committed tokens that makes void.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from diloco.base.types import Commit, Member
from diloco.protocol.messages import Fork


def fork_name(commit: Commit, founder: Member) -> str:
    """The name of the lineage that `founder` starts at this commit: no two founders choose the same."""
    return hashlib.sha256(f"{commit.digest}/{founder.peer}/{founder.incarnation}".encode()).hexdigest()[:16]


def goes_on(mine: Sequence[Fork], other: Sequence[Fork]) -> bool:
    """Whether the first of two histories (see `parted_at`) is the one that goes on: both sides agree on the answer.

    More committed tokens win; at a tie the later founded one, for whoever it left behind could not go on.
    """
    return _rank(mine) > _rank(other)


def _rank(history: Sequence[Fork]) -> tuple[int, int, str]:
    return history[-1].tokens, len(history), history[-1].lineage


def parted_at(mine: Sequence[Fork], other: Sequence[Fork]) -> int:
    """Committed tokens at which two histories parted.

    A history lists the lineages that led here, each with the tokens at which it was left; the last is the one that
    goes on, with its tokens now. Histories that share nothing parted at 0.
    """
    parted = 0
    for own, theirs in zip(mine, other, strict=False):
        if own.lineage != theirs.lineage:
            break
        parted = min(own.tokens, theirs.tokens)
    return parted
