"""`diloco plan` against the standard arithmetic: published formulas, our own model and codecs, a slower simulation."""

from __future__ import annotations

import json
import math
import random
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.base.errors import ConfigError, UsageError
from diloco.compress import open_codec
from diloco.config.codec import CodecChoice
from diloco.config.contract import Contract, ModelSection
from diloco.config.load import load_contract
from diloco.config.presets import PRESETS
from diloco.config.site import Site
from diloco.island.mesh import check, sizes_of
from diloco.models import build_model, count_parameters
from diloco.plan.answer import Plan, host_memory, make_plan, rank
from diloco.plan.cost import (
    PRECISIONS,
    Choice,
    Job,
    bubble_share,
    layer_activations,
    memory_of,
    model_flops,
    ring_share,
    step_of,
    zero_state,
)
from diloco.plan.hardware import (
    PLACED,
    Gpu,
    Hardware,
    MeshLayout,
    gpu_of,
    layouts,
    parse_bps,
    parse_layout,
    parse_seconds,
    path_of,
    problem,
)
from diloco.plan.model import Model, model_of_section, model_of_size
from diloco.plan.question import HardwareOptions, JobOptions, ModelOptions, WanOptions, question
from diloco.plan.text import plan_json, plan_text
from diloco.plan.timeline import (
    BUCKETS,
    GRID_GBIT_S,
    MODELS,
    PUBLISHED,
    UTILISATIONS,
    Sync,
    bandwidth_for,
    bandwidth_table,
    codec_bits,
    methods,
    nearest_on_grid,
    sync_of,
    utilisation,
)
from tests.peers import run_cli

CONFIGS = Path(__file__).parent.parent / "configs"
H100 = Hardware("h100", gpu_of("h100"), 8, 1, 400e9, 0.5)
GPT3 = Model("gpt3", 175 * 10**9, 0, 96, 12288, 96, 96, 4 * 12288, 51200, True)


USUAL: dict[str, Any] = {
    "params": None, "overrides": (), "experts": 0, "active": 1,
    "sequence": None, "batch": None, "tokens": None, "precision": None, "recompute": None, "micro_batch": None,
    "virtual_stages": 1, "layout": None,
    "gpu": "h100", "memory_gb": None, "tflops": None, "nvlink": None, "infiniband": "400Gbit/s", "gpus_per_node": 8,
    "nodes": 1, "mfu": 0.5, "step_time": None,
    "wan": "1Gbit/s", "latency": "0", "peers": None, "inner_steps": None,
}  # fmt: skip


def planned(model: str | None = "scaling-1.3b", **given: Any) -> Plan:
    """The plan for these options, as typed; all others as the command line has them."""
    texts = USUAL | {"model": model} | given
    assert set(texts) == set(USUAL) | {"model"}
    groups = [
        group(**{field.name: texts[field.name] for field in fields(group)})
        for group in (ModelOptions, JobOptions, HardwareOptions, WanOptions)
    ]
    return make_plan(question(*groups))


def with_experts(section: ModelSection, experts: int, active: int = 1) -> ModelSection:
    """In place of each feed-forward layer so many, each as wide."""
    sizes = {"experts": experts, "experts_per_token": active, "expert_dim": section.ffn_width}
    return section.model_copy(update=sizes)


def job_of(model: Model, batch: int = 64, sequence_length: int = 2048, precision: str = "mixed") -> Job:
    return Job(model, PRECISIONS[precision], sequence_length, batch)


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize("preset", PRESETS)
def test_sizes_are_those_of_the_model(preset: str) -> None:
    section = ModelSection.model_validate(dict(PRESETS[preset]))
    vocabulary = section.vocab_size or 256
    with torch.device("meta"):
        parameters = count_parameters(build_model(section, vocabulary, seed=1))
    assert model_of_section(preset, section, vocabulary).parameters == parameters


@pytest.mark.parametrize("parameters", [50_000_000, 150_000_000, 7 * 10**9, 70 * 10**9, 175 * 10**9, 10**12])
@pytest.mark.parametrize("experts", [0, 64])
def test_a_size_becomes_a_model_of_that_size(parameters: int, experts: int) -> None:
    model = model_of_size(parameters, experts, min(experts, 2) or 1)
    layers = model.layers * (model.shared_layer_parameters + model.expert_layer_parameters)
    assert layers + model.embedding_parameters * (1 if model.tied else 2) == pytest.approx(parameters)
    if not experts:  # the shape fits the size: attention 4 D^2, three matrices of the feed-forward layer
        of_shape = 4 * model.dim**2 + 3 * model.dim * model.ffn_dim
        assert model.shared_layer_parameters == pytest.approx(of_shape, rel=0.15)


def test_experts_that_idle_cost_memory_and_no_flops() -> None:
    section = ModelSection.model_validate(dict(PRESETS["scaling-1.3b"]))
    dense = model_of_section("dense", section, 32_768)
    mixture = model_of_section("mixture", with_experts(section, 8, 2), 32_768)
    feed_forward = 3 * dense.dim * dense.ffn_dim * dense.layers
    router = 8 * (dense.dim + 1) * dense.layers
    assert mixture.parameters == dense.parameters + 7 * feed_forward + router
    assert mixture.active_parameters == pytest.approx(dense.parameters + feed_forward + router)


# ---------------------------------------------------------------- memory


def test_zero_divides_what_the_paper_says() -> None:
    """7.5B parameters, 64 ranks, AdamW in mixed precision: 120, 31.4, 16.6 and 1.9 GB (arXiv 1910.02054, figure 1)."""
    sizes = [zero_state(7.5e9, PRECISIONS["mixed"], stage, 64).total / 1e9 for stage in range(4)]
    assert sizes == [pytest.approx(120, abs=0.1), pytest.approx(31.4, abs=0.1), pytest.approx(16.6, abs=0.1),
                     pytest.approx(1.9, abs=0.1)]  # fmt: skip


def test_70b_needs_1_12_tb() -> None:
    plan = planned(None, params="70B", nodes=16)
    tree = plan_json(plan)
    assert (tree["training"]["state_bytes"], tree["training"]["state_bytes_per_parameter"]) == (1.12e12, 16)
    ddp = next(row for row in tree["memory"] if row["stage"] == "DDP")
    kinds = [ddp[f"{kind}_bytes"] for kind in ("parameters", "gradients", "optimizer")]
    assert kinds == pytest.approx([140e9, 140e9, 840e9])
    zero3 = next(row for row in tree["memory"] if row["stage"] == "ZeRO-3")
    assert sum(zero3[f"{kind}_bytes"] for kind in ("parameters", "gradients", "optimizer")) == pytest.approx(
        1.12e12 / 128
    )


def test_activations_are_those_of_the_paper() -> None:
    """GPT-3: s b h (34 + 80); computing attention again saves 70 % (arXiv 2205.05198, section 5)."""
    job, one = job_of(GPT3), MeshLayout()
    unit = 2048 * 12288
    assert layer_activations(job, one, "none", 1) == pytest.approx(unit * (34 + 80))
    assert layer_activations(job, one, "selective", 3) == pytest.approx(3 * unit * 34)
    assert layer_activations(job, one, "full", 1) == pytest.approx(2 * unit)
    assert layer_activations(job, MeshLayout(tp=8), "none", 1) == pytest.approx(unit * 114 / 8)
    assert layer_activations(job, MeshLayout(cp=4), "none", 1) == pytest.approx(unit * 114 / 4)
    assert layer_activations(replace(job, precision=PRECISIONS["fp32"]), one, "full", 1) == pytest.approx(4 * unit)


def test_a_pipeline_keeps_the_activations_of_all_layers() -> None:
    """1F1B: P micro-batches of L / P layers each on the first stage, so that more stages do not save them."""
    job = replace(job_of(GPT3, batch=128))
    sizes = [memory_of(job, Choice(MeshLayout(pp=stages), 0, "selective", 1)) for stages in (2, 4, 8)]
    expected = 96 * layer_activations(job, MeshLayout(), "selective", 1)
    assert [memory.activations for memory in sizes] == pytest.approx([expected] * 3)
    assert sizes[2].state.total < 0.3 * sizes[0].state.total
    interleaved = memory_of(replace(job, virtual_stages=3), Choice(MeshLayout(pp=4), 0, "selective", 1))
    assert interleaved.activations == pytest.approx(expected * (1 + 3 / 12))  # arXiv 2205.05198: 1 + (p - 1) / (p m)
    assert (job.pieces(4), replace(job, virtual_stages=3).pieces(96)) == (1, 1)


# ---------------------------------------------------------------- time


def test_bubble() -> None:
    assert bubble_share(1, 5) == 0
    assert bubble_share(4, 12) == pytest.approx(3 / 15)
    assert bubble_share(8, 1) == pytest.approx(7 / 8)
    assert bubble_share(4, 12, virtual_stages=2) == pytest.approx(3 / 27)
    step = step_of(job_of(GPT3, batch=12), Choice(MeshLayout(pp=4), 0, "none", 1), replace(H100, gpus_per_node=4))
    assert step.bubble_s / (step.bubble_s + step.compute_s) == pytest.approx(3 / 15)


def test_collectives_send_what_rings_do() -> None:
    assert [ring_share(ranks) for ranks in (1, 2, 8)] == [0, 1, 1.75]
    model = model_of_size(7 * 10**9)
    job, weights = job_of(model, batch=8), 2 * model.parameters
    sent = {
        stage: sum(
            part.sent_bytes for part in step_of(job, Choice(MeshLayout(dp_shard=8), stage, "none", 1), H100).collectives
        )
        for stage in range(4)
    }
    assert sent[0] == sent[1] == sent[2] == pytest.approx(1.75 * weights)
    assert sent[3] == pytest.approx(1.5 * sent[0])  # arXiv 1910.02054, section 7: 3 psi and not 2 psi
    (tensor,) = step_of(job, Choice(MeshLayout(tp=8), 0, "none", 1), H100).collectives
    assert tensor.sent_bytes == pytest.approx(8 * 4 * model.layers * 1.75 * 2048 * model.dim * 2)
    assert tensor.seconds == pytest.approx(8 * tensor.sent_bytes / gpu_of("h100").local_bps)


def test_the_link_follows_from_the_place_in_the_mesh() -> None:
    two = replace(H100, nodes=2)
    layout = MeshLayout(dp_shard=4, tp=4)
    assert path_of(layout, ("tp",), two).link == "node"
    shards = path_of(layout, ("dp_shard",), two)  # two ranks of a ring in each node: two network cards
    assert (shards.link, shards.ring_bps, shards.own_bps) == ("network", 800e9, 400e9)
    assert path_of(MeshLayout(tp=8, pp=2), ("pp",), two).ring_bps == 400e9
    assert path_of(MeshLayout(dp_shard=16), ("dp_shard",), two).ring_bps == 3200e9
    assert path_of(MeshLayout(dp_shard=16), ("tp",), two).link == "none"


def test_flops_are_6nd_and_attention() -> None:
    job = job_of(GPT3)
    assert model_flops(job) == pytest.approx(job.tokens * (6 * 175e9 + 12 * 96 * 12288 * 2048))
    tree = plan_json(planned())
    parameters = tree["model"]["parameters"]
    assert tree["training"]["tokens"] == tree["training"]["chinchilla_tokens"] == 20 * parameters
    assert tree["training"]["flops"] == pytest.approx(6 * parameters * 20 * parameters)


# ---------------------------------------------------------------- layouts


def test_all_layouts_that_can_be_are_tried() -> None:
    section = ModelSection.model_validate(dict(PRESETS["scaling-1.3b"]))
    model = model_of_section("mixture", with_experts(section, 4), 32_768)
    hardware = replace(H100, nodes=3)
    sizes = [size for size in range(1, 25) if 24 % size == 0]
    every = {MeshLayout(*choice) for choice in product(sizes, repeat=6) if math.prod(choice) == 24}
    expected = {one for one in every if one.cp == 1 and problem(one, model, hardware, 48, 2048) is None}
    found = list(layouts(hardware, model, 48, 2048))
    assert len(found) == len(set(found))
    assert set(found) == expected
    assert all(one.world == 24 and one.tp == 1 and 4 % one.ep == 0 for one in found)
    assert any(one.cp > 1 for one in layouts(hardware, model, 48, 24 * 1024))


@pytest.mark.parametrize(
    ("layout", "cause", "fix"),
    [
        ("dp_shard=4", "makes 4 ranks, not 8", "product is 8"),
        ("tp=8", "tp 8 does not divide 12 heads", "divisor of 12"),
        ("ep=8", "no experts", "leave ep out"),
        ("dp_shard=8", "12 sequences per step cannot be shared by 8", "multiple of 8"),
        ("tp=2,pp=4,tp=2", "cannot read 'tp=2'", "dp_shard=4,tp=2"),
        ("fsdp=8", "cannot read 'fsdp=8'", "dp_replicate"),
    ],
)
def test_a_layout_that_cannot_be_is_explained(layout: str, cause: str, fix: str) -> None:
    with pytest.raises(UsageError) as caught:
        planned("scaling-90m", layout=layout, batch=12)
    assert cause in caught.value.cause
    assert fix in caught.value.fix


def test_those_that_fit_come_first_and_the_fastest_before() -> None:
    ranked = rank(job_of(model_of_size(70 * 10**9), batch=512), replace(H100, nodes=8))
    fits = [one.fits for one in ranked]
    assert fits == sorted(fits, reverse=True)
    assert 0 < sum(fits) < len(fits)
    speeds = [one.tokens_per_s for one in ranked if one.fits]
    assert all(later <= 1.011 * earlier for earlier, later in pairwise(speeds))
    assert all(one.memory.total <= 0.92 * 80e9 for one in ranked if one.fits)
    assert all("of what fits: most is" in one.why for one in ranked if not one.fits)


def test_the_reason_is_what_costs_most() -> None:
    job = job_of(GPT3, batch=64)
    slow = replace(H100, nodes=8, fabric_bps=10e9)
    assert all(one.choice.stage or one.choice.layout.dp_shard == 1 for one in rank(job, slow))  # no DDP twice
    choices = {
        "tensor parallel": (MeshLayout(dp_shard=8, tp=8), replace(H100, nodes=8, gpu=Gpu(1e15, 989e12, 100e9))),
        "bubble": (MeshLayout(pp=64), replace(H100, nodes=8, gpu=Gpu(1e15, 1e12, 3600e9))),
        "gradients and weights": (MeshLayout(dp_replicate=64), replace(slow, gpu=Gpu(1e15, 989e12, 3600e9))),
        "computing decides": (MeshLayout(dp_replicate=64), replace(H100, nodes=8, gpu=Gpu(1e15, 1e12, 3600e9))),
    }
    for reason, (layout, hardware) in choices.items():
        (one,) = rank(job, hardware, recompute="none", micro_batch=1, layout=layout)
        assert reason in one.why


def test_what_fits_nowhere_is_said() -> None:
    plan = planned(None, params="175B")
    assert not any(one.fits for one in plan.ranked)
    assert "no layout fits" in plan_text(plan)
    assert "weights" in plan.ranked[0].why or "optimizer" in plan.ranked[0].why


# ---------------------------------------------------------------- between islands


def by_bucket(sync: Sync, bits: float, step_s: float, link_bps: float, latency_s: float, steps: int) -> float:
    """The same simulation step by step and bucket by bucket."""
    now = waited = free_at = 0.0
    arrivals: list[tuple[int, float]] = []
    for step in range(1, steps + 1):
        for fragment in range(1, sync.fragments + 1):
            if (step - fragment * sync.inner_steps // sync.fragments) % sync.inner_steps == 0:
                for bucket in range(1, BUCKETS + 1):
                    ready = now + step_s / 3 + bucket / BUCKETS * 2 / 3 * step_s
                    free_at = max(ready, free_at) + bits / sync.fragments / BUCKETS / link_bps
                arrivals.append((step + sync.overlap, free_at + latency_s))
        now += step_s
        for deadline, arrival in arrivals:
            if deadline == step and arrival > now:
                waited += arrival - now
                now = arrival
    return (now - waited) / now


def cases() -> Iterator[tuple[Sync, float, float]]:
    dice = random.Random(3)
    for _ in range(12):
        fragments = dice.choice([1, 2, 5, 7])
        inner_steps = dice.choice([1, 10, 100]) if fragments == 1 else dice.choice([20, 50])
        overlap = dice.randrange(0, inner_steps // fragments + 1)
        yield Sync("any", inner_steps, fragments, overlap, 8), 10 ** dice.uniform(7.5, 10.5), dice.choice([0.0, 0.3])


@pytest.mark.slow(queued=False)
def test_skipping_ahead_changes_nothing() -> None:
    for sync, link_bps, latency_s in cases():
        expected = by_bucket(sync, 8e8, 0.5, link_bps, 2 * latency_s, 2000)
        assert utilisation(sync, 1e8, 2, 0.5, link_bps, latency_s) == pytest.approx(expected), sync


def test_a_blocking_sync_costs_its_bytes() -> None:
    """Compute H t, then V / B, of which the last backward pass hides what it can."""
    sync = Sync("diloco", 100, 1, 0, 16)
    sent_s = 16e9 / 1e9
    hidden_s = 2 / 3 * 0.1 * (1 - 1 / BUCKETS)
    assert utilisation(sync, 1e9, 2, 0.1, 1e9) == pytest.approx(10 / (10 + sent_s - hidden_s))
    assert utilisation(sync, 1e9, 1, 0.1, 1e9, latency_s=5) == pytest.approx(1)  # alone nothing is sent
    assert utilisation(replace(sync, overlap=100), 1e9, 2, 0.1, 1.7e9) == pytest.approx(1, abs=0.01)  # V / B < H t


def test_bandwidth_that_is_needed_is_enough() -> None:
    for sync in methods():
        needed = bandwidth_for(0.95, sync, 1e9, 4, 0.1)
        assert needed is not None
        assert utilisation(sync, 1e9, 4, 0.1, needed) >= 0.95 > utilisation(sync, 1e9, 4, 0.1, 0.98 * needed)
    assert bandwidth_for(0.95, methods()[0], 1e9, 4, 0.1, latency_s=0.1) is None


def test_bytes_of_a_sync_by_how_it_is_exchanged() -> None:
    assert Sync("", 1, 1, 0, 8, "reduced").sent_bits(1000, 4) == 8 * 1000 * 1.5
    assert Sync("", 1, 1, 0, 2, "gathered").sent_bits(1000, 4) == 2 * 1000 * 3
    assert Sync("", 1, 1, 0, 16, "paired").sent_bits(1000, 64) == 16 * 1000


CODECS: list[dict[str, Any]] = [
    {"name": "fp32"}, {"name": "fp16"}, {"name": "bf16"}, {"name": "int8"}, {"name": "int8", "scale": "statistical"},
    {"name": "int4"}, {"name": "int4", "block": 128}, {"name": "int4", "scale": "statistical"}, {"name": "e3m0"},
    {"name": "two_bit"}, {"name": "sign"}, {"name": "topk"}, {"name": "topk", "density": 0.125, "values": "int8"},
    {"name": "topk", "values": "fp16"}, {"name": "dct"}, {"name": "lowrank"}, {"name": "lowrank", "rank": 4},
]  # fmt: skip


@pytest.mark.parametrize("keys", CODECS, ids=str)
def test_bits_are_those_that_the_codec_writes(keys: dict[str, Any]) -> None:
    choice = CodecChoice(**keys, zstd=False)
    elements = 2**20
    assert codec_bits(choice, elements) == pytest.approx(
        8 * open_codec(choice).max_bytes(elements) / elements, rel=1e-3
    )


def test_a_contract_brings_its_own_sync() -> None:
    contract = load_contract(CONFIGS / "sparseloco.toml").value
    sync = sync_of(contract)
    assert sync.exchange == "gathered"
    assert (sync.inner_steps, sync.fragments) == (contract.inner.steps, contract.sync.fragments)
    assert sync_of(load_contract(CONFIGS / "gossip.toml").value).exchange == "paired"
    plan = planned(str(CONFIGS / "diloco-150m.toml"), peers=4, gpus_per_node=1)
    own = plan.wan[-1]
    assert own.sync.method == "this contract"
    assert own.sync_bytes == pytest.approx(1.5 * 4 * plan.question.job.model.parameters)
    assert own.bytes_per_step == pytest.approx(own.sync_bytes / 500)
    assert plan.question.job.tokens == 512 * 1024
    assert plan.question.total_tokens == 369_098_752_000
    assert own.run_s == pytest.approx(88_000 * plan.step_s / own.utilisation * 2)  # 4 of the 8 peers


def test_host_memory_is_what_the_readme_counts() -> None:
    contract = load_contract(CONFIGS / "quick.toml", ["sync.fragments=2", "codec.name=fp32"]).value
    host = host_memory(contract, 1000, 32)
    # 8 N, as much for the fragment's next version, 4 N of weights and 2 encoded ones, and 4 + 3 means, of 500 each.
    assert sum(host.values()) == 8000 + 4000 + 2000 + 4000 + 7 * 2000


def test_a_gathered_mean_is_the_contributions_of_all_peers() -> None:
    contract = load_contract(CONFIGS / "sparseloco.toml").value
    two, ten = (host_memory(contract, 1_000_000, 1.0, peers) for peers in (2, 10))
    assert ten["encoded means that are kept"] == 5 * two["encoded means that are kept"] == 7 * 10 * 125_000
    assert ten["a contribution under way"] - two["a contribution under way"] == 8 * 125_000


def test_what_is_gathered_goes_by_way_of_the_parts_owner_too() -> None:
    """A second of compute, nothing sent, 0.1 s one way."""
    for exchange in ("reduced", "gathered", "paired"):
        sync = Sync("", 1, 1, 0, 1e-9, exchange)
        assert utilisation(sync, 1.0, 2, 1.0, 1e9, 0.1) == pytest.approx(1 / 1.2)


def test_nobody_waits_for_a_swap() -> None:
    link = {"peers": 4, "gpus_per_node": 1, "step_time": "50ms", "wan": "100Mbit/s", "latency": "50ms"}
    own = planned(str(CONFIGS / "gossip.toml"), **link).wan[-1]
    assert (own.sync.exchange, own.utilisation) == ("paired", pytest.approx(1.0))


# ---------------------------------------------------------------- the published table


def test_the_published_table_is_reproduced() -> None:
    cells = list(bandwidth_table())
    assert len(cells) == len({(cell.method, cell.model, cell.utilisation) for cell in cells}) == 75
    assert all(cell.gbit_s in GRID_GBIT_S for cell in cells)
    assert sum(abs(cell.grid_steps_apart) <= 1 for cell in cells) >= 70
    assert sum(cell.grid_steps_apart == 0 for cell in cells) >= 45


def test_published_cells_lie_on_the_grid() -> None:
    """So that a nearest place of the grid is the cell itself: it was only rounded or cut to a tenth."""
    cells = [cell for rows in PUBLISHED.values() for row in rows.values() for cell in row]
    assert len(cells) == len(PUBLISHED) * len(MODELS) * len(UTILISATIONS)
    assert all(abs(GRID_GBIT_S[nearest_on_grid(cell)] - cell) < 0.11 for cell in cells)


# ---------------------------------------------------------------- the command


def test_one_command_with_a_preset_works(tmp_path: Path) -> None:
    done = run_cli("plan", "scaling-10b", "--json", str(tmp_path / "plan.json"))
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 140
    for words in ("9.81 billion parameters", "ZeRO-3", "the fastest first", "streaming-overlap-fp4", "bubble"):
        assert words in done.stdout
    tree = json.loads((tmp_path / "plan.json").read_text())
    assert all(math.prod(one[name] for name in PLACED) == one["world"] == 8 for one in tree["layouts"])
    assert len(tree["memory"]) == 12
    assert tree["model"]["name"] == "scaling-10b"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"layout": "dp_shard=2,tp=2,pp=2"}, {"shard": "optimizer", "tp": 2, "pp": 2, "schedule": "1f1b"}),
        ({"layout": "dp_shard=4,pp=2", "virtual_stages": 3}, {"schedule": "interleaved-1f1b", "chunks": 3}),
        ({"layout": "dp_shard=2,pp=4", "batch": 4, "micro_batch": 2}, {"schedule": "gpipe"}),
        ({"layout": "dp_shard=8"}, {"dp_shard": 8}),
    ],
)
def test_the_first_layout_is_said_as_a_site_that_runs(given: dict[str, Any], expected: dict[str, Any]) -> None:
    plan = planned(**given)
    text = plan_text(plan)
    keys = tomllib.loads("\n".join(re.findall(r"\[mesh\] (.*)", text)[0].split(" and ")[0].split(", ")))
    assert keys.items() >= expected.items()
    batch_size, accumulation = map(int, re.findall(r"inner.batch_size = (\d+), inner.accumulation = (\d+)", text)[0])
    assert batch_size * accumulation == plan.question.job.batch
    site = Site.model_validate({"mesh": keys})
    contract = Contract.model_validate(
        {
            "run": {"name": "plan", "total_tokens": 1},
            "model": dict(PRESETS["scaling-1.3b"]),
            "data": {"sequence_length": plan.question.job.sequence_length},
            "inner": {"batch_size": batch_size, "accumulation": accumulation},
        }
    )
    check(sizes_of(site.mesh, 8), site, contract, 8)


@pytest.mark.slow(queued=False)
def test_the_table_as_rows(tmp_path: Path) -> None:
    done = run_cli("plan", "--bandwidth-table", "--json", str(tmp_path / "table.json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "table.json").read_text())
    assert len(rows) == 75
    assert {"method", "model", "utilisation", "gbit_s"} <= set(rows[0])
    assert {row["method"] for row in rows} == set(PUBLISHED)


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"model": None}, "no model"),
        ({"model": "scaling-10"}, "unknown preset 'scaling-10'"),
        ({"params": "7B"}, "--params gives another"),
        ({"overrides": ["inner.steps=30"]}, "--set changes a contract"),
        ({"model": None, "params": "1M"}, "too few for a vocabulary"),
        ({"gpu": "h10"}, "unknown GPU"),
        ({"mfu": 50.0}, "--mfu is 50"),
        ({"memory_gb": -1.0}, "without memory"),
        ({"memory_gb": math.nan}, "without memory"),
        ({"tflops": math.inf}, "without end"),
        ({"wan": "fast"}, "as a bandwidth"),
        ({"latency": "50"}, "as a time"),
        ({"step_time": "0"}, "takes no time"),
        ({"precision": "fp8"}, "unknown precision"),
        ({"recompute": "some"}, "unknown recomputation"),
        ({"batch": 12, "micro_batch": 8}, "no layout of 8 ranks"),
        ({"experts": 4, "active": 5}, "4 experts of which a token goes through 5"),
        ({"active": 4}, "0 experts of which a token goes through 4"),
        ({"virtual_stages": 99}, "99 pieces"),
    ],
)
def test_what_makes_no_sense_is_explained(given: dict[str, Any], cause: str) -> None:
    with pytest.raises(UsageError) as caught:
        planned(**given)
    assert cause in caught.value.cause
    assert caught.value.fix


def test_a_contract_that_hides_its_size_wants_to_be_told() -> None:
    path = str(CONFIGS / "quick.toml")
    with pytest.raises(ConfigError, match="its sizes elsewhere"):
        planned(path, overrides=["model.kind=external"])
    plan = planned(path, overrides=["model.kind=external"], params="7B", gpus_per_node=1)
    assert plan.question.job.model.parameters == 7 * 10**9
    with pytest.raises(ConfigError, match="how many tokens"):
        planned(path, overrides=["data.tokenizer=there"])


def test_units() -> None:
    assert parse_bps("1Gbit/s") == parse_bps("1 Gbps") == parse_bps("125MB/s") == 1e9
    assert parse_seconds("50ms") == parse_seconds("0.05s") == 0.05
    assert parse_layout("dp_shard=4, tp=2") == MeshLayout(dp_shard=4, tp=2)
