"""A pipeline of stages is what one process is, on the same rows: every schedule, and with every other dimension.

As in test_parallel: one group of four processes does all cases.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diloco.config import Contract, Site
from diloco.island import Island
from tests.test_experts import EXPERTS, heldout
from tests.test_parallel import CPU, STEPS, Run, State, found_by, furthest
from tests.test_parallel import contract as small

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pipeline")]

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # [mesh], and what is different in [model]
    "gpipe": ({"pp": 4, "schedule": "gpipe"}, {}),
    "1f1b x ddp": ({"pp": 2, "schedule": "1f1b"}, {}),
    "1f1b x fsdp": ({"pp": 2, "shard": "parameters"}, {}),
    "untied": ({"pp": 4, "schedule": "1f1b"}, {"tied": False}),
    "interleaved": ({"pp": 2, "schedule": "interleaved-1f1b", "shard": "optimizer"}, {}),
    "zero-bubble": ({"pp": 2, "schedule": "zero-bubble"}, {}),
    "zbv": ({"pp": 2, "schedule": "zbv", "shard": "parameters"}, {"tied": False}),
    "tp": ({"pp": 2, "tp": 2}, {}),
    "tp, zero-bubble": ({"pp": 2, "tp": 2, "schedule": "zero-bubble", "sequence_parallel": False}, {}),
    "cp": ({"pp": 2, "cp": 2, "schedule": "interleaved-1f1b"}, {}),
    "ep": ({"pp": 2, "ep": 2}, EXPERTS),
    "ep, auxiliary loss, zero-bubble": ({"pp": 2, "ep": 2, "schedule": "zero-bubble"}, {**EXPERTS, "balance": "loss"}),
}


def contract(case: str) -> Contract:
    plain = small()
    model = plain.model.model_copy(update={"layers": 4, **CASES[case][1]})
    inner = plain.inner.model_copy(update={"accumulation": 4, "batch_size": 2})
    return plain.model_copy(update={"model": model, "inner": inner})


def site(root: Path, **mesh: Any) -> Site:
    return Site.model_validate({"mesh": mesh, "device": {"kind": "cpu"}, "data": {"root": str(root)}})


def lead(root: Path, island: Island) -> dict[str, dict[str, float]]:
    found = {}
    alone: dict[str, tuple[Run, State, float]] = {}
    for case, (mesh, model) in CASES.items():
        key = str(model)
        if key not in alone:
            one = Run(contract(case), site(root), Island(0, 1, CPU))
            one.train(STEPS)
            alone[key] = one, one.state(), heldout(one)
        one, expected, expected_heldout = alone[key]
        run = Run(contract(case), site(root, **mesh), island)
        run.train(STEPS)
        reached = run.state()
        found[case] = {
            "losses": furthest(run.losses, expected.losses),
            "weights": max((reached.weights[n] - value).abs().max().item() for n, value in expected.weights.items()),
            "heldout": heldout(run) / expected_heldout - 1,
        }
        print(case, found[case], flush=True)
        heir = Run(contract(case), site(root), Island(0, 1, CPU))
        heir.take(reached)
        run.take(expected)
        one.train(STEPS + 2 - len(one.losses))
        for name, each in {"onto one rank": heir, "from one rank": run}.items():
            each.train(2)
            found[case][name] = furthest(each.losses, one.losses)
        island.dismiss()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    root = tmp_path_factory.mktemp("pipeline")
    return found_by(lead, [(contract(case), site(root, **mesh)) for case, (mesh, _) in CASES.items()], root)


@pytest.mark.parametrize("case", CASES)
def test_a_mesh_trains_as_one_process_does(case: str, found: dict[str, dict[str, float]]) -> None:
    assert max(abs(value) for value in found[case].values()) < 1e-4, found[case]
