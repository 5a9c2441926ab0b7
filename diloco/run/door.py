"""The door into a run: `found` and `join` for somebody's own loop, and `open_run` for every program.

    with diloco.join("10.0.0.5:4000", model) as run:
        for inputs, targets in batches:
            train_step(model, optimizer, inputs, targets)
            run.step(tokens=inputs.numel())  # every H-th call ends a round: the model has moved to the new anchor

The model is any `torch.nn.Module` and stays yours: its trainable parameters are read and written in place. It may be
DistributedDataParallel, or sharded by `fully_shard`: then every rank makes the same calls. A contract for such a run
has `model.kind = "external"`. `OwnLoop` is that training loop, as a run sees it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diloco.accounts.journal import RECORDED
from diloco.accounts.ledger import LEDGER
from diloco.base.errors import ConfigError, DilocoError, ResourceError, UnreachableError, UsageError
from diloco.base.files import make_folders, refuse_links, remove_half_written
from diloco.base.life import Life
from diloco.config.contract import Contract
from diloco.config.load import contract_from_json, contract_of, load_contract, load_site
from diloco.config.site import Site
from diloco.exchange.log import LOG
from diloco.exchange.votes import VOTES, past_votes
from diloco.gossip.peer import GossipLife, GossipPeer
from diloco.inner.loop import random_states, restore_random_states
from diloco.inner.meter import Phases, Throughput, device_name, memory_of
from diloco.island import Island
from diloco.island.bridge import Bridge
from diloco.island.slices import Pieces, Slices, device_of_share, held, unwrapped
from diloco.models import count_parameters
from diloco.observe.event_log import Events
from diloco.observe.events import RankMemory, Stamped
from diloco.outer.fragments import Weights, named_parameters
from diloco.peer.life import PeerLife
from diloco.peer.peer import Peer
from diloco.peer.rank import PeerRank, PeerTraining
from diloco.peer.restart import Restart
from diloco.peer.terms import lanes_of
from diloco.run.blocking import block
from diloco.run.options import CARD, SITE_CARD, remember, remembered_private
from diloco.run.past import PastRun, past_of, peer_name
from diloco.run.run import Leading, Run, RunChronicle, RunReader
from diloco.storage.checkpoint import CHECKPOINTS, Checkpoint, read_together
from diloco.storage.saving import Contents
from diloco.storage.stateful import Stateful, UserState
from diloco.transport.endpoint import Endpoint, listening

STATE = "state"
"""Group of a checkpoint that holds the objects of somebody's own loop."""
WRITTEN = ("events.jsonl", ".events.lock", LEDGER, VOTES, CARD, SITE_CARD, CHECKPOINTS, LOG, RECORDED, "profile")
"""Files and folders that a peer writes in its own."""


class RandomStates:
    """The global random states of an own loop's process: dropout and shuffling draw from them."""

    def state_dict(self) -> dict[str, Any]:
        """Random states of an own loop's process: Python, NumPy and torch (CPU and the current GPU)."""
        return random_states()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put the random states of an own loop's process back."""
        restore_random_states(state_dict)


class OwnLoop:
    """Somebody's own training loop on one rank, as a run sees it (`diloco.peer.rank.PeerTraining`)."""

    def __init__(self, model: nn.Module, island: Island, state: Mapping[str, Stateful]) -> None:
        """`state`: objects of the own loop to save and restore. Raises UsageError for one that cannot be."""
        bare = unwrapped(model)
        self.island = island
        self.parameters = named_parameters(bare)
        self.weights = Bridge(self.parameters, island) if island.size > 1 else Weights(self.parameters)
        self._count = count_parameters(bare)
        self._state = UserState({"random": RandomStates(), **state}, self.parameters, island.rank)
        self.usage = Throughput(None, None, island.size, Phases(island.device))

    def live(self, *, local: bool) -> Slices:
        """The state of the own loop's objects for a checkpoint, and the weights if they are wanted."""
        live = {STATE: self._state.slices()}
        weights = [held(name, parameter.detach()) for name, parameter in self.parameters.items()]
        return {**live, "local": weights} if local else live

    def kept(self) -> Contents:
        """Nothing: all that a checkpoint holds of somebody's own loop changes in inner steps."""
        return {}, {}

    def restore(self, opened: Callable[[], Checkpoint]) -> None:
        """Take the own loop's objects and weights from a checkpoint. Raises StateError on all ranks when one cannot."""

        def take() -> None:
            groups = opened().groups
            weights = groups.get("local", Pieces(()))
            for name, parameter in self.parameters.items() if weights else ():
                weights.read(held(name, parameter.detach()))
            self._state.load(groups.get(STATE, Pieces(())))

        read_together(self.island, take)

    def evaluate(self) -> float | None:
        """Nothing: somebody's own loop evaluates by itself."""
        return None

    def facts(self) -> dict[str, Any]:
        """Fields of the event `Started` for somebody's own loop."""
        return {"parameters": self._count, "ranks": self.island.size, "device": device_name(self.island.device)}

    def version_fields(self) -> dict[str, Any]:
        """Nothing: a run has no more fields for somebody's own loop."""
        return {}

    def used(self) -> dict[str, Any]:
        """Fields of the event `HardwareUsed` for somebody's own loop, since the last call."""
        memories = self.island.gather(json.dumps(memory_of(self.island.device)))
        return {**self.usage.fields(), "memory": tuple(RankMemory(*json.loads(one)) for one in memories)}


def asked_members(past: PastRun, endpoint: Endpoint, named: bool = False) -> Contract | None:
    """The contract of a member of the run to resume that answers now, or is starting. None: nobody answers.

    Raises UnreachableError when none does for a while, and the run had gone on without this peer: to found it anew
    would fork it, unless a person `named` the checkpoint.
    """
    answering = [ticket for ticket in past.tickets if endpoint.runtime.is_there(ticket.partition("/")[0])]
    for ticket in answering:
        try:
            return endpoint.fetch_contract(ticket)
        except DilocoError:
            endpoint.welcome = None  # another run is there by now
    if named or not (past.tickets and past.was_left_out):
        return None
    try:
        return endpoint.fetch_contract(",".join(past.tickets))
    except UnreachableError as error:
        fix = f"start one of the others first, or found the run anew: --resume {past.folder / CHECKPOINTS}/v..."
        raise UnreachableError(f"the run went on without this peer, and {error.cause}", fix) from error


def fetched(
    tickets: str, fetch: Callable[[], Contract], checkpoint: Checkpoint | None, folder: Path | None
) -> Contract | None:
    """The contract of the run at these tickets. None: nobody answers there, and this peer goes on as what it is in the
    run of its folder, which they name: after a power cut of all somebody has to be first. Raises what `fetch` does."""
    try:
        return fetch()
    except UnreachableError:
        past = past_votes(folder) if folder is not None and checkpoint is not None else None
        digests = {ticket.partition("/")[2] for ticket in tickets.split(",")}
        ours = checkpoint is not None and all(digest == checkpoint.contract.digest for digest in digests)
        if past is None or not (past.goes_on and ours):
            raise
        return None


def make_folder(directory: Path, site: Site, private: bool) -> Path:
    """Make the folder of a peer that founds or joins a run, for this user only; it remembers where its data is, and
    whether the run has a secret (`private`). Raises ResourceError, and StateError for a symbolic link in it where a
    peer writes."""
    try:
        refuse_links(directory, WRITTEN)
        make_folders(directory, 0o700)
        if directory.stat().st_uid == os.getuid():
            directory.chmod(0o700)  # it may have been there, for others to read
        remember(directory, site, private)
    except OSError as error:
        cause = f"cannot write to {directory}: {error.strerror}"
        raise ResourceError(cause, "choose another folder (--dir)") from error
    return directory


def open_events(directory: Path, name: str, listeners: Sequence[Callable[[Stamped], None]]) -> Events:
    """The event log of a peer's folder, to which no other process writes from now on. What killed ones left half
    written there goes. Raises ResourceError where another process has the folder, and StateError for a link."""
    events = Events(directory / "events.jsonl", name, listeners)
    remove_half_written(directory, (VOTES, CARD, SITE_CARD))
    remove_half_written(directory / RECORDED, ("v*",))
    return events


@dataclass(frozen=True)
class Entrance:
    """Rank 0's way into a run: found, joined or resumed."""

    contract: Contract
    endpoint: Endpoint
    name: str
    directory: Path | None
    checkpoint: Checkpoint | None = None
    listeners: Sequence[Callable[[Stamped], None]] = ()
    stop: Callable[[], bool] = lambda: False
    """Whether this peer is asked to leave."""
    named: bool = False
    """Whether somebody named this very checkpoint: the log does not lead on from it."""
    joins: bool = False
    """Whether a person named the members to join: this peer follows them, whatever their lineage lacks."""


def found(
    contract: str | Path | Mapping[str, Any] | Contract,
    model: nn.Module,
    *,
    site: str | Path | Site | None = None,
    directory: str | Path | None = None,
    resume: bool = False,
    optimizer: Stateful | None = None,
    state: Mapping[str, Stateful] | None = None,
) -> Run:
    """Begin a run; `Run.address` is what the others join.

    `contract`: a path, the name of one that ships with diloco, its tables as a dict, or a `Contract`. `site`: a path
    (`peers/*.toml`), a `Site`, or the defaults. `directory`: the folder of this peer, with its ledger, events and
    checkpoints. `resume`: go on from that folder, as the same voter of the same run; join the others where they went
    on without this peer; and begin where there is nothing to resume. `state`: objects with `state_dict` and
    `load_state_dict` (scheduler, scaler, loader) that checkpoints hold; `optimizer` is short for one.

    Raises DilocoError: the contract is wrong, a port is in use, none of those that went on answers, ...
    """
    if isinstance(contract, Contract):
        agreed = contract
    else:
        agreed = contract_of(contract) if isinstance(contract, Mapping) else load_contract(contract).value
    return _open_own(agreed, None, model, site, directory, resume, optimizer, state)


def join(
    address: str,
    model: nn.Module,
    *,
    site: str | Path | Site | None = None,
    directory: str | Path | None = None,
    resume: bool = False,
    optimizer: Stateful | None = None,
    state: Mapping[str, Stateful] | None = None,
) -> Run:
    """Join the run of the member at `address` (`HOST:PORT[/DIGEST]`), with a model of the same parameters.

    Several addresses, with commas between them, are tried in turn: any live member will do. The rest as for `found`.

    Raises UnreachableError, TicketError, IncompatibleError, StateError.
    """
    return _open_own(None, address, model, site, directory, resume, optimizer, state)


def _open_own(
    agreed: Contract | None,
    address: str | None,
    model: nn.Module,
    site: str | Path | Site | None,
    directory: str | Path | None,
    resume: bool,
    optimizer: Stateful | None,
    state: Mapping[str, Stateful] | None,
) -> Run:
    local = site if isinstance(site, Site) else load_site(site).value
    if optimizer is not None and state is not None and "optimizer" in state:
        raise UsageError("optimizer= and state['optimizer'] are both given", "give one of them")
    objects = {**(state or {}), **({} if optimizer is None else {"optimizer": optimizer})}
    chosen = directory if directory is not None else local.storage.directory
    folder = Path(chosen) if chosen is not None else None
    if resume and folder is None:
        raise UsageError("resume=True, and no folder to resume from", "give directory=")
    first = next(iter(model.parameters()), None)  # parameters on several devices: the first one's is as good as any
    device = torch.device("cpu") if first is None else device_of_share(first)
    island = Island.beside(device, local.timeouts.collective_s)
    loop = OwnLoop(model, island, objects)
    enter = partial(_enter, agreed, address, local, folder, island, resume)
    return block(open_run(enter, local, island, lambda contract: Parts(loop.weights, loop)))


def _enter(
    agreed: Contract | None, address: str | None, site: Site, folder: Path | None, island: Island, resume: bool
) -> Entrance:
    past = past_of(folder) if resume and folder is not None else None
    if past is not None and agreed is not None and past.contract_digest != agreed.digest:
        cause = f"{past.folder} is of contract {past.contract_digest[:12]}, the one given is {agreed.digest[:12]}"
        raise ConfigError(cause, "resume with the contract of that folder, or choose another")
    checkpoint = past.checkpoint() if past is not None else None
    private = past is not None and remembered_private(past.folder)
    endpoint = Endpoint(listening(site, address), lanes_of(site, island), joins=address is not None, private=private)
    try:
        contract = agreed
        if address is not None:
            tickets = ",".join([address, *(past.tickets if past is not None else ())])
            contract = fetched(tickets, lambda: endpoint.fetch_contract(tickets), checkpoint, folder) or agreed
        elif past is not None:
            contract = asked_members(past, endpoint) or agreed
        if contract is None:
            assert checkpoint is not None
            contract = checkpoint.contract
        if checkpoint is not None and checkpoint.contract.digest != contract.digest:
            checkpoint = None
        if folder is not None:
            make_folder(folder, site, endpoint.private)
        return Entrance(contract, endpoint, peer_name(site, checkpoint), folder, checkpoint)
    except BaseException:
        endpoint.close()
        raise


@dataclass(frozen=True)
class Parts:
    """A rank's share of the model in a run, and whoever trains it."""

    weights: Weights
    trains: PeerTraining
    data: str = ""
    """Fingerprint of the data, where leases say who trains on which block of it."""
    reader: Callable[[PeerRank, Entrance], RunReader] | None = None
    """Makes the reader of leased data, on rank 0."""


def open_run(
    enter: Callable[[], Entrance],
    site: Site,
    island: Island,
    build: Callable[[Contract], Parts],
    take_place: Callable[[Contract, Site, Island, Weights, PeerTraining], PeerRank] = PeerRank,
) -> Life[Run]:
    """Enter a run; all ranks of an island together. Ends once this peer listens and has a state.

    `enter`: on rank 0. `build`: on every rank, with the contract. `take_place`: makes the rank. What rank 0 raises
    before the ranks meet, the others raise as ResourceError.
    """
    entrance, own = None, ""
    if island.leads:
        try:
            entrance = enter()
        except BaseException as error:
            island.share(str(error) or type(error).__name__)
            raise
        island.share("")  # nothing failed: the other ranks wait for this
        saved = entrance.checkpoint.meta if entrance.checkpoint is not None else {}
        path = str(entrance.directory.resolve()) if entrance.directory is not None else ""
        about = {"contract": entrance.contract.to_json(), "name": entrance.name, "directory": path}
        own = json.dumps({**about, "steps": int(saved.get("run_steps", 0))})
    elif why := island.share():
        raise ResourceError(f"rank 0 of this island failed: {why}", "its output says why")
    common = json.loads(island.share(own))
    contract = contract_from_json(common["contract"])
    with ExitStack() as closing:  # frees everything if the run does not begin
        if entrance is not None:
            closing.callback(entrance.endpoint.close)
        parts = build(contract)
        rank = take_place(contract, site, island, parts.weights, parts.trains)
        closing.callback(rank.close)
        leading = lead(entrance, rank, parts, closing) if entrance is not None else None
        folder = Path(common["directory"]) if common["directory"] else None
        run = Run(rank, common["name"], folder, common["steps"], leading)
        yield from run.begin()
        closing.pop_all()
    return run


def lead(entrance: Entrance, rank: PeerRank, parts: Parts, closing: ExitStack) -> Leading:
    """The run's peer, its life and its record, on rank 0. `closing`: what to close if the run does not begin."""
    folder, name = entrance.directory, entrance.name
    listeners = entrance.listeners
    events = open_events(folder, name, listeners) if folder is not None else Events(None, name, listeners)
    closing.callback(events.close)
    reader = parts.reader(rank, entrance) if parts.reader is not None else None
    chronicle = RunChronicle(rank, events.emit, reader)
    about = (name, rank, entrance.endpoint, events, chronicle, entrance.checkpoint, parts.data, folder)
    life: PeerLife | GossipLife
    if rank.contract.membership.policy == "gossip":
        life = GossipLife(GossipPeer(*about), entrance.stop)
    else:
        restart = None if entrance.named else Restart.of(folder, entrance.checkpoint, entrance.joins)
        if folder is not None and not rank.site.storage.keeps_votes:  # what an earlier life has said is over
            (folder / VOTES).unlink(missing_ok=True)
            restart = None
        life = PeerLife(Peer(*about, restart), entrance.stop)
    chronicle.peer = life.peer
    closing.callback(life.peer.close)
    return Leading(life, chronicle)
