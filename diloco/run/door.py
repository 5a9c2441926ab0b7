"""The door into a run: `found` and `join` for somebody's own loop, and `open_run` for every program.

    with diloco.join("10.0.0.5:4000", model) as run:
        for inputs, targets in batches:
            train_step(model, optimizer, inputs, targets)
            run.step(tokens=inputs.numel())  # every H-th call ends a round: the model has moved to the new anchor

The model is any `torch.nn.Module` and stays yours: its trainable parameters are read and written in place. It may be
DistributedDataParallel, or sharded by `fully_shard`: then every rank makes the same calls. A contract for such a run
says `model.kind = "external"`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diloco.base.errors import ConfigError, DilocoError, ResourceError, UsageError
from diloco.base.life import Life
from diloco.config.contract import Contract
from diloco.config.load import contract_from_json, contract_of, load_contract, load_site, remember
from diloco.config.site import Site
from diloco.gossip.peer import GossipLife, GossipPeer
from diloco.inner.loop import random_states, restore_random_states
from diloco.inner.meter import Phases, Usage, device_name, memory_of
from diloco.island import Island
from diloco.island.bridge import Bridge
from diloco.island.slices import Pieces, Slices, device_of_share, held, unwrapped
from diloco.models import count_parameters
from diloco.observe.event_log import Events
from diloco.observe.events import RankMemory, Stamped
from diloco.outer.fragments import Weights, named_parameters
from diloco.peer.life import AgreedLife
from diloco.peer.peer import Peer
from diloco.peer.rank import PeerRank, Trains
from diloco.peer.terms import lanes_of
from diloco.run.blocking import block
from diloco.run.chronicle import Chronicle, Leased
from diloco.run.past import Past, past_of, peer_name
from diloco.run.run import Leading, Run
from diloco.storage.checkpoint import Checkpoint, read_together
from diloco.storage.saving import Contents
from diloco.storage.stateful import Stateful, UserState
from diloco.transport.endpoint import Endpoint, listening

STATE = "state"
"""Group of a checkpoint that holds these objects."""


class RandomStates:
    """The global random states of this process: what dropout and shuffling draw from."""

    def state_dict(self) -> dict[str, Any]:
        """Of Python, NumPy and torch (CPU and the current GPU)."""
        return random_states()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put them back."""
        restore_random_states(state_dict)


class OwnLoop:
    """What a run asks of a loop that is not ours (`diloco.peer.rank.Trains`)."""

    def __init__(self, model: nn.Module, island: Island, state: Mapping[str, Stateful]) -> None:
        """`state`: objects to save and restore. Raises UsageError for one that cannot be."""
        bare = unwrapped(model)
        self.island = island
        self.parameters = named_parameters(bare)
        self.weights = Bridge(self.parameters, island) if island.size > 1 else Weights(self.parameters)
        self._count = count_parameters(bare)
        self._state = UserState({"random": RandomStates(), **state}, self.parameters, island.rank)
        self.usage = Usage(None, None, island.size, Phases(island.device))

    @staticmethod
    def device_of(model: nn.Module) -> torch.device:
        """Where the parameters are; of those that lie on several devices, that of the first."""
        first = next(iter(model.parameters()), None)
        return torch.device("cpu") if first is None else device_of_share(first)

    def live(self, *, local: bool) -> Slices:
        """The objects' state, and the weights if they are wanted."""
        live = {STATE: self._state.slices()}
        weights = [held(name, parameter.detach()) for name, parameter in self.parameters.items()]
        return {**live, "local": weights} if local else live

    def kept(self) -> Contents:
        """Nothing that stands still."""
        return {}, {}

    def restore(self, opened: Callable[[], Checkpoint]) -> None:
        """Objects and weights of a checkpoint. Raises StateError on all ranks when one cannot."""
        read_together(self.island, lambda: self._take(opened()))

    def _take(self, checkpoint: Checkpoint) -> None:
        weights = checkpoint.groups.get("local", Pieces(()))
        for name, parameter in self.parameters.items() if weights else ():
            weights.read(held(name, parameter.detach()))
        self._state.load(checkpoint.groups.get(STATE, Pieces(())))

    def evaluate(self) -> float | None:
        """A loop that is not ours does that by itself."""
        return None

    def facts(self) -> dict[str, Any]:
        """Fields of `Started`."""
        return {
            "parameters": self._count,
            "ranks": self.island.size,
            "device": device_name(self.island.device),
        }

    def version_fields(self) -> dict[str, Any]:
        """No more than a run knows by itself."""
        return {}

    def used(self) -> dict[str, Any]:
        """Fields of `HardwareUsed`, since it was asked last."""
        memories = self.island.gather(json.dumps(memory_of(self.island.device)))
        return {**self.usage.fields(), "memory": tuple(RankMemory(*json.loads(one)) for one in memories)}


@dataclass(frozen=True)
class Entrance:
    """What rank 0 knows when it enters a run: found, joined or resumed."""

    contract: Contract
    endpoint: Endpoint
    name: str
    directory: Path | None
    checkpoint: Checkpoint | None = None
    listeners: Sequence[Callable[[Stamped], None]] = ()
    stop: Callable[[], bool] = lambda: False
    """Whether this peer is asked to leave."""


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
    (peers/*.toml), a `Site`, or the defaults. `directory`: the folder of this peer, with its ledger, events and
    checkpoints. `resume`: go on from that folder: join whoever is left of the run, found it anew from the last
    checkpoint where nobody is, and begin where there is nothing to resume. `state`: objects with `state_dict` and
    `load_state_dict` (scheduler, scaler, loader) that checkpoints hold; `optimizer` is short for one of them.

    Raises DilocoError: the contract is wrong, a port is in use, an object cannot be saved, ...
    """
    agreed = _contract(contract)
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


def _contract(given: str | Path | Mapping[str, Any] | Contract) -> Contract:
    if isinstance(given, Contract):
        return given
    if isinstance(given, Mapping):
        return contract_of(given)
    return load_contract(given).value


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
    island = Island.beside(OwnLoop.device_of(model), local.timeouts.collective_s)
    loop = OwnLoop(model, island, objects)

    def enter() -> Entrance:
        return _enter(agreed, address, local, folder, lanes_of(local, island), resume)

    return block(open_run(enter, local, island, lambda contract: Parts(loop.weights, loop)))


def _enter(
    agreed: Contract | None, address: str | None, site: Site, folder: Path | None, lanes: int, resume: bool
) -> Entrance:
    past = past_of(folder) if resume and folder is not None else None
    if past is not None and agreed is not None and past.contract_digest != agreed.digest:
        cause = f"{past.folder} is of contract {past.contract_digest[:12]}, the one given is {agreed.digest[:12]}"
        raise ConfigError(cause, "resume with the contract of that folder, or choose another")
    checkpoint = past.checkpoint() if past is not None else None
    endpoint = Endpoint(listening(site, address), lanes)
    try:
        contract = agreed
        if address is not None:
            tickets = [address, *(past.tickets if past is not None else ())]
            contract = endpoint.fetch_contract(",".join(tickets))
        elif past is not None:
            contract = asked_members(past, endpoint) or agreed
        if contract is None:
            assert checkpoint is not None
            contract = checkpoint.contract
        if checkpoint is not None and checkpoint.contract.digest != contract.digest:
            checkpoint = None
        if folder is not None:
            make_folder(folder, site)
        return Entrance(contract, endpoint, peer_name(site, checkpoint), folder, checkpoint)
    except BaseException:
        endpoint.close()
        raise


def asked_members(past: Past, endpoint: Endpoint) -> Contract | None:
    """The contract of a member of the life before that answers now: the run goes on, and is joined. None: nobody does,
    and it is founded anew."""
    answering = [ticket for ticket in past.tickets if endpoint.runtime.answer_of(ticket.partition("/")[0]) is not None]
    for ticket in answering:
        try:
            return endpoint.fetch_contract(ticket)
        except DilocoError:
            endpoint.welcome = None  # another run is there by now
    return None


def make_folder(directory: Path, site: Site) -> None:
    """A peer's folder, which remembers where its data is. Raises ResourceError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        remember(directory, site)
    except OSError as error:
        cause = f"cannot write to {directory}: {error.strerror}"
        raise ResourceError(cause, "choose another folder (--dir)") from error


@dataclass(frozen=True)
class Parts:
    """What the ranks hold of the model, and who trains it."""

    weights: Weights
    trains: Trains
    data: str = ""
    """Fingerprint of the data, where leases say who trains on which block of it."""
    reader: Callable[[PeerRank, Entrance], Leased] | None = None
    """Makes the reader of leased data, on rank 0."""


def open_run(
    enter: Callable[[], Entrance], site: Site, island: Island, build: Callable[[Contract], Parts]
) -> Life[Run]:
    """Enter a run; all ranks of an island together. Ends once this peer listens and has a state.

    `enter`: on rank 0. `build`: on every rank, with the contract. What rank 0 raises before the ranks meet, the others
    raise as ResourceError.
    """
    entrance = _together(enter, island)
    common = json.loads(island.share(_common(entrance) if entrance is not None else ""))
    contract = contract_from_json(common["contract"])
    closing: list[Callable[[], None]] = [entrance.endpoint.close] if entrance is not None else []
    try:
        parts = build(contract)
        rank = PeerRank(contract, site, island, parts.weights, parts.trains)
        closing.append(rank.close)
        leading = _leading(entrance, rank, parts, closing) if entrance is not None else None
        folder = Path(common["directory"]) if common["directory"] else None
        run = Run(rank, common["name"], folder, common["steps"], leading)
        yield from run.begin()
    except BaseException:
        for close in reversed(closing):
            close()
        raise
    return run


def _together(enter: Callable[[], Entrance], island: Island) -> Entrance | None:
    """What rank 0 makes, or why it cannot, which all ranks learn."""
    if not island.leads:
        why = island.share()
        if why:
            raise ResourceError(f"rank 0 of this island failed: {why}", "its output says why")
        return None
    try:
        entrance = enter()
    except BaseException as error:
        island.share(str(error) or type(error).__name__)
        raise
    island.share("")
    return entrance


def _common(entrance: Entrance) -> str:
    """What the other ranks are to know."""
    steps = entrance.checkpoint.meta.get("run_steps", 0) if entrance.checkpoint is not None else 0
    folder = str(entrance.directory.resolve()) if entrance.directory is not None else ""
    about = {"contract": entrance.contract.to_json(), "name": entrance.name, "steps": int(steps), "directory": folder}
    return json.dumps(about)


def _leading(entrance: Entrance, rank: PeerRank, parts: Parts, closing: list[Callable[[], None]]) -> Leading:
    """The peer and its life, on rank 0."""
    folder, name = entrance.directory, entrance.name
    events = Events(folder / "events.jsonl" if folder is not None else None, name, entrance.listeners)
    closing.append(events.close)
    reader = parts.reader(rank, entrance) if parts.reader is not None else None
    chronicle = Chronicle(rank, events.emit, reader)
    about = (name, rank, entrance.endpoint, events, chronicle, entrance.checkpoint, parts.data, folder)
    peer: Peer | GossipPeer
    life: AgreedLife | GossipLife
    if rank.contract.membership.policy == "gossip":
        peer = GossipPeer(*about)
        life = GossipLife(peer, entrance.stop)
    else:
        peer = Peer(*about)
        life = AgreedLife(peer, entrance.stop)
        chronicle.attempts = lambda: peer.exchange.machine.attempts
    chronicle.peer = peer

    def close() -> None:
        entrance.endpoint.close()
        events.close()

    closing.append(peer.close)
    return Leading(life, peer, chronicle, close)
