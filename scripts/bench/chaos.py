"""Real peers under faults: kill, stop, cut off, slow, corrupt, leave and come back, for as long as you like.

    scripts/chaos                        8 peers, 25 minutes of faults, then a clean run of as many tokens
    scripts/chaos --quick --peers 4      3 minutes
    scripts/chaos --namespaces           each peer with a loopback of its own, and forwarders to the others
    scripts/chaos --failpoints           a death at each failpoint instead, and stops of 5 and 60 s
    scripts/chaos --absences             async: one is stopped, cut off, late, leaves: do the others wait? 8 minutes
    scripts/chaos --absences --quick     the same in 2 minutes

Faults come from a seed; when exactly they hit, the machine decides. Ctrl-C ends all peers. The exit code is 1 when
something was violated.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.environment import ROOT


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("chaos: stopped"))  # as Ctrl-C: everything is cleaned up
    started_s = time.monotonic()

    def say(text: str) -> None:
        seconds = int(time.monotonic() - started_s)
        print(f"{seconds // 60:3d}:{seconds % 60:02d}  {text}", flush=True)

    try:
        if options.absences is not None:
            return absences(options, say)
        return drill(options, say) if options.failpoints is None else sweep(options, say)
    except KeyboardInterrupt:
        return 130


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25.0, help="of faults (25)")
    parser.add_argument("--quick", action="store_true", help="3 minutes")
    parser.add_argument("--peers", type=int, default=8, help="processes (8)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (0)")
    parser.add_argument(
        "--namespaces", action="store_true", help="each peer in a network namespace, with forwarders to the others"
    )
    parser.add_argument("--no-clean", action="store_true", help="leave out the clean run")
    parser.add_argument(
        "--failpoints", nargs="*", metavar="NAME", help="a death at each of these failpoints, or at all"
    )
    parser.add_argument(
        "--absences", nargs="*", metavar="ACT", help="async: a peer that is not there (stop, cut, late, leave; all)"
    )
    parser.add_argument("--contract", type=Path, default=ROOT / "configs" / "chaos.toml")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "chaos", help="folder (runs/chaos)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    return parser.parse_args()


def drill(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    from diloco.base.errors import DilocoError
    from diloco.simulate.chaos.drill import DrillOptions, run_drill
    from diloco.simulate.chaos.verdict import table

    minutes = 3.0 if options.quick else options.minutes
    quiet_s = 50.0 if minutes <= 5 else 90.0
    plan = DrillOptions(
        options.contract,
        options.out,
        options.peers,
        minutes,
        quiet_s,
        options.seed,
        apart=options.namespaces,
        clean=not options.no_clean,
    )
    try:
        result = run_drill(plan, say)
    except DilocoError as error:
        sys.exit(f"error: {error}")
    print(f"\n{table(result)}")
    write(options.json, result)
    return 1 if result["violations"] else 0


def sweep(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    from diloco.base.errors import DilocoError
    from diloco.base.failpoints import POINTS
    from diloco.simulate.chaos.fleet import empty_folder
    from diloco.simulate.chaos.sweep import sweep

    try:
        empty_folder(options.out)
        points = options.failpoints or list(POINTS)
        rows = sweep(options.contract, options.out / "failpoints", points, (5.0, 60.0), say)
    except DilocoError as error:
        sys.exit(f"error: {error}")
    failed = [row.point for row in rows if not row.holds]
    print(f"\n{len(rows) - len(failed)} of {len(rows)} hold" + (f", not: {', '.join(failed)}" if failed else ""))
    write(options.json, {"rows": [row.tree() for row in rows], "violations": len(failed)})
    return 1 if failed else 0


def absences(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    from diloco.base.errors import DilocoError
    from diloco.simulate.chaos.absence import ACTS, AbsenceScale, run_absences
    from diloco.simulate.chaos.fleet import empty_folder

    scale = AbsenceScale(steps=60, stop_s=15.0, versions=6) if options.quick else AbsenceScale()
    try:
        empty_folder(options.out)
        folder = options.out / "absences"
        result = run_absences(options.contract, folder, scale, options.absences or list(ACTS), say)
    except DilocoError as error:
        sys.exit(f"error: {error}")
    violations = "\n".join(result["violations"]) or "ledgers: no violation, all counted once, all digests agree"
    print(f"\n{violations}")
    write(options.json, result)
    return 0 if result["holds"] and not result["violations"] else 1


def write(path: Path | None, tree: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(tree, indent=2) + "\n")
