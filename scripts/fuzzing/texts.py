"""Targets: contracts, sites, addresses, events, and what commands read of other machines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from diloco.base.errors import DilocoError
from diloco.base.types import Progress
from diloco.config.load import contract_from_json, load_contract, load_site, shipped_contracts
from diloco.config.site import Site
from diloco.observe.events import KINDS, Stamped, to_json
from diloco.observe.report import Table, write_report
from diloco.observe.run_folder import peer_times, read_run, read_state, timed_reports
from diloco.observe.screen import UNREADABLE, status_text, summary_table
from diloco.run.operate import status_of, unreadable
from diloco.run.options import CARD, SITE_CARD, member_address, remember, remembered_root
from diloco.transport.address import is_loopback, split_address, split_ticket
from scripts.fuzzing.examples import example
from scripts.fuzzing.spoiling import spoiled_json, spoiled_lines, spoiled_toml
from scripts.fuzzing.target import Finding, Target

HERE = Path()
REFUSALS = (DilocoError,)
SITES = Path(__file__).resolve().parents[2] / "peers"


def targets() -> Iterator[Target]:
    """A target for every text."""
    yield Target("contract-toml", _contract, _contracts, REFUSALS, spoiled_toml, share=10)
    yield Target("site-toml", _site, _sites, REFUSALS, spoiled_toml, share=10)
    yield Target(
        "contract-json",
        contract_from_json,
        lambda: [load_contract("quick").value.to_json().encode()],
        REFUSALS,
        spoiled_json,
        share=10,
    )
    yield Target("address", _address, lambda: [b"10.0.0.1:7700", b"[fd00::5]:1", b"a.b:1/" + b"0f" * 32], REFUSALS)
    yield Target("status", _status, lambda: [json.dumps(STATUS).encode()], REFUSALS, spoiled_json)
    yield Target("events", _events, _event_lines, REFUSALS, spoiled_lines, share=10, room_bytes=2**25)
    yield Target("report", _report, _event_lines, REFUSALS, spoiled_lines, share=500, cpu_s=10.0, room_bytes=2**28)
    yield Target("run-summary", _summary, lambda: [json.dumps(_SUMMARY).encode()], REFUSALS, spoiled_json, share=10)
    yield Target("bench-table", _table, lambda: [json.dumps(_TABLE).encode()], REFUSALS, spoiled_json, share=10)
    yield Target("peer-card", _card, lambda: [b'{"address": "10.0.0.1:7700"}'], REFUSALS, spoiled_json, share=10)
    yield Target("site-card", _site_card, _site_cards, REFUSALS, spoiled_json, share=10)


def _contracts() -> list[bytes]:
    return [path.read_bytes() for path in shipped_contracts().values()]


def _contract(data: bytes) -> None:
    path = HERE / "a.toml"
    path.write_bytes(data)
    list(load_contract(path).rows())


def _sites() -> list[bytes]:
    return [path.read_bytes() for path in SITES.glob("*.toml")]


def _site(data: bytes) -> None:
    path = HERE / "a.toml"
    path.write_bytes(data)
    list(load_site(path).rows())


def _address(data: bytes) -> None:
    text = data.decode(errors="surrogateescape")
    address, _ = split_ticket(text)
    split_address(address)
    is_loopback(address)


_PEER = {
    "peer": "a", "address": "10.0.0.1:7700", "alive": True, "incarnation": 1, "in_view": True, "votes": True,
    "abstains": False, "version": 3, "reached": True, "heard_s_ago": 0.5, **asdict(Progress()),
}  # fmt: skip
STATUS: dict[str, Any] = {
    "run": "fuzz", "contract_digest": "0f" * 32, "lineage": "l", "founded": True, "version": 3, "commit_digest": "c",
    "state_version": 3, "state_digest": "s", "tokens": 5, "total_tokens": 10, "counted": ["a"], "lost_blocks": 0,
    "returned_blocks": 0, "answering": "a", "send_bps": 0, "reason": "why", "votes": 1, "votes_needed": 2, "seats": 1,
    "durable": False, "votes_missing": ["b"], "conflict": "two", "mean_lost_with": ["b"], "barred": [],
    "directory": ["/ip4/1"], "peers": [_PEER, {**_PEER, "peer": "b", "in_view": False, "reached": False}],
}  # fmt: skip
"""As `diloco.exchange.service.status_json` writes it."""


def _status(data: bytes) -> None:
    """Show a member's status. Raises Finding for text in which a terminal sees more than text."""
    tree = status_of("10.0.0.1:7700", data.decode(errors="replace"))
    try:
        text = status_text(tree)
    except UNREADABLE as error:
        raise unreadable("10.0.0.1:7700", error) from error
    if obeyed := [line for line in text.split("\n") if not line.isprintable()]:
        raise Finding(f"a terminal obeys {obeyed[0]!r:.80}")


def _event_lines() -> list[bytes]:
    stamped = [Stamped(1.0, 2.0 + number, "a", example(kind)) for number, kind in enumerate(KINDS.values())]
    return [b"".join(json.dumps(to_json(one)).encode() + b"\n" for one in stamped)]


def _events(data: bytes) -> None:
    """Read a log as `diloco report` and the screen of a simulation do."""
    path = HERE / "events.jsonl"
    path.write_bytes(data)
    peer_times(timed_reports(read_state([path])))
    summary_table(read_run(HERE).summary)


def _report(data: bytes) -> None:
    (HERE / "events.jsonl").write_bytes(data)
    write_report(HERE)


_COST = {"val_loss": 2.5, "tokens": 100, "wall_s": 3.5, "wire_bytes_sent_per_peer": 1000}
_SUMMARY = {
    **_COST, "versions": 3, "peers": 2, "h": 10, "digest": "0f", "codec": "int8", "digests_agree": True, "spread": 0.5,
    "comparisons": {"ddp": _COST, "alone": _COST}, "baseline": {"name": "ddp", **_COST},
}  # fmt: skip


def _summary(data: bytes) -> None:
    (HERE / "summary.json").write_bytes(data)
    summary_table(read_run(HERE).summary)


_TABLE = {"table": {"title": "a", "header": ["a", "b"], "rows": [["1", "2"]]}}


def _table(data: bytes) -> None:
    path = HERE / "table.json"
    path.write_bytes(data)
    Table.read(path)


def _card(data: bytes) -> None:
    (HERE / CARD).write_bytes(data)
    split_address(member_address(str(HERE)))


def _site_cards() -> list[bytes]:
    remember(HERE, Site(), private=True)
    return [(HERE / SITE_CARD).read_bytes()]


def _site_card(data: bytes) -> None:
    (HERE / SITE_CARD).write_bytes(data)
    remembered_root(HERE)
