"""What ranks of an island do together is what one process does: every mesh against one rank, on the same rows.

One group of four processes does all cases, each the same calls, as a trainer does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from diloco.config.contract import Contract
from diloco.config.site import Site
from diloco.inner.rank_model import RankModel
from diloco.island import Island
from diloco.island.slices import whole_slices
from diloco.outer.fragments import Layout, write_fragment
from diloco.storage.checkpoint import Checkpoint, load
from diloco.storage.saving import Saver
from tests.warm import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("parallel")]  # one worker makes the fixture, once

STEPS, RANKS, VOCABULARY = 8, 4, 256
DEVICE = torch.device(os.environ.get("DILOCO_TEST_DEVICE", "cpu"))
"""Device of the ranks; `scripts/gpu-check` runs these tests with "cuda", where gradients go over NCCL."""
CASES: dict[str, dict[str, Any]] = {
    "fsdp+tp": {"shard": "parameters", "tp": 2},
    "ddp": {},
    "zero-1": {"shard": "optimizer"},
    "zero-2": {"shard": "gradients"},
    "zero-3": {"shard": "parameters"},
    "hsdp": {"shard": "parameters", "dp_replicate": 2},
    "tp": {"tp": 2, "sequence_parallel": False},
    "tp+sp": {"tp": 4},
    **({"offload": {"shard": "parameters", "offload": True}} if DEVICE.type == "cuda" else {}),
}
CHECKPOINTING = {"zero-1": "full", "fsdp+tp": "selective"}
COMPILED = {"fsdp+tp"}
Lead = Callable[[Path, Island], dict[str, dict[str, float]]]


def contract() -> Contract:
    return Contract.model_validate(
        {
            "run": {"name": "parallel", "total_tokens": 10**6},
            "data": {"source": "text", "paths": ("text.txt",), "sequence_length": 16},
            "model": {"layers": 1, "dim": 32, "heads": 4, "ffn_dim": 64, "vocab_size": 257},  # which no mesh divides
            "inner": {"batch_size": 4, "accumulation": 2, "lr": 1e-3, "warmup": 0.0, "clip": 0.5},
            "eval": {"sequences": 4},
        }
    )


def rows(step: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (8, 17), generator=torch.Generator().manual_seed(step))


class State(NamedTuple):
    weights: dict[str, Tensor]
    checkpoint: Checkpoint
    """Of weights and inner side, read from the disk."""
    losses: list[float]


class Run:
    """Some steps on one mesh, from the same weights and on the same rows as on any other."""

    def __init__(self, contract: Contract, site: Site, island: Island) -> None:
        self.model, self.island = RankModel(contract, site, island), island
        self.losses: list[float] = []
        self._saver = Saver(island)
        self._layout = Layout.agreed(self.model.weights.shapes, contract).on_lane(island.rank, 1)

    def train(self, steps: int) -> None:
        for step in range(len(self.losses), len(self.losses) + steps):
            block = rows(step) if self.island.leads else None
            self.losses.append(self.model.step(block, 10_000 + step))

    def weights(self) -> dict[str, Tensor]:
        """All of them on rank 0, and zeros on the others."""
        whole = {name: torch.zeros(shape) for name, shape in self.model.weights.shapes}
        for fragment in self._layout.fragments:
            flat = self.model.weights.read(fragment)
            if self.island.leads:
                write_fragment(whole, fragment, flat)
        return whole

    def heldout(self) -> float:
        """Loss of the local weights on the held-out sequences."""
        return self.model.evaluate()

    def state(self, folder: Path) -> State:
        """A checkpoint, after two others: what one rank holds has changed, and changed back."""
        folder = folder if self.island.size > 1 else folder / str(os.getpid())
        for group in ({}, {"own": whole_slices({"0/momentum": torch.zeros(5000)})}):
            self._save(folder, 1, group)
        self._save(folder, len(self.losses), {})
        self.island.all(True)  # or the last is not there yet
        return State(self.weights(), load(folder), list(self.losses))

    def _save(self, folder: Path, version: int, group: dict[str, Any]) -> None:
        live, (kept, numbers) = self.model.live(local=True), self.model.kept()
        if self.island.leads:
            self._saver.save(folder, version, {**kept, **group}, live, numbers, 1).result()
        else:
            self._saver.save_part({}, live)
            self._saver.finish()

    def take(self, state: State) -> None:
        """Go on where another stood."""
        self.model.restore(lambda: state.checkpoint)
        self.losses = list(state.losses)


def case_site(case: str, root: Path) -> Site:
    device = {"kind": DEVICE.type, "checkpointing": CHECKPOINTING.get(case, "none"), "compile": case in COMPILED}
    return Site.model_validate({"mesh": CASES[case], "device": device, "data": {"root": str(root)}})


def furthest(losses: list[float], expected: list[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))


def lead(root: Path, island: Island) -> dict[str, dict[str, float]]:
    """All cases, on every rank. After its steps, one rank goes on from each mesh's checkpoint, and each mesh from one
    rank's and from that of the mesh before it."""
    plain = Site.model_validate({"data": {"root": str(root)}, "device": {"kind": DEVICE.type}})
    alone = Run(contract(), plain, Island(0, 1, DEVICE))
    alone.train(STEPS)
    expected = before = alone.state(root / "alone")
    alone.train(2)
    found = {}
    for case in CASES:
        run = Run(contract(), case_site(case, root), island)
        run.train(STEPS)
        reached = run.state(root / case)
        weights = max((reached.weights[name] - value).abs().max().item() for name, value in expected.weights.items())
        found[case] = {"losses": furthest(run.losses, expected.losses), "weights": weights, **on_disk(reached)}
        heir = Run(contract(), plain, Island(0, 1, DEVICE))
        resumed = {"onto one rank": (heir, reached), "from one rank": (run, expected), "across": (run, before)}
        for name, (each, state) in resumed.items():
            each.take(state)
            each.train(2)
            found[case][name] = furthest(each.losses, alone.losses)
        before = reached
    return found


def on_disk(state: State) -> dict[str, float]:
    """How far the weights in the files are from those that training goes on with, the files' bytes for each that all
    tensors have, and the largest share that one rank has written."""
    groups, path = state.checkpoint.groups, state.checkpoint.path
    apart = max((groups["local"][name] - value).abs().max().item() for name, value in state.weights.items())
    own = {rank: sum(file.stat().st_size for file in path.glob(f"*.{rank}.safetensors")) for rank in range(1, RANKS)}
    own[0] = sum((path / f"{group}.safetensors").stat().st_size for group in ("inner", "local"))
    tensors = sum(tensor.nbytes for group in ("inner", "local") for tensor in groups[group].values())
    return {"apart": apart, "written": sum(own.values()) / tensors, "largest": max(own.values()) / sum(own.values())}


def device_of(place: int, ranks: int) -> torch.device:
    """Device of a rank. Where GPUs are fewer, ranks share one as hosts of their own: NCCL refuses two of one host."""
    if DEVICE.type != "cuda":
        return DEVICE
    gpus = torch.cuda.device_count()
    if gpus < ranks:
        os.environ["NCCL_HOSTID"] = str(place)
    device = torch.device("cuda", place % gpus)
    torch.cuda.set_device(device)
    return device


def live(place: int, root: Path, meeting: str, lead: Lead, ranks: int) -> None:
    """One of the processes; rank 0 writes down what it found."""
    # What a compiler is given is what may not go together; the code that it makes of it takes a minute more.
    nn.Module.compile = partialmethod(nn.Module.compile, backend="aot_eager")  # type: ignore[method-assign]
    island = Island.at(place, ranks, device_of(place, ranks), rendezvous=meeting)
    found = lead(root, island)
    if island.leads:
        (root / "found.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def found_by(lead: Lead, root: Path, ranks: int = RANKS) -> dict[str, dict[str, float]]:
    """What rank 0 of one group of processes found, by case."""
    (root / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 400)
    run_ranks(live, ranks, root, f"file://{root / 'meeting'}", lead, ranks)
    found: dict[str, dict[str, float]] = json.loads((root / "found.json").read_text())
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    root = tmp_path_factory.mktemp("parallel")
    return found_by(lead, root)


@pytest.mark.parametrize("case", CASES)
def test_a_mesh_trains_as_one_process_does(case: str, found: dict[str, dict[str, float]]) -> None:
    assert found[case]["losses"] < 1e-4
    assert found[case]["weights"] < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_every_element_is_written_by_one_rank(case: str, found: dict[str, dict[str, float]]) -> None:
    assert found[case]["apart"] == 0
    assert 1 < found[case]["written"] < 1.2  # headers
    assert found[case]["largest"] < 0.35


@pytest.mark.parametrize("case", CASES)
def test_a_state_is_gone_on_with_on_another_mesh(case: str, found: dict[str, dict[str, float]]) -> None:
    assert found[case]["onto one rank"] < 1e-4
    assert found[case]["from one rank"] < 1e-4
    assert found[case]["across"] < 1e-4
