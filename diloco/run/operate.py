"""What an operator asks of a running peer from outside: status, eviction."""

from __future__ import annotations

import json
from collections.abc import Coroutine
from typing import Any, TypeVar

from diloco.base.errors import DilocoError, TicketError, UnreachableError, UsageError
from diloco.base.types import Member
from diloco.protocol import messages as m
from diloco.transport.endpoint import Runtime, unanswered
from diloco.transport.link import LinkDown, LinkRefused, LinkSlow

T = TypeVar("T")

ANSWER_S = 5.0


def ask_status(address: str) -> dict[str, Any]:
    """The status of the member at `address` (HOST:PORT). Raises UnreachableError."""
    runtime = Runtime(ANSWER_S)
    try:
        tree: dict[str, Any] = json.loads(_ask(runtime, address, runtime.link.status(address, ANSWER_S)))
        return tree
    finally:
        runtime.close()


def evict_peer(address: str, peer: str) -> tuple[list[str], list[str], dict[str, m.Reply]]:
    """Tell every live member that the life of `peer` which the view of the member at `address` has is over.

    Returns who was told, who did not answer, and who refused. Raises UsageError for a stranger and where nobody takes
    it for dead, and UnreachableError where nobody answered."""
    runtime = Runtime(ANSWER_S)
    try:
        tree = json.loads(_ask(runtime, address, runtime.link.status(address, ANSWER_S)))
        known = {entry["peer"]: entry for entry in tree["peers"] if entry["in_view"]}
        if peer not in known:
            raise UsageError(f"the view has no peer named {peer}", f"it has {', '.join(known)}")
        operator = Member("operator", 0, "")
        run, contract, lineage = tree["run"], tree["contract_digest"], tree["lineage"]
        envelope = m.Envelope(run, contract, lineage, operator, "", 0, m.Evict(peer, known[peer]["incarnation"]))
        reported: list[str] = []
        silent: dict[str, DilocoError] = {}
        refused: dict[str, m.Reply] = {}
        for entry in known.values():
            if entry["alive"] and entry["peer"] != peer:
                try:  # where one peer is dead another may be, and nobody has noticed yet
                    reply = _ask(runtime, entry["address"], runtime.link.deliver(entry["address"], envelope))
                except (UnreachableError, TicketError) as error:
                    silent[entry["peer"]] = error
                    continue
                if reply is m.Reply.OK:
                    reported.append(entry["peer"])
                else:
                    refused[entry["peer"]] = reply
        if silent and not (reported or refused):
            raise next(iter(silent.values()))
        if not reported:
            reasons = ", ".join(f"{name} ({reply.name})" for name, reply in refused.items()) or "no other member lives"
            raise UsageError(
                f"nobody takes {peer} for dead: {reasons}",
                "STALE: a later life of it is there; else see `diloco status` of a member that the others hear",
            )
        return reported, list(silent), refused
    finally:
        runtime.close()


def _ask(runtime: Runtime, address: str, question: Coroutine[Any, Any, T]) -> T:
    try:
        return runtime.run(question, ANSWER_S + 5.0)
    except (LinkDown, LinkSlow, LinkRefused) as error:
        raise unanswered(address, error) from error
