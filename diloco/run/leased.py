"""Reading the blocks of data that a peer leases, from version to version."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from diloco.base.types import Commit, Counted
from diloco.data.dataset import Dataset
from diloco.data.reader import BlockReader
from diloco.outer.line import Line


class LeasedReader:
    """`BlockReader` in the leases that commits give to one peer. On rank 0."""

    def __init__(self, dataset: Dataset, seed: int, line: Line, resumed: dict[str, Any] | None, version: int) -> None:
        """`resumed`: what a checkpoint of `version` holds of a reader. Raises IncompatibleError for other data."""
        self._dataset, self._seed, self._line = dataset, seed, line
        self._reader = BlockReader(dataset, seed)
        self._resumed_version = -1
        if resumed is not None:
            self._reader.load_state_dict(resumed)
            self._resumed_version = version
        self._commit: Commit | None = None
        """Whose lease is read."""

    @property
    def repeats(self) -> int:
        """Blocks read again because the lease had no others."""
        return self._reader.repeats

    def next(self, count: int) -> tuple[Tensor, int]:
        """So many blocks, (count, L + 1) token ids; and how many of them were read for the first time."""
        fresh = min(count, self._reader.remaining)  # blocks read again are nobody's to count
        return self._reader.next(count), fresh

    def numbers(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {"reader": self._reader.state_dict()}

    def closed(self, commit: Commit, before: Commit | None, mine: Counted | None) -> None:
        """Read on in what this peer holds now. After a time outside the view it is all new, and nothing of it used."""
        self._commit = commit
        held = commit.leases.held.get(self._line.peer)
        if held is None:
            return
        if self._newly(before) and self._resumed_version != commit.version:
            self._anew(commit)
            return
        try:
            self._reader.lease(held, mine.blocks if mine else 0)
        except ValueError:  # it counts what we sent in an earlier life: what is held is not what it was
            self._again(commit)

    def copied(self, commit: Commit | None, before: Commit | None) -> None:
        """Stand at the version of a state that was copied."""
        before = self._commit or before
        if commit is None or commit is before:
            return
        self._commit = commit
        if self._line.peer in commit.leases.held:
            (self._anew if self._newly(before) else self._again)(commit)

    def _newly(self, before: Commit | None) -> bool:
        """Whether this peer held nothing at that version."""
        return before is None or self._line.peer not in before.leases.held

    def _anew(self, commit: Commit) -> None:
        self._reader = BlockReader(self._dataset, self._seed)
        self._reader.lease(commit.leases.held[self._line.peer])
        self._line.trained.blocks = 0

    def _again(self, commit: Commit) -> None:
        """Read on where nobody knows what was counted. The blocks of progress that is kept are not read again, and go
        out with it; where nothing is kept, what was read and not counted is."""
        if not self._line.trained.tokens:
            self._anew(commit)
            return
        self._reader.catch_up(commit.leases.held[self._line.peer])
        self._line.trained.blocks = self._reader.used
