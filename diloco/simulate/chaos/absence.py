"""Absence bench, a chaos drill: under `async` one peer after the other is stopped, cut off, late, gone.

Real peers of different speeds, each with as many inner steps as its speed has room for, and all of them done while a
contribution is on its way. What must hold of every row: no other peer waited for more than 2 % of the time, and the one
that is back is counted. In the end the ledgers must add up, everything counted once, and all digests agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from diloco.accounts.audit import audit
from diloco.base.clock import unix_s
from diloco.base.errors import UsageError
from diloco.simulate.chaos.fleet import ChaosFleet, ChaosLife
from diloco.simulate.chaos.network import ChaosNetwork, Rule

SPEEDS: Final = {"a": 1.0, "b": 0.8, "c": 0.6, "d": 0.35, "e": 0.7}
"""Speeds of those who begin, of whom `d` is the absent one; and of one that comes late."""
STEP_S: Final = 0.1
"""Seconds of an inner step at speed 1: far more than it costs here, so that five peers do not fight over two cores."""
MAX_WAITED: Final = 0.02
ANSWER_S: Final = 120.0


@dataclass(frozen=True)
class AbsenceScale:
    """Length of an absence bench and of its phases."""

    steps: int = 100
    """H. A round should be longer than the timeouts by which the others know that somebody is gone."""
    stop_s: float = 60.0
    versions: int = 20
    """Versions that close while a peer is cut off."""
    site: tuple[str, ...] = ()
    """More settings of every peer's site."""


@dataclass(frozen=True)
class AbsenceRow:
    """Effect of one absence in a chaos drill on the other peers."""

    what: str
    seconds: float
    versions: int
    """Versions that closed meanwhile."""
    waited_share: float
    """Share of the time spent waiting, by the one of the others that waited most."""
    longest_wait_s: float
    counted: int | None
    """The version that counts the peer that came; None: it does not come back."""
    tokens: int
    """It brought."""

    @property
    def holds(self) -> bool:
        """Whether the claims of the absence bench (a chaos drill) hold for this row."""
        return self.waited_share < MAX_WAITED


class ChaosAbsences:
    """The peers of an absence bench, a chaos drill; one of them is away in each row. `end` in any case."""

    def __init__(self, contract: Path, directory: Path, scale: AbsenceScale) -> None:
        rules = {
            "membership.start_peers": 4,
            "membership.policy": "async",
            "membership.sync_versions": 1,
            "membership.grace_s": 0.2,
            "membership.stragglers": "wait",
            "inner.steps": scale.steps,
            "inner.sized_by": "speed",
            "sync.overlap": scale.steps,
            "outer.optimizer": "delayed_nesterov",
        }
        site = ["device.threads=1", f"device.step_s={STEP_S}", *scale.site]
        self.scale = scale
        self.network = ChaosNetwork(seed=0)
        overrides = [f"{key}={value}" for key, value in rules.items()]
        self.fleet = ChaosFleet(contract, overrides, directory, site, self.network)
        self.fleet.own = {name: [f"device.speed={speed}"] for name, speed in SPEEDS.items()}

    def begin(self) -> None:
        """Start the chaos drill's four peers, and wait until they have each other's speed."""
        founder = self.fleet.found("a")
        for name in ("b", "c", "d"):
            self.fleet.join(name, founder)
        self._reach(3)

    def end(self) -> None:
        """End all peer processes of the chaos drill."""
        self.fleet.end()
        self.network.close()

    # ------------------------------------------------------------ rows

    def stop(self) -> AbsenceRow:
        """The row of a drill in which a peer is frozen for a while. It finds out by itself that the run went on."""
        life, began_s, before = self._next_round()
        self.fleet.stop(life)
        self._until(lambda: unix_s() - began_s >= self.scale.stop_s, "the stop is over")
        self.fleet.resume(life)
        return self._back(f"stopped for {self.scale.stop_s:g} s", life, began_s, before)

    def cut_off(self) -> AbsenceRow:
        """The row of a drill in which a peer's network is cut in both directions. It trains on."""
        life, began_s, before = self._next_round()
        rules = [Rule(frozenset({life.name}), None, passes=False), Rule(None, frozenset({life.name}), passes=False)]
        self.network.impose(rules)
        self._until(lambda: self._version() >= before + self.scale.versions, "that many versions closed")
        self.network.lift(rules)
        return self._back(f"cut off for {self.scale.versions} versions", life, began_s, before)

    def come_late(self) -> AbsenceRow:
        """The row of a drill in which a joiner comes late, and copies the state while the others train."""
        _, began_s, before = self._next_round()
        return self._back("joins late", self.fleet.join("e", self.fleet.life("a")), began_s, before)

    def leave(self) -> AbsenceRow:
        """The row of a drill in which a peer leaves in good order."""
        life, began_s, before = self._next_round()
        self.fleet.ask_to_leave(life)
        self._until(lambda: life.child.exit_code is not None, f"{life.name} is gone")
        self._until(lambda: self._version() >= before + 2, "versions close without it")
        return self._row("leaves", life, began_s, before, None)

    # ------------------------------------------------------------ how

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        patience_s = self.scale.stop_s + self.scale.versions * self.scale.steps * STEP_S
        self.fleet.until(condition, what, ANSWER_S + patience_s)

    def _version(self) -> int:
        latest = self.fleet.life("a").version
        return int(latest["version"]) if latest else 0

    def _reach(self, version: int) -> None:
        self._until(lambda: all(_has_reached(life, version) for life in self.fleet.living()), f"all are at {version}")

    def _next_round(self) -> tuple[ChaosLife, float, int]:
        """Wait until the drill's peers have a new version. Returns the peer to be absent, the time, that version."""
        version = self._version() + 1
        self._reach(version)
        return self.fleet.life("d"), unix_s(), version

    def _back(self, what: str, life: ChaosLife, began_s: float, before: int) -> AbsenceRow:
        """The row of an absence in a chaos drill, once a version counts the peer that is back."""
        back_s = unix_s()
        found: list[Mapping[str, Any]] = []

        def counted() -> bool:
            found[:] = [event for event in life.of("version") if event["own"] and event["time"] > back_s]
            return bool(found)

        self._until(counted, f"{life.name} is counted")
        return self._row(what, life, began_s, before, found[0])

    def _row(
        self, what: str, absent: ChaosLife, began_s: float, before: int, counted: Mapping[str, Any] | None
    ) -> AbsenceRow:
        ended_s = unix_s()
        others = [_waits(life, began_s, ended_s) for life in self.fleet.living() if life.name != absent.name]
        return AbsenceRow(
            what,
            round(ended_s - began_s, 1),
            self._version() - before,
            round(max(map(sum, others)) / (ended_s - began_s), 4),
            round(max(max(waits, default=0.0) for waits in others), 3),
            counted["version"] if counted else None,
            counted["inner_tokens"] if counted else 0,
        )


ACTS: Final[Mapping[str, Callable[[ChaosAbsences], AbsenceRow]]] = {
    "stop": ChaosAbsences.stop,
    "cut": ChaosAbsences.cut_off,
    "late": ChaosAbsences.come_late,
    "leave": ChaosAbsences.leave,
}


def run_absences(
    contract: Path, directory: Path, scale: AbsenceScale, acts: Sequence[str], say: Callable[[str], None]
) -> dict[str, Any]:
    """Run these `ACTS` of the absence bench, a chaos drill; all leave, ledgers are audited. Raises DilocoError."""
    unknown = set(acts) - set(ACTS)
    if unknown:
        raise UsageError(f"unknown: {', '.join(sorted(unknown))}", f"known: {', '.join(ACTS)}")
    one = ChaosAbsences(contract, directory, scale)
    rows: list[AbsenceRow] = []
    try:
        one.begin()
        say(TITLES)
        for act in acts:
            rows.append(ACTS[act](one))
            say(line(rows[-1]))
        living = one.fleet.living()
        for life in living:
            one.fleet.ask_to_leave(life)
        one.fleet.until(lambda: all(life.child.exit_code is not None for life in living), "all have left", ANSWER_S)
    finally:
        one.end()
    found = audit(sorted({life.directory for life in one.fleet.lives}))
    violations = [f"{one.rule} {one.peer} version {one.version}: {one.text}" for one in found.violations]
    trees = [{**asdict(row), "holds": row.holds} for row in rows]
    return {"rows": trees, "violations": violations, "holds": all(row.holds for row in rows)}


TITLES: Final = (
    f"{'the peer':<26}{'seconds':>9}{'versions':>10}{'waited':>9}{'longest':>10}{'counted in':>12}{'tokens':>9}  holds"
)


def line(row: AbsenceRow) -> str:
    """The row of one absence in a chaos drill, as text for people."""
    cells = f"{row.seconds:9.1f}{row.versions:10}{100 * row.waited_share:7.2f} %{row.longest_wait_s:8.3f} s"
    counted = f"{row.counted or '':>12}{row.tokens or '':>9}"
    return f"{row.what:<26}{cells}{counted}  {'yes' if row.holds else 'NO'}"


def _has_reached(life: ChaosLife, version: int) -> bool:
    latest = life.version
    return latest is not None and latest["version"] >= version


def _waits(life: ChaosLife, began_s: float, ended_s: float) -> list[float]:
    """Seconds that a drilled peer waited, by round: all versions that close in one round report the same wait."""
    events = (event for event in life.of("version") if began_s <= event["time"] <= ended_s)
    return list({event["seconds"]["exchange"]: None for event in events if "exchange" in event["seconds"]})
