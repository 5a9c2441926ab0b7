"""The time that a joiner takes to get in, and its cost for the others: real peers on loopback, a state of 64 MB.

    scripts/bench-join                   3 peers, then 3 joiners, one after the other
    scripts/bench-join --kill            1 joiner, and one of the members that serve it is killed half-way

A joiner copies anchor and momentum from all members and is in when a version's view includes it. Beside it stand the
tokens per second of the others in the rounds that the copy touched, and in the rounds before; and, because a busy
machine blurs those, the CPU seconds that a round took them. All members share one core and the joiner has another
(where there are two), as it would have its own machine; so each member serves at a third of the default for a core.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

PEERS = 3
DEADLINE_S = 120.0
WARM_ROUNDS = 8
KILL_BPS = 80e6
"""With `--kill` each member serves 10 MB/s, so that the copy takes 2 s and has a middle."""
KILL_SHARE = 0.4
STRIPE_BYTES = 16 * 2**20

CONTRACT = f"""
[run]
name = "bench-join"
total_tokens = 1_000_000_000
[membership]
start_peers = {PEERS}
[data]
sequence_length = 32
[model]            # 8.03M parameters: anchor and momentum in fp32 are 64 MB
layers = 8
dim = 288
heads = 4
[inner]
steps = 16
batch_size = 1
lr = 1e-4
[eval]
every_versions = 0
"""

Event = dict[str, Any]


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bench-join: stopped"))
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as ending:
        result = Bench(Path(scratch), ending, options).run()
    print(table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--joins", type=int, default=3, help="joiners, one after the other (3)")
    parser.add_argument("--kill", action="store_true", help="SIGKILL a serving member half-way")
    parser.add_argument("--serve-bps", type=float, help="network.serve_bps of the members (a third of a core's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    return parser.parse_args()


@dataclass
class Running:
    """A `diloco peer`."""

    name: str
    process: subprocess.Popen[bytes]
    directory: Path

    def events(self, kind: str) -> list[Event]:
        from diloco.observe.event_log import read_lines

        return [event for event in read_lines(self.directory / "events.jsonl") if event["kind"] == kind]

    def versions(self) -> list[Event]:
        return self.events("version")

    def first(self, kind: str) -> Event:
        """Its first event of a kind, waited for."""
        event: Event = wait(lambda: next(iter(self.events(kind)), None), f"{self.name}: {kind}", self)
        return event

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def wait(condition: Any, what: str, *needed: Running) -> Any:
    end_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < end_s:
        if value := condition():
            return value
        for peer in needed:
            if peer.process.poll() is not None:
                sys.exit(f"error: {peer.name} ended:\n{(peer.directory / 'log.txt').read_text()}")
        time.sleep(0.02)
    sys.exit(f"error: not within {DEADLINE_S:g} s: {what}")


class Bench:
    def __init__(self, scratch: Path, ending: ExitStack, options: argparse.Namespace) -> None:
        self.scratch = scratch
        self.ending = ending
        self.options = options
        from diloco.transport.pace import SERVE_BPS_PER_CORE

        self.serve_bps = options.serve_bps or (KILL_BPS if options.kill else SERVE_BPS_PER_CORE / PEERS)
        self.contract = scratch / "contract.toml"
        self.contract.write_text(CONTRACT)
        self.cpu_s: dict[int, float] = {}
        """CPU seconds that the members had used when a version closed."""

    def run(self) -> dict[str, Any]:
        members = [self.start("p0", 0, str(self.contract))]
        ticket = members[0].first("listening")["ticket"]
        members += [self.start(f"p{index}", 0, "--join", ticket) for index in range(1, PEERS)]
        parameters = members[0].first("start")["parameters"]
        joins = [self.join(members, f"j{index}") for index in range(1 if self.options.kill else self.options.joins)]
        before, during, cpu_before, cpu_during = (
            sum(join[key] for join in joins) / len(joins)
            for key in ("rounds_before_s", "rounds_during_s", "rounds_before_cpu_s", "rounds_during_cpu_s")
        )
        return {
            "state_bytes": 8 * parameters,
            "members": PEERS,
            "serve_bps": self.serve_bps,
            "seconds_to_view": median(join["seconds_to_view"] for join in joins),
            "copy_s": median(join["copy_s"] for join in joins),
            "throughput_share": round(before / during, 4),
            "throughput_share_by_cpu": None if self.options.kill else round(cpu_before / cpu_during, 4),
            "tokens_per_s_before": round(self.round_tokens() / before, 2),
            "tokens_per_s_during": round(self.round_tokens() / during, 2),
            "killed": self.options.kill,
            "joins": joins,
        }

    def round_tokens(self) -> int:
        from diloco.config.load import load_contract

        contract = load_contract(self.contract).value
        return contract.tokens_per_step * contract.steps_per_round

    def start(self, name: str, core: int, *how: str) -> Running:
        directory = self.scratch / name
        directory.mkdir()
        settings = ["device.threads=1", "storage.checkpoint_every=0", f"network.serve_bps={self.serve_bps}"]
        arguments = [option for setting in settings for option in ("--set", setting)]
        with (directory / "log.txt").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "diloco", "peer", *how, "--name", name, "--dir", str(directory), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(process.pid, {cores[min(core, len(cores) - 1)]})
        running = Running(name, process, directory)
        self.ending.callback(running.end)
        return running

    def join(self, members: list[Running], name: str) -> dict[str, Any]:
        """One joiner, from its first line to its goodbye."""
        watched = members[0]

        def including() -> Event | None:
            self.sample(watched, members)
            return next((event for event in watched.versions() if name in event["members"]), None)

        names = {member.name for member in members}
        steady = self.rounds_of(watched, members, names, WARM_ROUNDS)
        joiner = self.start(name, 1, "--join", watched.first("listening")["ticket"])
        began_s = wait(lambda: including() or next(iter(joiner.events("copying")), None), "a copy", joiner)["time"]
        if self.options.kill:
            self.kill_half_way(joiner, members[-1])
        copied = joiner.first("state")
        entered = wait(including, f"{name} is in the view", joiner, watched)
        self.sample(watched, members)
        rounds = watched.versions()
        at = {event["version"]: event["time"] for event in rounds}
        last_before = max(event["version"] for event in rounds if event["time"] < began_s)
        result = {
            "seconds_to_view": round(entered["time"] - began_s, 3),
            "copy_s": round(copied["time"] - began_s, 3),
            "received_bytes": copied["wire_bytes_received"],
            "rounds_before_s": per_version(at, steady, last_before),
            "rounds_during_s": per_version(at, last_before, entered["version"]),
            "rounds_before_cpu_s": per_version(self.cpu_s, steady, last_before),
            "rounds_during_cpu_s": per_version(self.cpu_s, last_before, entered["version"]),
            "versions_during": entered["version"] - last_before,
        }
        joiner.process.send_signal(signal.SIGINT)
        joiner.process.wait(DEADLINE_S)
        return result

    def kill_half_way(self, joiner: Running, member: Running) -> None:
        total_bytes = joiner.first("copying")["total_bytes"]
        time.sleep(KILL_SHARE * 8 * total_bytes / (PEERS * KILL_BPS))
        if joiner.events("state"):
            sys.exit("error: the copy was over before a member could be killed: try a smaller --serve-bps")
        member.process.kill()

    def rounds_of(self, watched: Running, members: list[Running], names: set[str], count: int) -> int:
        """Wait for so many versions of just these peers from now on; the version before them."""
        start = watched.versions()[-1]["version"] if watched.versions() else 0

        def found() -> int | None:
            self.sample(watched, members)
            fitting = [e["version"] for e in watched.versions() if e["version"] > start and set(e["counted"]) == names]
            return fitting[-count] - 1 if len(fitting) >= count + 1 else None

        return int(wait(found, f"{count} versions of {sorted(names)}", watched))

    def sample(self, watched: Running, members: list[Running]) -> None:
        """Note what the members have used by the versions that closed since the last look."""
        new = [event["version"] for event in watched.versions() if event["version"] not in self.cpu_s]
        if new:
            self.cpu_s |= dict.fromkeys(new, sum(cpu_s(member.process.pid) for member in members))


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, all its threads, so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def per_version(reading: dict[int, float], after: int, until: int) -> float:
    """Growth of a reading per version, after one version and up to another."""
    return round((reading[until] - reading[after]) / (until - after), 4)


def table(result: dict[str, Any]) -> str:
    megabytes = result["state_bytes"] / 1e6
    lines = [
        f"state of {megabytes:.1f} MB from {PEERS} members" + (", one killed half-way" if result["killed"] else ""),
        f"  from the start of the copy: state here after {result['copy_s']:.2f} s, in the view after "
        f"{result['seconds_to_view']:.2f} s (median of {len(result['joins'])})",
        f"  tokens/s of each other peer: {result['tokens_per_s_before']:.1f} before, "
        f"{result['tokens_per_s_during']:.1f} in the rounds it touched: {result['throughput_share']:.1%}",
    ]
    if result["throughput_share_by_cpu"]:
        lines.append(f"  the same by the CPU seconds of a round: {result['throughput_share_by_cpu']:.1%}")
    for join in result["joins"]:
        received = join["received_bytes"]
        if received is not None:
            surplus = received - result["state_bytes"]
            lines.append(f"  received {received / 1e6:.1f} MB in all: {surplus / 1e6:+.1f} MB (a stripe is 16.8 MB)")
    return "\n".join(lines)
