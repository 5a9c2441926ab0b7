"""Peers that leave, join and die during long rounds, on thin links: real processes in network namespaces. Needs root.

    scripts/bench-membership                      all scenes, 25 minutes, nearly all of it waiting
    scripts/bench-membership --only leave,join
    scripts/bench-membership --round-s 10         short: for a look

Three peers behind links of 10 Mbit/s, in rounds of two minutes (`device.step_s`), with 0.4M parameters in fp32. The
length of a round says nothing of who may come and go: views are commits of their own.

    join            a fourth peer: seconds until it has copied the state, and from then until it is in the view
    leave           one leaves, then the next: seconds until each is out of the view and its process has ended
    leave-two       two of three leave at once
    joiners-killed  four joiners, killed before a commit names one of them voter
    named-killed    the same, killed as soon as a commit names one

In each scene those that stay close the next version, and `diloco audit` finds nothing.
"""

from __future__ import annotations

import argparse
import json
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from diloco.accounts.left_off import voters_in
from diloco.base.errors import DilocoError
from diloco.config.site import TimeoutsSection
from diloco.observe.event_log import EventLine, read_lines
from diloco.run.operate import ask_status
from diloco.simulate.local.processes import SimulationProcess, end_all
from scripts.bench.netns import NotPermitted, Star, congestion_controls
from scripts.environment import our_code

LINK_MBIT = 10.0
ROUND_S = 120.0
STEPS = 50
PORT = 4000
MAX_PEERS = 7
START_S = 60.0
"""For processes to start, and for a commit of the view."""
JOIN_S = 2.0
"""A joiner that has copied the state is in the view within it."""
POLL_S = 0.05
WATCH_S = 0.1

SECRET = {"DILOCO_SECRET": secrets.token_hex(16)}

CONTRACT = """
[run]
name = "bench-membership"
total_tokens = 1_000_000_000
[membership]
start_peers = {peers}
match_deadline_s = {round_s}
round_deadline_s = {longest_s}
[data]
source = "stdlib"
sequence_length = 32
[model]
layers = 1
dim = 160
heads = 2
[inner]
steps = {steps}
batch_size = 1
lr = 1e-3
schedule = "constant"
[codec]
name = "fp32"
[sync]
fragments = 1
[eval]
every_versions = 0
"""


class SceneError(Exception):
    """The wait of a scene was in vain."""


@dataclass
class Row:
    """Outcome of a scene."""

    scene: str
    held: bool
    seconds: dict[str, float] = field(default_factory=dict)
    said: str = ""


class Peer:
    """A `diloco peer` in a namespace of its own."""

    def __init__(self, name: str, folder: Path, how: Sequence[str], inside: Sequence[str], address: str) -> None:
        self.name, self.folder = name, folder / name
        self.folder.mkdir()
        (self.folder / "views.jsonl").touch()
        self.began_s = time.time()
        arguments = ["peer", *how, "--name", name, "--dir", str(self.folder)]
        arguments += ["--set", f"network.listen={address}:{PORT}"]
        self.child = SimulationProcess(name, "diloco", arguments, self.folder / "log.txt", 1, SECRET, inside)
        watch = ["--watch", f"{address}:{PORT}", str(self.folder / "views.jsonl")]
        log = self.folder / "watch.txt"
        self.watch = SimulationProcess(
            name, "scripts.bench.membership", watch, log, 1, {**SECRET, **our_code()}, inside
        )

    def events(self, kind: str) -> list[EventLine]:
        return [event for event in read_lines(self.folder / "events.jsonl") if event["kind"] == kind]

    @property
    def version(self) -> int:
        return max((int(event["version"]) for event in self.events("version")), default=0)

    def views(self) -> list[tuple[float, set[str], set[str]]]:
        """Its answers to `status`: since when (seconds since 1970) who is in the view, and who at the door."""
        lines = (self.folder / "views.jsonl").read_text().splitlines()
        return [(at_s, set(inside), set(outside)) for at_s, inside, outside in map(json.loads, lines)]

    def in_view(self) -> set[str]:
        """Members of the view by its last answer."""
        views = self.views()
        return views[-1][1] if views else set()


class Scene:
    """Peers of one scene, from the founding to the audit."""

    def __init__(self, folder: Path, star: Star, round_s: float) -> None:
        self.folder, self.star, self.round_s = folder, star, round_s
        self.peers: dict[str, Peer] = {}
        self.row = Row(folder.name, False)

    def found(self, peers: int) -> list[Peer]:
        """So many peers, of which at least two vote."""
        contract = self.folder / "contract.toml"
        words = {"peers": peers, "steps": STEPS, "round_s": self.round_s, "longest_s": 5 * self.round_s}
        contract.write_text(CONTRACT.format(**words))
        names = "abc"[:peers]
        group = [self.start("a", str(contract))]
        group += [self.join(name) for name in names[1:]]
        self.until(lambda: all(peer.version >= 1 for peer in group), "version 1", 3 * self.round_s)
        self.until(lambda: voters_in(group[0].folder) == set(names), f"{names} vote", 4 * self.round_s)
        return group

    def start(self, name: str, *how: str) -> Peer:
        place, site = len(self.peers), ["--set", f"device.step_s={self.round_s / STEPS:g}"]
        inside, address = self.star.inside(place), self.star.address(place)
        peer = self.peers[name] = Peer(name, self.folder, [*how, *site], inside, address)
        self.until(lambda: bool(peer.events("listening")), f"{name} listens", START_S)
        return peer

    def join(self, name: str) -> Peer:
        member = next(peer for peer in self.peers.values() if peer.child.exit_code is None)
        return self.start(name, "--join", member.events("listening")[-1]["ticket"])

    def until(self, condition: Callable[[], bool], what: str, deadline_s: float, *going: Peer) -> None:
        """Wait for a condition. Raises SceneError after `deadline_s`, or when a peer that is not `going` has ended."""
        end_s = time.monotonic() + deadline_s
        while not condition():
            for peer in self.peers.values():
                left = peer in going or bool(peer.events("end"))
                if peer.child.exit_code not in (None, -signal.SIGKILL) and not left:
                    raise SceneError(f"{peer.child.failure()}")
            if time.monotonic() > end_s:
                raise SceneError(f"not within {deadline_s:g} s: {what}")
            time.sleep(POLL_S)

    def leave(self, leavers: Sequence[Peer], staying: Sequence[Peer]) -> None:
        """They are asked to leave at once: how long until each is out of the view, and its process has ended."""
        limit_s, began_s, names = TimeoutsSection().leave_s, time.time(), {peer.name for peer in leavers}
        for peer in leavers:
            peer.child.ask_to_leave()
        ended: dict[str, float] = {}

        out: dict[str, float] = {}

        def gone() -> bool:
            for peer in leavers:
                if peer.child.exit_code is not None:
                    ended.setdefault(peer.name, time.time() - began_s)
                if not any(peer.name in member.in_view() for member in staying):
                    out.setdefault(peer.name, time.time() - began_s)
            return len(ended) == len(out) == len(leavers)

        self.until(gone, f"{names} are gone", 4 * limit_s, *leavers)
        for name in sorted(names):
            self.row.seconds |= {f"{name}_out_of_view": round(out[name], 1), f"{name}_ended": round(ended[name], 1)}
        longest_s = max(*out.values(), *ended.values())
        if longest_s > limit_s:
            raise SceneError(f"gone after {longest_s:.1f} s, and leave_s is {limit_s:g} s")

    def goes_on(self, staying: Sequence[Peer], versions: int = 1) -> None:
        """Those that stay close this round, and the audit of all folders finds nothing."""
        last, began_s = max(peer.version for peer in staying), time.monotonic()
        deadline_s = (versions + 1) * self.round_s + START_S
        self.until(lambda: all(peer.version >= last + versions for peer in staying), "the next version", deadline_s)
        self.row.seconds["next_version"] = round(time.monotonic() - began_s, 1)
        command = [sys.executable, "-m", "diloco", "audit", *(str(peer.folder) for peer in self.peers.values())]
        audit = subprocess.run(command, capture_output=True, text=True, check=False)
        if audit.returncode != 0:
            raise SceneError(f"diloco audit: {audit.stdout}{audit.stderr}")

    def end(self) -> None:
        end_all([process for peer in self.peers.values() for process in (peer.child, peer.watch)])


# ---------------------------------------------------------------- the scenes


def join(scene: Scene) -> None:
    group = scene.found(3)
    joiner = scene.join("d")
    scene.until(lambda: all("d" in peer.in_view() for peer in group), "d is in the view", START_S)
    heard_s, copied_s = (float(joiner.events(kind)[0]["time"]) for kind in ("copying", "state"))
    scene.row.seconds["copied"] = round(copied_s - heard_s, 2)
    for peer in group:
        in_view_s = next(at_s for at_s, inside, _ in peer.views() if "d" in inside)
        scene.row.seconds[f"in_view_of_{peer.name}"] = round(in_view_s - copied_s, 2)
    scene.goes_on([*group, joiner])
    if max(scene.row.seconds[f"in_view_of_{peer.name}"] for peer in group) > JOIN_S:
        raise SceneError(f"it took more than {JOIN_S:g} s")


def leave(scene: Scene) -> None:
    a, b, c = scene.found(3)
    scene.leave([a], [b, c])
    scene.leave([b], [c])
    scene.goes_on([c])


def leave_two(scene: Scene) -> None:
    a, b, c = scene.found(3)
    scene.leave([a, b], [c])
    scene.goes_on([c])


def joiners_killed(scene: Scene) -> None:
    group = scene.found(2)
    joiners = _four_joiners(scene, group)
    if voters_in(scene.peers["a"].folder) != {"a", "b"}:
        raise SceneError("a joiner votes already: the round is too short for this scene")
    _kill(joiners)
    scene.goes_on(group, versions=2)


def named_killed(scene: Scene) -> None:
    group = scene.found(2)
    joiners = _four_joiners(scene, group)
    names = {peer.name for peer in joiners}
    named = lambda: any(voters_in(peer.folder) & names for peer in group)  # noqa: E731
    scene.until(named, "a commit names one of them", 3 * scene.round_s + START_S)
    _kill(joiners)
    scene.goes_on(group, versions=2)


def _four_joiners(scene: Scene, group: Sequence[Peer]) -> list[Peer]:
    joiners = [scene.join(name) for name in "wxyz"]
    names = {peer.name for peer in joiners}
    scene.until(lambda: all(names <= peer.in_view() for peer in group), "all in the view", START_S)
    return joiners


def _kill(peers: Sequence[Peer]) -> None:
    for peer in peers:
        peer.child.send(signal.SIGKILL)
    for peer in peers:
        peer.child.wait()


SCENES: dict[str, Callable[[Scene], None]] = {
    "join": join,
    "leave": leave,
    "leave-two": leave_two,
    "joiners-killed": joiners_killed,
    "named-killed": named_killed,
}


def watch(address: str, path: Path) -> None:
    """Write the views of a peer to a file, until killed."""
    before: list[list[str]] = []
    with path.open("w") as file:
        while True:
            with suppress(DilocoError):  # it does not listen yet, or no longer
                peers = ask_status(address)["peers"]
                sides = [sorted(one["peer"] for one in peers if one["in_view"] is inside) for inside in (True, False)]
                if sides != before:
                    print(json.dumps([time.time(), *sides]), file=file, flush=True)
                    before = sides
            time.sleep(WATCH_S)


def main() -> int:
    options = parse()
    if options.watch:
        watch(options.watch[0], Path(options.watch[1]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bench-membership: stopped"))
    rows = []
    for name in options.only:
        row = play(name, options)
        rows.append(row)
        times = ", ".join(f"{what} {seconds:g} s" for what, seconds in row.seconds.items())
        print(f"{'held' if row.held else 'FAILED':7} {name:15} {times}{': ' * bool(row.said)}{row.said}", flush=True)
    if options.json:
        result: dict[str, Any] = {"round_s": options.round_s, "link_mbit": LINK_MBIT, "rows": [*map(asdict, rows)]}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(row.held for row in rows) else 1


def play(name: str, options: argparse.Namespace) -> Row:
    """One scene in namespaces of its own."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as ending:
        folder = (options.keep or Path(scratch)) / name
        folder.mkdir(parents=True)
        try:
            star = ending.enter_context(Star(MAX_PEERS, LINK_MBIT, 0.0, congestion_controls()[0]))
        except NotPermitted as error:
            sys.exit(f"error: no network namespaces: {error}\n  fix: run as root, where iproute2 is installed")
        scene = Scene(folder, star, options.round_s)
        ending.callback(scene.end)
        try:
            SCENES[name](scene)
            scene.row.held = True
        except SceneError as error:
            scene.row.said = str(error)
        return scene.row


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=_scenes, default=list(SCENES), help="some of the scenes, with commas")
    parser.add_argument("--round-s", type=float, default=ROUND_S, help="length of a round in seconds (120)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the peers' folders there")
    parser.add_argument("--watch", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    return parser.parse_args()


def _scenes(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in SCENES]:
        raise argparse.ArgumentTypeError(f"no scene {unknown[0]!r}: one of {', '.join(SCENES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
