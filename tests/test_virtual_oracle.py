"""Every invariant of the simulator can fail: a wrong behaviour is planted in production, and its name comes up.

`tests/virtual_bugs.py` and the simulator's own list of planted bugs have the wrong behaviour. The plans here are short
ones that show it.
"""

from __future__ import annotations

import pytest

from diloco.simulate.virtual import planted
from diloco.simulate.virtual.plans.plan import Fault, FaultPlan
from diloco.simulate.virtual.planted import plant
from diloco.simulate.virtual.world import SimulatedWorld
from tests.virtual_bugs import BUGS, behaving_wrongly

pytestmark = pytest.mark.no_cover  # which makes a simulation nearly twice as slow

TWO = FaultPlan(peers=2)
KILLED = (Fault(3.0, "kill", "p1"),)
BACK = (Fault(6.0, "kill", "p1"), Fault(6.3, "restart", "p1", how="disk"))
NO_POWER = (Fault(6.0, "power", "p1"), Fault(6.3, "restart", "p1", how="disk"))
BLANK = (Fault(6.0, "power", "p1"), Fault(6.3, "restart", "p1", how="blank"))
AWAY = (Fault(3.0, "cut", "p1", 5.0, "both, reset"),)
ALL_DIE = (Fault(9.0, "blackout", "*"), Fault(9.5, "resume", "p0"))
FOUNDED_TWICE = (Fault(1.0, "blackout", "*"), Fault(5.5, "resume", "p0"))
HALVES = (Fault(3.0, "cut", "p0", 6.0, "both"),)
DUEL = (Fault(2.0, "duel", "", 16.0),)
SHOWN: dict[str, tuple[str, FaultPlan]] = {
    "no-proofs": ("I7", FaultPlan(peers=2, proven=True, faults=KILLED)),
    "tells-no-votes": ("I7", FaultPlan(peers=2, faults=KILLED)),
    "oldest-accepted": ("I1", FaultPlan(seed=3, peers=4, faults=(Fault(9.0, "duel", "", 16.0),))),
    "deaf-coordinator": ("I1", FaultPlan(peers=3, faults=DUEL)),
    "broken-promise": ("I1", FaultPlan(seed=9, peers=4, faults=(Fault(7.0, "muffle", "", 16.0),))),
    "believes-suspicion": ("I1", FaultPlan(peers=2, faults=AWAY)),
    "half-is-enough": ("I5", FaultPlan(peers=4, faults=(Fault(3.0, "cut", "p0+p1", 5.0, "both"),))),
    "unseen-vote": ("I5", FaultPlan(seed=1, peers=3)),
    "books-twice": ("I2", TWO),
    "books-nothing-copied": ("I2", FaultPlan(peers=3, faults=AWAY)),
    "writes-no-copies": ("I2", FaultPlan(peers=3, faults=AWAY)),
    "opens-no-life": ("I2", TWO),
    "refuses-good-records": ("I2", TWO),
    "accuses-for-the-absent": ("I8", TWO),
    "knows-one-beginning": ("I3", FaultPlan(peers=2, checkpoint_every=50, faults=FOUNDED_TWICE)),
    "drops-unbooked": ("I2", FaultPlan(peers=3, faults=(Fault(2.2, "leave", "p1", how="after Begin"),))),
    "saves-nothing": ("I5", FaultPlan(peers=2, faults=ALL_DIE)),
    "resumes-from-nothing": ("I5", FaultPlan(peers=2, faults=ALL_DIE)),
    "voids-nothing": ("I8", FaultPlan(peers=3, without_majority="continue", faults=HALVES)),
    "replay-heard": ("I6", FaultPlan(peers=3, loss=0.1)),
    "forgiven-offence": ("I6", FaultPlan(peers=3, faults=(Fault(1.0, "lie", "p2", 8.0, "short"),))),
    "leaves-out-uncounted": ("I3", TWO),
    "lost-residual": ("I4", FaultPlan(peers=2, codec="int8", feedback=1.0)),
    "founds-with-majority": ("I8", FaultPlan(peers=3, without_majority="continue", faults=AWAY)),
    "cuts-ledger-short": ("I2", FaultPlan(peers=3, faults=NO_POWER)),
    "ends-when-refused": ("I7", FaultPlan(peers=3, faults=BLANK)),
    "copies-once-in-vain": ("I7", TWO),
    "reads-no-checkpoint": ("I5", FaultPlan(peers=3, faults=BACK)),
}
"""By planted bug, the invariant that fails and a plan that shows it."""


def test_all_that_is_planted_has_a_plan_that_shows_it() -> None:
    assert BUGS.keys() <= SHOWN.keys() <= BUGS.keys() | planted.BUGS.keys()
    assert BUGS.keys().isdisjoint(planted.BUGS)
    assert {invariant for invariant, _ in SHOWN.values()} == {f"I{number}" for number in range(1, 9)}


def test_a_block_that_two_peers_read_is_noticed_where_a_lineage_may_part() -> None:
    plan = FaultPlan(peers=3, without_majority="continue")
    with plant("shared-lease"):
        assert SimulatedWorld(plan).run().violation.startswith("I2:")
    assert not SimulatedWorld(plan).run().violation


def test_a_loss_of_power_excuses_no_loss_of_what_was_synced() -> None:
    plan = FaultPlan(peers=2, faults=(Fault(9.0, "blackout", "*", how="power"), Fault(9.5, "resume", "p0")))
    with behaving_wrongly("saves-nothing"):
        assert SimulatedWorld(plan).run().violation.startswith("I5:")
    assert not SimulatedWorld(plan).run().violation


def test_an_old_copy_of_a_disk_excuses_only_the_loss_of_what_it_lacks() -> None:
    old = Fault(9.0, "restart", "p1", how="old")  # with version 3, and nobody else has a later one
    faults = (Fault(3.0, "kill", "p0", how="in checkpoint"), Fault(8.0, "kill", "p1"), old)
    world = SimulatedWorld(FaultPlan(seed=17656, peers=2, proven=True, checkpoint_every=3, faults=faults))
    assert not world.run().violation
    invariants = world.invariants
    lost = {commit.version for digest, commit in invariants.commits.items() if invariants.lost_with_the_dead(digest)}
    assert lost == set(range(4, 4 + len(lost)))
    assert lost


@pytest.mark.parametrize("bug", ["saves-nothing", "resumes-from-nothing"])
def test_where_all_trainers_are_dead_the_run_is_resumed_and_must_have_lost_nothing(bug: str) -> None:
    plan = FaultPlan(peers=2, faults=(Fault(9.0, "kill", "p0"), Fault(9.2, "kill", "p1")))
    with behaving_wrongly(bug):
        assert SimulatedWorld(plan).run().violation.startswith("I5:")
    outcome = SimulatedWorld(plan, record=True).run()
    assert any("begins again from its checkpoint" in line for line in outcome.lines)
    assert not outcome.violation


def test_a_run_that_all_have_left_is_not_resumed() -> None:
    plan = FaultPlan(peers=2, faults=(Fault(5.0, "leave", "p0"), Fault(6.0, "leave", "p1")))
    outcome = SimulatedWorld(plan, record=True).run()
    assert not any("begins again" in line for line in outcome.lines)
    assert not outcome.violation


@pytest.mark.parametrize("bug", SHOWN)
def test_an_invariant_fails_where_production_is_wrong(bug: str) -> None:
    invariant, plan = SHOWN[bug]
    with behaving_wrongly(bug):
        wrong = SimulatedWorld(plan).run().violation
    assert wrong.startswith(f"{invariant}:"), wrong
    assert not SimulatedWorld(plan).run().violation
