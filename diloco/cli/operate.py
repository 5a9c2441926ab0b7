"""`diloco status` and `diloco evict`: what an operator asks of a live run."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from diloco.cli.options import AsJson
from diloco.observe.readable import printable

commands = typer.Typer()


@commands.command(epilog="Example:  diloco status 127.0.0.1:4000")
def status(
    address: Annotated[str, typer.Argument(help="HOST:PORT of any live member, or a peer's folder.")],
    as_json: AsJson = False,
) -> None:
    """Ask a member how the run is: version, digest, who is there and how far."""
    from diloco.observe.screen import status_text
    from diloco.run.options import member_address

    host_port = member_address(address)  # before what takes seconds is imported

    from diloco.run.operate import ask_status

    tree = ask_status(host_port)
    print(json.dumps(tree, indent=2) if as_json else status_text(tree))


@commands.command(epilog="Example:  diloco evict 127.0.0.1:4000 gpu-box-17")
def evict(
    address: Annotated[str, typer.Argument(help="HOST:PORT of any live member.")],
    peer_name: Annotated[str, typer.Argument(metavar="PEER", help="The peer that is dead for good.")],
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
