"""Messages come back from the wire the same, and no bytes of a stranger raise anything but ValueError."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import astuple, replace
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from diloco.base.types import MAX_LINEAGE, Blocks, Commit, Counted, Leases, Member, Omitted, Progress, Voter
from diloco.protocol import messages as m
from diloco.protocol.greetings import Acquaintance, Greeting, Invite
from diloco.protocol.streams import MAX_CHUNKS, Kind, Part, ProcessId, StateOffer, StreamHeader, Welcome
from diloco.wire import chunks, convert
from diloco.wire.v1 import control_pb2, parts_pb2, peer_pb2
from tests import wire_samples as samples

whole = st.integers(0, 2**63 - 1)
signed = st.integers(-1, 2**63 - 1)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(["", "x" * 256])
texts = st.lists(text, max_size=3).map(tuple)
lineage = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.just("x" * MAX_LINEAGE)
number = st.floats(allow_nan=False, allow_infinity=False)
ages = st.floats(0, 1e9)
members = st.builds(Member, text, whole, text, st.booleans())
counted = st.builds(Counted, text, whole, whole, whole, whole, whole)
blocks = st.lists(st.tuples(whole, whole).map(lambda ends: Blocks(min(ends), max(ends))), max_size=2).map(tuple)
leases = st.builds(Leases, whole, st.dictionaries(text, blocks, max_size=2), blocks, whole)
several_members = st.lists(members, max_size=3).map(tuple)
welcoming = st.lists(members, min_size=1, max_size=3).map(tuple)
several_counted = st.lists(counted, max_size=3).map(tuple)
several_omitted = st.lists(st.builds(Omitted, text, whole, whole), max_size=3).map(tuple)
voters = st.lists(st.builds(Voter, text, whole, signed), max_size=3).map(tuple)
commits = st.builds(
    Commit, whole, whole, text, lineage, signed, several_members, several_counted, several_omitted, text, whole, leases,
    text, text, voters, texts,
)  # fmt: skip
maybe_commit = st.none() | commits
offers = st.builds(m.Offer, whole, whole, whole, whole, whole, st.booleans(), whole, ages)
progress = st.builds(Progress, text, whole, whole, whole, number, number, number, whole, signed)
spans = st.lists(st.builds(m.Span, text, whole, whole), max_size=3).map(tuple)
forks = st.lists(st.builds(m.Fork, lineage, whole), max_size=3).map(tuple)
words = st.builds(Acquaintance, members, whole, progress, number, ages, whole, whole)
acquaintances = st.lists(words, max_size=3).map(tuple)
bodies = st.one_of(
    st.builds(
        m.Heartbeat, signed, signed, st.booleans(), progress, whole, forks, st.booleans(), whole, st.booleans(), texts,
        signed, st.booleans(),
    ),
    st.builds(m.Ready, whole, whole, st.none() | offers, text, signed, maybe_commit),
    st.builds(m.Gather, whole, whole, text),
    st.builds(m.Begin, whole, whole, several_counted, several_members, spans, text, texts),
    st.builds(m.Stalled, whole, whole, texts, text, st.booleans(), st.booleans()),
    st.builds(m.Repair, whole, whole, whole, texts, spans, text),
    st.builds(m.Abort, whole, whole, texts, text, st.booleans()),
    st.builds(m.Propose, whole, whole, commits, signed, signed),
    st.builds(m.Accept, whole, whole, text),
    st.builds(m.Committed, commits),
    st.builds(m.Goodbye),
    st.builds(m.Evict, text, whole),
    st.builds(Greeting, acquaintances, st.booleans()),
    st.builds(Invite, whole, words),
)  # fmt: skip
envelopes = st.builds(m.Envelope, text, text, lineage, members, whole, whole, whole, text, whole, bodies)
hashes = st.lists(st.binary(min_size=32, max_size=32).map(bytes.hex), max_size=3).map(tuple)
steps = st.lists(whole, max_size=3).map(tuple)

ALICE = Member("alice", 7, "127.0.0.1:1")
PROGRESS = Progress(pace=1234.5)
HEARTBEAT = m.Heartbeat(3, 3, False, PROGRESS, deaf=True)


def envelope(body: m.Body) -> m.Envelope:
    return m.Envelope("run", "contract", "lineage", ALICE, 5, 1, 2, "head", 3, body)


def over_the_wire(message: Message) -> Message:
    return type(message).FromString(message.SerializeToString())


def same(got: object, sent: object) -> bool:
    """Also in what does not count where two are compared: the address of a member."""
    return got == sent and astuple(got) == astuple(sent)


# ---------------------------------------------------------------- round trips


@given(envelopes)
def test_an_envelope_comes_back_the_same(sent):
    assert same(convert.envelope_from_wire(over_the_wire(convert.envelope_to_wire(sent))), sent)


def test_every_body_has_a_place_in_the_envelope():
    fields = control_pb2.Envelope.DESCRIPTOR.oneofs_by_name["body"].fields
    assert {field.name for field in fields} == {kind.__name__.lower() for kind in m.Body.__args__}


@given(st.builds(StreamHeader, text, text, lineage, members, st.sampled_from(Kind), whole, whole, whole))
def test_a_header_comes_back_the_same(sent):
    assert same(convert.header_from_wire(over_the_wire(convert.header_to_wire(sent))), sent)


@given(
    st.builds(
        Welcome,
        st.binary(max_size=9), lineage, signed, st.booleans(), welcoming, texts, text, text,
        process=st.none() | st.builds(ProcessId, text, text, text, st.integers(1, 2**63 - 1), whole), boot=whole,
    )
)  # fmt: skip
def test_a_welcome_comes_back_the_same(sent):
    assert same(convert.welcome_from_wire(over_the_wire(convert.welcome_to_wire(sent))), sent)


@given(st.builds(StateOffer, whole, maybe_commit, text, steps, hashes))
def test_a_state_offer_comes_back_the_same(sent):
    assert same(convert.state_offer_from_wire(over_the_wire(convert.state_offer_to_wire(sent))), sent)


@pytest.mark.parametrize("reply", m.Reply)
def test_a_reply_comes_back_the_same(reply):
    assert convert.reply_from_wire(over_the_wire(convert.reply_to_wire(reply))) == (reply, "")
    assert convert.reply_from_wire(over_the_wire(convert.reply_to_wire(reply, "why"))) == (reply, "why")


def test_a_long_reason_is_cut_rather_than_refused():
    sent = envelope(m.Gather(1, 2, "because " * 9999))
    got = convert.envelope_from_wire(convert.envelope_to_wire(sent)).body
    assert got == m.Gather(1, 2, ("because " * 9999)[: m.MAX_REASON])


# ---------------------------------------------------------------- recorded bytes

RECORDED = Path(__file__).parent / "data" / "wire-2"
PAIRS = [
    (samples.ENVELOPES, convert.seal, convert.unseal, control_pb2.Sealed),
    (samples.HEADERS, convert.header_to_wire, convert.header_from_wire, parts_pb2.StreamHeader),
    (samples.WELCOMES, convert.welcome_to_wire, convert.welcome_from_wire, peer_pb2.Welcome),
    (samples.STATE_OFFERS, convert.state_offer_to_wire, convert.state_offer_from_wire, peer_pb2.StateOffer),
    (samples.REPLIES, lambda reply: convert.reply_to_wire(*reply), convert.reply_from_wire, control_pb2.DeliverReply),
    (samples.LANES, lambda lanes: peer_pb2.LanesReply(addresses=lanes), convert.lanes_from_wire, peer_pb2.LanesReply),
]
CASES = {name: (value, *others) for values, *others in PAIRS for name, value in values.items()}


@pytest.mark.parametrize("name", CASES)
def test_recorded_bytes_read_to_the_same_values_and_are_written_again(name):
    value, to_wire, from_wire, kind = CASES[name]
    recorded = (RECORDED / f"{name}.bin").read_bytes()
    read_again = from_wire(kind.FromString(recorded))
    assert read_again == value
    assert to_wire(read_again).SerializeToString() == to_wire(value).SerializeToString() == recorded


def test_every_kind_of_message_was_recorded():
    assert set(CASES) == {path.stem for path in RECORDED.iterdir()}
    assert {type(body) for body in samples.BODIES.values()} == set(m.Body.__args__)


# ---------------------------------------------------------------- hostile bytes

READERS = {
    control_pb2.Envelope: convert.envelope_from_wire,
    control_pb2.DeliverReply: convert.reply_from_wire,
    parts_pb2.StreamHeader: convert.header_from_wire,
    peer_pb2.Welcome: convert.welcome_from_wire,
    peer_pb2.StateOffer: convert.state_offer_from_wire,
    parts_pb2.Chunks: lambda message: chunks.PartAssembler(1000).join(message),
}


def read(kind: type[Message], data: bytes) -> None:
    """Parse and convert; the two errors that the link expects are fine."""
    with suppress(DecodeError, ValueError):
        READERS[kind](kind.FromString(data))


@given(st.sampled_from(list(READERS)), st.binary(max_size=200))
def test_random_bytes_raise_nothing_else(kind, data):
    read(kind, data)


@given(envelopes, st.data())
def test_damaged_envelopes_raise_nothing_else(sent, data):
    damaged = bytearray(convert.envelope_to_wire(sent).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    read(control_pb2.Envelope, bytes(damaged))


json_trees = st.recursive(st.none() | st.integers() | st.text(max_size=3), lambda tree: st.lists(tree, max_size=3))


@given(st.binary(max_size=200) | json_trees.map(lambda tree: json.dumps(tree).encode()) | st.just(b"[" * 10**5))
def test_a_random_commit_raises_nothing_else(data):
    with pytest.raises(ValueError):  # noqa: PT011  (whatever it says)
        convert.commit_from_wire(data)


def wire(**changes: object) -> control_pb2.Envelope:
    """A good heartbeat's envelope with some fields of the heartbeat changed."""
    message = convert.envelope_to_wire(envelope(HEARTBEAT))
    for name, value in changes.items():
        owner = message.heartbeat if name in message.heartbeat.DESCRIPTOR.fields_by_name else message.heartbeat.progress
        setattr(owner, name, value)
    return message


def refuse(message: control_pb2.Envelope, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        convert.envelope_from_wire(message)


def test_the_good_one_passes():
    assert convert.envelope_from_wire(wire()).body == HEARTBEAT


def test_numbers_out_of_range_are_refused():
    refuse(wire(version=-2), "version is -2")
    refuse(wire(height=-2), "height is -2")
    refuse(wire(stands=-2), "stands is -2")
    refuse(wire(tokens=2**63), "tokens")
    refuse(wire(first_counted_version=-2), "first_counted_version")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_floats_that_are_not_finite_are_refused(bad):
    refuse(wire(loss=bad), "loss")
    refuse(wire(tokens_per_s=bad), "tokens_per_s")
    refuse(wire(pace=bad), "pace")


def test_long_texts_and_lists_are_refused():
    refuse(wire(phase="x" * 257), "phase has 257 characters")
    refuse(convert.envelope_to_wire(replace(envelope(HEARTBEAT), run="x" * 300)), "run has 300")
    refuse(convert.envelope_to_wire(envelope(m.Stalled(1, 1, ("p",) * 4097, ""))), "4097 missing")
    refuse(convert.envelope_to_wire(envelope(replace(HEARTBEAT, reaches=("p",) * 4097))), "4097 reaches")
    message = convert.envelope_to_wire(envelope(m.Gather(1, 1, "")))
    message.gather.reason = "x" * 4097
    refuse(message, "reason has 4097")


def test_missing_pieces_are_refused():
    no_sender, no_body, no_progress = wire(), wire(), wire()
    no_sender.ClearField("sender")
    no_body.ClearField("heartbeat")
    no_progress.heartbeat.ClearField("progress")
    refuse(no_sender, "Envelope without sender")
    refuse(no_body, "without a body")
    refuse(no_progress, "Heartbeat without progress")


def test_another_wire_version_is_refused_with_the_way_out():
    message = wire()
    message.wire_version = 1
    refuse(message, "wire version 1 meets 2: both sides need the same diloco release")
    with pytest.raises(ValueError, match="wire version 0"):
        convert.welcome_from_wire(peer_pb2.Welcome())


def test_a_welcome_names_whoever_gives_it():
    with pytest.raises(ValueError, match="0 members, must be 1 to"):
        convert.welcome_from_wire(peer_pb2.Welcome(wire_version=convert.WIRE_VERSION))


def test_a_process_without_a_pid_or_with_long_names_is_refused():
    message = convert.welcome_to_wire(samples.WELCOMES["welcome"])
    message.process.started = 7
    with pytest.raises(ValueError, match="pid is 0, must be at least 1"):
        convert.welcome_from_wire(message)
    message.process.pid, message.process.boot = 1, "x" * 300
    with pytest.raises(ValueError, match="boot has 300 characters"):
        convert.welcome_from_wire(message)


def test_unknown_enums_are_refused():
    with pytest.raises(ValueError, match="unknown reply 99"):
        convert.reply_from_wire(control_pb2.DeliverReply(reply=99))
    with pytest.raises(ValueError, match="unknown reply 0"):
        convert.reply_from_wire(control_pb2.DeliverReply())
    header = convert.header_to_wire(StreamHeader("r", "c", "l", ALICE, Kind.MEAN, 1, 1, 0))
    header.kind = 0
    with pytest.raises(ValueError, match="unknown kind 0"):
        convert.header_from_wire(header)


def test_a_state_offer_of_too_many_or_broken_hashes_is_refused():
    with pytest.raises(ValueError, match="chunk_hashes"):
        convert.state_offer_from_wire(peer_pb2.StateOffer(chunk_hashes=[b""] * (MAX_CHUNKS + 1)))
    with pytest.raises(ValueError, match="32 bytes"):
        convert.state_offer_from_wire(peer_pb2.StateOffer(chunk_hashes=[b"short"]))


# ---------------------------------------------------------------- chunks


def cut(*payloads: bytes, first: int = 0) -> list[parts_pb2.Chunks]:
    parts = [Part(first + index, payload) for index, payload in enumerate(payloads)]
    return [over_the_wire(one).chunks for one in chunks.cut(parts, parts_pb2.SendPartsRequest, chunks.MessageSize())]


def join(messages: list[parts_pb2.Chunks], max_part_bytes: int = 10**9) -> list[Part]:
    assembler = chunks.PartAssembler(max_part_bytes)
    parts = [part for message in messages for part in assembler.join(message)]
    assembler.finish()
    return parts


SIZES = st.sampled_from([0, 1, 4095, 4096, 16_384, chunks.MESSAGE_BYTES - 1, chunks.MESSAGE_BYTES, 300_000])


@given(st.lists(SIZES, max_size=6), st.integers(0, 9))
def test_parts_are_cut_and_joined(sizes, first):
    payloads = [bytes([index]) * size for index, size in enumerate(sizes)]
    messages = cut(*payloads, first=first)
    assert join(messages) == [Part(first + index, payload) for index, payload in enumerate(payloads)]
    assert all(sum(len(chunk.payload) for chunk in message.chunks) <= chunks.MESSAGE_BYTES for message in messages)


def test_small_parts_share_messages():
    assert len(cut(*[b"x" * 16_384] * 64)) == 16
    assert len(cut(*[b""] * 2048)) == 2


def test_the_pace_follows_the_receiver():
    size = chunks.MessageSize()
    size.measured(10**9, 1.0)
    assert size.message_bytes == chunks.MAX_MESSAGE_BYTES
    size.measured(4 * 10**6, 1.0)
    assert size.message_bytes == 200_000
    size.measured(10**5, 1.0, fed=False)
    assert size.message_bytes == 200_000, "it took all there was"
    size.measured(5 * 10**6, 1.0, fed=False)
    assert size.message_bytes == 250_000
    size.measured(10**5, 1.0)
    assert size.message_bytes == chunks.MESSAGE_BYTES
    size.measured(0, 0.0)
    assert size.message_bytes == chunks.MESSAGE_BYTES


def test_the_largest_part_allowed_passes_and_one_byte_more_does_not():
    messages = cut(b"x" * 1001)
    assert len(join(messages, 1001)) == 1
    with pytest.raises(ValueError, match="part 0 has 1001 bytes, at most 1000 may be"):
        join(messages, 1000)


def damage(change) -> None:
    """Two parts, the second in three chunks; `change` spoils one of the messages."""
    messages = cut(b"a" * 5000, b"b" * (2 * chunks.MESSAGE_BYTES + 9))
    change(messages)
    join(messages)


def test_an_undamaged_stream_passes():
    damage(lambda messages: None)


def flip_a_bit(messages):
    payload = bytearray(messages[1].chunks[0].payload)
    payload[77] ^= 1
    messages[1].chunks[0].payload = bytes(payload)


def move_to_another_part(messages):
    messages[0].chunks[0].part = 5


def swap(messages):
    messages[1], messages[2] = messages[2], messages[1]


def lose_one(messages):
    del messages[2]


def lose_the_end(messages):
    del messages[-1]


def repeat_one(messages):
    messages.insert(2, messages[1])


def interleave(messages):
    messages.insert(2, messages[0])


def grow(messages):
    chunk = messages[2].chunks[0]
    chunk.part_bytes += 1
    chunk.checksum = chunks.checksum(chunk.payload, chunk.part, chunk.part_bytes, chunk.offset)


def overflow(messages):
    chunk = messages[-1].chunks[0]
    chunk.payload += b"!"
    chunk.checksum = chunks.checksum(chunk.payload, chunk.part, chunk.part_bytes, chunk.offset)


def crumble(messages):
    chunk = messages[1].chunks[0]
    chunk.payload = chunk.payload[:100]
    chunk.checksum = chunks.checksum(chunk.payload, chunk.part, chunk.part_bytes, chunk.offset)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (flip_a_bit, "checksum"),
        (move_to_another_part, "checksum"),
        (swap, "goes on at byte 65536 instead of 0"),
        (lose_one, "instead of 65536"),
        (lose_the_end, "ends after 131072 of 131081 bytes"),
        (repeat_one, "instead of 65536"),
        (interleave, "part 0 begins within part 1"),
        (grow, "begins within"),
        (overflow, "10 bytes at 131072 of 131081"),
        (crumble, "100 bytes at 0"),
    ],
)
def test_damaged_streams_are_refused(change, reason):
    with pytest.raises(ValueError, match=reason):
        damage(change)


def test_too_many_chunks_or_parts_are_refused():
    crowd = parts_pb2.Chunks(chunks=[parts_pb2.Chunk()] * (chunks.MESSAGE_CHUNKS + 1))
    with pytest.raises(ValueError, match="more than 1024 chunks"):
        join([crowd])
    with pytest.raises(ValueError, match="more than 1048576 parts"):
        join(cut(b"x", first=chunks.MAX_PARTS))
