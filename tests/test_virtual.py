"""The deterministic simulator: hundreds of seeds hold, planted bugs do not stay hidden, and the scenarios read as told.

`python -m tests.references record` writes what happens now into tests/transcripts; read the difference before you keep
it.
"""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterable
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.accounts.replay import Verdict
from diloco.base.errors import ConfigError, UsageError
from diloco.protocol import messages as m
from diloco.simulate.virtual import planted
from diloco.simulate.virtual.network import SimulatedCut
from diloco.simulate.virtual.oracle.conduct import SimulatedConduct
from diloco.simulate.virtual.oracle.gate import Violation
from diloco.simulate.virtual.plans.draw import draw
from diloco.simulate.virtual.plans.plan import NO_CLOCK, Fault, FaultPlan, parse
from diloco.simulate.virtual.ranks.threads import SimulatedThread
from diloco.simulate.virtual.search import (
    RULE,
    SeedOptions,
    catch_planted,
    explain,
    kind_of,
    narrate,
    read_plan,
    run_seeds,
    search,
    shrink,
    world_of,
)
from diloco.simulate.virtual.swarm import SwarmOptions, measure_swarm
from diloco.simulate.virtual.timeline import ProcessLoop, Timeline
from diloco.simulate.virtual.world import SimulatedWorld
from tests.peers import run_cli
from tests.references import ROOT, TRANSCRIPTS, transcript_now

pytestmark = pytest.mark.no_cover  # which makes a simulation nearly twice as slow

PLANS = sorted((ROOT / "tests" / "plans").glob("*.txt"))
SEEDS, PER_TEST, WITH_OPTIONS = 20, 5, 10
slow = pytest.mark.slow(queued=False)
NOTICED_WITHIN = {
    "no-majority": 5,
    "early-divisor": 10,
    "early-progress": 5,
    "private-mean": 5,
    "unseen-vote": 5,
    "lost-residual": 10,
    "shared-lease": 5,
    "strange-vote": 30,
    "replay-heard": 10,
    "plain-radial": 10,
}
"""Seeds; a seed whose plan has nothing for the bug to break costs no time."""
LONG = {"early-divisor", "lost-residual", "clock-believed"}
"""Bugs that are noticed after seconds."""
NOTICED_IN = {
    "broken-promise": """
        seed 9
        peers 4
        7 muffle for 16
    """,
    "deaf-coordinator": """
        peers 3
        2 duel for 16
    """,
    "early-witness": """
        seed 519
        witnesses 1
        round_s 0.6
        6 lie p2 for 0.6: two-faced
    """,
    "believed-omission": "3 lie p1 for 5: omits",
    "stale-life": """
        seed 1
        peers 3
        7 cut p2 for 2
        7 kill p0: before Committed
        7 kill p1: after Accept
        8.6 restart p1: disk
    """,
    "forgiven-offence": "1 lie p2 for 8: short",
    "clock-believed": """
        checkpoint_every 0
        3 kill p1
        4 restart p1: no clock
    """,
}
"""Plans, for bugs that break something in few of those that are drawn."""
BREAKS = {
    **dict.fromkeys(("broken-promise", "deaf-coordinator", "stale-life"), "I1"),
    "believed-omission": "I3",
    "early-witness": "I5",
    "forgiven-offence": "I6",
    "clock-believed": "I7",
}
"""The invariant that each of them breaks in its plan."""


def by_length(bugs: Iterable[str]) -> list[Any]:
    return [pytest.param(bug, marks=slow if bug in LONG else ()) for bug in bugs]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=slow if first else ()) for first in range(0, SEEDS, PER_TEST)]
)
def test_seeds_hold(first: int) -> None:
    tally = run_seeds(range(first, first + PER_TEST))
    assert not tally.violations
    assert tally.versions > 3 * PER_TEST


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem, marks=slow if index % 8 else ()) for index, path in enumerate(PLANS)]
)
def test_plans_that_once_broke_something_hold(path: Path) -> None:
    """Each as its seed was drawn when it broke, by a simulator that had a model of a peer in place of a whole one, with
    rounds of four delays at least."""
    violation = world_of(read_plan(path)).run().violation
    assert not violation


def test_every_seed_of_the_table_of_bugs_has_its_plan() -> None:
    rows = re.findall(r"^\| B\d+ \| ([\d ]+) \|", (ROOT / "docs" / "how" / "bugs.md").read_text(), re.MULTILINE)
    assert len(rows) > 30
    assert {f"seed-{seed}" for row in rows for seed in row.split()} <= {path.stem for path in PLANS}


def test_votes_for_a_mean_that_died_with_the_evicted_are_not_counted_for_the_next() -> None:
    """p0 and the witness accept a version, and p0 dies with it; p1 is told to go on, and asks the witness anew."""
    faults = (Fault(6.0, "cut", "p1", 6.0), Fault(7.2, "kill", "p0", how="before Committed"))
    outcome = narrate(FaultPlan(seed=31, peers=2, witnesses=1, faults=faults))
    assert any("died with an evicted peer" in line for line in outcome.lines)
    assert not outcome.violation


@pytest.mark.parametrize("policy", ["sync", "quorum", "async"])
def test_a_state_that_changes_in_memory_is_found_and_copied(policy: str) -> None:
    outcome = narrate(FaultPlan(peers=3, policy=policy, calm_s=6.0, faults=(Fault(3.3, "drift", "p2"),)))
    changed = next(index for index, line in enumerate(outcome.lines) if "CHANGES in its memory" in line)
    assert any(" has copied version " in line for line in outcome.lines[changed:])
    assert not outcome.violation


@slow
def test_who_comes_back_with_its_clock_set_back_finds_those_who_went_on_apart() -> None:
    """p1 asks to join just before p0 founds a lineage, and is heard when its former life is forgotten."""
    faults = (Fault(3.25, "leave", "p2"), Fault(4.61, "kill", "p1"), Fault(9.5, "restart", "p1", how=NO_CLOCK))
    outcome = narrate(FaultPlan(seed=1, peers=3, without_majority="continue", round_s=1.0, overlap=1.0, faults=faults))
    assert any("FOUNDS version 3, view p0" in line for line in outcome.lines)
    assert not outcome.violation


@slow
def test_seeds_hold_under_async() -> None:
    tally = run_seeds(range(WITH_OPTIONS), SeedOptions(policy="async"))
    assert not tally.violations
    assert tally.versions > 3 * WITH_OPTIONS


@slow
def test_seeds_hold_with_speeds_over_a_range_of_ten() -> None:
    """The policies that wait for the slow: sync and quorum."""
    tally = run_seeds(range(WITH_OPTIONS), SeedOptions(speeds="0.1:1"))
    assert not tally.violations
    assert tally.versions > 3 * WITH_OPTIONS


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    assert transcript_now(path) == path.read_text()


TOLD = {
    "all_die_and_resume": r"begins again.*Begin (\d)[.]0 with p0 p1 p2.*Propose \1[.]0 .*CLOSES .* counting p0 p1 p2;",
    "coordinator_dies_after_propose": "p1 +DIES.*proposing again what was accepted.*CLOSES .* counting p0 p1",
    "cut_off_peer_keeps_its_vote": "CUT OFF.*CLOSES .* counting p0 p2;.*p2 +DIES.*reachable.*CLOSES .* counting p0 p1;",
    "fork_and_healing": r"FOUNDS version \d.*FOUNDS version \d.*goes on; [1-9].* tokens of ours are void.*copies",
    "half_against_half_waits": "CUT OFF.* a commit takes 3.*reachable.*CLOSES .* counting p0 p1 p2 p3",
    "joiner_copies_while_a_member_dies": "j0 +copies the state from p1.*p1 +DIES.*j0 +has copied version",
    "killed_owner_is_repaired": r"Begin (\d)[.]0 .* p0:0-1.*p0 +DIES.*Repair \1[.]0 number 1 without p0.*CLOSES",
    "leaver_goes_when_others_stand_without_it": "asked to LEAVE.*CHANGES members.*Goodbye.*CLOSES .* counting p0;",
    "liar_is_left_out": "absurdly large.*refuses Heartbeat of p1: BARRED",
    "operator_evicts_the_dead": "1 of 2 voters can be reached.*an operator declared p1 dead.*CLOSES version",
    "started_twice": "is STARTED TWICE.*thaws.*refuses Heartbeat of p1: FENCED.*asking to be taken in again",
    "stopped_peer_thaws": "p3 +is STOPPED.*p3 +thaws.*asking to be taken in again.*view p0 p1 p2 p3",
    "two_without_a_link": "have NO LINK.*CLOSES .*CLOSES .*is reachable again.*CLOSES .* counting p0 p1 p2;",
    "witness_lets_one_of_two_go_on": "p1 +DIES.*CLOSES .* counting p0; view p0 p1 w0",
}
"""The turn that each story takes, in the words of its transcript: a plan must be fitted where times have moved."""


@pytest.mark.parametrize("story", TOLD)
def test_a_transcript_tells_the_story_of_its_name(story: str) -> None:
    (path,) = (path for path in TRANSCRIPTS if path.stem == story)
    assert re.search(TOLD[story], path.read_text().partition(RULE)[2], re.DOTALL)


AWAY = {
    "async_stopped_for_a_minute": ("p2", 12),
    "async_away_for_twenty_versions": ("p3", 20),
    "async_late_joiner": ("j0", 0),
    "async_leaver": ("p1", 0),
}
"""Absent peers, and the least number of versions that the others close meanwhile."""
MAX_WAIT = 0.02
"""Share of the time."""


@slow
@pytest.mark.parametrize("story", AWAY)
def test_under_async_nobody_waits_for_one_that_is_not_there(story: str) -> None:
    """All checks of the simulator hold: the one that comes back is counted once, digests agree at every version."""
    name, versions = AWAY[story]
    plan = read_plan(Path(__file__).parent / "transcripts" / f"{story}.txt")
    world = SimulatedWorld(plan)
    (fault,) = plan.faults
    waited_s: dict[str, float] = {}
    closed: list[int] = []

    def look() -> None:
        waited_s.update({host.name: host.waited(world.now) for host in world.hosts.values()})
        closed.append(max(host.machine.version for host in world.hosts.values() if host.up))

    world.after(fault.at_s, look)
    world.after(
        fault.over_s, lambda: closed.append(max(host.machine.version for host in world.hosts.values() if host.up))
    )
    assert not world.run().violation
    others = [host for host in world.hosts.values() if host.name != name]
    assert len(others) >= 3
    for host in others:
        waited = host.waited(world.now) - waited_s[host.name]
        assert waited < MAX_WAIT * (world.now - fault.at_s), host.name
    assert closed[1] - closed[0] >= versions
    counted = [c.version for c in world.invariants.commits.values() if any(e.peer == name for e in c.counted)]
    assert max(counted) > closed[1] or fault.kind == "leave"


def test_under_sync_all_wait_for_one_that_is_not_there() -> None:
    """The same minute, so that the test above is known to be able to fail."""
    plan = replace(read_plan(Path(__file__).parent / "transcripts" / "async_stopped_for_a_minute.txt"), policy="sync")
    world = SimulatedWorld(plan)
    assert not world.run().violation
    assert max(host.waited(world.now) for host in world.hosts.values()) > MAX_WAIT * world.now


def test_a_version_that_is_not_made_of_what_was_recorded_is_noticed() -> None:
    world = SimulatedWorld(FaultPlan(policy="async", speeds="1+0.3", sized_by="speed", calm_s=5))
    assert not world.run().violation
    assert world.invariants.replayed().count(Verdict.REPRODUCED) > 3
    made = next(made for entry in world.invariants._made.values() for made in entry)
    made.parts = [bytes(len(part)) for part in made.parts]
    with pytest.raises(Violation, match="I3: replay of version"):
        world.invariants.replayed()


@pytest.mark.slow(queued=False)
def test_in_a_swarm_nobody_waits_and_nothing_grows_but_what_each_must_hear() -> None:
    """Three times as many peers: about as many versions, and three times as many contributions; heartbeats go from all
    to all, a commit from one peer to each, twice at most, but for who is behind. Who comes or goes costs another."""

    def measured(peers: int, seed: int = 0) -> dict[str, Any]:
        options = SwarmOptions(peers, 20.0, speeds=(0.4, 1.0), churn_per_minute=0.6, round_s=6.0, seed=seed)
        return measure_swarm(options)

    small, large, other = measured(6), measured(18), measured(18, seed=1)
    for result in (small, large):
        assert result["versions"] >= 3
        assert result["waited_share"] < MAX_WAIT
        assert result["held"]["means"] <= 6
        assert result["held"]["backlog"] <= 5
        assert sum(result["faults"].values()) > 0
    # Whoever is cut off or joins gets commits from all, too, until it is there: 1 to 3 times as many, by the seed.
    for results in ([small], [large, other]):
        commits = sum(one["bytes_per_peer_per_s_by_kind"]["Committed"] * one["seconds"] for one in results)
        assert commits < 2.5 * sum((one["versions"] + one["view_commits"]) * one["commit_bytes"] for one in results)
    few, many = (result["versions"] * result["contributors"] for result in (small, large))
    assert 2.5 * few < many
    assert large["versions"] <= 2 * small["versions"]
    assert large["upload_sizes"] + other["upload_sizes"] < 2 * 1.5 * small["upload_sizes"]
    one, three = (result["bytes_per_peer_per_s_by_kind"] for result in (small, large))
    assert 2.5 * one["Heartbeat"] < three["Heartbeat"] < 4 * one["Heartbeat"]


@pytest.mark.parametrize("bug", by_length(NOTICED_IN))
def test_planted_bug_is_noticed_in_its_plan(bug: str) -> None:
    assert NOTICED_IN.keys() | NOTICED_WITHIN.keys() == planted.BUGS.keys()
    plan = parse(NOTICED_IN[bug])
    assert not kind_of(plan)
    with planted.plant(bug):
        assert kind_of(plan) == BREAKS[bug]


@pytest.mark.parametrize("bug", by_length(NOTICED_WITHIN))
def test_planted_bug_is_noticed(bug: str) -> None:
    (caught,) = catch_planted(NOTICED_WITHIN[bug], [bug])
    assert caught.seeds, f"{caught.what}: not noticed in {NOTICED_WITHIN[bug]} seeds"
    assert not caught.violation.startswith("crash"), caught.violation  # it is the planted code that is wrong


def test_a_plan_can_be_written_and_read_again() -> None:
    for policy, seed in product(("", "async"), range(50)):
        plan = draw(seed, policy)
        assert parse(f"# a comment\n{plan}\n") == plan


@pytest.mark.parametrize(
    "text",
    [
        *("peers", "peers 2.5", "velocity 9", "3 explode p1", "soon kill p1", "3 late p1 for 2: much", "3 busy p1"),
        *("ranks 2+x", "ranks 1.5", "ranks 0", "ranks 100", "speeds 1+x", "speeds 0", "speeds nan"),
        *("bandwidth x", "bandwidth -1", "uplinks 1+x", "uplinks inf"),
    ],
)
def test_a_plan_that_makes_no_sense_is_an_error(text: str) -> None:
    with pytest.raises(UsageError):
        parse(text)


def test_a_plan_of_no_valid_contract_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"membership\.backlog_versions"):
        SimulatedWorld(parse("peers 3\nbacklog 0"))


@pytest.mark.parametrize(("how", "ways"), [("both", [("a", "b"), ("b", "a")]), ("out", [("a", "b")])])
def test_two_without_a_link_reach_all_others(how: str, ways: list[tuple[str, str]]) -> None:
    cut = SimulatedCut(frozenset("a"), how, reset=False, others=frozenset("b"))
    assert [pair for pair in permutations("abc", 2) if cut.blocks(*pair)] == ways


def test_the_same_seed_is_the_same_run() -> None:
    first, second = narrate(draw(7)), narrate(draw(7))
    assert first.lines == second.lines
    assert first.events == second.events


def test_an_invariant_that_breaks_in_a_task_nobody_waits_for_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    on_event = SimulatedConduct.on_event

    def broken_by_leavers(conduct: SimulatedConduct, host: Any, event: m.Event) -> None:
        on_event(conduct, host, event)
        if isinstance(event, m.LeaveWanted):
            raise Violation("I7", "leaves")

    monkeypatch.setattr(SimulatedConduct, "on_event", broken_by_leavers)
    assert kind_of(parse("peers 3\n2 leave p1")) == "I7"


@pytest.mark.slow(queued=False)
def test_a_failure_is_shrunk_to_what_matters() -> None:
    """Messages that are replayed, among other troubles, where they are taken again: only these are left."""
    replay = Fault(3.0, "replay", "p0", 6.0)
    noise = (Fault(1.0, "slow", "p2", 2.0), Fault(2.0, "full", "p3", 2.0), Fault(8.0, "slow", "p1", 2.0))
    plan = FaultPlan(peers=4, codec="int8", faults=(*noise[:2], replay, noise[2]))
    with planted.plant("replay-heard"):
        short = shrink(plan)
        assert kind_of(plan) == kind_of(short) != ""
        assert explain(plan).violation
    assert [fault.kind for fault in short.faults] == ["replay"]
    assert short.codec == "fp32"
    assert kind_of(replace(short, seed=short.seed)) == ""


def test_a_shorter_plan_that_no_contract_allows_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(plan: FaultPlan) -> str:
        return "I7" if world_of(plan).plan.overlap or plan.merge == "eager" else ""

    monkeypatch.setattr("diloco.simulate.virtual.search.kind_of", broken)
    with pytest.raises(ConfigError):
        broken(FaultPlan(merge="eager"))
    assert shrink(FaultPlan(peers=2, overlap=1.0, merge="eager", loss=0.1)) == FaultPlan(peers=2, overlap=1.0)


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=slow)])
def test_a_search_ends_with_the_first_violation_if_so_asked(jobs: int) -> None:
    choice = SeedOptions(bug="shared-lease")
    report = search(range(200), choice, lambda *_: None, jobs, until_found=True)
    (violated,) = report["violated"]
    assert report["seeds"] == violated["seed"] + 1 < 200
    assert run_seeds(range(violated["seed"]), choice).violations == []


@slow
def test_the_command_searches_and_tells(tmp_path: Path) -> None:
    file = tmp_path / "virtual.json"
    done = run_cli("virtual", "--seeds", "0:8", "--json", str(file))
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert (report["seeds"], report["violations"]) == (8, 0)
    assert report["events"] > 800
    assert report["faults"]["kill"] > 0
    told = run_cli("simulate", "--virtual", "--plan", str(TRANSCRIPTS[0]))
    assert told.returncode == 0
    assert told.stdout.partition(f"{RULE}\n")[2] == TRANSCRIPTS[0].read_text().partition(f"{RULE}\n")[2]


def test_an_interruption_while_a_rank_runs_ends_the_simulation() -> None:
    """Ctrl-C comes to the main thread, which waits for the thread of the rank meanwhile."""
    timeline = Timeline()
    loop = ProcessLoop.on(timeline, "p0")
    goes_on, seen = threading.Event(), list[str]()

    def work() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        try:
            if goes_on.wait(0.1):
                seen.append("the main thread goes on beside it")
            thread.wait(1.0)
        finally:
            seen.append("tidied up")

    thread = SimulatedThread(timeline, loop, work, lambda error: None)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        timeline.until(10.0, lambda: False, 1.0)
    goes_on.set()
    timeline.alone(loop, loop.bury)
    assert seen == ["tidied up"]


@slow
def test_what_was_done_until_an_interruption_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.simulate.virtual.search.BATCH", 3)

    def interrupt(done: int, total: int, violations: int) -> None:
        raise KeyboardInterrupt

    report = search(range(1000), SeedOptions(), interrupt)
    assert (report["seeds"], report["interrupted"], report["violations"]) == (3, True, 0)
