"""Network namespaces as a star: each peer behind a link of its own with a rate and a delay, for `scripts/bench-sync`.

    peer 0: eth0 10.77.0.1 --veth-- port0 --+
    peer 1: eth0 10.77.0.2 --veth-- port1 --+-- hub: a bridge, or with a delay this file as a program

Both ends of each veth pair are shaped (tbf), so that what a peer sends and what it receives share its rate with
nothing else. The hub is a namespace, too: nothing of the machine's own network is touched. Needs root, iproute2.

Delay does not need the kernel's netem, which not every kernel has: the program passes frames on after a while. It takes
them as the kernel keeps them (up to 64 KiB at once, PACKET_VNET_HDR), so that Python keeps up with 1 Gbit/s.
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Self

PREFIX = "diloco-sync"
BURST_S = 0.001
MIN_BURST_BYTES = 72 * 1024
"""Tokens that a shaper saves up: as much as goes out in a millisecond, and the largest frame's. A smaller bucket has
the kernel cut frames of 64 KiB into packets, which a network card does otherwise: as much work as the peers' own."""
QUEUE_S = 0.05
"""Seconds of traffic that a shaper holds back before it drops: a router's usual buffer."""
INTERFACE, LOCAL_INTERFACE = "eth0", "eth1"
MAX_PEERS = 200

_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23  # linux/if_packet.h
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33  # asm-generic/socket.h
_ALL_FRAMES = 0x0003  # ETH_P_ALL
_VNET_BYTES = 10  # struct virtio_net_hdr
_MAX_FRAME_BYTES = _VNET_BYTES + (1 << 16) + 256
_BUFFER_BYTES = 64 << 20


class NotPermitted(Exception):
    """No namespaces can be made here."""


class Star:
    """The namespaces of so many peers; use it as a context manager.

    Args:
        peers: at most MAX_PEERS.
        link_mbit: of each peer, in each direction; Ethernet, IP and TCP headers count.
        delay_ms: from any peer to any other, one way.
        congestion: TCP congestion control, one of `congestion_controls()`.
    """

    def __init__(self, peers: int, link_mbit: float, delay_ms: float, congestion: str) -> None:
        self._names = [f"{PREFIX}-{os.getpid()}-{peer}" for peer in range(peers)]
        self._hub = f"{PREFIX}-{os.getpid()}-hub"
        self._link_mbit, self._delay_ms, self._congestion = link_mbit, delay_ms, congestion
        self._relay: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def inside(self, peer: int) -> list[str]:
        """Words to put before a command that runs in this peer's namespace."""
        return ["ip", "netns", "exec", self._names[peer]]

    def address(self, peer: int) -> str:
        """Its IPv4 address."""
        return f"10.77.0.{peer + 1}"

    def local_address(self, peer: int) -> str:
        """Its address on the network that `add_local_network` makes."""
        return f"10.78.0.{peer + 1}"

    def add_local_network(self) -> None:
        """One more network between all of them, not shaped: that of the ranks of an island."""
        _ip("-netns", self._hub, "link", "add", "local", "type", "bridge")
        _ip("-netns", self._hub, "link", "set", "local", "up")
        for peer, name in enumerate(self._names):
            port = f"local{peer}"
            _ip("link", "add", LOCAL_INTERFACE, "netns", name, "type", "veth", "peer", "name", port, "netns", self._hub)
            _ip("-netns", name, "address", "add", f"{self.local_address(peer)}/24", "dev", LOCAL_INTERFACE)
            _ip("-netns", name, "link", "set", LOCAL_INTERFACE, "up")
            _ip("-netns", self._hub, "link", "set", port, "master", "local")
            _ip("-netns", self._hub, "link", "set", port, "up")

    def sent_bytes(self) -> list[int]:
        """Bytes that each peer's shaper has let pass so far; each packet of a large frame has an Ethernet header."""
        shapers = ["-s", "-json", "qdisc", "show", "dev", INTERFACE, "root"]
        return [json.loads(_run(["tc", "-netns", name, *shapers]))[0]["bytes"] for name in self._names]

    def _build(self) -> None:
        sweep()
        for name in (self._hub, *self._names):
            _ip("netns", "add", name)
            _ip("-netns", name, "link", "set", "lo", "up")
        for peer, name in enumerate(self._names):
            self._connect(peer, name)
        ports = [f"port{peer}" for peer in range(len(self._names))]
        if self._delay_ms:
            program = [sys.executable, str(Path(__file__).resolve()), str(self._delay_ms), *ports]
            self._relay = subprocess.Popen(["ip", "netns", "exec", self._hub, *program], start_new_session=True)
            return
        _ip("-netns", self._hub, "link", "add", "bridge", "type", "bridge")
        _ip("-netns", self._hub, "link", "set", "bridge", "up")
        for port in ports:
            _ip("-netns", self._hub, "link", "set", port, "master", "bridge")

    def _connect(self, peer: int, name: str) -> None:
        port = f"port{peer}"
        near = ["link", "add", INTERFACE, "netns", name, "address", _mac(peer), "type", "veth"]
        _ip(*near, "peer", "name", port, "netns", self._hub)
        _ip("-netns", name, "address", "add", f"{self.address(peer)}/24", "dev", INTERFACE)
        for namespace, device in ((name, INTERFACE), (self._hub, port)):
            _ip("-netns", namespace, "link", "set", device, "up")
            _run(["tc", "-netns", namespace, "qdisc", "add", "dev", device, "root", *_shaper(self._link_mbit)])
        # By route: a namespace's own default may only be one of tcp_allowed_congestion_control, which is the machine's.
        route = ["route", "replace", "10.77.0.0/24", "dev", INTERFACE, "src", self.address(peer)]
        _ip("-netns", name, *route, "congctl", self._congestion)

    def _remove(self) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
        for name in (*self._names, self._hub):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def congestion_controls() -> list[str]:
    """Those that this kernel has loaded, its default first."""
    settings = Path("/proc/sys/net/ipv4")
    default = (settings / "tcp_congestion_control").read_text().strip()
    others = (settings / "tcp_available_congestion_control").read_text().split()
    return [default, *(name for name in others if name != default)]


def sweep() -> None:
    """Remove the namespaces of processes that were killed. Raises NotPermitted."""
    for name in re.findall(rf"^{PREFIX}-\d+-\w+", _ip("netns", "list"), re.MULTILINE):
        if not Path(f"/proc/{name.split('-')[2]}").exists():
            _ip("netns", "delete", name)


def _shaper(mbit: float) -> list[str]:
    burst_bytes = max(mbit * 1e6 / 8 * BURST_S, MIN_BURST_BYTES)
    return ["tbf", "rate", f"{mbit:g}mbit", "burst", f"{burst_bytes:.0f}b", "latency", f"{QUEUE_S * 1000:g}ms"]


def _mac(peer: int) -> str:
    return f"02:00:00:00:00:{peer + 1:02x}"


def _ip(*arguments: str) -> str:
    return _run(["ip", *arguments])


def _run(command: list[str]) -> str:
    """The output of a command. Raises NotPermitted with what it complained about."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError as error:
        raise NotPermitted(f"{command[0]} is not installed (Debian: apt-get install iproute2)") from error
    except subprocess.CalledProcessError as error:
        raise NotPermitted(f"`{' '.join(command)}`: {error.stderr.strip()}") from error


# ---------------------------------------------------------------- the hub with a delay


def relay(delay_s: float, ports: list[str]) -> None:
    """Pass frames on between the ports, each after `delay_s`, for ever. What a full queue does not take is lost."""
    sockets = [_tap(port) for port in ports]
    by_mac = {bytes.fromhex(_mac(int(port.removeprefix("port"))).replace(":", "")): tap
              for port, tap in zip(ports, sockets, strict=True)}  # fmt: skip
    waiting: deque[tuple[float, list[socket.socket], bytes]] = deque()
    while True:
        wait_s = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else None
        for source in select.select(sockets, [], [], wait_s)[0]:
            frame = source.recv(_MAX_FRAME_BYTES)
            target = by_mac.get(frame[_VNET_BYTES : _VNET_BYTES + 6])
            targets = [target] if target else [tap for tap in sockets if tap is not source]
            waiting.append((time.monotonic() + delay_s, targets, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, targets, frame = waiting.popleft()
            for target in targets:
                try:
                    target.send(frame)
                except OSError:  # the shaper's queue is full, or the port is gone: a lost frame, as on a real network
                    continue


def _tap(port: str) -> socket.socket:
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_FRAMES))
    tap.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    tap.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    tap.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _BUFFER_BYTES)
    tap.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
    tap.bind((port, 0))
    tap.setblocking(False)
    return tap


if __name__ == "__main__":
    relay(float(sys.argv[1]) / 1000, sys.argv[2:])
