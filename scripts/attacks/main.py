"""Attack runs of real peers, and say which attacks were held.

    scripts/attack                                all
    scripts/attack --list
    scripts/attack --only idle-connections        or several, with commas
    scripts/attack --short --json rows.json       those that the tests make

Each attack has a run of its own on loopback: `diloco peer` processes with at most 1,024 open files. An outsider
knows only the address; a member knows the secret, and lies; an operator is careless; a giver hands over a file, a
folder or a contract; a user shares the machine. Columns: whether it was held (no peer ended, versions went on, nothing
false was taken), versions in 10 s before and during it, by how many MB the largest peer grew, the training loss after
it, and what was said. The exit code is 1 where one was not held.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from diloco.transport.process import raise_file_limit
from scripts.attacks import files, floods, members, outsiders, values
from scripts.attacks.victims import Attack, Row, end_on_sigterm, outcome

ATTACKS: tuple[Attack, ...] = (*outsiders.ATTACKS, *members.ATTACKS, *floods.ATTACKS, *values.ATTACKS, *files.ATTACKS)


def main() -> int:
    options = parse()
    chosen = [one for one in ATTACKS if one.name in options.only and (one.short or not options.short)]
    if options.list:
        print(*(f"{one.by:9} {one.name}" for one in chosen), sep="\n")
        return 0
    end_on_sigterm()
    raise_file_limit()  # thousands of connections
    rows: list[Row] = []
    for attack in chosen:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(outcome(attack, Path(folder)))
        print(line(rows[-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps([*map(asdict, rows)], indent=1) + "\n")
    return 0 if all(row.held for row in rows) else 1


def line(row: Row) -> str:
    """A row for people."""
    numbers = "" if row.versions_before is None else f"{row.versions_before:3} {row.versions_during!s:>4}"
    memory = "" if row.memory_mb is None else f"{row.memory_mb:+.0f} MB"
    loss = "" if row.loss is None else f"loss {row.loss:.3f}"
    first = f"{'held' if row.held else 'NOT HELD':8} {row.by:8} {row.attack:26}"
    return f"{first} {numbers:8} {memory:>8} {loss:>10}  {row.said}".rstrip()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [one.name for one in ATTACKS]
    parser.add_argument("--only", type=_names, default=names, metavar="NAMES", help="some of the attacks, with commas")
    parser.add_argument("--short", action="store_true", help="those of the tests")
    parser.add_argument("--list", action="store_true", help="print the attacks and make none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here, again after each one")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    names, known = text.split(","), {one.name for one in ATTACKS}
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"no attack {unknown[0]!r}: one of {', '.join(sorted(known))}")
    return names


if __name__ == "__main__":
    sys.exit(main())
