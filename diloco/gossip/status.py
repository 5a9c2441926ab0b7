"""What a peer knows of the run under gossip, as JSON for people and programs (`diloco status`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from diloco.gossip.acquaintances import Acquaintances
from diloco.protocol.gossip_messages import Acquaintance


def gossip_status_json(acquaintances: Acquaintances, terms: Mapping[str, Any], reason: str, now: float) -> str:
    """The same under gossip: every peer has a state of its own, and `peers` are those that this one knows.

    `terms`: what does not come from the acquaintances, by its name in `status_json`.
    """
    known, mine = acquaintances, acquaintances.progress
    everybody = [
        (Acquaintance(known.me, 0, mine, known.spread), 0.0, True),
        *sorted(known.everybody(now), key=lambda entry: entry[0].member.peer),
    ]
    tree: dict[str, Any] = {
        **terms,
        "founded": True,
        "version": mine.version,
        "state_digest": "",
        "tokens": mine.tokens + known.tokens(),
        "answering": known.me.peer,
        "reason": reason,
        "spread": known.spread if known.spread >= 0 else None,
        "peers": [_acquaintance(word, said_s_ago, alive) for word, said_s_ago, alive in everybody],
    }
    return json.dumps(tree)


def _acquaintance(word: Acquaintance, said_s_ago: float, alive: bool) -> dict[str, Any]:
    return {
        "peer": word.member.peer,
        "address": word.member.address,
        "incarnation": word.member.incarnation,
        "alive": alive,
        "in_view": alive,
        "spread": word.spread if word.spread >= 0 else None,
        "heard_s_ago": round(said_s_ago, 1),
        **asdict(word.progress),
    }
