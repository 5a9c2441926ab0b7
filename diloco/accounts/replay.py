"""`diloco replay`: makes every version again, in one process, from the contributions that the peers recorded (I3).

A version is made as the run made it: the counted contributions are folded part by part in the commit's order, without
those that a part omits, and encoded; the digest of these bytes must be the commit's. The outer step then gives a state,
whose digest must be one that the ledgers name. The first state is the model that the contract's seed gives, or any
checkpoint; where a contribution is missing, the next checkpoint takes over, and until then only means are compared.

Memory: one state at each place where the chain parts, and one encoded mean. Contributions are read part by part.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from diloco.accounts.books import ChainRecord, chain_of, read_books
from diloco.accounts.journal import Recording, recordings
from diloco.base.errors import StateError, UsageError
from diloco.base.readable import readable_text
from diloco.base.types import Commit
from diloco.compress import Codec, PayloadError
from diloco.config.contract import Contract
from diloco.config.load import contract_from_json
from diloco.data import open_dataset
from diloco.models import build_model
from diloco.outer.average import Averaging, fold, mean_digest, unpack
from diloco.outer.fragments import Fragment, Layout, named_parameters, read_fragment
from diloco.outer.line import Weighing
from diloco.outer.optimizers import open_outer
from diloco.outer.robust import Rule, codecs_of
from diloco.outer.state import OuterOptimizer, OuterState
from diloco.plan.model import check_size
from diloco.storage.checkpoint import CHECKPOINTS, Checkpoint, load, saved_state


class Verdict(StrEnum):
    """Result of a replay of one version from recorded contributions."""

    REPRODUCED = "reproduced"
    """The same mean and the same state, bit for bit."""
    MEAN = "same mean"
    """The same mean; no state to step from."""
    MISSING = "not recorded"
    MISMATCH = "MISMATCH"


@dataclass(frozen=True)
class Replayed:
    """A version of the chain and the verdict of its replay."""

    version: int
    lineage: str
    verdict: Verdict
    detail: str = ""


class Unreproduced(Exception):
    """Verdict of a replay other than REPRODUCED, and its detail: the arguments."""


@dataclass
class Replay:
    """Result of a replay: all versions, in the order in which they were made again."""

    versions: list[Replayed] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether no version of the replay is a mismatch."""
        return not any(one.verdict is Verdict.MISMATCH for one in self.versions)

    def count(self, verdict: Verdict) -> int:
        """Number of versions of the replay with this verdict."""
        return sum(one.verdict is verdict for one in self.versions)

    def tree(self) -> dict[str, Any]:
        """The replay as JSON values."""
        counts = {verdict.name.lower(): self.count(verdict) for verdict in Verdict}
        return {"exact": self.exact, **counts, "versions": [asdict(one) for one in self.versions]}


Shelf = Mapping[tuple[str, int, int], Sequence[Recording]]
"""Recorded contributions by peer, base version and fragment. An earlier life of a peer may have left another one."""


@dataclass(frozen=True)
class Replayer:
    """Replays the chain of a run: its commits, recorded contributions, and all else that makes versions again."""

    chain: ChainRecord
    shelf: Shelf
    codecs: Sequence[Codec]
    """Codecs by group of parameters."""
    optimizer: OuterOptimizer
    weighing: Weighing
    seeded: Callable[[], OuterState | None]
    """Builds the state that the run begins with; None for a model that only the library's caller can build."""
    saved: Mapping[str, Callable[[], OuterState]]
    """Loads a checkpoint's state, by the digest of the commit that made it."""
    rule: Rule = "mean"
    """As in `diloco.outer.average.fold`."""

    def replay(self, progress: Callable[[int, int], None]) -> Replay:
        """Replay the whole chain. `progress` gets the number of versions done, and of all. Raises StateError."""
        result = Replay()
        todo: list[tuple[Commit, OuterState | None]] = [
            (root, self.seeded() if root.founds and root.version == 0 else None)  # known where the run begins
            for root in self.chain.roots()[::-1]
        ]
        while todo:
            commit, before = todo.pop()
            verdict, detail, after = Verdict.REPRODUCED, "", None
            try:
                after = self._after(commit, before)
            except Unreproduced as why:
                verdict, detail = why.args
            result.versions.append(Replayed(commit.version, commit.lineage, verdict, detail))
            if after is None and commit.digest in self.saved:
                after = self.saved[commit.digest]()
            todo += [(child, after) for child in self.chain.children.get(commit.digest, ())]
            progress(len(result.versions), len(self.chain.commits))
        return result

    def _after(self, commit: Commit, before: OuterState | None) -> OuterState:
        """Replay one version: the state after it, which is the ledgers' state. Raises Unreproduced."""
        fragment, parts = self._mean(commit) if commit.moves else (None, [])
        if before is None:
            raise Unreproduced(Verdict.MEAN if fragment else Verdict.MISSING, "no state to step from")
        if before.digest != commit.state_digest and not commit.drafter:
            raise Unreproduced(Verdict.MISMATCH, f"made on state {commit.state_digest[:12]}, not {before.digest[:12]}")
        after = before
        if fragment:
            held = before.fragments
            if fragment.index >= len(held) or held[fragment.index].anchor.numel() != fragment.total:
                raise Unreproduced(Verdict.MISMATCH, f"fragment {commit.fragment} is not the model's")
            mean = unpack(parts, fragment, self.codecs)
            share = self.weighing.share(commit.counted, commit.view)
            stepped = self.optimizer.step(held[fragment.index], mean, share=share)
            after = before.replace(fragment.index, stepped, commit.version)
        known = self.chain.states[commit.digest]
        if after.digest not in known:
            raise Unreproduced(Verdict.MISMATCH, f"state {after.digest[:12]}, the ledgers say {next(iter(known))[:12]}")
        return after

    def _mean(self, commit: Commit) -> tuple[Fragment, list[bytes]]:
        """Replay one mean: encoded, with the commit's digest. Where a peer recorded two contributions with the same
        counts, in two lives, the digest decides which one was counted. Raises Unreproduced."""
        candidates: list[list[Recording]] = []
        for counted in commit.counted:
            found = self.shelf.get((counted.peer, counted.base_version, commit.fragment), ())
            candidates.append([recording for recording in found if recording.counted == counted])
        missing = [counted.peer for counted, found in zip(commit.counted, candidates, strict=True) if not found]
        if missing:
            raise Unreproduced(Verdict.MISSING, f"no contribution of {', '.join(missing)}")
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
        raise Unreproduced(Verdict.MISMATCH, why)

    def _fold(self, commit: Commit, chosen: Sequence[Recording]) -> Iterator[bytes]:
        """Encoded parts of the mean of recorded contributions. Raises PayloadError, ValueError where the recordings
        differ in the number of parts, and IndexError where a part is of a group that the contract does not have."""
        fragment = chosen[0].fragment
        for part, payloads in enumerate(zip(*(recording.payloads() for recording in chosen), strict=True)):
            start, stop = fragment.part_bounds(part)
            pairs = zip(commit.counted, payloads, strict=True)
            terms = [(counted.weight, payload) for counted, payload in pairs if commit.counts(counted.peer, part)]
            if not terms:
                raise ValueError(f"part {part} counts nobody")
            yield fold(terms, stop - start, self.codecs[fragment.group_of(part)], rule=self.rule)


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
    checkpoints: list[tuple[Checkpoint, Commit | None]] = []
    for path in itertools.chain(*(sorted((book.directory / CHECKPOINTS).glob("v*")) for book in books)):
        with suppress(StateError):  # `diloco audit` reports the damaged ones
            checkpoint = load(path)
            checkpoints.append((checkpoint, checkpoint.commit))
    return Replayer(
        chain_of(books),
        shelf,
        codecs_of(contract),
        open_outer(contract.outer),
        Weighing.of(contract),
        lambda: _seeded_state(contract, checkpoints[0][0] if checkpoints else None, data_root),
        {commit.digest: partial(saved_state, checkpoint) for checkpoint, commit in checkpoints if commit},
        Averaging.of(contract).rule,
    ).replay(progress)


def shelve(found: Iterable[Recording]) -> Shelf:
    """Recorded contributions by the key under which a ledger's commit counts them."""
    shelf: dict[tuple[str, int, int], list[Recording]] = {}
    for recording in found:
        key = recording.counted.peer, recording.counted.base_version, recording.fragment.index
        shelf.setdefault(key, []).append(recording)
    return shelf


def _seeded_state(contract: Contract, checkpoint: Checkpoint | None, data_root: Path) -> OuterState | None:
    """State that a replay begins with, as a founder does; None for a model that only the library's caller can build.

    `checkpoint`: any of the run, which saves opening the data for the size of the vocabulary."""
    if contract.model.kind == "external":
        return None
    vocab_size = (
        checkpoint.value("vocab_size", int) if checkpoint else open_dataset(contract.data, data_root).vocab_size
    )
    check_size(contract, vocab_size, None)
    parameters = named_parameters(build_model(contract.model, vocab_size, contract.run.seed, data_root))
    shapes = [(name, tuple(parameter.shape)) for name, parameter in parameters.items()]
    fragments = Layout.agreed(shapes, contract).fragments
    anchor = [read_fragment(parameters, fragment) for fragment in fragments]
    return OuterState(0, tuple(map(open_outer(contract.outer).start, anchor, fragments)))


def replay_text(result: Replay) -> str:
    """A replay for people to read: versions that are not reproduced, neighbours on one line, and a summary."""
    lines = []
    for (verdict, _, detail), group in itertools.groupby(result.versions, attrgetter("verdict", "lineage", "detail")):
        if verdict is Verdict.REPRODUCED:
            continue
        versions = [one.version for one in group]
        span = f"versions {versions[0]} to {versions[-1]}" if versions[0] != versions[-1] else f"version {versions[0]}"
        lines.append(f"{span}: {verdict}" + (f": {readable_text(detail, 300)}" if detail else ""))
    counts = ", ".join(f"{result.count(verdict)} {verdict}" for verdict in Verdict if result.count(verdict))
    return "\n".join([*lines, f"{len(result.versions)} commits: {counts}"])
