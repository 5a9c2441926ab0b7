"""Telling a dead peer from one that is cut off, where that is possible: on this machine."""

from __future__ import annotations

import asyncio

from diloco.transport.address import is_loopback, split_address

PROBE_S = 1.0


async def nobody_listens(address: str) -> bool:
    """Whether the process that listened at `address` is gone for certain.

    Only loopback gives proof: nothing but the kernel itself refuses a connection there, and a refusal that crossed a
    network may be a firewall's.
    """
    if not is_loopback(address):
        return False
    host, port = split_address(address)
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), PROBE_S)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False
