"""From the options of `diloco peer` to a running trainer: files read and checked before anything starts."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco.checkpoint import Checkpoint, latest, load
from diloco.config import Contract, Site, contract_from_json, load_contract, load_site
from diloco.errors import ConfigError, ResourceError, UsageError
from diloco.gossip_trainer import GossipTrainer
from diloco.island import Island, given_ranks
from diloco.island.elastic import end_with_launcher, restarted, run_ranks
from diloco.island.mesh import check, sizes_of
from diloco.peer import Gate
from diloco.telemetry import Event, Events
from diloco.trainer import Ending, Trainer, device_of
from diloco.types import Commit
from diloco.workbench import Bench


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


def run_peer(options: PeerOptions, stop: Callable[[], bool], listener: Callable[[Event], None]) -> Ending | None:
    """Live the life of a peer; None on the ranks of an island that only follow.

    Raises DilocoError; everything that can be wrong beforehand is found beforehand.
    """
    end_with_launcher()
    _check(options)
    site = open_site(options)
    given = load_contract(options.contract, options.contract_overrides).value if options.contract else None
    island = Island.here(device_of(site))
    if not island.leads:
        Bench.follow(contract_from_json(island.share()), site, island)
        island.close()
        return None
    checkpoint = load(_checkpoints(options.resume)) if options.resume else None
    gate = Gate(site)
    try:
        contract = _contract(options, gate, given, checkpoint)
        name = peer_name(site, checkpoint)
        directory = open_directory(options, site, contract, name, checkpoint)
        if restarted():
            checkpoint = _come_back(gate, contract, name, directory) or checkpoint
        island.share(contract.to_json())
        events = Events(directory / "events.jsonl", name, [event_card(directory), listener])
        kind = GossipTrainer if contract.membership.policy == "gossip" else Trainer
        return kind(name, contract, site, island, gate, events, directory, stop, checkpoint).run()
    finally:
        gate.close()


def start_ranks(options: PeerOptions, arguments: Sequence[str]) -> int | None:
    """Start the ranks of an island that the site asks for, each with these arguments. Returns their exit code.

    None: there is nothing to start, this process is the peer or a rank of one. Raises DilocoError for what can be
    wrong beforehand.
    """
    _check(options)
    site = open_site(options)
    ranks = site.device.ranks
    if ranks == 1 or given_ranks() is not None:
        return None
    sizes = sizes_of(site.mesh, ranks)
    if options.contract:
        check(sizes, site, load_contract(options.contract, options.contract_overrides).value, ranks)
    named = () if options.resume else ("--name", peer_name(site, None))  # the same whenever they are started again
    return run_ranks(ranks, [*arguments, *named], site.timeouts.leave_s)


def _come_back(gate: Gate, contract: Contract, name: str, directory: Path) -> Checkpoint | None:
    """An island that lost a rank goes on from its last checkpoint, and with the members that this names.

    Raises UnreachableError when none of them answers: to found the run anew would fork it.
    """
    if latest(directory / "checkpoints") is None:
        return None
    checkpoint = load(directory / "checkpoints")
    if contract_from_json(checkpoint.value("contract", str)).digest != contract.digest:
        return None
    text = checkpoint.meta.get("commit")
    view = Commit.from_bytes(text.encode()).view if isinstance(text, str) else ()
    others = [f"{member.address}/{contract.digest[:12]}" for member in view if member.peer != name]
    if gate.welcome is None and others:
        gate.knock(",".join(others))
    return checkpoint


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


def _contract(options: PeerOptions, gate: Gate, given: Contract | None, checkpoint: Checkpoint | None) -> Contract:
    """From the file, the checkpoint, or the member it joins."""
    if options.join:
        contract = gate.knock(options.join)
    elif given is not None:
        contract = given
    else:
        assert checkpoint is not None
        contract = contract_from_json(checkpoint.value("contract", str))
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
) -> Path:
    """Where this peer writes. A checkpoint's peer goes on in its old folder."""
    if options.directory is not None:
        directory = options.directory
    elif site.storage.directory is not None:
        directory = Path(site.storage.directory)
    elif checkpoint is not None and checkpoint.path.parent.name == "checkpoints":
        directory = checkpoint.path.parent.parent
    else:
        directory = Path("runs") / contract.run.name / name
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
