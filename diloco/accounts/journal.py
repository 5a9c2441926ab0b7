"""A peer's records while it lives: where its tokens went (always), its ledger and its contributions (with a folder)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from diloco.accounts.ledger import Ledger, Opening, Position, Totals, open_ledger
from diloco.accounts.recording import RECORDED, Recorder
from diloco.base.types import Commit, Contribution, Counted
from diloco.config.contract import Contract
from diloco.config.site import StorageSection
from diloco.outer.line import Line


class Journal:
    """The accounts of one life of a peer. For the training thread."""

    def __init__(
        self,
        opening: Opening,
        line: Line,
        directory: Path | None,
        storage: StorageSection,
        warn: Callable[[str], None],
        ledger: Ledger | None = None,
    ) -> None:
        """Progress that a checkpoint brought counts as trained in this life. `ledger`: one that is not in `directory`.

        Raises ResourceError and StateError."""
        self.opening, self.line = opening, line
        self.trained_tokens = line.trained.tokens
        self.committed_tokens = 0
        self.discarded_tokens = 0
        self._ledger = ledger
        self.recorder: Recorder | None = None
        self._recorded: Contribution | None = None
        if directory is not None:
            self._ledger = open_ledger(directory, warn)
            if storage.record:
                where = directory / RECORDED
                self.recorder = Recorder(where, opening.peer, opening.incarnation, storage.record_versions, warn)

    @property
    def totals(self) -> Totals:
        """Token totals of this life so far."""
        uncommitted = self.line.trained.tokens
        return Totals(self.trained_tokens, self.committed_tokens, self.discarded_tokens, uncommitted)

    def records(self, contribution: Contribution) -> bool:
        """Whether `record` wants this contribution; one that is offered again is there already."""
        return self.recorder is not None and contribution is not self._recorded

    def record(self, contribution: Contribution, whole: Contribution) -> None:
        """Keep a contribution before it is offered. `whole`: with the parts that other ranks hold."""
        if self.recorder is not None:
            base = self.line.commit.digest if self.line.commit else ""
            self.recorder.keep(whole, self.line.layout.fragments[whole.fragment], base)
            self._recorded = contribution

    def opened(self, contract: Contract) -> None:
        """The life begins here."""
        if self._ledger is not None:
            self._ledger.opened(self.opening, json.loads(contract.to_json()), self._position(), self.totals)

    def trained(self, tokens: int, blocks: int) -> None:
        """Inner steps were done."""
        self.trained_tokens += tokens
        self.line.trained.add(tokens, blocks)

    def committed(self, commit: Commit, mine: Counted | None) -> None:
        """The line has applied a version; `mine`: a contribution of this life that it counts."""
        self.committed_tokens += mine.tokens if mine else 0
        if self._ledger is not None:
            self._ledger.committed(commit, self.line.state.digest, mine is not None, self.totals)

    def adopted(self, mine: Counted | None, discarded: int) -> None:
        """The line has taken over a copied state, on the way to which a version counts `mine` of this life, or else
        given up that many tokens."""
        counted = mine.tokens if mine else 0
        self.committed_tokens += counted
        self.discarded_tokens += discarded
        if self._ledger is not None:
            self._ledger.adopted(self._position(), counted, discarded, self.totals)

    def discarded(self, tokens: int, reason: str) -> None:
        """The line has thrown progress away."""
        self.discarded_tokens += tokens
        if self._ledger is not None and tokens:
            self._ledger.discarded(tokens, self.line.state.version, reason, self.totals)

    def closed(self, reason: str) -> None:
        """The life ends in good order."""
        if self._ledger is not None:
            self._ledger.closed(reason, self.totals)

    def close(self) -> None:
        """Nothing is written any more."""
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None

    def _position(self) -> Position:
        commit, state = self.line.commit, self.line.state
        return Position(state.version, commit.digest if commit else "", state.digest)
