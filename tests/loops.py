"""What the probe of the event loops says of the peers that tests start."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from diloco.transport.loop_probe import LIMIT_S, busy_s

OFTEN = 3
"""A callback that takes too long in so many processes of a worker's tests is a defect."""
BY_FAR_S = 0.1
"""And one of so much CPU time is so at once."""


class Loops:
    """What the probe has said of the event loops of a worker's tests so far."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        """Lines looked at, by file."""
        self._long: defaultdict[str, set[Path]] = defaultdict(set)
        """In which processes each callback took too long, by their files."""

    def too_busy(self) -> list[str]:
        """The new lines of callbacks that took too long, of those that did so often or by far."""
        found = []
        for path in self._folder.glob("*.jsonl"):
            lines = path.read_text().splitlines()
            new, self._read[path] = lines[self._read.get(path, 0) :], len(lines)
            for line in new:
                fields = json.loads(line)
                if (busy := _busy_s(fields)) > LIMIT_S:
                    self._long[fields["callback"]].add(path)
                    if busy > BY_FAR_S or len(self._long[fields["callback"]]) >= OFTEN:
                        found.append(line)
        return found


def _busy_s(line: dict[str, Any]) -> float:
    program, command = [*line["process"].split(), "", ""][:2]
    ours = program.endswith(("diloco", "diloco/__main__.py")) and command in ("peer", "witness")
    return busy_s(line, with_gc=ours)
