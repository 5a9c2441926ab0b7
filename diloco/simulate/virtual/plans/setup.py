"""Production settings of a simulation, by its plan: a contract and sites, for a model of two layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from diloco.compress import Codec
from diloco.config import load
from diloco.config.contract import SHARED_OPTIMIZERS, Contract
from diloco.config.site import Site
from diloco.outer.fragments import Fragment, Layout, Weights, read_fragment
from diloco.outer.state import OuterState
from diloco.peer import terms
from diloco.peer.terms import lane_terms, rules_of, timing_of
from diloco.peer.waits import COUNTED_SHARE
from diloco.simulate.virtual.plans.plan import FaultPlan

PART_ELEMENTS = 1024
NOISES = 64
STEPS = 4
"""Inner steps of a round, with a token and a block of data each."""
START = 0.5
"""First value of every weight."""
HEARTBEAT_S, SUSPECT_S, STALL_S, RPC_S = 0.5, 2.0, 2.0, 1.0
JOIN_S = 15.0
"""Longest time that a copy of the state takes; where uplinks are slow, as long more as the slowest takes for all."""
PATIENCE_S = 6.0
"""Longest time that a peer waits for a version."""
FINAL_S = 30.0
"""Longest final average under gossip."""
RUN = "virtual"
SMALL: Mapping[str, Mapping[str, Any]] = {
    "topk": {"density": 0.5},
    "dct": {"density": 0.5, "values": "int8"},
    "lowrank": {"rank": 2},
}
"""Keys of codecs that drop much: of so few numbers not too much."""


class SimulatedModel(nn.Module):
    """The model that every simulated peer begins with."""

    def __init__(self, elements: int) -> None:
        """Two layers of so many elements."""
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(elements, 1, bias=False) for _ in range(2))
        for parameter in self.parameters():
            nn.init.constant_(parameter, START)


class SimulationSetup:
    """Settings that all simulated peers of a plan share."""

    def __init__(self, plan: FaultPlan) -> None:
        self.contract = contract_of(plan)
        self.site = _site(plan)
        model = SimulatedModel(plan.elements)
        weights = Weights.of(model)
        self.layout = Layout.agreed(weights.shapes, self.contract)
        lane = lane_terms(self.contract, self.site, self.layout)
        self.codecs: Sequence[Codec] = lane.codecs
        """By group of parameters."""
        self.by_senders = [codec.name == "topk" and codec.mean == "senders" for codec in self.contract.codec.by_group]
        """Means are divided by the weights of those who sent a value, and not of all."""
        self.optimizer, self.weighing, self.rule = lane.optimizer, lane.weighing, lane.averaging.rule
        if plan.policy != "gossip":  # where nobody votes
            self.rules = rules_of(self.contract, tuple(fragment.parts for fragment in self.layout.fragments))
        self.timing = timing_of(self.site)
        anchor = [weights.read(fragment) for fragment in self.layout.fragments]
        self.start = OuterState(0, tuple(map(self.optimizer.start, anchor, self.layout.fragments)))


def contract_of(plan: FaultPlan) -> Contract:
    """The contract of a simulation, from its plan of faults: `async` begins after two versions of `sync`."""
    if plan.policy == "gossip":
        return _gossip_contract(plan)
    is_async = plan.policy == "async"
    shares = is_async and plan.optimizer in SHARED_OPTIMIZERS
    codecs = [_codec(name) for name in plan.codec.split("/")]
    groups = tuple({**codec, "match": (f"blocks.{index}.*",)} for index, codec in enumerate(codecs[1:]))
    feedback = {"error_feedback": plan.feedback} if plan.feedback >= 0 else {}
    return load.contract_of(
        {
            "run": {"name": RUN, "total_tokens": plan.total_tokens or 10**9},
            "membership": {
                "start_peers": plan.peers,
                "policy": plan.policy,
                "sync_versions": 2 * is_async,
                "quorum_peers": max(1, plan.peers // 2),
                "grace_s": 0.05 if is_async else 0.3,
                "without_majority": plan.without_majority,
                "continue_after_s": 2.5,
                "match_deadline_s": 3.0,
                "round_deadline_s": PATIENCE_S,
                "stragglers": plan.stragglers,
                "backlog_versions": plan.backlog,
            },
            "data": {"sequence_length": 1},
            "model": {"kind": "external"},
            "inner": {"steps": STEPS * plan.fragments, "batch_size": 1, "sized_by": plan.sized_by},
            "outer": {
                "optimizer": plan.optimizer,
                "buffer": 3,
                "weighting": plan.weighting,
                "averaging": "radial" if plan.radial else "mean",
                "aggregation": plan.aggregation,
                "staleness_power": 0.5 if shares else 0.0,
                **({"partial": "whole"} if plan.merge == "eager" else {}),
            },
            "codec": {**codecs[0], **feedback, "groups": groups},
            "sync": {
                "fragments": plan.fragments,
                "part_elements": PART_ELEMENTS,
                "overlap": round(plan.overlap * STEPS),
                "merge": plan.merge,
            },
            "eval": {"every_versions": 0},
        }
    )


def _gossip_contract(plan: FaultPlan) -> Contract:
    """The contract of a simulation under gossip: whole weights are swapped, and a final average ends the run."""
    return load.contract_of(
        {
            "run": {"name": RUN, "total_tokens": plan.total_tokens or 10**9},
            "membership": {"start_peers": plan.peers, "policy": "gossip"},
            "data": {"sequence_length": 1},
            "model": {"kind": "external"},
            "inner": {"steps": STEPS, "batch_size": 1},
            "outer": {"lr": 0.7, "momentum": 0.5},
            "codec": _codec(plan.codec),
            "sync": {"part_elements": PART_ELEMENTS},
            "gossip": {"final_s": FINAL_S},
            "eval": {"every_versions": 0},
        }
    )


def _codec(text: str) -> dict[str, Any]:
    """Contract keys of the codec `name`, `name-mean` or `name+zstd`."""
    text, _, zstd = text.partition("+")
    name, _, mean = text.partition("-")
    return {"name": name, "zstd": bool(zstd), **({"mean": mean} if mean else {}), **SMALL.get(name, {})}


def _site(plan: FaultPlan) -> Site:
    """The site of a simulated peer."""
    tree: dict[str, Any] = {
        "device": {"kind": "cpu"},
        "timeouts": {
            "heartbeat_s": HEARTBEAT_S,
            "suspect_s": SUSPECT_S,
            "stall_s": STALL_S,
            "rpc_s": RPC_S,
            "join_s": JOIN_S + plan.peers * plan.longest_exchange_s,
            "leave_s": PATIENCE_S / COUNTED_SHARE,
        },
        "network": {"serve_bps": 0.0},
        "storage": {"checkpoint_every": plan.checkpoint_every},
    }
    return Site.model_validate(tree)


@contextmanager
def most_contributions(peers: int) -> Iterator[None]:
    """Have gathered codecs count at most so many contributions of a version meanwhile; 0: as many as elsewhere."""
    before = vars(terms)["MAX_CONTRIBUTIONS"]
    vars(terms)["MAX_CONTRIBUTIONS"] = peers or before
    try:
        yield
    finally:
        vars(terms)["MAX_CONTRIBUTIONS"] = before


@cache
def noises(elements: int) -> tuple[dict[str, Tensor], ...]:
    """Changes that simulated inner steps make to the weights, layers of so many elements: drawn once, used in turn, the
    same in every plan and on every machine."""
    dice = torch.Generator().manual_seed(1)
    shapes = Weights.of(SimulatedModel(elements)).shapes
    return tuple({name: torch.rand(shape, generator=dice) * 0.4 - 0.2 for name, shape in shapes} for _ in range(NOISES))


@cache
def flat_noise(piece: int, fragment: Fragment, elements: int) -> Tensor:
    """A piece of simulated training noise as a fragment's flat buffer."""
    return read_fragment(noises(elements)[piece], fragment)
