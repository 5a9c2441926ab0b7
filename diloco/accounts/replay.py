"""`diloco replay`: every version once more, in one process, from the contributions that the peers recorded (I3).

A version is made as the run made it: the counted contributions are folded part by part in the commit's order, without
those that a part omits, and encoded; the digest of these bytes must be the commit's. The outer step then gives a state,
whose digest must be the one that the ledgers say. The first state is the model that the contract's seed gives, or any
checkpoint; where a contribution is missing, the next checkpoint takes over, and until then only means are compared.

Memory: one state at each place where the chain parts, and one encoded mean. Contributions are read part by part.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from diloco.accounts.audit import saved_state
from diloco.accounts.books import Book, Chain, chain_of, read_books
from diloco.accounts.recording import Recording, recordings
from diloco.base.errors import StateError, UsageError
from diloco.base.readable import readable_text
from diloco.base.types import Commit, Counted
from diloco.compress import Codec, PayloadError, open_codecs
from diloco.config.contract import Contract
from diloco.config.load import contract_from_json
from diloco.data import open_dataset
from diloco.models import build_model
from diloco.outer.average import fold, mean_digest, unpack
from diloco.outer.fragments import Fragment, Layout, named_parameters, read_fragment
from diloco.outer.line import Weighing
from diloco.outer.optimizers import open_outer
from diloco.outer.state import OuterOptimizer, OuterState
from diloco.storage.checkpoint import Checkpoint, load


class Verdict(StrEnum):
    """Result of replaying one version."""

    REPRODUCED = "reproduced"
    """The same mean and the same state, bit for bit."""
    MEAN = "same mean"
    """The same mean; no state to step from."""
    MISSING = "not recorded"
    MISMATCH = "MISMATCH"


@dataclass(frozen=True)
class Replayed:
    """One version."""

    version: int
    lineage: str
    verdict: Verdict
    detail: str = ""


class Otherwise(Exception):
    """Why a version was not reproduced."""

    def __init__(self, verdict: Verdict, detail: str) -> None:
        super().__init__(detail)
        self.verdict = verdict


@dataclass
class Replay:
    """All versions, in the order in which they were made again."""

    versions: list[Replayed] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether nothing came out otherwise than it was."""
        return not any(one.verdict is Verdict.MISMATCH for one in self.versions)

    def count(self, verdict: Verdict) -> int:
        """Number of versions with this verdict."""
        return sum(one.verdict is verdict for one in self.versions)

    def tree(self) -> dict[str, Any]:
        """For JSON."""
        counts = {verdict.name.lower(): self.count(verdict) for verdict in Verdict}
        return {"exact": self.exact, **counts, "versions": [asdict(one) for one in self.versions]}


Shelf = Mapping[tuple[str, int, int], Sequence[Recording]]
"""Recorded contributions by peer, base version and fragment. An earlier life of a peer may have left another one."""


@dataclass(frozen=True)
class Workshop:
    """Tools that versions are made with."""

    chain: Chain
    shelf: Shelf
    codecs: Sequence[Codec]
    """By group of parameters."""
    optimizer: OuterOptimizer
    weighing: Weighing
    seeded: Callable[[], OuterState | None]
    """The state that the run begins with, if the contract tells."""
    saved: Mapping[str, Callable[[], OuterState]]
    """States to take over from, by the digest of the commit that made them."""
    radial: bool = False
    """As `diloco.outer.average.fold`'s."""

    def replay(self, progress: Callable[[int, int], None]) -> Replay:
        """Walk the whole chain. `progress` is told of versions done and in all. Raises StateError."""
        result = Replay()
        todo: list[tuple[str, OuterState | None]] = [(root, self._first(root)) for root in self.chain.roots()[::-1]]
        while todo:
            digest, before = todo.pop()
            commit = self.chain.commits[digest]
            one, after = self._make(commit, before)
            result.versions.append(one)
            if after is None and digest in self.saved:
                after = self.saved[digest]()
            todo += [(child, after) for child in self.chain.children.get(digest, ())]
            progress(len(result.versions), len(self.chain.commits))
        return result

    def _first(self, root: str) -> OuterState | None:
        """The state before a commit that nothing we have precedes."""
        commit = self.chain.commits[root]
        return self.seeded() if commit.fragment < 0 and commit.version == 0 else None

    def _make(self, commit: Commit, before: OuterState | None) -> tuple[Replayed, OuterState | None]:
        """One version, and the state after it if that is what it was."""
        verdict, detail, after = Verdict.REPRODUCED, "", None
        try:
            after = self._after(commit, before)
        except Otherwise as why:
            verdict, detail = why.verdict, str(why)
        return Replayed(commit.version, commit.lineage, verdict, detail), after

    def _after(self, commit: Commit, before: OuterState | None) -> OuterState:
        """The state after a version. Raises Otherwise."""
        mean = self._mean(commit) if commit.fragment >= 0 else None
        if before is None:
            raise Otherwise(Verdict.MEAN if mean else Verdict.MISSING, "no state to step from")
        if before.digest != commit.state_digest:
            raise Otherwise(Verdict.MISMATCH, f"made on state {commit.state_digest[:12]}, not {before.digest[:12]}")
        if mean and not _fits(mean[0], before):
            raise Otherwise(Verdict.MISMATCH, f"fragment {commit.fragment} is not the model's")
        after = self._step(before, *mean, commit) if mean else before
        said = self.chain.states[commit.digest]
        if after.digest not in said:
            raise Otherwise(Verdict.MISMATCH, f"state {after.digest[:12]}, the ledgers say {next(iter(said))[:12]}")
        return after

    def _candidates(self, commit: Commit, counted: Counted) -> Sequence[Recording]:
        found = self.shelf.get((counted.peer, counted.base_version, commit.fragment), ())
        return [recording for recording in found if recording.counted == counted]

    def _mean(self, commit: Commit) -> tuple[Fragment, list[bytes]]:
        """The encoded mean with the commit's digest. Where a peer recorded two contributions with the same counts, in
        two lives, the digest tells which one was counted. Raises Otherwise."""
        candidates = [self._candidates(commit, counted) for counted in commit.counted]
        missing = [counted.peer for counted, found in zip(commit.counted, candidates, strict=True) if not found]
        if missing:
            raise Otherwise(Verdict.MISSING, f"no contribution of {', '.join(missing)}")
        why = "it counts nobody"
        for chosen in itertools.product(*candidates) if candidates else ():
            try:
                parts = list(self._fold(commit, chosen))
            except (PayloadError, ValueError, IndexError) as error:
                why = f"the contributions do not fold: {error}"
                continue
            if mean_digest(parts) == commit.mean_digest:
                return chosen[0].fragment, parts
            why = f"mean {mean_digest(parts)[:12]}, the commit says {commit.mean_digest[:12]}"
        raise Otherwise(Verdict.MISMATCH, why)

    def _fold(self, commit: Commit, chosen: Sequence[Recording]) -> Iterator[bytes]:
        """Raises PayloadError, ValueError where the recordings differ in the number of parts, and IndexError where a
        part is of a group that the contract does not have."""
        fragment = chosen[0].fragment
        for part, payloads in enumerate(zip(*(recording.payloads() for recording in chosen), strict=True)):
            start, stop = fragment.part_bounds(part)
            pairs = zip(commit.counted, payloads, strict=True)
            terms = [(counted.weight, payload) for counted, payload in pairs if commit.counts(counted.peer, part)]
            if not terms:
                raise ValueError(f"part {part} counts nobody")
            yield fold(terms, stop - start, self.codecs[fragment.group_of(part)], radial=self.radial)

    def _step(self, before: OuterState, fragment: Fragment, parts: Sequence[bytes], commit: Commit) -> OuterState:
        mean, share = unpack(parts, fragment, self.codecs), self.weighing.share(commit.counted, commit.view)
        after = self.optimizer.step(before.fragments[fragment.index], mean, share=share)
        return before.replace(fragment.index, after, commit.version)


def _fits(recorded: Fragment, state: OuterState) -> bool:
    """Whether a fragment, as a recording tells of it, is one of the state's."""
    held = state.fragments
    return recorded.index < len(held) and held[recorded.index].anchor.numel() == recorded.total


# ---------------------------------------------------------------- from folders


def replay(directories: Sequence[Path], data_root: Path, progress: Callable[[int, int], None]) -> Replay:
    """Replay the run whose peers' folders these are, or that are in these. `data_root` as the site's.

    Raises UsageError when nothing is recorded there, StateError for a damaged file, and what building the contract's
    model raises.
    """
    books = read_books(directories)
    shelf = shelve(recording for book in books for recording in recordings(book.directory))
    if not shelf:
        raise UsageError("no contribution is recorded in these folders", "train with --set storage.record=true")
    contract = contract_from_json(json.dumps(books[0].lives[-1].opening["contract"]))
    checkpoints = list(_checkpoints(books))
    workshop = Workshop(
        chain_of(books),
        shelf,
        open_codecs(contract.codec),
        open_outer(contract.outer),
        Weighing.of(contract),
        lambda: seeded_state(contract, [checkpoint for checkpoint, _ in checkpoints], data_root),
        {commit.digest: _opener(checkpoint) for checkpoint, commit in checkpoints if commit},
        contract.outer.averaging == "radial",
    )
    return workshop.replay(progress)


def shelve(found: Iterable[Recording]) -> Shelf:
    """Recordings by what a commit says of them."""
    shelf: dict[tuple[str, int, int], list[Recording]] = {}
    for recording in found:
        key = recording.counted.peer, recording.counted.base_version, recording.fragment.index
        shelf.setdefault(key, []).append(recording)
    return shelf


def seeded_state(contract: Contract, checkpoints: Sequence[Checkpoint], data_root: Path) -> OuterState | None:
    """The state that a founder begins with; None for a model that only the library's caller can build."""
    if contract.model.kind == "external":
        return None
    if checkpoints:
        vocab_size = checkpoints[0].value("vocab_size", int)
    else:
        vocab_size = open_dataset(contract.data, data_root).vocab_size
    parameters = named_parameters(build_model(contract.model, vocab_size, contract.run.seed, data_root))
    shapes = [(name, tuple(parameter.shape)) for name, parameter in parameters.items()]
    optimizer = open_outer(contract.outer)
    fragments = Layout.agreed(shapes, contract).fragments
    anchor = [read_fragment(parameters, fragment) for fragment in fragments]
    return OuterState(0, tuple(map(optimizer.start, anchor, fragments)))


def _checkpoints(books: Iterable[Book]) -> Iterator[tuple[Checkpoint, Commit | None]]:
    """Those that are whole, with their commit; `diloco audit` tells of the others."""
    for book in books:
        for path in sorted((book.directory / "checkpoints").glob("v*")):
            try:
                checkpoint = load(path)
                yield checkpoint, checkpoint.commit
            except StateError:
                continue


def _opener(checkpoint: Checkpoint) -> Callable[[], OuterState]:
    return lambda: saved_state(checkpoint)


def replay_text(result: Replay) -> str:
    """For people: what is not reproduced, and a summary."""
    alike = itertools.groupby(result.versions, lambda one: (one.verdict, one.lineage, one.detail))
    lines = [
        f"{_span(list(those))}: {verdict}{_because(detail)}"
        for (verdict, _, detail), those in alike
        if verdict is not Verdict.REPRODUCED
    ]
    counts = ", ".join(f"{result.count(verdict)} {verdict}" for verdict in Verdict if result.count(verdict))
    return "\n".join([*lines, f"{len(result.versions)} commits: {counts}"])


def _span(those: Sequence[Replayed]) -> str:
    """Versions that follow each other."""
    first, last = those[0].version, those[-1].version
    return f"version {first}" if first == last else f"versions {first} to {last}"


def _because(detail: str) -> str:
    return f": {readable_text(detail, 300)}" if detail else ""
