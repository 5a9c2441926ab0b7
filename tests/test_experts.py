"""Experts and sequences divided over the ranks of an island: what one process does, on the same rows.

As in test_parallel: one group of four processes does all cases.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diloco.config.contract import Contract
from diloco.config.site import Site
from diloco.island import Island
from tests.test_parallel import DEVICE, STEPS, Run, State, found_by, furthest
from tests.test_parallel import contract as dense

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("experts")]  # one worker makes the fixture, once

EXPERTS = {"experts": 8, "experts_per_token": 2, "shared_experts": 1, "balance_rate": 0.01}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # [mesh], and what is different in [model]
    "ep": ({"ep": 4}, EXPERTS),
    "fsdp+ep": ({"ep": 2, "shard": "parameters"}, EXPERTS),
    "ep+cp, auxiliary loss": ({"ep": 2, "cp": 2}, {**EXPERTS, "balance": "loss"}),
    "cp": ({"cp": 2, "dp_replicate": 2}, {"kv_heads": 2}),
    "fsdp+cp": ({"cp": 2, "shard": "parameters"}, {"kv_heads": 2}),
    "ring": ({"cp": 4, "cp_method": "ring"}, {"kv_heads": 2}),  # more ranks than heads of keys and values
    "fsdp+ring": ({"cp": 2, "cp_method": "ring", "shard": "parameters"}, {"kv_heads": 2}),
}
CHECKPOINTING = {"fsdp+ep": "selective", "fsdp+ring": "selective"}
COMPILED = {"ep+cp, auxiliary loss", "ring"}
IN_BF16 = {case for case in CASES if "ring" in case and DEVICE.type == "cuda"}
"""Cases that a GPU does in bf16 only."""


def within(case: str) -> float:
    """Relative difference of a mesh that rounding explains."""
    return 2e-2 if case in IN_BF16 else 1e-4


def contract(case: str) -> Contract:
    plain = dense()
    inner = plain.inner.model_copy(update={"precision": "bf16"}) if case in IN_BF16 else plain.inner
    return plain.model_copy(update={"model": plain.model.model_copy(update=CASES[case][1]), "inner": inner})


def site(root: Path, case: str = "") -> Site:
    device = {"kind": DEVICE.type, "checkpointing": CHECKPOINTING.get(case, "none"), "compile": case in COMPILED}
    mesh = CASES[case][0] if case else {}
    return Site.model_validate({"mesh": mesh, "device": device, "data": {"root": str(root)}})


def lead(root: Path, island: Island) -> dict[str, dict[str, float]]:
    """All cases, on every rank. After its steps each goes on from one rank's checkpoint, and one rank from its."""
    found = {}
    alone: dict[str, tuple[Run, State, float]] = {}
    for case, (_, model) in CASES.items():
        key = json.dumps([model, case in IN_BF16])
        if key not in alone:
            one = Run(contract(case), site(root), Island(0, 1, DEVICE))
            one.train(STEPS)
            alone[key] = one, one.state(root / f"alone-{len(alone)}"), one.heldout()
        one, expected, expected_heldout = alone[key]
        run = Run(contract(case), site(root, case), island)
        run.train(STEPS)
        weights = run.weights()
        found[case] = {
            "losses": furthest(run.losses, expected.losses),
            "weights": max((weights[name] - value).abs().max().item() for name, value in expected.weights.items()),
            "heldout": run.heldout() / expected_heldout - 1,
            "share": share_of_experts(run),
        }
        one.train(STEPS + 2 - len(one.losses))
        heir, reached = Run(contract(case), site(root), Island(0, 1, DEVICE)), run.state(root / f"mesh-{len(found)}")
        for name, each, state in (("resumed", run, expected), ("onto one rank", heir, reached)):
            each.take(state)
            each.train(2)
            found[case][name] = furthest(each.losses, one.losses)
    return found


def share_of_experts(run: Run) -> float:
    """How much of all experts this rank holds."""
    stacks = [value for name, value in run.model.model.named_parameters() if ".experts." in name]
    return sum(value.to_local().numel() for value in stacks) / max(sum(value.numel() for value in stacks), 1)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    root = tmp_path_factory.mktemp("experts")
    return found_by(lead, root)


@pytest.mark.parametrize("case", CASES)
def test_a_mesh_trains_as_one_process_does(case: str, found: dict[str, dict[str, float]]) -> None:
    assert found[case]["losses"] < within(case)
    assert found[case]["weights"] < within(case)
    assert abs(found[case]["heldout"]) < within(case)
    assert found[case]["resumed"] < within(case)
    assert found[case]["onto one rank"] < within(case)


def test_a_rank_holds_its_experts_only(found: dict[str, dict[str, float]]) -> None:
    shares = {case: one["share"] for case, one in found.items() if one["share"]}
    assert shares == {"ep": 1 / 4, "fsdp+ep": 1 / 4, "ep+cp, auxiliary loss": 1 / 4}
