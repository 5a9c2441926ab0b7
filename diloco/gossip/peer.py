"""One peer's life under gossip: weights of its own, swapped with one other peer at a time; nobody waits for anybody.

    open, enter       copy the state of a member, hear which peers are there
    trained           after each inner step
    between_steps     after that: begin, serve or end a swap, if there is one
    average           when the run has its tokens: the plain final average, until the peers are alike
    leave

The line is that of `diloco.round` with another exchange in the middle: local weights = anchor + progress that no swap
has counted yet. The anchor is this peer's own (NoLoCo's slow weights). A swap counts all progress up to the moment at
which our weights were read. Inner steps done while they are on their way are carried over, as in every round.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from diloco.base.clock import monotonic_s, new_incarnation
from diloco.base.decisions import Adopt, Drop, Evaluate, Restore, SaveCheckpoint, Train
from diloco.base.errors import StateError
from diloco.base.life import Life, Wait
from diloco.base.memory import empty_as
from diloco.base.types import Member, Phase, Progress
from diloco.compress import PayloadError
from diloco.compress.codec import magnitude
from diloco.gossip.greeter import GossipTerms
from diloco.gossip.pairing import CountedWeights, Pairing, Settling, check_partner, pair_mean, settle, spread
from diloco.gossip.swapping import Swapping
from diloco.gossip.swaps import Agreed, Failed, Here, Swap
from diloco.island.bridge import Bridge, Led
from diloco.observe.event_log import Events
from diloco.observe.events import Listening, RoundSkipped, StateCopied, SwapApplied, ViewChanged, Warned, timed
from diloco.outer.line import adoption, book_adoption, book_drop
from diloco.outer.merge import carry, carry_fragment
from diloco.outer.state import OuterState
from diloco.peer.life import Ending
from diloco.peer.rank import PeerRank, now
from diloco.peer.schedule import PeerStopwatch
from diloco.peer.terms import check_alike, lineage_of
from diloco.peer.waits import in_time
from diloco.round import Seconds
from diloco.storage.checkpoint import Checkpoint, latest_version
from diloco.storage.saving import CheckpointSchedule, book_restored, save_line
from diloco.transport.dht import Presence
from diloco.transport.endpoint import Endpoint, reachable
from diloco.transport.sockets import SocketBytes

FINAL = (Phase.AVERAGING, Phase.DONE)
"""Phases of peers that no longer train."""
PAUSE_S = 0.02
"""Seconds between two looks at the news of swaps, when nothing is trained."""
MAX_SAVED_OTHERS = 16
"""Addresses in a checkpoint: an island that lost a rank joins one of them when it comes back."""
GREET_S = 0.3
"""Seconds between two greetings of a peer that waits for others."""


class SwapRecord(Protocol):
    """The record of this peer's training (`diloco.run.run.RunChronicle`)."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens that this peer trained per second under gossip, since its life began to train."""

    def begin(self) -> None:
        """Training under gossip begins here."""

    def take_loss(self) -> float | None:
        """Mean loss of the inner steps between two swaps, since the last call."""

    def numbers(self) -> dict[str, Any]:
        """Numbers of a gossip peer's trainer for a checkpoint: JSON, on rank 0 alone."""


class GossipPeer:
    """The outer side of one peer under gossip. All methods are for the training thread of its rank 0."""

    def __init__(
        self,
        name: str,
        rank: PeerRank,
        endpoint: Endpoint,
        events: Events,
        chronicle: SwapRecord,
        checkpoint: Checkpoint | None = None,
        data: str = "",
        directory: Path | None = None,
    ) -> None:
        """`data`: fingerprint of the training data, which must be alike for all. `directory`: folder for checkpoints,
        if any. `checkpoint`: to go on from."""
        self.rank, self.endpoint, self.events, self.chronicle = rank, endpoint, events, chronicle
        self.contract, self.site, self.island = rank.contract, rank.site, rank.island
        self.line, self.counter, self.name = rank.line, rank.counter, name
        bridge = self.line.weights
        self.weights = Led(bridge, self.island) if isinstance(bridge, Bridge) else bridge
        """The model's weights, for rank 0 alone: it holds all of the outer state."""
        self.directory = directory
        rank.lead(name, events, directory)
        self.do, self.publish = rank.do, rank.publish
        every = self.site.storage.checkpoint_every if directory is not None else 0
        self.keeper = CheckpointSchedule(every, self.publish, events.emit, self._begin_save)
        self._checkpoint = checkpoint
        self.tokens = checkpoint.value("own_tokens", int) if checkpoint is not None else 0
        """Tokens trained by this peer, in all its lives that these weights come from."""
        self.known_tokens = checkpoint.value("run_tokens", int) if checkpoint is not None else 0
        """Tokens trained by all peers, as far as this one ever knew: never falls."""
        self.discarded_tokens = 0
        contract, welcome = self.contract, endpoint.welcome
        me = Member(name, new_incarnation(), "")
        lineage = welcome.lineage if welcome else lineage_of(me, rank.contract.digest)
        terms = GossipTerms(contract, self.site, contract.run.name, contract.digest, data)
        self.exchange = Swapping(me, terms, self.line, endpoint.runtime, lineage, events.emit)
        if checkpoint is not None:
            self.exchange.restore(self.tokens, checkpoint)
        self.address = self.ticket = ""  # the ticket is what `diloco peer --join` takes
        self.progress = Progress()
        self.spread: float | None = None  # found at the last swap, before it
        self.settling: Settling | None = None  # in the final average, when nothing is trained any more
        self._fragment = self.line.layout.fragments[0]
        self._pairing = Pairing(contract.outer.lr, contract.outer.momentum)
        self._steps = 0  # inner steps that no swap has counted; their tokens are `line.trained`
        self._led: CountedWeights | None = None  # our weights as they were sent for the swap that we lead
        self._watch = PeerStopwatch()
        self._inner_s = 0.0
        self._began_s = self._greeted_s = monotonic_s()
        self._swaps_here = 0
        self.asked_to_leave: Callable[[], bool] = lambda: False
        self._draw = random.Random(f"{contract.run.seed} {name} {me.incarnation}")
        self._presence: Presence | None = None

    # ------------------------------------------------------------ entering

    @property
    def version(self) -> int:
        """Swaps of this peer that its anchor counts."""
        return self.line.state.version

    @property
    def finishing(self) -> bool:
        """Whether the run has its tokens, as far as this peer knows."""
        return self.known_tokens >= self.contract.run.total_tokens

    def open(self) -> Life[None]:
        """Listen, find other peers, get an outer state. Raises ResourceError, StateError, IncompatibleError."""
        checkpoint, welcome = self._checkpoint, self.endpoint.welcome
        if checkpoint is not None:
            yield from self.do(Restore(str(checkpoint.path.resolve()), checkpoint.digest), checkpoint)
            book_restored(self.line, checkpoint)
        if welcome is not None:
            check_alike(welcome, self.line.layout.digest, self.exchange.terms.data)
        served = self.endpoint.runtime.serve(self.exchange, self.site.network.listen)
        self.address = self.site.network.advertise or reachable(served, welcome.members[0].address if welcome else None)
        self.ticket = f"{self.address}/{self.contract.digest}"
        self.endpoint.open_directory(self.contract.run.name, lambda text: self.events.emit(Warned(text)))
        self.exchange.start(self.address, self.endpoint.directory.addresses)
        if welcome is not None and checkpoint is None:
            yield from self._copy_state([member.address for member in welcome.members])
        self.report(phase=Phase.WAITING, version=self.version)
        self.exchange.state = self.line.state
        if welcome is not None:
            self.exchange.join(welcome.members)
        self._presence = self.endpoint.appear(self.exchange)
        self.events.emit(ViewChanged(self.version, (self.name,)))
        self.events.emit(Listening(self.address, self.ticket))

    def _copy_state(self, sources: Sequence[str]) -> Life[None]:
        """Copy the outer state of the first of these members that gives it. Raises StateError."""
        self.report(phase=Phase.JOINING)
        exchange, causes = self.exchange, []
        for source in sources:
            copying, join_s = exchange.copy_state(source, self.line.state), self.site.timeouts.join_s
            try:
                state, _ = yield from in_time(copying, join_s, self.asked_to_leave, came_s=lambda: exchange.copied_s)
            except StateError as error:
                if self.asked_to_leave():
                    raise
                causes.append(f"{source}: {error}")
                continue
            before = latest_version(self.rank.folder) if self.directory else 0  # by an earlier life: ours come later
            state = OuterState(before, state.fragments)
            taken = adoption(self.line, None, ())
            yield from self.do(Adopt(state.version, (state.fragments[0].steps,), taken.stays), state)
            book_adoption(self.line, taken)
            self.publish(StateCopied(state.version, state.digest))
            return
        raise StateError(f"nobody gives the state: {'; '.join(causes)}"[:500], "try again, or raise timeouts.join_s")

    def enter(self) -> Life[None]:
        """Wait until `membership.start_peers` are there, or some have begun to train; no longer than `join_s`.

        A joiner waits in any case until it knows another peer, which takes one greeting.
        """
        welcome = self.endpoint.welcome
        least = max(1 if self.tokens else self.contract.membership.start_peers, 2 if welcome else 1)
        deadline_s = monotonic_s() + self.site.timeouts.join_s
        while not self.asked_to_leave():
            others = self.exchange.alive()
            if len(others) + 1 >= least or any(word.progress.tokens for word in others):
                break
            if monotonic_s() > deadline_s:
                self.events.emit(Warned(f"beginning with {len(others) + 1} of {least} peers: the others are not here"))
                break
            self._greet_sometimes([word.member for word in others] or list(welcome.members if welcome else ()))
            yield Wait(None, PAUSE_S)
            self.between_steps()
        self._began_s = monotonic_s()
        self.chronicle.begin()
        self.report(phase=Phase.TRAINING)

    def _greet_sometimes(self, members: Sequence[Member]) -> None:
        if members and monotonic_s() - self._greeted_s >= GREET_S:
            self._greeted_s = monotonic_s()
            self.exchange.greet(self._draw.choice(members))

    # ------------------------------------------------------------ training

    def trained(self, tokens: int, seconds: float) -> None:
        """Count an inner step."""
        self.line.trained.add(tokens, 0)
        self.tokens += tokens
        self._steps += 1
        self._inner_s += seconds
        self._watch.step(self.contract.tokens_per_step, seconds)  # others divide by these, whatever our step has
        self.report(**({} if self.progress.pace else {"pace": self._watch.round()}))  # the first partner waits by it

    def position(self) -> int:
        """Tokens of the whole run, as far as this peer knows: sets the learning rate."""
        self.known_tokens = max(self.known_tokens, self.tokens + self.exchange.others_tokens)
        return self.known_tokens

    def between_steps(self) -> bool:
        """Begin, serve or end a swap, if there is one. Returns whether our anchor has moved."""
        before = self.version
        for news in self.exchange.news():
            match news:
                case Agreed(swap):
                    self._led = self._count(swap)
                    if self._led is not None:
                        self.exchange.give(swap, self._led.exact)
                case Here(swap, weights, phase):
                    self._swap(swap, weights, phase)
                case Failed(reason):
                    self._led = None
                    self.publish(RoundSkipped(self.version + 1, reason))
        if not self.exchange.busy:
            self._begin_swap()
        self.position()
        return self.version != before

    def _begin_swap(self) -> None:
        """Invite a peer drawn at random, if a swap is due. Step alone where nobody is there."""
        alive, settling = self.exchange.alive(), self.settling
        if settling is None:
            least = {Phase.TRAINING: self.contract.inner.steps, Phase.LEAVING: 1}
            due = self._steps >= least.get(Phase(self.progress.phase), math.inf)
        else:
            due = not settling.settled(len(alive))
            alive = [word for word in alive if word.progress.phase in FINAL]
        if not due:
            return
        members = {word.member.peer: word.member for word in alive}
        names = list(members) if settling is None else settling.met_least(list(members))
        if names:
            self.exchange.invite(members[self._draw.choice(names)])
        elif self.progress.phase == Phase.TRAINING and (mine := self._count()) is not None:
            self._apply(mine, mine.exact, {"inner": self._inner_s})

    def _count(self, swap: Swap | None = None) -> CountedWeights | None:
        """Our local weights, for a swap to count. None: they are not finite; their progress is discarded, lest it reach
        others, and the swap is given up."""
        anchor = self.line.state.fragments[0].anchor
        local = self.weights.read(self._fragment, empty_as(anchor))
        if math.isfinite(magnitude(local)):
            held = self.weights.rounded(self._fragment, anchor)
            exact = local if held is anchor else carry(local, held, anchor)
            return CountedWeights(local, exact, self._steps, self.line.trained.tokens)
        now(self.do(Drop()))
        self.discarded_tokens += book_drop(self.line)
        self._steps = 0
        self.publish(RoundSkipped(self.version + 1, "the progress is not finite and is discarded"))
        if swap is not None:
            self.exchange.cancel(swap, "our weights are not finite")
        return None

    # ------------------------------------------------------------ swaps

    def _swap(self, swap: Swap, theirs: Tensor, phase: str) -> None:
        """Apply a swap: its leader counts the weights that it sent, its follower those of now."""
        mine = self._led if swap.leads else self._count(swap)
        if mine is None:
            if swap.leads:  # else `_count` has given it up
                self.exchange.cancel(swap, "the weights that led it are gone")
            return
        seconds = {"inner": self._inner_s}
        try:
            with timed(seconds, "average"):
                check_partner(mine.exact, theirs, self.contract.membership.max_norm_ratio)
                apart = spread(mine.exact, theirs)
                mean = pair_mean(mine.exact, theirs, out=theirs)
        except PayloadError as error:
            self._led = None
            self.exchange.refuse(swap, str(error))
            return
        if self.settling is not None and phase in FINAL:
            self.settling.swapped(swap.partner.peer, apart)
        self._apply(mine, mean, seconds, swap, apart)

    def _apply(
        self, mine: CountedWeights, mean: Tensor, seconds: Seconds, swap: Swap | None = None, apart: float | None = None
    ) -> None:
        """Move our anchor, end the swap and record it. No swap: the mean is our own, which is DiLoCo with one peer."""
        before = self.line.state.fragments[0]
        with timed(seconds, "outer"):
            after = self._pairing.step(before, mean) if self.settling is None else settle(before, mean)
        with timed(seconds, "merge"):
            carry_fragment(self.weights, self._fragment, mine.local, after.anchor)
        self.line.state = OuterState(self.version + 1, (after,))
        self._steps -= mine.steps
        self.line.trained.tokens -= mine.tokens
        self._led = None
        if swap is not None and swap.leads:
            self.exchange.applied(swap)
        elif swap is not None:
            self.exchange.give(swap, mine.exact)
        self.spread = apart
        self._swaps_here += 1
        self.report(version=self.version, pace=self._watch.round())
        self.exchange.state = self.line.state
        wire = self.wire()
        event = SwapApplied(
            version=self.version,
            partner=swap.partner.peer if swap is not None else self.name,
            leads=swap is None or swap.leads,
            final=self.settling is not None,
            spread=apart,
            tokens=self.position(),
            inner_tokens=mine.tokens,
            loss=self.chronicle.take_loss(),
            tokens_per_s=self.chronicle.tokens_per_s,
            wire_bytes_sent=wire.sent if wire else None,
            wire_bytes_received=wire.received if wire else None,
            seconds={name: round(value, 6) for name, value in seconds.items()},
        )
        self.publish(event)
        self._inner_s = 0.0
        if self.settling is None:
            self.keeper.due(self.version)

    # ------------------------------------------------------------ the end

    def average(self) -> Life[None]:
        """The final average: swap plainly with peers that train no more, until those are close to this one and done,
        too. A peer that is not done by `gossip.final_s` is left behind."""
        self.report(phase=Phase.AVERAGING)
        while self.exchange.busy and not self.asked_to_leave():
            self.between_steps()
            yield Wait(None, PAUSE_S)
        # What was trained since the last swap goes into our anchor, before that is averaged or is the end.
        if self.line.trained.tokens and (mine := self._count()) is not None:
            self.line.state = OuterState(self.version + 1, (settle(self.line.state.fragments[0], mine.exact),))
            self.weights.write(self._fragment, mine.exact)  # not always `local`, where that was rounded
            self._steps = self.line.trained.tokens = 0
            self.exchange.state = self.line.state
        self.settling = Settling(self.contract.gossip.tolerance, self.contract.gossip.final_swaps)
        deadline_s = monotonic_s() + self.contract.gossip.final_s
        while not self.asked_to_leave() and monotonic_s() < deadline_s:
            self.between_steps()
            alive = self.exchange.alive()
            settled = self.settling.settled(len(alive)) and not self.exchange.busy
            self.report(phase=Phase.DONE if settled else Phase.AVERAGING)
            unsettled = [word.member for word in alive if word.progress.phase != Phase.DONE]
            if settled and not unsettled:
                break
            self._greet_sometimes(unsettled)
            yield Wait(None, PAUSE_S * (0.5 + self._draw.random()))  # two that ask each other in step would do so again
        self.spread = self.settling.remaining(len(self.exchange.alive()) or 1)

    def leave(self) -> Life[None]:
        """Swap once more, or twice where a swap is under way: others get all our progress. And let it arrive."""
        self.report(phase=Phase.LEAVING)
        deadline_s = monotonic_s() + self.site.timeouts.leave_s
        while (self._steps or self.exchange.sending) and monotonic_s() < deadline_s and self.exchange.alive():
            self.between_steps()
            yield Wait(None, PAUSE_S)

    def close(self) -> None:
        """Take back the record in the directory and end the exchange. The endpoint is the caller's."""
        if self._presence is not None:
            self._presence.end()
        self.exchange.stop()
        self.rank.close()

    # ------------------------------------------------------------ reports and checkpoints

    def wire(self) -> SocketBytes | None:
        """Bytes sent and received so far. None: this machine does not count them."""
        return self.counter.sample()

    def report(self, **changes: str | int | float) -> None:
        """Change the progress that other peers hear of. A loss that is not finite is left out: they refuse it."""
        finite = {name: value for name, value in changes.items() if isinstance(value, str) or math.isfinite(value)}
        self.progress = replace(self.progress, **{**finite, "tokens": self.tokens})  # type: ignore[arg-type]
        known = self.exchange.acquaintances
        known.progress, known.spread = self.progress, -1.0 if self.spread is None else self.spread
        known.swap_s = (monotonic_s() - self._began_s) / max(self._swaps_here, 1)

    def _begin_save(self) -> Any:
        groups, about = save_line(self.line, self.contract)
        others = [word.member.address for word in self.exchange.alive()[:MAX_SAVED_OTHERS]]
        about |= {"own_tokens": self.tokens, "run_tokens": self.position(), "others": others}
        about |= {"known": self.exchange.table}
        about |= self.chronicle.numbers()
        self.island.decide(SaveCheckpoint("local" in groups))
        return self.rank.save((groups, about), self.site.storage.keep)


class GossipLife:
    """The order of a peer's life under gossip: enter, inner steps with swaps between them, the final average.

    It stands in for `diloco.peer.life.PeerLife`, with the same interface.
    """

    def __init__(self, peer: GossipPeer, stop: Callable[[], bool]) -> None:
        """`stop`: whether this peer is asked to leave."""
        self.peer, self._stop = peer, stop
        self._left = self._averaged = False
        self.sync_now = False  # without effect: no sync can be wanted
        peer.asked_to_leave = lambda: self.leaving

    @property
    def leaving(self) -> bool:
        """Whether the peer is asked to leave."""
        self._left = self._left or self._stop()
        return self._left

    def leave(self) -> None:
        """Leave, after one more swap if another peer is there."""
        self._left = True

    def trained(self, tokens: int, blocks: int, seconds: float, loss: float | None) -> None:
        """Count an inner step, of so many tokens in so much time."""
        self.peer.trained(tokens, seconds)

    def interrupted(self) -> None:
        """Nothing: no contribution on its way reads the weights that the caller trains on."""

    def ready(self, steps: int) -> Train:
        """The decision that ends a meeting of the ranks: the position of this peer, and inner steps to do."""
        peer = self.peer
        return Train(
            steps,
            version=peer.version,
            tokens=peer.position(),
            peers=(peer.name, *(word.member.peer for word in peer.exchange.alive())),
            first=all(peer.name < word.member.peer for word in peer.exchange.alive()),
            digest=peer.line.state.digest,
            entered=peer.progress.phase != Phase.WAITING,
            done=self._averaged,
            leaving=self.leaving,
            spread=peer.spread,
        )

    def open(self) -> Life[None]:
        """Listen, find other peers, get an outer state."""
        yield from self.peer.open()

    def live(self) -> Life[None]:
        """Train and swap until the run has its tokens, or this peer is to leave."""
        yield from self.peer.enter()
        while not (self.peer.finishing or self.leaving):
            self.peer.keeper.look()
            yield self.ready(1)
            self.peer.between_steps()
        if self.peer.finishing:
            yield from self.peer.average()
            self._averaged = True

    def end(self) -> Life[Ending]:
        """One last swap, where there was no final average; then the held-out loss."""
        peer, done = self.peer, self._averaged
        if not done:
            yield from peer.leave()
        yield from peer.do(Evaluate())
        return Ending(
            reason="done" if done else "left",
            version=peer.version,
            tokens=peer.position(),
            state_digest=peer.line.state.digest,
            chain_digest="",
            val_loss=peer.rank.val_loss,
            discarded_tokens=peer.discarded_tokens,
            spread=peer.spread if done else None,
        )
