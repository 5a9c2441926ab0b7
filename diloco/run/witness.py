"""A witness: a peer that votes and does not train.

Of two islands neither can tell the other's death from a cut line, so that neither may go on alone. A third voice can:
it holds no model and receives no part, only the commits (about 2 kB per version and member), and any small machine
that both islands reach will do. It is asked last, when the trainers hold the mean or do not answer, so that it seldom
vouches for bytes that die with one island.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from diloco.base.clock import monotonic_s, new_incarnation
from diloco.base.errors import EvictedError, UsageError
from diloco.base.life import POLL_S, Life, Wait
from diloco.base.types import Closed, Member, Phase, Progress
from diloco.config.contract import Contract
from diloco.exchange.engine import Exchange, Terms
from diloco.observe.event_log import Events
from diloco.observe.events import Listening, Remark, Stamped, VersionWitnessed, Warned
from diloco.outer.fragments import Layout
from diloco.peer.peer import left, settled
from diloco.peer.schedule import RunEnd
from diloco.peer.terms import lane_terms, rules_of, timing_of
from diloco.protocol.messages import Reply
from diloco.run.blocking import block
from diloco.run.launch import event_card, fetch_contract, open_directory
from diloco.run.options import PeerOptions, open_site
from diloco.run.past import peer_name
from diloco.transport.dht import Presence
from diloco.transport.endpoint import Endpoint, listening, reachable


@dataclass(frozen=True)
class WitnessEnding:
    """How it went."""

    version: int
    tokens: int
    reason: str


def run_witness(options: PeerOptions, stop: Callable[[], bool], listener: Callable[[Stamped], None]) -> WitnessEnding:
    """Vote until the run has its tokens or `stop` says so. Raises DilocoError."""
    assert options.join is not None
    site = listening(open_site(options), options.join)
    endpoint = Endpoint(site)
    try:
        contract = fetch_contract(options.join, endpoint, listener, stop)
        if contract.membership.policy == "gossip":
            raise UsageError("this run gossips: nobody votes in it", "join it as a trainer, with `diloco peer --join`")
        name = peer_name(site, None)
        directory = open_directory(options, site, contract, name)
        events = Events(directory / "events.jsonl", name, [event_card(directory), listener])
        return Witness(name, contract, endpoint, events).run(stop)
    finally:
        endpoint.close()


class Witness:
    """One witness's life."""

    def __init__(self, name: str, contract: Contract, endpoint: Endpoint, events: Events) -> None:
        self.contract = contract
        self.endpoint = endpoint
        self.events = events
        me = Member(name, new_incarnation(), "", witness=True)
        assert endpoint.welcome is not None
        lineage = endpoint.welcome.lineage
        runtime = endpoint.runtime
        forks = endpoint.welcome.forks
        self.exchange = Exchange(me, self._terms(), runtime.link, lineage, False, runtime.loop, self._on_reason, forks)
        self.version, self.tokens = -1, 0
        self.ending = RunEnd.of(contract, self.exchange.terms.rules.policy.max_peers)

    def run(self, stop: Callable[[], bool]) -> WitnessEnding:
        """Listen, ask to be taken in, vote; say goodbye at the end."""
        presence = self._enter()
        try:
            reason = block(self._live(stop))
        finally:
            self.exchange.stop()
            presence.end()
        return WitnessEnding(self.version, self.tokens, reason)

    def _live(self, stop: Callable[[], bool]) -> Life[str]:
        reason = yield from self._vote(stop)
        yield from settled(self.exchange, self.endpoint.site)
        yield from left(self.exchange, self.endpoint.site)
        return reason

    def _enter(self) -> Presence:
        endpoint, welcome = self.endpoint, self.endpoint.welcome
        assert welcome is not None
        network = endpoint.site.network
        served = endpoint.runtime.serve(self.exchange, network.listen)
        address = network.advertise or reachable(served, welcome.members[0].address)
        endpoint.open_directory(self.contract.run.name, lambda text: self.events.emit(Warned(text)))
        self.exchange.start(address, endpoint.directory.addresses)
        self.exchange.meet(welcome.members)
        self.exchange.report(Progress(phase=Phase.JOINING))
        self.events.emit(Listening(address, f"{address}/{self.contract.digest[:12]}"))
        return endpoint.appear(self.exchange)

    def _vote(self, stop: Callable[[], bool]) -> Life[str]:
        refused_s = monotonic_s()
        while not stop():
            yield Wait(self.exchange.closes(), POLL_S)
            for closed in self.exchange.closed():
                self._on_closed(closed)
            if self.ending.done:
                return "the run is complete"
            if self.exchange.refused is not Reply.FENCED:
                refused_s = monotonic_s()
            elif monotonic_s() - refused_s > 3 * self.endpoint.site.timeouts.suspect_s:
                raise EvictedError(f"the run has a live peer named {self.exchange.name}", "choose another peer.name")
        return "left"

    def _on_closed(self, closed: Closed) -> None:
        commit = closed.commit
        self.ending.on_commit(commit, copied=self.version < 0)
        self.version, self.tokens = commit.version, commit.tokens
        self.exchange.report(Progress(phase=Phase.WITNESS, version=commit.version))
        names = tuple(counted.peer for counted in commit.counted)
        self.events.emit(VersionWitnessed(commit.version, commit.tokens, names, commit.digest))

    def _on_reason(self, reason: str, routine: bool) -> None:
        self.events.emit(Remark(reason, routine))

    def _terms(self) -> Terms:
        contract, welcome = self.contract, self.endpoint.welcome
        assert welcome is not None
        return Terms(
            contract_json=contract.to_json().encode(),
            rules=rules_of(contract, parts=()),
            timing=timing_of(self.endpoint.site),
            lane=lane_terms(contract, self.endpoint.site, Layout(())),
            layout_digest=welcome.layout,
            total_tokens=contract.run.total_tokens,
            data=welcome.data,
        )
