"""Attacks by an outsider, who knows a peer's address and nothing else; and what keeps it out: secrets, tickets."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from pathlib import Path

from diloco.base.errors import TicketError, UsageError
from diloco.identity.keys import SERVER_NAME, Keys, keys_of, weakness
from diloco.transport.address import split_ticket
from scripts.attacks.victims import CALM_S, PACE, START_S, Attack, NotHeld, Victims

IDLE, MANY = 1_100, 5_000
"""Connections of the short form, and of the long one."""
MAX_GUESSES_PER_S = 20
LISTED, MAX_TAKEN = 20_000, 2_048
"""Records that are stored in the directory, and that one node may take."""
WEAK = (
    "aaaaaaaaaaaaaaaa",
    "abcabcabcabcabcabc",
    "0123456789abcdef",
    "zyxwvutsrqponmlk",
    "passwordpassword",
    "PasswordPassword1",
    "qwertyuiopasdfgh",
    "qwertyuiop123456",
    "0011223344556677",
    "1a2b3c4d5e6f7g8h",
    "changemechangeme",
    "letmeinletmeinletmein",
    "00112233445566778899aabbccddeeff",
    "deadbeefdeadbeefdeadbeefdeadbeef",
    "0123456789abcdef0123456789abcdef",
    "short",
)
TICK_S = 0.02
ROUND_S = 1.0
"""Seconds between two bytes of a connection, and in which all are opened."""
OPEN_S = 60.0
"""Longest time until all are opened: an attack by fewer shows nothing."""
AGAIN_S = 10.0
"""Seconds in which all that were closed are opened again."""

ANOTHER_USER = """
import asyncio, os, pathlib, sys
from diloco.identity.keys import keys_of
from diloco.transport.grpc_link import GrpcLink

async def enters(address, secret):
    link = GrpcLink(5.0, keys_of(secret))
    try:
        return (await link.hello(address, 5.0)).lineage
    except Exception as error:
        return print(error)
    finally:
        await link.close()

address, state = sys.argv[1:]
secrets = [""]
if os.getuid() == 0:  # else this is the same user, who may read the key
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    try:
        secrets.append(pathlib.Path(state, "diloco", "key").read_text().strip())
    except OSError as error:
        print(error)
sys.exit(any(asyncio.run(enters(address, secret)) for secret in secrets))
"""
"""A program that tries to enter a run as user 65534, where this user may become that one, without a secret or with what
it finds in a folder. All is imported before: that user may not read our Python."""

DIRECTORY_LIAR = """
import asyncio, json, sys, time
from hivemind.dht import DHTID, DHTNode
from hivemind.utils import MSGPackSerializer

async def lies(number, *addresses):
    node = await DHTNode.create(initial_peers=addresses, use_relay=False, auto_nat=False, nat_port_map=False)
    names = ["p0", "p1", "late", *(f"stranger{each}" for each in range(number))]
    key, taken = DHTID.generate("diloco/attacked/peers"), 0
    peer = next(iter(node.protocol.routing_table.uid_to_peer_id.values()))
    for begin in range(0, len(names), 500):
        some = names[begin : begin + 500]
        lives = [{"peer": name, "incarnation": 2**62, "address": "127.0.0.1:9"} for name in some]
        values = [MSGPackSerializer.dumps(json.dumps(life).encode()) for life in lives]
        lasts = [time.time() + 590.0] * len(some)
        taken += sum(await node.protocol.call_store(peer, [key] * len(some), values, lasts, some) or ())
    print(taken)
    await node.shutdown()

asyncio.run(lies(int(sys.argv[1]), *sys.argv[2:]))
"""
"""A program that joins the directory at some addresses and stores lives, later than any, for names of peers and others.
It prints how many one node took."""

Talk = Generator[bytes, bytes, None]
"""Speech of one connection: gets what was received (empty: nothing new), yields what to send next."""


class Crowd:
    """Very many connections to one peer, each with the same talk, opened again whenever the peer closes them."""

    def __init__(self, address: str, number: int, talk: Callable[[], Talk]) -> None:
        host, port = address.rsplit(":", 1)
        self._address, self._number, self._talk = (host, int(port)), number, talk
        self._talks: dict[socket.socket, Talk] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self.opened = 0
        """Connections that were opened, those opened again included."""

    def __enter__(self) -> Crowd:
        self._thread.start()
        end_s = time.monotonic() + OPEN_S
        while self.opened < self._number:
            if time.monotonic() > end_s:
                self.__exit__()
                raise NotHeld(f"no attack: {self.opened} of {self._number} connections were opened in {OPEN_S:g} s")
            time.sleep(TICK_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for connection in self._talks:
            connection.close()

    def _live(self) -> None:
        share = int(self._number * TICK_S / ROUND_S)  # of all connections, at each tick
        while not self._stop.wait(TICK_S):
            anew = share if self.opened < self._number else int(share * ROUND_S / AGAIN_S)
            for _ in range(min(anew, self._number - len(self._talks))):
                self._open()
            for connection in list(self._talks)[:share]:
                talk = self._talks.pop(connection)  # and to the end of the line
                if self._goes_on(connection, talk):
                    self._talks[connection] = talk
                else:
                    connection.close()

    def _open(self) -> None:
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex(self._address)
        self._talks[connection] = talk = self._talk()
        next(talk)
        self.opened += 1

    def _goes_on(self, connection: socket.socket, talk: Talk) -> bool:
        try:
            heard = connection.recv(1 << 16)
            if not heard:
                return False
        except BlockingIOError:
            heard = b""
        except OSError:
            return False
        try:
            connection.send(talk.send(heard))
        except BlockingIOError:
            pass
        except (OSError, ssl.SSLError, StopIteration):
            return False
        return True


def silence() -> Talk:
    """Nothing is said."""
    while True:
        yield b""


def hello_by_bytes(context: ssl.SSLContext) -> Talk:
    """A client hello of TLS, byte by byte."""
    outgoing = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=SERVER_NAME)
    try:
        tls.do_handshake()
    except ssl.SSLWantReadError:
        yield b""
    for byte in outgoing.read():
        yield bytes([byte])
    yield from silence()


def frames_by_bytes(context: ssl.SSLContext, ready: bytes) -> Talk:
    """HTTP/2 over TLS with the public key: `ready`, and then a header block that never ends, byte by byte."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname=SERVER_NAME)
    heard = yield b""
    while True:
        incoming.write(heard)
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            heard = yield outgoing.read()
    tls.write(ready)
    header = (1 << 14).to_bytes(3) + bytes([1, 4, 0, 0, 0, 1])  # a HEADERS frame of 16 KiB, of stream 1
    for byte in header + bytes([0, 1, 97, 127]) + b"x" * (1 << 14):
        yield outgoing.read()
        tls.write(bytes([byte]))


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def public_tls(keys: Keys) -> ssl.SSLContext:
    """TLS of a client that shows these keys."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(keys.private_key + keys.certificate)
        context.load_cert_chain(file.name)
    context.load_verify_locations(cadata=keys.certificate.decode())
    return context


def _held(victims: Victims, number: int, talk: Callable[[], Talk]) -> str:
    """Versions go on during an attack by so many connections, each opened again when it is closed."""
    assert victims.row is not None
    with Crowd(victims.address("p0"), number, talk) as crowd:
        victims.row.versions_during = victims.versions_in(CALM_S)
    return f"{crowd.opened:,} connections"


def idle_connections(victims: Victims, number: int = IDLE) -> str:
    """TCP connections that say nothing: more than a peer may have files."""
    return _held(victims, number, silence)


def slow_tls(victims: Victims, number: int = IDLE) -> str:
    """A client hello byte by byte."""
    return _held(victims, number, partial(hello_by_bytes, public_tls(keys_of(""))))


def slow_http2(victims: Victims, number: int = IDLE) -> str:
    """A header block byte by byte, after a TLS handshake with the public key."""
    return _held(victims, number, partial(frames_by_bytes, public_tls(keys_of("")), PREFACE + SETTINGS))


def joining_among_idle(victims: Victims) -> str:
    """A peer joins while connections that say nothing take every place as it becomes free."""
    with Crowd(victims.address("p0"), MANY, silence) as crowd:
        began_s = time.monotonic()
        victims.join("late")
        victims.until(lambda: victims.version("late") > 0, "the joiner's first version")
        return f"joined in {time.monotonic() - began_s:.0f} s, among {crowd.opened:,} connections"


def directory_lies(victims: Victims) -> str:
    """Lives that are later than those of members and of a joiner, among many more in names of strangers."""
    variables = {**os.environ, **victims.variables}
    status = [sys.executable, "-m", "diloco", "status", victims.address("p0"), "--json"]
    done = subprocess.run(status, capture_output=True, text=True, check=True, env=variables)
    program = [sys.executable, "-c", DIRECTORY_LIAR, str(LISTED), *json.loads(done.stdout)["directory"]]
    done = subprocess.run(program, capture_output=True, text=True, check=True, env=variables, timeout=START_S)
    if not 3 <= (taken := int(done.stdout)) <= MAX_TAKEN:
        raise NotHeld(f"{taken:,} records were taken")
    victims.join("late")
    victims.until(lambda: victims.version("late") > 0, "the joiner's first version")
    return f"{taken:,} of {LISTED:,} records were taken, and one joined"


def guessed_secret(_: Path) -> str:
    """Guesses of a passphrase, each tested against the certificate that any caller gets."""
    began_s, guesses = time.process_time(), 0
    while time.process_time() - began_s < CALM_S / 5:
        keys_of(f"a passphrase, number {guesses}")
        guesses += 1
    rate = guesses / (time.process_time() - began_s)
    if rate > MAX_GUESSES_PER_S:
        raise NotHeld(f"{rate:,.0f} guesses per CPU second")
    return f"{rate:.1f} guesses per CPU second"


def weak_secrets(_: Path) -> str:
    """Secrets that lists of passwords begin with, as operators write them."""
    if taken := [secret for secret in WEAK if not weakness(secret)]:
        raise NotHeld(f"taken: {', '.join(taken)}")
    return weakness(WEAK[0])


def contract_of_48_bits(_: Path) -> str:
    """Another contract whose digest begins as the ticket's does: 12 digits are found in days."""
    try:
        split_ticket("127.0.0.1:4000/5f2c9a7e11aa")
    except UsageError as error:
        return error.cause
    raise NotHeld("a ticket with the beginning of a digest is taken")


def another_user(folder: Path) -> str:
    """Another user of the machine says hello to a founder on loopback without a secret, then starts a peer and asks for
    the status, with a state folder of its own. The founder's own user joins."""
    folder.chmod(0o711)  # the key itself keeps that user out, and not a folder around it
    with closing(Victims(folder, 1, PACE, keyed=True)) as victims:
        state, ticket = str(folder / "state"), victims.ticket("p0")
        program = [sys.executable, "-c", ANOTHER_USER, victims.address("p0"), state]
        said = _refused(program, victims.variables, code=0)
        elsewhere = {**victims.variables, "XDG_STATE_HOME": str(folder / "elsewhere")}
        join = ("peer", "--join", ticket, "--dir", str(folder / "stranger"))
        for words in (join, ("status", victims.address("p0"))):
            _refused([sys.executable, "-m", "diloco", *words], elsewhere, code=TicketError.exit_code)
        victims.join("late")
        victims.until(lambda: victims.version("late") > 0, "the version of a peer of the same user")
    return said.splitlines()[-1]


def _refused(command: list[str], variables: dict[str, str], code: int) -> str:
    """Output of a program that must end with this code. Raises NotHeld where it ends with another, or goes on."""
    try:
        environment = {**os.environ, **variables}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=CALM_S * 3)
    except subprocess.TimeoutExpired:
        raise NotHeld(f"it was let in, and goes on: {command[1:]}") from None
    if done.returncode != code:
        raise NotHeld(f"exit code {done.returncode} in place of {code}: {done.stdout[-500:]}{done.stderr[-500:]}")
    return done.stdout + done.stderr


ATTACKS = (
    Attack("idle-connections", "outsider", idle_connections, peers=2),
    Attack("slow-tls", "outsider", slow_tls, peers=2, short=False, settings=PACE),
    Attack("slow-http2", "outsider", slow_http2, peers=2, short=False, settings=PACE),
    *(
        Attack(f"{MANY}-{name}", "outsider", partial(act, number=MANY), 2, slower=0.1, short=False, settings=PACE)
        for name, act in (("idle", idle_connections), ("slow-tls", slow_tls), ("slow-http2", slow_http2))
    ),
    Attack("joining-among-idle", "outsider", joining_among_idle, peers=2, short=False, settings=PACE),
    Attack("directory-lies", "outsider", directory_lies, peers=2, settings=PACE),
    Attack("another-user", "user", another_user),
    Attack("guessed-secret", "outsider", guessed_secret),
    Attack("weak-secrets", "outsider", weak_secrets),
    Attack("contract-of-48-bits", "outsider", contract_of_48_bits),
)
