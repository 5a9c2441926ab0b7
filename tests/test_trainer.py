"""Where a trainer stands in its data and in the run, whatever becomes of a round: real ones, on a network in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.base.types import Member
from diloco.data.reader import BlockReader
from diloco.exchange.service import ExchangeService
from diloco.island import Island
from diloco.observe.events import to_json
from diloco.peer.life import Ending
from diloco.run.door import Entrance
from diloco.run.trainer import Trainer
from diloco.storage.checkpoint import Checkpoint, load
from tests.fronts import drive
from tests.local import SITE, LocalEndpoint, LocalPeer, LocalWorld
from tests.peers import DEADLINE_S, until

ALONE = {"policy": "quorum", "quorum_peers": 2, "grace_s": 0.1}
"""Two of three go on without the third."""


class LocalTrainer(LocalPeer):
    """A peer whose inner steps are a trainer's."""

    def __init__(self, name: str, world: Trainers, through: LocalPeer | None, checkpoint: Checkpoint | None) -> None:
        self.name, self.world, self.told = name, world, []
        self.address = f"{name}:1"
        endpoint = LocalEndpoint(
            world, self.address, world.ask(ExchangeService(through.peer.exchange).on_hello) if through else None
        )
        island = Island(0, 1, torch.device("cpu"))
        listeners = [lambda stamped: self.told.append(to_json(stamped))]
        entrance = Entrance(world.contract, endpoint, name, world.folder / name, checkpoint, listeners)  # type: ignore[arg-type]
        self.trainer = Trainer(lambda: entrance, world.site, island)
        drive(self.trainer.open())
        run = self.run = self.trainer.run
        assert run._leading is not None
        self.life, self.peer = run._leading.life, run._leading.life.peer  # type: ignore[assignment]
        self.model = self.trainer.model  # type: ignore[assignment]
        self.positions: list[int] = []
        """By inner step, where in the run it is."""
        step = self.trainer.model.step

        def noted(block: torch.Tensor | None, position: int) -> float:
            self.positions.append(position)
            return step(block, position)

        self.trainer.model.step = noted  # type: ignore[method-assign]
        self.blocks: list[int] = []
        """What was read, in order: of the first epoch."""
        dataset = self.trainer.model.dataset
        assert dataset is not None
        read = dataset.read

        def seen(blocks: Sequence[int]) -> torch.Tensor:
            self.blocks.extend(blocks)
            return read(blocks)

        dataset.read = seen  # type: ignore[method-assign]

    @property
    def reader(self) -> BlockReader:
        leased = self.trainer._reader
        assert leased is not None
        return leased.blocks

    def inner_step(self) -> None:
        """One, as `Trainer.live` and `Run.step` do it."""
        self.run._seen, self.run._since = self.life.ready(1), 0
        tokens, leading = self.run.contract.tokens_per_step, self.run._leading
        loss, fresh = self.trainer.inner_step()
        assert leading is not None
        leading.chronicle.trained(tokens, loss)
        self.life.trained(tokens, fresh, 0.001, loss)

    def round(self, leaving: bool = False) -> Any:
        def first() -> Any:
            if not self.peer.ending.finishing or (yield from self.life.enter()):
                return (yield from self.life.round())
            return ()

        return drive(first(), self.inner_step)

    def position(self) -> int:
        """Tokens of the run after the next step."""
        self.run._seen, self.run._since = self.life.ready(1), 0
        return self.run.position(self.run.contract.tokens_per_step)

    def end(self) -> Ending:
        self.run.leave()
        assert self.run.ending is not None
        return self.run.ending

    def save(self) -> Checkpoint:
        return load(drive(self.peer.keeper.last(self.version)).parent)

    def copy_state(self) -> None:
        """The latest of the others: that which somebody copied before is no longer kept for those who read it."""
        for peer in self.world.peers:
            snapshots = peer.peer.exchange.archive.snapshots
            self.world.call(partial(snapshots.forget, peer.version, math.inf))
        drive(self.peer.copy_state())

    def before_it_offers(self, what: Callable[[], object]) -> None:
        """In the next round, after the first inner steps."""
        catch_up = self.peer.catch_up

        def once() -> Any:
            self.peer.catch_up = catch_up  # type: ignore[method-assign]
            what()
            yield from catch_up()

        self.peer.catch_up = once  # type: ignore[method-assign]

    @property
    def reads_what_it_is_credited_for(self) -> bool:
        """Whether the blocks read are those that its next contribution tells of."""
        return self.reader.used == self.peer.line.trained.blocks


class Trainers(LocalWorld):
    """Trainers of a tiny model."""

    peers: list[LocalTrainer]  # type: ignore[assignment]

    def __init__(self, folder: Path, count: int, resumed: Checkpoint | None = None, **sections: dict[str, Any]) -> None:
        """`resumed`: what they go on from."""
        self.folder, self.resumed = folder, resumed
        text = folder / "text.txt"
        text.write_text("All work and no play makes Jack a dull boy.\n" * 500)
        model = {"kind": "transformer", "layers": 1, "dim": 16, "heads": 2}
        data = {"source": "text", "paths": (text.name,), "sequence_length": 8}
        inner = {"steps": 2, "batch_size": 1}
        never = SITE.storage.model_copy(update={"checkpoint_every": 0})  # a thread that may outlive its test
        root = SITE.data.model_copy(update={"root": str(folder)})
        site = SITE.model_copy(update={"data": root, "storage": never})
        super().__init__(count, None, site, model=model, data=data, **{"inner": inner, **sections})

    def add(self, name: str) -> LocalTrainer:
        peer = LocalTrainer(name, self, self.peers[0] if self.peers else None, self.resumed)
        self.peers.append(peer)
        return peer


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trainers]:
    made = Trainers(tmp_path, **{"count": 3, "membership": ALONE, **getattr(request, "param", {})})
    yield made
    made.close()


def test_whoever_copies_the_state_amid_a_round_does_not_lose_of_its_lease(world: Trainers) -> None:
    """However often it does, nothing is read twice, and its learning rate stays with the run."""
    *others, copier = world.peers
    world.rounds(world.peers)
    step = world.contract.tokens_per_step

    def copy() -> None:
        world.rounds(others)
        copier.copy_state()
        after.extend(world.pool.submit(peer.round) for peer in others)

    for _ in range(3):
        after: list[Any] = []
        copier.before_it_offers(copy)
        copier.round()
        assert [done.result(DEADLINE_S) for done in after]
        assert copier.peer.exchange.in_view
        assert copier.reads_what_it_is_credited_for
    world.settle(world.peers)
    line = copier.peer.line
    assert line.commit is not None
    started = line.commit.tokens + 3 * line.trained.tokens
    made = len(copier.positions)
    world.rounds(world.peers)
    assert copier.reads_what_it_is_credited_for
    assert copier.positions[made:] == [started + 3 * step, started + 6 * step]
    read = [block for peer in world.peers for block in peer.blocks]
    assert len(set(read)) == len(read)


def test_progress_that_is_discarded_does_not_move_the_learning_rate(world: Trainers) -> None:
    world.rounds(world.peers)
    loser = world.peers[2]
    weight = next(iter(loser.peer.line.parameters.values()))

    def spoil() -> None:
        with torch.no_grad():
            weight.fill_(float("nan"))

    loser.before_it_offers(spoil)
    loser.round()
    assert "not finite" in loser.told[-1]["reason"]
    world.rounds(world.peers)
    assert loser.positions[4:6] == loser.positions[2:4]
    assert loser.reads_what_it_is_credited_for


@pytest.mark.parametrize(
    "world", [{"run": {"total_tokens": 48}, "sync": {"part_elements": 1024, "overlap": 1}}], indirect=True
)
def test_nothing_is_trained_that_no_version_can_count(world: Trainers) -> None:
    """The run gets its tokens before a peer has offered for its last version, and nothing hides that any more."""
    *others, late = world.peers
    last: list[Any] = []

    def finish() -> None:
        while not others[0].peer.ending.finishing:
            world.rounds(others)
        last.extend(world.pool.submit(peer.round) for peer in others)

    late.before_it_offers(finish)
    late.round()
    for peer, ended in zip(others, last, strict=True):
        ended.result(DEADLINE_S)
        assert peer.peer.done
    assert late.peer.done
    assert [peer.peer.line.trained.tokens for peer in world.peers] == [0, 0, 0]


def test_with_nothing_left_to_train_nobody_skips_rounds_at_the_door(world: Trainers) -> None:
    """It did as fast as it could, an event for each, until the others had made a version that took it in."""
    *others, outside = world.peers
    world.rounds(world.peers)
    for peer in world.peers:
        peer.peer.ending.last_version = 999  # all tokens are there
    world.call(outside.peer.exchange.machine._membership._new_incarnation)
    waiting = world.pool.submit(outside.round)
    until(lambda: world.rounds(others) and waiting.done(), "a version takes it in")
    waiting.result()
    assert outside.peer.exchange.in_view
    assert not [told for told in outside.told if told["kind"] == "skip"]


@pytest.mark.slow(queued=False)
@pytest.mark.parametrize("world", [{"run": {"total_tokens": 32}}], indirect=True)
def test_whoever_copies_the_last_state_ends_where_that_stands(world: Trainers) -> None:
    *others, copier = world.peers

    def copy() -> None:
        world.rounds(others)  # has the tokens
        world.rounds(others)  # the final sync
        copier.copy_state()

    copier.before_it_offers(copy)
    copier.round()
    assert copier.peer.done
    ending = copier.end()
    assert (ending.version, ending.tokens, ending.state_digest) == (2, 32, others[0].digest)
    assert copier.reads_what_it_is_credited_for


def test_whoever_leaves_keeps_the_version_that_closed_last(world: Trainers) -> None:
    *others, leaver = world.peers
    world.rounds(world.peers)
    world.rounds(others)
    until(lambda: leaver.peer.exchange.version == 2, "it hears of the version")
    ending = leaver.end()
    commit = others[0].peer.line.commit
    assert commit is not None
    assert (ending.version, ending.state_digest) == (2, others[0].digest)
    assert (ending.tokens, ending.chain_digest) == (commit.tokens, commit.digest)
    kept = load(world.folder / leaver.name / "checkpoints")
    assert (kept.version, kept.meta["commit"]) == (2, commit.to_bytes().decode())


@pytest.mark.parametrize("world", [{"count": 1, "membership": {}}], indirect=True)
def test_whoever_founds_the_run_again_reads_on_where_it_was(world: Trainers, tmp_path: Path) -> None:
    """What it had not contributed yet is progress of its new life, and is credited to it."""
    before = world.peers[0]
    before.round()
    before.inner_step()
    checkpoint = before.save()
    (tmp_path / "again").mkdir()
    again = Trainers(tmp_path / "again", 1, checkpoint, membership={})
    (after,) = again.peers
    assert after.reader.next_positions(1) == [3]
    assert after.reads_what_it_is_credited_for
    after.round()
    line = after.peer.line
    assert line.commit is not None
    assert (line.commit.counted[0].tokens, line.commit.counted[0].blocks) == (24, 3)
    assert after.positions == [16 + 16, 16 + 24]
    assert after.reader.next_positions(1) == [5]
    again.close()


def test_what_a_restart_discards_does_not_move_the_learning_rate(world: Trainers) -> None:
    *others, gone = world.peers
    world.rounds(world.peers)
    gone.inner_step()
    checkpoint = gone.save()
    gone.run.close()
    world.call(partial(world.network.detach, gone.address))
    world.peers.remove(gone)
    world.resumed = checkpoint
    back = world.add("p2")
    entered = world.pool.submit(back.enter)
    while not entered.done():
        world.rounds(others)
    entered.result()
    line = back.peer.line
    assert line.commit is not None
    assert line.trained.tokens == 0
    assert back.reads_what_it_is_credited_for
    started = line.commit.tokens
    world.rounds(world.peers)
    assert back.positions[0] == started + 3 * world.contract.tokens_per_step


@pytest.mark.parametrize("world", [{"eval": {"every_versions": 1, "sequences": 1}}], indirect=True)
def test_a_witness_is_no_trainer(world: Trainers) -> None:
    """It moves no learning rate, and where it comes first in the view the first trainer evaluates."""
    world.rounds(world.peers)
    world.settle(world.peers)
    first, second, _ = world.peers
    line, position = first.peer.line, first.position()
    assert line.commit is not None
    witnessed = replace(line.commit, view=(Member("w", 1, "w:1", witness=True), *line.commit.view))
    line.commit = witnessed
    assert first.position() == position
    before = replace(witnessed, version=witnessed.version - 1)
    for peer in (first, second):
        peer.told.clear()
        peer.peer.line.commit = witnessed
        event = peer.peer.chronicle.closed(witnessed, before, None, {})
        assert event is not None
        peer.peer.publish(event)
    assert ["eval" in [event["kind"] for event in peer.told] for peer in (first, second)] == [True, False]
