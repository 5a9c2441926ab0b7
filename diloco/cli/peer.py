"""`diloco peer` and `diloco witness`, which take part in a run; `diloco status` and `diloco evict` for its operator."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option, Typer

from diloco.base.collector import started
from diloco.base.files import keep_files_private
from diloco.base.readable import printable
from diloco.cli.lines import PeerLines, saying
from diloco.cli.options import JOIN_HELP, AsJson, Insecure, Overrides, SitePath, show, stop_asked
from diloco.observe.events import Stamped, to_json

commands = Typer()
operator_commands = Typer()


@commands.command(epilog="Found a run:  diloco peer demo   |   join it:  diloco peer --join 127.0.0.1:4000/DIGEST")
def peer(
    contract: Annotated[Path | None, Argument(help="Found a run with this contract, a file or a shipped name.")] = None,
    join: Annotated[str | None, Option(help=JOIN_HELP)] = None,
    site: SitePath = None,
    resume: Annotated[
        Path | None,
        Option(help="Go on in the peer's folder (runs/RUN/PEER), or found the run anew from a checkpoint in it."),
    ] = None,
    overrides: Overrides = None,
    insecure: Insecure = False,
    name: Annotated[str | None, Option(help="This peer's name; the host's and a random suffix by default.")] = None,
    directory: Annotated[Path | None, Option("--dir", help="Where events and checkpoints go.")] = None,
    max_params: Annotated[
        str | None, Option(metavar="N", help="Refuse a larger model: 7B; by default what this machine's memory holds.")
    ] = None,
    profile: Annotated[
        int | None,
        Option(min=1, metavar="STEPS", help="Trace so many inner steps, after the first 10, on each rank."),
    ] = None,
    json_lines: Annotated[bool, Option("--json", help="Print events as JSON lines.")] = False,
) -> None:
    """Take part in a run: found it with a CONTRACT, join it with --join, or go on with --resume.

    The founder prints the line that others run to join. The first Ctrl-C (or SIGTERM) leaves in good order: the work
    done is counted if a version closes soon, or handed back. The second ends at once.
    """
    from diloco.config.load import split_overrides
    from diloco.run.options import PeerOptions, checked

    named = [f"device.profile_steps={profile}"] if profile else []
    named += [f"device.max_params={max_params}"] if max_params else []
    site_overrides, contract_overrides = split_overrides([*named, *(overrides or [])])
    options = PeerOptions(contract, join, site, resume, contract_overrides, site_overrides, insecure, name, directory)
    checked(options)  # before torch is imported, which takes seconds
    keep_files_private()

    from diloco.run.launch import run_peer, start_ranks

    code = start_ranks(options, sys.argv[1:])
    if code is not None:
        raise Exit(code)
    started()
    gc.freeze()  # a full pass over all that was imported takes 0.1 s of CPU, also of the event loop's thread
    with saying() as say:
        ending = run_peer(options, stop_asked(), _listener(say, json_lines))
        if ending is not None and not json_lines:
            loss = f", held-out loss {ending.val_loss:.4f}" if ending.val_loss is not None else ""
            lost = f", {ending.discarded_tokens:,} tokens discarded" if ending.discarded_tokens else ""
            say(f"{ending.reason} at version {ending.version}, {ending.tokens:,} tokens{loss}{lost}")
            if ending.spread is not None:
                say(f"averaged in pairs; those that met last were at most {100 * ending.spread:.2g} % apart")
            say(f"state {ending.state_digest[:16]}  chain {ending.chain_digest[:16] or 'none'}")


@commands.command(epilog="Example:  diloco witness --join 10.0.0.5:4000/DIGEST --name arbiter")
def witness(
    join: Annotated[str, Option(help=JOIN_HELP)],
    site: SitePath = None,
    overrides: Overrides = None,
    insecure: Insecure = False,
    name: Annotated[str | None, Option(help="This witness's name in the run.")] = None,
    directory: Annotated[Path | None, Option("--dir", help="Where events go.")] = None,
    json_lines: Annotated[bool, Option("--json", help="Print events as JSON lines.")] = False,
) -> None:
    """Vote in a run without training: with a witness, one of two peers goes on when the other is gone.

    Takes a few kilobytes per round, no accelerator and no copy of the model. Put it where both peers can reach it.
    """
    from diloco.run.options import PeerOptions, checked

    options = PeerOptions(None, join, site, None, (), overrides or [], insecure, name, directory)
    checked(options)
    keep_files_private()

    from diloco.run.witness import run_witness

    started()
    gc.freeze()  # as in `peer`
    with saying() as say:
        ending = run_witness(options, stop_asked(), _listener(say, json_lines))
        if not json_lines:
            say(f"{ending.reason} at version {ending.version}, {ending.tokens:,} tokens")


def _listener(say: Callable[[str], None], json_lines: bool) -> Callable[[Stamped], None]:
    """A listener of `diloco peer` that prints a peer's events, as JSON lines or for people."""
    return (lambda stamped: say(json.dumps(to_json(stamped)))) if json_lines else PeerLines(say)


@operator_commands.command(epilog="Example:  diloco status 127.0.0.1:4000")
def status(
    address: Annotated[str, Argument(help="HOST:PORT of any live member, or a peer's folder.")],
    as_json: AsJson = False,
) -> None:
    """Ask a member how the run is: version, digest, who is there and how far."""
    from diloco.observe.screen import UNREADABLE, status_text
    from diloco.run.options import member_address

    host_port = member_address(address)  # before what takes seconds is imported

    from diloco.run.operate import ask_status, unreadable

    tree = ask_status(host_port)
    try:
        show(json.dumps(tree, indent=2) if as_json else status_text(tree))
    except UNREADABLE as error:
        raise unreadable(host_port, error) from error


@operator_commands.command(epilog="Example:  diloco evict 127.0.0.1:4000 gpu-box-17")
def evict(
    address: Annotated[str, Argument(help="HOST:PORT of any live member.")],
    peer_name: Annotated[str, Argument(metavar="PEER", help="The peer that is dead for good.")],
) -> None:
    """Tell all live members that a peer is dead for good, so that its vote is not waited for.

    Needed only when so many peers died that a majority of the view is gone. Unsafe while that peer lives elsewhere:
    then two halves of the run could go on apart.
    """
    from diloco.run.options import member_address

    host_port = member_address(address)

    from diloco.protocol.messages import Reply
    from diloco.run.operate import evict_peer

    reached, silent, refused = evict_peer(host_port, peer_name)
    print(f"{printable(peer_name)} is declared dead; reported to {', '.join(map(printable, reached))}")
    for name, reply in refused.items():
        why = "knows a later life of it" if reply is Reply.STALE else f"refuses: {reply.name}"
        print(f"{printable(name)} {why}")
    if silent:
        names = ", ".join(map(printable, silent))
        print(f"{names} did not answer: once more if they are still there, or evict them as well")
