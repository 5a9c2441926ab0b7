"""A peer's own contributions as files, so that `diloco replay` can make every version again.

    <directory>/recorded/v00000012.f0.5f2c9a7e.00c3a1b2d4e5.bin
        version of the anchor it was measured on . fragment . digest of that version's commit . incarnation

    line 1    checksum and JSON: peer, sizes of the fragment, counts, and of every encoded part [bytes, SHA-256]
    then      the encoded parts, one behind the other

A file is complete and on the disk before anybody is offered the contribution. What other peers wrote is data: sizes
and hashes are checked, nothing is unpickled. Measured on ext4: 1.0 ms for 100 kB, 3.0 ms for 1 MB, 26 ms for 16 MB.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from diloco.accounts.ledger import sealed_line, unsealed
from diloco.base.errors import StateError
from diloco.base.files import sync_path
from diloco.base.types import Contribution, Counted
from diloco.outer.fragments import Fragment

RECORDED = "recorded"
MAX_HEADER_BYTES = 2**26  # half a million parts
COUNTS = ("base_version", "weight", "tokens", "blocks")
"""Fields of a contribution that a commit counts, as `Counted` has them behind the peer's name."""
_NAME = re.compile(r"v(\d{8,18})\.f(\d{1,6})\.[0-9a-f]{8}\.[0-9a-f]{12,16}\.bin")


@dataclass(frozen=True)
class Recorder:
    """Writer of a peer's recorded contributions."""

    directory: Path
    peer: str
    incarnation: int
    versions: int
    """Versions whose contributions are kept; 0: all."""
    warn: Callable[[str], None]

    def keep(self, contribution: Contribution, fragment: Fragment, base: str) -> None:
        """Write a contribution measured on the commit with digest `base`, and delete those that are too old.

        A disk that refuses is a warning: it makes a version that cannot be replayed, not one that cannot be trained.
        """
        header = {
            "peer": self.peer,
            "fragment": fragment.index,
            "groups": fragment.groups,
            "part_elements": fragment.part_elements,
            **{name: getattr(contribution, name) for name in COUNTS},
            "parts": [[len(part), hashlib.sha256(part).hexdigest()] for part in contribution.parts],
        }
        name = f"v{contribution.base_version:08d}.f{contribution.fragment}.{base[:8]:0>8}.{self.incarnation:012x}.bin"
        beside = self.directory / f".{name}.tmp"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with beside.open("wb") as file:
                file.write(sealed_line(header))
                file.writelines(contribution.parts)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self.directory / name)
            sync_path(self.directory)  # the new name, too, must survive a loss of power
            for path in self.directory.iterdir() if self.versions else ():
                match = _NAME.fullmatch(path.name)
                if match and int(match[1]) <= contribution.base_version - self.versions:
                    path.unlink()
        except OSError as error:
            with suppress(OSError):
                beside.unlink()
            self.warn(f"a contribution is not recorded: {error.strerror}")


@dataclass(frozen=True)
class Recording:
    """Recorded contribution of a peer. Its encoded parts stay on the disk until they are asked for."""

    path: Path
    fragment: Fragment
    counted: Counted
    """The contribution as a commit counts it."""
    offset: int
    """Place of the first part in the file."""
    parts: tuple[tuple[int, str], ...]
    """Size in bytes and SHA-256 of each part."""

    def payloads(self) -> Iterator[bytes]:
        """Encoded parts of the contribution, in order, verified. Raises StateError."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for number, (size, sha256) in enumerate(self.parts):
                payload = file.read(size)
                if hashlib.sha256(payload).hexdigest() != sha256:
                    raise _damaged(self.path, f"part {number} was changed")
                yield payload


def recordings(directory: Path) -> list[Recording]:
    """Recorded contributions in a peer's folder, by name. Raises StateError."""
    folder = directory / RECORDED
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [_open(path) for path in paths if _NAME.fullmatch(path.name)]


def _open(path: Path) -> Recording:
    """Recorded contribution in a file, whose first line may hold anything. Raises StateError."""
    with path.open("rb") as file:
        line = file.readline(MAX_HEADER_BYTES)
    header = unsealed(line.removesuffix(b"\n"))
    if header is None:
        raise _damaged(path, "its first line was changed")
    try:
        if any(type(header[name]) is not int for name in (*COUNTS, "fragment", "part_elements")):
            raise TypeError("a count is no whole number")
        parts = tuple((int(size), str(sha256)) for size, sha256 in header["parts"])
        if path.stat().st_size != len(line) + sum(size for size, _ in parts):
            raise _damaged(path, "it has another size than its first line says")
        groups = header.get("groups", [[0, header.get("elements")]])  # without: of a diloco before there were groups
        sizes = tuple((int(group), int(elements)) for group, elements in groups)
        made = sum(-(-elements // header["part_elements"]) for _, elements in sizes)
        if made != len(parts):
            raise _damaged(path, f"{len(parts)} parts, its groups make {made}")
        fragment = Fragment(header["fragment"], (), sizes, header["part_elements"])
        counted = Counted(str(header["peer"]), *(header[name] for name in COUNTS))
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise _damaged(path, f"its first line is malformed: {error!r}"[:200]) from error
    return Recording(path, fragment, counted, len(line), parts)


def _damaged(path: Path, why: str) -> StateError:
    return StateError(f"recorded contribution {path}: {why}", "copy it again from where it is whole, or leave it out")
