"""A witness: a peer that votes and does not train.

Two islands cannot distinguish each other's death from a cut line, so neither may go on alone. A third voter can: it
holds no model and receives no part, only the commits (about 2 kB per version and member), and any small machine that
both islands reach will do. It is asked last, when the trainers hold the mean or do not answer, so that it seldom
vouches for bytes that die with one island.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from diloco.base.clock import monotonic_s, new_incarnation
from diloco.base.errors import UsageError
from diloco.base.life import POLL_S, Life, Wait
from diloco.base.types import Member, Phase, Progress
from diloco.config.contract import Contract
from diloco.config.site import Site
from diloco.exchange.engine import Exchange
from diloco.exchange.service import ExchangeService
from diloco.observe.event_log import Events
from diloco.observe.events import Listening, Remark, Stamped, VersionWitnessed, Warned
from diloco.outer.fragments import Layout
from diloco.peer.schedule import RunEnd
from diloco.peer.terms import exchange_terms
from diloco.peer.waits import Refusal, left, settled
from diloco.run.blocking import block
from diloco.run.door import open_events
from diloco.run.launch import chosen_directory, event_card, fetch_contract, open_directory
from diloco.run.options import PeerOptions, open_site
from diloco.run.past import peer_name
from diloco.transport.endpoint import Endpoint, listening, reachable


@dataclass(frozen=True)
class WitnessEnd:
    """End of a witness's life: the last version that it saw."""

    version: int
    tokens: int
    reason: str


def run_witness(options: PeerOptions, stop: Callable[[], bool], listener: Callable[[Stamped], None]) -> WitnessEnd:
    """Run `diloco witness`: vote until the run has its tokens or `stop` returns True. Raises DilocoError."""
    assert options.join is not None
    site = listening(open_site(options), options.join)
    endpoint = Endpoint(site, joins=True)
    try:
        contract = fetch_contract(options.join, endpoint, listener, stop)
        if contract.membership.policy == "gossip":
            raise UsageError("this run gossips: nobody votes in it", "join it as a trainer, with `diloco peer --join`")
        name = peer_name(site, None)
        directory = open_directory(chosen_directory(options, site), site, contract, name, endpoint.private)
        events = open_events(directory, name, [event_card(directory), listener])
        return block(witnessed(name, contract, endpoint, events, stop))
    finally:
        endpoint.close()


def witnessed(
    name: str, contract: Contract, endpoint: Endpoint, events: Events, stop: Callable[[], bool]
) -> Life[WitnessEnd]:
    """A witness's life: listen, ask to be taken in, vote; say goodbye at the end."""
    site, runtime, welcome = endpoint.site, endpoint.runtime, endpoint.welcome
    assert welcome is not None
    terms = exchange_terms(contract, site, Layout(()), welcome.layout, welcome.data)
    me = Member(name, new_incarnation(), "", witness=True)

    def remark(reason: str, routine: bool) -> None:
        events.emit(Remark(reason, routine))

    exchange = Exchange(me, terms, runtime.link, welcome.lineage, False, runtime.loop, remark, welcome.forks)
    served = runtime.serve(ExchangeService(exchange), site.network.listen)
    address = site.network.advertise or reachable(served, welcome.members[0].address)
    endpoint.open_directory(contract.run.name, lambda text: events.emit(Warned(text)))
    exchange.start(address, endpoint.directory.addresses)
    exchange.meet(welcome.members)
    exchange.report(Progress(phase=Phase.JOINING))
    events.emit(Listening(address, f"{address}/{contract.digest}"))
    presence = endpoint.appear(exchange)
    try:
        ending = yield from _vote(exchange, RunEnd.of(contract, terms.rules.policy.max_peers), events, site, stop)
        gone_by_s = monotonic_s() + site.timeouts.leave_s
        yield from settled(exchange, site, gone_by_s)
        yield from left(exchange, site, gone_by_s)
    finally:
        exchange.stop()
        presence.end()
    return ending


def _vote(exchange: Exchange, end: RunEnd, events: Events, site: Site, stop: Callable[[], bool]) -> Life[WitnessEnd]:
    """Record, in a witness, every version, on which it votes, until the run has its tokens or `stop` returns True."""
    version, tokens, refusal = -1, 0, Refusal(exchange, site)
    while not stop():
        yield Wait(exchange.closes(), POLL_S)
        for closed in exchange.closed():  # the exchange itself has voted; here it is recorded
            commit = closed.commit
            end.on_commit(commit)
            version, tokens = commit.version, commit.tokens
            exchange.report(Progress(phase=Phase.WITNESS, version=version))
            names = tuple(counted.peer for counted in commit.counted)
            events.emit(VersionWitnessed(version, tokens, names, commit.digest))
        if end.done:
            return WitnessEnd(version, tokens, "the run is complete")
        refusal.check()
    return WitnessEnd(version, tokens, "left")
