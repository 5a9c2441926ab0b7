"""The time of one outer sync: diloco by codec beside gloo's all-reduce, hivemind's averager and torchft's DiLoCo.

    scripts/bench-sync                                         everything: hours, as root
    scripts/bench-sync --links none --params 16                on loopback only: no root needed
    scripts/bench-sync --links 100,1000 --peers 2 --systems diloco,gloo --codecs int8 --congestion cubic
    scripts/bench-sync --links 200 --delay-ms 50 --streams 4 --systems diloco,gloo --json wan.json
    scripts/bench-sync --peers 2 --systems diloco --codecs int8 --logs on,off,on,off
    scripts/bench-sync --torchft-python T/bin/python --hivemind-python H/bin/python

Each peer is a real process. With a link of so many Mbit/s it sits in a network namespace of its own, and that is its
rate in each direction; `none` is plain loopback. All peers begin at the same moment, and a sync takes until the last
one is done: diloco and torchft from the moved weights to the new ones (pseudo-gradient, exchange, outer step), gloo the
all-reduce alone, hivemind the averaging alone (its peers have found each other before). Each row is the median of some
rounds after a few to warm up: a process's first syncs take up to twice as long, for its memory is touched for the first
time. In each round the mean is checked.

    limit     2 (N-1)/N x payload / link: what any all-reduce of these bytes takes at least. TCP/IP headers cost 4.6 %
              more, so that no system can reach a share (limit / time) above 0.956
    sent      bytes of each peer: of its interface, or on loopback of its TCP sockets, which have no headers
    cpu       seconds, of all processes of all peers together; with links, what the kernel spends on these, too
    rss       peak memory of the largest process in the sync, the model itself included
    off       how far off the mean was (relative L2 error), of noise, which is the hardest for a codec

Each peer computes with one thread. A codec is a name of the contract's, with `+zstd` or without; hivemind takes part in
fp32, fp16 and int8 (its 8 bit), gloo and torchft in fp32. torchft needs an environment of its own (`python3 -m venv DIR
&& DIR/bin/pip install numpy torch torchft==0.2.0`), and so does hivemind's 8 bit, which wants `numpy<2.4`
(hivemind==1.1.12).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from scripts.bench.netns import MAX_PEERS, NotPermitted, Star, congestion_controls
from scripts.bench.sync_group import Failed, Group, Round
from scripts.bench.sync_task import Task

SYSTEMS = ("diloco", "gloo", "hivemind", "torchft")
HIVEMIND_CODECS = ("fp32", "fp16", "int8")
DEFAULT_CODECS = ("fp32", "fp16", "int8", "int8+zstd", "int4")
TOLERANCE = {"fp32": 1e-4, "fp16": 0.01, "bf16": 0.02, "int8": 0.03, "int4": 0.25, "e3m0": 0.35, "two_bit": 0.6}
"""Largest relative error of the mean (L2) by codec."""
COARSE_TOLERANCE = 0.999
"""Tolerance of the other codecs, which keep little of noise: nearer than nothing at all."""
HIVEMIND_INT8_TOLERANCE = 0.5
"""On a busy machine its 8 bit was off by 5 to 15 % in some rounds; the row tells."""
WARM_UP = 4
"""Rounds. Later ones use memory again; diloco keeps the means of 4 versions."""
SLOWEST = 20
"""Times the limit of fp32 after which a sync has failed, and a minute more."""


@dataclass(frozen=True)
class Setting:
    """The settings of one row."""

    system: str
    codec: str
    peers: int
    params: float
    """Millions (2^20)."""
    link_mbit: float | None
    """None: loopback."""
    delay_ms: float
    congestion: str
    log: bool
    """Whether means go to the disk before their vote; of diloco only."""


@dataclass(frozen=True)
class Row:
    """One row of the table and of the JSON file. Medians; None: it failed, or there is no limit."""

    system: str
    codec: str
    peers: int
    params: float
    link_mbit: float | None
    delay_ms: float
    congestion: str
    log: bool
    seconds: float | None = None
    limit_seconds: float | None = None
    share: float | None = None
    bytes_sent_per_peer: int | None = None
    cpu_seconds: float | None = None
    peak_rss_mb: float | None = None
    payload_bytes: int | None = None
    mean_error: float | None = None
    """Relative error (L2) of the mean: the worst peer's in the worst round."""
    identical: bool | None = None
    """Whether all peers held the same bits after each round."""
    log_bytes: int | None = None
    """Written in a sync to log and votes, by the peer that wrote most."""
    longest_sync_s: float | None = None
    """The longest wait of a peer until that was on the disk."""
    rounds_seconds: tuple[float, ...] = ()
    error: str = ""


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: everything is cleaned up
    rows: list[Row] = []
    try:
        settings = list(plan(options))
        check_namespaces(settings)
        print(HEADER, flush=True)
        with tempfile.TemporaryDirectory(prefix="bench-sync-") as scratch:
            for number, setting in enumerate(settings):
                status = Status(f"[{number + 1}/{len(settings)}] ")
                rows.append(measure(setting, Path(scratch) / str(number), options, status.show))
                status.clear()
                print(line(rows[-1]), flush=True)
                write_json(rows, options)
    except KeyboardInterrupt:
        return 130
    return 1 if any(row.error for row in rows) else 0


# ---------------------------------------------------------------- what is asked for


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", type=comma(link), default=(100.0, 200.0, 1000.0, None), metavar="LIST",
                        help="Mbit/s of each peer, `none`: loopback (100,200,1000,none)")  # fmt: skip
    parser.add_argument("--peers", type=comma(group_size), default=(2, 4), metavar="LIST", help="(2,4)")
    parser.add_argument("--params", type=comma(positive), default=(16.0, 64.0), metavar="LIST",
                        help="parameters, in millions of 2^20 (16,64: 64 and 256 MiB of fp32)")  # fmt: skip
    parser.add_argument("--systems", type=comma(str), metavar="LIST",
                        help=f"{','.join(SYSTEMS)}; all that are installed, if left out")  # fmt: skip
    parser.add_argument("--codecs", type=comma(str), metavar="LIST",
                        help=f"of the contract's, each also with +zstd ({','.join(DEFAULT_CODECS)})")  # fmt: skip
    parser.add_argument("--congestion", type=comma(str), metavar="LIST",
                        help="of TCP, in namespaces (those of bbr,cubic that this kernel has)")  # fmt: skip
    parser.add_argument(
        "--delay-ms", type=float, default=0.0, help="between any two peers, one way; not on loopback (0)"
    )
    parser.add_argument("--streams", type=at_least(1), default=1, metavar="N", help="diloco's network.streams (1)")
    parser.add_argument("--logs", type=comma(on_or_off), default=(True,), metavar="LIST",
                        help="diloco's storage.log, `on` or `off`, a row for each, in this order (on)")  # fmt: skip
    parser.add_argument("--rounds", type=at_least(1), default=3, help="measured (3)")
    parser.add_argument("--warm-up", type=at_least(0), default=WARM_UP, metavar="ROUNDS",
                        help=f"before these ({WARM_UP})")  # fmt: skip
    parser.add_argument("--hivemind-python", type=Path, metavar="FILE", help="a Python that has hivemind and numpy<2.4")
    parser.add_argument("--torchft-python", type=Path, metavar="FILE", help="a Python that has torchft")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too, as they come")
    return parser.parse_args()


def comma(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """A list with commas."""

    def values(text: str) -> tuple[Any, ...]:
        return tuple(kind(part) for part in text.split(","))

    values.__name__ = f"list of {kind.__name__}"  # for argparse's complaint
    return values


def link(text: str) -> float | None:
    return None if text == "none" else positive(text)


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value


def on_or_off(text: str) -> bool:
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither on nor off")
    return text == "on"


def at_least(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return value

    return count


def group_size(text: str) -> int:
    value = int(text)
    if not 2 <= value <= MAX_PEERS:
        raise ValueError
    return value


def plan(options: argparse.Namespace) -> Iterator[Setting]:
    """All rows, network by network. Exits with an error when something that is asked for is not there."""
    systems, codecs = asked_systems(options), asked_codecs(options)
    for link_mbit in options.links:
        for congestion in asked_congestion(options, link_mbit):
            for params in options.params:
                for peers in options.peers:
                    for system in systems:
                        for codec in codecs_of(system, codecs):
                            delay_ms = options.delay_ms if link_mbit else 0.0
                            for log in options.logs if system == "diloco" else (False,):
                                yield Setting(system, codec, peers, params, link_mbit, delay_ms, congestion, log)


def known(asked: Sequence[str] | None, there: Sequence[str], what: str) -> tuple[str, ...]:
    for name in asked or ():
        if name not in there:
            sys.exit(f"error: no {what} named {name!r} here; there are {', '.join(there)}")
    return tuple(asked or ())


def asked_systems(options: argparse.Namespace) -> tuple[str, ...]:
    systems = known(options.systems, SYSTEMS, "system")
    if options.torchft_python is None and "torchft" in systems:
        sys.exit("error: torchft needs a Python of its own: give --torchft-python (--help says how to make one)")
    if options.torchft_python is None and not systems:
        print("torchft is left out: give --torchft-python (--help says how to make one)", file=sys.stderr)
    return systems or tuple(name for name in SYSTEMS if name != "torchft" or options.torchft_python)


def asked_codecs(options: argparse.Namespace) -> tuple[str, ...]:
    from diloco.config.codec import CodecSection

    names = typing.get_args(CodecSection.model_fields["name"].annotation)
    return known(options.codecs, [*names, *(f"{name}+zstd" for name in names)], "codec") or DEFAULT_CODECS


def codecs_of(system: str, codecs: Sequence[str]) -> Sequence[str]:
    match system:
        case "diloco":
            return codecs
        case "hivemind":
            return [codec for codec in HIVEMIND_CODECS if codec in codecs]
        case _:
            return ["fp32"]


def asked_congestion(options: argparse.Namespace, link_mbit: float | None) -> Sequence[str]:
    there = congestion_controls()
    if link_mbit is None:
        return there[:1]  # loopback has the machine's own
    usual = [name for name in ("bbr", "cubic") if name in there] or there[:1]
    return known(options.congestion, there, "congestion control (modprobe tcp_NAME loads more)") or usual


def check_namespaces(settings: Sequence[Setting]) -> None:
    """Before anything runs: exits with an error when links are asked for and cannot be made."""
    shaped = next((setting for setting in settings if setting.link_mbit is not None), None)
    if shaped is None:
        return
    try:
        with star_of(shaped) or nullcontext():
            pass
    except NotPermitted as error:
        sys.exit(
            f"error: no network namespaces here: {error}\n"
            "links with a rate need them: run as root (sudo), in a container with --privileged or --cap-add NET_ADMIN "
            "and SYS_ADMIN; or measure loopback only, with --links none"
        )


# ---------------------------------------------------------------- measuring


def measure(setting: Setting, scratch: Path, options: argparse.Namespace, tell: Callable[[str], None]) -> Row:
    """One row."""
    scratch.mkdir()
    try:
        with star_of(setting) or nullcontext() as star:
            return row_of(setting, *run(setting, star, scratch, options, tell))
    except Failed as error:
        tell("")
        print(f"{setting.system} {setting.codec}: {error}", file=sys.stderr, flush=True)
        return Row(**asdict(setting), error=str(error).partition("\n")[0])


def star_of(setting: Setting) -> Star | None:
    if setting.link_mbit is None:
        return None
    return Star(setting.peers, setting.link_mbit, setting.delay_ms, setting.congestion)


def run(
    setting: Setting, star: Star | None, scratch: Path, options: argparse.Namespace, tell: Callable[[str], None]
) -> tuple[int, list[Round]]:
    """Payload bytes and the measured rounds. Raises Failed."""
    near = ("127.0.0.1", "lo", "", options.streams, setting.log)
    task = Task(setting.system, setting.codec, 0, setting.peers, setting.params, *near)
    tell(f"{setting.system} {setting.codec}: {setting.peers} peers get ready")
    fp32_limit_s = limit_seconds(setting, task.elements * 4) or 0.0
    rounds = []
    with Group(python_of(setting.system, options), task, star, scratch) as group:
        for number in range(1 - options.warm_up, options.rounds + 1):
            step = f"round {number} of {options.rounds}" if number > 0 else "warm-up"
            tell(f"{setting.system} {setting.codec}: {step}")
            rounds.append(group.round(60.0 + SLOWEST * fp32_limit_s, tolerance_of(setting)))
            if setting.system == "diloco" and not rounds[-1].identical:
                raise Failed("the peers do not hold the same bits")
        return group.payload_bytes, rounds[options.warm_up :]


def tolerance_of(setting: Setting) -> float:
    if (setting.system, setting.codec) == ("hivemind", "int8"):
        return HIVEMIND_INT8_TOLERANCE
    return TOLERANCE.get(setting.codec.removesuffix("+zstd"), COARSE_TOLERANCE)


def python_of(system: str, options: argparse.Namespace) -> Path:
    return {"hivemind": options.hivemind_python, "torchft": options.torchft_python}.get(system) or Path(sys.executable)


def limit_seconds(setting: Setting, payload_bytes: int) -> float | None:
    if setting.link_mbit is None:
        return None
    return 2 * (setting.peers - 1) / setting.peers * payload_bytes * 8 / (setting.link_mbit * 1e6)


def row_of(setting: Setting, payload_bytes: int, rounds: Sequence[Round]) -> Row:
    seconds, limit = median(each.seconds for each in rounds), limit_seconds(setting, payload_bytes)
    return Row(
        **asdict(setting),
        seconds=round(seconds, 4),
        limit_seconds=limit and round(limit, 4),
        share=limit and round(limit / seconds, 3),
        bytes_sent_per_peer=round(median(each.sent_bytes for each in rounds)),
        cpu_seconds=round(median(each.cpu_s for each in rounds), 3),
        peak_rss_mb=round(max(each.peak_rss_mb for each in rounds), 1),
        payload_bytes=payload_bytes,
        mean_error=float(f"{max(each.mean_error for each in rounds):.3g}"),
        identical=all(each.identical for each in rounds),
        log_bytes=max(each.log_bytes for each in rounds),
        longest_sync_s=max(each.longest_sync_s for each in rounds),
        rounds_seconds=tuple(round(each.seconds, 4) for each in rounds),
    )


# ---------------------------------------------------------------- telling


class Status:
    """A line that says what is running and goes away; nothing when the output is no terminal."""

    def __init__(self, start: str) -> None:
        self._start = start

    def show(self, text: str) -> None:
        if sys.stdout.isatty():
            print(f"\r\x1b[K{self._start}{text}", end="", flush=True)

    def clear(self) -> None:
        if sys.stdout.isatty():
            print("\r\x1b[K", end="")


HEADER = (
    f"{'system':<9}{'codec':<10}{'peers':>5}{'params':>7}{'link':>8}{'delay':>7}{'tcp':>7}{'log':>5}"
    f"{'time':>9}{'limit':>9}{'share':>7}{'sent':>10}{'cpu':>8}{'rss':>9}{'off':>8}"
)


def line(row: Row) -> str:
    link_text = "none" if row.link_mbit is None else f"{row.link_mbit:g}M"
    about = f"{row.system:<9}{row.codec:<10}{row.peers:>5}{row.params:>6g}M{link_text:>8}{row.delay_ms:>5g}ms"
    about += f"{row.congestion:>7}{'on' if row.log else '-':>5}"
    if row.seconds is None:
        return f"{about}  FAILED: {row.error}"
    limit = f"{row.limit_seconds:>7.2f} s{row.share:>7.2f}" if row.limit_seconds else f"{'-':>9}{'-':>7}"
    assert row.bytes_sent_per_peer is not None
    return (
        f"{about}{row.seconds:>7.2f} s{limit}{row.bytes_sent_per_peer / 1e6:>7.1f} MB"
        f"{row.cpu_seconds:>6.2f} s{row.peak_rss_mb:>6.0f} MB{row.mean_error:>8.2%}"
    )


def write_json(rows: Sequence[Row], options: argparse.Namespace) -> None:
    if options.json:
        asked = {name: getattr(options, name) for name in ("rounds", "warm_up", "streams")}
        about = {**asked, "cores": os.cpu_count(), "threads_per_peer": 1}
        options.json.write_text(json.dumps({**about, "rows": [*map(asdict, rows)]}, indent=1) + "\n")
