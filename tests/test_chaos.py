"""The network of doors, the arithmetic of a drill, and a short one with real peers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from diloco.base.errors import ResourceError
from diloco.simulate.chaos import drill
from diloco.simulate.chaos.absence import AbsenceScale, run_absences
from diloco.simulate.chaos.drill import DrillOptions, run_drill
from diloco.simulate.chaos.fleet import ChaosLife, SeenVersion, free_port
from diloco.simulate.chaos.network import ChaosNetwork, Rule
from diloco.simulate.chaos.verdict import DrillFault, by_kind, has_rate, throughput
from diloco.simulate.local.processes import SimulationProcess
from tests.peers import DEADLINE_S

ROOT = Path(__file__).resolve().parent.parent
LEAST_VERSIONS = 3
"""Any drill makes two before its faults, and one that counts all after them. How many more is a matter of the machine:
a fault comes after seconds, and where a round takes longer there are more faults than versions."""


# ---------------------------------------------------------------- the network


@contextmanager
def echo() -> Iterator[int]:
    """A server that sends back what it gets. Yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=[connection], daemon=True).start()

        def answer(connection: socket.socket) -> None:
            with connection, suppress(ConnectionResetError):
                while data := connection.recv(1 << 16):
                    connection.sendall(data)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield int(server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def network() -> Iterator[ChaosNetwork]:
    made = ChaosNetwork(seed=1)
    made.belongs(os.getpid(), "a")
    yield made
    made.close()


@pytest.fixture(params=["127.0.0.1", "::ffff:127.0.0.1"])
def to_b(network: ChaosNetwork, request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    """A connection from peer a to peer b, which echoes; as Python makes it, and as gRPC does."""
    with echo() as port:
        door = int(network.address("b", port).rpartition(":")[2])
        with socket.create_connection((request.param, door), timeout=DEADLINE_S) as connection:
            yield connection


def comes_back(connection: socket.socket, data: bytes, within_s: float = 5.0) -> bool:
    connection.settimeout(within_s)
    connection.sendall(data)
    received = b""
    try:
        while len(received) < len(data) and (some := connection.recv(len(data))):  # a timeout turns MSG_WAITALL off
            received += some
    except TimeoutError:
        return False
    return received == data


def ends(connection: socket.socket) -> bool:
    connection.settimeout(DEADLINE_S)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_bytes_pass(to_b: socket.socket) -> None:
    assert comes_back(to_b, os.urandom(1 << 16))


@pytest.mark.parametrize("way", [("a", "b"), ("b", "a")])
def test_either_direction_can_be_cut_and_goes_on_where_it_was(
    network: ChaosNetwork, to_b: socket.socket, way: tuple[str, str]
) -> None:
    assert comes_back(to_b, b"before")
    cut = [Rule(frozenset(way[:1]), frozenset(way[1:]), passes=False)]
    network.impose(cut)
    assert not comes_back(to_b, b"held", within_s=0.2)
    network.lift(cut)
    to_b.settimeout(DEADLINE_S)
    assert to_b.recv(4) == b"held"


def test_a_rule_about_others_does_not_hold(network: ChaosNetwork, to_b: socket.socket) -> None:
    network.impose([Rule(frozenset("c"), None, passes=False), Rule(None, frozenset("c"), passes=False)])
    assert comes_back(to_b, b"as ever")


def test_a_cut_hides_the_end_of_a_connection(network: ChaosNetwork) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, _, door = network.address("b", server.getsockname()[1]).rpartition(":")
        cut = [Rule(frozenset("b"), None, passes=False)]
        with socket.create_connection((host, int(door)), timeout=DEADLINE_S) as caller:
            there, _ = server.accept()
            network.impose(cut)
            there.close()
            caller.settimeout(0.2)
            with pytest.raises(TimeoutError):
                caller.recv(1)
            network.lift(cut)
            assert ends(caller)


def test_slow_and_spoilt(network: ChaosNetwork, to_b: socket.socket) -> None:
    slow = [Rule(frozenset("a"), None, bytes_per_s=100_000)]
    network.impose(slow)
    began_s = time.monotonic()
    assert comes_back(to_b, bytes(20_000))
    assert time.monotonic() - began_s >= 0.2
    network.lift(slow)
    network.impose([Rule(None, frozenset("b"), flips=1.0)])
    assert not comes_back(to_b, bytes(100))


def test_nobody_behind_the_door(network: ChaosNetwork) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    host, _, door = network.address("b", port).rpartition(":")
    with socket.create_connection((host, int(door)), timeout=DEADLINE_S) as caller:
        assert ends(caller)


def test_a_reset_ends_connections_and_a_shut_door_refuses_them(network: ChaosNetwork, to_b: socket.socket) -> None:
    door = to_b.getpeername()[:2]
    assert comes_back(to_b, b"before")
    network.reset("b")
    assert ends(to_b)
    with socket.create_connection(door, timeout=DEADLINE_S) as again:
        assert comes_back(again, b"again")
        network.shut("b")
        assert ends(again)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(door, timeout=DEADLINE_S)
    network.reopen("b")
    with socket.create_connection(door, timeout=DEADLINE_S) as after:
        assert comes_back(after, b"after")


def test_a_filtered_peer_is_not_reached_and_says_nothing(network: ChaosNetwork, to_b: socket.socket) -> None:
    door = to_b.getpeername()[:2]
    assert comes_back(to_b, b"before")
    network.filter("b")
    assert ends(to_b)
    with pytest.raises(TimeoutError):
        socket.create_connection(door, timeout=0.5)
    network.reopen("b")
    with socket.create_connection(door, timeout=DEADLINE_S) as after:
        assert comes_back(after, b"after")


LISTENS = """
import socket
with socket.create_server(("127.0.0.1", {port})) as server:
    print("listens", flush=True)
    for _ in range(2):
        print(server.accept()[0].recv(9).decode(), flush=True)
"""
SAYS = "import socket; socket.create_connection(('127.0.0.1', {port}), {patience}).sendall(b'{word}')"


def test_in_namespaces_everybody_has_a_door_to_all_others() -> None:
    network, ports = ChaosNetwork(seed=1, apart=True), dict(zip("abc", (4001, 4002, 4003), strict=True))
    try:
        addresses = {name: network.address(name, port) for name, port in ports.items()}
        assert addresses == {name: f"127.0.0.1:{port}" for name, port in ports.items()}
        server = [*network.inside("b"), sys.executable, "-c", LISTENS.format(port=ports["b"])]
        with subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as b:
            assert b.stdout is not None
            assert b.stdout.readline() == "listens\n"
            for name in "ac":
                said = SAYS.format(port=ports["b"], patience=DEADLINE_S, word=name)
                subprocess.run([*network.inside(name), sys.executable, "-c", said], check=True)
                assert b.stdout.readline() == f"{name}\n"
    except ResourceError as error:
        pytest.skip(str(error))
    finally:
        network.close()


# ---------------------------------------------------------------- the verdict


class Story:
    """Versions that two peers tell of, 10 s and 100 tokens of each counted peer apart."""

    def __init__(self, directory: Path) -> None:
        ended = SimulationProcess("nobody", "this", [], directory / "log.txt", 1)
        ended.wait()
        self.a, self.b = (ChaosLife(name, ended, directory, -1.0, 0) for name in "ab")
        self.tokens = 0
        for life in (self.a, self.b):
            life.events.append({"kind": "view", "time": 0.0, "version": 1, "joined": ["a", "b"], "left": []})

    def version(self, number: int, counted: str) -> None:
        self.tokens += 100 * len(counted) if number > 1 else 0
        for life in (self.a, self.b):
            if life.name in counted:
                common = {"kind": "version", "time": 10.0 * (number - 1), "version": number, "tokens": self.tokens}
                life.events.append({**common, "members": ["a", "b"], "counted": list(counted), "own": True})

    def share(self, *faults: DrillFault) -> dict[str, float]:
        return throughput([self.a, self.b], faults, quiet_until_s=20.0, ended_s=50.0)


@pytest.fixture
def told(tmp_path: Path) -> Story:
    made = Story(tmp_path)
    for number in (1, 2, 3, 4):
        made.version(number, "ab")
    return made


def test_a_stop_is_time_that_nobody_had(told: Story) -> None:
    told.b.stops.append((30.0, 40.0))
    told.version(5, "a")
    told.version(6, "ab")
    found = told.share()
    assert found["tokens_per_s_and_peer"] == 10.0
    assert (found["present_s"], found["absent_s"]) == (60.0, 10.0)
    assert found["throughput_share"] == 1.0


def test_time_cut_off_and_what_was_trained_in_it_both_do_not_count(told: Story) -> None:
    for at_s, tokens in ((29.0, 290), (35.0, 350), (41.0, 410)):
        told.b.events.append({"kind": "progress", "time": at_s, "tokens": tokens})
    told.version(5, "a")
    told.version(6, "ab")
    told.b.events[-1]["tokens"] += 60  # what it trained while it was cut off is counted later
    told.a.events[-1]["tokens"] += 60
    found = told.share(DrillFault("cut off", ("b",), 30.0, 40.0, cut=("b",)))
    assert (found["absent_s"], found["absent_tokens"]) == (10.0, 60)
    assert found["throughput_share"] == 1.0


def test_a_death_takes_what_was_not_committed_and_no_more(told: Story) -> None:
    told.b.ending, told.b.ended_s = "killed", 35.0
    told.version(5, "a")
    told.version(6, "a")
    found = told.share()
    assert (found["present_s"], found["victims_s"]) == (40.0, 5.0)
    assert found["throughput_share"] == 1.0


def test_what_survivors_lose_shows(told: Story) -> None:
    told.version(6, "ab")  # in 20 s instead of 10
    assert told.share()["throughput_share"] == pytest.approx(2 / 3, abs=1e-4)


@pytest.mark.parametrize(
    ("voters", "spare"), [("a", 0), ("ab", 0), ("abc", 1), ("abd", 0), ("abcd", 0), ("abcde", 0), ("", -1)]
)
def test_no_voter_is_taken_whose_vote_is_needed(
    voters: str, spare: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drill in which the only voter died waited for a person, and none was there. Of `voters` a, b and c are well."""
    seen = {"a": frozenset("abc"), "b": frozenset(voters)}
    monkeypatch.setattr(drill, "voters_in", lambda folder: seen.get(folder.name, frozenset("abc")))
    ended = SimulationProcess.__new__(SimulationProcess)
    assert drill.spare_votes([ChaosLife(name, ended, tmp_path / name, -1.0, 0) for name in "abc"]) == spare
    assert drill.spare_votes([]) == 0


def test_no_port_is_given_twice() -> None:
    """One drill in 360 with 8 peers ended at its start: a port was taken by a peer that did not listen yet."""
    ports = [free_port() for _ in range(500)]
    assert len(set(ports)) == len(ports)


def test_the_quiet_part_lasts_for_two_versions(tmp_path: Path) -> None:
    """One has no duration: on a slow machine the rate was divided by it."""
    told = Story(tmp_path)
    assert not has_rate([told.a, told.b], 2)
    told.version(1, "ab")
    assert not has_rate([told.a, told.b], 2)
    told.version(2, "ab")
    assert has_rate([told.a, told.b], 2)


def test_recovery_by_kind() -> None:
    faults = [DrillFault("stop", ("a",), 10.0, 20.0, 23.0), DrillFault("stop", ("b",), 30.0, 35.0)]
    chain = [SeenVersion(number, 4.0 * number, 0, (), ()) for number in range(20)]
    row = by_kind(faults, chain)["stop"]
    assert (row["faults"], row["next_commit_s"], row["longest_next_commit_s"], row["back_s"]) == (2, 2.0, 2.0, 3.0)


# ---------------------------------------------------------------- all of it


def of_short_rounds(contract: Path) -> Path:
    contract.write_text((ROOT / "configs" / "chaos.toml").read_text().replace("steps = 100", "steps = 8"))
    return contract


@pytest.mark.usefixtures("warm_peers")
@pytest.mark.slow
def test_a_short_drill_violates_nothing(tmp_path: Path) -> None:
    """Three peers, rounds of half a second, a fault every 4 s. Longer: `scripts/chaos`."""
    contract = of_short_rounds(tmp_path / "contract.toml")
    options = DrillOptions(
        contract, tmp_path / "peers", 3, 0.75, quiet_s=5.0, seed=2, step_s=0.05, every_s=(3.0, 5.0), clean=False
    )
    result = run_drill(options, lambda text: None)
    assert result["violation_texts"] == []
    assert result["faults"] >= 5
    assert result["versions"] >= LEAST_VERSIONS


@pytest.mark.slow
def test_a_short_drill_in_namespaces_violates_nothing(tmp_path: Path) -> None:
    """Three peers behind forwarders to each other's loopbacks, as behind `ssh -L`. `scripts/chaos --namespaces`."""
    contract = of_short_rounds(tmp_path / "contract.toml")
    options = DrillOptions(
        contract,
        tmp_path / "peers",
        3,
        0.25,
        quiet_s=1.0,
        seed=0,  # whose first fault is a filter
        step_s=0.05,
        every_s=(3.0, 4.0),  # time for more than a version on a slow machine
        clean=False,
        apart=True,
    )
    try:
        result = run_drill(options, lambda text: None)
    except ResourceError as error:
        pytest.skip(str(error))
    assert result["violation_texts"] == []
    assert "filtered" in result["by_kind"]
    assert result["faults"] >= 3
    assert result["versions"] >= LEAST_VERSIONS


@pytest.mark.usefixtures("warm_peers")
@pytest.mark.slow
def test_under_async_nobody_waits_for_a_stopped_peer(tmp_path: Path) -> None:
    """Real processes, rounds of 4 s: the first minute of `scripts/chaos --absences`, with a stop of 8 s."""
    site = ("timeouts.heartbeat_s=0.3", "timeouts.suspect_s=2.0", "timeouts.stall_s=2.0")
    scale = AbsenceScale(steps=40, stop_s=8.0, site=site)
    lines: list[str] = []
    result = run_absences(ROOT / "configs" / "chaos.toml", tmp_path, scale, ["stop"], lines.append)
    assert not result["violations"]
    (stopped,) = result["rows"]
    assert stopped["longest_wait_s"] < 1.0, lines
    assert stopped["versions"] >= 2
    assert stopped["tokens"] > 0
