"""The rows of `scripts/bench-quality`: a contract that all share, and each row's changes to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco.config.contract import Contract

Sections = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Scale:
    """Size and length of all runs."""

    layers: int
    dim: int
    sequence_length: int
    batch_size: int
    """Sequences of one inner step of one peer."""
    steps: int
    """H."""
    rounds: int
    """Rounds of H inner steps each."""
    peers: int
    heldout: int
    """Sequences of the evaluation."""


USUAL = Scale(4, 64, sequence_length=64, batch_size=16, steps=20, rounds=30, peers=4, heldout=512)
"""0.23M parameters, in four layers so that there can be four fragments."""
QUICK = Scale(4, 32, sequence_length=32, batch_size=4, steps=4, rounds=3, peers=2, heldout=16)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    about: str
    changes: Sections = field(default_factory=dict)
    """Keys of the contract, by section."""
    together: bool = False
    """Data parallel: one step on the batches of all peers, and nothing to sync."""
    speeds: tuple[float, ...] = ()
    """Speed of each peer; empty: all are alike."""


AVERAGE: Mapping[str, Any] = {"optimizer": "sgd", "lr": 1.0, "warmup_steps": 0}
"""SparseLoCo's: what error feedback sends late is momentum enough. Its decay of 0.95 remembers 20 rounds. Of these 30
that is too many: what was dropped at a high learning rate is sent at a low one, and an outer step is two to four times
as long as what was trained. So with the outer optimizer of `fp32` the residual fades faster."""
SPEEDS = (1.0, 0.93, 0.47, 0.26)
"""Such that no two are ready at the same time by chance."""
STALE: Mapping[str, Any] = {"lr": 0.4, "momentum": 0.5}
"""For a mean that is a whole round old."""


def rows(steps: int) -> dict[str, Row]:
    """All rows by name, in the order of the table. `steps`: H."""
    sparse, sparser = {"name": "topk", "density": 0.125}, {"name": "topk", "density": 0.03125}
    fed_back = {"error_feedback": 0.95}
    return {
        "ddp": Row("data parallel, batches of all peers in one step", together=True),
        "average": Row("plain averaging", {"outer": AVERAGE}),
        "fp32": Row("DiLoCo; Nesterov 0.7, momentum 0.7 after 6 rounds of averaging"),
        "fp32-published": Row("momentum 0.9 from the first round on", {"outer": {"momentum": 0.9, "warmup_steps": 0}}),
        "int8": Row("", {"codec": {"name": "int8"}}),
        "int4": Row("", {"codec": {"name": "int4"}}),
        "e3m0": Row("Streaming DiLoCo's 4 bits", {"codec": {"name": "e3m0"}}),
        "two_bit": Row("", {"codec": {"name": "two_bit"}}),
        "sign-ef": Row("error feedback, averaged", {"codec": {"name": "sign", **fed_back}, "outer": AVERAGE}),
        "topk12-ef": Row(
            "12.5 % kept, 2 bits each, decay 0.25; outer as `fp32`", {"codec": {**sparse, "error_feedback": 0.25}}
        ),
        "topk12": Row("the rest is lost; outer as `fp32`", {"codec": sparse}),
        "topk3-ef": Row("3.1 % kept, decay 0.5; outer as `fp32`", {"codec": {**sparser, "error_feedback": 0.5}}),
        "topk3": Row("the rest is lost; outer as `fp32`", {"codec": sparser}),
        "sparseloco12": Row("as published: decay 0.95, averaged", {"codec": {**sparse, **fed_back}, "outer": AVERAGE}),
        "sparseloco3": Row("3.1 % kept", {"codec": {**sparser, **fed_back}, "outer": AVERAGE}),
        "dct12-ef": Row("12.5 % in frequencies", {"codec": {**sparse, **fed_back, "name": "dct"}, "outer": AVERAGE}),
        "lowrank-ef": Row("rank 8 of each part", {"codec": {"name": "lowrank", **fed_back}, "outer": AVERAGE}),
        "stream2-mix": Row(
            "P = 2, 1 step overlaps, mixed", {"sync": {"fragments": 2, "overlap": 1, "merge": "mix", "mix_alpha": 0.5}}
        ),
        "stream2-carry": Row("P = 2, 1 step overlaps, carried", {"sync": {"fragments": 2, "overlap": 1}}),
        "stream4-int4": Row(
            "P = 4, 1 step overlaps, carried", {"sync": {"fragments": 4, "overlap": 1}, "codec": {"name": "int4"}}
        ),
        "eager": Row(
            "a whole round overlaps, own share at once", {"sync": {"overlap": steps, "merge": "eager"}, "outer": STALE}
        ),
        "delayed": Row("a whole round overlaps", {"sync": {"overlap": steps}, "outer": STALE}),
        "muon-int4": Row("MuLoCo: Muon inside", {"inner": {"optimizer": "muon"}, "codec": {"name": "int4"}}),
    }


def async_rows(steps: int) -> dict[str, Row]:
    """Those of `scripts/bench-async`. `steps`: H."""
    start = OUTER["warmup_steps"]
    sized = {"inner": {"sized_by": "speed"}}
    window = {"sync": {"overlap": steps // 4}}

    def row(about: str, outer: Mapping[str, Any], more: Sections | None = None, scratch: bool = False) -> Row:
        membership = {"policy": "async", "sync_versions": 0 if scratch else start}
        first = {"warmup_steps": 0} if scratch else {}
        return Row(about, {"membership": membership, "outer": {**outer, **first}, **(more or {})}, speeds=SPEEDS)

    def buffered(name: str, count: int) -> Mapping[str, Any]:
        return {"optimizer": f"{name}_nesterov", "buffer": count}

    return {
        "sync": Row("waits for the slowest", speeds=SPEEDS),
        "sync-sized": Row("DyLU: the slower do fewer steps", sized, speeds=SPEEDS),
        "naive": row("a whole Nesterov step for each contribution", {"partial": "whole"}),
        "plain": row("no momentum, 1/4 of a step for each", AVERAGE),
        "buffered4": row("FedBuff: a Nesterov step every 4", buffered("buffered", 4)),
        "delayed4": row("delayed Nesterov, momentum every 4", buffered("delayed", 4)),
        "delayed8": row("every 8", buffered("delayed", 8)),
        "delayed4-sized": row("every 4, and DyLU", buffered("delayed", 4), sized),
        "share": row("1/4 of a Nesterov step for each", {}),
        "share-stale": row("and weights by staleness", {"staleness_power": 0.5}),
        "share-aligned": row("and the late ones aligned", {"alignment": "momentum"}),
        "share-sized": row("and DyLU", {}, sized),
        "window": row("H/4 steps overlap: a version counts who comes meanwhile", {}, window),
        "window-sized": row("and DyLU", {}, {**window, **sized}),
        "window-sized-tokens": row("and weights by tokens", {"weighting": "tokens"}, {**window, **sized}),
        "plain-scratch": row("`plain` without a start in sync", AVERAGE, scratch=True),
        "delayed4-scratch": row("`delayed4` without", buffered("delayed", 4), scratch=True),
        "share-scratch": row("`share` without", {}, scratch=True),
        "window-sized-scratch": row("`window-sized` without", {}, {**window, **sized}, scratch=True),
        "gossip": Row(
            "NoLoCo: in pairs, then a final average",
            {"membership": {"policy": "gossip"}, "outer": {"lr": 0.7, "momentum": 0.5, "warmup_steps": 0}},
            speeds=SPEEDS,
        ),
    }


def contract_of(row: Row, scale: Scale, seed: int) -> Contract:
    """The contract that a row's peers train under. Raises pydantic's ValidationError when the scale does not fit it."""
    tokens_per_step = scale.peers * scale.batch_size * scale.sequence_length
    sections: Sections = {
        "run": {"name": "quality", "seed": seed, "total_tokens": scale.rounds * scale.steps * tokens_per_step},
        "data": {"source": "stdlib", "sequence_length": scale.sequence_length},
        "model": {"layers": scale.layers, "dim": scale.dim, "heads": 4},
        "inner": {"steps": scale.steps, "batch_size": scale.batch_size, **INNER},
        "outer": OUTER,
        "codec": {"name": "fp32"},
        "eval": {"sequences": scale.heldout},
    }
    names = dict.fromkeys((*sections, *row.changes))
    return Contract.model_validate({name: {**sections.get(name, {}), **row.changes.get(name, {})} for name in names})


INNER: Mapping[str, Any] = {"lr": 2e-3, "betas": (0.9, 0.99), "warmup": 0.08, "final_lr": 0.05}
OUTER: Mapping[str, Any] = {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.7, "warmup_steps": 6}
"""configs/demo.toml's: from random weights the first rounds only average, and 30 rounds want less momentum than 0.9."""
