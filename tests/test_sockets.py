"""The socket counter against transfers of known size."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import grpc
import pytest

from diloco.transport.sockets import SocketBytes, SocketCounter
from tests.peers import DEADLINE_S


def sample(counter: SocketCounter) -> SocketBytes:
    taken = counter.sample()
    assert taken is not None
    return taken


def moved(counter: SocketCounter, before: SocketBytes) -> tuple[int, int]:
    """Bytes sent and received since `before`, each once: a busy machine sends some again, on loopback too."""
    since = sample(counter) - before
    return since.sent - since.resent, since.received


def settles(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def connect(host: str = "127.0.0.1") -> tuple[socket.socket, socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        client = socket.create_connection(server.getsockname()[:2])
        return client, server.accept()[0]


def transfer(source: socket.socket, sink: socket.socket, size_bytes: int) -> None:
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(source.sendall, bytes(size_bytes))
        left = size_bytes
        while left:
            left -= len(sink.recv(min(left, 1 << 16)))
        sending.result()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_counts_exactly_the_bytes_of_a_connection(host: str) -> None:
    counter = SocketCounter()
    before = sample(counter)
    client, server = connect(host)
    with client, server:
        transfer(client, server, 3_000_017)
        transfer(server, client, 5)
        assert moved(counter, before) == (3_000_022, 3_000_022)


def test_counts_from_the_start_of_a_connection_that_is_older_than_the_counter() -> None:
    client, server = connect()
    with client, server:
        transfer(client, server, 1234)
        assert sample(SocketCounter()).sent >= 1234


def one_connection(counter: SocketCounter) -> None:
    """1,000 bytes over it, counted before it is closed."""
    client, server = connect()
    with client, server:
        transfer(client, server, 1000)
        sample(counter)


def test_closed_connections_still_count_and_new_ones_add_up() -> None:
    counter = SocketCounter()
    before = sample(counter)
    for _ in range(3):
        one_connection(counter)
    sent, received = moved(counter, before)
    assert sent == 3000
    assert 3000 <= received <= 3003  # a FIN may count as a byte


def test_closed_connections_are_not_remembered() -> None:
    counter = SocketCounter()
    before = sample(counter)
    for _ in range(20):
        one_connection(counter)
    assert settles(lambda: sample(counter) is not None and len(counter._bytes) < 20)
    assert moved(counter, before)[0] == 20_000


def test_unix_sockets_do_not_count() -> None:
    counter = SocketCounter()
    before = sample(counter)
    here, there = socket.socketpair()
    with here, there:
        transfer(here, there, 100_000)
        assert moved(counter, before) == (0, 0)


CHILD_SENDS = """
import socket, sys
link = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
link.sendall(bytes(200_000))
link.recv(1)
"""


def test_sockets_of_a_child_process_count_and_those_of_others_do_not() -> None:
    counter = SocketCounter()
    before = sample(counter)
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = subprocess.Popen([sys.executable, "-c", CHILD_SENDS, str(server.getsockname()[1])])
        link = server.accept()[0]
        with link:
            left = 200_000
            while left:
                left -= len(link.recv(1 << 16))
            assert moved(counter, before) == (200_000, 200_000)  # the child sent, this process received
            assert moved(SocketCounter(child.pid), SocketBytes(0, 0)) == (200_000, 0)
    assert child.wait(DEADLINE_S) == 0


def test_watch_sees_connections_that_are_gone_at_the_end() -> None:
    counter = SocketCounter()
    before = sample(counter)
    with counter.watch(interval_s=0.01):
        client, server = connect()
        with client, server:
            transfer(client, server, 50_000)
            assert settles(lambda: counter._total.sent - before.sent >= 50_000)  # by the thread
    assert moved(counter, before)[0] == 50_000


def test_says_once_that_the_system_cannot_tell(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(socket, "AF_NETLINK")
    counter = SocketCounter()
    assert counter.sample() is None
    assert counter.sample() is None
    assert len(caplog.records) == 1
    assert "not counted" in caplog.text


def test_grpc_stream_of_ten_megabytes() -> None:
    chunk, chunks = bytes(1 << 20), 10

    def stream(_request: bytes, _context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from [chunk] * chunks

    server = grpc.server(ThreadPoolExecutor(1))
    handler = grpc.unary_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test", {"stream": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    counter = SocketCounter()
    before = sample(counter)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        received = sum(len(part) for part in channel.unary_stream("/test/stream")(b""))
        sent, arrived = moved(counter, before)
    server.stop(None).wait(5)
    assert received == len(chunk) * chunks
    assert received <= sent < 1.02 * received
    assert received <= arrived < 1.02 * received


ELEMENTS = 1 << 20


def all_reduce_rank(rank: int, store: str, results: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    counter = SocketCounter()
    values = torch.ones(ELEMENTS)
    dist.barrier()
    before = sample(counter)
    dist.all_reduce(values)
    dist.barrier()  # a rank may be done while the last of what it sends is still queued
    results.send((*moved(counter, before), values[0].item()))
    dist.destroy_process_group()


@pytest.mark.slow
def test_gloo_all_reduce_of_known_size(tmp_path: os.PathLike[str]) -> None:
    # A ring of two sends half the elements to reduce and half to gather: 4 bytes per element and rank.
    context = mp.get_context("spawn")
    ends = [context.Pipe(duplex=False) for _ in range(2)]
    ranks = [
        context.Process(target=all_reduce_rank, args=(rank, f"{tmp_path}/store", send), daemon=True)
        for rank, (_, send) in enumerate(ends)
    ]
    for process in ranks:
        process.start()
    for receive, _ in ends:
        assert receive.poll(60)
        sent, received, value = receive.recv()
        assert value == 2.0
        assert 4 * ELEMENTS <= sent < 1.02 * 4 * ELEMENTS
        assert 4 * ELEMENTS <= received < 1.02 * 4 * ELEMENTS
    for process in ranks:
        process.join(DEADLINE_S)
        assert process.exitcode == 0
