"""What an operator asks of a running peer from outside: status, eviction."""

from __future__ import annotations

import json
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from diloco.errors import UnreachableError, UsageError
from diloco.exchange import messages as m
from diloco.exchange.address import split_address
from diloco.exchange.link import LinkDown, LinkRefused, LinkSlow
from diloco.exchange.runtime import Runtime
from diloco.telemetry import readable_bytes, readable_loss, readable_text
from diloco.types import Member

T = TypeVar("T")

ANSWER_S = 5.0


def ask_status(address: str) -> dict[str, Any]:
    """The status of the member at `address` (HOST:PORT, a ticket will do). Raises UnreachableError."""
    host_port = _address(address)
    runtime = Runtime(ANSWER_S)
    try:
        tree: dict[str, Any] = json.loads(_ask(runtime, host_port, runtime.link.status(host_port, ANSWER_S)))
        return tree
    finally:
        runtime.close()


def evict_peer(address: str, peer: str) -> list[str]:
    """Tell every live member that `peer` is dead for good. Returns who was told. Raises UsageError for a stranger."""
    host_port = _address(address)
    runtime = Runtime(ANSWER_S)
    try:
        tree = json.loads(_ask(runtime, host_port, runtime.link.status(host_port, ANSWER_S)))
        known = {entry["peer"]: entry for entry in tree["peers"] if entry["in_view"]}
        if peer not in known:
            raise UsageError(f"the view has no peer named {peer}", f"it has {', '.join(known)}")
        operator = Member("operator", 0, "")
        envelope = m.Envelope(tree["run"], tree["contract_digest"], tree["lineage"], operator, m.Evict(peer))
        others = [entry for entry in known.values() if entry["alive"] and entry["peer"] != peer]
        for entry in others:
            _ask(runtime, entry["address"], runtime.link.deliver(entry["address"], envelope))
        return [entry["peer"] for entry in others]
    finally:
        runtime.close()


def status_text(tree: Mapping[str, Any]) -> str:
    """The answer of `ask_status` for people: the run in a few lines, then a row per peer."""
    share = tree["tokens"] / tree["total_tokens"]
    ticket = f"{_entry(tree)['address']}/{tree['contract_digest'][:12]}"
    tokens = f"{tree['tokens']:,} of {tree['total_tokens']:,} tokens ({share:.0%})"
    head = [
        f"run {tree['run']}, version {tree['version']}, {tokens}",
        f"state {tree['state_digest'][:16]} (version {tree['state_version']}), commit {tree['commit_digest'][:16]}",
        f"last version counted {', '.join(tree['counted']) or 'nobody'}; now: {tree['reason'] or 'training'}",
        f"join with:  diloco peer --join {ticket}",
        "",
    ]
    names = ("peer", "address", "state", "phase", "version", "step", "tok/s", "loss", "sent", "first counted", "heard")
    rows = [names, *(_row(entry) for entry in tree["peers"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*head, *lines])


def _entry(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    entry: Mapping[str, Any] = next(peer for peer in tree["peers"] if peer["peer"] == tree["answering"])
    return entry


def _row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    state = "member" if entry["in_view"] else "at the door"
    first = entry["first_counted_version"]
    return (
        readable_text(entry["peer"]),
        readable_text(entry["address"]),
        state if entry["alive"] else f"{state}, silent",
        readable_text(entry["phase"]),
        str(entry["version"]),
        f"{entry['inner_step']:,}",
        f"{entry['tokens_per_s']:,.0f}",
        readable_loss(entry["loss"] or None),
        readable_bytes(entry["wire_bytes_sent"]),
        f"v{first}" if first >= 0 else "not yet",
        f"{entry['heard_s_ago']:.1f} s ago",
    )


def _address(text: str) -> str:
    address = text.partition("/")[0]
    split_address(address)
    return address


def _ask(runtime: Runtime, address: str, question: Coroutine[Any, Any, T]) -> T:
    try:
        return runtime.run(question, ANSWER_S + 5.0)
    except (LinkDown, LinkSlow, LinkRefused) as error:
        cause = f"nobody answers at {address} ({error or 'no connection'})"
        raise UnreachableError(cause, "give HOST:PORT of a live member") from error
