"""The exchange's answers to calls of other peers: messages, parts, the state, missed means and commits, status."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from diloco.base import failpoints
from diloco.base.clock import monotonic_s
from diloco.base.types import Closed, Member, Progress
from diloco.exchange.archive import make_offer
from diloco.exchange.engine import Exchange
from diloco.outer.state import OuterState
from diloco.protocol.leases import count
from diloco.protocol.machine import Machine
from diloco.protocol.messages import Envelope, Reply
from diloco.protocol.streams import Part, StateOffer, StreamHeader, Welcome
from diloco.transport.link import LinkRefused, Service
from diloco.transport.pace import RateLimit, StreamQuota


class ExchangeService(Service):
    """The `Service` of a peer's exchange: its answers to other peers. On the exchange's loop."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange, self._terms, self._archive = exchange, exchange.terms, exchange.archive
        self.max_part_bytes = exchange.terms.lane.max_part_bytes
        self._serving = RateLimit(exchange.terms.serve_bps)
        self._streams = StreamQuota()

    async def on_envelope(self, envelope: Envelope) -> Reply:
        return self.exchange.receive(envelope)

    async def on_parts(self, header: StreamHeader, parts: AsyncIterator[Part]) -> Reply:
        known = self.exchange.machine.roster.is_located(header.sender)
        with self._streams.open(header.sender.peer if known else ""):
            return await self.exchange.lane.on_parts(header, parts)

    def on_bytes(self, header: StreamHeader, size_bytes: int) -> None:
        self.exchange.lane.on_bytes(header, size_bytes)

    def on_hello(self) -> Welcome:
        machine, terms = self.exchange.machine, self._terms
        if not machine.me.address:
            raise LinkRefused(Reply.TOO_EARLY, "still starting")
        if machine.gone:  # its process may live on for a while, to evaluate and to save
            raise LinkRefused(Reply.STALE, "has left the run")
        state = self._archive.state
        # A joiner asks them all for the state: who has no view yet, or has left its lineage, may have none for long.
        others = self.exchange.others if machine.commit is not None else self.exchange.copying.givers()
        if state is None:  # whom we met when we came ourselves, and may not have heard yet
            known = [entry for entry in machine.roster if entry.located and not entry.left]
            met = (entry.member for entry in known if not entry.member.witness)
            others = [*dict.fromkeys((*others, *met))]
        return Welcome(
            terms.contract_json,
            machine.lineage,
            state.version if state else -1,
            machine.commit is not None,
            (machine.me, *others),
            self.exchange.directory,
            terms.layout_digest,
            terms.data,
            machine.forks,
            boot=machine.boot,
        )

    def on_lanes(self) -> tuple[str, ...]:
        return (self.exchange.me.address, *self.exchange.lane_addresses)

    def on_fetch_commits(self, since: int) -> AsyncIterator[Closed]:
        return self._archive.commits(since)

    async def on_fetch_mean(self, digest: str) -> Sequence[bytes] | None:
        return await self.exchange.lanes.mean(digest)

    async def on_state_offer(self, have: str) -> StateOffer:
        archive, machine = self._archive, self.exchange.machine
        while (state := await self._state_to_offer()) is not None:
            # Before a resumed run is founded anew, the commit of its state belongs to the view that is gone.
            commit = archive.commit if machine.commit is not None else None
            if commit is not archive.commit and not machine.founder:
                raise LinkRefused(Reply.TOO_EARLY, "the state here is of a lineage that ended")
            offer = await asyncio.get_running_loop().run_in_executor(self.exchange.hasher, make_offer, state, commit)
            if have == offer.digest:
                return offer
            if not archive.reused and archive.state is state:
                return archive.offer(state, offer)
        raise LinkRefused(Reply.TOO_EARLY, "no state here yet")

    async def _state_to_offer(self) -> OuterState | None:
        """The exchange's state to copy, once it is not being overwritten; None if that is late or there is none."""
        archive, moved = self._archive, self.exchange.moved
        with suppress(TimeoutError):
            async with moved:
                await asyncio.wait_for(moved.wait_for(lambda: not archive.reused), self._terms.timing.stall_s)
        return None if archive.reused else archive.state

    async def on_state_chunk(self, digest: str, chunk: int) -> bytes | None:
        failpoints.hit("serving-state")
        return await self._archive.chunk(digest, chunk)

    async def on_state_bytes(self, digest: str, size_bytes: int) -> None:
        self._archive.snapshots.read(digest, monotonic_s())
        await asyncio.sleep(self._serving.delay_s(size_bytes, monotonic_s()))

    def on_status(self) -> str:
        exchange, total, state = self.exchange, self._terms.total_tokens, self._archive.state
        send_bps = exchange.lanes.send_bps
        durable = exchange.votes.use is not None
        return status_json(exchange.machine, state, total, exchange.directory, send_bps, monotonic_s(), durable)


def status_json(
    machine: Machine,
    state: OuterState | None,
    total_tokens: int,
    directory: tuple[str, ...],
    send_bps: int,
    now: float,
    durable: bool = True,
) -> str:
    """Status of a peer's exchange. `peers` has every member of the view, every joiner at the door, and who answers.

    `votes`: those that live members have; `votes_missing`: members that do not live, and for which nobody votes.
    `seats`: live voters that train, one of which is to coordinate.
    `mean_lost_with`: members that do not live, one of which may have the mean of an accepted version that no live one
    has.
    `durable`: the votes of the peer that answers are on a disk. `abstains`, of a peer: its disk refuses them,
    or the mean for which it would vote.
    `send_bps`: how fast others take what the peer that answers sends, bits per second; 0: unknown.
    """
    commit, electorate = machine.commit, machine.electorate
    alive = {member.peer for member in machine.alive()}
    tree: dict[str, Any] = {
        "run": machine.rules.run,
        "contract_digest": machine.rules.contract,
        "lineage": machine.lineage,
        "founded": commit is not None,
        "version": machine.version,
        "commit_digest": commit.digest if commit else "",
        "state_version": state.version if state else -1,
        "state_digest": state.digest if state else "",
        "tokens": commit.tokens if commit else 0,
        "total_tokens": total_tokens,
        "counted": [counted.peer for counted in commit.counted] if commit else [],
        "lost_blocks": commit.leases.lost if commit else 0,
        "returned_blocks": count(commit.leases.returned) if commit else 0,
        "answering": machine.me.peer,
        "send_bps": send_bps,
        "reason": machine.reason,
        "votes": electorate.reachable(alive),
        "votes_needed": machine.votes_needed,
        "seats": electorate.seats(alive),
        "durable": durable,
        "votes_missing": electorate.missing(alive),
        "conflict": machine.conflict,
        "mean_lost_with": list(machine.mean_lost_with),
        "barred": sorted(peer for peer in machine.roster.offences if machine.roster.barred(peer)),
        "directory": list(directory),
        "peers": [_peer(machine, member, now) for member in _known(machine)],
    }
    return json.dumps(tree)


def _known(machine: Machine) -> list[Member]:
    listed = {member.peer: member for member in (*machine.view, machine.me)}
    strangers = [entry.member for entry in machine.roster if entry.member.peer not in listed and not entry.left]
    return [*listed.values(), *strangers]


def _peer(machine: Machine, member: Member, now: float) -> dict[str, Any]:
    entry = machine.roster.get(member)
    beat = entry.heartbeat if entry else None
    mine = member.peer == machine.me.peer
    progress = machine.progress if mine else beat.progress if beat else Progress()
    return {
        "peer": member.peer,
        "address": member.address,
        "alive": mine or machine.roster.alive(member, now),
        "incarnation": member.incarnation,
        "in_view": member in machine.view,
        "votes": member.peer in machine.electorate.names(),
        "abstains": machine.abstains if mine else beat is not None and beat.abstains,
        "version": machine.version if mine else beat.version if beat else -1,
        "reached": mine or machine.roster.reaches(machine.roster.latest(member)),
        "heard_s_ago": 0.0 if mine or entry is None else round(now - entry.heard_at_s, 1),
        **asdict(progress),
    }
