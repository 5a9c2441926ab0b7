"""One end of a tunnel between two loopbacks, as `ssh -L` and `ssh -R` make one: `forwarder.py THERE OUT HERE IN`.

Connections to the port THERE of this loopback go out through the socket file OUT. Those that come in through the socket
file IN go to the port HERE of this loopback.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
HOST = "127.0.0.1"


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All bytes of one direction, and then their end."""
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


def forward(dial: Callable[[], Awaitable[Connection]]) -> Callable[..., Awaitable[None]]:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await dial()
        except OSError:  # nobody listens there: the connection was taken, and ends
            writer.close()
            return
        await asyncio.gather(copy(reader, there[1]), copy(there[0], writer))

    return connected


async def main(there: str, out: str, here: str, into: str) -> None:
    await asyncio.start_unix_server(forward(lambda: asyncio.open_connection(HOST, int(here))), into)
    server = await asyncio.start_server(forward(lambda: asyncio.open_unix_connection(out)), HOST, int(there))
    print("forwarding", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
