"""Where a peer left off, by its ledger: the run that it may go on with, and the commits on which it stood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.accounts.ledger import LEDGER, Record, read_ledger
from diloco.base.errors import StateError
from diloco.base.types import Commit, Member

MAX_EARLIER = 8
"""Earlier members that are asked where the last commit has no other. Each that is gone costs some seconds."""


@dataclass(frozen=True, slots=True)
class LeftOff:
    """Position of a peer at the end of the last life in its ledger."""

    peer: str
    contract_digest: str
    began_us: int
    """Start of that life in microseconds (`new_incarnation`)."""
    version: int
    commit: Commit | None
    """The last that the peer applied in the run that it founded or joined last; None when it died before the first."""
    history: Mapping[int, frozenset[str]]
    """Digests of the commits on which the peer stood in that run, by version: without those that it left for others,
    and without what is known not to lead to the state that it copied last."""
    whole: bool
    """Whether no full disk refused some of them."""
    lineages: frozenset[str]
    """Lineage of the last commit or copied state, and those that the peer entered since: what the ledger lacks may be
    of these."""
    earlier: tuple[Member, ...]
    """Members that train of earlier commits in this ledger, and not of the last one, at most `MAX_EARLIER`, the latest
    first. They may be there again, or in a lineage apart."""

    @property
    def others(self) -> tuple[Member, ...]:
        """The other members of the run, by the last commit in this peer's ledger."""
        return tuple(member for member in self.commit.view if member.peer != self.peer) if self.commit else ()


def voters_in(directory: Path) -> frozenset[str]:
    """Names of the voters of the latest commit in the ledger of a peer's folder; none before its first."""
    left = left_off(read_ledger(directory / LEDGER).records)
    return frozenset(voter.peer for voter in left.commit.voters) if left is not None and left.commit else frozenset()


def left_off(records: Sequence[Record]) -> LeftOff | None:
    """Position at the end of a ledger; None when no life began. Raises ValueError for a malformed last commit."""
    opening: Mapping[str, Any] = {}
    last: Record | None = None
    version = 0
    history: dict[int, dict[str, Mapping[str, Any]]] = {}  # with the lineage and tokens of each, as far as written
    whole, lineages = True, frozenset[str]()
    view: object = None
    met: dict[str, Member] = {}
    for record in records:
        fields = record.fields
        origin: Mapping[str, Any] = {}
        if record.kind == "open":
            another = fields["contract_digest"] != opening.get("contract_digest")
            if fields["founds"] or another:
                last = None  # those of before are not in this run, or in a lineage that was left on purpose
                lineages = frozenset()
                met.clear()
            if another or (fields["founds"] and not fields["resumed"]):
                whole = True
                history.clear()
            lineages |= {fields["lineage"]}
            opening, version = fields, fields["version"]
        elif record.kind == "commit":
            last, version, origin = record, fields["commit"]["version"], fields["commit"]
            lineages = frozenset((origin.get("lineage", ""),))
            if (named := origin.get("view")) != view:  # to parse a commit takes long, and views are seldom new
                view = named
                met |= {member.peer: member for member in record.commit.view if not member.witness}
        elif record.kind == "adopt":
            version = fields["version"]
            if lineage := fields.get("lineage"):
                lineages = frozenset((lineage,))
            forks: Mapping[str, int] = fields.get("forks", {})
            if fields.get("lineage") in forks:  # else it is unknown what led there
                origin = {"lineage": fields["lineage"], "tokens": forks[fields["lineage"]]}
                _keep_leading(history, forks)
        elif record.kind == "gap":
            whole = False
        joins = record.kind == "open" and not (fields["founds"] or fields["resumed"])  # and has no state yet
        if "digest" in fields and not joins:
            while history and (latest := next(reversed(history))) > version:
                del history[latest]
            history.setdefault(version, {}).setdefault(fields["digest"], origin)  # two where a lineage is founded
    if not opening:
        return None
    commit = last.commit if last else None
    stood = {version: frozenset(digests) for version, digests in history.items()}
    here = {opening["peer"], *(member.peer for member in (commit.view if commit is not None else ()))}
    earlier = tuple([met[peer] for peer in reversed(met) if peer not in here][:MAX_EARLIER])
    about = (opening["peer"], opening["contract_digest"], opening["boot"])
    return LeftOff(*about, version, commit, stood, whole, lineages, earlier)


@dataclass(frozen=True, slots=True)
class Booked:
    """Contents of a ledger that the next process of its peer needs."""

    states: Mapping[str, str]
    """Digests of states after commits, by digest of the commit."""
    boot: int
    """That of the last process; 0: there was none."""
    stood: frozenset[str]
    """Digests of commits (`LeftOff.history`); none where some are not known."""
    earlier: tuple[Member, ...]
    """`LeftOff.earlier`."""


def booked(directory: Path) -> Booked:
    """Contents of the ledger in a peer's folder that its next process needs; none where it cannot be read."""
    try:
        records = read_ledger(directory / LEDGER).records
        left = left_off(records)
    except (StateError, ValueError):
        return Booked({}, 0, frozenset(), ())
    states = {record.fields["digest"]: record.fields["state"] for record in records if record.kind == "commit"}
    boot = max((record.fields["boot"] for record in records if record.kind == "open"), default=0)
    history = left.history if left is not None and left.whole else {}
    earlier = left.earlier if left is not None else ()
    return Booked(states, boot, frozenset().union(*history.values()), earlier)


def _keep_leading(history: dict[int, dict[str, Mapping[str, Any]]], forks: Mapping[str, int]) -> None:
    """Take out of the history what is known not to lead to a copied state (`Ledger.adopted`)."""
    for version, digests in list(history.items()):
        for digest, origin in list(digests.items()):
            if "lineage" in origin and origin.get("tokens", 0) > forks.get(origin["lineage"], -1):
                del digests[digest]
        if not digests:
            del history[version]
