"""The mesh of an island: sizes that come out even, who sits where, and errors that name the number to change."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from diloco.base.errors import ConfigError, UsageError
from diloco.config.contract import Contract, ModelSection
from diloco.config.load import load_site
from diloco.config.site import MeshSection, Site
from diloco.island import given_ranks
from diloco.island.mesh import (
    DATA_DIMENSIONS,
    DIMENSIONS,
    Mesh,
    check,
    check_device,
    cut,
    home_of,
    layer_costs,
    sizes_of,
    stages_of,
)
from diloco.island.pipeline import SCHEDULES
from tests.peers import DEADLINE_S

CONTRACT = Contract.model_validate(
    {
        "run": {"name": "mesh", "total_tokens": 1},
        "model": {"dim": 96, "heads": 6, "kv_heads": 2, "ffn_dim": 64},
        "inner": {"batch_size": 4},
        "data": {"sequence_length": 64},
    }
)


def section(**keys: Any) -> MeshSection:
    return MeshSection.model_validate(keys)


@pytest.mark.parametrize(
    ("keys", "ranks", "expected"),
    [
        ({}, 1, {}),
        ({}, 4, {"dp_replicate": 4}),  # nothing is divided: copies
        ({"shard": "parameters"}, 4, {"dp_shard": 4}),
        ({"shard": "parameters", "tp": 2}, 8, {"dp_shard": 4, "tp": 2}),
        ({"shard": "optimizer", "dp_replicate": 2}, 4, {"dp_replicate": 2, "dp_shard": 2}),
        ({"shard": "gradients", "dp_replicate": -1, "dp_shard": 2}, 6, {"dp_replicate": 3, "dp_shard": 2}),
        ({"tp": -1, "dp_shard": 1}, 4, {"tp": 4}),
        ({"tp": 2}, 4, {"dp_replicate": 2, "tp": 2}),
        ({"ep": 2, "cp": 2}, 8, {"dp_replicate": 2, "ep": 2, "cp": 2}),
        ({"ep": -1, "dp_shard": 2, "shard": "parameters"}, 8, {"dp_shard": 2, "ep": 4}),
        ({"pp": 2, "tp": 2, "shard": "optimizer"}, 8, {"pp": 2, "dp_shard": 2, "tp": 2}),
    ],
)
def test_what_is_left_goes_to_one_dimension(keys: dict[str, Any], ranks: int, expected: dict[str, int]) -> None:
    assert sizes_of(section(**keys), ranks) == dict.fromkeys(DIMENSIONS, 1) | expected


@pytest.mark.parametrize(
    ("keys", "ranks", "cause", "fix"),
    [
        ({"tp": 3}, 4, "tp (3) is 3, which does not divide the island's 4 ranks", "multiple of 3"),
        ({"dp_shard": 2, "shard": "parameters"}, 4, "is 2 ranks, but the island has 4", "start 2 ranks"),
    ],
)
def test_sizes_that_do_not_come_out_are_refused(keys: dict[str, Any], ranks: int, cause: str, fix: str) -> None:
    with pytest.raises(ConfigError) as raised:
        sizes_of(section(**keys), ranks)
    assert cause in raised.value.cause
    assert fix in raised.value.fix


@pytest.mark.parametrize(
    ("override", "cause"),
    [
        ("mesh.tp=0", "tp is 0"),
        ("mesh.tp=-1", "dp_shard and tp are both -1"),
        ("mesh.dp_shard=2", "shard 'none' divides nothing"),
    ],
)
def test_a_mesh_that_makes_no_sense_is_refused_when_it_is_read(override: str, cause: str) -> None:
    with pytest.raises(ConfigError, match="mesh") as raised:
        load_site(None, [override])
    assert cause in raised.value.cause


@pytest.mark.parametrize(
    ("keys", "ranks", "per_node", "cause", "fix"),
    [
        ({}, 8, 8, "inner.batch_size (4) does not divide by 8", "mesh.tp"),
        ({"micro_batches": 4}, 2, 2, "mesh.micro_batches (4) does not divide the 2 sequences", "divisor of 2"),
        ({"tp": 4}, 4, 4, "mesh.tp (4) does not divide model.heads (6)", "one of 1, 2"),
        ({"tp": 3}, 3, 3, "mesh.tp (3) does not divide model.kv_heads (2)", "one of 1, 2"),
        ({"tp": 2}, 4, 1, "does not divide the 1 ranks of a node", "lower mesh.tp"),
        ({"cp": 4}, 4, 4, "mesh.cp (4) does not divide model.heads (6)", "one of 1, 2"),
        ({"cp": 3}, 3, 3, "mesh.cp (3) does not divide model.kv_heads (2)", "one of 1, 2"),
        ({"cp": 2, "tp": 2}, 4, 4, "mesh.tp (2) does not go with mesh.cp (2)", "set one of them to 1"),
        ({"ep": 2}, 2, 2, "mesh.ep (2) divides experts, and this model has none", "set mesh.ep = 1"),
    ],
)
def test_a_model_that_cannot_be_divided_so_is_refused(
    keys: dict[str, Any], ranks: int, per_node: int, cause: str, fix: str
) -> None:
    mesh = section(**keys)
    with pytest.raises(ConfigError) as raised:
        check(sizes_of(mesh, ranks), Site(mesh=mesh), CONTRACT, per_node)
    assert cause in raised.value.cause
    assert fix in raised.value.fix


@pytest.mark.parametrize(
    ("keys", "ranks", "cause", "fix"),
    [
        ({"ep": 4}, 4, "mesh.ep (4) does not divide model.experts (6)", "one of 1, 2, 3, 6"),
        ({"tp": 2}, 2, "mesh.tp (2) does not go with a mixture of experts", "mesh.ep"),
        ({"ep": 1, "shard": "parameters"}, 8, "inner.batch_size (4) does not divide by 8", ""),
        (
            {"ep": 2, "cp": 2, "dp_replicate": 1, "dp_shard": 1, "shard": "optimizer"},
            4,
            "width of an expert (25)",
            "lower",
        ),
    ],
)
def test_experts_that_cannot_be_divided_so_are_refused(keys: dict[str, Any], ranks: int, cause: str, fix: str) -> None:
    model = CONTRACT.model.model_copy(update={"experts": 6, "expert_dim": 25})
    mesh = section(**keys)
    with pytest.raises(ConfigError) as raised:
        check(sizes_of(mesh, ranks), Site(mesh=mesh), CONTRACT.model_copy(update={"model": model}), ranks)
    assert cause in raised.value.cause
    assert fix in raised.value.fix


@pytest.mark.parametrize(
    ("mesh", "device", "cause"),
    [
        ({"async_tp": True}, {"compile": True}, "mesh.async_tp is for mesh.tp > 1"),
        ({"tp": 2, "async_tp": True}, {}, "mesh.async_tp is done by the compiler"),
        ({"tp": 2, "async_tp": True, "sequence_parallel": False}, {"compile": True}, "for norms along the sequence"),
    ],
)
def test_asynchronous_tensor_parallelism_needs_a_compiler(
    mesh: dict[str, Any], device: dict[str, Any], cause: str
) -> None:
    site = Site.model_validate({"mesh": mesh, "device": device})
    with pytest.raises(ConfigError, match=cause):
        check(sizes_of(site.mesh, 2), site, CONTRACT, 2)


def test_a_ring_wants_chunks_of_equal_length_and_no_number_of_heads() -> None:
    mesh = section(cp=4, cp_method="ring", shard="parameters", dp_shard=1)
    check(sizes_of(mesh, 4), Site(mesh=mesh), CONTRACT, 4)  # 6 heads, 2 of them of keys and values
    crooked = CONTRACT.model_copy(update={"data": CONTRACT.data.model_copy(update={"sequence_length": 60})})
    with pytest.raises(ConfigError, match=r"2 x mesh.cp \(8\) chunks, and 60 does not divide"):
        check(sizes_of(mesh, 4), Site(mesh=mesh), crooked, 4)


@pytest.mark.parametrize(
    ("mesh", "precision", "kind", "cause"),
    [
        ({"offload": True, "shard": "parameters"}, "bf16", "cpu", "mesh.offload"),
        ({"tp": 2, "async_tp": True}, "bf16", "cpu", "mesh.async_tp overlaps what GPUs send"),
        ({"cp": 2, "cp_method": "ring"}, "fp32", "cuda", "which is for inner.precision 'bf16'"),
    ],
)
def test_what_a_device_cannot_do_is_refused_by_name(
    mesh: dict[str, Any], precision: str, kind: str, cause: str
) -> None:
    agreed = CONTRACT.model_copy(update={"inner": CONTRACT.inner.model_copy(update={"precision": precision})})
    with pytest.raises(ConfigError, match=cause):
        check_device(Site(mesh=section(**mesh)), agreed, kind)
    check_device(Site(), agreed, kind)


@pytest.mark.parametrize(
    ("mesh", "device", "model", "accumulation", "cause", "fix"),
    [
        (
            {"pp": 6},
            {},
            {},
            8,
            "mesh.pp (6) under mesh.schedule '1f1b' makes 6 stages, and model.layers is 4",
            "most 4",
        ),
        ({"pp": 4, "schedule": "zero-bubble"}, {}, {}, 8, "makes 8 stages, and model.layers is 4", "at most 2"),
        ({"pp": 2, "schedule": "interleaved-1f1b", "chunks": 3}, {}, {}, 8, "makes 6 stages", '"1f1b"'),
        ({"pp": 4}, {}, {}, 2, "keeps mesh.pp (4) micro-batches on their way, and inner", "most 2"),
        ({"pp": 2, "schedule": "zero-bubble"}, {}, {}, 3, "a multiple of mesh.pp (2) micro-batches", '"1f1b"'),
        ({"pp": 2, "schedule": "interleaved-1f1b"}, {}, {}, 3, "a multiple of mesh.pp (2)", "mesh.micro_batches"),
        ({"pp": 2, "schedule": "zbv"}, {}, {}, 4, "model.tied = false", '"zero-bubble"'),
        ({"pp": 2, "schedule": "zbv", "chunks": 3}, {}, {"tied": False, "layers": 6}, 4, "not 3", "mesh.chunks"),
        ({"pp": 2, "schedule": "zero-bubble"}, {"compile": True}, {}, 4, "splits the backward pass", '"1f1b"'),
        ({"pp": 2, "schedule": "zero-bubble"}, {"checkpointing": "full"}, {}, 4, "splits the backward", '"1f1b"'),
        ({"pp": 2, "shard": "optimizer", "offload": True}, {}, {}, 4, "mesh.offload does not go with mesh.pp", "leave"),
    ],
)
def test_a_pipeline_that_cannot_run_is_refused(
    mesh: dict[str, Any], device: dict[str, Any], model: dict[str, Any], accumulation: int, cause: str, fix: str
) -> None:
    site = Site.model_validate({"mesh": mesh, "device": device})
    inner = CONTRACT.inner.model_copy(update={"accumulation": accumulation})
    sections = {"inner": inner, "model": CONTRACT.model.model_copy(update=model)}
    with pytest.raises(ConfigError) as raised:
        check(sizes_of(site.mesh, site.mesh.pp), site, CONTRACT.model_copy(update=sections), 8)
    assert cause in raised.value.cause
    assert fix in raised.value.fix


@pytest.mark.parametrize("keys", [{"shard": "parameters"}, {"pp": 2}])
def test_another_model_than_ours_is_not_divided(keys: dict[str, Any]) -> None:
    model = CONTRACT.model.model_copy(update={"kind": "hf", "hf_config": "there"})
    mesh = section(**keys)
    with pytest.raises(ConfigError, match="'hf' cannot be divided"):
        check(sizes_of(mesh, 2), Site(mesh=mesh), CONTRACT.model_copy(update={"model": model}), 2)


def test_ranks_of_one_tensor_parallel_group_are_neighbours_and_share_their_rows() -> None:
    sizes = {"dp_replicate": 2, "dp_shard": 3, "tp": 4}
    meshes = [Mesh(sizes, rank) for rank in range(24)]
    assert [mesh.place("tp") for mesh in meshes[:5]] == [0, 1, 2, 3, 0]
    assert [mesh.place("dp_replicate", "dp_shard") for mesh in meshes] == [rank // 4 for rank in range(24)]
    assert meshes[0].size("dp_replicate", "dp_shard") == 6


def test_stages_are_further_from_each_other_than_what_divides_them() -> None:
    sizes = sizes_of(section(pp=2, tp=2, dp_replicate=2, shard="parameters"), 16)
    assert [Mesh(sizes, rank).place("pp") for rank in range(16)] == 2 * (4 * [0] + 4 * [1])
    assert [Mesh(sizes, rank).place("tp") for rank in range(4)] == [0, 1, 0, 1]
    rows = [Mesh(sizes, rank).place(*DATA_DIMENSIONS) for rank in range(16)]
    assert rows[:8] == [0, 0, 1, 1, 0, 0, 1, 1]  # the stages of one copy see the same
    assert rows[8:] == [2, 2, 3, 3, 2, 2, 3, 3]


# ---------------------------------------------------------------- stages


@pytest.mark.parametrize(
    ("costs", "pieces", "expected"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([1, 1, 1, 1, 1], 2, [3, 2]),
        ([1, 1, 1, 1, 3], 2, [4, 1]),  # a large vocabulary: the last stage has the head
        ([1, 1, 1, 1, 3], 3, [2, 2, 1]),
        ([5, 1, 1, 1, 1, 1], 3, [1, 3, 2]),
        ([1, 1, 1], 3, [1, 1, 1]),
        ([1, 1, 9], 1, [3]),
    ],
)
def test_stages_are_equally_costly(costs: list[float], pieces: int, expected: list[int]) -> None:
    found = cut(costs, pieces)
    assert [len(piece) for piece in found] == expected
    assert [layer for piece in found for layer in piece] == list(range(len(costs)))


def test_no_cut_has_a_cheaper_worst_stage() -> None:
    generator = random.Random(1)
    for _ in range(50):
        costs = [float(generator.randint(1, 9)) for _ in range(8)]
        every = [(0, *ends, 8) for ends in combinations(range(1, 8), 3)]
        least = min(max(sum(costs[a:b]) for a, b in pairwise(ends)) for ends in every)
        assert max(sum(costs[layer] for layer in piece) for piece in cut(costs, 4)) == least


def test_what_a_layer_costs() -> None:
    """A block's matrices, attention over half of the sequence, and the vocabulary once, in the head."""
    model = ModelSection(layers=3, dim=8, heads=2, kv_heads=1, ffn_dim=16, qk_norm=False)
    block = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16 + 2 * 8 * 10 / 2
    assert layer_costs(model, 100, 10) == [block + 8, block, block + 800]
    experts = model.model_copy(update={"experts": 4, "experts_per_token": 2, "shared_experts": 1, "expert_dim": 16})
    assert layer_costs(experts, 100, 10)[1] == block + 2 * 3 * 8 * 16 + 8 * 4


def test_which_stages_a_rank_has() -> None:
    places = {name: [stages_of(place, section(schedule=name), 3) for place in range(3)] for name in SCHEDULES}
    assert places["gpipe"] == places["1f1b"] == [[0], [1], [2]]
    assert places["interleaved-1f1b"] == places["zero-bubble"] == [[0, 3], [1, 4], [2, 5]]
    assert places["zbv"] == [[0, 5], [1, 4], [2, 3]]
    assert stages_of(1, section(schedule="interleaved-1f1b", chunks=3), 2) == [1, 3, 5]
    for name, by_place in places.items():
        for place, stages in enumerate(by_place):
            assert {home_of(stage, section(schedule=name), 3) for stage in stages} == {place}


@pytest.mark.parametrize("keys", [{"shard": "optimizer"}, {"pp": 2}])
def test_muon_needs_whole_matrices(keys: dict[str, Any]) -> None:
    mesh = section(**keys)
    muon = CONTRACT.inner.model_copy(update={"optimizer": "muon"})
    with pytest.raises(ConfigError, match="'muon' makes whole matrices orthogonal"):
        check(sizes_of(mesh, 2), Site(mesh=mesh), CONTRACT.model_copy(update={"inner": muon}), 2)


# ---------------------------------------------------------------- who started us

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}


@pytest.mark.parametrize("variables", [TORCHRUN, SRUN])
def test_ranks_are_taken_as_they_are_given(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, *SRUN):
        monkeypatch.delenv(name, raising=False)
    assert given_ranks() is None
    monkeypatch.setenv("SLURM_NTASKS", "8")  # a batch script has it, too, and is not a rank
    assert given_ranks() is None
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert given_ranks() == (5, 8, 1, 4)


def test_half_of_torchrun_s_variables_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match="RANK"):
        given_ranks()


SYMMETRIC = """
import torch
import torch.distributed as dist
from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group
from torch.distributed.device_mesh import init_device_mesh
from diloco.island.parallel import overlap_with_products

dist.init_process_group("gloo", init_method="file://{}", rank=0, world_size=1)
tp = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
overlap_with_products(tp)
assert is_symm_mem_enabled_for_group(tp.get_group().group_name) and torch._inductor.config._micro_pipeline_tp
"""


@pytest.mark.slow
def test_this_torch_has_what_asynchronous_tensor_parallelism_switches_on(tmp_path: Path) -> None:
    code = SYMMETRIC.format(tmp_path / "meeting")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    assert run.returncode == 0, run.stderr
    assert "FutureWarning" not in run.stderr
