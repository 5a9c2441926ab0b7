"""Those who know only the address of a peer are kept out: bounds on connections and calls, the secret's strength."""

from __future__ import annotations

import asyncio
import resource
import secrets
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress

import pytest

from diloco.base.errors import UsageError
from diloco.identity import keys
from diloco.identity.keys import VARIABLE, keys_of, secret_from_environment, weakness
from diloco.inner.meter import memory_of
from diloco.protocol.messages import Reply
from diloco.protocol.streams import StateOffer
from diloco.transport import grpc_server, sockets
from diloco.transport.endpoint import StartingError, unanswered
from diloco.transport.grpc_link import GrpcLink
from diloco.transport.grpc_server import max_connections, serve
from diloco.transport.link import LinkDown, LinkSlow
from diloco.transport.process import raise_file_limit
from diloco.transport.sockets import SocketCounter

# ---------------------------------------------------------------- connections
from scripts.attacks.outsiders import WEAK
from tests.peers import KEYS
from tests.test_link import ENVELOPE, Listener


def test_idle_connections_make_room_for_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "max_connections", lambda streams: 4)

    async def scenario() -> None:
        server = await serve(Listener(), "127.0.0.1:0", KEYS, rpc_s=2.0)
        early, late = GrpcLink(5.0, KEYS), GrpcLink(30.0, KEYS)
        await early.deliver(server.address, ENVELOPE)
        host, port = server.address.split(":")
        with ExitStack() as stack:
            began_s = time.monotonic()
            idle = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(10)]
            await asyncio.to_thread(lambda: [closed(one) for one in idle[3:]])  # at once: there is room for 4
            await early.deliver(server.address, ENVELOPE)  # who is in notices nothing
            with pytest.raises(LinkDown) as full:
                await late.deliver(server.address, ENVELOPE)
            assert isinstance(unanswered(server.address, full.value), StartingError)
            while not await delivered(late, server.address):
                assert time.monotonic() - began_s < 20.0
            await asyncio.to_thread(lambda: [closed(one) for one in idle])
        for link in (early, late):
            await link.close()
        await server.stop(0)

    asyncio.run(scenario())


async def delivered(link: GrpcLink, address: str) -> bool:
    try:
        return await link.deliver(address, ENVELOPE) is Reply.OK
    except LinkDown:
        await asyncio.sleep(0.1)
        return False


def closed(connection: socket.socket) -> None:
    """Wait until the other end closes a connection."""
    connection.settimeout(20.0)
    with suppress(ConnectionResetError):
        while connection.recv(1 << 10):  # the settings of HTTP/2 come first, where there is no TLS
            pass


def test_there_is_room_for_big_runs_and_for_small_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    def room(files: int, streams: int) -> int:
        monkeypatch.setattr(grpc_server, "raise_file_limit", lambda: files)
        return max_connections(streams)

    assert room(524_288, 1) >= 2 * 256
    assert room(524_288, 16) >= 17 * 256
    assert room(1024, 1) == 384
    assert room(256, 1) == 64


def test_more_calls_than_a_peer_takes_are_slow_and_no_offence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "max_connections", lambda streams: 1)
    monkeypatch.setattr(grpc_server, "CALLS", 1)

    class Waiting(Listener):
        async def on_state_offer(self, have: str) -> StateOffer:
            await asyncio.sleep(60.0)
            raise AssertionError

    async def scenario() -> None:
        server = await serve(Waiting(), "127.0.0.1:0", KEYS)
        link = GrpcLink(5.0, KEYS)
        calls = [asyncio.create_task(link.fetch_state_offer(server.address, 30.0)) for _ in range(2)]
        first, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        for call in first:
            with pytest.raises(LinkSlow, match="limit"):
                await call
        for call in calls:
            call.cancel()
        await link.close()
        await server.stop(0)

    asyncio.run(scenario())


# ---------------------------------------------------------------- files


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be() -> None:
    program = """
import resource
from diloco.transport.process import raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
assert raise_file_limit() == 200 == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_memory_is_read_and_bytes_are_counted_when_no_file_can_be_opened() -> None:
    import torch

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    counter = SocketCounter()
    before = counter.sample()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        assert memory_of(torch.device("cpu"))[0] > 0
        assert counter.sample() == before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert raise_file_limit() == hard


def test_bytes_are_sampled_more_rarely_where_that_is_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "DEAR_S", 0.0)
    counter, dumps = SocketCounter(), list[float]()
    taken = sockets._tcp_sockets
    monkeypatch.setattr(sockets, "_tcp_sockets", lambda: dumps.append(time.thread_time()) or taken())
    for _ in range(100):
        counter.sample()
    assert 1 <= len(dumps) < 50


# ---------------------------------------------------------------- secrets


@pytest.mark.parametrize("secret", WEAK)
def test_a_weak_secret_is_refused_with_a_better_one(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, secret)
    with pytest.raises(UsageError, match=r"keep guesses out") as refused:
        secret_from_environment()
    assert "openssl rand -hex 32" in refused.value.fix
    assert secret not in str(refused.value)  # it may go to a log


def test_a_random_secret_and_a_passphrase_are_taken() -> None:
    assert not any(weakness(secrets.token_hex(16)) for _ in range(2000))
    assert not weakness("seven otters cross a river")


def test_a_guess_of_a_passphrase_takes_long_and_a_random_secret_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stretched: list[str] = []
    scrypt = keys.Scrypt
    monkeypatch.setattr(keys, "Scrypt", lambda **how: stretched.append(how["n"] * how["r"]) or scrypt(**how))
    keys_of(secrets.token_hex(16))
    keys_of("")
    assert not stretched
    keys_of("eight otters cross a river")
    keys_of("3141592653589793238462643383279502884")
    assert stretched == [2**20, 2**20]  # 128 MB each
