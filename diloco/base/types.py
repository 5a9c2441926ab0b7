"""The plain values that travel through the system: members, leases, contributions, commits, outcomes.

Nothing here imports torch, a socket, a clock or a random source. A `Commit` is the record that makes a version;
its canonical JSON is what is hashed, sent and kept, so two peers that hold the same bytes hold the same record.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any, Final

MAX_TEXT: Final = 256
"""Characters of a name, an address, a digest."""
MAX_LIST: Final = 4096
MAX_LINEAGE: Final = 64
"""Characters of a lineage's name: it is a part of a digest."""


@dataclass(frozen=True, slots=True)
class MinValue:
    """`Annotated[int, MinValue(-1)]`: the least number that is taken."""

    value: int


@dataclass(frozen=True, slots=True)
class MinLength:
    """The fewest entries of a tuple."""

    length: int


@dataclass(frozen=True, slots=True)
class MaxLength:
    """The most characters of a text, bytes of a `bytes`, entries of a tuple."""

    length: int
    cut: bool = False
    """A longer text is cut when it is sent, not refused: it is for people."""


@dataclass(frozen=True, slots=True)
class HexDigest:
    """A hexadecimal text that travels as its `size` raw bytes."""

    size: int


LineageName = Annotated[str, MaxLength(MAX_LINEAGE)]
"""Name of a lineage."""
StateVersion = Annotated[int, MinValue(-1)]
"""The version of a state; -1: none yet."""


@dataclass(frozen=True, slots=True)
class Member:
    """One life of a peer as the others know it. Equal are those of one life, whatever address they give."""

    peer: str
    """Name, unique in the run; kept when the peer comes back."""
    incarnation: int
    """Larger at each start of the process (`clock.new_incarnation`), so that no earlier life is taken for this one."""
    address: str = field(compare=False)
    """`host:port` of its exchange."""
    witness: bool = field(default=False, compare=False)
    """It only votes: it holds no state, trains nothing, owns no parts and coordinates nothing."""


@dataclass(frozen=True, slots=True)
class Voter:
    """A member that votes on the successor of a commit."""

    peer: str
    boot: int
    """Its process (`Counted`), as the drafter knew it: the vote of another counts in a majority, and in no half."""
    since: Annotated[int, MinValue(-1)]
    """Version of the commit that first named it: it has voted on all later ones. Of a founder one below its own."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Data blocks `start` to `stop` (exclusive), counted over all epochs: epoch = position // blocks per epoch."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Leases:
    """Which data blocks belong to whom at one version. See `diloco.protocol.leases`."""

    cursor: int
    """First block that was never given to anybody."""
    held: dict[str, tuple[Blocks, ...]]
    """Blocks a peer may train on and has not contributed yet, in order."""
    returned: tuple[Blocks, ...] = ()
    """Handed back by leavers; given out again first."""
    lost: int = 0
    """Blocks that went away with dead peers, in all."""


@dataclass(frozen=True, slots=True)
class Counted:
    """One contribution as a commit counts it. Boot and base version name it among those of a peer."""

    peer: str
    boot: int
    """The process of the peer that trained it, by its start (`clock.new_incarnation`): another has other progress."""
    base_version: int
    """The version whose anchor it is measured against."""
    weight: int
    """Its share in the mean is weight / sum of weights."""
    tokens: int
    """Tokens trained for it."""
    blocks: int
    """Data blocks used for it, from the front of the peer's lease."""


@dataclass(frozen=True, slots=True)
class Omitted:
    """Parts `start` to `stop` (exclusive) of a mean without a contribution that the mean counts elsewhere.

    The contributor's progress in these parts stays its own and goes into its next pseudo-gradient.
    """

    peer: str
    start: int
    stop: int


@dataclass(frozen=True)
class Commit:
    """A record on which the peers of a run agreed. Commits form a chain by `previous`.

    A *version commit* makes a version: a mean moves a fragment's anchor. A *view commit* only changes members; its
    version is that of the commit before. A *founding* begins a lineage, on the state of the commit before.
    """

    version: int
    height: int
    """Commits before it in its chain, foundings among them: two of one height are of two lineages."""
    previous: str
    """Digest of the commit before; the contract's digest for the first."""
    lineage: str
    """Which founding this chain descends from: a new one at each `diloco peer CONTRACT` and each refounding resume."""
    fragment: int
    """The fragment whose anchor moves; -1 for a view commit or a founding, which move none."""
    view: tuple[Member, ...]
    """Members of the run from now on, in order of admission."""
    counted: tuple[Counted, ...]
    """In the order of summation; each counts in at least one part."""
    omitted: tuple[Omitted, ...]
    """Where somebody counted does not count, by peer, then by part; empty when all went well."""
    mean_digest: str
    """`diloco.outer.average.mean_digest` of the encoded mean's parts; empty where nothing moves."""
    tokens: int
    """Tokens committed since the run began, this version included."""
    leases: Leases
    state_digest: str
    """Digest of anchor and outer state *before* this commit (`OuterState.digest`), on which all counted peers agree.
    Empty for a view commit."""
    drafter: str = ""
    """The peer that drafted a view commit, which then begins the next attempt; empty for others."""
    voters: tuple[Voter, ...] = ()
    """Members that vote on the next commit. The others are learners: served and counted, and named voters later."""
    evicted: tuple[str, ...] = ()
    """Voters of the commit before whose lives an operator ended. Where those left are no majority, it is a founding."""

    @property
    def moves(self) -> bool:
        """Whether the commit makes a version."""
        return self.fragment >= 0

    @property
    def founds(self) -> bool:
        """Whether the commit founds a lineage."""
        return self.fragment < 0 and not self.drafter

    @cached_property
    def voting(self) -> tuple[Member, ...]:
        """Members that vote on the next commit."""
        names = {voter.peer for voter in self.voters}
        return tuple(member for member in self.view if member.peer in names)

    def to_bytes(self) -> bytes:
        """The commit as canonical JSON (UTF-8, sorted keys, no blanks)."""
        return self._bytes

    @cached_property
    def _bytes(self) -> bytes:
        """The commit's bytes, made once and sent to all: with 256 members they are 60 kB."""
        tree = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps(tree, default=_slots, sort_keys=True, separators=(",", ":")).encode()

    @cached_property
    def digest(self) -> str:
        """Digest of the commit: SHA-256 of `to_bytes()`, hexadecimal."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def omits(self, peer: str) -> bool:
        """Whether the version omits parts of a contribution of this peer."""
        return any(entry.peer == peer for entry in self.omitted)

    def counts(self, peer: str, part: int) -> bool:
        """Whether the commit counts the contribution of `peer` in this part of the mean."""
        omitted = any(entry.peer == peer and entry.start <= part < entry.stop for entry in self.omitted)
        return not omitted and any(counted.peer == peer for counted in self.counted)

    def member(self, peer: str) -> Member | None:
        """The `Member` value of `peer` among those in the commit; None where it is no member."""
        return next((member for member in self.view if member.peer == peer), None)

    @staticmethod
    def from_bytes(data: bytes) -> Commit:
        """Parse a commit that `to_bytes` wrote. Raises ValueError on anything else, however hostile."""
        try:
            tree = json.loads(data)
            commit = Commit(
                version=_int(tree["version"]),
                height=_int(tree["height"]),
                previous=_text(tree["previous"]),
                lineage=_text(tree["lineage"], MAX_LINEAGE),
                fragment=_int(tree["fragment"], low=-1),
                drafter=_text(tree["drafter"]),
                view=tuple(map(_member, _several(tree["view"]))),
                voters=tuple(map(_voter, _several(tree["voters"]))),
                evicted=tuple(map(_text, _several(tree["evicted"]))),
                counted=tuple(map(_counted, _several(tree["counted"]))),
                omitted=tuple(map(_omitted, _several(tree["omitted"]))),
                mean_digest=_text(tree["mean_digest"]),
                tokens=_int(tree["tokens"]),
                leases=_leases(tree["leases"]),
                state_digest=_text(tree["state_digest"]),
            )
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a commit: {error!r}") from error
        if commit.to_bytes() != data:
            raise ValueError("not a commit in canonical form")
        return commit


def with_height(text: str) -> str:
    """The text of a commit; that of one from before there were heights and voters, as in old checkpoints, with them."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(tree, dict) or "height" in tree or not isinstance(tree.get("counted"), list):
        return text
    tree |= {"height": tree.get("version"), "drafter": "", "voters": [], "evicted": []}
    tree["counted"] = [{**entry, "boot": 0} for entry in tree["counted"] if isinstance(entry, dict)]
    return json.dumps(tree, sort_keys=True, separators=(",", ":"))


def _slots(record: Any) -> dict[str, Any]:
    """Fields of a plain value within a commit, by name. `asdict` would copy them all and take three times as long."""
    return {name: getattr(record, name) for name in record.__slots__}


def _member(tree: dict[str, Any]) -> Member:
    witness = tree["witness"]
    if type(witness) is not bool:
        raise ValueError(f"expected true or false, got {witness!r}"[:100])
    return Member(_text(tree["peer"]), _int(tree["incarnation"]), _text(tree["address"]), witness)


def _voter(tree: dict[str, Any]) -> Voter:
    return Voter(_text(tree["peer"]), _int(tree["boot"]), _int(tree["since"], low=-1))


def _counted(tree: dict[str, Any]) -> Counted:
    names = ("boot", "base_version", "weight", "tokens", "blocks")
    return Counted(_text(tree["peer"]), *(_int(tree[name]) for name in names))


def _omitted(tree: dict[str, Any]) -> Omitted:
    return Omitted(_text(tree["peer"]), _int(tree["start"]), _int(tree["stop"]))


def _leases(tree: dict[str, Any]) -> Leases:
    entries = _several([*tree["held"].items()])
    held = {_text(peer): _ranges(ranges) for peer, ranges in entries}
    return Leases(_int(tree["cursor"]), held, _ranges(tree["returned"]), _int(tree["lost"]))


def _ranges(entries: Sequence[dict[str, Any]]) -> tuple[Blocks, ...]:
    return tuple(Blocks(_int(entry["start"]), _int(entry["stop"], low=entry["start"])) for entry in _several(entries))


def _int(value: Any, low: int = 0) -> int:
    if type(value) is not int or not low <= value < 2**63:
        raise ValueError(f"expected a whole number of at least {low}, got {value!r}"[:100])
    return value


def _text(value: Any, most: int = MAX_TEXT) -> str:
    if type(value) is not str or len(value) > most:
        raise ValueError(f"expected a short text, got {value!r}"[:100])
    value.encode()  # JSON may have half a surrogate pair, which no message can carry: a ValueError
    return value


def _several(value: Any) -> Sequence[Any]:
    if type(value) is not list or len(value) > MAX_LIST:
        raise ValueError(f"expected a list of at most {MAX_LIST} entries")
    return value


@dataclass(frozen=True, slots=True)
class Contribution:
    """One peer's addition to a version: an encoded pseudo-gradient, and the fragment, base version and weight it is
    for."""

    fragment: int
    boot: int
    """The process that trained it (`Counted`)."""
    base_version: int
    weight: int
    tokens: int
    blocks: int
    parts: Sequence[bytes]
    """One encoded part each, in order."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A version that closed: its commit and the encoded mean, one entry per part (none for a founding)."""

    commit: Commit
    parts: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Skip:
    """A round that was not applied: nothing changed, and the progress counts next time."""

    reason: str
    exposed: bool = False
    """Others have bytes of the contribution, so that a later attempt may still count it: until the version closes,
    only the very same contribution may be offered again."""


class Phase(StrEnum):
    """A peer's present activity, as shown to people."""

    WAITING = "waiting"  # for the run to start
    JOINING = "joining"
    TRAINING = "training"
    SYNCING = "syncing"
    AVERAGING = "averaging"  # gossip's final average: nothing is trained any more
    WITNESS = "witness"  # votes, and does not train
    LEAVING = "leaving"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Progress:
    """A peer's position in the run: its phase, version and tokens. It travels with heartbeats."""

    phase: str = Phase.JOINING
    version: int = 0
    inner_step: int = 0
    """Inner steps since the peer started."""
    tokens: int = 0
    """Tokens it has trained since it started."""
    tokens_per_s: float = 0.0
    """Since it started, waiting and all."""
    pace: float = 0.0
    """Tokens per second of the inner steps of its last round, alone; 0 before. Steps are counted with the contract's
    tokens, whatever a caller's own loop (`diloco.run.run`) puts into one: it says how long one takes."""
    loss: float = 0.0
    """Training loss, mean over the last round (nats per token); 0 before the first."""
    wire_bytes_sent: int = 0
    first_counted_version: StateVersion = -1
    """The version that counted its first contribution; -1 before."""
