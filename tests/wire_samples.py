"""One message of each kind with every field set, and some with the optional ones left out.

Their bytes, as they were written when wire version 2 was new, lie in tests/data/wire-2, under the names used here. A
new kind of message gets a sample and a file; the bytes of the others do not change while the wire version is the same.
"""

from __future__ import annotations

from dataclasses import replace

from diloco.base.types import Blocks, Commit, Counted, Leases, Member, Omitted, Phase, Progress, Voter
from diloco.protocol import messages as m
from diloco.protocol.greetings import Acquaintance, Greeting, Invite
from diloco.protocol.streams import Kind, StateOffer, StreamHeader, Welcome

DIGEST = "0123456789abcdef" * 4
LINEAGE = "run-a/1"
ALICE = Member("alice", 7, "10.0.0.1:1000")
WITNESS = Member("witness", 2**63 - 1, "[::1]:65535", witness=True)
FORKS = (m.Fork("run-a/0", 2**40), m.Fork(LINEAGE, 0))
PROGRESS = Progress(Phase.SYNCING, 3, 40, 2**33, 1234.5, 2345.75, 3.25, 2**34, 2)
NOT_COUNTED = Progress(loss=-1.5e-7)
COUNTED = (Counted("alice", 2**50, 2, 4096, 8192, 16), Counted("größer", 0, 0, 1, 1, 0))
LEASES = Leases(64, {"alice": (Blocks(0, 16), Blocks(32, 48)), "größer": ()}, returned=(Blocks(16, 32),), lost=5)
COMMIT = Commit(
    version=3,
    height=5,
    previous=DIGEST,
    lineage=LINEAGE,
    fragment=1,
    view=(ALICE, WITNESS),
    counted=COUNTED,
    omitted=(Omitted("alice", 4, 9),),
    mean_digest=DIGEST[::-1],
    tokens=2**62,
    leases=LEASES,
    state_digest=DIGEST,
    voters=(Voter("alice", 2**50, -1), Voter("witness", 0, 2)),
    evicted=("bob", "größer"),
)
FOUNDING = Commit(
    0, 0, DIGEST, LINEAGE, -1, (ALICE,), (), (), "", 0, Leases(0, {}), DIGEST, voters=(Voter("alice", 2**50, -1),)
)
VIEW_COMMIT = replace(
    COMMIT, height=6, fragment=-1, counted=(), omitted=(), mean_digest="", state_digest="", drafter="alice"
)
OFFER = m.Offer(2**50, 2, 4096, 8192, 16, leaving=True, send_bps=10**9, slack_s=0.125)
SPANS = (m.Span("alice", 0, 7), m.Span("größer", 7, 9))
KNOWN = (Acquaintance(ALICE, 12, PROGRESS, 0.5, 0.0), Acquaintance(WITNESS, 1, NOT_COUNTED, age_s=2.5))
HEARTBEAT = m.Heartbeat(3, 5, True, PROGRESS, 2**35, FORKS, deaf=True, moved_bytes=2**36)
REASON = "größer sent nothing for 12 s"

BODIES: dict[str, m.Body] = {
    "heartbeat": replace(HEARTBEAT, leaving=True, reaches=("bob",), stands=4, abstains=True),
    "heartbeat-least": m.Heartbeat(-1, -1, False, NOT_COUNTED),
    "ready": m.Ready(4, 2, OFFER, DIGEST, 1, COMMIT),
    "ready-least": m.Ready(1, 0, None, ""),
    "gather": m.Gather(4, 2, REASON),
    "begin": m.Begin(4, 2, COUNTED, (ALICE, WITNESS), SPANS, DIGEST, ("alice",)),
    "stalled": m.Stalled(4, 2, ("bob", "carol"), REASON, offence=True, still=True),
    "repair": m.Repair(4, 2, 1, ("bob",), SPANS, REASON),
    "abort": m.Abort(4, 2, ("bob",), REASON, offence=True),
    "propose": m.Propose(4, 2, COMMIT, 3, 1),
    "propose-least": m.Propose(0, 0, FOUNDING),
    "accept": m.Accept(4, 2, DIGEST),
    "committed": m.Committed(COMMIT),
    "committed-founding": m.Committed(FOUNDING),
    "committed-view": m.Committed(VIEW_COMMIT),
    "goodbye": m.Goodbye(),
    "evict": m.Evict("bob", 99),
    "greeting": Greeting(KNOWN, answer=True),
    "invite": Invite(6, KNOWN[1]),
    "invite-lives": Invite(7, replace(KNOWN[0], start_tokens=2**32, earlier_tokens=2**40)),
}
ENVELOPES = {
    name: m.Envelope("run-a", DIGEST, LINEAGE, ALICE, 2**50, 3, 2**40, DIGEST[::-1], sequence, body)
    for sequence, (name, body) in enumerate(BODIES.items())
}
HEADERS = {
    "header": StreamHeader("run-a", DIGEST, LINEAGE, WITNESS, Kind.ANSWER, 4, 2, 1, KNOWN),
    "header-least": StreamHeader("run-a", "", "", ALICE, Kind.CONTRIBUTION, 0, 0, 0),
}
WELCOMES = {
    "welcome": Welcome(
        b'{"run":"a"}', LINEAGE, 3, True, (ALICE, WITNESS), ("/ip4/1", "/ip4/2"), DIGEST, "data", FORKS, boot=2**50
    ),
    "welcome-least": Welcome(b"", "", -1, False, (ALICE,), (), "", ""),
}
STATE_OFFERS = {
    "state-offer": StateOffer(3, COMMIT, DIGEST, (3, 0, 2), (DIGEST, DIGEST[::-1])),
    "state-offer-least": StateOffer(0, None, "", (), ()),
}
REPLIES = {"reply": (m.Reply.BARRED, REASON), "reply-least": (m.Reply.OK, "")}
LANES = {"lanes": ("10.0.0.1:1000", "10.0.0.1:1001")}
