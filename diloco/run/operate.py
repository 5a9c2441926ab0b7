"""Requests of an operator to a running peer, from outside: status, eviction."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from contextlib import closing
from typing import Any, TypeVar

from diloco.base.errors import IncompatibleError, TicketError, UnreachableError, UsageError
from diloco.base.types import MAX_TEXT, Member
from diloco.identity.user_key import secrets_to_try
from diloco.protocol import messages as m
from diloco.transport.endpoint import Runtime, unanswered
from diloco.transport.link import Link, LinkDown, LinkRefused, LinkSlow

T = TypeVar("T")

ANSWER_S = 5.0


def ask_status(address: str) -> dict[str, Any]:
    """An operator's request to the member at `address` (HOST:PORT): its status. Raises UnreachableError and
    IncompatibleError."""
    with closing(Runtime(secrets_to_try(), ANSWER_S)) as runtime:
        answer, _ = runtime.first_answer(lambda link: _answer(address, link.status(address, ANSWER_S)), ANSWER_S + 5.0)
    return status_of(address, answer)


def status_of(address: str, answer: str) -> dict[str, Any]:
    """A member's answer to a request for its status, with what an eviction asks of it. Raises IncompatibleError."""
    try:
        tree = json.loads(answer)
        texts = [tree[name] for name in ("run", "contract_digest", "lineage", "answering")]
        texts += [text for peer in tree["peers"] for text in (peer["peer"], peer["address"])]
        "".join(texts).encode()  # they are texts, and without lone surrogates
        if any(len(text) > MAX_TEXT for text in texts):
            raise ValueError("a text is too long")
        lives = [peer["incarnation"] for peer in tree["peers"]]
        if not all(type(life) is int and 0 <= life < 2**63 for life in lives):
            raise ValueError("a life is no number")
        if not all(type(peer[name]) is bool for peer in tree["peers"] for name in ("in_view", "alive")):
            raise ValueError("whether a peer lives is not said")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise unreadable(address, error) from error
    return dict(tree)


def unreadable(address: str, error: Exception) -> IncompatibleError:
    """Error for a status that no member of this release answers with."""
    cause = f"{address} answers with a status that this diloco cannot read: {error!r}"
    return IncompatibleError(cause[:300], "ask another member, or use the same diloco release")


def evict_peer(address: str, peer: str) -> tuple[list[str], list[str], dict[str, m.Reply]]:
    """For an operator, report to every live member that the life of `peer` in the view at `address` is over.

    Returns the members that took the report, those that did not answer, and the others' refusals. Raises UsageError for
    a stranger and where nobody takes the peer for dead, UnreachableError where nobody answered, and IncompatibleError.
    """
    with closing(Runtime(secrets_to_try(), ANSWER_S)) as runtime:
        return runtime.first_answer(lambda link: evict(link, address, peer), 2 * ANSWER_S + 5.0)[0]


async def evict(
    link: Link, address: str, peer: str, incarnation: int | None = None
) -> tuple[list[str], list[str], dict[str, m.Reply]]:
    """An operator's report over a link that a peer is dead, as `evict_peer`, whose errors it raises.

    `incarnation`: of the life that is dead; UsageError if the view has another by now. None: any life of it.
    """
    tree = status_of(address, await _answer(address, link.status(address, ANSWER_S)))
    known = {entry["peer"]: entry for entry in tree["peers"] if entry["in_view"]}
    if peer not in known:
        raise UsageError(
            f"the view has no peer named {peer}",
            f"it has {', '.join(known) or 'no members yet: the run has not begun'}",
        )
    if peer == tree["answering"] and known[peer]["alive"]:  # not a later life of a dead one's name
        raise UsageError(f"{peer} answers at {address}: it lives", "stop it first, and ask another member")
    named = known[peer]["incarnation"]
    if incarnation not in (None, named):
        raise UsageError(f"the view has another life of {peer} by now", "look at `diloco status` again")
    operator = Member("operator", 0, "")
    run, contract, lineage = tree["run"], tree["contract_digest"], tree["lineage"]
    envelope = m.Envelope(run, contract, lineage, operator, 0, 0, 0, "", 0, m.Evict(peer, named))
    # Where one peer is dead another may be, and nobody has noticed yet.
    asked = {name: entry["address"] for name, entry in known.items() if entry["alive"] and name != peer}
    deliveries = [_answer(there, link.deliver(there, envelope)) for there in asked.values()]
    answers = dict(zip(asked, await asyncio.gather(*deliveries, return_exceptions=True), strict=True))
    replies = {name: answer for name, answer in answers.items() if isinstance(answer, m.Reply)}
    errors = {name: answer for name, answer in answers.items() if isinstance(answer, BaseException)}
    for error in errors.values():
        if not (isinstance(error, UnreachableError | TicketError) and replies):
            raise error
    reported = [name for name, reply in replies.items() if reply is m.Reply.OK]
    refused: dict[str, m.Reply] = {name: reply for name, reply in replies.items() if reply is not m.Reply.OK}
    if not reported:
        reasons = ", ".join(f"{name} ({reply.name})" for name, reply in refused.items()) or "no other member lives"
        fix = "STALE: a later life of it is there; else see `diloco status` of a member that the others hear"
        raise UsageError(f"nobody takes {peer} for dead: {reasons}", fix)
    return reported, list(errors), refused


async def _answer(address: str, question: Coroutine[Any, Any, T]) -> T:
    """The answer of the member at `address` to an operator. Raises UnreachableError, and what it refuses with."""
    try:
        return await question
    except (LinkDown, LinkSlow, LinkRefused) as error:
        raise unanswered(address, error) from error
