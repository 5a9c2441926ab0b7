"""From the options of `diloco peer` to a running trainer: everything wrong is found before it starts."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from diloco.base.errors import ConfigError, UsageError
from diloco.base.files import replacing_file
from diloco.config.contract import Contract
from diloco.config.site import Site
from diloco.island import Island, given_ranks
from diloco.island.elastic import end_with_launcher, of_this_launch, restarted, run_ranks
from diloco.island.mesh import check, sizes_of
from diloco.observe.event_log import Events
from diloco.observe.events import Listening, Remark, Stamped
from diloco.peer.life import Ending
from diloco.peer.terms import lanes_of
from diloco.plan.model import check_size
from diloco.run.blocking import block
from diloco.run.door import Entrance, asked_members, fetched, make_folder
from diloco.run.options import CARD, PeerOptions, checked, remembered_private
from diloco.run.past import checkpoint_at, checkpoints_in, past_of, peer_name
from diloco.run.trainer import Trainer, device_of
from diloco.storage.checkpoint import CHECKPOINTS, load
from diloco.transport.endpoint import Endpoint, listening

logger = logging.getLogger(__name__)

RUNS = Path("runs")
"""Folder for peers whose options name none; a peer writes to RUN/PEER in it."""


def run_peer(options: PeerOptions, stop: Callable[[], bool], listener: Callable[[Stamped], None]) -> Ending | None:
    """Launch `diloco peer` on this rank and run it to its end; None on other ranks of an island than the first.

    Raises DilocoError; everything that can be wrong beforehand is found beforehand.
    """
    end_with_launcher()
    site, given = checked(options)
    site = listening(site, options.join)
    island = Island.here(device_of(site), site.timeouts.collective_s)
    with island.watched():
        trainer = Trainer(lambda: _enter(options, stop, listener, site, given, island), site, island)
        block(trainer.open())
        ending = block(trainer.live())
        island.close()
        return ending


def _enter(
    options: PeerOptions,
    stop: Callable[[], bool],
    listener: Callable[[Stamped], None],
    site: Site,
    given: Contract | None,
    island: Island,
) -> Entrance:
    """Rank 0's entrance into the run of `diloco peer`: found, join or resume."""
    if restarted():
        options = come_back(options, site, given)
    checkpoint = checkpoint_at(options.resume) if options.resume else None
    chosen = chosen_directory(options, site, checkpoint.path if checkpoint is not None else None)
    # The life before is in the folder to resume, or in one that is given a second time with the same contract.
    past = past_of(chosen) if chosen is not None and not options.join else None
    expected = checkpoint.contract if checkpoint is not None else given
    if past is not None and (expected is None or past.contract_digest != expected.digest):
        past = None
    if checkpoint is None and past is not None:
        checkpoint = past.checkpoint()
    kept = checkpoint.contract if checkpoint is not None else None
    named = options.resume is not None and checkpoint is not None and checkpoint.path.samefile(options.resume)
    goes_on = past is not None or restarted()
    private = goes_on and chosen is not None and remembered_private(chosen)
    endpoint = Endpoint(site, lanes_of(site, island), joins=options.join is not None, private=private)
    try:
        if options.join:
            fetch = partial(fetch_contract, options.join, endpoint, listener, stop)
            contract = fetched(options.join, fetch, checkpoint, chosen) or kept
        else:
            contract = (asked_members(past, endpoint, named) if past is not None else None) or given or kept
        assert contract is not None  # `checked` has refused options without one
        if kept is not None and kept.digest != contract.digest:
            saved, joined = kept.digest[:12], contract.digest[:12]
            cause = f"the checkpoint belongs to contract {saved}, the run to join trains {joined}"
            raise ConfigError(cause, "join without --resume")
        check_size(contract, 0, site.device.max_params)
        name = peer_name(site, checkpoint)
        if options.name and options.name != name:
            fix = "leave --name out: a peer that comes back keeps its name"
            raise UsageError(f"the checkpoint is one of {name}, and --name says {options.name}", fix)
        directory = open_directory(chosen, site, contract, name, endpoint.private)
        listeners = [event_card(directory), listener]
        joins = options.join is not None and not restarted()
        return Entrance(contract, endpoint, name, directory, checkpoint, listeners, stop, named, joins)
    except BaseException:
        endpoint.close()
        raise


def start_ranks(options: PeerOptions, arguments: Sequence[str]) -> int | None:
    """Launch `diloco peer` on each rank of the site's island, with these arguments. Returns their exit code.

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
    """Options to launch an island once more that lost a rank: it goes on from its last checkpoint, if it has one, with
    the members of its last version.

    It joins them also where it founded the run, or a lineage: to found it anew would fork it. Where it was alone it
    does what it did at first, or goes on from its checkpoint. So it does where it died before it wrote anything: who
    wrote there before was of another life of that name, perhaps in another run. Raises StateError for a damaged
    checkpoint.
    """
    tickets = options.join.split(",") if options.join else [""]
    expected = (given.digest,) if given is not None else tuple(ticket.strip().partition("/")[2] for ticket in tickets)
    # Folders where `open_directory` may have put the life before: only members can name the run that a joiner joins.
    resumed = checkpoints_in(options.resume) if options.resume else None
    chosen = chosen_directory(options, site, resumed)
    folders = [chosen] if chosen is not None else []
    if chosen is None:
        saved = load(resumed) if resumed is not None else None
        contract = saved.contract if saved is not None else given
        name = saved.peer if saved is not None else site.peer.name
        if name is not None:  # else it has another at every start
            folders = [RUNS / contract.run.name / name] if contract is not None else sorted(RUNS.glob(f"*/{name}"))
    found = [past for folder in folders if (past := past_of(folder)) is not None]
    ours = [past for past in found if past.contract_digest.startswith(expected) and of_this_launch(past.began_us)]
    if not ours:
        return options
    past = max(ours, key=lambda one: one.written_s)  # a ticket need not say which run it is of
    join = ",".join([*([options.join] if options.join else []), *past.tickets]) or None
    checkpoint = past.checkpoint()
    resume = past.folder if checkpoint is not None else options.resume  # which holds our name, too
    if not (join or resume):
        return options
    return replace(options, contract=None, contract_overrides=(), resume=resume, join=join)


def fetch_contract(
    tickets: str, endpoint: Endpoint, listener: Callable[[Stamped], None], stop: Callable[[], bool]
) -> Contract:
    """The contract of the member that a launched peer is to join, with a remark when nobody answers at once."""
    events = Events(None, endpoint.site.peer.name or "", [listener])  # our own file is in a folder that the run names
    return endpoint.fetch_contract(tickets, lambda text: events.emit(Remark(text)), lambda: not stop())


def open_directory(chosen: Path | None, site: Site, contract: Contract, name: str, private: bool) -> Path:
    """The folder of a launched peer, made if need be: the one that was `chosen`, or RUN/PEER. `private`: the run has a
    secret."""
    return make_folder(chosen or RUNS / contract.run.name / name, site, private)


def chosen_directory(options: PeerOptions, site: Site, saved: Path | None = None) -> Path | None:
    """The folder for a launched peer that options or site name, or that of the peer whose checkpoints are, or one of
    them is, at `saved`: a peer that resumes goes on in its old folder."""
    if options.directory is not None:
        return options.directory
    if site.storage.directory is not None:
        return Path(site.storage.directory)
    places = (saved, saved.parent) if saved is not None else ()
    return next((place.parent for place in places if place.name == CHECKPOINTS), None)


def event_card(directory: Path) -> Callable[[Stamped], None]:
    """A listener that keeps `peer.json` in a launched peer's folder: its address, for programs that started it."""

    def listen(stamped: Stamped) -> None:
        if isinstance(event := stamped.event, Listening):
            card = {"pid": os.getpid(), "address": event.address, "ticket": event.ticket}
            try:
                with replacing_file(directory / CARD) as file:
                    file.write(json.dumps(card).encode())
            except OSError as error:  # a full disk ends no training
                logger.warning("no %s: %s", directory / CARD, error.strerror)

    return listen
