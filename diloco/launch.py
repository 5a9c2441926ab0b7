"""From the options of `diloco peer` to a running trainer: files read and checked before anything starts."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco.checkpoint import Checkpoint, load
from diloco.config import Contract, Site, contract_from_json, load_contract, load_site
from diloco.errors import ConfigError, ResourceError, UsageError
from diloco.gossip_trainer import GossipTrainer
from diloco.island import Island
from diloco.peer import Gate
from diloco.telemetry import Event, Events
from diloco.trainer import Ending, Trainer, device_of


@dataclass(frozen=True)
class PeerOptions:
    """What the command line says."""

    contract: Path | None
    join: str | None
    site: Path | None
    resume: Path | None
    contract_overrides: Sequence[str] = ()
    site_overrides: Sequence[str] = ()
    insecure: bool = False
    name: str | None = None
    directory: Path | None = None


def run_peer(options: PeerOptions, stop: Callable[[], bool], listener: Callable[[Event], None]) -> Ending:
    """Live the life of a peer. Raises DilocoError; everything that can be wrong beforehand is found beforehand."""
    _check(options)
    site = open_site(options)
    contract = load_contract(options.contract, options.contract_overrides).value if options.contract else None
    checkpoint = load(_checkpoints(options.resume)) if options.resume else None
    island = Island.here(device_of(site))
    gate = Gate(site) if island.leads else None
    try:
        contract = _contract(options, island, gate, contract, checkpoint)
        name = peer_name(site, checkpoint)
        directory = open_directory(options, site, contract, name, checkpoint, island.leads)
        events = Events(directory / "events.jsonl" if island.leads else None, name, [event_card(directory), listener])
        kind = GossipTrainer if contract.membership.policy == "gossip" else Trainer
        return kind(name, contract, site, island, gate, events, directory, stop, checkpoint).run()
    finally:
        if gate is not None:
            gate.close()


def _check(options: PeerOptions) -> None:
    if options.contract and options.join:
        raise UsageError("a contract and --join do not go together", "the contract travels: leave it out to join")
    if not (options.contract or options.join or options.resume):
        raise UsageError("nothing to do", "give a contract to found a run, or --join HOST:PORT, or --resume FOLDER")
    if options.contract_overrides and not options.contract:
        raise UsageError("--set changes a contract only when founding", "a joiner takes the contract as it is")
    if options.contract and options.resume:
        raise UsageError("a contract and --resume do not go together", "the checkpoint holds its contract")


def open_site(options: PeerOptions) -> Site:
    """The site file with what the command line says on top."""
    overrides = list(options.site_overrides)
    if options.insecure:
        overrides.append("network.insecure=true")
    if options.name:
        overrides.append(f"peer.name={json.dumps(options.name)}")
    return load_site(options.site, overrides).value


def _checkpoints(path: Path) -> Path:
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def _contract(
    options: PeerOptions, island: Island, gate: Gate | None, given: Contract | None, checkpoint: Checkpoint | None
) -> Contract:
    """The same on every rank: rank 0 knows it from the file, the checkpoint, or the member it joins."""
    text = ""
    if gate is not None and options.join:
        text = gate.knock(options.join).to_json()
    elif given is not None:
        text = given.to_json()
    elif checkpoint is not None:
        text = checkpoint.value("contract", str)
    contract = contract_from_json(island.share(text))
    kept = contract_from_json(checkpoint.value("contract", str)) if checkpoint else contract
    if kept.digest != contract.digest:
        cause = f"the checkpoint belongs to contract {kept.digest[:12]}, the run to join trains {contract.digest[:12]}"
        raise ConfigError(cause, "join without --resume")
    return contract


def peer_name(site: Site, checkpoint: Checkpoint | None) -> str:
    """A peer that comes back keeps its name."""
    if checkpoint is not None:
        return checkpoint.value("peer", str)
    return site.peer.name or f"{socket.gethostname()[:40]}-{secrets.token_hex(2)}"


def open_directory(
    options: PeerOptions,
    site: Site,
    contract: Contract,
    name: str,
    checkpoint: Checkpoint | None = None,
    leads: bool = True,
) -> Path:
    """Where this peer writes. A checkpoint's peer goes on in its old folder; whoever `leads` its island makes it."""
    if options.directory is not None:
        directory = options.directory
    elif site.storage.directory is not None:
        directory = Path(site.storage.directory)
    elif checkpoint is not None and checkpoint.path.parent.name == "checkpoints":
        directory = checkpoint.path.parent.parent
    else:
        directory = Path("runs") / contract.run.name / name
    if leads:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResourceError(f"cannot write to {directory}: {error.strerror}", "choose another --dir") from error
    return directory


def event_card(directory: Path) -> Callable[[Event], None]:
    """Keeps `peer.json` beside the events: where this peer listens, for programs that started it."""

    def listen(event: Event) -> None:
        if event["kind"] == "listening":
            card = {"pid": os.getpid(), "address": event["address"], "ticket": event["ticket"]}
            beside = directory / f".peer.json.{os.getpid()}"
            beside.write_text(json.dumps(card))
            beside.replace(directory / "peer.json")

    return listen
