"""A run on paper: the real line, codec, average, journal and files of several peers; no network between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diloco.accounts.journal import Journal
from diloco.accounts.ledger import Opening
from diloco.base.types import Closed, Commit, Counted, Member, Omitted, Voter
from diloco.config.contract import Contract
from diloco.config.site import StorageSection
from diloco.models import build_model
from diloco.outer.average import fold, mean_digest
from diloco.outer.fragments import Weights
from diloco.peer.terms import open_line
from diloco.protocol.leases import advance, found
from diloco.protocol.messages import Fork
from diloco.storage.checkpoint import save
from diloco.storage.saving import save_line
from tests.lines import adopt_state, measured, step_outer

VOCAB = 64
TOKENS, BLOCKS = 32, 2
CONTRACT: dict[str, Any] = {
    "run": {"name": "paper", "total_tokens": 10**6},
    "model": {"layers": 2, "dim": 16, "heads": 2},
    "inner": {"steps": 2, "batch_size": 2},
    "sync": {"fragments": 2, "part_elements": 4096},
    "codec": {"name": "int8"},
}


def contract(**sections: dict[str, Any]) -> Contract:
    return Contract.model_validate({**CONTRACT, **sections})


class PaperPeer:
    """One life."""

    def __init__(
        self, name: str, run: Contract, root: Path, lineage: str, founds: bool, record: bool, life: int = 0
    ) -> None:
        self.name, self.directory = name, root / name
        self.member = Member(name, int.from_bytes(name.encode()[:6]) + life * 10**6, f"{name}:{1 + life}")
        model: nn.Module = build_model(contract().model, VOCAB, run.run.seed)
        self.line = open_line(name, run, Weights.of(model))
        self.warnings: list[str] = []
        opening = Opening(
            name, self.member.incarnation, self.line.boot, run.run.name, run.digest, lineage, founds, False
        )
        storage = StorageSection(record=record)
        self.journal = Journal(opening, self.line, self.directory, storage, self.warnings.append)
        self.journal.opened(run)
        self.run = run

    def train(self) -> None:
        generator = torch.Generator().manual_seed(self.line.state.version + 1000 * len(self.name) + ord(self.name[-1]))
        with torch.no_grad():
            for parameter in self.line.parameters.values():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.01)
        self.journal.trained(TOKENS, BLOCKS)

    def offer(self) -> None:
        """Measure and record, as a round does before anything is sent."""
        sent = self.line.sent or measured(self.line)
        if self.journal.records(sent.contribution):
            self.journal.record(sent.contribution, sent.contribution)

    def apply(self, closed: Closed) -> None:
        mine = step_outer(self.line, closed)
        self.journal.committed(closed.commit, mine)

    def save(self) -> Path:
        groups, about = save_line(self.line, self.run)
        groups.pop("local", None)
        directory = self.directory / "checkpoints"
        return save(directory, self.line.state.version, groups, {**about, "vocab_size": VOCAB}, 9)


class PaperRun:
    """Peers, and the commits that a faultless network would make of their contributions."""

    def __init__(self, root: Path, names: str = "abc", record: bool = True, **sections: dict[str, Any]) -> None:
        self.root, self.contract, self.record = root, contract(**sections), record
        self._lives = Counter[str]()
        self.peers = {name: self.start(name, "lineage-1", name == names[0]) for name in names}
        self.commits: list[Commit] = []
        self.close_founding("lineage-1", list(self.peers.values()))

    def start(self, name: str, lineage: str, founds: bool = False) -> PaperPeer:
        life = self._lives[name]
        self._lives[name] += 1
        return PaperPeer(name, self.contract, self.root, lineage, founds, self.record, life)

    def close_founding(self, lineage: str, peers: Sequence[PaperPeer]) -> Commit:
        """Begin a lineage where these peers stand."""
        line = peers[0].line
        before, names, need = line.commit, [peer.name for peer in peers], self.contract.lease_blocks
        commit = Commit(
            version=line.state.version,
            height=before.height + 1 if before else 0,
            previous=before.digest if before else self.contract.digest,
            lineage=lineage,
            fragment=-1,
            view=tuple(peer.member for peer in peers),
            counted=(),
            omitted=(),
            mean_digest="",
            tokens=before.tokens if before else 0,
            leases=advance(before.leases, {}, names, need) if before else found(names, need),
            state_digest=line.state.digest,
            voters=(Voter(names[0], peers[0].line.boot, line.state.version - 1),),
        )
        self.apply(Closed(commit, ()), peers)
        return commit

    def round(
        self, peers: Sequence[PaperPeer] = (), count: Sequence[PaperPeer] = (), omitted: Sequence[Omitted] = ()
    ) -> Closed:
        """All train and offer, `count` (all of them) are counted, all apply. Returns what closed."""
        peers = self.offer(peers)
        closed = self.close(peers[0], count or peers, omitted)
        self.apply(closed, peers)
        return closed

    def offer(self, peers: Sequence[PaperPeer] = ()) -> Sequence[PaperPeer]:
        """These (all of them) train and offer. Returns them."""
        peers = peers or list(self.peers.values())
        for peer in peers:
            peer.train()
            peer.offer()
        return peers

    def close(self, at: PaperPeer, count: Sequence[PaperPeer], omitted: Sequence[Omitted] = ()) -> Closed:
        before, fragment = at.line.commit, at.line.due
        assert before is not None
        sent = {peer.name: peer.line.sent.contribution for peer in count if peer.line.sent}
        counted = tuple(
            Counted(name, one.boot, one.base_version, one.weight, one.tokens, one.blocks) for name, one in sent.items()
        )
        used = {one.peer: one.blocks for one in counted}
        commit = replace(
            before,
            version=before.version + 1,
            height=before.height + 1,
            previous=before.digest,
            fragment=fragment.index,
            counted=counted,
            omitted=tuple(omitted),
            tokens=before.tokens + sum(one.tokens for one in counted),
            leases=advance(before.leases, used, [m.peer for m in before.view], self.contract.lease_blocks),
            state_digest=at.line.state.digest,
        )
        parts = []
        for part in range(fragment.parts):
            start, stop = fragment.part_bounds(part)
            terms = [(one.weight, sent[one.peer].parts[part]) for one in counted if commit.counts(one.peer, part)]
            parts.append(fold(terms, stop - start, at.line.codecs[fragment.group_of(part)]))
        return Closed(replace(commit, mean_digest=mean_digest(parts)), parts)

    def apply(self, closed: Closed, peers: Sequence[PaperPeer]) -> None:
        self.commits.append(closed.commit)
        for peer in peers:
            peer.apply(closed)

    def copy(self, source: PaperPeer, target: PaperPeer, forks: Sequence[Fork] = ()) -> None:
        """`target` takes over the state of `source`. `forks`: lineages that led to it."""
        target.journal.adopted(*adopt_state(target.line, source.line.state, source.line.commit), forks)

    def end(self) -> None:
        for peer in self.peers.values():
            peer.journal.closed("left")
            peer.journal.close()
