"""What an island that lost a rank does when its ranks are started again: decided from its last checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diloco.checkpoint import save
from diloco.config import Contract, Site, load_contract
from diloco.launch import PeerOptions, come_back
from diloco.slices import whole_slices
from diloco.types import Commit, Leases, Member
from tests.peers import tiny_contract

ME, BOB = Member("me", 1, "127.0.0.1:1"), Member("bob", 1, "127.0.0.1:2")


def kept(directory: Path, contract: Contract, *view: Member) -> None:
    """A checkpoint of version 3 in a peer's folder."""
    commit = Commit(3, "", "lineage", 0, view, (), (), "", 0, Leases(0, {}), "")
    meta = {"peer": "me", "contract": contract.to_json(), "commit": commit.to_bytes().decode()}
    save(directory / "checkpoints", 3, {"outer": whole_slices({"0/anchor": torch.zeros(1)})}, meta, keep=1)


@pytest.fixture
def founder(tmp_path: Path) -> PeerOptions:
    return PeerOptions(tiny_contract(tmp_path), None, None, None, directory=tmp_path / "me")


@pytest.fixture
def contract(founder: PeerOptions) -> Contract:
    assert founder.contract is not None
    return load_contract(founder.contract).value


def test_a_founder_joins_those_it_founded_the_run_with(founder: PeerOptions, contract: Contract) -> None:
    assert founder.directory is not None
    kept(founder.directory, contract, ME, BOB)
    again = come_back(founder, Site(), contract)
    assert (again.contract, again.resume) == (None, founder.directory)
    assert again.join == f"127.0.0.1:2/{contract.digest[:12]}"


def test_a_founder_that_was_alone_founds_anew_from_its_checkpoint(founder: PeerOptions, contract: Contract) -> None:
    assert founder.directory is not None
    kept(founder.directory, contract, ME)
    again = come_back(founder, Site(), contract)
    assert (again.contract, again.join, again.resume) == (None, None, founder.directory)


def test_a_joiner_asks_first_where_it_asked_before(tmp_path: Path, contract: Contract) -> None:
    kept(tmp_path / "me", contract, BOB, ME)
    joiner = PeerOptions(None, "127.0.0.1:9", None, None, directory=tmp_path / "me")
    again = come_back(joiner, Site(), None)
    assert again.join == f"127.0.0.1:9,127.0.0.1:2/{contract.digest[:12]}"


def test_without_a_checkpoint_of_this_run_it_begins_as_before(founder: PeerOptions, contract: Contract) -> None:
    assert come_back(founder, Site(), contract) is founder
    other = contract.model_copy(update={"run": contract.run.model_copy(update={"name": "other"})})
    assert founder.directory is not None
    kept(founder.directory, other, ME)
    assert come_back(founder, Site(), contract) is founder
