"""The peers of a chaos drill: processes to kill, stop, bring back, ask to leave; the events of each life."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from diloco.base import failpoints
from diloco.base.clock import monotonic_s, unix_s
from diloco.base.errors import DilocoError, ResourceError, UsageError
from diloco.observe.event_log import EventLine, read_on
from diloco.simulate.chaos.network import ChaosNetwork
from diloco.simulate.local.processes import SimulationProcess, end_all

START_S = 120.0
"""Seconds for a process to start listening, on a machine that may be busy."""
POLL_S = 0.05
PORTS = range(20_000, 30_000)
"""Below those that Linux gives to outgoing connections, so that a port is still free when its peer comes back."""
_UNUSED = iter(random.sample(PORTS, len(PORTS)))
"""A peer listens some time after its port was chosen: until then another might choose the same."""


@dataclass
class ChaosLife:
    """One process of a peer in a chaos drill, from start to end. Times are unix seconds, as in its events."""

    name: str
    child: SimulationProcess
    directory: Path
    began_s: float
    offset: int
    """Place of its first event in the file, which earlier lives may have begun."""
    armed: str = ""
    """Failpoints at which it may kill itself."""
    ending: str = ""
    """`killed`, `left`, or empty while it should live."""
    ended_s: float = 0.0
    stops: list[tuple[float, float]] = field(default_factory=list)
    """From when to when it was stopped; to 0 while it is."""
    events: list[EventLine] = field(default_factory=list)

    @property
    def lives(self) -> bool:
        """Whether this process of the chaos drill runs and should."""
        return not self.ending and self.child.exit_code is None

    @property
    def stopped(self) -> bool:
        """Whether the chaos drill has stopped the process (SIGSTOP)."""
        return bool(self.stops) and not self.stops[-1][1]

    def of(self, kind: str) -> list[EventLine]:
        """The events of one kind in this life of the chaos drill, so far."""
        return [event for event in self.events if event["kind"] == kind]

    @property
    def version(self) -> EventLine | None:
        """The latest "version" event that this process of the chaos drill wrote."""
        return next((event for event in reversed(self.events) if event["kind"] == "version"), None)

    @property
    def counted(self) -> bool:
        """Whether the latest version counts this peer of the chaos drill."""
        version = self.version
        return version is not None and bool(version["own"])

    def read(self) -> None:
        """Read a drilled peer's new events, for the last time at its death: a later life may go on in the same file."""
        lines, self.offset = read_on(self.directory / "events.jsonl", self.offset)
        self.events += lines


class ChaosFleet:
    """The peers of a chaos drill, in `directory/NAME`. With a network every peer has an address in it."""

    def __init__(
        self,
        contract: Path,
        overrides: Sequence[str],
        directory: Path,
        site: Sequence[str],
        network: ChaosNetwork | None,
    ) -> None:
        """`overrides`: of the contract, for the founder; `site`: of every peer's site (`section.key=value`)."""
        self.contract, self.overrides, self.directory, self.site = contract, overrides, directory, site
        self.network = network
        self.own: Mapping[str, Sequence[str]] = {}
        """More settings of a peer's site, by its name."""
        self.lives: list[ChaosLife] = []
        self._ports: dict[str, tuple[int, str]] = {}

    # ------------------------------------------------------------ who is there

    def living(self) -> list[ChaosLife]:
        """Lives in the chaos drill whose process runs."""
        return [life for life in self.lives if life.lives]

    def life(self, name: str) -> ChaosLife:
        """The latest life of a peer in the chaos drill."""
        return next(life for life in reversed(self.lives) if life.name == name)

    def poll(self) -> None:
        """Read new events of the drill's peer processes. Raises DilocoError when one ended unasked."""
        for life in self.lives:
            if life.ending != "killed":
                life.read()
            if not life.ending and life.child.exit_code not in (None, 0, -signal.SIGKILL if life.armed else 0):
                raise life.child.failure()

    def until(self, condition: Callable[[], bool], what: str, deadline_s: float) -> None:
        """Poll the drill's peers until the condition holds. Raises DilocoError after `deadline_s`."""
        end_s = monotonic_s() + deadline_s
        while not condition():
            if monotonic_s() > end_s:
                raise DilocoError(f"not within {deadline_s:g} s: {what}", f"see the logs below {self.directory}")
            self.poll()
            time.sleep(POLL_S)

    # ------------------------------------------------------------ coming

    def found(self, name: str, resume: bool = False) -> ChaosLife:
        """Start the drill's first peer: it founds, or resumes its checkpoints. Returns once others can join."""
        how = itertools.chain([str(self.contract)], *(("--set", text) for text in self.overrides))
        life = self._start(name, ["--resume", str(self.directory / name)] if resume else list(how))
        self.until(lambda: (life.directory / "peer.json").exists(), f"{name} listens", START_S)
        return life

    def join(self, name: str, *through: ChaosLife, resume: bool = False, armed: str = "") -> ChaosLife:
        """Start a peer process of the drill, `through` any of these. `resume`: from its own checkpoints, if it has any;
        else it comes back with an empty folder.

        `armed`: failpoints, see `diloco.base.failpoints`.
        """
        folder = self.directory / name
        cards = [json.loads((member.directory / "peer.json").read_text()) for member in through]
        how = ["--join", ",".join(card["ticket"] for card in cards)]
        if resume and any((folder / "checkpoints").glob("v*")):
            how += ["--resume", str(folder)]
        elif folder.exists():
            self._put_aside(folder)
        return self._start(name, how, armed)

    def _put_aside(self, folder: Path) -> None:
        """Rename the folder of a drilled peer's earlier lives: their ledgers are still audited."""
        named = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(1))
        aside = next(path for path in named if not path.exists())
        folder.rename(aside)
        for life in self.lives:
            life.directory = aside if life.directory == folder else life.directory

    def _start(self, name: str, how: Sequence[str], armed: str = "") -> ChaosLife:
        directory = self.directory / name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "peer.json").unlink(missing_ok=True)
        events = directory / "events.jsonl"
        written = events.read_bytes().rfind(b"\n") + 1 if events.exists() else 0
        named = [] if "--resume" in how else ["--name", name]
        site = [*self.site, *self.own.get(name, ()), *self._addresses(name)]
        inside = self.network.inside(name) if self.network is not None else ()
        arguments = ["peer", *how, *named, "--dir", str(directory), *itertools.chain(*(("--set", it) for it in site))]
        log = directory / f"log-{sum(life.name == name for life in self.lives)}.txt"
        child = SimulationProcess(name, "diloco", arguments, log, 1, {failpoints.VARIABLE: armed}, inside)
        life = ChaosLife(name, child, directory, unix_s(), written, armed)
        if self.network is not None:
            self.network.belongs(life.child.pid, name)
        self.lives.append(life)
        return life

    def _addresses(self, name: str) -> list[str]:
        """Settings of a drilled peer's addresses, which stay the same when it comes back."""
        if self.network is None:
            return []
        if name not in self._ports:
            port = free_port()
            self._ports[name] = port, self.network.address(name, port)
        port, address = self._ports[name]
        return [f"network.listen=127.0.0.1:{port}", f"network.advertise={address}"]

    # ------------------------------------------------------------ going

    def kill(self, life: ChaosLife) -> None:
        """End a drilled peer's process with SIGKILL."""
        life.child.send(signal.SIGKILL)
        self.died(life)

    def died(self, life: ChaosLife) -> None:
        """Note that a life was killed, by the drill or by itself at a failpoint."""
        life.child.wait()
        life.read()
        life.ending, life.ended_s = "killed", unix_s()

    def stop(self, life: ChaosLife) -> None:
        """Freeze a drilled peer's process with SIGSTOP."""
        life.child.send(signal.SIGSTOP)
        life.stops.append((unix_s(), 0.0))

    def resume(self, life: ChaosLife) -> None:
        """End the stop of a drilled peer's process (SIGCONT)."""
        began_s, _ = life.stops.pop()
        life.stops.append((began_s, unix_s()))
        life.child.send(signal.SIGCONT)

    def ask_to_leave(self, life: ChaosLife) -> None:
        """Ask a drilled peer to leave in good order."""
        life.ending, life.ended_s = "left", unix_s()
        life.child.ask_to_leave()

    def end(self) -> None:
        """End all peer processes of the chaos drill."""
        for life in self.lives:
            life.child.send(signal.SIGCONT)
        end_all([life.child for life in self.lives])


def free_port() -> int:
    """A TCP port for a peer of a chaos drill, given once, which the system gives to nobody by chance. Raises
    ResourceError."""
    for port in itertools.islice(_UNUSED, 100):
        with socket.socket() as attempt:
            try:
                attempt.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ResourceError("none of 100 ports is free", "look at what listens on this machine")


def empty_folder(directory: Path) -> None:
    """Empty the folder of an earlier chaos drill, or make one. Raises UsageError where it holds anything else, and
    ResourceError."""
    mark = directory / "chaos.json"
    if directory.exists() and any(directory.iterdir()):
        if not mark.exists():
            raise UsageError(f"{directory} is not empty, and not from an earlier run", "choose another --out")
        shutil.rmtree(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        mark.write_text(json.dumps({"pid": os.getpid()}) + "\n")
    except OSError as error:
        raise ResourceError(f"cannot write to {directory}: {error.strerror}", "choose another --out") from error


class SeenVersion(NamedTuple):
    """A version in a chaos drill, as the first peer that applied it reports it."""

    version: int
    at_s: float
    tokens: int
    """Tokens of the whole run."""
    members: tuple[str, ...]
    counted: tuple[str, ...]


def commits(lives: Sequence[ChaosLife]) -> list[SeenVersion]:
    """All versions in the events of these lives of a chaos drill, in order."""
    first: dict[int, SeenVersion] = {}
    events = [event for life in lives for event in life.of("version")]
    for event in sorted(events, key=lambda event: float(event["time"])):
        seen = SeenVersion(
            event["version"], float(event["time"]), event["tokens"], tuple(event["members"]), tuple(event["counted"])
        )
        first.setdefault(seen.version, seen)
    return [first[version] for version in sorted(first)]
