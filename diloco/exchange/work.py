"""The bytes of one attempt's reduction on one peer: contributions to the parts it owns, and the mean as it grows.

Bounded by sizes known beforehand: at most one encoded span per contributor, and one encoded fragment for the mean,
or one from each contributor where the codec gathers them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Protocol

from diloco.base.clock import monotonic_s
from diloco.base.hashing import content_hash
from diloco.base.types import Closed, Contribution, Member
from diloco.compress import Codec, PayloadError, bundle
from diloco.exchange.log import MeanDraft
from diloco.exchange.sending import STREAM_PAUSE_S
from diloco.outer.average import Averaging, BadTerm, check_mean, digest_of, fold, max_mean_bytes
from diloco.outer.fragments import Fragment
from diloco.outer.optimizers import Stepping
from diloco.outer.state import FragmentState
from diloco.protocol import messages as m
from diloco.protocol.messages import Begin, Span
from diloco.protocol.streams import Kind, StreamHeader
from diloco.protocol.view import owner_of_parts


@dataclass(frozen=True, slots=True)
class SteppedVersion(Closed):
    """A version that a lane averages and steps on a thread of its own, from the state that its commit names.

    It is a `diloco.outer.optimizers.Stepped`.
    """

    stepping: Stepping
    stepper: Executor
    averaging: Future[None]
    stepped: Future[FragmentState] | None
    """None: in place, once it is asked for."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds that the lane spent on a version's outer step, by stage."""
        return self.stepping.seconds

    def averaged(self) -> Future[None]:
        """Done when the lane has averaged its parts of the mean. Raises PayloadError when the mean is no mean."""
        return self.averaging

    def outer(self, in_place: bool) -> Future[FragmentState]:
        """The lane's fragment after a version's outer step, which was made as the mean arrived, or is made now."""
        return self.stepped or self.stepper.submit(self.stepping.outer, self.parts, in_place)


class LaneEvents(Protocol):
    """Receiver of a lane's events: the exchange, in this process or on another rank."""

    def on_event(self, event: m.Event, content: bytes = b"") -> None:
        """Takes an event of a lane. `content`: for a part of a mean, its `content_hash`."""

    def on_moved(self, size_bytes: int) -> None:
        """So many bytes more came to a lane from other peers, or were taken by them."""

    def on_lost(self, member: Member) -> None:
        """A lane's stream to this member broke."""

    def admit(self, header: StreamHeader) -> Awaitable[m.Reply]:
        """Reply to a stream that reaches a lane; waits until the reduction that it belongs to has begun here."""

    def failed(self, error: BaseException) -> None:
        """The lane failed and is of no use any more."""


class BadContribution(Exception):
    """A contributor's bytes in a lane decode to nothing sensible."""

    def __init__(self, sender: str, reason: str) -> None:
        super().__init__(reason)
        self.sender = sender


class LanePayloads:
    """A lane's bytes of one attempt: made when it begins, dropped when its version closes or another attempt begins."""

    def __init__(
        self,
        begin: Begin,
        me: str,
        fragment: Fragment,
        codecs: Sequence[Codec],
        max_norm_ratio: float = 0.0,
        averaging: Averaging | None = None,
        draft: MeanDraft | None = None,
    ) -> None:
        """`draft`: of the mean in the lane's log."""
        self.begin, self.draft = begin, draft or MeanDraft()
        self.me = me
        self.fragment = fragment
        self.codecs = codecs
        self.max_norm_ratio = max_norm_ratio
        self.averaging = averaging or Averaging()
        self.mean: list[bytes | None] = [None] * fragment.parts
        self.generation = 0
        self.owners: dict[int, str] = {}
        """Owner of each part, also of those that are held elsewhere."""
        self._payloads: dict[int, dict[str, bytes]] = {}
        self._own: Sequence[bytes] = ()
        self._damaged: Counter[str] = Counter()
        self._damaged_s: dict[str, float] = {}
        """When damage was counted last."""
        self._contributors = [counted.peer for counted in begin.contributors]
        self._assign(begin.spans)

    @property
    def key(self) -> tuple[int, int]:
        return self.begin.key

    def codec(self, part: int) -> Codec:
        """Codec of this part in the lane."""
        return self.codecs[self.fragment.group_of(part)]

    def max_bytes(self, kind: Kind, part: int) -> int:
        """Most bytes that a payload of this part on its way to the lane may have: a contribution, or the mean."""
        if kind is Kind.CONTRIBUTION:
            return self.codec(part).max_bytes(self._elements(part))
        return max_mean_bytes(self.codec(part), self._elements(part), len(self._contributors))

    def owned(self) -> list[int]:
        """Parts that this lane holds and that are mine to average."""
        return [part for part in self.fragment.cuts if self.owners[part] == self.me]

    def take_own(self, contribution: Contribution) -> None:
        """Take my own contribution to the parts that I own into the lane: it does not travel."""
        if self.me in self._contributors:
            self._own = contribution.parts

    def repair(self, generation: int, spans: Sequence[Span]) -> list[int]:
        """Owners changed: empty the lane's parts that moved; returns those of `owned` that are mine since."""
        self.generation = generation
        moved = self._assign(spans)
        for part in moved:
            self.mean[part] = None
        return [part for part in moved if self.owners[part] == self.me and part in self.fragment.cuts]

    def expects(self, kind: Kind, sender: str, part: int) -> bool:
        """Whether a part of that kind from that peer belongs to this attempt, and to this lane."""
        if part not in self.fragment.cuts:
            return False
        if kind is Kind.MEAN:
            return self.owners.get(part) == sender
        return self.owners.get(part) == self.me and sender in self._contributors

    def knows(self, peer: str) -> bool:
        """Whether a peer contributes to the lane's attempt: nobody else has anything to send."""
        return peer in self._contributors

    def put_contribution(self, sender: str, part: int, payload: bytes) -> None:
        """Keep in the lane a contribution checked by `expects`. A part that is averaged already takes no more."""
        if self.mean[part] is None:
            self._payloads[part][sender] = payload

    def sent_to(self, receiver: str, part: int, mean: bytes, omitted: Sequence[str]) -> bytes:
        """The lane's payload of a mean's part for one receiver: a bundle lacks the receiver's own contribution."""
        place = self._place(receiver, part, omitted)
        return mean if place is None else bundle.without(mean, place)

    def received(self, part: int, payload: bytes, omitted: Sequence[str]) -> bytes:
        """The mean's part that reached the lane as `payload`, which `sent_to` made for us. Raises PayloadError."""
        place = self._place(self.me, part, omitted)
        if place is None:
            return payload
        if not self._own:
            raise PayloadError("a bundle without a contribution of ours that we do not have")
        return bundle.restored(payload, place, self._own[part])

    def _place(self, peer: str, part: int, omitted: Sequence[str]) -> int | None:
        """Place of a peer's contribution in the lane's bundle for a part. None: it is in none."""
        counted = [name for name in self._contributors if name not in omitted]
        return counted.index(peer) if self.codec(part).gathered and peer in counted else None

    def check_mean(self, part: int, payload: bytes) -> None:
        """Raises PayloadError when a part of the mean on its way to the lane does not decode: nobody could apply it."""
        check_mean(payload, self.codec(part), self._elements(part))

    def put_mean(self, part: int, payload: bytes) -> None:
        """Keep in the lane a part of the mean checked by `expects` and `check_mean`."""
        self.mean[part] = payload
        self.draft.put(part, payload)

    def fold(self, part: int, omitted: Sequence[str]) -> tuple[bytes, bytes]:
        """The encoded mean of one part of the lane that I own, in the order of the contributors, and its
        `content_hash`. Changes nothing but the count of outliers: any thread may.

        The divisor is the weight of those whom this part counts, which only the owner knows. Raises BadContribution.
        """
        payloads = self._payloads[part] | ({self.me: self._own[part]} if self._own else {})
        counted = [entry for entry in self.begin.contributors if entry.peer not in omitted]
        terms = [(entry.weight, payloads[entry.peer]) for entry in counted]
        try:
            tokens = [entry.tokens for entry in counted]
            codec, rule, outliers = self.codec(part), self.averaging.rule, list[int]()
            mean = fold(terms, self._elements(part), codec, self.max_norm_ratio, tokens, rule, outliers)
        except BadTerm as error:
            raise BadContribution(counted[error.index].peer, str(error)) from error
        self.averaging.note(counted[index].peer for index in outliers)
        return mean, content_hash(mean)

    def keep(self, part: int, mean: bytes) -> bool:
        """Keep in the lane my mean of one part; frees its contributions. False if the part has another owner by now."""
        if self.owners[part] != self.me:
            return False
        self.put_mean(part, mean)
        self._payloads[part] = {}
        return True

    def damaged(self, sender: str) -> int:
        """Count damage on the way to the lane of this peer's streams. Returns how often there was some: a connection
        that breaks damages all of its streams at once."""
        now_s = monotonic_s()
        if now_s - self._damaged_s.get(sender, -math.inf) > STREAM_PAUSE_S / 2:  # sooner than it could send again
            self._damaged[sender] += 1
            self._damaged_s[sender] = now_s
        return self._damaged[sender]

    def named(self, places: Sequence[int]) -> tuple[str, ...]:
        """Contributors to the lane's attempt by their places. Raises PayloadError when there is none at one of them."""
        if any(place >= len(self._contributors) for place in places):
            raise PayloadError("a part of the mean omits somebody who is not there")
        return tuple(self._contributors[place] for place in places)

    def whole(self) -> list[bytes] | None:
        """The mean's parts that this lane holds, others being empty. None if a repair took some away, to come again."""
        absent = any(self.mean[part] is None for part in self.fragment.cuts)
        return None if absent else [part or b"" for part in self.mean]

    def _assign(self, spans: Sequence[Span]) -> list[int]:
        """Note the owner of each part in the lane's attempt; returns the parts whose owner is another than before."""
        owner = owner_of_parts(spans)
        moved = [part for part, peer in owner.items() if self.owners.get(part) != peer]
        self.owners = owner
        self._payloads |= {part: {} for part in moved if owner[part] == self.me}
        return moved

    def _elements(self, part: int) -> int:
        return self.fragment.size_of(part)


class MeanContents(dict[int, bytes]):
    """Hashes of the parts of the mean that is being made, in all lanes of this peer, by number."""

    sealed = ""
    """Digest of the mean, while it is whole."""

    def take_out(self, parts: Iterable[int]) -> None:
        """A repair has given these parts of the lanes' mean to others: they come once more."""
        for part in parts:
            del self[part]
            self.sealed = ""

    def seal(self, parts: int) -> str:
        """Digest of the lanes' mean, of which all parts are here."""
        self.sealed = digest_of(self[part] for part in range(parts))
        return self.sealed
