"""When bytes go out, when a run is over, and what becomes of the local weights meanwhile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.base.errors import ConfigError
from diloco.base.turns import Turns
from diloco.base.types import Closed, Commit, Counted, Leases, Member, Omitted
from diloco.compress import PayloadError, open_codec
from diloco.config.codec import CodecSection
from diloco.config.contract import Contract, OuterSection
from diloco.models import build_model
from diloco.outer.average import fold, mean_digest
from diloco.outer.fragments import Layout, Weights, read_fragment
from diloco.outer.line import Diverged, Line, PendingContribution, Weighing, keep_local, weights_to_keep
from diloco.outer.merge import mix, open_merge
from diloco.outer.optimizers import open_outer
from diloco.outer.pseudograd import left_over, with_residual
from diloco.outer.state import OuterState
from diloco.peer import terms
from diloco.peer.schedule import MIN_SHARE, Cadence, PeerStopwatch, RunEnd
from diloco.peer.terms import open_line
from diloco.protocol.view import in_turn
from diloco.storage.checkpoint import load
from diloco.storage.saving import save_line
from tests.lines import adopt_state, drop_progress, measured, restored, step_outer, take_back
from tests.paper import VOCAB, PaperRun, contract

SIZE = 6000
SHAPES = [("a", (SIZE,))]


# ---------------------------------------------------------------- when


def test_a_round_is_split_by_the_overlap_and_the_first_one_is_whole() -> None:
    cadence = Cadence.of(contract(inner={"steps": 30}, sync={"fragments": 2, "overlap": 5}))
    assert (cadence.steps, cadence.before(0), cadence.before(1)) == (15, 15, 10)
    whole = Cadence.of(contract(inner={"steps": 30}, sync={"overlap": 30}))
    assert (whole.before(0), whole.before(1)) == (30, 0)


@pytest.mark.parametrize(
    ("pace", "fastest", "steps", "overlap"),
    [
        (0.0, 100.0, 30, 5),  # not measured yet
        (50.0, 0.0, 30, 5),  # nobody tells
        (100.0, 100.0, 30, 5),
        (120.0, 100.0, 30, 5),  # we are the fastest
        (50.0, 100.0, 15, 5),
        (33.0, 100.0, 9, 5),  # floor(9.9)
        (12.0, 100.0, 3, 3),  # the exchange lasts as long as the round
        (1.0, 1e300, int(30 * MIN_SHARE), 1),  # whatever somebody claims
    ],
)
def test_a_slower_peer_does_fewer_steps(pace: float, fastest: float, steps: int, overlap: int) -> None:
    assert Cadence(30, 5).sized(pace, fastest) == Cadence(steps, overlap)
    assert Cadence(1, 0).sized(pace, fastest) == Cadence(1, 0)


@pytest.mark.parametrize(
    ("sync_s", "steps"),
    [
        (0.0, 30),  # not measured yet
        (2.5, 30),  # all of it overlaps
        (3.0, 30),  # half a second beside 15 of work
        (12.5, 60),  # 10 s are a quarter of 40
        (100.0, 75),  # as far as it goes
    ],
)
def test_slow_exchanges_make_longer_rounds(sync_s: float, steps: int) -> None:
    assert Cadence(30, 5).stretched(0.5, sync_s, share=0.25, most=75) == Cadence(steps, 5)


def test_what_a_round_is_fitted_to() -> None:
    """Steps of 80 tokens; 4 s without overlap are half of 8, which are 16 steps of the fastest peer's half a second."""
    sections = {"inner": {"steps": 10, "batch_size": 8, "comm_share": 0.5}, "data": {"sequence_length": 10}}
    contract = Contract.model_validate({"run": {"name": "f", "total_tokens": 1000}, **sections})
    assert contract.blocks_per_round == 4 * 10 * 8
    assert Cadence.fitted(contract, 160.0, 160.0, 4.0) == Cadence(10, 0)
    assert Cadence.fitted(contract, 320.0, 320.0, 4.0) == Cadence(16, 0)
    assert Cadence.fitted(contract, 0.0, 320.0, 4.0) == Cadence(10, 0)
    by_speed = contract.model_copy(update={"inner": contract.inner.model_copy(update={"sized_by": "speed"})})
    assert Cadence.fitted(by_speed, 320.0, 640.0, 4.0) == Cadence(8, 0)
    assert Cadence.fitted(by_speed, 320.0, 640.0, 400.0) == Cadence(20, 0)
    fixed = contract.model_copy(update={"inner": contract.inner.model_copy(update={"comm_share": 0.0})})
    assert Cadence.fitted(fixed, 320.0, 640.0, 400.0) == Cadence(10, 0)
    assert fixed.blocks_per_round == 10 * 8


def test_the_pace_is_that_of_the_round_before() -> None:
    watch = PeerStopwatch()
    assert watch.round() == 0.0
    for seconds in (0.5, 1.5):
        watch.step(100, seconds)
    assert watch.pace == 0.0
    assert watch.round() == 100.0
    assert watch.round() == 100.0  # a round without steps says nothing new
    watch.step(100, 0.5)
    assert watch.round() == 200.0


@pytest.mark.parametrize(
    ("sync", "more"), [({}, 0), ({"fragments": 2}, 1), ({"overlap": 1}, 1), ({"fragments": 2, "overlap": 1}, 2)]
)
def test_the_final_sync_takes_as_many_versions_as_hold_something(sync: dict[str, int], more: int) -> None:
    base = {"fragments": 1}
    ending = RunEnd.of(contract(run={"name": "x", "total_tokens": 100}, inner={"steps": 4}, sync={**base, **sync}))
    ending.on_commit(commit_of(3, tokens=99))
    assert not ending.finishing
    for version in range(4, 4 + more):
        ending.on_commit(commit_of(version, tokens=100 + version))
        assert ending.finishing
        assert not ending.done
    ending.on_commit(commit_of(4 + more, tokens=110))
    assert ending.done


@pytest.mark.parametrize(("policy", "more"), [("sync", 0), ("quorum", 1), ("async", 1)])
def test_a_final_version_counts_whom_the_others_did_not_wait_for(policy: str, more: int) -> None:
    sections = {"membership": {"policy": policy}, "inner": {"steps": 4}, "sync": {"fragments": 1}}
    ending = RunEnd.of(contract(run={"name": "x", "total_tokens": 100}, **sections))
    assert ending.further_versions(commit_of(4)) == more


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 40), st.booleans())
def test_contributors_that_take_turns_have_one_in_the_final_sync(
    peers: int, most: int, fragments: int, version: int, may_leave_progress: bool
) -> None:
    names = [f"p{number}" for number in range(peers)]
    ending = RunEnd(100, fragments, may_leave_progress, most)
    ending.on_commit(commit_of(version, 100, tuple(Counted(name, 0, 0, 1, 1, 1) for name in names)))
    assert ending.last_version is not None
    counted: dict[int, set[str]] = {fragment: set() for fragment in range(fragments)}
    turns = Turns(fragments, 0, 100)
    for final in range(version + may_leave_progress, ending.last_version + 1):
        counted[turns.next(final - 1, 100)] |= set(in_turn(names, most, (final - 1) // fragments))
    assert all(counts == set(names) for counts in counted.values())


@pytest.mark.parametrize(("fragments", "late"), [(3, True), (1, False)])
def test_who_copies_a_state_of_the_final_sync_is_done(fragments: int, late: bool) -> None:
    """With one fragment it is the last state of all."""
    ending = RunEnd(100, fragments, True)
    ending.on_commit(commit_of(9, tokens=120), copied=True)
    assert ending.done
    assert ending.late == late


def test_who_copies_a_state_of_a_history_that_lacks_tokens_trains_again() -> None:
    """As where all died in the final sync, and the run was founded anew from an older checkpoint."""
    ending = RunEnd(100, 4, True)
    ending.on_commit(commit_of(20, 120), copied=True)
    assert ending.done
    ending.on_commit(commit_of(18, 90), copied=True)
    assert (ending.finishing, ending.done, ending.late) == (False, False, False)
    ending.on_commit(commit_of(19, 110, (Counted("p0", 0, 18, 21.0, 21, 1),)))
    assert ending.finishing
    assert not ending.done


@pytest.mark.parametrize("sync", [{"part_elements": 1024}, {}])
def test_a_state_of_more_parts_than_can_be_copied_is_refused_at_once(
    sync: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody could ever join: all were told that no member offers a state that fits."""
    monkeypatch.setattr(terms, "MAX_CHUNKS", 1)
    with pytest.raises(ConfigError, match="nobody could ever join"):
        open_line("a", contract(model={"kind": "external"}, sync=sync), Weights.of(torch.nn.Linear(64, 64)))


@pytest.mark.parametrize("before", [7, -1])
def test_a_witness_that_missed_the_version_with_the_tokens_is_done(before: int) -> None:
    """It can't know where the final sync ends, and so waited for versions that nobody makes."""
    ending = RunEnd(100, 3, True)
    if before >= 0:
        ending.on_commit(commit_of(before, 90))
    ending.on_commit(commit_of(9, 120))
    assert ending.done


def test_who_copies_the_state_that_has_the_tokens_takes_part_in_the_final_sync() -> None:
    ending = RunEnd(100, 3, True)
    ending.on_commit(commit_of(9, 120, (Counted("p0", 0, 8, 21.0, 21, 1),)), copied=True)
    assert ending.finishing
    assert not ending.done


@pytest.mark.parametrize(
    ("sections", "what"),
    [
        ({"inner": {"steps": 4}, "sync": {"overlap": 5}}, "sync.overlap"),
        ({"inner": {"steps": 4}, "sync": {"fragments": 2, "overlap": 3}}, "sync.overlap"),
        ({"sync": {"merge": "eager"}}, "does nothing without"),
        ({"sync": {"merge": "eager", "overlap": 1}, "outer": {"optimizer": "adam"}}, "linear"),
    ],
)
def test_contradictions_are_refused(sections: dict[str, dict[str, object]], what: str) -> None:
    with pytest.raises((ValueError, ConfigError), match=what):
        contract(**{"sync": {"fragments": 1}, **sections})


# ---------------------------------------------------------------- merging


def commit_of(version: int, tokens: int = 0, counted: tuple[Counted, ...] = (), fragment: int = 0) -> Commit:
    view = tuple(Member(one.peer, 1, "") for one in counted)
    return Commit(version, version, "", "l", fragment, view, counted, (), "", tokens, Leases(0, {}, (), 0), "")


def line_of(
    name: str, start: Tensor, outer: OuterSection, merge: str = "carry", mix_alpha: float = 0.5, **settings: object
) -> Line:
    layout = Layout.of(SHAPES, part_elements=1024)
    optimizer = open_outer(outer)
    state = OuterState(0, (optimizer.start(start.clone()),))
    codec = open_codec(CodecSection(name="fp32", zstd=False))
    weights, how = Weights({"a": start.clone()}), open_merge(merge, mix_alpha)
    return Line(name, weights, layout, [codec], optimizer, Weighing(), Turns(), state, merge=how, boot=0, **settings)  # type: ignore[arg-type]


def close(lines: list[Line], sent: list[PendingContribution]) -> Closed:
    """The version that all of them are counted in."""
    fragment = lines[0].layout.fragments[0]
    parts = [
        fold([(1, one.contribution.parts[part]) for one in sent], stop - start, lines[0].codecs[0])
        for part in range(fragment.parts)
        for start, stop in [fragment.part_bounds(part)]
    ]
    counted = tuple(Counted(line.peer, 0, lines[0].state.version, 1, 0, 0) for line in lines)
    commit = commit_of(lines[0].state.version + 1, counted=counted)
    return Closed(replace(commit, state_digest=lines[0].state.digest, mean_digest=mean_digest(parts)), parts)


TARGETS = [torch.linspace(-1, 1, SIZE) + 0.1 * index for index in range(3)]


def train(weights: Tensor, target: Tensor) -> None:
    """Inner steps: a way towards what this peer's data ask for."""
    for _ in range(3):
        weights.sub_((weights - target) * 0.1)


@pytest.mark.parametrize("outer", [OuterSection(lr=0.4, momentum=0.9), OuterSection(optimizer="sgd", lr=0.7)])
def test_eager_is_the_papers_replica_on_an_agreed_anchor(outer: OuterSection) -> None:
    """arXiv 2502.12996: each replica steps by its own fresh share and the others' previous one."""
    start = torch.zeros(SIZE)
    lines = [line_of(name, start, outer, merge="eager") for name in "xyz"]
    for line in lines:
        line.commit = commit_of(0, counted=tuple(Counted(name, 0, 0, 1, 0, 0) for name in "xyz"))
    replicas = [start.clone() for _ in lines]
    optimizers = [open_outer(outer) for _ in lines]
    states = [optimizer.start(start.clone()) for optimizer in optimizers]
    before: list[Tensor] | None = None
    for round_number in range(6):
        for index, target in enumerate(TARGETS):
            train(lines[index].parameters["a"], target)
            train(replicas[index], target)
        deltas = [state.anchor - replica for state, replica in zip(states, replicas, strict=True)]
        for index, delta in enumerate(deltas):
            stale = sum(before) / 3 - before[index] / 3 if before else torch.zeros(SIZE)
            states[index] = optimizers[index].step(states[index], delta / 3 + stale)
            replicas[index] = states[index].anchor.clone()
        before = deltas
        if round_number:
            closed = close(lines, [line.sent for line in lines if line.sent])
            for line in lines:
                step_outer(line, closed)
        for line in lines:
            line.sent = measured(line)
        for line, replica in zip(lines, replicas, strict=True):
            torch.testing.assert_close(line.parameters["a"], replica, rtol=1e-5, atol=1e-6)
    assert len({line.state.digest for line in lines}) == 1


def test_what_eager_foresees_is_in_no_checkpoint(tmp_path: Path) -> None:
    """The weights of the fragment that is on its way are kept as they were trained."""
    sync = {"fragments": 2, "part_elements": 4096, "overlap": 1, "merge": "eager"}
    run = PaperRun(tmp_path, "a", record=False, sync=sync)
    a = run.peers["a"]
    a.train()
    trained = {name: value.detach().clone() for name, value in a.line.parameters.items()}
    assert save_line(a.line, a.run)[0]["local"] == []
    a.offer()
    moved = {name: value.detach().clone() for name, value in a.line.parameters.items()}
    with weights_to_keep(a.line):
        for name, value in a.line.parameters.items():
            torch.testing.assert_close(value, trained[name], rtol=1e-5, atol=1e-6)
    for entry in a.line.layout.fragments[0].entries:
        assert torch.equal(a.line.parameters[entry.name], moved[entry.name])
        assert not torch.allclose(moved[entry.name], trained[entry.name], atol=1e-4)
    run.end()


def keeps_all(run: PaperRun, name: str) -> None:
    """A checkpoint of the peer has its weights, or they are the anchor to the last bit."""
    line = run.peers[name].line
    anchors = [line.state.fragments[fragment.index].anchor for fragment in line.layout.fragments]
    held = [read_fragment(line.parameters, fragment) for fragment in line.layout.fragments]
    assert line.trained.tokens == 0
    assert ("local" in save_line(line, run.contract)[0]) != all(map(torch.equal, anchors, held))


def test_progress_whose_tokens_are_committed_is_in_checkpoints(tmp_path: Path) -> None:
    """That of the fragments that the version did not move, and of parts that it omitted."""
    run = PaperRun(tmp_path / "fragments", "ab", record=False, sync={"fragments": 2, "part_elements": 4096})
    run.round()
    keeps_all(run, "a")
    run.end()
    run = PaperRun(tmp_path / "parts", "ab", record=False, sync={"fragments": 1, "part_elements": 4096})
    run.round(omitted=[Omitted("a", 0, 1)])
    keeps_all(run, "a")
    keeps_all(run, "b")
    run.round()
    keeps_all(run, "a")
    run.end()


def test_a_contribution_that_comes_to_nothing_is_progress_again_under_eager() -> None:
    line = line_of("x", torch.zeros(SIZE), OuterSection(lr=0.4), merge="eager")
    line.commit = commit_of(0, counted=(Counted("x", 0, 0, 1, 0, 0), Counted("y", 0, 0, 1, 0, 0)))
    train(line.parameters["a"], TARGETS[0])
    trained = line.parameters["a"].clone()
    line.sent = measured(line)
    assert not torch.equal(line.parameters["a"], trained)
    line.parameters["a"].add_(1.0)  # more steps while it is on its way
    take_back(line)
    torch.testing.assert_close(line.parameters["a"], trained + 1.0)
    assert line.sent is None
    assert line.merge.own == {}


@pytest.mark.parametrize("outer", [OuterSection(), OuterSection(optimizer="delayed_nesterov", buffer=2)])
def test_what_eager_foresees_of_momentum_fades_with_each_version(outer: OuterSection) -> None:
    """Also with those that count others only: as that of the agreed state does."""
    x, y = (line_of(name, torch.zeros(SIZE), outer, merge="eager") for name in "xy")
    alone = open_outer(outer)
    expected = alone.start(torch.zeros(SIZE))
    for version, contributors in enumerate(([x, y], [y], [y], [x, y])):
        for line, target in zip((x, y), TARGETS, strict=False):
            line.commit = commit_of(version, counted=(Counted("x", 0, 0, 1, 0, 0), Counted("y", 0, 0, 1, 0, 0)))
            train(line.parameters["a"], target)
        share = (x.state.fragments[0].anchor - x.parameters["a"]) / 2
        for line in contributors:
            line.sent = measured(line)
        expected = alone.step(expected, share if x in contributors else torch.zeros(SIZE))
        closed = close(contributors, [line.sent for line in contributors if line.sent])
        for line in (x, y):
            step_outer(line, closed)
        for name, slot in x.merge.own[0].slots.items():
            torch.testing.assert_close(slot, expected.slots[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("outer", [OuterSection(), OuterSection(optimizer="delayed_nesterov", buffer=2)])
def test_eager_foresees_nothing_of_what_a_part_leaves_out(outer: OuterSection) -> None:
    """Its momentum fades there, as in a version that counts others only."""
    x, y = (line_of(name, torch.zeros(SIZE), outer, merge="eager") for name in "xy")
    alone = open_outer(outer)
    expected = alone.start(torch.zeros(SIZE))
    for version, left_out in enumerate((2, 0, 2)):
        start, stop = x.layout.fragments[0].part_bounds(left_out)
        for line, target in zip((x, y), TARGETS, strict=False):
            line.commit = commit_of(version, counted=(Counted("x", 0, 0, 1, 0, 0), Counted("y", 0, 0, 1, 0, 0)))
            train(line.parameters["a"], target)
        share = (x.state.fragments[0].anchor - x.parameters["a"]) / 2
        share[start:stop] = 0
        for line in (x, y):
            line.sent = measured(line)
        expected = alone.step(expected, share)
        closed = close([x, y], [line.sent for line in (x, y) if line.sent])
        commit = replace(closed.commit, omitted=(Omitted("x", left_out, left_out + 1),))
        for line in (x, y):
            step_outer(line, Closed(commit, closed.parts))
        for name, slot in x.merge.own[0].slots.items():
            torch.testing.assert_close(slot, expected.slots[name], rtol=1e-5, atol=1e-6)


def test_eager_foresees_progress_and_not_what_was_dropped_before() -> None:
    residual = torch.full((SIZE,), 3.0)
    line = line_of("x", torch.zeros(SIZE), OuterSection(lr=0.4), merge="eager", feedback=0.5, residuals={0: residual})
    line.commit = commit_of(0, counted=(Counted("x", 0, 0, 1, 0, 0), Counted("y", 0, 0, 1, 0, 0)))
    train(line.parameters["a"], TARGETS[0])
    gradient = -line.parameters["a"]
    sent = measured(line)
    assert sent.target is not None
    assert sent.local is not None
    assert torch.equal(sent.target, gradient + 1.5)
    torch.testing.assert_close(sent.base_if_skipped - sent.local, gradient)
    assert torch.equal(residual, torch.full((SIZE,), 3.0))


@pytest.mark.parametrize(("version", "counted", "sent"), [(1, False, False), (1, True, True), (2, False, True)])
def test_what_may_be_counted_where_we_cannot_follow_is_no_progress_again(
    version: int, counted: bool, sent: bool
) -> None:
    """A version that was made on another state than ours: after the next one, or after one that we have not seen."""
    line = line_of("x", torch.zeros(SIZE), OuterSection())
    line.commit = commit_of(0)
    train(line.parameters["a"], TARGETS[0])
    line.sent = measured(line)
    ours = (Counted("x", 0, 0, 1, 0, 0),) if counted else ()
    with pytest.raises(Diverged):
        step_outer(line, Closed(replace(commit_of(version, counted=ours), state_digest="another"), []))
    take_back(line)
    assert (line.sent is not None) is sent


def test_progress_is_as_old_as_its_first_step() -> None:
    line = line_of("x", torch.zeros(SIZE), OuterSection())
    line.commit = commit_of(0)
    other = line_of("y", torch.zeros(SIZE), OuterSection())
    other.commit = commit_of(0)
    for version, tokens, since in ((1, 0, 1), (2, 10, 1), (3, 10, 1)):
        line.trained.tokens = tokens
        train(other.parameters["a"], TARGETS[1])
        other.sent = measured(other)
        closed = close([other], [other.sent])
        for one in (line, other):
            step_outer(one, closed)
        assert (line.state.version, line.since) == (version, since)
    drop_progress(line)
    assert line.since == 3


def test_mix_is_of_the_weights_now_and_not_of_those_sent() -> None:
    line = line_of("x", torch.zeros(SIZE), OuterSection(optimizer="sgd", lr=1.0), merge="mix", mix_alpha=0.25)
    line.commit = commit_of(0)
    line.parameters["a"].fill_(1.0)
    line.sent = measured(line)
    line.parameters["a"].fill_(3.0)
    step_outer(line, close([line], [line.sent]))
    assert torch.equal(line.state.fragments[0].anchor, torch.ones(SIZE))
    assert torch.equal(line.parameters["a"], torch.full((SIZE,), 0.25 * 3.0 + 0.75 * 1.0))
    assert torch.equal(mix(torch.tensor([2.0]), torch.tensor([4.0]), 0.0), torch.tensor([4.0]))


# ---------------------------------------------------------------- where nothing overlaps


def rounds_of(overlaps: bool, merge: str, omitted: int, in_place: bool) -> list[Tensor]:
    """Weights and anchors of two peers after each of three versions; one trains on before each version closes."""
    lines = [line_of(name, torch.zeros(SIZE), OuterSection(), merge=merge, mix_alpha=0.25) for name in "xy"]
    found = []
    for version in range(1, 4):
        for line, target in zip(lines, TARGETS, strict=False):
            line.commit = commit_of(version - 1)
            train(line.parameters["a"], target)
            line.sent = measured(line, overlaps=overlaps)
            assert (line.sent.local is None) != overlaps
        if version == 2:
            keep_local(lines[0])
            train(lines[0].parameters["a"], TARGETS[2])
        closed = close(lines, [line.sent for line in lines if line.sent])
        if omitted >= 0:
            commit = replace(closed.commit, omitted=(Omitted("x", omitted, omitted + 1),))
            closed = Closed(commit, closed.parts)
        for line in lines:
            step_outer(line, closed, state_unused=in_place)
        found += [line.parameters["a"].clone() for line in lines] + [lines[0].state.fragments[0].anchor.clone()]
    return found


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("omitted", [-1, 0, 1])
@pytest.mark.parametrize("merge", ["carry", "mix"])
def test_a_round_without_a_copy_of_the_weights_has_the_same_bits(merge: str, omitted: int, in_place: bool) -> None:
    """Nor without one of the outer state. Part `omitted` of the mean leaves x out (the mean itself is made up here)."""
    expected = rounds_of(True, merge, omitted, False)
    assert all(map(torch.equal, rounds_of(False, merge, omitted, in_place), expected))


def test_the_outer_state_is_overwritten_only_where_nobody_needs_it() -> None:
    line = line_of("x", torch.zeros(SIZE), OuterSection())
    asked: list[bool] = []
    for state_unused, version_counts_us in ((True, True), (False, True), (True, False)):
        line.commit = commit_of(line.state.version)
        train(line.parameters["a"], TARGETS[0])
        line.sent = measured(line, overlaps=False)
        closed = close([line] if version_counts_us else [line_of("y", torch.zeros(SIZE), OuterSection())], [line.sent])
        commit = replace(closed.commit, state_digest=line.state.digest, version=line.state.version + 1)
        asked.append(line.applying(commit, version_counts_us, state_unused).in_place)
        step_outer(line, replace(closed, commit=commit), state_unused)
    assert asked == [True, False, False]


def test_weights_beyond_half_of_fp32_are_refused() -> None:
    line = line_of("x", torch.zeros(SIZE), OuterSection())
    for value in (torch.inf, torch.nan, -2.0e38):
        line.parameters["a"][7] = value
        with pytest.raises(PayloadError, match="not finite"):
            measured(line, overlaps=False)
    line.parameters["a"][7] = -1.6e38
    assert measured(line, overlaps=False).contribution.parts


# ---------------------------------------------------------------- error feedback


@given(
    scales=st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=5),
    skipped=st.sets(st.integers(0, 4)),
    omitted=st.integers(0, 5),
    decay=st.sampled_from([1.0, 0.9]),
)
@settings(deadline=None, max_examples=30)
def test_sent_plus_residual_is_what_was_there(
    scales: list[float], skipped: set[int], omitted: int, decay: float
) -> None:
    """Conservation, part by part, whatever is counted, skipped or left out of a part."""
    codec = open_codec(CodecSection(name="int8", block=64))
    (fragment,) = Layout.of(SHAPES, part_elements=1024).fragments
    generator = torch.Generator().manual_seed(len(scales))
    residual: Tensor | None = None
    there, sent = torch.zeros(SIZE), torch.zeros(SIZE)
    for index, scale in enumerate(scales):
        gradient = torch.randn(SIZE, generator=generator) * scale
        target = torch.empty_like(gradient)
        assert with_residual(gradient, residual, decay, target)
        bounds = [fragment.part_bounds(part) for part in range(fragment.parts)]
        parts = [codec.encode(target[start:stop]) for start, stop in bounds]
        if index in skipped:
            continue  # nothing is final
        counted = [part != omitted for part in range(fragment.parts)]
        after = left_over(target, parts, fragment, [codec], counted.__getitem__, residual)
        for part, (start, stop) in enumerate(bounds):
            if counted[part]:
                lost = 0.0 if residual is None else (1 - decay) * residual[start:stop]
                there[start:stop] += gradient[start:stop] - lost
                sent[start:stop] += codec.decode(parts[part], stop - start)
        residual = after
    torch.testing.assert_close(
        sent + (torch.zeros(SIZE) if residual is None else residual), there, rtol=1e-5, atol=1e-5
    )


def test_the_residual_is_final_only_on_a_commit_and_survives_a_checkpoint_but_not_a_copy(tmp_path: Path) -> None:
    run = PaperRun(tmp_path, "ab", record=False, codec={"name": "int8", "error_feedback": 0.9})
    a, b = run.peers["a"], run.peers["b"]
    assert a.line.residuals == {}
    closed = run.round()
    index = closed.commit.fragment
    first = a.line.residuals[index].clone()
    assert first.abs().max() > 0
    assert set(a.line.residuals) == {index}
    run.round()  # the other fragment
    waiting = b.line.residuals[index].clone()
    run.round(count=[a])
    assert torch.equal(b.line.residuals[index], waiting)
    assert not torch.equal(a.line.residuals[index], first)
    adopt_state(a.line, a.line.state, None)
    assert a.line.residuals == {}
    run.end()


def test_a_part_that_omits_us_keeps_its_residual(tmp_path: Path) -> None:
    run = PaperRun(tmp_path, "ab", record=False, codec={"name": "int8", "error_feedback": 1.0})
    a = run.peers["a"]
    run.round()
    run.round()
    before = a.line.residuals[0].clone()
    fragment = a.line.layout.fragments[0]
    run.round(omitted=[Omitted("a", 0, 1)])
    start, stop = fragment.part_bounds(0)
    assert torch.equal(a.line.residuals[0][start:stop], before[start:stop])
    assert not torch.equal(a.line.residuals[0][stop:], before[stop:])
    run.end()


def test_a_share_of_the_residual_can_outlive_a_copy(tmp_path: Path) -> None:
    codec = {"name": "int8", "error_feedback": 1.0, "residual_after_rejoin": 0.5}
    run = PaperRun(tmp_path, "ab", record=False, codec=codec)
    a = run.peers["a"]
    index = run.round().commit.fragment
    before = a.line.residuals[index].clone()
    adopt_state(a.line, a.line.state, None)
    assert torch.equal(a.line.residuals[index], before * 0.5)
    run.end()


def test_after_a_copy_what_was_sent_is_not_in_the_residual(tmp_path: Path) -> None:
    """The copied version counts it: only what the codec dropped of it is still to be sent."""
    codec = {"name": "int8", "error_feedback": 1.0, "residual_after_rejoin": 0.5}
    run = PaperRun(tmp_path, "ab", record=False, codec=codec)
    a, b = run.peers["a"], run.peers["b"]
    run.round()
    run.round()
    before = {index: residual.clone() for index, residual in a.line.residuals.items()}
    run.offer()
    sent, fragment = a.line.sent, a.line.due
    assert sent is not None
    assert sent.target is not None
    dropped = sent.target.clone()
    for part, (start, stop) in fragment.cuts.items():
        dropped[start:stop] -= a.line.codecs[0].decode(sent.contribution.parts[part], stop - start)
    run.apply(run.close(b, [a, b]), [b])
    run.copy(b, a)
    assert a.line.state.digest == b.line.state.digest
    assert torch.equal(a.line.residuals[fragment.index], dropped * 0.5)
    assert torch.equal(a.line.residuals[1 - fragment.index], before[1 - fragment.index] * 0.5)
    run.end()


@pytest.mark.parametrize("kept", [0.0, 0.5])
def test_what_an_earlier_life_sent_is_not_in_the_residual_of_the_next(tmp_path: Path, kept: float) -> None:
    """A checkpoint, then a version that counts what it kept back, then a death: the version comes in by its commit."""
    codec = {"name": "int8", "error_feedback": 1.0, "residual_after_rejoin": kept}
    run = PaperRun(tmp_path, "ab", record=False, codec=codec)
    a, b = run.peers["a"], run.peers["b"]
    run.round()
    run.round()
    again = open_line("a", run.contract, Weights.of(build_model(contract().model, VOCAB, run.contract.run.seed)))
    restored(again, load(a.save()))
    saved = again.residuals[0].clone()
    assert torch.equal(saved, a.line.residuals[0])
    closed = [run.round(omitted=[Omitted("a", 0, 1)]), run.round(count=[b])]
    for one in closed:
        step_outer(again, one)
    assert again.state.digest == a.line.state.digest
    start, stop = again.layout.fragments[0].part_bounds(0)
    assert torch.equal(again.residuals[0][start:stop], saved[start:stop])  # it was left out of this part
    assert torch.equal(again.residuals[0][stop:], saved[stop:] * kept)
    assert torch.equal(again.residuals[1], a.line.residuals[1])  # nothing of it was counted
    run.end()


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("merge", ["carry", "eager"])
def test_a_copy_of_the_version_that_we_stand_at_leaves_what_was_sent_on_its_way(
    tmp_path: Path, merge: str, damaged: bool
) -> None:
    """The next version may count it, and would otherwise count in its name what is sent instead."""
    codec = {"name": "int8", "error_feedback": 1.0}
    run = PaperRun(
        tmp_path, "ab", record=False, codec=codec, sync={"merge": merge, "overlap": 1, "part_elements": 4096}
    )
    a, b = run.peers["a"], run.peers["b"]
    run.round()
    fragment, state = a.line.due, a.line.state
    if damaged:
        before = state.fragments[fragment.index]
        wrong = replace(before, anchor=before.anchor + 1)
        a.line.state = state.replace(fragment.index, wrong, state.version)
        a.line.weights.write(fragment, a.line.weights.read(fragment) + 1)
    run.offer()
    sent, tokens, residuals = a.line.sent, a.line.trained.tokens, dict(a.line.residuals)
    a.train()  # meanwhile
    assert sent is not None
    progress = a.line.weights.read(fragment) - sent.local
    run.copy(b, a)
    assert a.line.sent is not None
    assert a.line.sent.contribution is sent.contribution
    assert (a.line.trained.tokens > tokens, a.line.residuals) == (True, residuals)
    run.apply(run.close(b, [a, b]), [a, b])
    assert a.line.state.digest == b.line.state.digest
    left = a.line.weights.read(fragment) - a.line.state.fragments[fragment.index].anchor
    torch.testing.assert_close(left, progress, rtol=0, atol=1e-6)
    assert progress.abs().max() > 1e-4
    run.end()


def test_what_a_contract_says_of_the_schedule_has_a_digest_of_its_own() -> None:
    plain = contract(inner={"steps": 4})
    overlapped = contract(inner={"steps": 4}, sync={"fragments": 2, "part_elements": 4096, "overlap": 1})
    assert isinstance(plain, Contract)
    assert plain.digest != overlapped.digest
