"""A peer's knowledge of the run, as JSON for people and programs (`diloco status`)."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from diloco.base.types import Member, Progress
from diloco.outer.state import OuterState
from diloco.protocol.leases import count
from diloco.protocol.machine import Machine


def status_json(
    machine: Machine, state: OuterState | None, total_tokens: int, directory: tuple[str, ...], send_bps: int, now: float
) -> str:
    """One object; `peers` has one entry for every member of the view, every joiner at the door, and who answers.

    `send_bps`: how fast others take what the peer that answers sends, bits per second; 0: unknown.
    """
    commit = machine.commit
    tree: dict[str, Any] = {
        "run": machine.rules.run,
        "contract_digest": machine.rules.contract,
        "lineage": machine.lineage,
        "founded": commit is not None,
        "version": machine.version,
        "commit_digest": commit.digest if commit else "",
        "state_version": state.version if state else -1,
        "state_digest": state.digest if state else "",
        "tokens": commit.tokens if commit else 0,
        "total_tokens": total_tokens,
        "counted": [counted.peer for counted in commit.counted] if commit else [],
        "lost_blocks": commit.leases.lost if commit else 0,
        "returned_blocks": count(commit.leases.returned) if commit else 0,
        "answering": machine.me.peer,
        "send_bps": send_bps,
        "reason": machine.reason,
        "directory": list(directory),
        "peers": [_peer(machine, member, now) for member in _known(machine)],
    }
    return json.dumps(tree)


def _known(machine: Machine) -> list[Member]:
    listed = {member.peer: member for member in (*machine.view, machine.me)}
    strangers = [entry.member for entry in machine.roster if entry.member.peer not in listed and not entry.left]
    return [*listed.values(), *strangers]


def _peer(machine: Machine, member: Member, now: float) -> dict[str, Any]:
    entry = machine.roster.get(member.peer)
    beat = entry.heartbeat if entry else None
    mine = member.peer == machine.me.peer
    progress = machine.progress if mine else beat.progress if beat else Progress()
    return {
        "peer": member.peer,
        "address": member.address,
        "alive": mine or machine.roster.alive(member, now),
        "incarnation": member.incarnation,
        "in_view": member in machine.view,
        "version": machine.version if mine else beat.version if beat else -1,
        "heard_s_ago": 0.0 if mine or entry is None else round(now - entry.heard_at_s, 1),
        **asdict(progress),
    }
