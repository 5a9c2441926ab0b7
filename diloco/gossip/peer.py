"""One peer's life under gossip: weights of its own, swapped with one other peer at a time; nobody waits for anybody.

    peer = GossipPeer(name, contract, site, Weights.of(model), gate, events)
    peer.open(); peer.enter(patience)       # copy somebody's state, hear who is there
    peer.trained(tokens, seconds, loss)     # after each inner step
    peer.between_steps()                    # and then: whatever swap there is to begin, to serve or to end
    peer.average(patience)                  # when the run has its tokens: plainly, until the peers are alike
    peer.leave(patience)

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
from dataclasses import dataclass, replace
from statistics import fmean

from torch import Tensor

from diloco.base.clock import monotonic_s, new_incarnation
from diloco.base.errors import StateError
from diloco.base.memory import empty_as
from diloco.base.types import Member, Phase, Progress
from diloco.compress import PayloadError
from diloco.compress.codec import magnitude
from diloco.config.contract import Contract
from diloco.config.site import Site
from diloco.gossip.pairing import Pairing, check_partner, pair_mean, settle, spread
from diloco.gossip.swapping import Agreed, Failed, GossipTerms, Here, Swapping
from diloco.gossip.swaps import Swap
from diloco.kernels.build import compiled_codecs
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
from diloco.outer.fragments import Weights
from diloco.outer.merge import carry, carry_fragment
from diloco.outer.resync import adopt_state, drop_progress
from diloco.outer.state import OuterState
from diloco.peer.schedule import Settling, Stopwatch
from diloco.peer.terms import check_alike, open_line, serve_bps_of, timing_of
from diloco.protocol.messages import Acquaintance
from diloco.storage.checkpoint import Checkpoint
from diloco.storage.line_state import restore_line, save_line
from diloco.storage.saving import Contents
from diloco.transport.gate import Gate
from diloco.transport.presence import Presence
from diloco.transport.runtime import reachable
from diloco.transport.sockets import SocketCounter

logger = logging.getLogger(__name__)

FINAL = (Phase.AVERAGING, Phase.DONE)
"""Phases of those that train no more."""
PAUSE_S = 0.02
"""Between two looks at what there is to do, when nothing is trained."""
MAX_SAVED_OTHERS = 16
"""Addresses in a checkpoint: an island that lost a rank joins one of them when it comes back."""
GREET_S = 0.3
"""How often a peer that waits for others asks one of them how far it is."""


@dataclass(frozen=True)
class Counted:
    """Our weights as a swap counts them, and the progress that they hold."""

    local: Tensor
    """As the parameters' dtype holds them; flat fp32, as `exact` is."""
    exact: Tensor
    """The same on the exact anchor: what others get. `local` itself where parameters hold fp32."""
    steps: int
    tokens: int


class GossipPeer:
    """The outer side of one peer. All methods are for the training thread."""

    def __init__(
        self,
        name: str,
        contract: Contract,
        site: Site,
        weights: Weights,
        gate: Gate,
        events: Events,
        checkpoint: Checkpoint | None = None,
        data: str = "",
    ) -> None:
        """`data`: fingerprint of the training data, which must be alike for all."""
        self.contract, self.site, self.gate, self.events = contract, site, gate, events
        self.counter = SocketCounter()
        compiled_codecs(site.device.compile_codecs)
        self.line = open_line(name, contract, weights)
        self.tokens = 0
        """Trained by this peer, in all its lives that these weights come from."""
        self.discarded_tokens = 0
        self.known_tokens = 0
        """Of all peers, as far as we ever knew: never falls."""
        if checkpoint is not None:
            restore_line(self.line, checkpoint)
            self.tokens = checkpoint.value("own_tokens", int)
            self.known_tokens = checkpoint.value("run_tokens", int)
        welcome = gate.welcome
        me = Member(name, new_incarnation(), "")
        lineage = welcome.lineage if welcome else secrets.token_hex(8)
        link, loop = gate.runtime.link, gate.runtime.loop
        self.exchange = Swapping(me, self._terms(data), link, lineage, loop, self._on_reason, self._on_met)
        self.address = ""
        self.progress = Progress()
        self.spread: float | None = None
        """Found at the last swap, before it."""
        self.settling: Settling | None = None
        """Since nothing is trained any more."""
        self._fragment = self.line.layout.fragments[0]
        self._pairing = Pairing(contract.outer.lr, contract.outer.momentum)
        self._steps = 0
        """Inner steps that no swap has counted; their tokens are `line.trained`."""
        self._led: tuple[Swap, Counted] | None = None
        """The swap that we lead, and our weights as they were sent."""
        self._resumed = checkpoint is not None
        self._watch = Stopwatch()
        self._losses: list[float] = []
        self._inner_s = 0.0
        self._began_s = self._greeted_s = monotonic_s()
        self._swaps_here = self._tokens_here = 0
        self._moved = False
        """Whether our weights have, by more than inner steps."""
        self.idle: Callable[[], bool] = lambda: True
        """Asked now and then whether we still want a state; the other ranks of an island are not to give us up."""
        self._draw = random.Random(secrets.randbits(64))
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

    @property
    def comes_first(self) -> bool:
        """Whether we are the first by name of those we know: for what one peer should do, and it hardly matters who."""
        return all(self.name < word.member.peer for word in self.exchange.alive())

    def open(self) -> None:
        """Listen, find the others, get a state. Raises ResourceError, StateError, IncompatibleError."""
        network, welcome = self.site.network, self.gate.welcome
        if welcome is not None:
            check_alike(welcome, self.line.layout.digest, self.exchange.terms.data)
        served = self.gate.runtime.serve(self.exchange, network.listen)
        self.address = network.advertise or reachable(served, welcome.members[0].address if welcome else None)
        self.gate.open_directory(self.contract.run.name, lambda text: self.events.emit(Warned(text)))
        self.exchange.start(self.address, self.gate.directory.addresses)
        if welcome is not None and not self._resumed:
            self._copy_state([member.address for member in welcome.members])
        self.report(phase=Phase.WAITING, version=self.version)
        self.exchange.hold(self.line.state)
        if welcome is not None:
            self.exchange.greet(welcome.members[0])
            self.exchange.meet(welcome.members[1:])
        self._presence = Presence(self.gate.directory, self.exchange, self.gate.runtime.answer_of)
        self._on_met([self.name])
        self.events.emit(Listening(self.address, self.ticket))

    def _copy_state(self, sources: Sequence[str]) -> None:
        """Begin where one of the members stands: the first that gives its state. Raises StateError."""
        self.report(phase=Phase.JOINING)
        deadline_s = monotonic_s() + self.site.timeouts.join_s
        causes = []
        for source in sources:
            try:
                left_s = max(deadline_s - monotonic_s(), 0.1)
                state = self.exchange.copy_state(source, self.line.state, left_s, self._on_copied, self.idle)
            except (StateError, TimeoutError) as error:
                if not self.idle():
                    raise
                causes.append(f"{source}: {error}")
                continue
            adopt_state(self.line, state, None)
            self.events.emit(StateCopied(state.version, state.digest))
            return
        raise StateError(f"nobody gives the state: {'; '.join(causes)}"[:500], "try again, or raise timeouts.join_s")

    def _on_copied(self, done_bytes: int, total_bytes: int) -> None:
        if done_bytes == total_bytes:
            self.events.emit(StateCopying(done_bytes, total_bytes))

    def enter(self, patience: Callable[[], bool]) -> None:
        """Wait until `membership.start_peers` are there, or some have begun; no longer than a join may take.

        A joiner waits in any case until it knows somebody, which takes one greeting.
        """
        welcome = self.gate.welcome
        least = max(1 if self.tokens else self.contract.membership.start_peers, 2 if welcome else 1)
        deadline_s = monotonic_s() + self.site.timeouts.join_s
        while patience():
            others = self.exchange.alive()
            if len(others) + 1 >= least or any(word.progress.tokens for word in others):
                break
            if monotonic_s() > deadline_s:
                text = f"beginning with {len(others) + 1} of {least} peers: the others are not here"
                self.events.emit(Warned(text))
                break
            self._greet_sometimes([word.member for word in others] or list(welcome.members if welcome else ()))
            self.exchange.wait(PAUSE_S)
            self.between_steps()
        self._began_s = monotonic_s()
        self.report(phase=Phase.TRAINING)

    def _greet_sometimes(self, members: Sequence[Member]) -> None:
        now_s = monotonic_s()
        if members and now_s - self._greeted_s >= GREET_S:
            self._greeted_s = now_s
            self.exchange.greet(self._draw.choice(members))

    # ------------------------------------------------------------ training

    def trained(self, tokens: int, seconds: float, loss: float) -> None:
        """An inner step was done. `loss`: nan where nobody tells it."""
        self.line.trained.add(tokens, 0)
        self.tokens += tokens
        self._tokens_here += tokens
        self._steps += 1
        if math.isfinite(loss):
            self._losses.append(loss)
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
                    self.events.emit(RoundSkipped(self.version + 1, reason))
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

    def _count(self) -> Counted | None:
        """Our local weights. What is not finite must not reach others: then the progress is thrown away."""
        anchor = self.line.state.fragments[0].anchor
        local = self.line.weights.read(self._fragment, empty_as(anchor))
        if math.isfinite(magnitude(local)):
            held = self.line.weights.rounded(self._fragment, anchor)
            exact = local if held is anchor else carry(local, held, anchor)
            return Counted(local, exact, self._steps, self.line.trained.tokens)
        self.discarded_tokens += drop_progress(self.line)
        self._steps, self._moved = 0, True
        reason = "the progress is not finite and is discarded"
        self.events.emit(RoundSkipped(self.version + 1, reason))
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
        self._tell(swap.partner.peer, swap.leads, mine.tokens, apart, seconds)

    def _step_alone(self) -> None:
        """The mean of one is its own: DiLoCo with one peer."""
        mine, seconds = self._count(), {"inner": self._inner_s}
        if mine is not None:
            self._move_anchor(mine, mine.exact, seconds)
            self._tell(self.name, True, mine.tokens, None, seconds)

    def _move_anchor(self, mine: Counted, mean: Tensor, seconds: dict[str, float]) -> None:
        before = self.line.state.fragments[0]
        with timed(seconds, "outer"):
            after = self._pairing.step(before, mean) if self.settling is None else settle(before, mean)
        with timed(seconds, "merge"):
            carry_fragment(self.line.weights, self._fragment, mine.local, after.anchor)
        self.line.state = OuterState(self.version + 1, (after,))
        self._steps -= mine.steps
        self.line.trained.tokens -= mine.tokens
        self._led, self._moved = None, True

    def _tell(
        self, partner: str, leads: bool, inner_tokens: int, apart: float | None, seconds: Mapping[str, float]
    ) -> None:
        """Our anchor has moved: those who ask are told so, and an event."""
        self.spread = apart
        self._swaps_here += 1
        self.report(version=self.version, pace=self._watch.round())
        self.exchange.hold(self.line.state)
        wire = self.counter.sample()
        self.events.emit(
            SwapApplied(
                version=self.version,
                partner=partner,
                leads=leads,
                final=self.settling is not None,
                spread=apart,
                tokens=self.position(),
                inner_tokens=inner_tokens,
                loss=fmean(self._losses) if self._losses else None,
                tokens_per_s=self.tokens_per_s,
                wire_bytes_sent=wire.sent if wire else None,
                wire_bytes_received=wire.received if wire else None,
                seconds={name: round(value, 6) for name, value in seconds.items()},
            )
        )
        self._losses, self._inner_s = [], 0.0

    @property
    def tokens_per_s(self) -> float:
        """Since this life began to train."""
        return self._tokens_here / max(monotonic_s() - self._began_s, 1e-9)

    # ------------------------------------------------------------ the end

    def average(self, patience: Callable[[], bool]) -> None:
        """The final average: plainly, with others that train no more, until those we meet are close to us and say that
        they are done, too. Who is not done in time is left to it.
        """
        self.report(phase=Phase.AVERAGING)
        while self.exchange.busy and patience():
            self.between_steps()
            self.exchange.wait(PAUSE_S)
        self._count_alone()
        self.settling = Settling.of(self.contract)
        deadline_s = monotonic_s() + self.contract.gossip.final_s
        while patience() and monotonic_s() < deadline_s:
            self.between_steps()
            alive = self.exchange.alive()
            settled = self.settling.settled(len(alive)) and not self.exchange.busy
            self.report(phase=Phase.DONE if settled else Phase.AVERAGING)
            unsettled = [word.member for word in alive if word.progress.phase != Phase.DONE]
            if settled and not unsettled:
                break
            self._greet_sometimes(unsettled)
            self.exchange.wait(PAUSE_S * (0.5 + self._draw.random()))
        self.spread = self.settling.remaining(len(self.exchange.alive()) or 1)

    def _count_alone(self) -> None:
        """What was trained since the last swap goes into our anchor, before that is averaged or is the end."""
        mine = self._count() if self.line.trained.tokens else None
        if mine is not None:
            self.line.state = OuterState(self.version + 1, (settle(self.line.state.fragments[0], mine.exact),))
            self.line.weights.write(self._fragment, mine.exact)  # not always `local`, where that was rounded
            self._steps = self.line.trained.tokens = 0
            self.exchange.hold(self.line.state)

    def leave(self, patience: Callable[[], bool]) -> None:
        """One more swap, if somebody is there, so that what was trained since the last one is not only ours."""
        self.report(phase=Phase.LEAVING)
        swaps = self.version
        deadline_s = monotonic_s() + self.site.timeouts.leave_s
        while self._steps and self.version == swaps and patience() and monotonic_s() < deadline_s:
            if not self.exchange.alive():
                break
            self.between_steps()
            self.exchange.wait(PAUSE_S)

    def close(self) -> None:
        """Take back the record in the directory and end the exchange. The gate is the caller's."""
        if self._presence is not None:
            self._presence.end()
        self.exchange.stop()

    # ------------------------------------------------------------ telling

    def report(self, **changes: str | int | float) -> None:
        """Change what others hear of us. A loss that is not finite is left out: others refuse such a message."""
        finite = {name: value for name, value in changes.items() if isinstance(value, str) or math.isfinite(value)}
        self.progress = replace(self.progress, tokens=self.tokens, **finite)  # type: ignore[arg-type]
        swap_s = (monotonic_s() - self._began_s) / max(self._swaps_here, 1)
        self.exchange.report(self.progress, -1.0 if self.spread is None else self.spread, swap_s)

    def _on_reason(self, reason: str, routine: bool) -> None:
        self.events.emit(Remark(reason, routine))

    def _on_met(self, peers: Sequence[str]) -> None:
        self.events.emit(ViewChanged(self.version, tuple(peers)))

    # ------------------------------------------------------------ checkpoints

    def to_save(self) -> Contents:
        """What a checkpoint holds of us, beside the inner side."""
        groups, about = save_line(self.line, self.contract)
        others = [word.member.address for word in self.exchange.alive()[:MAX_SAVED_OTHERS]]
        return groups, {**about, "own_tokens": self.tokens, "run_tokens": self.position(), "others": others}

    def _terms(self, data: str) -> GossipTerms:
        contract = self.contract
        return GossipTerms(
            contract_json=contract.to_json().encode(),
            run=contract.run.name,
            contract=contract.digest,
            timing=timing_of(self.site),
            layout=self.line.layout,
            codecs=self.line.codecs,
            optimizer=self.line.optimizer,
            total_tokens=contract.run.total_tokens,
            tokens_per_step=contract.tokens_per_step,
            data=data,
            offences_allowed=contract.membership.offences_allowed,
            serve_bps=serve_bps_of(self.site),
        )
