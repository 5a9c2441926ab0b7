"""Search the rules of agreement for forks and stops: every state within reach, in small cases.

The functions that decide are those of the peers (`diloco/protocol/vote.py`); what happens around them, crashes and
restarts with the disk, messages that come late, twice or never, is a model of at most four voters. Other cases leave a
clause of the rules out, and must find the fork or the stop that it is there against. `docs/how/protocol.md` lists what
is not searched.

A row: what was found, the case, its states and seconds, and the shortest story where something breaks. STUCK is a
state from which nothing good comes although all that crashed come back; `vacuous`, a case that holds over fewer states
than it should have. The exit code is 1 where a case does not find what it should.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path

from scripts.models.cases import CASES, Case
from scripts.models.search import MAX_STATES

EXAMPLES = """examples:
  scripts/model-check                          all cases: ten minutes
  scripts/model-check --quick                  those of a few seconds, as in the tests
  scripts/model-check --list
  scripts/model-check --only 'half*' --json half.json
"""


def main(arguments: list[str] | None = None) -> int:
    """Run `scripts/model-check`; return its exit code."""
    options = _options(arguments)
    cases = [case for case in CASES if _wanted(case, options)]
    if not cases:
        print(f"model-check: no case is named {' or '.join(options.only)}: see --list", file=sys.stderr)
        return 2
    if options.list:
        for case in cases:
            print(f"{case.name:22} {case.expected:8} {case.about}")
        return 0
    rows = list[dict[str, object]]()
    for case in cases:
        rows.append(_row(case, options.max_states))
        print(_line(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")
    other = [str(row["name"]) for row in rows if row["found"] != row["expected"]]
    print(f"{len(rows)} cases; {'another result than expected: ' + ', '.join(other) if other else 'all as expected'}")
    return 1 if other else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/model-check",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="print the cases and what they should find, and stop")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="cases by name; * stands for any letters"
    )
    parser.add_argument("--quick", action="store_true", help="only cases of a second or two")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    parser.add_argument(
        "--max-states", type=int, default=MAX_STATES, metavar="N", help="give a case up there (%(default)s)"
    )
    return parser.parse_args(arguments)


def _wanted(case: Case, options: argparse.Namespace) -> bool:
    named = not options.only or any(fnmatchcase(case.name, pattern) for pattern in options.only)
    return named and (case.quick or not options.quick)


def _row(case: Case, max_states: int) -> dict[str, object]:
    started_s = time.monotonic()
    found = case.search(max_states)
    return {
        "name": case.name,
        "about": case.about,
        "found": case.verdict(found),
        "expected": case.expected,
        "states": found.states,
        "judged": found.judged_states,
        "seconds": round(time.monotonic() - started_s, 1),
        "story": found.broken or found.stuck,
    }


def _line(row: dict[str, object]) -> str:
    expected = "" if row["found"] == row["expected"] else f" (expected: {row['expected']})"
    size = f"{row['states']:,} states, {row['judged']:,} judged, {row['seconds']} s"
    head = f"{row['found']:10} {row['name']}: {row['about']}{expected}; {size}"
    return f"{head}\n           {row['story']}" if row["story"] else head
