"""Restart of an island that lost a rank: its ledger and last checkpoint decide."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from diloco.accounts.ledger import LEDGER, Opening, Position, Totals, open_ledger
from diloco.base.clock import new_incarnation
from diloco.base.errors import ResourceError, StateError, UsageError
from diloco.base.files import replacing_file
from diloco.base.types import Commit, Leases, Member
from diloco.config.contract import Contract
from diloco.config.load import load_contract
from diloco.config.site import NetworkSection, Site
from diloco.island import elastic
from diloco.island.elastic import SINCE, WELL_S
from diloco.island.slices import whole_slices
from diloco.observe.events import Listening, Stamped
from diloco.run.door import WRITTEN, make_folder, open_events
from diloco.run.launch import come_back, event_card, run_peer
from diloco.run.options import PeerOptions
from diloco.run.past import checkpoint_at
from diloco.storage.checkpoint import save
from diloco.transport.endpoint import known_here_only, listening
from tests.peers import PeerProcess, ending, ranks_of, tiny_contract, until

ME, BOB, EVE = Member("me", 1, "127.0.0.1:1"), Member("bob", 1, "127.0.0.1:2"), Member("eve", 1, "127.0.0.1:3")
NOTHING = Totals(0, 0, 0, 0)


def made(version: int, *view: Member) -> Commit:
    return Commit(version, version, "", "lineage", 0, view, (), (), "", 0, Leases(0, {}), "")


def kept(directory: Path, contract: Contract, *view: Member, version: int = 3, keep: int = 9) -> Path:
    """A checkpoint in a peer's folder."""
    meta = {"peer": "me", "contract": contract.to_json(), "commit": made(version, *view).to_bytes().decode()}
    values = {"outer": whole_slices({"0/anchor": torch.zeros(1)})}
    return save(directory / "checkpoints", version, values, meta, keep=keep)


def written(
    directory: Path,
    contract: Contract,
    *commits: Commit,
    founds: bool = True,
    version: int = 0,
    incarnation: int = 1,
) -> None:
    """A life of `me` in the ledger of its folder, which begins at `version`."""
    ledger = open_ledger(directory, print)
    opening = Opening(
        "me", incarnation, incarnation, contract.run.name, contract.digest, "lineage", founds, resumed=version > 0
    )
    ledger.opened(opening, json.loads(contract.to_json()), Position(version, "", "state"), NOTHING)
    for commit in commits:
        ledger.committed(commit, "state", True, NOTHING)
    ledger.close()


def of_run(contract: Contract, name: str) -> Contract:
    return contract.model_copy(update={"run": contract.run.model_copy(update={"name": name})})


def ticket(member: Member, contract: Contract) -> str:
    return f"{member.address}/{contract.digest}"


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
    assert again.join == f"127.0.0.1:2/{contract.digest}"


def test_a_founder_that_was_alone_founds_anew_from_its_checkpoint(founder: PeerOptions, contract: Contract) -> None:
    assert founder.directory is not None
    kept(founder.directory, contract, ME)
    again = come_back(founder, Site(), contract)
    assert (again.contract, again.join, again.resume) == (None, None, founder.directory)


def test_a_joiner_asks_first_where_it_asked_before(tmp_path: Path, contract: Contract) -> None:
    kept(tmp_path / "me", contract, BOB, ME)
    joiner = PeerOptions(None, "127.0.0.1:9", None, None, directory=tmp_path / "me")
    again = come_back(joiner, Site(), None)
    assert again.join == f"127.0.0.1:9,127.0.0.1:2/{contract.digest}"


def test_under_gossip_a_founder_joins_those_it_knew(founder: PeerOptions, contract: Contract) -> None:
    """There is no ledger, and no view: to found the run anew would be another run, which the others refuse."""
    assert founder.directory is not None
    meta = {"peer": "me", "contract": contract.to_json(), "commit": None, "others": [BOB.address, EVE.address]}
    save(founder.directory / "checkpoints", 3, {"outer": whole_slices({"0/anchor": torch.zeros(1)})}, meta, keep=9)
    again = come_back(founder, Site(), contract)
    assert (again.contract, again.resume) == (None, founder.directory)
    assert again.join == f"{ticket(BOB, contract)},{ticket(EVE, contract)}"


def test_without_a_checkpoint_of_this_run_it_begins_as_before(founder: PeerOptions, contract: Contract) -> None:
    assert come_back(founder, Site(), contract) is founder
    assert founder.directory is not None
    kept(founder.directory, of_run(contract, "other"), ME)
    assert come_back(founder, Site(), contract) is founder


# ---------------------------------------------------------------- whom it joins


def test_a_founder_without_a_checkpoint_joins_who_came_since(founder: PeerOptions, contract: Contract) -> None:
    assert founder.directory is not None
    written(founder.directory, contract, made(0, ME), made(1, ME), made(2, ME, BOB))
    again = come_back(founder, Site(), contract)
    assert (again.contract, again.resume, again.join) == (None, None, ticket(BOB, contract))


def test_a_checkpoint_that_is_behind_does_not_say_whom_to_join(founder: PeerOptions, contract: Contract) -> None:
    assert founder.directory is not None
    kept(founder.directory, contract, ME)
    written(founder.directory, contract, made(3, ME), made(4, ME, BOB, EVE), made(5, ME, EVE))
    again = come_back(founder, Site(), contract)
    assert (again.contract, again.resume) == (None, founder.directory)
    assert again.join == ticket(EVE, contract)


def test_a_life_that_died_before_its_first_version_joins_those_of_the_life_before(
    founder: PeerOptions, contract: Contract
) -> None:
    assert founder.directory is not None
    written(founder.directory, contract, made(0, ME), made(1, ME, BOB))
    written(founder.directory, contract, founds=False)
    assert come_back(founder, Site(), contract).join == ticket(BOB, contract)


def test_a_life_in_another_run_does_not_join_those_of_the_run_before(founder: PeerOptions, contract: Contract) -> None:
    assert founder.directory is not None
    written(founder.directory, of_run(contract, "other"), made(0, ME), made(1, ME, BOB))
    written(founder.directory, contract, founds=False)
    assert come_back(founder, Site(), contract).join is None


def test_who_founds_on_purpose_does_not_join_those_of_the_lineage_before(
    founder: PeerOptions, contract: Contract
) -> None:
    assert founder.directory is not None
    written(founder.directory, contract, made(0, ME), made(1, ME, BOB))
    written(founder.directory, contract)
    assert come_back(founder, Site(), contract) is founder
    written(founder.directory, contract, made(0, ME), made(1, ME))
    assert come_back(founder, Site(), contract) is founder


def test_a_ledger_that_is_damaged_leaves_the_checkpoint(founder: PeerOptions, contract: Contract) -> None:
    assert founder.directory is not None
    kept(founder.directory, contract, ME, BOB)
    written(founder.directory, contract, made(0, ME), made(1, ME))
    ledger = founder.directory / LEDGER
    ledger.write_bytes(b"x" + ledger.read_bytes())
    assert come_back(founder, Site(), contract).join == ticket(BOB, contract)


# ---------------------------------------------------------------- where it lived


@pytest.fixture
def two_runs(contract: Contract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Contract, Contract]:
    """Two runs in which `me` took part; each other run's folder comes first for some."""
    monkeypatch.chdir(tmp_path)
    runs = of_run(contract, "one"), of_run(contract, "two")
    for age, (run, other) in enumerate(zip(runs, (BOB, EVE), strict=True)):
        folder = Path("runs", run.run.name, "me")
        kept(folder, run, ME)
        written(folder, run, made(3, ME), made(4, ME, other))
        os.utime(folder / LEDGER, (1e9 + age, 1e9 + age))
    return runs


@pytest.mark.parametrize("which", [0, 1])
def test_a_founder_comes_back_in_the_folder_of_its_run(two_runs: tuple[Contract, Contract], which: int) -> None:
    run, site = two_runs[which], Site.model_validate({"peer": {"name": "me"}})
    again = come_back(PeerOptions(Path("any.toml"), None, None, None), site, run)
    assert (again.resume, again.join) == (Path("runs", run.run.name, "me"), ticket((BOB, EVE)[which], run))


@pytest.mark.parametrize("which", [0, 1])
def test_a_joiner_comes_back_in_the_folder_of_its_tickets_run(two_runs: tuple[Contract, Contract], which: int) -> None:
    run, site = two_runs[which], Site.model_validate({"peer": {"name": "me"}})
    door = f"127.0.0.1:9/{run.digest}"
    again = come_back(PeerOptions(None, door, None, None), site, None)
    assert again.resume == Path("runs", run.run.name, "me")
    assert again.join == f"{door},{ticket((BOB, EVE)[which], run)}"


def test_a_joiner_whose_ticket_is_of_another_run_begins_as_before(two_runs: tuple[Contract, Contract]) -> None:
    site = Site.model_validate({"peer": {"name": "me"}})
    options = PeerOptions(None, "127.0.0.1:9/" + 64 * "0", None, None)
    assert come_back(options, site, None) == options


@pytest.mark.parametrize("newer", [0, 1])
def test_a_ticket_without_a_run_is_of_the_one_written_last(two_runs: tuple[Contract, Contract], newer: int) -> None:
    folder = Path("runs", two_runs[newer].run.name, "me")
    os.utime(folder / LEDGER, (2e9, 2e9))
    site = Site.model_validate({"peer": {"name": "me"}})
    assert come_back(PeerOptions(None, "127.0.0.1:9", None, None), site, None).resume == folder


def test_what_was_written_before_the_island_was_started_is_of_another_life(
    two_runs: tuple[Contract, Contract], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It died before it wrote anything. Who wrote there last was in another run, or an earlier one of this contract."""
    monkeypatch.setenv(SINCE, str(new_incarnation()))
    joiner, site = PeerOptions(None, "127.0.0.1:9", None, None), Site.model_validate({"peer": {"name": "me"}})
    assert come_back(joiner, site, None) is joiner
    monkeypatch.setenv(SINCE, "1")
    assert come_back(joiner, site, None) is not joiner


def test_who_founds_a_run_again_does_not_go_on_from_what_it_made_before(
    founder: PeerOptions, contract: Contract, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same contract in the same folder, and no checkpoint of this run yet."""
    assert founder.directory is not None
    saved = kept(founder.directory, contract, ME, version=100)
    os.utime(saved, (1e9, 1e9))
    monkeypatch.setenv(SINCE, str(10**6 * int(1.1e9)))
    written(founder.directory, contract, made(0, ME), made(1, ME), incarnation=new_incarnation())
    assert come_back(founder, Site(), contract) is founder
    kept(founder.directory, contract, ME, version=1)
    assert come_back(founder, Site(), contract).resume == founder.directory
    assert checkpoint_at(founder.directory).version == 1


def test_the_folder_of_the_site_comes_before_that_of_a_checkpoint(tmp_path: Path, contract: Contract) -> None:
    saved = kept(tmp_path / "before", contract, ME)
    written(tmp_path / "before", contract, made(3, ME), made(4, ME, EVE))
    written(tmp_path / "here", contract, made(3, ME), made(4, ME, BOB), version=3)
    site = Site.model_validate({"storage": {"directory": str(tmp_path / "here")}})
    again = come_back(PeerOptions(None, None, None, saved), site, None)
    assert (again.resume, again.join) == (saved, ticket(BOB, contract))  # the checkpoint holds its name


# ---------------------------------------------------------------- --resume


@pytest.mark.parametrize("given", ["me", "me/checkpoints", "me/checkpoints/v00000003"])
def test_who_resumed_without_a_name_joins_those_that_came_since(tmp_path: Path, contract: Contract, given: str) -> None:
    kept(tmp_path / "me", contract, ME)
    written(tmp_path / "me", contract, made(3, ME), made(4, ME, BOB), version=3)
    again = come_back(PeerOptions(None, None, None, tmp_path / given), Site(), None)
    assert (again.resume, again.join) == (tmp_path / "me", ticket(BOB, contract))


def test_who_resumed_does_so_though_that_checkpoint_is_gone(tmp_path: Path, contract: Contract) -> None:
    saved = kept(tmp_path / "me", contract, ME)
    kept(tmp_path / "me", contract, ME, version=4, keep=1)
    written(tmp_path / "me", contract, made(3, ME), made(4, ME), version=3)
    assert not saved.exists()
    again = come_back(PeerOptions(None, None, None, saved), Site(), None)
    assert (again.resume, again.join) == (tmp_path / "me", None)


def test_who_resumed_from_a_copy_finds_the_folder_it_wrote_to(
    tmp_path: Path, contract: Contract, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copy = shutil.copytree(kept(tmp_path / "away", contract, ME), tmp_path / "copy")
    written(Path("runs/tiny/me"), contract, made(3, ME), made(4, ME, BOB), version=3)
    again = come_back(PeerOptions(None, None, None, copy), Site(), None)
    assert (again.resume, again.join) == (copy, ticket(BOB, contract))


def test_who_went_back_to_an_older_checkpoint_does_not_go_on_from_what_it_left(
    tmp_path: Path, contract: Contract
) -> None:
    saved = kept(tmp_path / "me", contract, ME)
    kept(tmp_path / "me", contract, ME, version=10)
    written(tmp_path / "me", contract, made(10, ME))
    written(tmp_path / "me", contract, made(3, ME), version=3)
    assert come_back(PeerOptions(None, None, None, saved), Site(), None).resume == tmp_path / "me"
    assert checkpoint_at(tmp_path / "me").version == 3
    kept(tmp_path / "me", contract, ME, version=11)
    written(tmp_path / "me", contract, made(11, ME), founds=False, version=3)
    assert come_back(PeerOptions(None, None, None, saved), Site(), None).resume == tmp_path / "me"
    assert checkpoint_at(tmp_path / "me").version == 11


# ---------------------------------------------------------------- launchers

RANK = """
import os
from pathlib import Path
from diloco.base.clock import new_incarnation
from diloco.island.elastic import of_this_launch, restarted
if not restarted():
    os._exit(1)
Path({told!r}).write_text(f"{{of_this_launch(new_incarnation() - 3600 * 10**6)}} {{of_this_launch(new_incarnation())}}")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody tells when torchrun began")
def test_under_torchrun_a_life_from_before_it_was_started_is_another(tmp_path: Path) -> None:
    """A rank that is started again took an old folder for that of its present launch."""
    told, script = tmp_path / "told", tmp_path / "rank.py"
    script.write_text(RANK.format(told=str(told)))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--max-restarts=1"]
    subprocess.run([*launcher, str(script)], check=True, timeout=240)
    assert told.read_text() == "False True"


LAUNCHER = """
import logging, sys
from pathlib import Path
from diloco.island import elastic
logging.basicConfig()
elastic.MAX_RESTARTS = 1
elastic.monotonic_s = lambda: float(Path("clock").read_text())
run_once = elastic.run_once
elastic.run_once = lambda ranks, module, arguments, leave_s: run_once(ranks, "dies", arguments, leave_s)
sys.exit(elastic.run_ranks(1, [], 1.0))
"""
DIES = """
import os
from pathlib import Path
life, clock = int(os.environ["DILOCO_LIFE"]), Path("clock")
with Path("lives").open("a") as lives:
    print(life, file=lives)
clock.write_text(str(float(clock.read_text()) + {seconds}[life]))
os._exit(1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "lives"), [([9, 9], 2), ([9, WELL_S, 9], 3), ([9, WELL_S, WELL_S, WELL_S - 1], 4)])
def test_a_life_of_an_hour_forgives_the_losses_before(tmp_path: Path, seconds: list[float], lives: int) -> None:
    """It may lose one rank in quick succession, here. In a month it lost more than it was ever allowed."""
    (tmp_path / "dies.py").write_text(DIES.format(seconds=seconds))
    (tmp_path / "clock").write_text("0")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", LAUNCHER]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 1
    assert (tmp_path / "lives").read_text().split() == [str(life) for life in range(lives)]
    assert "lost a rank 2 times, each within 60 minutes of the one before: it is not started again" in ended.stderr


def test_ranks_that_die_at_once_are_started_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eleven starts within a minute did not outlast a disk that was full for two."""
    now_s, started_s = 0.0, list[float]()

    def live(*_: object) -> int:
        nonlocal now_s
        started_s.append(now_s)
        now_s += 60.0 if len(started_s) == 3 else 1.0
        return 1

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(elastic, "run_once", live)
    monkeypatch.setattr(elastic, "monotonic_s", lambda: now_s)
    monkeypatch.setattr(elastic, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setenv(SINCE, "0")
    monkeypatch.setenv(elastic.LIFE, "0")
    assert elastic.run_ranks(2, [], 1.0) == 1
    assert [later - sooner for sooner, later in pairwise(started_s)] == [2, 4, 60, 16, *[30] * 6]


STOPPED = """
import sys, time
from types import SimpleNamespace
from diloco.island import elastic
elastic.time = SimpleNamespace(sleep=lambda seconds: print("waits", flush=True) or time.sleep(60))
run_once = elastic.run_once
elastic.run_once = lambda ranks, module, arguments, leave_s: run_once(ranks, "no_such_module", arguments, leave_s)
sys.exit(elastic.run_ranks(1, [], 1.0))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_for_the_next_start(tmp_path: Path, number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", STOPPED]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline().startswith("waits")
        launcher.send_signal(number)
        said = launcher.communicate(timeout=50)[1]  # which is sooner than the wait would end
    assert launcher.returncode == 1
    assert "Traceback" not in said


# ---------------------------------------------------------------- real processes


@pytest.mark.slow
def test_an_island_that_founded_a_run_does_not_fork_it(tmp_path: Path) -> None:
    """It has no checkpoint, and another has joined: when a rank of it dies it joins the other."""
    settings = ("--set", "device.step_s=0.05", "--set", "storage.checkpoint_every=0")
    with ending([]) as peers:
        a = PeerProcess("a", tmp_path, str(tiny_contract(tmp_path)), *settings, "--set", "device.ranks=2")
        peers.append(a)
        b = PeerProcess("b", tmp_path, "--join", a.ticket(), *settings)
        peers.append(b)
        a.reaches(1, ["a", "b"])
        os.kill(ranks_of(a)[1], signal.SIGKILL)
        until(lambda: len(a.events("start")) > 1, "a starts again")
        a.reaches(b.version() + 1, ["a", "b"])
        assert len({event["lineage"] for peer in peers for event in peer.events("version")}) == 1


# ---------------------------------------------------------------- where it listens


@pytest.mark.parametrize(
    ("tickets", "listen"),
    [
        (None, "127.0.0.1:0"),
        ("127.0.0.1:4000/" + 64 * "0", "127.0.0.1:0"),
        ("localhost:4000,[::1]:4000", "127.0.0.1:0"),
        ("10.0.0.5:4000/" + 64 * "0", "0.0.0.0:0"),
        ("127.0.0.1:4000,node3.example.org:4000", "0.0.0.0:0"),
        ("[fd00::5]:4000", "[::]:0"),
    ],
)
def test_who_joins_a_run_elsewhere_can_be_reached(tickets: str | None, listen: str) -> None:
    assert listening(Site(), tickets).network.listen == listen
    for told in ({"listen": "127.0.0.1:5000"}, {"advertise": "203.0.113.7:4000"}):
        site = Site.model_validate({"network": told})
        assert listening(site, tickets) is site


def test_a_founder_without_a_route_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cluster without a default route members were told to find it on their own machines."""
    monkeypatch.setattr(socket.socket, "connect", unroutable)
    for network, told in (
        ({"listen": "0.0.0.0:4000"}, "others are told 127.0.0.1; set network.advertise"),
        ({"listen": "[::]:4000"}, "others are told ::1; set network.advertise"),
        ({"listen": "10.0.0.5:4000"}, ""),
        ({"listen": "127.0.0.1:0"}, ""),
        ({"listen": "0.0.0.0:4000", "advertise": "10.0.0.5:4000"}, ""),
    ):
        said = known_here_only(NetworkSection.model_validate(network))
        assert said.endswith(told)
        assert bool(said) == bool(told)


def unroutable(*_: object) -> None:
    raise OSError(errno.ENETUNREACH, "Network is unreachable")


def test_a_card_that_cannot_be_written_ends_no_peer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "peer.json").mkdir()
    event_card(tmp_path)(Stamped(0.0, 0.0, "a", Listening("127.0.0.1:1", "127.0.0.1:1/0123")))
    assert "peer.json" in caplog.text


def test_a_card_is_not_written_through_a_link(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for name in ("peer.json", f".peer.json.{os.getpid()}"):
        (tmp_path / name).symlink_to(mine)
    event_card(tmp_path)(Stamped(0.0, 0.0, "a", Listening("127.0.0.1:1", "127.0.0.1:1/0123")))
    assert json.loads((tmp_path / "peer.json").read_text())["address"] == "127.0.0.1:1"
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("entry", [*WRITTEN, "checkpoints/v00000003", "checkpoints/v00000003/outer.safetensors"])
def test_a_peer_does_not_begin_in_a_folder_with_links_to_elsewhere(tmp_path: Path, entry: str) -> None:
    """Whoever hands over a folder must not choose what a peer that goes on in it writes to, or deletes."""
    folder, outside = tmp_path / "given", tmp_path / "outside"
    kept(folder, load_contract(tiny_contract(tmp_path)).value)
    if (folder / entry).exists():
        (folder / entry).rename(outside)
    else:
        outside.write_text('{"data": {"root": "."}}')
    (folder / entry).symlink_to(outside)
    before = {path: path.read_bytes() for path in [outside, *outside.rglob("*")] if path.is_file()}
    named = {path.name for path in folder.rglob("*")}
    with pytest.raises(StateError, match=f"given/{entry} is a symbolic link"):
        run_peer(PeerOptions(None, None, None, folder), lambda: True, lambda event: None)
    assert {path: path.read_bytes() for path in before} == before
    assert {path.name for path in folder.rglob("*")} == named


def test_what_a_killed_process_left_half_written_goes_once_the_folder_is_ours(tmp_path: Path) -> None:
    """In a container all processes have the same id, on another machine any other: only the lock says who writes."""
    left = list[Path]()
    (tmp_path / "recorded").mkdir()
    for name in ("votes", "peer.json", "site.json", "recorded/v00000003.f0.5f2c9a7e.00c3a1b2d4e5.bin", "report.html"):
        with replacing_file(tmp_path / name) as file:
            left.append(Path(file.name))
        left[-1].write_text("half")
    (tmp_path / ".peer.json.7.tmp").symlink_to(tmp_path / "peer.json")
    whole = {path for path in tmp_path.rglob("*") if not path.name.startswith(".")}
    (tmp_path / ".peer.json.8.tmp").mkdir()  # nobody wrote that
    events = open_events(tmp_path, "a", [])
    hidden = {tmp_path / ".events.lock", tmp_path / ".peer.json.8.tmp", left[-1]}  # a report is anybody's
    assert {*tmp_path.rglob("*")} == {*whole, *hidden, tmp_path / "events.jsonl"}
    left[0].write_text("half")
    with pytest.raises(ResourceError, match="another run in this one, writes to"):
        open_events(tmp_path, "a", [])
    assert left[0].exists()
    events.close()


def test_the_folder_of_a_peer_may_be_a_link_of_its_user(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "site.new").symlink_to(tmp_path / "mine")  # an entry that no peer writes
    assert make_folder(tmp_path / "runs" / "me", Site(), private=True) == tmp_path / "runs" / "me"
    assert make_folder(tmp_path / "runs", Site(), private=True) == tmp_path / "runs"
    assert not (tmp_path / "mine").exists()
    assert (tmp_path / "disk" / "site.json").is_file()


def test_who_comes_back_keeps_its_name(tmp_path: Path) -> None:
    kept(tmp_path, load_contract(tiny_contract(tmp_path)).value)
    options = PeerOptions(None, None, None, tmp_path, name="eve", directory=tmp_path / "new")
    with pytest.raises(UsageError, match="the checkpoint is one of me, and --name says eve") as raised:
        run_peer(options, lambda: True, lambda event: None)
    assert raised.value.fix == "leave --name out: a peer that comes back keeps its name"
    assert not (tmp_path / "new").exists()
