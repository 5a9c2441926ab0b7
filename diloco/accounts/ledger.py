"""The ledger: an append-only file of one peer that records which versions it applied and where its tokens went.

    <directory>/ledger.jsonl      one record per line: xxh3-64 of the JSON (16 digits), a blank, canonical JSON

    open     a life begins: peer, incarnation, contract, lineage, the version and state it stands on
    commit   a version was applied: the commit itself, the digest of the state *after* it, whether it counts us
    adopt    a state was copied: version, digests, the tokens of this life that a version counts which was passed over
             (`counted`), and those that were given up (`discarded`); its lineage, and those that led there (`forks`)
    discard  tokens that will never be counted, and why
    close    the life ended in good order
    gap      records that a full disk refused

Records are numbered (`n`), and each has the tokens of this life so far: `trained` = `committed` + `discarded` +
`uncommitted`, of which the first is counted where the inner steps are and the others where they go. What a life takes
over from a checkpoint counts as trained in it, too.

A record is on the disk when `write` returns, and a peer goes on only then. Measured on ext4 with four peers in the
view: 1.6 kB and 0.75 ms per version (of 20 the slowest: 6.3 ms), of which 0.13 ms is encoding and the rest fsync. A
full disk ends no training: the record is dropped with one warning, and a `gap` follows once there is room again. But a
life does not begin before its `open` record is on the disk: the records behind it would belong to the life before.

`scan` and `encode` are pure; `LogFile` is the seam to the disk, behind which a simulated one may forget what was not
synced. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, cast, get_type_hints

from diloco.base import failpoints
from diloco.base.errors import ResourceError, StateError
from diloco.base.files import disk, make_folders, open_to_write, sync_path
from diloco.base.sealed import canonical, sealed_line, unsealed
from diloco.base.types import Commit

FORMAT = 2
"""1 had commits without height and voters, and lives without boots."""
LEDGER = "ledger.jsonl"


@dataclass(frozen=True, slots=True)
class Totals:
    """Token totals of one life of a peer in its ledger."""

    trained: int
    committed: int
    discarded: int
    uncommitted: int
    """In the local weights, not counted by any version yet."""

    @property
    def balanced(self) -> bool:
        """Whether the ledger books every token that was trained in one place (I2)."""
        return self.uncommitted >= 0 and self.trained == self.committed + self.discarded + self.uncommitted


@dataclass(frozen=True, slots=True)
class Opening:
    """Start of a process of a peer in its ledger, which books its tokens from its start to its end."""

    peer: str
    incarnation: int
    """That of its life: a process that goes on with its disk has that of the one before, and one that was out of the
    view for a while goes on under another."""
    boot: int
    """The process (`Counted`): its start in microseconds (`new_incarnation`)."""
    run: str
    contract_digest: str
    lineage: str
    founds: bool
    """Whether the lineage is new and begins with this life."""
    resumed: bool
    """Whether the life goes on from a checkpoint."""


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the chain of commits, as a ledger records it."""

    version: int
    digest: str
    """Digest of the commit that made the version; empty before the founding."""
    state: str
    """Digest of anchor and outer state (`OuterState.digest`)."""


FIELDS: Mapping[str, Mapping[str, type]] = {
    "open": {**get_type_hints(Opening), **get_type_hints(Position), "contract": dict},
    "commit": {"commit": dict, "digest": str, "state": str, "own": bool},
    "adopt": {**get_type_hints(Position), "discarded": int},
    "discard": {"discarded": int, "version": int, "reason": str},
    "close": {"reason": str},
    "gap": {"dropped": int},
}
"""Fields of each kind of record, beside its tokens."""
_TYPES = {name: kind for fields in FIELDS.values() for name, kind in fields.items()} | {"counted": int, "forks": dict}
"""Type of every field, also of one that older ledgers lack."""


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a ledger."""

    number: int
    """Number of the record in the ledger, from 0."""
    kind: str
    fields: Mapping[str, Any]

    @property
    def line(self) -> int:
        """Number of the record's line in the ledger, from 1."""
        return self.number + 1

    @property
    def totals(self) -> Totals:
        """Token totals of the life up to this record of the ledger."""
        return Totals(**self.fields["tokens"])

    @property
    def commit(self) -> Commit:
        """The commit in a ledger's `commit` record. Raises ValueError."""
        try:
            return Commit.from_bytes(canonical(self.fields["commit"]))
        except RecursionError as error:
            raise ValueError("its commit is in too many brackets") from error

    @property
    def commit_digest(self) -> str:
        """`Commit.digest` of a ledger's `commit` record, without parsing the commit (20 µs instead of 800)."""
        return hashlib.sha256(canonical(self.fields["commit"])).hexdigest()


# ---------------------------------------------------------------- the format


def encode(record: Record) -> bytes:
    """A record as a line of the ledger."""
    return sealed_line({**record.fields, "n": record.number, "kind": record.kind})


@dataclass(frozen=True, slots=True)
class Scan:
    """Records in a ledger's bytes."""

    records: tuple[Record, ...]
    whole_bytes: int
    """End of the last whole record; what follows was being written when the peer or the machine died."""
    torn_bytes: int


class DamagedLine(Exception):
    """A line of a ledger is not as it was written, and whole lines follow: no crash does that."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__(f"line {line} {why}")
        self.line = line


class OtherFormat(DamagedLine):
    """A line of a ledger is of another release."""


def scan(data: bytes) -> Scan:
    """Records of a ledger up to a torn tail: half a line, zeros, or any bytes behind which no whole record follows.

    Raises DamagedLine, which counts lines from 1, for damage that a crash cannot explain.
    """
    records: list[Record] = []
    whole_bytes = 0
    lines = data.split(b"\n")[:-1]  # what follows the last end of a line is never whole
    for number, line in enumerate(lines, 1):
        tree = unsealed(line)
        if tree is None:
            if any(unsealed(later) is not None for later in lines[number:]):
                raise DamagedLine(number, "was changed: its checksum does not fit, or it holds no record")
            break
        found = tree.pop("n", -1)
        if found != len(records):
            raise DamagedLine(number, f"holds record {found}, record {len(records)} was expected")
        if not _is(tree.get("format", FORMAT), int) or tree.get("format", FORMAT) != FORMAT:
            raise OtherFormat(number, f"is of format {tree['format']!r:.20}, and this diloco reads {FORMAT}")
        records.append(Record(len(records), tree.pop("kind", ""), tree))
        whole_bytes += len(line) + 1
    return Scan(tuple(records), whole_bytes, len(data) - whole_bytes)


def check_record(record: Record) -> None:
    """Raises ValueError unless a ledger's record has the fields of its kind: one from elsewhere may hold anything under
    a right checksum. The commit is not parsed: `Record.commit` does that, at forty times the cost."""
    if not isinstance(record.kind, str) or record.kind not in FIELDS:
        raise ValueError("it is of no kind that there is")
    fields, tokens = record.fields, record.fields.get("tokens")
    missing = FIELDS[record.kind].keys() - fields.keys()
    if missing:
        raise ValueError(f"{min(missing)} is missing")
    wrong = [name for name, value in fields.items() if name in _TYPES and not _is(value, _TYPES[name])]
    if wrong:
        raise ValueError(f"its {wrong[0]} is malformed")
    if (
        not isinstance(tokens, dict)
        or tokens.keys() != set(Totals.__slots__)
        or not all(_is(one, int) for one in tokens.values())
    ):
        raise ValueError("its tokens are malformed")
    if record.kind == "open" and not isinstance(fields["contract"].get("membership"), dict):
        raise ValueError("its contract is malformed")
    if not all(_is(tokens, int) for tokens in fields.get("forks", {}).values()):
        raise ValueError("its forks are malformed")
    if "commit" in fields:
        commit = fields["commit"]
        numbers = commit.get("version"), commit.get("tokens", 0)
        if not (all(_is(number, int) for number in numbers) and _is(commit.get("lineage", ""), str)):
            raise ValueError("its commit is malformed")


def _is(value: object, kind: type) -> bool:
    return type(value) is kind and (kind is not int or -(2**63) <= cast(int, value) < 2**63)


# ---------------------------------------------------------------- the file


class LogFile(Protocol):
    """A ledger's file, which grows at its end; in memory for tests and the simulator. Every method raises OSError."""

    def read(self) -> bytes:
        """All bytes of the ledger's file."""

    def append(self, data: bytes) -> None:
        """Write at the end of the ledger's file; after an error any part of it may be there."""

    def sync(self) -> None:
        """Return when everything appended to the ledger's file would survive a loss of power."""

    def truncate(self, size: int) -> None:
        """Cut the ledger's file at `size` bytes, durably after the next `sync`."""

    def close(self) -> None: ...


class DiskFile:
    """A ledger's file on the disk."""

    def __init__(self, path: Path) -> None:
        """Open the file, or create it. Raises OSError, and StateError for a symbolic link."""
        make_folders(path.parent)
        self._path, self._descriptor = path, open_to_write(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        sync_path(path.parent)

    def read(self) -> bytes:
        return self._path.read_bytes()

    def append(self, data: bytes) -> None:
        disk().write(self._descriptor, self._path, data)

    def sync(self) -> None:
        failpoints.hit("before-ledger-sync")
        disk().sync(self._descriptor, self._path)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)

    def close(self) -> None:
        os.close(self._descriptor)


# ---------------------------------------------------------------- writing


class Ledger:
    """Writer of a peer's ledger, for one thread at a time."""

    def __init__(self, file: LogFile, warn: Callable[[str], None]) -> None:
        """Cut off a torn tail and go on behind the last whole record. `warn` gets that, and a full disk, as a sentence.

        Raises DamagedLine and OSError.
        """
        found = scan(file.read())
        self._file, self._warn = file, warn
        self._number, self._bytes, self._dropped = len(found.records), found.whole_bytes, 0
        if found.torn_bytes:
            warn(f"the ledger ended in {found.torn_bytes} bytes of a record that was never finished: cut off")
            file.truncate(self._bytes)
            file.sync()

    def opened(self, opening: Opening, contract: Mapping[str, Any], position: Position, totals: Totals) -> None:
        """Record in the ledger that a life begins, at a checkpoint's version or with the model as it was built.

        Raises ResourceError when the disk refuses the record: then nothing of it stays, and the life must not begin.
        """
        fields = {"format": FORMAT, **asdict(opening), **asdict(position), "contract": dict(contract)}
        data = encode(Record(self._number, "open", {**fields, "tokens": asdict(totals)}))
        try:
            self._append(data)
        except OSError as error:
            cause = f"cannot write the ledger's first record of this life: {error.strerror}"
            raise ResourceError(cause, "make room, or choose another folder (--dir)") from error
        self._number, self._bytes = self._number + 1, self._bytes + len(data)

    def committed(self, commit: Commit, state_digest: str, own: bool, totals: Totals) -> None:
        """Record in the ledger that the peer applied a version. `state_digest`: of the state after it."""
        # Its bytes are there already, and parsing takes a tenth of the time of `asdict`.
        fields = {"commit": json.loads(commit.to_bytes()), "digest": commit.digest, "state": state_digest, "own": own}
        self.write("commit", fields, totals)

    def adopted(
        self, position: Position, lineage: str, forks: Mapping[str, int], counted: int, discarded: int, totals: Totals
    ) -> None:
        """Record in the ledger that the peer copied a state of this lineage; empty: of a run that was not founded yet.

        `forks`: that lineage and those that led to it, each with its committed tokens: of the state, or as it was left.
        What the peer stood on in another lineage, or later, does not lead to the state. Tokens of its last contribution
        are `counted` where a version that was passed over counts them, or else `discarded`, though a later version may
        count them.
        """
        origin = {"lineage": lineage, "forks": dict(forks)}
        self.write("adopt", {**asdict(position), **origin, "counted": counted, "discarded": discarded}, totals)

    def discarded(self, tokens: int, version: int, reason: str, totals: Totals) -> None:
        """Record in the ledger that the peer threw away progress on the anchor of `version`."""
        self.write("discard", {"discarded": tokens, "version": version, "reason": reason}, totals)

    def closed(self, reason: str, totals: Totals) -> None:
        """Record in the ledger that the life ended in good order."""
        self.write("close", {"reason": reason}, totals)

    def write(self, kind: str, fields: Mapping[str, Any], totals: Totals) -> None:
        """Append a record to the ledger and sync it; if the disk refuses, warn once and count it for the next `gap`."""
        tokens = {"tokens": asdict(totals)}
        lines = []
        if self._dropped:
            lines.append(encode(Record(self._number, "gap", {"dropped": self._dropped, **tokens})))
        lines.append(encode(Record(self._number + len(lines), kind, {**fields, **tokens})))
        data = b"".join(lines)
        try:
            if self._dropped:
                self._file.truncate(self._bytes)  # as far as it was not cut then
            self._append(data)
        except OSError as error:
            if not self._dropped:
                self._warn(f"no {kind} record in the ledger: {error.strerror}; training goes on, and a gap will tell")
            self._dropped += 1
            return
        self._number, self._bytes, self._dropped = self._number + len(lines), self._bytes + len(data), 0

    def _append(self, data: bytes) -> None:
        """Append to the ledger's file, and sync it. Raises OSError; then it ends where it did, if it can be cut."""
        try:
            self._file.append(data)
            self._file.sync()
        except OSError:
            with suppress(OSError):
                self._file.truncate(self._bytes)  # half a record must not stay: the next one would stand behind it
            raise

    def close(self) -> None:
        """Close the ledger's file. Nothing is written any more."""
        self._file.close()


def open_ledger(directory: Path, warn: Callable[[str], None]) -> Ledger:
    """Writer of the ledger in a peer's folder, a new one or continued. Raises ResourceError and StateError."""
    path = directory / LEDGER
    try:
        return Ledger(DiskFile(path), warn)
    except OSError as error:
        cause = f"cannot write the ledger {path}: {error.strerror}"
        raise ResourceError(cause, "choose another folder (--dir)") from error
    except DamagedLine as error:
        raise _damaged(path, error) from error


def read_ledger(path: Path, *checks: Callable[[Record], None]) -> Scan:
    """Records of a ledger's file, which may be growing, that `check_record` and then `checks` let pass.

    Raises StateError, also in place of a check's ValueError.
    """
    try:
        found = scan(path.read_bytes())
    except OSError as error:
        raise StateError(f"ledger {path} cannot be read: {error.strerror}", "give the folder of a peer") from error
    except DamagedLine as error:
        raise _damaged(path, error) from error
    for check in (check_record, *checks):
        for record in found.records:
            try:
                check(record)
            except ValueError as error:
                cause = f"ledger {path}: line {record.line} is no record of a peer: {error}"
                fix = "ask whoever sent it for the ledger as the peer wrote it, or leave it out"
                raise StateError(cause[:400], fix) from error
    return found


def _damaged(path: Path, error: DamagedLine) -> StateError:
    if isinstance(error, OtherFormat):
        fix = "audit and replay it with the release that wrote it; to go on from a checkpoint, move the ledger away"
        return StateError(f"ledger {path}: {error}", fix)
    return StateError(f"ledger {path}: {error}", "move it away, and keep it: no crash of a peer does that")


# ---------------------------------------------------------------- the life before
