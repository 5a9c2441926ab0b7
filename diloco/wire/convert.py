"""Plain values to protobuf messages and back.

`*_to_wire` turns values into messages, `*_from_wire` turns messages into values. What comes in is hostile:
`*_from_wire` raises ValueError for whatever is missing, out of range or too long, and nothing else.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message
from xxhash import xxh3_64_intdigest

from diloco.base.types import Commit, Counted, Member, Progress
from diloco.protocol import messages as m
from diloco.protocol.streams import Kind, StateOffer, StreamHeader, Welcome
from diloco.wire.chunks import Damaged
from diloco.wire.v1 import control_pb2 as control
from diloco.wire.v1 import parts_pb2 as parts
from diloco.wire.v1 import peer_pb2 as peer

WIRE_VERSION: Final = 1

MAX_LIST = MAX_LANES = 4096
MAX_TEXT = 256
"""Characters of a name, an address, a digest."""
MAX_REASON = 4096
"""Characters of a sentence for people. A longer one is cut when it is sent."""
MAX_COMMIT_BYTES = 1 << 20
MAX_CONTRACT_BYTES = 1 << 20
MAX_CHUNKS = 1 << 16
"""Chunks of one state; 65,536 hashes fill half of gRPC's 4 MiB."""

T = TypeVar("T")

# ---------------------------------------------------------------- envelopes


def seal(envelope: m.Envelope) -> control.Sealed:
    """An envelope as it travels."""
    data = envelope_to_wire(envelope).SerializeToString()
    return control.Sealed(envelope=data, checksum=xxh3_64_intdigest(data))


def unseal(message: control.Sealed) -> m.Envelope:
    """The envelope, if not a bit of it was flipped on the way. Raises Damaged, and ValueError."""
    if xxh3_64_intdigest(message.envelope) != message.checksum:
        raise Damaged("an envelope with a wrong checksum")
    try:
        return envelope_from_wire(control.Envelope.FromString(message.envelope))
    except DecodeError as error:
        raise ValueError("not an envelope") from error


def envelope_to_wire(envelope: m.Envelope) -> control.Envelope:
    message = control.Envelope(
        wire_version=WIRE_VERSION,
        run=envelope.run,
        contract=envelope.contract,
        lineage=envelope.lineage,
        sender=_member_to_wire(envelope.sender),
        view=envelope.view,
        sequence=envelope.sequence,
    )
    field, to_wire, _ = _BODIES[type(envelope.body)]
    getattr(message, field).CopyFrom(to_wire(envelope.body))
    return message


def envelope_from_wire(message: control.Envelope) -> m.Envelope:
    check_version(message.wire_version)
    field = message.WhichOneof("body")
    if field is None:
        raise ValueError("envelope without a body that this release knows")
    return m.Envelope(
        run=_text(message.run, "run"),
        contract=_text(message.contract, "contract"),
        lineage=_text(message.lineage, "lineage"),
        sender=_member_from_wire(_present(message, "sender")),
        view=_text(message.view, "view"),
        sequence=_whole(message.sequence, "sequence"),
        body=_BODY_FROM_WIRE[field](getattr(message, field)),
    )


def check_version(wire_version: int) -> None:
    if wire_version != WIRE_VERSION:
        raise ValueError(f"wire version {wire_version} meets {WIRE_VERSION}: both sides need the same diloco release")


# ---------------------------------------------------------------- bodies, in the order of the proto file


def _heartbeat_to_wire(body: m.Heartbeat) -> control.Heartbeat:
    return control.Heartbeat(
        version=body.version,
        founded=body.founded,
        joining=body.joining,
        progress=_progress_to_wire(body.progress),
        committed_tokens=body.committed_tokens,
        forks=_forks_to_wire(body.forks),
        deaf=body.deaf,
    )


def _heartbeat_from_wire(message: control.Heartbeat) -> m.Heartbeat:
    return m.Heartbeat(
        version=_whole(message.version, "version", low=-1),
        founded=message.founded,
        joining=message.joining,
        progress=_progress_from_wire(_present(message, "progress")),
        committed_tokens=_whole(message.committed_tokens, "committed_tokens"),
        forks=_items(message.forks, _fork_from_wire, "forks"),
        deaf=message.deaf,
    )


def _progress_to_wire(progress: Progress) -> control.Progress:
    return control.Progress(
        phase=progress.phase,
        version=progress.version,
        inner_step=progress.inner_step,
        tokens=progress.tokens,
        tokens_per_s=progress.tokens_per_s,
        loss=progress.loss,
        wire_bytes_sent=progress.wire_bytes_sent,
        first_counted_version=progress.first_counted_version,
        pace=progress.pace,
    )


def _progress_from_wire(message: control.Progress) -> Progress:
    return Progress(
        phase=_text(message.phase, "phase"),
        version=_whole(message.version, "version"),
        inner_step=_whole(message.inner_step, "inner_step"),
        tokens=_whole(message.tokens, "tokens"),
        tokens_per_s=_finite(message.tokens_per_s, "tokens_per_s"),
        loss=_finite(message.loss, "loss"),
        wire_bytes_sent=_whole(message.wire_bytes_sent, "wire_bytes_sent"),
        first_counted_version=_whole(message.first_counted_version, "first_counted_version", low=-1),
        pace=_finite(message.pace, "pace"),
    )


def _forks_to_wire(forks: Sequence[m.Fork]) -> list[control.Fork]:
    return [control.Fork(lineage=fork.lineage, tokens=fork.tokens) for fork in forks]


def _fork_from_wire(message: control.Fork) -> m.Fork:
    return m.Fork(_text(message.lineage, "lineage"), _whole(message.tokens, "tokens"))


def _ready_to_wire(body: m.Ready) -> control.Ready:
    return control.Ready(
        version=body.version,
        attempt=body.attempt,
        offer=_offer_to_wire(body.offer) if body.offer is not None else None,
        state_digest=body.state_digest,
        accepted_attempt=body.accepted_attempt,
        accepted=commit_to_wire(body.accepted) if body.accepted is not None else None,
        votes=body.votes,
    )


def _ready_from_wire(message: control.Ready) -> m.Ready:
    return m.Ready(
        version=_whole(message.version, "version"),
        attempt=_whole(message.attempt, "attempt"),
        offer=_offer_from_wire(message.offer) if message.HasField("offer") else None,
        state_digest=_text(message.state_digest, "state_digest"),
        accepted_attempt=_whole(message.accepted_attempt, "accepted_attempt", low=-1),
        accepted=commit_from_wire(message.accepted) if message.HasField("accepted") else None,
        votes=_texts(message.votes, "votes"),
    )


def _offer_to_wire(offer: m.Offer) -> control.Offer:
    return control.Offer(
        base_version=offer.base_version,
        weight=offer.weight,
        tokens=offer.tokens,
        blocks=offer.blocks,
        leaving=offer.leaving,
        send_bps=offer.send_bps,
        slack_s=offer.slack_s,
    )


def _offer_from_wire(message: control.Offer) -> m.Offer:
    return m.Offer(
        base_version=_whole(message.base_version, "base_version"),
        weight=_whole(message.weight, "weight"),
        tokens=_whole(message.tokens, "tokens"),
        blocks=_whole(message.blocks, "blocks"),
        leaving=message.leaving,
        send_bps=_whole(message.send_bps, "send_bps"),
        slack_s=_finite(message.slack_s, "slack_s"),
    )


def _gather_to_wire(body: m.Gather) -> control.Gather:
    return control.Gather(version=body.version, attempt=body.attempt, reason=body.reason[:MAX_REASON])


def _gather_from_wire(message: control.Gather) -> m.Gather:
    return m.Gather(*_attempt(message), reason=_reason(message.reason))


def _begin_to_wire(body: m.Begin) -> control.Begin:
    return control.Begin(
        version=body.version,
        attempt=body.attempt,
        contributors=[_counted_to_wire(counted) for counted in body.contributors],
        receivers=[_member_to_wire(member) for member in body.receivers],
        spans=_spans_to_wire(body.spans),
    )


def _spans_to_wire(spans: Sequence[m.Span]) -> list[control.Span]:
    return [control.Span(owner=span.owner, start=span.start, stop=span.stop) for span in spans]


def _begin_from_wire(message: control.Begin) -> m.Begin:
    return m.Begin(
        *_attempt(message),
        contributors=_items(message.contributors, _counted_from_wire, "contributors"),
        receivers=_items(message.receivers, _member_from_wire, "receivers"),
        spans=_items(message.spans, _span_from_wire, "spans"),
    )


def _counted_to_wire(counted: Counted) -> control.Counted:
    return control.Counted(
        peer=counted.peer,
        base_version=counted.base_version,
        weight=counted.weight,
        tokens=counted.tokens,
        blocks=counted.blocks,
    )


def _counted_from_wire(message: control.Counted) -> Counted:
    return Counted(
        peer=_text(message.peer, "peer"),
        base_version=_whole(message.base_version, "base_version"),
        weight=_whole(message.weight, "weight"),
        tokens=_whole(message.tokens, "tokens"),
        blocks=_whole(message.blocks, "blocks"),
    )


def _span_from_wire(message: control.Span) -> m.Span:
    return m.Span(_text(message.owner, "owner"), _whole(message.start, "start"), _whole(message.stop, "stop"))


def _stalled_to_wire(body: m.Stalled) -> control.Stalled:
    return control.Stalled(
        version=body.version,
        attempt=body.attempt,
        missing=body.missing,
        reason=body.reason[:MAX_REASON],
        offence=body.offence,
    )


def _stalled_from_wire(message: control.Stalled) -> m.Stalled:
    missing = _texts(message.missing, "missing")
    return m.Stalled(*_attempt(message), missing=missing, reason=_reason(message.reason), offence=message.offence)


def _repair_to_wire(body: m.Repair) -> control.Repair:
    return control.Repair(
        version=body.version,
        attempt=body.attempt,
        generation=body.generation,
        gone=body.gone,
        spans=_spans_to_wire(body.spans),
        reason=body.reason[:MAX_REASON],
    )


def _repair_from_wire(message: control.Repair) -> m.Repair:
    return m.Repair(
        *_attempt(message),
        generation=_whole(message.generation, "generation"),
        gone=_texts(message.gone, "gone"),
        spans=_items(message.spans, _span_from_wire, "spans"),
        reason=_reason(message.reason),
    )


def _abort_to_wire(body: m.Abort) -> control.Abort:
    return control.Abort(
        version=body.version,
        attempt=body.attempt,
        without=body.without,
        reason=body.reason[:MAX_REASON],
        offence=body.offence,
    )


def _abort_from_wire(message: control.Abort) -> m.Abort:
    without = _texts(message.without, "without")
    return m.Abort(*_attempt(message), without=without, reason=_reason(message.reason), offence=message.offence)


def _propose_to_wire(body: m.Propose) -> control.Propose:
    return control.Propose(version=body.version, attempt=body.attempt, commit=commit_to_wire(body.commit))


def _propose_from_wire(message: control.Propose) -> m.Propose:
    return m.Propose(*_attempt(message), commit=commit_from_wire(message.commit))


def _accept_to_wire(body: m.Accept) -> control.Accept:
    return control.Accept(
        version=body.version, attempt=body.attempt, commit_digest=body.commit_digest, votes=body.votes
    )


def _accept_from_wire(message: control.Accept) -> m.Accept:
    return m.Accept(
        *_attempt(message),
        commit_digest=_text(message.commit_digest, "commit_digest"),
        votes=_texts(message.votes, "votes"),
    )


def _committed_to_wire(body: m.Committed) -> control.Committed:
    return control.Committed(commit=commit_to_wire(body.commit))


def _committed_from_wire(message: control.Committed) -> m.Committed:
    return m.Committed(commit_from_wire(message.commit))


def _goodbye_to_wire(body: m.Goodbye) -> control.Goodbye:
    return control.Goodbye(
        version=body.version,
        attempt=body.attempt,
        heir=body.heir,
        votes=body.votes,
        accepted_attempt=body.accepted_attempt,
        accepted=commit_to_wire(body.accepted) if body.accepted is not None else None,
    )


def _goodbye_from_wire(message: control.Goodbye) -> m.Goodbye:
    return m.Goodbye(
        *_attempt(message),
        heir=_text(message.heir, "heir"),
        votes=_texts(message.votes, "votes"),
        accepted_attempt=_whole(message.accepted_attempt, "accepted_attempt", low=-1),
        accepted=commit_from_wire(message.accepted) if message.HasField("accepted") else None,
    )


def _evict_to_wire(body: m.Evict) -> control.Evict:
    return control.Evict(peer=body.peer, incarnation=body.incarnation)


def _evict_from_wire(message: control.Evict) -> m.Evict:
    return m.Evict(_text(message.peer, "peer"), _whole(message.incarnation, "incarnation"))


def _acquaintance_to_wire(word: m.Acquaintance) -> control.Acquaintance:
    return control.Acquaintance(
        member=_member_to_wire(word.member),
        beat=word.beat,
        progress=_progress_to_wire(word.progress),
        spread=word.spread,
        age_s=word.age_s,
    )


def _acquaintance_from_wire(message: control.Acquaintance) -> m.Acquaintance:
    if not message.age_s >= 0:
        raise ValueError(f"age_s is {message.age_s}")
    return m.Acquaintance(
        member=_member_from_wire(_present(message, "member")),
        beat=_whole(message.beat, "beat"),
        progress=_progress_from_wire(_present(message, "progress")),
        spread=_finite(message.spread, "spread"),
        age_s=_finite(message.age_s, "age_s"),
    )


def _greeting_to_wire(body: m.Greeting) -> control.Greeting:
    return control.Greeting(known=[_acquaintance_to_wire(word) for word in body.known], answer=body.answer)


def _greeting_from_wire(message: control.Greeting) -> m.Greeting:
    return m.Greeting(_items(message.known, _acquaintance_from_wire, "known"), message.answer)


def _invite_to_wire(body: m.Invite) -> control.Invite:
    return control.Invite(number=body.number, sender=_acquaintance_to_wire(body.sender))


def _invite_from_wire(message: control.Invite) -> m.Invite:
    return m.Invite(_whole(message.number, "number"), _acquaintance_from_wire(_present(message, "sender")))


_BODIES: dict[type[Any], tuple[str, Callable[[Any], Message], Callable[[Any], m.Body]]] = {
    m.Heartbeat: ("heartbeat", _heartbeat_to_wire, _heartbeat_from_wire),
    m.Ready: ("ready", _ready_to_wire, _ready_from_wire),
    m.Gather: ("gather", _gather_to_wire, _gather_from_wire),
    m.Begin: ("begin", _begin_to_wire, _begin_from_wire),
    m.Stalled: ("stalled", _stalled_to_wire, _stalled_from_wire),
    m.Repair: ("repair", _repair_to_wire, _repair_from_wire),
    m.Abort: ("abort", _abort_to_wire, _abort_from_wire),
    m.Propose: ("propose", _propose_to_wire, _propose_from_wire),
    m.Accept: ("accept", _accept_to_wire, _accept_from_wire),
    m.Committed: ("committed", _committed_to_wire, _committed_from_wire),
    m.Goodbye: ("goodbye", _goodbye_to_wire, _goodbye_from_wire),
    m.Evict: ("evict", _evict_to_wire, _evict_from_wire),
    m.Greeting: ("greeting", _greeting_to_wire, _greeting_from_wire),
    m.Invite: ("invite", _invite_to_wire, _invite_from_wire),
}
_BODY_FROM_WIRE = {field: from_wire for field, _, from_wire in _BODIES.values()}

# ---------------------------------------------------------------- replies and headers

_REPLY_TO_WIRE = {reply: control.Reply.Value(f"REPLY_{reply.name}") for reply in m.Reply}
_REPLY_FROM_WIRE = {number: reply for reply, number in _REPLY_TO_WIRE.items()}
_KIND_TO_WIRE = {kind: parts.Kind.Value(f"KIND_{kind.name}") for kind in Kind}
_KIND_FROM_WIRE = {number: kind for kind, number in _KIND_TO_WIRE.items()}


def reply_to_wire(reply: m.Reply, detail: str = "") -> control.DeliverReply:
    return control.DeliverReply(reply=_REPLY_TO_WIRE[reply], detail=detail[:MAX_REASON])


def reply_from_wire(message: control.DeliverReply) -> tuple[m.Reply, str]:
    """The reply, and why the bytes themselves were refused; empty when they were understood."""
    return _known(_REPLY_FROM_WIRE, message.reply, "reply"), _reason(message.detail)


def header_to_wire(header: StreamHeader) -> parts.StreamHeader:
    return parts.StreamHeader(
        wire_version=WIRE_VERSION,
        run=header.run,
        contract=header.contract,
        lineage=header.lineage,
        sender=_member_to_wire(header.sender),
        kind=_KIND_TO_WIRE[header.kind],
        version=header.version,
        attempt=header.attempt,
        generation=header.generation,
        known=[_acquaintance_to_wire(word) for word in header.known],
    )


def header_from_wire(message: parts.StreamHeader) -> StreamHeader:
    check_version(message.wire_version)
    return StreamHeader(
        run=_text(message.run, "run"),
        contract=_text(message.contract, "contract"),
        lineage=_text(message.lineage, "lineage"),
        sender=_member_from_wire(_present(message, "sender")),
        kind=_known(_KIND_FROM_WIRE, message.kind, "kind"),
        version=_whole(message.version, "version"),
        attempt=_whole(message.attempt, "attempt"),
        generation=_whole(message.generation, "generation"),
        known=_items(message.known, _acquaintance_from_wire, "known"),
    )


# ---------------------------------------------------------------- joining and state


def welcome_to_wire(welcome: Welcome) -> peer.Welcome:
    return peer.Welcome(
        wire_version=WIRE_VERSION,
        contract=welcome.contract,
        lineage=welcome.lineage,
        version=welcome.version,
        founded=welcome.founded,
        members=[_member_to_wire(member) for member in welcome.members],
        directory=welcome.directory,
        layout=welcome.layout,
        data=welcome.data,
        forks=_forks_to_wire(welcome.forks),
    )


def welcome_from_wire(message: peer.Welcome) -> Welcome:
    check_version(message.wire_version)
    if len(message.contract) > MAX_CONTRACT_BYTES:
        raise ValueError(f"contract of {len(message.contract)} bytes, at most {MAX_CONTRACT_BYTES} may be")
    if not message.members:
        raise ValueError("a welcome without members: whoever gives it is the first")
    return Welcome(
        contract=message.contract,
        lineage=_text(message.lineage, "lineage"),
        version=_whole(message.version, "version", low=-1),
        founded=message.founded,
        members=_items(message.members, _member_from_wire, "members"),
        directory=_texts(message.directory, "directory"),
        layout=_text(message.layout, "layout"),
        data=_text(message.data, "data"),
        forks=_items(message.forks, _fork_from_wire, "forks"),
    )


def lanes_from_wire(message: peer.LanesReply) -> tuple[str, ...]:
    """Addresses; whether they can be dialled, whoever dials them sees."""
    if len(message.addresses) > MAX_LANES or any(len(address) > MAX_TEXT for address in message.addresses):
        raise ValueError(f"{len(message.addresses)} lanes, at most {MAX_LANES} of at most {MAX_TEXT} characters may be")
    return tuple(message.addresses)


def state_offer_to_wire(offer: StateOffer) -> peer.StateOffer:
    return peer.StateOffer(
        version=offer.version,
        commit=commit_to_wire(offer.commit) if offer.commit is not None else None,
        digest=offer.digest,
        steps=offer.steps,
        chunk_hashes=[bytes.fromhex(text) for text in offer.chunk_hashes],
    )


def state_offer_from_wire(message: peer.StateOffer) -> StateOffer:
    if len(message.chunk_hashes) > MAX_CHUNKS:
        raise ValueError(f"{len(message.chunk_hashes)} chunk_hashes, at most {MAX_CHUNKS} may be")
    if any(len(digest) != 32 for digest in message.chunk_hashes):
        raise ValueError("the hash of a chunk has 32 bytes")
    return StateOffer(
        version=_whole(message.version, "version"),
        commit=commit_from_wire(message.commit) if message.HasField("commit") else None,
        digest=_text(message.digest, "digest"),
        steps=_items(message.steps, lambda steps: _whole(steps, "steps"), "steps"),
        chunk_hashes=tuple(digest.hex() for digest in message.chunk_hashes),
    )


def commit_to_wire(commit: Commit) -> bytes:
    return bytes.fromhex(commit.digest) + commit.to_bytes()


def commit_from_wire(data: bytes) -> Commit:
    if len(data) > MAX_COMMIT_BYTES:
        raise ValueError(f"commit of {len(data)} bytes, at most {MAX_COMMIT_BYTES} may be")
    sha256, text = data[:32], data[32:]
    if hashlib.sha256(text).digest() != sha256:
        raise ValueError("a commit that does not match its digest")
    return Commit.from_bytes(text)


def _member_to_wire(member: Member) -> control.Member:
    return control.Member(
        peer=member.peer, incarnation=member.incarnation, address=member.address, witness=member.witness
    )


def _member_from_wire(message: control.Member) -> Member:
    return Member(
        peer=_text(message.peer, "peer"),
        incarnation=_whole(message.incarnation, "incarnation"),
        address=_text(message.address, "address"),
        witness=message.witness,
    )


# ---------------------------------------------------------------- checks


def _attempt(message: Any) -> tuple[int, int]:
    return _whole(message.version, "version"), _whole(message.attempt, "attempt")


def _present(message: Message, field: str) -> Any:
    if not message.HasField(field):
        raise ValueError(f"{message.DESCRIPTOR.name} without {field}")
    return getattr(message, field)


def _whole(value: int, name: str, low: int = 0) -> int:
    if not low <= value < 2**63:
        raise ValueError(f"{name} is {value}, must be at least {low} and below 2^63")
    return value


def _finite(value: float, name: str) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}")
    return value


def _text(value: str, name: str) -> str:
    if len(value) > MAX_TEXT:
        raise ValueError(f"{name} has {len(value)} characters, at most {MAX_TEXT} may be")
    return value


def _reason(value: str) -> str:
    if len(value) > MAX_REASON:
        raise ValueError(f"reason has {len(value)} characters, at most {MAX_REASON} may be")
    return value


def _texts(values: Collection[str], name: str) -> tuple[str, ...]:
    return _items(values, lambda value: _text(value, name), name)


def _items(values: Collection[Any], convert: Callable[[Any], T], name: str) -> tuple[T, ...]:
    if len(values) > MAX_LIST:
        raise ValueError(f"{len(values)} {name}, at most {MAX_LIST} may be")
    return tuple(convert(value) for value in values)


def _known(table: Mapping[Any, T], number: int, name: str) -> T:
    if number not in table:
        raise ValueError(f"unknown {name} {number}")
    return table[number]
