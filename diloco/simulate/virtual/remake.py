"""Every version of a simulation once more, by `diloco.accounts.replay`, from the contributions as their makers recorded
them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco.accounts.chain import Chain
from diloco.accounts.recording import Recording
from diloco.accounts.replay import Replay, Workshop, shelve
from diloco.base.types import Counted
from diloco.simulate.virtual.setup import Setup


@dataclass(frozen=True)
class Kept(Recording):
    """A recorded contribution that stays in memory."""

    held: Sequence[bytes] = ()

    def payloads(self) -> Iterator[bytes]:
        return iter(self.held)


def remake(chain: Chain, recorded: Iterable[tuple[Counted, int, Sequence[bytes]]], setup: Setup) -> Replay:
    """`recorded`: how a commit counts each contribution, its fragment, its parts."""
    fragments = setup.layout.fragments
    shelf = shelve(Kept(Path(), fragments[index], counted, 0, (), parts) for counted, index, parts in recorded)
    made_with = setup.codecs, setup.optimizer, setup.weighing
    workshop = Workshop(chain, shelf, *made_with, lambda: setup.start, {}, setup.radial)
    return workshop.replay(lambda done, total: None)
