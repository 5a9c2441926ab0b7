"""Faults of machines, networks and disks in the simulator: each in a plan in which it matters, and what must hold."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
import torch

from diloco.base.types import Member
from diloco.protocol import messages as m
from diloco.protocol.contributor import Contributor
from diloco.simulate.virtual.plans.draw import SIZES, SLOW_LINKS_MBIT, SLOW_ROUND_S, draw
from diloco.simulate.virtual.plans.plan import FaultPlan, parse
from diloco.simulate.virtual.plans.setup import HEARTBEAT_S, contract_of
from diloco.simulate.virtual.search import SeedOptions, run_seeds, world_of
from diloco.simulate.virtual.wires import SimulatedUplinks, flipped
from diloco.simulate.virtual.world import Outcome
from diloco.transport.link import LinkDown, LinkRefused

pytestmark = pytest.mark.no_cover  # which makes a simulation nearly twice as slow


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def told(text: str) -> Outcome:
    """The plan's simulation, in which all invariants hold."""
    outcome = world_of(parse(text), record=True).run()
    assert not outcome.violation, "\n".join(outcome.lines[-30:])
    return outcome


def at(outcome: Outcome, *words: str) -> float:
    """Virtual time of the first line with all these words."""
    return next(float(line.split()[0]) for line in outcome.lines if all(word in line for word in words))


def says(outcome: Outcome, *words: str) -> bool:
    return any(all(word in line for word in words) for line in outcome.lines)


def test_a_voter_that_was_killed_before_it_saved_a_copy_is_the_same_voter() -> None:
    """Its checkpoint names an earlier life. It copies the state once more, and its vote, one of two, decides."""
    outcome = told("""
        peers 3
        checkpoint_every 12
        16 cut p2 for 13
        17 join p3
        33 leave p1
        33 leave p3
        37.5 kill p2
        38.5 restart p2: disk
        calm_s 4
    """)
    back_s = at(outcome, "p2", "starts with its disk")
    assert at(outcome, "p2", "the view goes on without me") < back_s - 5
    since = [line for line in outcome.lines if float(line.split()[0]) > back_s]
    assert not any("without me" in line or "EVICTS" in line for line in since)
    assert [line.partition("CLOSES")[2] for line in since if "CLOSES" in line and "counting p0 p2; view p0 p2" in line]


# ---------------------------------------------------------------- links


def test_streams_of_a_peer_share_its_uplink() -> None:
    uplinks = SimulatedUplinks(FaultPlan(bandwidth="0.8+0"))
    assert uplinks.takes_s("p0", 10_000, 5.0) == pytest.approx(0.1)
    assert uplinks.takes_s("p0", 10_000, 5.0) == pytest.approx(0.2)
    assert uplinks.takes_s("p1", 10_000, 5.0) == 0.0
    assert uplinks.message_s("p0", 5.05) == pytest.approx(0.15)


def test_a_slow_uplink_makes_a_version_take_longer() -> None:
    fast, slow = (told(f"peers 3\ndelay_s 0.005\nbandwidth {rate}\ncalm_s 3") for rate in ("0", "0.3"))
    assert at(slow, "CLOSES version 1") > at(fast, "CLOSES version 1") + 0.4


def test_a_part_is_slower_than_stall_s_and_never_still() -> None:
    """At 0.03 Mbit/s one of 4 kB takes 1.1 s, beside three other streams 4.4 s; `stall_s` is 2."""
    outcome = told("peers 3\ndelay_s 0.02\nbandwidth 0.03\ncalm_s 60")
    assert outcome.versions > 4
    assert not says(outcome, "attempt", "failed")
    assert not says(outcome, "made no progress")
    assert all("counting p0 p1 p2;" in line for line in outcome.lines if "CLOSES" in line)


FOUR = "peers 4\ndelay_s 0.02\nround_s 2\ncalm_s 60\nbandwidth 0.4+0.4+0.4+"


@pytest.mark.slow(queued=False)
@pytest.mark.parametrize("policy", ["sync", "quorum", "async"])
@pytest.mark.parametrize(("rate", "counted"), [("0.1", True), ("0.02", False)])
def test_one_slow_uplink_makes_nobody_restart(policy: str, rate: str, counted: bool) -> None:
    """It takes 4 or 20 times as long as theirs: its owner is waited for or left out, and the attempt goes on. Under
    async a version may be the slow one's alone: then no other has sent anything when the attempt is given up."""
    outcome = told(f"{FOUR}{rate}\npolicy {policy}")
    assert outcome.versions > 6
    assert not says(outcome, "made no progress")
    assert says(outcome, "CLOSES", "counting p0 p1 p2 p3") is counted
    assert not any(line.endswith("view p0 p1 p2") for line in outcome.lines)
    if counted or policy != "async":
        assert not says(outcome, "attempt", "failed")
        assert not says(outcome, ".1 with")


def test_drop_by_drop_holds_nobody_for_longer_than_the_bound() -> None:
    """A part takes 16 s. The others have what they owe within a second, and then wait for `match_deadline_s`, 3 s."""
    outcome = told(f"{FOUR}0.002")
    closed = [float(line.split()[0]) for line in outcome.lines if "CLOSES" in line]
    assert len(closed) > 6
    assert max(after - before for before, after in pairwise(closed)) < 2 * 1.3 + 1 + 3 + 1
    assert not says(outcome, "CLOSES", "counting p0 p1 p2 p3")


def test_a_count_of_bytes_that_is_nonsense_gains_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """p3 sends nothing, and its heartbeats say that ever more bytes move."""
    beat = Contributor.on_tick

    def lying(self: Contributor, event: m.Tick) -> None:
        beat(self, m.Tick(self.moved_bytes + 10**9) if self.membership.me.peer == "p3" else event)

    monkeypatch.setattr(Contributor, "on_tick", lying)
    outcome = told(f"{FOUR}0.0000001")
    assert outcome.versions > 6
    assert not says(outcome, "attempt", "failed")


def test_a_joiner_is_caught_up_over_a_slow_uplink() -> None:
    outcome = told("peers 3\nround_s 1.0\nbandwidth 0.5\n2 join j3\ncalm_s 8")
    assert says(outcome, "CLOSES", "view p0 p1 p2 j3")


def test_all_copy_the_state_of_one_that_went_on_alone_over_a_slow_uplink() -> None:
    """Two copies at once take 23 s."""
    text = "seed 1425\npeers 3\noptimizer adam\nwithout_majority continue\nround_s 8\nfeedback 0.95"
    outcome = told(f"{text}\nbandwidth 0.05+0.05+0.1\ncalm_s 3\n30 cut p0 for 4.7: both")
    assert says(outcome, "going on apart with 1 of 3")


def test_a_drawn_uplink_carries_the_state_to_all_others_before_commits_are_forgotten() -> None:
    """Else whoever goes on alone under `continue` is never caught up with."""
    drawn = [draw(seed, without_majority="continue") for seed in range(300)]
    slow = [plan for plan in drawn if plan.round_s == SLOW_ROUND_S and plan.bandwidth]
    assert max(plan.peers for plan in slow) > 3
    for plan in slow:
        assert (plan.peers - 1) * plan.longest_exchange_s < contract_of(plan).membership.backlog_versions * plan.round_s


def test_a_tunnel_that_refuses_is_no_proof_of_death() -> None:
    """Both live, and wait until the forwarder is back: neither goes on alone."""
    outcome = told("peers 2\ndelay_s 0.005\nproven true\n2 tunnel p1 for 5\ncalm_s 3")
    assert says(outcome, "p1", "loses its TUNNEL")
    closed = [float(line.split()[0]) for line in outcome.lines if "CLOSES" in line]
    assert not any(2.5 < moment < 7.0 for moment in closed)
    assert any(moment > 7.0 for moment in closed)


def test_a_death_on_the_same_machine_is_proven_and_one_by_power_is_not() -> None:
    killed, dark = (
        told(f"peers 2\nproven true\ndelay_s 0.005\n2 {kind} p1\n7 restart p1: disk") for kind in ("kill", "power")
    )
    versions = [
        sum("CLOSES" in line and 3 < float(line.split()[0]) < 7 for line in one.lines) for one in (killed, dark)
    ]
    assert versions[0] > 2
    assert versions[1] == 0


def test_a_one_way_link_is_survived() -> None:
    assert says(told("peers 3\n2 link p0+p1 for 3: out\n4 cut p2 for 2: in"), "have NO LINK", "out")


def test_a_flipped_bit_of_a_message_is_found() -> None:
    me = Member("p0", 1, "p0:1")
    envelope = m.Envelope("run", "00" * 32, "lineage", me, 1, 0, 0, "", 1, m.Evict("p1", 3))
    dice = Random(1)
    for _ in range(300):
        with pytest.raises((LinkRefused, LinkDown)):
            flipped(envelope, dice)


def test_flipped_bits_of_messages_harm_nobody() -> None:
    outcome = told("peers 3\n1 flip p1 for 5\ncalm_s 2")
    assert outcome.faults["flipped bits"] > 3
    assert says(outcome, "CLOSES version 3")


# ---------------------------------------------------------------- disks


def test_a_peer_dies_in_the_middle_of_a_checkpoint_and_goes_on_from_the_one_before() -> None:
    for seed in range(4):
        outcome = told(f"seed {seed}\npeers 3\ncheckpoint_every 1\n2.5 power p1: in checkpoint\n9 restart p1: disk")
        assert says(outcome, "p1", "DIES", "checkpoint")
        assert says(outcome, "p1", "starts with its disk")


def test_a_checkpoint_with_a_flipped_bit_is_passed_over() -> None:
    outcome = told("peers 3\ncheckpoint_every 1\n5 kill p1\n7 restart p1: flipped")
    assert outcome.faults["flipped checkpoints"] == 1
    assert not says(outcome, "p1", "StateError")


def test_a_second_process_in_the_same_folder_ends() -> None:
    outcome = told("peers 3\n3 second p1")
    assert says(outcome, "p1", "STARTED A SECOND TIME")
    assert says(outcome, "p1", "DIES (ResourceError: another process")


@pytest.mark.parametrize("how", ["late 0.5", "broken", "lies"])
def test_a_disk_whose_syncs_fail_stops_no_training(how: str) -> None:
    """Three vote from version 3 on, so that two go on without its vote: a version takes up to three `stall_s`."""
    outcome = told(f"peers 3\n6 disk p1 for 20: {how}\n27 power p1\n29 restart p1: disk\ncalm_s 3")
    closed = [float(line.split()[0]) for line in outcome.lines if "CLOSES version" in line]
    assert sum(6 < one < 26 for one in closed) >= 3
    assert says(outcome, "p1", "starts with its disk")


def test_nobody_votes_for_a_mean_that_its_log_refused() -> None:
    """Disks have room for votes and for no mean. Versions wait for that; whoever starts again stands where it did."""
    outcome = told("""
        peers 2
        checkpoint_every 50
        2 full p0 for 4: means
        2 full p1 for 4: means
        9 blackout *: power
        9.5 restart p0: disk
        9.5 restart p1: disk
        calm_s 4
    """)
    closed = [float(line.split()[0]) for line in outcome.lines if "CLOSES" in line]
    assert not [at_s for at_s in closed if 3.0 < at_s < 6.0]
    assert [at_s for at_s in closed if 6.0 < at_s < 9.0]


@pytest.mark.parametrize("peers", [1, 2], ids=["the only voter's", "that of one of two"])
def test_a_disk_with_room_for_votes_and_not_for_means_makes_its_voter_abstain(peers: int) -> None:
    """It loses power meanwhile, and goes on from its head when there is room: no version closed that its log lacks."""
    full, dark = 8.1, 10.0
    outcome = told(
        f"peers {peers}\nround_s 0.5\n{full} full p0 for 3: means\n{dark} blackout *: power\n11.5 resume p0\ncalm_s 2"
    )
    closed = [float(line.split()[0]) for line in outcome.lines if "CLOSES version" in line]
    assert not [at_s for at_s in closed if full + 0.6 < at_s < dark]  # one may have been logged before
    assert [at_s for at_s in closed if at_s > dark]


def test_a_version_waits_for_room_on_a_full_disk_and_closes_then() -> None:
    outcome = told("peers 1\nround_s 0.5\n4.1 full p0 for 3: means\ncalm_s 2")
    closed = [float(line.split()[0]) for line in outcome.lines if "CLOSES version" in line]
    assert not [at_s for at_s in closed if 4.2 < at_s < 7.1]
    assert [at_s for at_s in closed if 7.1 < at_s < 7.1 + 2 * HEARTBEAT_S]


def test_others_go_on_without_the_vote_of_one_with_a_full_disk() -> None:
    """That closes what they decide, too, and catches up from them where its log has a gap after a restart."""
    outcome = told("peers 3\nround_s 0.5\n6 full p1 for 6: means\n11 power p1\n13 restart p1: disk\ncalm_s 3")
    closed = [line for line in outcome.lines if "CLOSES version" in line and 7 < float(line.split()[0]) < 11]
    assert len([line for line in closed if " p0 " in line]) > 4
    assert len([line for line in closed if " p1 " in line]) > 4
    assert says(outcome, "p1", "starts with its disk")


def test_who_lacked_room_for_a_version_that_others_made_leads_when_it_is_the_only_one_left() -> None:
    outcome = told("seed 1\npeers 2\nwitnesses 1\nround_s 0.5\n6 full p0 for 5: means\n10 kill p1\ncalm_s 8")
    assert [line for line in outcome.lines if "CLOSES version" in line and float(line.split()[0]) > 12]


def test_a_mean_that_no_log_has_binds_no_witness() -> None:
    """Rule 4: the only trainer asks for no votes for it. Two that lack the mean would wait for that for good."""
    outcome = told("""
        peers 1
        witnesses 2
        round_s 0.5
        4.1 full p0 for 4: means
        6 power p0
        9 restart p0: disk
        calm_s 3
    """)
    assert [line for line in outcome.lines if "CLOSES version" in line and float(line.split()[0]) > 9]


def test_a_late_sync_holds_its_own_peer_up() -> None:
    soon, late = (told(f"peers 2\ndelay_s 0.005\n1 disk p1 for 8: {how}") for how in ("late 0", "late 2"))
    assert late.versions < soon.versions


def test_all_lose_power_while_a_disk_lies() -> None:
    """Its checkpoints are gone, and those of the others are not: the run goes on from these."""
    outcome = told("peers 3\n1 disk p0 for 5: lies\n5.2 blackout *: power\n6 resume p0\ncalm_s 4")
    assert says(outcome, "begins again from its checkpoint")


# ---------------------------------------------------------------- life


def test_a_voter_that_is_killed_before_its_second_version_keeps_its_vote() -> None:
    outcome = told("peers 3\ncheckpoint_every 50\n3 power p1\n4 restart p1: disk\ncalm_s 3")
    assert says(outcome, "p1", "joins through")
    assert not says(outcome, "p1", "copies the state")


def test_two_that_begin_again_elsewhere_hear_from_a_witness_where_they_are() -> None:
    """Each knows the other at the address of the process before. The witness hears from both."""
    outcome = told("""
        peers 2
        witnesses 1
        round_s 0.5
        6 kill p0
        6 kill p1
        9 restart p0: disk
        9 restart p1: disk
        calm_s 5
    """)
    closed = [line for line in outcome.lines if "CLOSES version" in line and 9 < float(line.split()[0]) < 11.5]
    assert [line for line in closed if "counting p0 p1" in line]


def test_a_run_ends_with_one_state_for_all() -> None:
    outcome = told("peers 3\ntotal_tokens 120\n2 kill p1\n5 restart p1: disk")
    assert outcome.faults["ends"] == 3


def test_stragglers_are_cut() -> None:
    """p2 is five times slower: others wait for its steps, or for as many as it has done by then."""
    waits, cuts = (
        told(f"peers 3\nspeeds 1+1+0.2\nround_s 0.6\nstragglers {how}\ncalm_s 12").versions for how in ("wait", "cut")
    )
    assert cuts > waits + 1


def test_gossip_goes_on_through_faults_and_ends_alike() -> None:
    outcome = told(
        "peers 4\npolicy gossip\ntotal_tokens 200\n2 kill p1\n3 cut p0+p2 for 2\n5 restart p1: disk\n6 flip p3 for 2"
    )
    assert outcome.faults["ends"] == 4
    assert says(outcome, "swap", "finally")


def test_gossip_seeds_hold() -> None:
    tally = run_seeds(range(15), SeedOptions(policy="gossip"))
    assert not tally.violations
    assert tally.versions > 10 * 15


# ---------------------------------------------------------------- sizes


def test_drawn_plans_have_2_to_8_peers_and_nightly_ones_up_to_16() -> None:
    usual, nightly = ([draw(seed, size=size) for seed in range(300)] for size in SIZES)
    assert {plan.peers for plan in usual} == set(range(2, 9))
    assert max(plan.peers for plan in nightly) == 16
    assert max(len(plan.faults) for plan in nightly) > 12
    kinds = {fault.kind for plan in usual for fault in plan.faults}
    assert kinds >= {"tunnel", "flip", "disk", "power", "second"}
    assert any(plan.bandwidth for plan in usual)
    assert any(SLOW_LINKS_MBIT[-1] in plan.bandwidth.split("+") for plan in usual)
    assert any(plan.total_tokens for plan in usual)
    assert any(plan.stragglers == "cut" for plan in usual)
    for plan in usual[:50]:
        assert parse(str(plan)) == plan
