"""One peer's life under gossip: weights of its own, swapped with one other peer at a time; nobody waits for anybody.

    open, enter       copy somebody's state, hear who is there
    trained           after each inner step
    between_steps     and then: whatever swap there is to begin, to serve or to end
    average           when the run has its tokens: plainly, until the peers are alike
    leave

The line is that of `diloco.round` with another exchange in the middle: local weights = anchor + progress that no swap
has counted yet. The anchor is this peer's own (NoLoCo's slow weights). A swap counts all progress up to the moment at
which our weights were read; what is done while they are on their way is carried over, as in every round.
"""

from __future__ import annotations

import logging
import math
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from diloco.base.clock import monotonic_s, new_incarnation
from diloco.base.decisions import Adopt, Drop, Restore, Save
from diloco.base.errors import StateError
from diloco.base.life import Life, Wait
from diloco.base.memory import empty_as
from diloco.base.types import Member, Phase, Progress
from diloco.compress import PayloadError
from diloco.compress.codec import magnitude
from diloco.gossip.pairing import CountedWeights, Pairing, Settling, check_partner, pair_mean, settle, spread
from diloco.gossip.swapping import Swapping
from diloco.gossip.swaps import Swap
from diloco.gossip.terms import SwapRecord, gossip_terms
from diloco.gossip.transfer import Agreed, Failed, Here
from diloco.island.bridge import Bridge, Led
from diloco.observe.event_log import Events
from diloco.observe.events import (
    Listening,
    Remark,
    RoundSkipped,
    StateCopied,
    StateCopying,
    SwapApplied,
    ViewChanged,
    Warned,
    timed,
)
from diloco.outer.line import adoption, book_adoption, book_drop
from diloco.outer.merge import carry, carry_fragment
from diloco.outer.state import OuterState
from diloco.peer.peer import in_time
from diloco.peer.rank import PeerRank, now
from diloco.peer.schedule import Stopwatch
from diloco.peer.terms import check_alike
from diloco.protocol.gossip_messages import Acquaintance
from diloco.storage.checkpoint import Checkpoint
from diloco.storage.line_state import book_restored, save_line
from diloco.storage.saving import Keeper
from diloco.transport.dht import Presence
from diloco.transport.endpoint import reachable
from diloco.transport.sockets import SocketBytes

if TYPE_CHECKING:
    from diloco.transport.endpoint import Endpoint

logger = logging.getLogger(__name__)

FINAL = (Phase.AVERAGING, Phase.DONE)
"""Phases of those that train no more."""
PAUSE_S = 0.02
"""Between two looks at what there is to do, when nothing is trained."""
MAX_SAVED_OTHERS = 16
"""Addresses in a checkpoint: an island that lost a rank joins one of them when it comes back."""
GREET_S = 0.3
"""How often a peer that waits for others asks one of them how far it is."""


class GossipPeer:
    """The outer side of one peer. All methods are for the training thread of its rank 0."""

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
        """`data`: fingerprint of the training data, which must be alike for all. `directory`: where checkpoints go, if
        anywhere. `checkpoint`: to go on from."""
        self.rank, self.endpoint, self.events, self.chronicle = rank, endpoint, events, chronicle
        self.contract, self.site, self.island = rank.contract, rank.site, rank.island
        self.line, self.counter = rank.line, rank.counter
        bridge = self.line.weights
        self.weights = Led(bridge, self.island) if isinstance(bridge, Bridge) else bridge
        """As rank 0 reads and writes them, which holds all of the outer state."""
        self.directory = directory
        self.do, self.publish = rank.lead(name, events, directory)
        self._checkpoint = checkpoint
        self.keeper = Keeper(self.publish, events.emit, self._begin_save)
        self.tokens = 0
        """Trained by this peer, in all its lives that these weights come from."""
        self.discarded_tokens = 0
        self.known_tokens = 0
        """Of all peers, as far as we ever knew: never falls."""
        if checkpoint is not None:
            self.tokens = checkpoint.value("own_tokens", int)
            self.known_tokens = checkpoint.value("run_tokens", int)
        welcome = endpoint.welcome
        me = Member(name, new_incarnation(), "")
        lineage = welcome.lineage if welcome else secrets.token_hex(8)
        terms, runtime = gossip_terms(self.contract, self.site, self.line, data), endpoint.runtime
        reported = (self._on_reason, self._on_met)
        self.exchange = Swapping(me, terms, runtime.link, lineage, runtime.loop, *reported)
        self.address = ""
        self.progress = Progress()
        self.spread: float | None = None  # found at the last swap, before it
        self.settling: Settling | None = None  # since nothing is trained any more
        self._fragment = self.line.layout.fragments[0]
        self._pairing = Pairing(self.contract.outer.lr, self.contract.outer.momentum)
        self._steps = 0  # inner steps that no swap has counted; their tokens are `line.trained`
        self._led: tuple[Swap, CountedWeights] | None = None  # the swap that we lead, and our weights as they were sent
        self._resumed = checkpoint is not None
        self._watch = Stopwatch()
        self._inner_s = 0.0
        self._began_s = self._greeted_s = monotonic_s()
        self._swaps_here = 0
        self._moved = False  # whether our weights have, by more than inner steps
        self.asked_to_leave: Callable[[], bool] = lambda: False
        self._draw = random.Random(f"{self.contract.run.seed} {name} {me.incarnation}")
        self._presence: Presence | None = None

    # ------------------------------------------------------------ entering

    @property
    def name(self) -> str:
        return self.line.peer

    @property
    def ticket(self) -> str:
        """What others give to `diloco peer --join`."""
        return f"{self.address}/{self.contract.digest[:12]}"

    @property
    def version(self) -> int:
        """Swaps of ours that our anchor has."""
        return self.line.state.version

    @property
    def finishing(self) -> bool:
        """Whether the run has its tokens, as far as we know."""
        return self.known_tokens >= self.contract.run.total_tokens

    def _drop(self) -> None:
        now(self.do(Drop()))
        self.discarded_tokens += book_drop(self.line)

    def open(self) -> Life[None]:
        """Listen, find the others, get a state. Raises ResourceError, StateError, IncompatibleError."""
        if self._checkpoint is not None:
            checkpoint = self._checkpoint
            yield from self.do(Restore(str(checkpoint.path.resolve()), checkpoint.digest), checkpoint)
            book_restored(self.line, checkpoint)
        network, welcome = self.site.network, self.endpoint.welcome
        if welcome is not None:
            check_alike(welcome, self.line.layout.digest, self.exchange.terms.data)
        served = self.endpoint.runtime.serve(self.exchange, network.listen)
        self.address = network.advertise or reachable(served, welcome.members[0].address if welcome else None)
        self.endpoint.open_directory(self.contract.run.name, lambda text: self.events.emit(Warned(text)))
        self.exchange.start(self.address, self.endpoint.directory.addresses)
        if welcome is not None and not self._resumed:
            yield from self._copy_state([member.address for member in welcome.members])
        self.report(phase=Phase.WAITING, version=self.version)
        self.exchange.hold(self.line.state)
        if welcome is not None:
            self.exchange.greet(welcome.members[0])
            self.exchange.meet(welcome.members[1:])
        self._presence = self.endpoint.appear(self.exchange)
        self._on_met([self.name])
        self.events.emit(Listening(self.address, self.ticket))

    def _copy_state(self, sources: Sequence[str]) -> Life[None]:
        """Begin where one of the members stands: the first that gives its state. Raises StateError."""
        self.report(phase=Phase.JOINING)
        deadline_s = monotonic_s() + self.site.timeouts.join_s
        causes = []
        for source in sources:
            copying = self.exchange.copy_state(source, self.line.state, self._on_copied)
            try:
                state, _ = yield from in_time(copying, max(deadline_s - monotonic_s(), 0.1), self.asked_to_leave)
            except StateError as error:
                if self.asked_to_leave():
                    raise
                causes.append(f"{source}: {error}")
                continue
            taken = adoption(self.line, None)
            steps = tuple(fragment.steps for fragment in state.fragments)
            yield from self.do(Adopt(state.version, steps, taken.stays), state)
            book_adoption(self.line, taken)
            self.publish(StateCopied(state.version, state.digest))
            return
        raise StateError(f"nobody gives the state: {'; '.join(causes)}"[:500], "try again, or raise timeouts.join_s")

    def _on_copied(self, done_bytes: int, total_bytes: int) -> None:
        if done_bytes == total_bytes:
            self.events.emit(StateCopying(done_bytes, total_bytes))

    def enter(self) -> Life[None]:
        """Wait until `membership.start_peers` are there, or some have begun; no longer than a join may take.

        A joiner waits in any case until it knows somebody, which takes one greeting.
        """
        welcome = self.endpoint.welcome
        least = max(1 if self.tokens else self.contract.membership.start_peers, 2 if welcome else 1)
        deadline_s = monotonic_s() + self.site.timeouts.join_s
        while not self.asked_to_leave():
            others = self.exchange.alive()
            if len(others) + 1 >= least or any(word.progress.tokens for word in others):
                break
            if monotonic_s() > deadline_s:
                text = f"beginning with {len(others) + 1} of {least} peers: the others are not here"
                self.events.emit(Warned(text))
                break
            self._greet_sometimes([word.member for word in others] or list(welcome.members if welcome else ()))
            yield Wait(None, PAUSE_S)
            self.between_steps()
        self._began_s = monotonic_s()
        self.chronicle.begin()
        self.report(phase=Phase.TRAINING)

    def _greet_sometimes(self, members: Sequence[Member]) -> None:
        now_s = monotonic_s()
        if members and now_s - self._greeted_s >= GREET_S:
            self._greeted_s = now_s
            self.exchange.greet(self._draw.choice(members))

    # ------------------------------------------------------------ training

    def trained(self, tokens: int, seconds: float) -> None:
        """An inner step was done."""
        self.line.trained.add(tokens, 0)
        self.tokens += tokens
        self._steps += 1
        self._inner_s += seconds
        self._watch.step(self.contract.tokens_per_step, seconds)  # others divide by it, whatever a step of ours has
        self.report(**({} if self.progress.pace else {"pace": self._watch.round()}))  # who meets us first waits by it

    def position(self) -> int:
        """Tokens of the whole run, as far as we know: sets the learning rate."""
        self.known_tokens = max(self.known_tokens, self.tokens + self.exchange.others_tokens)
        return self.known_tokens

    def between_steps(self) -> bool:
        """Begin, serve or end a swap, if there is one. Whether our weights have moved."""
        self._moved = False
        for news in self.exchange.news():
            match news:
                case Agreed(swap):
                    self._send(swap)
                case Here(swap, weights, phase):
                    self._swap(swap, weights, phase)
                case Failed(swap, reason):
                    self._led = None if self._led is not None and self._led[0] is swap else self._led
                    self.publish(RoundSkipped(self.version + 1, reason))
        if self._wants_a_swap() and not self.exchange.busy:
            self._invite()
        self.position()
        return self._moved

    def _wants_a_swap(self) -> bool:
        if self.settling is not None:
            return not self.settling.settled(len(self.exchange.alive()))
        least = {Phase.TRAINING: self.contract.inner.steps, Phase.LEAVING: 1}.get(Phase(self.progress.phase))
        return least is not None and self._steps >= least

    def _invite(self) -> None:
        """Somebody at random; in the final average of those who train no more, each in its turn. With nobody there we
        step alone."""
        words = {word.member.peer: word.member for word in self._candidates()}
        names = self.settling.met_least(list(words)) if self.settling is not None else list(words)
        if names:
            self.exchange.invite(words[self._draw.choice(names)])
        elif self.progress.phase == Phase.TRAINING:
            self._step_alone()

    def _candidates(self) -> Sequence[Acquaintance]:
        alive = self.exchange.alive()
        return alive if self.settling is None else [word for word in alive if word.progress.phase in FINAL]

    # ------------------------------------------------------------ swaps

    def _send(self, swap: Swap) -> None:
        """The other agreed: read our weights."""
        counted = self._count()
        if counted is None:
            self.exchange.cancel(swap, "our weights are not finite")
            return
        self._led = swap, counted
        self.exchange.give(swap, counted.exact)

    def _count(self) -> CountedWeights | None:
        """Our local weights. What is not finite must not reach others: then the progress is thrown away."""
        anchor = self.line.state.fragments[0].anchor
        local = self.weights.read(self._fragment, empty_as(anchor))
        if math.isfinite(magnitude(local)):
            held = self.weights.rounded(self._fragment, anchor)
            exact = local if held is anchor else carry(local, held, anchor)
            return CountedWeights(local, exact, self._steps, self.line.trained.tokens)
        self._drop()
        self._steps, self._moved = 0, True
        self.publish(RoundSkipped(self.version + 1, "the progress is not finite and is discarded"))
        return None

    def _swap(self, swap: Swap, theirs: Tensor, phase: str) -> None:
        """Apply a swap: whoever leads counts the weights that it sent, whoever follows those of now."""
        mine = self._count() if not swap.leads else self._led[1] if self._led is not None else None
        if mine is None:
            self.exchange.cancel(swap, "our weights are not finite")
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
        self._move_anchor(mine, mean, seconds)
        if self.settling is not None and phase in FINAL:
            self.settling.swapped(swap.partner.peer, apart)
        if swap.leads:
            self.exchange.applied(swap)
        else:
            self.exchange.give(swap, mine.exact)
        self._publish(swap.partner.peer, swap.leads, mine.tokens, apart, seconds)

    def _step_alone(self) -> None:
        """The mean of one is its own: DiLoCo with one peer."""
        mine, seconds = self._count(), {"inner": self._inner_s}
        if mine is not None:
            self._move_anchor(mine, mine.exact, seconds)
            self._publish(self.name, True, mine.tokens, None, seconds)

    def _move_anchor(self, mine: CountedWeights, mean: Tensor, seconds: dict[str, float]) -> None:
        before = self.line.state.fragments[0]
        with timed(seconds, "outer"):
            after = self._pairing.step(before, mean) if self.settling is None else settle(before, mean)
        with timed(seconds, "merge"):
            carry_fragment(self.weights, self._fragment, mine.local, after.anchor)
        self.line.state = OuterState(self.version + 1, (after,))
        self._steps -= mine.steps
        self.line.trained.tokens -= mine.tokens
        self._led, self._moved = None, True

    def _publish(
        self, partner: str, leads: bool, inner_tokens: int, apart: float | None, seconds: Mapping[str, float]
    ) -> None:
        """Our anchor has moved: those who ask are told so, and an event."""
        self.spread = apart
        self._swaps_here += 1
        self.report(version=self.version, pace=self._watch.round())
        self.exchange.hold(self.line.state)
        wire = self.counter.sample()
        self.publish(
            SwapApplied(
                version=self.version,
                partner=partner,
                leads=leads,
                final=self.settling is not None,
                spread=apart,
                tokens=self.position(),
                inner_tokens=inner_tokens,
                loss=self.chronicle.take_loss(),
                tokens_per_s=self.chronicle.tokens_per_s,
                wire_bytes_sent=wire.sent if wire else None,
                wire_bytes_received=wire.received if wire else None,
                seconds={name: round(value, 6) for name, value in seconds.items()},
            )
        )
        self._inner_s = 0.0
        every = self.site.storage.checkpoint_every
        if self.directory is not None and every and self.version % every == 0 and self.settling is None:
            self.keeper.due(self.version)

    # ------------------------------------------------------------ the end

    def average(self) -> Life[None]:
        """The final average: plainly, with others that train no more, until those we meet are close to us and say that
        they are done, too. Who is not done in time is left to it.
        """
        self.report(phase=Phase.AVERAGING)
        while self.exchange.busy and not self.asked_to_leave():
            self.between_steps()
            yield Wait(None, PAUSE_S)
        self._count_alone()
        self.settling = Settling.of(self.contract)
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
            yield Wait(None, PAUSE_S * (0.5 + self._draw.random()))
        self.spread = self.settling.remaining(len(self.exchange.alive()) or 1)

    def _count_alone(self) -> None:
        """What was trained since the last swap goes into our anchor, before that is averaged or is the end."""
        mine = self._count() if self.line.trained.tokens else None
        if mine is not None:
            self.line.state = OuterState(self.version + 1, (settle(self.line.state.fragments[0], mine.exact),))
            self.weights.write(self._fragment, mine.exact)  # not always `local`, where that was rounded
            self._steps = self.line.trained.tokens = 0
            self.exchange.hold(self.line.state)

    def leave(self) -> Life[None]:
        """One more swap, if somebody is there, so that what was trained since the last one is not only ours."""
        self.report(phase=Phase.LEAVING)
        swaps = self.version
        deadline_s = monotonic_s() + self.site.timeouts.leave_s
        while self._steps and self.version == swaps and monotonic_s() < deadline_s:
            if not self.exchange.alive():
                break
            self.between_steps()
            yield Wait(None, PAUSE_S)

    def close(self) -> None:
        """Take back the record in the directory and end the exchange. The endpoint is the caller's."""
        if self._presence is not None:
            self._presence.end()
        self.exchange.stop()
        self.rank.close()

    def wire(self) -> SocketBytes | None:
        """Bytes sent and received so far; None where nobody can tell."""
        return self.counter.sample()

    # ------------------------------------------------------------ telling

    def report(self, **changes: str | int | float) -> None:
        """Change what others hear of us. A loss that is not finite is left out: others refuse such a message."""
        finite = {name: value for name, value in changes.items() if isinstance(value, str) or math.isfinite(value)}
        self.progress = replace(self.progress, **{**finite, "tokens": self.tokens})  # type: ignore[arg-type]
        swap_s = (monotonic_s() - self._began_s) / max(self._swaps_here, 1)
        self.exchange.report(self.progress, -1.0 if self.spread is None else self.spread, swap_s)

    def _on_reason(self, reason: str, routine: bool) -> None:
        self.events.emit(Remark(reason, routine))

    def _on_met(self, peers: Sequence[str]) -> None:
        self.events.emit(ViewChanged(self.version, tuple(peers)))

    # ------------------------------------------------------------ checkpoints

    def _begin_save(self) -> Any:
        groups, about = save_line(self.line, self.contract)
        others = [word.member.address for word in self.exchange.alive()[:MAX_SAVED_OTHERS]]
        numbers: dict[str, Any] = {"own_tokens": self.tokens, "run_tokens": self.position(), "others": others}
        self.island.decide(Save("local" in groups))
        return self.rank.save((groups, {**about, **numbers, **self.chronicle.numbers()}), self.site.storage.keep)
