"""From the options of `diloco peer` to a running trainer: everything wrong is found before it starts."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from diloco.accounts.ledger import LEDGER, left_off, read_ledger
from diloco.base.errors import ConfigError, ResourceError, StateError, UsageError
from diloco.config.contract import Contract
from diloco.config.load import contract_from_json
from diloco.config.remembered import remember
from diloco.config.site import Site
from diloco.island import Island, given_ranks
from diloco.island.elastic import end_with_launcher, of_this_launch, restarted, run_ranks
from diloco.island.mesh import check, sizes_of
from diloco.observe.event_log import Events
from diloco.observe.events import Listening, Remark, Stamped
from diloco.peer.terms import lanes_of
from diloco.run.follower import follow
from diloco.run.gossip_trainer import GossipTrainer
from diloco.run.options import CARD, PeerOptions, checked
from diloco.run.trainer import Ending, Trainer, device_of
from diloco.storage.checkpoint import Checkpoint, latest, load
from diloco.transport.gate import Gate, listening

logger = logging.getLogger(__name__)

RUNS = Path("runs")
"""Where peers write that were told no folder, as RUN/PEER."""


def run_peer(options: PeerOptions, stop: Callable[[], bool], listener: Callable[[Stamped], None]) -> Ending | None:
    """Live the life of a peer; None on the ranks of an island that only follow.

    Raises DilocoError; everything that can be wrong beforehand is found beforehand.
    """
    end_with_launcher()
    site, given = checked(options)
    site = listening(site, options.join)
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
    listener: Callable[[Stamped], None],
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
        agreed = knock(options.join, gate, listener, stop) if options.join else given
        contract = _contract(agreed, checkpoint)
        name = peer_name(site, checkpoint)
        if options.name and options.name != name:
            fix = "leave --name out: a peer that comes back keeps its name"
            raise UsageError(f"the checkpoint is one of {name}, and --name says {options.name}", fix)
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
    site, given = checked(options)
    ranks = site.device.ranks
    if ranks == 1 or given_ranks() is not None:
        return None
    sizes = sizes_of(site.mesh, ranks)
    if given is not None:
        check(sizes, site, given, ranks)
    named = () if options.resume else ("--name", peer_name(site, None))  # the same whenever they are started again
    return run_ranks(ranks, [*arguments, *named], site.timeouts.leave_s)


def come_back(options: PeerOptions, site: Site, given: Contract | None) -> PeerOptions:
    """An island that lost a rank goes on from its last checkpoint, if it has one, with the members of its last version.

    It joins them also where it founded the run, or a lineage: to found it anew would fork it. Where it was alone it
    does what it did at first, or goes on from its checkpoint. So it does where it died before it wrote anything: who
    wrote there before was of another life of that name, perhaps in another run. Raises StateError for a damaged
    checkpoint.
    """
    tickets = options.join.split(",") if options.join else [""]
    expected = (given.digest,) if given is not None else tuple(ticket.strip().partition("/")[2] for ticket in tickets)
    found = [past for folder in _folders(options, site, given) if (past := _past(folder)) is not None]
    ours = [past for past in found if past.contract_digest.startswith(expected) and of_this_launch(past.began_us)]
    if not ours:
        return options
    past = max(ours, key=lambda one: one.written_s)  # a ticket need not say which run it is of
    members = [f"{address}/{past.contract_digest[:12]}" for address in past.others]
    join = ",".join([*([options.join] if options.join else []), *members]) or None
    checkpoint = _checkpoint_of(past)
    if checkpoint is not None and not join:
        left = checkpoint.version > past.version if options.resume else not of_this_launch(_saved_us(checkpoint))
        checkpoint = None if left else checkpoint  # of the history that was left for an older one, or for a new run
    resume = past.folder if checkpoint is not None else options.resume  # which holds our name, too
    if not (join or resume):
        return options
    return replace(options, contract=None, contract_overrides=(), resume=resume, join=join)


@dataclass(frozen=True)
class _Past:
    """What a folder tells of the life before."""

    folder: Path
    began_us: int
    written_s: float
    contract_digest: str
    version: int
    others: tuple[str, ...]
    """Where they listen."""


def _past(folder: Path) -> _Past | None:
    """From the ledger, which is newer than any checkpoint; from a checkpoint where there is none, as under gossip.

    None when nobody lived there. Raises StateError for a damaged checkpoint; a ledger's damage is told by its writer.
    """
    ledger, saved = folder / LEDGER, latest(folder / "checkpoints")
    try:
        left = left_off(read_ledger(ledger).records) if ledger.is_file() else None
    except (StateError, ValueError):
        left = None
    if left is not None:
        others = tuple(member.address for member in left.others)
        return _Past(folder, left.began_us, ledger.stat().st_mtime, left.contract_digest, left.version, others)
    if saved is None:
        return None
    checkpoint = load(saved.parent)
    name, commit = checkpoint.value("peer", str), checkpoint.commit
    view = commit.view if commit is not None else ()
    met = checkpoint.meta.get("others")  # under gossip, where there is no view
    known = [address for address in met if isinstance(address, str)] if isinstance(met, list) else []
    others = (*(member.address for member in view if member.peer != name), *known)
    saved_us = _saved_us(checkpoint)
    return _Past(folder, saved_us, saved_us / 1e6, checkpoint.contract.digest, checkpoint.version, others)


def _saved_us(checkpoint: Checkpoint) -> int:
    """When, as `new_incarnation` counts."""
    return int(1e6 * checkpoint.path.stat().st_mtime)


def _checkpoint_of(past: _Past) -> Checkpoint | None:
    """The newest of its run. Raises StateError when none is valid."""
    saved = latest(past.folder / "checkpoints")
    checkpoint = load(saved.parent) if saved is not None else None
    return checkpoint if checkpoint is not None and checkpoint.contract.digest == past.contract_digest else None


def _folders(options: PeerOptions, site: Site, given: Contract | None) -> list[Path]:
    """Where `open_directory` may have put the life before: the run that a joiner joins, only members can name."""
    resumed = _checkpoints(options.resume) if options.resume else None
    chosen = _chosen_directory(options, site, resumed)
    if chosen is not None:
        return [chosen]
    checkpoint = load(resumed) if resumed is not None else None
    contract = checkpoint.contract if checkpoint is not None else given
    name = checkpoint.value("peer", str) if checkpoint is not None else site.peer.name
    if name is None:
        return []  # it has another at every start
    return [RUNS / contract.run.name / name] if contract is not None else sorted(RUNS.glob(f"*/{name}"))


def _checkpoints(path: Path) -> Path:
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def knock(tickets: str, gate: Gate, listener: Callable[[Stamped], None], stop: Callable[[], bool]) -> Contract:
    """`Gate.knock`, and a word to whoever watches when nobody answers at once."""
    events = Events(None, gate.site.peer.name or "", [listener])  # our own file is in a folder that the run names
    return gate.knock(tickets, lambda text: events.emit(Remark(text)), lambda: not stop())


def _contract(agreed: Contract | None, checkpoint: Checkpoint | None) -> Contract:
    """`agreed`, from the file or the member it joins; else that of the checkpoint."""
    if agreed is None:
        assert checkpoint is not None
        contract = checkpoint.contract
    else:
        contract = agreed
    kept = checkpoint.contract if checkpoint else contract
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
    chosen = _chosen_directory(options, site, checkpoint.path if checkpoint is not None else None)
    directory = chosen or RUNS / contract.run.name / name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        remember(directory, site)
    except OSError as error:
        raise ResourceError(f"cannot write to {directory}: {error.strerror}", "choose another --dir") from error
    return directory


def _chosen_directory(options: PeerOptions, site: Site, saved: Path | None) -> Path | None:
    """The folder that was asked for, or that of the peer whose checkpoints are, or one of them is, at `saved`."""
    if options.directory is not None:
        return options.directory
    if site.storage.directory is not None:
        return Path(site.storage.directory)
    places = (saved, saved.parent) if saved is not None else ()
    return next((place.parent for place in places if place.name == "checkpoints"), None)


def event_card(directory: Path) -> Callable[[Stamped], None]:
    """Keeps `peer.json` beside the events: where this peer listens, for programs that started it."""

    def listen(stamped: Stamped) -> None:
        event = stamped.event
        if isinstance(event, Listening):
            card = {"pid": os.getpid(), "address": event.address, "ticket": event.ticket}
            beside = directory / f".peer.json.{os.getpid()}"
            try:
                beside.write_text(json.dumps(card))
                beside.replace(directory / CARD)
            except OSError as error:  # a full disk ends no training
                logger.warning("no %s: %s", directory / CARD, error.strerror)

    return listen
