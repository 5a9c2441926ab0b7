"""Verdict on a drill: violations, the share of possible tokens that was committed, and the times of recovery.

**Throughput share.** A peer's time counts from the version whose view first includes that life of it, to the end of the
drill or of its life, less the time it was stopped or cut off (`absent_s`). A killed peer's counts to the last version
that counted it, because what it had not committed dies with it, and is nobody else's (`victims_s`). Allowed is this
time at the rate of the first, quiet part: tokens committed per second and peer. The share is what was committed from
the end of the quiet part on, less what peers trained while they were cut off (`absent_tokens`), over what was allowed.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from diloco.accounts.audit import audit
from diloco.simulate.chaos.fleet import ChaosFleet, ChaosLife, SeenVersion, commits

MAX_GAP_S = 90.0
"""Between two commits, I7. A round of 30 s, and whatever one fault after another may add."""


@dataclass
class DrillFault:
    """A fault that the chaos drill imposed on peers. Times are unix seconds."""

    kind: str
    victims: tuple[str, ...]
    began_s: float
    ended_s: float = 0.0
    """When it was mended: the end of a stop or a cut, the start of the next life. 0 while it lasts."""
    back_s: float = 0.0
    """When a version counted all of its victims again."""
    cut: tuple[str, ...] = ()
    """Peers that could not reach all others while it lasted."""


def verdict(
    fleet: ChaosFleet, faults: Sequence[DrillFault], quiet_until_s: float, ended_s: float, problems: Sequence[str]
) -> dict[str, Any]:
    """The columns of a chaos drill's row, without those of the clean run. `problems`: violations seen meanwhile."""
    found = audit(sorted({life.directory for life in fleet.lives if (life.directory / "ledger.jsonl").exists()}))
    violations = [*problems, *(f"{one.rule} {one.peer} version {one.version}: {one.text}" for one in found.violations)]
    chain = commits(fleet.lives)
    at_s = [*(seen.at_s for seen in chain if seen.at_s < ended_s), ended_s]
    gaps = [after - before for before, after in itertools.pairwise(at_s)]
    if max(gaps) > MAX_GAP_S:
        violations.append(f"I7 no version was committed for {max(gaps):.0f} s")
    last = max((life.of("end")[-1] for life in fleet.lives if life.of("end")), key=lambda event: int(event["tokens"]))
    return {
        "faults": len(faults),
        "violations": len(violations),
        "violation_texts": violations,
        "versions": last["version"],
        "committed_tokens": last["tokens"],
        "discarded_tokens": sum(row["discarded"] for row in found.peers),
        "forks": len(found.forks),
        "longest_gap_s": round(max(gaps), 2),
        "val_loss": last["val_loss"],
        **throughput(fleet.lives, faults, quiet_until_s, ended_s),
        "by_kind": by_kind(faults, chain),
        "lives": len(fleet.lives),
        "schedule": [asdict(fault) for fault in faults],
    }


# ---------------------------------------------------------------- throughput


def throughput(
    lives: Sequence[ChaosLife], faults: Sequence[DrillFault], quiet_until_s: float, ended_s: float
) -> dict[str, Any]:
    """The throughput share of a chaos drill under its faults, and the numbers that it is made of."""
    chain = commits(lives)
    quiet = [seen for seen in chain if seen.at_s <= quiet_until_s]
    noisy = [seen for seen in chain if quiet[-1].at_s <= seen.at_s <= ended_s]
    rate = _rate(quiet)
    window = noisy[0].at_s, noisy[-1].at_s
    killed = [life for life in lives if life.ending == "killed"]
    present_s = sum(_overlap(span, window) for life in lives for span in _present(life, chain))
    absences = [(life, span) for life in lives for span in _absences(life, faults, chain)]
    absent_s = sum(_overlap(span, window) for _, span in absences)
    absent_tokens = sum(_trained(life, span) for life, span in absences)
    committed = noisy[-1].tokens - noisy[0].tokens - absent_tokens
    victims_s = sum(_overlap((_last_counted(life, chain), life.ended_s), window) for life in killed)
    return {
        "throughput_share": round(committed / (rate * (present_s - absent_s)), 4),
        "tokens_per_s_and_peer": round(rate, 1),
        "present_s": round(present_s, 1),
        "absent_s": round(absent_s, 1),
        "absent_tokens": absent_tokens,
        "victims_s": round(victims_s, 1),
        "drill_s": round(window[1] - window[0], 1),
    }


def has_rate(lives: Sequence[ChaosLife], peers: int) -> bool:
    """Whether versions so far tell what a peer of the drill trains in a second: the last two have all as members."""
    return [len(seen.members) for seen in commits(lives)[-2:]] == [peers, peers]


def _rate(quiet: Sequence[SeenVersion]) -> float:
    """Tokens per second and peer in the drill's quiet part, from the first version that had all of them."""
    peers = len(quiet[-1].members)
    full = [seen for seen in quiet if len(seen.members) == peers]
    return (full[-1].tokens - full[0].tokens) / (full[-1].at_s - full[0].at_s) / peers


def _present(life: ChaosLife, chain: Sequence[SeenVersion]) -> list[tuple[float, float]]:
    """The span of unix seconds in which this life of a chaos drill belonged to the run; none if it never did."""
    end_s = {"": math.inf, "left": life.ended_s, "killed": _last_counted(life, chain)}[life.ending]
    return [(entered_s, end_s) for entered_s in _entered(life, chain)]


def _absences(
    life: ChaosLife, faults: Sequence[DrillFault], chain: Sequence[SeenVersion]
) -> Iterator[tuple[float, float]]:
    """The spans in which a life of a chaos drill was stopped or cut off by faults, without overlaps."""
    stops = [(began_s, over_s or math.inf) for began_s, over_s in life.stops]
    cuts = [(fault.began_s, fault.ended_s or math.inf) for fault in faults if life.name in fault.cut]
    for from_s, until_s in _present(life, chain):
        for began_s, over_s in sorted([*stops, *cuts]):
            if max(began_s, from_s) < min(over_s, until_s):
                yield max(began_s, from_s), min(over_s, until_s)
                from_s = max(from_s, over_s)


def _trained(life: ChaosLife, span: tuple[float, float]) -> int:
    """Tokens of a drilled peer's inner steps in that span, from its progress events, two a second."""
    early = [0, *(event["tokens"] for event in life.of("progress") if event["time"] <= span[0])]
    later = [early[-1], *(event["tokens"] for event in life.of("progress") if event["time"] <= span[1])]
    return int(later[-1] - early[-1])


def _entered(life: ChaosLife, chain: Sequence[SeenVersion]) -> list[float]:
    """The time at which a version's view first included this drilled life, by its own account; empty if none did.

    If an earlier life of that name was still in the view: when the version before the first that counts it was made.
    """
    views = [float(event["time"]) for event in life.of("view") if life.name in event["joined"]]
    counted = [event["version"] for event in life.of("version") if event["own"]][:1]
    return [*views, *(seen.at_s for seen in chain if seen.version + 1 in counted)][:1]


def _last_counted(life: ChaosLife, chain: Sequence[SeenVersion]) -> float:
    within = [seen.at_s for seen in chain if life.began_s <= seen.at_s <= life.ended_s and life.name in seen.counted]
    return within[-1] if within else life.ended_s


def _overlap(span: tuple[float, float], window: tuple[float, float]) -> float:
    return max(min(span[1], window[1]) - max(span[0], window[0]), 0.0)


# ---------------------------------------------------------------- recovery


def by_kind(faults: Sequence[DrillFault], chain: Sequence[SeenVersion]) -> dict[str, dict[str, Any]]:
    """For each kind of fault in a chaos drill: its number, the seconds until the next commit, and those from its
    mending until a version counts the victims again."""
    rows = {}
    for kind in sorted({fault.kind for fault in faults}):
        those = [fault for fault in faults if fault.kind == kind]
        nexts = [
            next((seen.at_s - fault.began_s for seen in chain if seen.at_s > fault.began_s), None) for fault in those
        ]
        backs = [fault.back_s - fault.ended_s for fault in those if fault.back_s]
        rows[kind] = {
            "faults": len(those),
            **_spread("next_commit_s", [value for value in nexts if value is not None]),
            **_spread("back_s", backs),
        }
    return rows


def _spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    return {
        name: round(statistics.median(values), 2) if values else None,
        f"longest_{name}": round(max(values), 2) if values else None,
    }


def table(result: dict[str, Any]) -> str:
    """The verdict on a chaos drill as text for people."""
    lines = [f"{'fault':<16}{'times':>6}{'next commit':>14}{'longest':>10}{'back in':>10}{'longest':>10}"]
    for kind, row in result["by_kind"].items():
        times = [row[key] for key in ("next_commit_s", "longest_next_commit_s", "back_s", "longest_back_s")]
        cells = ["–" if value is None else f"{value:.1f} s" for value in times]
        lines.append(f"{kind:<16}{row['faults']:>6}{cells[0]:>14}{cells[1]:>10}{cells[2]:>10}{cells[3]:>10}")
    shown = {key: value for key, value in result.items() if not isinstance(value, list | dict)}
    lines += ["", *(f"{key:<24}{value}" for key, value in shown.items())]
    return "\n".join([*lines, *(f"VIOLATION {text}" for text in result["violation_texts"])])
