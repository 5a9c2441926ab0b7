"""A pipeline of stages is what one process is, on the same rows: every schedule, and with every other dimension.

As in test_parallel: one group of processes does all cases.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from diloco.config.contract import Contract
from diloco.config.site import Site
from diloco.island import Island
from tests.test_experts import EXPERTS
from tests.test_parallel import DEVICE, STEPS, Run, State, found_by, furthest
from tests.test_parallel import contract as small

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pipeline")]  # one worker makes the fixture, once


class Case(NamedTuple):
    mesh: dict[str, Any]
    model: dict[str, Any]
    """Settings that differ from the common ones."""
    steps: int = STEPS
    checkpointing: str = "none"


UNTIED = {"tied": False}
AUXILIARY = {**EXPERTS, "balance": "loss"}
CASES = {
    "fsdp+tp": Case({"shard": "parameters", "tp": 2}, {}, 1),  # no pipeline: the next one goes on from its state
    "pp+tp": Case({"pp": 2, "tp": 2, "micro_batches": 2, "schedule": "zero-bubble"}, {}, 3),
    "pp+fsdp": Case({"pp": 2, "shard": "parameters"}, {}),
    "gpipe": Case({"pp": 4, "schedule": "gpipe"}, {}),
    "pp+ddp, interleaved": Case({"pp": 2, "schedule": "interleaved-1f1b", "micro_batches": 2}, {}),
    "pp+zero-2, zero bubble": Case({"pp": 2, "shard": "gradients", "schedule": "zero-bubble"}, {}),
    "pp+cp": Case({"pp": 2, "cp": 2, "micro_batches": 2}, UNTIED, 2, "selective"),
    "pp+fsdp, zbv": Case({"pp": 2, "schedule": "zbv", "shard": "parameters"}, UNTIED),
    "pp+ep": Case({"pp": 2, "ep": 2, "micro_batches": 2}, EXPERTS, 2, "full"),
    "pp+ep, zero bubble": Case({"pp": 2, "ep": 2, "schedule": "zero-bubble"}, AUXILIARY, 2),
}


def contract(case: str, cases: Mapping[str, Case] = CASES) -> Contract:
    """Five layers: stages of different lengths."""
    plain = small()
    return plain.model_copy(update={"model": plain.model.model_copy(update={"layers": 5, **cases[case].model})})


def site(root: Path, case: str | None = None, cases: Mapping[str, Case] = CASES) -> Site:
    """Site of a case, or of one process."""
    mesh, checkpointing = (cases[case].mesh, cases[case].checkpointing) if case else ({}, "none")
    device = {"kind": DEVICE.type, "checkpointing": checkpointing}
    return Site.model_validate({"mesh": mesh, "device": device, "data": {"root": str(root)}})


class One:
    """One process, and where it was after some steps."""

    def __init__(self, case: str, root: Path) -> None:
        self.run = Run(contract(case), site(root), Island(0, 1, DEVICE))
        self.known: dict[int, tuple[dict[str, Tensor], float]] = {}

    def losses(self, steps: int) -> list[float]:
        self.run.train(max(0, steps - len(self.run.losses)))
        return self.run.losses[:steps]

    def after(self, steps: int) -> tuple[dict[str, Tensor], float]:
        """Weights and held-out loss. Asked again: for as many steps, or for more than `losses` was."""
        if steps not in self.known:
            assert len(self.losses(steps)) == len(self.run.losses), "it is further already"
            self.known[steps] = self.run.weights(), self.run.heldout()
        return self.known[steps]


def lead(root: Path, island: Island) -> dict[str, dict[str, float]]:
    """All cases, on every rank. After its steps one process goes on from each state, and the next mesh, too."""
    found = {}
    alone: dict[str, One] = {}
    before: dict[str, State] = {}
    for case, (_, model, steps, _) in CASES.items():
        key = json.dumps(model)
        one = alone.setdefault(key, One(case, root))
        weights, expected_heldout = one.after(steps)
        run = Run(contract(case), site(root, case), island)
        run.train(steps)
        reached = run.state(root / case)
        found[case] = {
            "losses": furthest(run.losses, one.losses(steps)),
            "weights": max((reached.weights[name] - value).abs().max().item() for name, value in weights.items()),
            "held out": run.heldout() / expected_heldout - 1,
            "onto one process": gone_on(Run(contract(case), site(root), Island(0, 1, DEVICE)), reached, one),
            "from another mesh": gone_on(run, before[key], one) if key in before else 0.0,
        }
        before[key] = reached
    return found


def gone_on(run: Run, state: State, one: One) -> float:
    run.take(state)
    run.train(2)
    return furthest(run.losses, one.losses(len(run.losses)))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    root = tmp_path_factory.mktemp("pipeline")
    return found_by(lead, root)


@pytest.mark.parametrize("case", CASES)
def test_a_pipeline_trains_as_one_process_does(case: str, found: dict[str, dict[str, float]]) -> None:
    assert max(abs(value) for value in found[case].values()) < 1e-4, found[case]


THREE = {"pp+fsdp+tp": Case({"pp": 2, "shard": "parameters", "tp": 2, "micro_batches": 2}, {"layers": 2})}
"""Three dimensions, two ranks along each. Two layers: eight processes are slow on two cores."""


def lead_three(root: Path, island: Island) -> dict[str, dict[str, float]]:
    """Eight ranks beside one process."""
    (case,) = THREE
    one = Run(contract(case, THREE), site(root), Island(0, 1, DEVICE))
    one.train(STEPS)
    run = Run(contract(case, THREE), site(root, case, THREE), island)
    run.train(STEPS)
    expected, found = one.weights(), run.weights()
    far = max((found[name] - value).abs().max().item() for name, value in expected.items())
    return {case: {"losses": furthest(run.losses, one.losses), "weights": far}}


def test_eight_ranks_along_three_dimensions(tmp_path: Path) -> None:
    found = found_by(lead_three, tmp_path, 8)
    assert max(found["pp+fsdp+tp"].values()) < 1e-4, found
