"""Breadth-first search over explicit states: the shortest story to a bad one, and states that lead to no good one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)
MAX_STATES = 2_000_000


@dataclass(frozen=True)
class Model(Generic[S]):
    """A model to search: where it starts, and what can happen."""

    start: S
    steps: Callable[[S], Iterator[tuple[str, S, bool]]]
    """Steps that may happen in a state, the state after each, and whether it is a fault: progress must not need one."""
    bad: Callable[[S], str]
    """The broken promise of a state; empty: none is."""
    good: Callable[[S], bool] | None = None
    """Whether a state has what all is for. From each it must be within reach. None: that is not asked."""
    judged: Callable[[S], bool] = lambda state: True
    """Whether a state from which nothing good is within reach counts: attempts have a bound in a model."""


@dataclass(frozen=True)
class Found:
    """Result of a search."""

    states: int
    broken: str = ""
    """The promise that can be broken, and the shortest story that does; empty: none can."""
    stuck: str = ""
    """The shortest story to a state from which nothing good comes; empty: there is none."""
    stuck_states: int = 0
    judged_states: int = 0
    """States from which something good must come."""
    whole: bool = True
    """Whether all states were seen."""

    @property
    def verdict(self) -> str:
        """`BROKEN` where a promise can be broken, `STUCK`, `unfinished`, or `holds`."""
        if self.broken:
            return "BROKEN"
        if self.stuck_states:
            return "STUCK"
        return "holds" if self.whole else "unfinished"


def search(model: Model[S], max_states: int = MAX_STATES) -> Found:
    """Visit all states within reach, the nearest first, until one is bad or there are too many."""
    came: dict[S, tuple[S, str] | None] = {model.start: None}
    queue, back = deque([model.start]), dict[S, list[S]]()
    good = list[S]()
    while queue:
        state = queue.popleft()
        if why := model.bad(state):
            return Found(len(came), f"{why}: {_story(came, state)}")
        if len(came) > max_states:
            return Found(len(came), whole=False)
        if model.good is not None and model.good(state):
            good.append(state)  # what follows may still be bad
        for what, after, fault in model.steps(state):
            if model.good is not None and not fault:
                back.setdefault(after, []).append(state)
            if after not in came:
                came[after] = (state, what)
                queue.append(after)
    if model.good is None:
        return Found(len(came))
    hopeful = _leading_to(good, back)
    judged = [state for state in came if model.judged(state)]
    stuck = [state for state in judged if state not in hopeful]
    return Found(len(came), "", _story(came, stuck[0]) if stuck else "", len(stuck), len(judged))


def _leading_to(good: list[S], back: dict[S, list[S]]) -> set[S]:
    found, queue = set(good), deque(good)
    while queue:
        for state in back.get(queue.popleft(), ()):
            if state not in found:
                found.add(state)
                queue.append(state)
    return found


def _story(came: dict[S, tuple[S, str] | None], state: S) -> str:
    told = list[str]()
    while (before := came[state]) is not None:
        state, what = before
        told.append(what)
    return "; ".join(reversed(told)) or "at the start"
