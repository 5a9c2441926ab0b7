"""The lines of all ranks of a simulated peer as one line that holds all parts: for the oracle, which looks at peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from diloco.outer.fragments import Layout
from diloco.outer.line import Line, PendingContribution
from diloco.outer.state import FragmentState, OuterState
from diloco.simulate.virtual.oracle.gate import Violation


def interleaved(by_lane: Sequence[Sequence[bytes]]) -> list[bytes]:
    """Parts of which each simulated rank has its own, and others empty."""
    return [by_lane[part % len(by_lane)][part] for part in range(len(by_lane[0]))]


class WholeLine:
    """The line of a simulated peer of several ranks. What it does not have itself is that of rank 0."""

    def __init__(self, lines: Callable[[], Sequence[Line]], layout: Layout, name: str) -> None:
        """`lines`: of the ranks, by rank."""
        self._lines, self.layout, self._name = lines, layout, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lines()[0], name)

    @property
    def state(self) -> OuterState:
        """The simulated peer's outer state, of the parts of all ranks. Its digest is the one that rank 0 names."""
        lines = self._lines()
        fragments = []
        for index, first in enumerate(lines[0].state.fragments):
            buffers = [line.state.fragments[index].buffers() for line in lines]
            anchor, *slots = (self._joined(index, [one[name] for one in buffers]) for name in buffers[0])
            named = dict(zip(list(buffers[0])[1:], slots, strict=True))
            fragments.append(FragmentState(anchor, named, first.steps, self.layout.fragments[index]))
        whole = OuterState(lines[0].state.version, tuple(fragments))
        vars(whole)["digest"] = lines[0].state.digest
        return whole

    @property
    def sent(self) -> PendingContribution | None:
        """The simulated peer's contribution on its way, of the parts of all ranks."""
        lines = self._lines()
        sent = [line.sent for line in lines]
        first = sent[0]
        if first is None:
            return None
        all_sent = [one for one in sent if one is not None]
        contribution, index = first.contribution, first.contribution.fragment
        alike = {(one.contribution.fragment, one.contribution.base_version) for one in all_sent}
        if len(all_sent) < len(lines) or len(alike) > 1:
            raise Violation("I4", f"the ranks of {self._name} do not have the same contribution on its way")
        whole = replace(contribution, parts=interleaved([list(one.contribution.parts) for one in all_sent]))
        base = self._joined(index, [one.base_if_skipped for one in all_sent])
        targets = [one.target for one in all_sent if one.target is not None]
        target = self._joined(index, targets) if targets else None
        return replace(first, contribution=whole, base_if_skipped=base, target=target, local=None, own_share=None)

    @property
    def residuals(self) -> Mapping[int, Tensor]:
        """The simulated peer's residuals of all parts, by fragment."""
        lines = self._lines()
        kept = sorted({index for line in lines for index in line.residuals})
        return {index: self._joined(index, [line.residuals.get(index) for line in lines]) for index in kept}

    def check(self) -> None:
        """I1: after a version the ranks stand at the same, and the weights of all are the same; together they hold the
        very state that they name."""
        lines, state = self._lines(), self.state
        stands = {(line.state.version, line.state.digest) for line in lines}
        if len(stands) > 1:
            raise Violation("I1", f"the ranks of {self._name} stand at {sorted(stands)}")
        if OuterState(state.version, tuple(map(replace, state.fragments))).digest != state.digest:
            raise Violation("I1", f"the ranks of {self._name} hold another state than they name")
        for line in lines[1:]:
            for name, weights in lines[0].parameters.items():
                if not torch.equal(weights, line.parameters[name]):
                    raise Violation("I1", f"the ranks of {self._name} hold different weights of {name}")

    def _joined(self, index: int, by_rank: Sequence[Tensor | None]) -> Tensor:
        """A flat buffer of a whole fragment, from those of the ranks; None: zeros."""
        fragment = self.layout.fragments[index]
        whole = torch.zeros(fragment.total)
        for rank, flat in enumerate(by_rank):
            if flat is not None:
                for part, (start, stop) in fragment.on_lane(rank, len(by_rank)).cuts.items():
                    whole[slice(*fragment.place_of(part))] = flat[start:stop]
        return whole
