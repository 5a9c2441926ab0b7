"""The order of blocks and a peer's place in its lease."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.base.errors import IncompatibleError
from diloco.base.types import Blocks
from diloco.data.reader import BlockReader, block_at
from diloco.protocol.leases import advance, found


class Numbered:
    """A dataset whose block i is filled with i: the twin of `Dataset` for these tests."""

    vocab_size = 10**6
    sequence_length = 4

    def __init__(self, blocks_per_epoch: int | None = None, fingerprint: str = "numbered") -> None:
        self.blocks_per_epoch = blocks_per_epoch
        self.fingerprint = fingerprint
        self.place = 0

    def read(self, blocks: Sequence[int]) -> torch.Tensor:
        self.place = max(blocks)
        return torch.tensor(blocks).unsqueeze(1).expand(-1, self.sequence_length + 1)

    def heldout(self, sequences: int) -> torch.Tensor:
        return torch.full((sequences, self.sequence_length + 1), -1)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.place = state["place"]


def read(reader: BlockReader, n: int) -> list[int]:
    return [int(block) for block in reader.next(n)[:, 0]]


# ---------------------------------------------------------------- order


@pytest.mark.parametrize("blocks", [*range(1, 40), 64, 100, 101, 1023, 1024, 1025, 10_007])
def test_each_epoch_visits_every_block_once(blocks: int) -> None:
    for epoch in (0, 1, 5):
        order = [block_at(position, blocks, seed=3) for position in range(epoch * blocks, (epoch + 1) * blocks)]
        assert sorted(order) == list(range(blocks))


def epoch_order(blocks: int, epoch: int, seed: int) -> list[int]:
    return [block_at(epoch * blocks + i, blocks, seed) for i in range(blocks)]


def test_the_order_differs_by_epoch_and_by_seed() -> None:
    orders = [tuple(epoch_order(100, epoch, seed)) for epoch in range(4) for seed in range(4)]
    assert len(set(orders)) == 16


def test_the_order_is_the_same_on_every_machine() -> None:
    """Recorded: a change would make a resumed run train on blocks twice, and peers of two releases overlap."""
    assert epoch_order(10, 0, seed=0) == [0, 6, 8, 4, 2, 7, 5, 1, 3, 9]
    far = [block_at(10**12 + i, 123_456_789, seed=2**63 - 1) for i in range(3)]
    assert far == [9024643, 109402326, 8965053]


def test_neighbours_are_scattered() -> None:
    """Blocks of one file follow each other in the source; a shuffle should leave 1 neighbouring pair in 5,000."""
    order = epoch_order(10_000, 0, seed=1)
    pairs = sum(abs(a - b) == 1 for a, b in itertools.pairwise(order))
    assert pairs < 12
    # Mean displacement of a random permutation is n/3; its standard deviation for n = 10,000 is about 24.
    assert abs(sum(abs(i - block) for i, block in enumerate(order)) / 10_000 - 10_000 / 3) < 120


def test_every_small_order_comes_up() -> None:
    """Over seeds, block i is equally often at each place: chi-squared with 25 free cells, far beyond chance at 60."""
    counts = [[0] * 6 for _ in range(6)]
    for seed in range(3000):
        for position, block in enumerate(epoch_order(6, 0, seed)):
            counts[position][block] += 1
    chi_squared = sum((count - 500) ** 2 / 500 for row in counts for count in row)
    assert chi_squared < 60


def test_a_stream_is_read_as_it_comes() -> None:
    assert [block_at(position, None, seed=7) for position in (0, 1, 10**9)] == [0, 1, 10**9]


# ---------------------------------------------------------------- reader


def test_the_next_blocks_of_the_lease_in_order() -> None:
    reader = BlockReader(Numbered(), seed=0)
    reader.lease([Blocks(5, 8), Blocks(20, 24)])
    assert reader.remaining == 7
    assert reader.next_positions(4) == reader.next_positions(4) == [5, 6, 7, 20]
    assert read(reader, 4) == [5, 6, 7, 20]
    assert (reader.used, reader.remaining, reader.repeats) == (4, 3, 0)


def test_blocks_are_shuffled_within_the_epoch() -> None:
    reader = BlockReader(Numbered(blocks_per_epoch=10), seed=5)
    reader.lease([Blocks(0, 20)])
    epochs = [read(reader, 7) + read(reader, 3) for _ in range(2)]
    assert epochs == [epoch_order(10, 0, 5), epoch_order(10, 1, 5)]
    assert epochs[0] != epochs[1]


def test_a_new_version_keeps_the_unread_position() -> None:
    reader = BlockReader(Numbered(), seed=0)
    reader.lease([Blocks(0, 10)])
    read(reader, 6)
    reader.lease([Blocks(4, 14)], counted=4)  # 4 and 5 were read after the contribution was made
    assert (reader.used, reader.remaining) == (2, 8)
    assert read(reader, 3) == [6, 7, 8]


def test_a_version_that_counts_nothing_of_mine() -> None:
    reader = BlockReader(Numbered(), seed=0)
    reader.lease([Blocks(0, 4)])
    read(reader, 3)
    reader.lease([Blocks(0, 4)])
    assert (reader.used, read(reader, 1)) == (3, [3])


def test_an_exhausted_lease_starts_again_at_its_own_front(caplog: pytest.LogCaptureFixture) -> None:
    reader = BlockReader(Numbered(), seed=0)
    reader.lease([Blocks(0, 3), Blocks(9, 10)])
    with caplog.at_level(logging.WARNING):
        assert read(reader, 6) == [0, 1, 2, 9, 0, 1]
        assert read(reader, 5) == [2, 9, 0, 1, 2]
    assert (reader.used, reader.remaining, reader.repeats) == (4, 0, 7)
    assert len(caplog.records) == 1
    reader.lease([Blocks(20, 24)], counted=4)
    assert (reader.used, read(reader, 2)) == (0, [20, 21])
    assert reader.repeats == 7


def test_after_repeats_new_blocks_come_first() -> None:
    reader = BlockReader(Numbered(), seed=0)
    reader.lease([Blocks(0, 4)])
    assert read(reader, 5) == [0, 1, 2, 3, 0]
    reader.lease([Blocks(2, 6)], counted=2)
    assert read(reader, 3) == [4, 5, 2]


@pytest.mark.parametrize(
    ("held", "used", "following"),
    [
        ([Blocks(0, 8), Blocks(9, 12)], 6, [6, 7, 9]),  # nothing was counted
        ([Blocks(4, 8), Blocks(9, 16)], 2, [6, 7, 9]),  # four were
        ([Blocks(7, 8), Blocks(9, 16)], 0, [7, 9, 10]),  # more than were used: by an earlier life
        ([Blocks(20, 30)], 0, [20, 21, 22]),  # all new, after a time outside the view
        ([Blocks(2, 4), Blocks(20, 28)], 0, [2, 3, 20]),
    ],
)
def test_a_lease_some_versions_later(held: list[Blocks], used: int, following: list[int]) -> None:
    reader = BlockReader(Numbered(), seed=0)
    reader.lease([Blocks(0, 8), Blocks(9, 12)])
    read(reader, 6)
    reader.catch_up(held)
    assert reader.used == used
    assert read(reader, 3) == following


def test_what_a_reader_refuses() -> None:
    reader = BlockReader(Numbered(), seed=0)
    with pytest.raises(ValueError, match="no lease"):
        reader.next(1)
    reader.lease([Blocks(0, 4)])
    read(reader, 2)
    with pytest.raises(ValueError, match="3 blocks counted of 2 used"):
        reader.lease([Blocks(3, 9)], counted=3)
    with pytest.raises(ValueError, match="does not begin with the 1 blocks used"):
        reader.lease([Blocks(7, 9)], counted=1)
    assert read(reader, 1) == [2]


def test_a_failed_read_uses_nothing() -> None:
    class Broken(Numbered):
        def read(self, blocks: Sequence[int]) -> torch.Tensor:
            raise OSError("gone")

    reader = BlockReader(Broken(), seed=0)
    reader.lease([Blocks(0, 4)])
    with pytest.raises(OSError, match="gone"):
        reader.next(2)
    assert (reader.used, reader.repeats) == (0, 0)


@pytest.mark.parametrize("before", [0, 3, 8, 11])
def test_resuming_goes_on_at_the_same_block(before: int) -> None:
    reader = BlockReader(Numbered(), seed=0)
    reader.lease([Blocks(3, 8), Blocks(11, 14)])
    if before:
        read(reader, before)
    state = json.loads(json.dumps(reader.state_dict()))
    resumed = BlockReader(Numbered(), seed=0)
    resumed.load_state_dict(state)
    assert resumed.dataset.state_dict() == reader.dataset.state_dict()
    assert (resumed.used, resumed.remaining, resumed.repeats) == (reader.used, reader.remaining, reader.repeats)
    assert read(resumed, 13) == read(reader, 13)


def test_a_state_of_other_data_is_refused() -> None:
    state = BlockReader(Numbered(), seed=0).state_dict()
    with pytest.raises(IncompatibleError, match="made with other data"):
        BlockReader(Numbered(fingerprint="other"), seed=0).load_state_dict(state)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_peers_of_a_run_never_train_on_the_same_block(data: st.DataObject) -> None:
    """Two readers follow the leases of a random run; within an epoch no block of the dataset comes twice."""
    blocks_per_epoch, need = data.draw(st.integers(30, 60)), 10
    leases = found(["a", "b"], need)
    readers = {peer: BlockReader(Numbered(blocks_per_epoch), seed=9) for peer in leases.held}
    counted = dict.fromkeys(readers, 0)
    trained: list[tuple[int, int]] = []
    for _ in range(8):
        for peer, reader in readers.items():
            reader.lease(leases.held[peer], counted[peer])
            wanted = data.draw(st.integers(0, reader.remaining))
            epochs = [position // blocks_per_epoch for position in reader.next_positions(wanted)]
            trained += zip(epochs, read(reader, wanted) if wanted else [], strict=True)
            counted[peer] = data.draw(st.integers(0, reader.used))
        leases = advance(leases, counted, list(readers), need)
    assert len(set(trained)) == len(trained)
