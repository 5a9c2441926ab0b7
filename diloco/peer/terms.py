"""Settings for protocol, lanes and rounds, made of contract and site."""

from __future__ import annotations

import hashlib
import os

from diloco.base.errors import ConfigError, IncompatibleError
from diloco.base.ranks import Alone
from diloco.base.turns import Turns
from diloco.base.types import Member
from diloco.compress import open_codecs
from diloco.compress.bundle import MAX_CONTRIBUTIONS
from diloco.compress.encoding import Encode, encode_now
from diloco.config.contract import Contract
from diloco.config.site import Site
from diloco.exchange.terms import LaneTerms, Terms
from diloco.island import Island
from diloco.outer.average import Averaging
from diloco.outer.fragments import Layout, Weights
from diloco.outer.line import Line, Weighing
from diloco.outer.merge import open_merge
from diloco.outer.optimizers import open_outer
from diloco.outer.robust import codecs_of
from diloco.outer.state import OuterState, places
from diloco.protocol.claims import Bounds
from diloco.protocol.messages import Fork
from diloco.protocol.streams import MAX_CHUNKS, Welcome
from diloco.protocol.view import Policy, Rules, Timing
from diloco.storage.checkpoint import Checkpoint
from diloco.transport.pace import SERVE_BPS_PER_CORE


def lanes_of(site: Site, island: Island | None) -> int:
    """Number of a peer's lanes: ranks of its island that divide the outer state."""
    if island is None:
        return 1
    return min(site.network.lanes or (1 if site.network.advertise else island.size), island.size)


def open_line(
    name: str,
    contract: Contract,
    weights: Weights,
    encode: Encode = encode_now,
    island: Island | None = None,
    lanes: int = 1,
) -> Line:
    """The line of a peer before the first version: on a rank of an island, its part. Raises ConfigError."""
    layout = Layout.agreed(weights.shapes, contract).on_lane(island.rank if island is not None else 0, lanes)
    optimizer = open_outer(contract.outer)
    chunks = len(places(layout, optimizer))
    if chunks > MAX_CHUNKS:
        cause = f"a state of {chunks:,} parts can't be copied, at most one of {MAX_CHUNKS:,}: nobody could ever join"
        elements = max(fragment.part_elements for fragment in layout.fragments)
        raise ConfigError(cause, f"raise sync.part_elements, which is {elements:,} here")
    anchor = [weights.read(fragment) for fragment in layout.fragments]
    return Line(
        name,
        weights,
        layout,
        codecs_of(contract),
        optimizer,
        Weighing.of(contract),
        Turns.of(contract),
        OuterState(0, tuple(map(optimizer.start, anchor, layout.fragments))),
        ranks=island or Alone(),
        merge=open_merge(contract.sync.merge, contract.sync.mix_alpha),
        feedback=contract.codec.error_feedback,
        residual_after_rejoin=contract.codec.residual_after_rejoin,
        encode=encode,
        align=contract.outer.alignment == "momentum",
    )


def check_alike(welcome: Welcome, layout_digest: str, data: str) -> None:
    """Before a peer that enters copies anything: the same parameters, the same data. Raises IncompatibleError."""
    if welcome.layout != layout_digest:
        cause = "this model has other parameters (names or shapes) than the run's"
        raise IncompatibleError(cause, "build the model as the founder does; mind tied and frozen parameters")
    if welcome.data != data:
        cause = f"this peer's data ({data[:12]}) is not the run's ({welcome.data[:12]})"
        fix = "use the same files; for data.source 'stdlib', the same Python version"
        raise IncompatibleError(cause, fix)


def rules_of(contract: Contract, parts: tuple[int, ...]) -> Rules:
    """A peer's rules of the protocol, from the contract. `parts`: of each fragment."""
    membership = contract.membership
    return Rules(
        run=contract.run.name,
        contract=contract.digest,
        parts=parts,
        start_peers=membership.start_peers,
        bounds=Bounds.of(contract),
        policy=Policy(
            quorum_peers={"sync": None, "quorum": membership.quorum_peers, "async": 1}[membership.policy],
            grace_s=membership.grace_s,
            match_deadline_s=membership.match_deadline_s,
            uses_slack=membership.policy == "async",
            sync_versions=membership.sync_versions,
            max_peers=MAX_CONTRIBUTIONS if any(codec.gathered for codec in open_codecs(contract.codec)) else None,
        ),
        backlog_versions=membership.backlog_versions,
        continue_after_s=membership.continue_after_s if membership.without_majority == "continue" else None,
        offences_allowed=membership.offences_allowed,
    )


def lane_terms(contract: Contract, site: Site, layout: Layout, ranks: int = 1) -> LaneTerms:
    """A peer's settings of a lane. `layout`: of the parts that are held here; `ranks`: of the island."""
    how = site.device.outer_step
    return LaneTerms(
        layout,
        codecs_of(contract),
        open_outer(contract.outer),
        Weighing.of(contract),
        site.timeouts.stall_s,
        contract.membership.max_norm_ratio,
        Averaging.of(contract),
        how == "ahead" or (how == "auto" and ranks == 1),
    )


def serve_bps_of(site: Site) -> float:
    """The rate at which a peer serves joiners: as set, else by the cores that this process may use. 0: no limit."""
    if site.network.serve_bps is not None:
        return site.network.serve_bps
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return SERVE_BPS_PER_CORE * cores


def exchange_terms(
    contract: Contract, site: Site, layout: Layout, layout_digest: str, data: str, ranks: int = 1
) -> Terms:
    """A peer's settings of an exchange. `layout`: see `lane_terms`; `layout_digest`, `data`: a joiner's must match."""
    return Terms(
        contract_json=contract.to_json().encode(),
        rules=rules_of(contract, tuple(fragment.parts for fragment in layout.fragments)),
        timing=timing_of(site),
        lane=lane_terms(contract, site, layout, ranks),
        layout_digest=layout_digest,
        total_tokens=contract.run.total_tokens,
        data=data,
        serve_bps=serve_bps_of(site),
    )


def lineage_of(founder: Member, contract_digest: str) -> str:
    """Name of the lineage that this life of a peer founds: no two lives choose the same."""
    text = f"{contract_digest}/{founder.peer}/{founder.incarnation}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def forks_of(checkpoint: Checkpoint) -> tuple[Fork, ...]:
    """Lineages that led to that of a checkpoint's commit; none in those of earlier releases. Raises StateError."""
    try:
        return tuple(Fork(str(lineage), int(tokens)) for lineage, tokens in checkpoint.meta.get("forks", ()))
    except (TypeError, ValueError) as error:
        raise checkpoint.malformed(f"its forks are malformed: {error}") from error


def timing_of(site: Site) -> Timing:
    """A peer's timing of the protocol, from its site."""
    return Timing(site.timeouts.heartbeat_s, site.timeouts.suspect_s, site.timeouts.stall_s)
