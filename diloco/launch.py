"""From the options of `diloco peer` to a running trainer: files read and checked before anything starts."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from diloco.checkpoint import Checkpoint, latest, load
from diloco.config import Contract, Site, contract_from_json, load_contract, load_site
from diloco.errors import ConfigError, ResourceError, UsageError
from diloco.follower import follow
from diloco.gossip_trainer import GossipTrainer
from diloco.island import Island, given_ranks
from diloco.island.elastic import end_with_launcher, restarted, run_ranks
from diloco.island.mesh import check, sizes_of
from diloco.peer import Gate, lanes_of
from diloco.telemetry import Event, Events
from diloco.trainer import Ending, Trainer, device_of
from diloco.types import Commit


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
    given = _given(options)
    island = Island.here(device_of(site), site.timeouts.collective_s)
    with island.watched():
        if island.leads:
            return _lead(options, stop, listener, site, given, island)
        follow(contract_from_json(island.share()), site, island)
        island.close()
        return None


def _lead(
    options: PeerOptions,
    stop: Callable[[], bool],
    listener: Callable[[Event], None],
    site: Site,
    given: Contract | None,
    island: Island,
) -> Ending:
    """The life of rank 0, or of the only one."""
    if restarted():
        options = come_back(options, site, given)
    checkpoint = load(_checkpoints(options.resume)) if options.resume else None
    gate = Gate(site, lanes_of(site, island))
    try:
        contract = _contract(options, gate, given, checkpoint)
        name = peer_name(site, checkpoint)
        directory = open_directory(options, site, contract, name, checkpoint)
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
    given = _given(options)
    if given is not None:
        check(sizes, site, given, ranks)
    named = () if options.resume else ("--name", peer_name(site, None))  # the same whenever they are started again
    return run_ranks(ranks, [*arguments, *named], site.timeouts.leave_s)


def _given(options: PeerOptions) -> Contract | None:
    """The contract to found a run with."""
    return load_contract(options.contract, options.contract_overrides).value if options.contract else None


def come_back(options: PeerOptions, site: Site, given: Contract | None) -> PeerOptions:
    """An island that lost a rank goes on from its last checkpoint, if it has one, with the members that this names.

    It joins them also where it founded the run: to found it anew would fork it.
    """
    folder = options.directory or site.storage.directory or next(Path("runs").glob(f"*/{site.peer.name}"), None)
    if folder is None or latest(Path(folder) / "checkpoints") is None:
        return options
    checkpoint = load(Path(folder) / "checkpoints")
    contract, text = contract_from_json(checkpoint.value("contract", str)), checkpoint.meta.get("commit")
    if given is not None and given.digest != contract.digest:
        return options
    view = Commit.from_bytes(text.encode()).view if isinstance(text, str) else ()
    name = checkpoint.value("peer", str)
    members = [f"{member.address}/{contract.digest[:12]}" for member in view if member.peer != name]
    doors = [*([options.join] if options.join else []), *members]
    return replace(options, contract=None, contract_overrides=(), resume=Path(folder), join=",".join(doors) or None)


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
