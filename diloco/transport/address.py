"""Addresses and tickets as text: `host:port[/digest]`, IPv6 in brackets. Pure: nothing is resolved."""

from __future__ import annotations

import ipaddress
import re

from diloco.base.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FIX = "write host:port, for instance 10.0.0.5:7700, node3.example.org:7700 or [fd00::5]:7700"


def split_address(text: str) -> tuple[str, int]:
    """Host (IPv6 without its brackets) and port (0 to 65535) of a network address. Raises UsageError for other text."""
    host, colon, port = text.rpartition(":")
    if not colon:
        raise UsageError(f"address {text[:300]!r} has no port", _FIX)
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 65536):
        raise UsageError(f"address {text[:300]!r}: the port must be a number from 0 to 65535", _FIX)
    if host.startswith("[") and host.endswith("]"):
        try:
            host = str(ipaddress.IPv6Address(host[1:-1]))
        except ValueError as error:
            raise UsageError(f"address {text[:300]!r}: {host[1:-1][:100]!r} is not IPv6", _FIX) from error
    elif ":" in host:
        raise UsageError(f"address {text[:300]!r}: IPv6 needs brackets", _FIX)
    elif not _NAME.fullmatch(host):
        raise UsageError(f"address {text[:300]!r}: {host[:100]!r} is neither a name nor an IP address", _FIX)
    return host, int(port)


def split_ticket(text: str) -> tuple[str, str]:
    """Network address of a join ticket, and the contract's digest, which may be empty. Raises UsageError."""
    address, slash, expected = text.strip().partition("/")
    split_address(address)
    if slash and not _DIGEST.fullmatch(expected):
        cause = f"{expected[:80]!r} after {address}/ is no contract's digest, which has 64 hexadecimal digits"
        fix = "copy the whole join line (`diloco status` prints it; older releases had 12 digits), or leave /DIGEST out"
        raise UsageError(cause, fix)
    return address, expected


def join_address(host: str, port: int) -> str:
    """The network address `host:port` that `split_address` splits into this host and port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches a network address (`host:port`). Names other than `localhost` count as outside.

    Raises UsageError when it is no address.
    """
    host, _ = split_address(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
