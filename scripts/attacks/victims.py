"""A run of real peers on loopback that is attacked, and what an attack is."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from diloco.identity.keys import Keys, keys_of
from diloco.observe.event_log import EventLine, read_lines
from diloco.simulate.local.processes import SimulationProcess, end_all
from scripts.environment import our_code

START_S = 90.0
"""For processes to start, and for the first versions."""
CALM_S = 10.0
"""Seconds in which versions are counted, before an attack and during it."""
POLL_S = 0.05
PACE = ("device.step_s=0.05",)
"""Inner steps take as long: else versions of a model this small show how busy the attacker keeps this machine."""
DESCRIPTORS = 1024
"""Open files of a peer that is attacked, at most: shells have this soft limit, and here it is the hard one, too."""

CONTRACT = """
[run]
name = "attacked"
total_tokens = 1_000_000_000
[membership]
start_peers = {peers}
match_deadline_s = 5.0
[data]
source = "stdlib"
sequence_length = 32
[model]
layers = 1
dim = 32
heads = 2
[inner]
steps = 8
batch_size = 4
lr = 2e-3
warmup = 0.0
[eval]
every_versions = 0
"""

By = Literal["outsider", "member", "operator", "giver", "user"]


class NotHeld(Exception):
    """The attack had an effect that it should not have."""


@dataclass
class Row:
    """Outcome of an attack."""

    attack: str
    by: By
    held: bool = False
    versions_before: int | None = None
    """Versions of the run in `CALM_S` before the attack; None where there is no run."""
    versions_during: int | None = None
    memory_mb: float | None = None
    """By how much the largest peer grew."""
    loss: float | None = None
    said: str = ""
    """Words of the attacked, or why it did not hold."""


@dataclass(frozen=True)
class Attack:
    """An attack by name. `act` gets the run, or a folder where there is none, and returns what was said; it raises
    NotHeld where it had an effect."""

    name: str
    by: By
    act: Callable[[Victims], str] | Callable[[Path], str]
    peers: int = 0
    """Peers of the run; 0: there is none."""
    slower: float = 0.5
    """Share of the versions that the attack may cost."""
    short: bool = True
    """It belongs to the short form, of the tests."""
    settings: tuple[str, ...] = ()
    """More of the contract, as lines of `--set`: "section.name=value"."""


class Victims:
    """Real peers of one run: `diloco peer`, started through the command line, with at most 1,024 open files.

    Without `secret` anybody may join them (`--insecure`). With `keyed` this user may, by a key in the run's folder.
    """

    def __init__(
        self, folder: Path, peers: int, settings: Sequence[str] = (), secret: str = "", keyed: bool = False
    ) -> None:
        self.folder, self.secret, self.number = folder, secret, peers
        self.variables = {"DILOCO_SECRET": secret, "XDG_STATE_HOME": str(folder / "state"), **our_code()}
        self._insecure = () if secret or keyed else ("--insecure",)
        self.peers: list[SimulationProcess] = []
        self.row: Row | None = None
        contract = folder / "contract.toml"
        contract.write_text(CONTRACT.format(peers=peers))
        self._launch = ["bash", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "bash"]
        sets = [word for line in settings for word in ("--set", line)]
        try:
            self.start("p0", str(contract), *sets)
            for number in range(1, peers):
                self.join(f"p{number}")
            self.until(lambda: min(map(self.version, self.names)) >= 1, "the first version")
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------ peers

    @property
    def names(self) -> list[str]:
        """Names of the peers that were started."""
        return [peer.name for peer in self.peers]

    def start(self, name: str, *how: str, module: str = "diloco", words: Sequence[str] = ("peer",)) -> None:
        """Start a peer and wait until it listens. `module`, `words`: another program that is one, and its command."""
        folder = self.folder / name
        folder.mkdir()
        own = ("--name", name, "--dir", str(folder), "--set", "network.listen=127.0.0.1:0")
        arguments = [*words, *how, *own, *self._insecure]
        log = self.folder / f"{name}.txt"
        peer = SimulationProcess(name, module, arguments, log, 1, self.variables, self._launch)
        self.peers.append(peer)
        self.until(lambda: bool(self.events(name, "listening")) or peer.exit_code is not None, f"{name} listens")

    def join(self, name: str, *how: str) -> None:
        """Start a peer that joins through the first one."""
        self.start(name, "--join", self.ticket("p0"), *how)

    def join_liar(self, name: str, lie: str, *how: str) -> None:
        """Start a member that lies (`scripts.attacks.liar`), and joins through the first one."""
        words = (lie, "peer")
        self.start(name, "--join", self.ticket("p0"), *how, module="scripts.attacks.liar", words=words)

    def ticket(self, name: str) -> str:
        return str(self.events(name, "listening")[-1]["ticket"])

    def address(self, name: str) -> str:
        return self.ticket(name).partition("/")[0]

    @property
    def keys(self) -> Keys:
        """Keys of all who know the run's secret."""
        return keys_of(self.secret)

    # ------------------------------------------------------------ what is seen of them

    def events(self, name: str, kind: str) -> list[EventLine]:
        return [event for event in read_lines(self.folder / name / "events.jsonl") if event["kind"] == kind]

    def version(self, name: str) -> int:
        """The latest version that a peer closed."""
        return max((int(event["version"]) for event in self.events(name, "version")), default=0)

    def loss(self, name: str) -> float:
        """The training loss of a peer's latest version."""
        return float(self.events(name, "version")[-1]["loss"])

    def memory_mb(self) -> float:
        """Memory of the largest peer."""
        return max(_resident_mb(peer.pid) for peer in self.peers if peer.exit_code is None)

    def check_alive(self) -> None:
        """Raises NotHeld where a peer has ended."""
        for peer in self.peers:
            if peer.exit_code is not None:
                raise NotHeld(str(peer.failure()))

    def versions_in(self, seconds: float, name: str = "p0") -> int:
        """Versions that close in so many seconds."""
        first, end_s = self.version(name), time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.check_alive()
            time.sleep(POLL_S)
        return self.version(name) - first

    def until(self, condition: Callable[[], bool], what: str, deadline_s: float = START_S) -> None:
        """Wait for a condition. Raises NotHeld after `deadline_s`, or when a peer has ended."""
        end_s = time.monotonic() + deadline_s
        while not condition():
            self.check_alive()
            if time.monotonic() > end_s:
                raise NotHeld(f"not within {deadline_s:g} s: {what}")
            time.sleep(POLL_S)

    def audit(self) -> None:
        """Raises NotHeld where `diloco audit` finds something in the folders of all."""
        folders = [str(self.folder / name) for name in self.names]
        command = [sys.executable, "-m", "diloco", "audit", *folders]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NotHeld(f"diloco audit: {done.stdout}{done.stderr}")

    def close(self) -> None:
        end_all(self.peers)


def _resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def outcome(attack: Attack, folder: Path) -> Row:
    """Row of an attack, on a run of its own in that folder."""
    row = Row(attack.name, attack.by)
    try:
        if not attack.peers:
            row.said = attack.act(folder)  # type: ignore[arg-type]
        else:
            with closing(Victims(folder, attack.peers, attack.settings)) as victims:
                _watched(attack, victims, row)
        row.held = True
    except NotHeld as error:
        row.said = str(error)
    return row


def _watched(attack: Attack, victims: Victims, row: Row) -> None:
    """Versions, memory and loss of a run before and during an attack."""
    victims.row = row
    row.versions_before, memory_mb = victims.versions_in(CALM_S), victims.memory_mb()
    row.said = attack.act(victims)  # type: ignore[arg-type]
    if row.versions_during is None:
        row.versions_during = victims.versions_in(CALM_S)
    victims.check_alive()
    row.memory_mb, row.loss = round(victims.memory_mb() - memory_mb, 1), victims.loss("p0")
    if row.versions_during < (1 - attack.slower) * row.versions_before:
        raise NotHeld(f"{row.versions_during} versions in place of {row.versions_before}: {row.said}")


def end_on_sigterm() -> None:
    """SIGTERM ends the attack as Ctrl-C does: peers are ended, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("attack: stopped"))
