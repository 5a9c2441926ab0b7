"""Records that bind a voter on its disk (`diloco.exchange.votes`), and how a restart reads them after any end."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.base.errors import StateError
from diloco.base.types import Commit, Leases, Member, Voter
from diloco.config.site import Site
from diloco.exchange.log import DiskUse
from diloco.exchange.votes import VOTES, DiskVotes, past_votes
from diloco.peer.restart import Restart
from diloco.protocol.effects import Save
from diloco.protocol.messages import Fork
from diloco.protocol.streams import Welcome
from diloco.protocol.vote import VoteRecord
from diloco.simulate.memory_link import MemoryEndpoint

A = Member("a", 7, "a:1")
FIRST = Commit(0, 0, "", "lineage", -1, (A,), (), (), "", 0, Leases(0, {}), "", voters=(Voter("a", 1, -1),))
NEXT = replace(FIRST, version=1, height=1, previous=FIRST.digest, fragment=0, mean_digest="mean")
LAST = replace(NEXT, version=2, height=2, previous=NEXT.digest, tokens=20)


@pytest.fixture
def votes(tmp_path: Path) -> Iterator[DiskVotes]:
    votes = DiskVotes(tmp_path, lambda text: warned.append(text), DiskUse())
    warned: list[str] = []
    yield votes
    votes.stop()


def save(votes: DiskVotes, number: int, record: VoteRecord, accepted: Commit | None, head: Commit | None) -> bool:
    return asyncio.run(votes.save(Save(number, A.incarnation, record, accepted, head)))


def stand(votes: DiskVotes) -> None:
    """A voter that stood on two commits, and has accepted a third."""
    assert save(votes, 1, VoteRecord(FIRST.digest), None, FIRST)
    assert save(votes, 2, VoteRecord(NEXT.digest), None, NEXT)
    assert save(votes, 3, VoteRecord(NEXT.digest, 4, 4, LAST.digest, led=2), LAST, None)


def test_a_restart_finds_what_binds_the_voter(votes: DiskVotes, tmp_path: Path) -> None:
    stand(votes)
    past = past_votes(tmp_path)
    assert past is not None
    restored = past.restored
    assert (restored.life, restored.saved, restored.head, restored.accepted) == (A.incarnation, 3, NEXT, LAST)
    assert restored.record == VoteRecord(NEXT.digest, 4, 4, LAST.digest, led=2)
    assert past.since(FIRST) == [NEXT]
    assert not past.since(NEXT)
    assert not past.since(LAST)  # it does not lead there


@pytest.mark.parametrize(
    ("lineage", "forks", "joins", "goes_over"),
    [
        ("lineage", (), False, False),
        ("another", (), False, False),
        ("another", (Fork("lineage", 10),), False, False),
        ("another", (Fork("lineage", 20), Fork("third", 30)), False, True),
        ("another", (Fork("third", 30),), True, True),
    ],
    ids=["ours", "unheard of", "parted before what was accepted", "parted after that", "a person says so"],
)
def test_a_voter_goes_over_to_a_lineage_that_has_all_that_its_disk_has(
    lineage: str, forks: tuple[Fork, ...], joins: bool, goes_over: bool, votes: DiskVotes, tmp_path: Path
) -> None:
    stand(votes)
    past, warned = past_votes(tmp_path), list[str]()
    assert past is not None
    welcome = Welcome(b"", lineage, 0, False, (replace(A, peer="b", address="b:1"),), (), "", "", forks)
    endpoint = MemoryEndpoint(Site(), None, welcome)
    restored = Restart(tmp_path, past, joins).life(endpoint, warned.append)  # type: ignore[arg-type]
    assert restored == (None if goes_over else past.restored)
    ignored = lineage != "lineage" and not goes_over
    assert endpoint.welcome == (None if ignored else welcome)
    assert [text.split(":")[0] for text in warned] == ["b"] * ignored


def test_a_restart_whose_log_lacks_a_mean_says_which_and_what_to_do(votes: DiskVotes, tmp_path: Path) -> None:
    stand(votes)
    restart, said = Restart(tmp_path, past_votes(tmp_path), joins=False), list[str]()  # type: ignore[arg-type]
    peer: Any = SimpleNamespace(
        name="a",
        line=SimpleNamespace(commit=FIRST),
        rank=SimpleNamespace(redone=False),
        warn=said.append,
        do=lambda decision: iter(()),
    )
    assert list(restart.redo(peer, checkpoint=None)) == []  # type: ignore[arg-type]
    (warning,) = said
    assert "no mean of version 1: going on from the one before" in warning
    assert f"move {tmp_path / VOTES} away" in warning


@pytest.mark.parametrize("kept", [1, 40, -1])
def test_half_a_line_was_never_said(votes: DiskVotes, tmp_path: Path, kept: int) -> None:
    """A process that dies while it writes has said nothing of it. The next one writes behind whole lines."""
    stand(votes)
    path = tmp_path / VOTES
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    path.write_bytes(whole + last[:kept])
    again = DiskVotes(tmp_path, print, DiskUse())
    past = past_votes(tmp_path)
    assert past is not None
    assert past.restored.saved == 3
    assert save(again, 4, VoteRecord(LAST.digest), None, LAST)
    again.stop()
    past = past_votes(tmp_path)
    assert past is not None
    assert (past.restored.saved, past.since(FIRST)) == (4, [NEXT, LAST])


@pytest.mark.parametrize("noise", [bytes(64), b"\n" + bytes(9), b"one\ntwo\nthree"])
def test_noise_behind_a_torn_line_was_never_said(votes: DiskVotes, tmp_path: Path, noise: bytes) -> None:
    """A loss of power may leave bytes that nobody wrote, ends of lines among them."""
    stand(votes)
    path = tmp_path / VOTES
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[-1][:200] + noise)
    past = past_votes(tmp_path)
    assert past is not None
    assert past.restored.saved == 3
    again = DiskVotes(tmp_path, print, DiskUse())
    assert save(again, 4, VoteRecord(LAST.digest), None, LAST)
    again.stop()
    past = past_votes(tmp_path)
    assert past is not None
    assert (past.restored.saved, past.since(FIRST)) == (4, [NEXT, LAST])


def test_a_damaged_line_ends_the_life(votes: DiskVotes, tmp_path: Path) -> None:
    """Nobody knows what it has said: it must not vote as the one that said it."""
    stand(votes)
    path = tmp_path / VOTES
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert past_votes(tmp_path) is None
    path.write_bytes(data + b"half a line")  # and then it died in the middle of another
    assert past_votes(tmp_path) is None
    begun = DiskVotes(tmp_path, print, DiskUse())
    stand(begun)  # the next life's votes are its own
    begun.stop()
    past = past_votes(tmp_path)
    assert past is not None
    assert (past.restored.saved, past.since(FIRST)) == (3, [NEXT])


@pytest.mark.parametrize("where", [-2, -1])
def test_damage_in_the_last_line_ends_the_life(votes: DiskVotes, tmp_path: Path, where: int) -> None:
    """It was synced, and something may follow from it. Its end alone is like the end of a torn one."""
    stand(votes)
    path = tmp_path / VOTES
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(data)
    assert (past_votes(tmp_path) is None) == (where == -2)


def test_a_disk_that_refuses_takes_no_vote(votes: DiskVotes, tmp_path: Path) -> None:
    stand(votes)
    os.close(votes._descriptor)
    assert not save(votes, 4, VoteRecord(LAST.digest), None, LAST)
    votes._descriptor = -1
    assert save(votes, 5, VoteRecord(LAST.digest), None, LAST)
    past = past_votes(tmp_path)
    assert past is not None
    assert past.restored.saved == 5


def test_what_another_process_has_promised_is_not_cut_off(tmp_path: Path) -> None:
    """Where the file system has no locks, or somebody deleted the lock: nobody knows which of the two goes on."""
    warned = list[str]()
    votes = DiskVotes(tmp_path, warned.append, DiskUse())
    assert save(votes, 1, VoteRecord(FIRST.digest), None, FIRST)
    other = DiskVotes(tmp_path, print, DiskUse())
    assert save(other, 2, VoteRecord(NEXT.digest, 6, 6, LAST.digest, led=5), LAST, NEXT)
    written = (tmp_path / VOTES).read_bytes()
    for number in (2, 3):
        assert not save(votes, number, VoteRecord(NEXT.digest, 1), None, NEXT)
    votes.forget(1)
    votes.stop()
    votes._thread.shutdown(wait=True)
    assert (tmp_path / VOTES).read_bytes() == written
    (warning,) = warned
    assert "another process has written there: stop it, and start this one again" in warning
    other.forget(1)
    assert save(other, 3, VoteRecord(LAST.digest), None, LAST)
    (tmp_path / VOTES).rename(tmp_path / "away")
    assert not save(other, 4, VoteRecord(LAST.digest, 1), None, None)
    (tmp_path / VOTES).touch()
    assert not save(other, 4, VoteRecord(LAST.digest, 1), None, None)
    other.stop()


def test_a_file_of_votes_that_was_not_read_is_not_written_over(
    votes: DiskVotes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand(votes)
    written, again = (tmp_path / VOTES).read_bytes(), DiskVotes(tmp_path, print, DiskUse())

    def refuse(path: Path) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as disk:
        disk.setattr(Path, "read_bytes", refuse)
        for _ in range(2):
            assert not save(again, 4, VoteRecord(LAST.digest), None, LAST)
    assert (tmp_path / VOTES).read_bytes() == written
    assert save(again, 4, VoteRecord(LAST.digest), None, LAST)
    again.stop()
    assert (tmp_path / VOTES).read_bytes().startswith(written)


def test_a_process_that_has_not_saved_yet_forgets_no_vote(votes: DiskVotes, tmp_path: Path) -> None:
    stand(votes)
    again = DiskVotes(tmp_path, print, DiskUse())
    again.forget(1)
    again.stop()
    again._thread.shutdown(wait=True)
    past = past_votes(tmp_path)
    assert past is not None
    assert (past.restored.saved, past.restored.head, {*past.commits}) == (3, NEXT, {NEXT.digest})


def test_commits_that_checkpoints_have_are_forgotten(votes: DiskVotes, tmp_path: Path) -> None:
    stand(votes)
    votes.forget(1)
    assert save(votes, 4, VoteRecord(NEXT.digest, 5, 4, LAST.digest, led=2), LAST, None)
    past = past_votes(tmp_path)
    assert past is not None
    assert (past.restored.saved, past.restored.head, {*past.commits}) == (4, NEXT, {NEXT.digest})


def test_no_vote_is_written_through_a_link(votes: DiskVotes, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / VOTES).symlink_to(mine)
    with pytest.raises(StateError, match="votes is a symbolic link"):
        save(votes, 1, VoteRecord(FIRST.digest), None, FIRST)
    (tmp_path / VOTES).unlink()
    stand(votes)
    for beside in (f".{VOTES}.tmp", f".{VOTES}.{os.getpid()}.tmp"):
        (tmp_path / beside).symlink_to(mine)
    votes.forget(1)
    assert save(votes, 4, VoteRecord(LAST.digest), None, LAST)
    past = past_votes(tmp_path)
    assert past is not None
    assert ({*past.commits}, mine.read_text()) == ({NEXT.digest, LAST.digest}, "mine")


def test_commits_of_a_lineage_that_was_left_lead_as_far_as_they_go(votes: DiskVotes, tmp_path: Path) -> None:
    """It copied a state in between, of which no line tells."""
    stand(votes)
    far = replace(LAST, version=9, height=9, lineage="other", previous="unknown")
    assert save(votes, 4, VoteRecord(far.digest), None, far)
    past = past_votes(tmp_path)
    assert past is not None
    assert past.since(FIRST) == [NEXT]
    assert past.since(NEXT) == past.since(far) == past.since(None) == []
