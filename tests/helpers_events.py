"""Synthetic run directories, shaped like those `diloco simulate` leaves: a late joiner, a leaver, a death, a skip."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STEADY, DYING, LEAVING, LATE = "tokyo", "lima", "cairo", "oslo"
PEERS = (STEADY, DYING, LEAVING, LATE)
INNER_STEPS = 20
TOKENS_PER_ROUND = 8 * 128 * INNER_STEPS
ROUND_S = 2.1
PARAMETERS = 1_120_000
SENT_PER_ROUND = 1_150_000
UNIX_START = 1_760_000_000.0


def loss_at(tokens: float) -> float:
    """A plausible learning curve, nats per byte: 5.5 at the start, 2 for ever."""
    return 2.0 + 3.5 * math.exp(-((tokens / 150_000) ** 0.6))


def members_at(version: int, versions: int, peers: Sequence[str] = PEERS) -> list[str]:
    """Members of the view: the last peer comes at a quarter, the second dies at 60 %, the third leaves at 80 %."""
    steady, dying, leaving, late = peers
    return [
        steady,
        *([dying] if version < 0.6 * versions else []),
        *([leaving] if version < 0.8 * versions else []),
        *([late] if version > 0.25 * versions else []),
    ]


def peer_events(versions: int, peers: Sequence[str] = PEERS) -> list[dict[str, Any]]:
    """All events of all peers of one run, in order of time."""
    random.seed(7)
    events: list[dict[str, Any]] = []
    began, sent, tokens, before = dict.fromkeys(peers, 0.0), dict.fromkeys(peers, 0), 0, members_at(0, versions, peers)

    def emit(at_s: float, peer: str, kind: str, **fields: Any) -> None:
        stamp = {"t": at_s - began[peer], "time": UNIX_START + at_s, "peer": peer, "kind": kind}
        events.append({**stamp, **fields})

    def start(at_s: float, peer: str, version: int) -> None:
        began[peer] = at_s
        emit(at_s, peer, "start", run="demo", parameters=PARAMETERS, resumed_version=0, pid=1, contract_digest="c0ffee")

    for peer in before:
        start(0.01 * peers.index(peer), peer, 0)
        emit(0.5, peer, "view", version=0, joined=before, left=[])
    for version in range(1, versions + 1):
        at_s = 0.5 + version * ROUND_S
        members = members_at(version, versions, peers)
        joined, left = [p for p in members if p not in before], [p for p in before if p not in members]
        for peer in joined:
            start(at_s - 1.6 * ROUND_S, peer, version)
        counted = [p for p in members if p not in joined]
        tokens += TOKENS_PER_ROUND * len(counted)
        for peer in members:
            spread_s = 0.02 * random.random()
            if joined or left:
                reasons = [{"peer": p, "reason": "left" if p == peers[2] else "no word for 5.0 s"} for p in left]
                emit(at_s + spread_s, peer, "view", version=version, joined=joined, left=reasons)
            sent[peer] += SENT_PER_ROUND if peer in counted else 20_000
            exchange_s = 0.16 + 0.05 * random.random() + (1.2 if left else 0.0)
            seconds = {"inner": 1.75, "pseudo_gradient": 0.004, "compress": 0.03, "exchange": exchange_s}
            seconds |= {"average": 0.011, "outer": 0.008, "merge": 0.003, "other": 0.02}
            emit(
                at_s + spread_s,
                peer,
                "version",
                version=version,
                fragment=0,
                tokens=tokens,
                members=members,
                counted=counted,
                own=peer in counted,
                loss=loss_at(tokens) + random.gauss(0, 0.012) if peer in counted else None,
                inner_tokens=TOKENS_PER_ROUND,
                tokens_per_s=TOKENS_PER_ROUND / (ROUND_S + 0.1 * random.random()),
                wire_bytes_sent=sent[peer],
                wire_bytes_received=sent[peer],
                seconds=seconds,
                attempts=2 if left else 1,
                state_digest=f"{version:02x}ab34cd56ef7890",
                lr=1e-3,
            )
        if version == versions // 2:
            emit(at_s + 0.1, LATE if LATE in members else peers[0], "skip", version=version, reason="no quorum in 5 s")
        if version % 5 == 0 or version == versions:
            emit(at_s + 0.2, peers[0], "eval", version=version, tokens=tokens, val_loss=loss_at(tokens) + 0.05)
        for peer in left:
            if peer == peers[2]:
                emit(at_s + 0.3, peer, "end", **_end("left", version, tokens, sent[peer], at_s))
        before = members
    last_s = 0.9 + versions * ROUND_S
    for peer in before if versions else []:
        emit(last_s, peer, "end", **_end("done", versions, tokens, sent[peer], last_s))
    return sorted(events, key=lambda event: event["time"])


def _end(reason: str, version: int, tokens: int, sent: int, wall_s: float) -> dict[str, Any]:
    digests = {"state_digest": f"{version:02x}ab34cd56ef7890", "chain_digest": "feed"}
    numbers = {"version": version, "tokens": tokens, "wire_bytes_sent": sent, "wall_s": wall_s, "discarded_tokens": 0}
    return {**digests, **numbers, "reason": reason, "val_loss": loss_at(tokens) + 0.05}


def baseline_events(tokens: int, sent: int, wall_s: float, worse: float) -> list[dict[str, Any]]:
    """A baseline's file: one event per step, an evaluation now and then, the end."""
    random.seed(9)
    steps = max(1, tokens // (4 * 8 * 128))
    events: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        seen, at_s = tokens * step // steps, wall_s * step / steps
        stamp = {"t": at_s, "time": UNIX_START + 1000 + at_s, "peer": "ddp"}
        loss = loss_at(seen) + worse + random.gauss(0, 0.05)
        events.append(
            {**stamp, "kind": "step", "step": step, "tokens": seen, "loss": loss, "wall": at_s}
            | {"wire_bytes_sent": sent * step // steps}
        )
        if step % max(1, steps // 5) == 0 or step == steps:
            events.append({**stamp, "kind": "eval", "tokens": seen, "val_loss": loss_at(seen) + worse + 0.05})
    return [*events, {**stamp, "kind": "end", "tokens": tokens, "val_loss": loss_at(tokens) + worse + 0.05}]


def write_events(path: Path, events: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def write_run(
    directory: Path, versions: int = 24, peers: Sequence[str] = PEERS, folders: Sequence[str] = PEERS
) -> dict[str, Any]:
    """A whole directory of `diloco simulate --compare ddp`; gives back what is in its summary.json."""
    events = peer_events(versions, peers)
    write_events(directory / "events.jsonl", events)
    for peer, folder in zip(peers, folders, strict=True):
        write_events(directory / folder / "events.jsonl", [event for event in events if event["peer"] == peer])
    tokens = max((event["tokens"] for event in events if event["kind"] == "version"), default=0)
    steps = tokens // (4 * 8 * 128)
    ddp_sent = int(steps * PARAMETERS * 4 * 1.5)
    wall_s = 0.9 + versions * ROUND_S
    comparisons = {}
    for name, worse, sent, takes_s in (
        ("ddp", -0.03, ddp_sent, wall_s * 1.3),
        ("average", 0.12, SENT_PER_ROUND * versions, wall_s),
        ("alone", 0.21, 0, wall_s * 0.9),
    ):
        write_events(directory / name / "events.jsonl", baseline_events(tokens, sent, takes_s, worse))
        val_loss = loss_at(tokens) + worse + 0.05
        comparisons[name] = {
            "val_loss": val_loss,
            "wall_s": takes_s,
            "wire_bytes_sent_per_peer": sent,
            "tokens": tokens,
        }
    summary = {
        "peers": 4,
        "versions": versions,
        "digest": f"{versions:02x}ab34cd56ef7890",
        "digests_agree": True,
        "val_loss": loss_at(tokens) + 0.05,
        "tokens": tokens,
        "wall_s": wall_s,
        "wire_bytes_sent_per_peer": SENT_PER_ROUND * versions,
        "h": INNER_STEPS,
        "parameters": PARAMETERS,
        "codec": "int8",
        "baseline": {"name": "ddp", **{k: v for k, v in comparisons["ddp"].items() if k != "tokens"}},
        "comparisons": comparisons,
    }
    (directory / "summary.json").write_text(json.dumps(summary, indent=2))
    (directory / "contract.toml").write_text('[run]\nname = "demo"\ntotal_tokens = 1000000\n[inner]\nsteps = 20\n')
    return summary
