"""The chaos sweep: a death or a stop at each failpoint, of one victim after the other, beside three peers that stay.

What must hold of every row: the survivors commit the next version, not more than 2 s (on a slow CPU as many times
longer) after they can know of the death; all digests agree; no inner step of a survivor is lost.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from diloco.accounts.ledger import LEDGER, read_ledger
from diloco.base.clock import unix_s
from diloco.config.load import load_site
from diloco.observe.event_log import EventLine
from diloco.simulate.chaos.fleet import ChaosFleet, ChaosLife, commits
from diloco.transport.loop_probe import slowness

SURVIVORS: Final = ("a", "b", "c")
KNOWN_DEAD_S: Final = 1.0
"""Seconds until a death is known at the latest: a refused or broken connection shows it at once."""
DELAY_S: Final = 2.0
"""Largest delay of a round, in seconds on a CPU of usual speed, beyond the time in which the loss is noticed."""
HITS: Final = 3
"""The victim dies when it comes by for the third time: it is in the view by then."""
NEVER_IN_VIEW: Final = frozenset({"copying-state"})
ANSWER_S: Final = 60.0


@dataclass(frozen=True)
class SweepRow:
    """Effect of one victim's end in a chaos sweep on the others."""

    point: str
    action: str
    version: int
    """The last one that was committed before."""
    next_commit_s: float
    """From the death (or the stop) to the moment when the last survivor reported the next version."""
    delay_s: float
    """Seconds that version took beyond the usual ones here."""
    allowed_s: float
    back_s: float | None
    """From the end of a stop to the version that counts the victim again."""
    lost_tokens: int
    """Trained by survivors, but neither committed nor still in their progress."""
    digests_agree: bool

    @property
    def holds(self) -> bool:
        """Whether the claims of the chaos sweep hold for this row."""
        return self.delay_s <= self.allowed_s and self.lost_tokens == 0 and self.digests_agree

    def tree(self) -> dict[str, Any]:
        """The row of the chaos sweep as JSON."""
        return {**asdict(self), "holds": self.holds}


class ChaosSweep:
    """The peers of a chaos sweep: survivors that stay, and victims one by one. `end` in any case."""

    def __init__(self, contract: Path, directory: Path) -> None:
        site = ["device.threads=1", "device.step_s=0.05"]
        start = [f"membership.start_peers={len(SURVIVORS)}", "inner.steps=8", "sync.part_elements=4096"]
        self.fleet = ChaosFleet(contract, start, directory, site, None)
        timeouts = load_site(None, []).value.timeouts
        self._stall_s = max(timeouts.suspect_s, timeouts.stall_s)
        self._victims = (f"v{number}" for number in itertools.count())
        self._lost = 0

    def begin(self) -> None:
        """Start the sweep's survivors, and wait for three versions of all of them."""
        founder = self.fleet.found(SURVIVORS[0])
        for name in SURVIVORS[1:]:
            self.fleet.join(name, founder)
        self.fleet.until(lambda: self._counts(SURVIVORS, 3), "three versions of three peers", ANSWER_S)

    def end(self) -> None:
        """End all peer processes of the chaos sweep."""
        self.fleet.end()

    # ------------------------------------------------------------ rows

    def kill_at(self, point: str) -> SweepRow:
        """The sweep's row of a fourth peer, which kills itself at the failpoint."""
        victim = self._victim(f"{point}=kill@{HITS if point not in NEVER_IN_VIEW else 1}")
        self._await_death(victim, f"{victim.name} dies at {point}")
        return self._row(point, "kill", victim.ended_s, KNOWN_DEAD_S)

    def kill_while_serving(self) -> SweepRow:
        """The sweep's row of a victim that dies as it gives the state to a joiner, which gets in all the same."""
        victim = self._victim("serving-state=kill")
        self.fleet.until(lambda: victim.counted, f"{victim.name} is counted", ANSWER_S)
        while victim.lives:  # it is not asked when it is a version ahead of the others, or behind
            joiner = self.fleet.join(next(self._victims), victim)
            self.fleet.until(lambda: not victim.lives or joiner.counted, "a joiner got the state", ANSWER_S)  # noqa: B023
            if victim.lives:
                self.fleet.ask_to_leave(joiner)
        self.fleet.died(victim)
        row = self._row("serving-state", "kill", victim.ended_s, KNOWN_DEAD_S)
        self.fleet.until(lambda: joiner.counted, "the joiner is in all the same", ANSWER_S)
        self.fleet.ask_to_leave(joiner)
        return row

    def kill_in_repair(self) -> SweepRow:
        """The sweep's row of two victims: the death of the first causes a repair, in which the second dies."""
        second = self._victim("in-repair=kill")
        self.fleet.until(lambda: second.counted, f"{second.name} is counted", ANSWER_S)
        first = self._join(f"mid-mean=kill@{HITS}")
        self._await_death(first, f"{first.name} dies")
        self._await_death(second, f"{second.name} dies in the repair")
        return self._row("in-repair", "kill", second.ended_s, KNOWN_DEAD_S)

    def stop_at(self, point: str, seconds: float) -> SweepRow:
        """The sweep's row of a fourth peer that stops itself at the failpoint. Waked after `seconds`, it comes back."""
        victim = self._victim(f"{point}=stop@{HITS}")
        self.fleet.until(lambda: _is_stopped(victim.child.pid), f"{victim.name} stops at {point}", ANSWER_S)
        began_s = unix_s()
        self.fleet.stop(victim)
        self.fleet.until(lambda: unix_s() - began_s >= seconds, "the stop is over", seconds + 1.0)
        row = self._row(point, f"stop {seconds:g} s", began_s, self._stall_s)
        self.fleet.resume(victim)
        waked_s = unix_s()
        back = self._first(victim, lambda event: bool(event["own"]) and event["time"] > waked_s)
        self.fleet.ask_to_leave(victim)
        return replace(row, back_s=round(float(back["time"]) - waked_s, 2))

    def kill_all_and_resume(self) -> SweepRow:
        """The sweep's row of all survivors' death. They begin again with their disks, and the lineage goes on."""
        for life in self._survivors():
            self.fleet.kill(life)
        died_s = unix_s()
        founder = self.fleet.found(SURVIVORS[0], resume=True)
        for name in SURVIVORS[1:]:
            self.fleet.join(name, founder, resume=True)
        first = self._first(founder, lambda event: len(event["counted"]) == len(SURVIVORS))
        at_s = float(first["time"]) - died_s
        return SweepRow("(all at once)", "kill", first["version"] - 1, round(at_s, 2), 0.0, 0.0, None, 0, self._agree())

    # ------------------------------------------------------------ how

    def _victim(self, armed: str) -> ChaosLife:
        self.fleet.until(lambda: self._counts(SURVIVORS, 2), "the survivors are among themselves", ANSWER_S)
        return self._join(armed)

    def _join(self, armed: str) -> ChaosLife:
        return self.fleet.join(next(self._victims), self.fleet.life(SURVIVORS[0]), armed=armed)

    def _await_death(self, victim: ChaosLife, what: str) -> None:
        self.fleet.until(lambda: victim.child.exit_code is not None, what, ANSWER_S)
        self.fleet.died(victim)

    def _survivors(self) -> list[ChaosLife]:
        return [self.fleet.life(name) for name in SURVIVORS]

    def _counts(self, names: Sequence[str], times: int) -> bool:
        """Whether the last versions of every survivor of the sweep count these peers and no others."""
        latest = [life.of("version")[-times:] for life in self._survivors()]
        return all(len(events) == times and all(set(e["counted"]) == set(names) for e in events) for events in latest)

    def _first(self, life: ChaosLife, condition: Callable[[EventLine], bool]) -> EventLine:
        """The first version event of a survivor or victim that meets the condition, waited for."""
        found: list[EventLine] = []

        def come() -> bool:
            found[:] = [event for event in life.of("version") if condition(event)][:1]
            return bool(found)

        self.fleet.until(come, f"{life.name} tells of a version", ANSWER_S)
        return found[0]

    def _row(self, point: str, action: str, at_s: float, known_s: float) -> SweepRow:
        """Measure the two versions after a victim's death: the round it hit, and the first one without the victim."""
        lost_before = self._lost
        self.fleet.poll()
        before = max(
            event["version"] for life in self._survivors() for event in life.of("version") if event["time"] < at_s
        )
        rounds = [
            [self._first(life, _is(version)) for life in self._survivors()] for version in range(before, before + 3)
        ]
        times = [max(float(event["time"]) for event in events) for events in rounds]
        at = [seen.at_s for seen in commits(self._survivors()) if seen.at_s < at_s][-10:]
        usual_s = statistics.median(after - start for start, after in itertools.pairwise(at))  # when nothing happens
        self._lost = sum(map(_lost_tokens, self._survivors()))
        return SweepRow(
            point,
            action,
            before,
            next_commit_s=round(times[1] - at_s, 2),
            delay_s=round(max(after - start for start, after in itertools.pairwise(times)) - usual_s, 2),
            allowed_s=round(known_s + DELAY_S * slowness(), 2),
            back_s=None,
            lost_tokens=self._lost - lost_before,
            digests_agree=self._agree(),
        )

    def _agree(self) -> bool:
        states: dict[tuple[str, int], set[str]] = {}
        for life in self.fleet.lives:
            for event in life.of("version"):
                states.setdefault((event["lineage"], event["version"]), set()).add(event["state_digest"])
        return all(len(digests) == 1 for digests in states.values())


def sweep(
    contract: Path, directory: Path, points: Sequence[str], stops_s: Sequence[float], say: Callable[[str], None]
) -> list[SweepRow]:
    """The chaos sweep: a death at each of these failpoints, stops of these lengths, and the death of all.

    Raises DilocoError when the peers do not come to the point.
    """
    rows: list[SweepRow] = []
    one = ChaosSweep(contract, directory)
    deaths: dict[str, Callable[[], SweepRow]] = {
        "serving-state": one.kill_while_serving,
        "in-repair": one.kill_in_repair,
    }
    stops = itertools.product(("mid-mean", "before-propose"), stops_s)
    try:
        one.begin()
        say(TITLES)
        acts: list[Callable[[], SweepRow]] = [deaths.get(point) or partial(one.kill_at, point) for point in points]
        acts += [partial(one.stop_at, point, seconds) for point, seconds in stops]
        for act in (*acts, one.kill_all_and_resume):
            rows.append(act())
            say(line(rows[-1]))
    finally:
        one.end()
    return rows


TITLES: Final = (
    f"{'failpoint':<22}{'action':<11}{'version':>8}{'next commit':>13}{'delay':>8}{'allowed':>9}{'back':>9}  holds"
)


def line(row: SweepRow) -> str:
    """The row of one victim's death in a chaos sweep, as text for people."""
    back = "" if row.back_s is None else f"{row.back_s:.1f} s"
    cells = f"{row.next_commit_s:.2f} s".rjust(13) + f"{row.delay_s:.2f} s".rjust(8) + f"{row.allowed_s:.0f} s".rjust(9)
    return f"{row.point:<22}{row.action:<11}{row.version:>8}{cells}{back:>9}  {'yes' if row.holds else 'NO'}"


def _is(version: int) -> Callable[[EventLine], bool]:
    return lambda event: bool(event["version"] == version)


def _is_stopped(pid: int) -> bool:
    """Whether a victim's process is stopped: state T in proc(5) stat, behind the name in parentheses."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _lost_tokens(life: ChaosLife) -> int:
    """Tokens that a survivor of the chaos sweep trained and neither committed nor still has, by its ledger."""
    totals = read_ledger(life.directory / LEDGER).records[-1].totals
    return totals.trained - totals.committed - totals.uncommitted
