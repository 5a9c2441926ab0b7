"""From texts of the command line to a plan. Everything wrong with them is said here."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from diloco.config import Contract, ModelSection, load_contract
from diloco.errors import ConfigError, UsageError
from diloco.models.presets import PRESETS
from diloco.plan.hardware import Gpu, Hardware, gpu_of, parse_bps, parse_seconds
from diloco.plan.job import PRECISIONS, RECOMPUTE, STAGES, Choice, Job, Precision, Recompute
from diloco.plan.layout import Layout, parse_layout, problem
from diloco.plan.memory import Memory, host_memory, memory_of
from diloco.plan.model import BYTE_VOCABULARY, USUAL_VOCABULARY, Model, model_of_section, model_of_size
from diloco.plan.ranking import Ranked, rank
from diloco.plan.step import bubble_share
from diloco.plan.syncing import PUBLISHED_STEPS, Sync, methods, sync_of, usual_fragments
from diloco.plan.timeline import bandwidth_for, utilisation
from diloco.suggest import TOKENS_PER_PARAMETER, parse_parameters, suggest

USUAL_SEQUENCE = 2048
USUAL_PEERS = 2
WANTED_UTILISATION = 0.95
DAY_S = 86_400
OPTIMIZER_BYTES = {"adamw": 8, "muon": 4, "sgd": 0}
"""fp32 moments of a contract's inner optimizer; of Muon those of the matrices, which are nearly all."""


@dataclass(frozen=True, slots=True)
class Options:
    """As typed; None: chosen."""

    model: str | None
    """A preset, or the path of a contract."""
    params: str | None
    overrides: Sequence[str]
    experts: int
    active: int
    sequence: int | None
    batch: int | None
    tokens: str | None
    precision: str | None
    recompute: str | None
    micro_batch: int | None
    virtual_stages: int
    layout: str | None
    gpu: str
    memory_gb: float | None
    tflops: float | None
    nvlink: str | None
    infiniband: str
    gpus_per_node: int
    nodes: int
    mfu: float
    step_time: str | None
    wan: str
    latency: str
    peers: int | None
    inner_steps: int | None


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One ZeRO stage with one kind of recomputation."""

    stage: str
    recompute: Recompute
    memory: Memory
    fits: bool


@dataclass(frozen=True, slots=True)
class PipelineRow:
    """A pipeline of so many stages, all other ranks data parallel, micro-batches of one sequence."""

    stages: int
    micro_batches: int
    bubble: float
    """Share of a step."""
    interleaved: float | None
    """The same with two pieces of the model on each rank; None where there are too few layers."""


@dataclass(frozen=True, slots=True)
class WanRow:
    """One way to synchronise over the WAN."""

    sync: Sync
    sync_bytes: float
    """That one peer sends when all parameters are synchronised once."""
    bytes_per_step: float
    transfer_s: float
    """On the link, for one fragment."""
    utilisation: float
    needed_bps: float
    """For `WANTED_UTILISATION`."""
    days: float
    """Of the whole run."""


@dataclass(frozen=True, slots=True)
class Wan:
    """The link between the islands, and what they make of it."""

    peers: int
    link_bps: float
    latency_s: float
    rows: tuple[WanRow, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer."""

    job: Job
    hardware: Hardware
    total_tokens: int
    step_s: float
    measured: bool
    """Whether `step_s` was given, and not computed."""
    table_layout: Layout
    """That of `memory`."""
    memory: tuple[MemoryRow, ...]
    pipeline: tuple[PipelineRow, ...]
    ranked: tuple[Ranked, ...]
    """The first one is planned with."""
    wan: Wan | None
    """None when there is one peer."""
    host: dict[str, float] | None
    """Bytes by purpose, with a contract."""


def make_plan(options: Options) -> Plan:
    """Raises UsageError and ConfigError."""
    contract = _contract_of(options)
    model = _model_of(options, contract)
    hardware = _hardware_of(options)
    peers = options.peers or (contract.membership.start_peers if contract else USUAL_PEERS)
    job = _job_of(options, contract, model, hardware, peers)
    ranked = _ranked(options, job, hardware)
    total_tokens = _total_tokens(options, contract, model)
    step_s = parse_seconds(options.step_time) if options.step_time else ranked[0].step.total_s
    if step_s <= 0:
        raise UsageError("an inner step takes no time", "give --step-time as measured, such as 0.8s")
    syncs = _syncs(options, contract, model)
    return Plan(
        job, hardware, total_tokens, step_s, options.step_time is not None,
        _table_layout(options, hardware), tuple(_memory_rows(options, job, hardware)),
        tuple(_pipeline_rows(job, hardware)), tuple(ranked),
        _wan(options, syncs, model, peers, step_s, job.tokens, total_tokens) if peers > 1 else None,
        host_memory(contract, model.parameters, syncs[-1].bits) if contract else None,
    )  # fmt: skip


# ---------------------------------------------------------------- what was asked


def _contract_of(options: Options) -> Contract | None:
    if options.overrides and not (options.model or "").endswith(".toml"):
        raise UsageError("--set changes a contract, and there is none", "name one, or leave --set out")
    if options.model is None:
        if options.params is None:
            raise UsageError("no model to plan for", "name a preset or a contract, or say how large: --params 7B")
        return None
    if options.model in PRESETS:
        if options.params:
            cause = f"{options.model} has its own size, and --params gives another"
            raise UsageError(cause, "leave one of the two out")
        return None
    if not options.model.endswith(".toml"):
        close = difflib.get_close_matches(options.model, PRESETS, n=1)
        fix = f"did you mean {close[0]}? " if close else ""
        fix += "`diloco config presets` lists them; a contract ends in .toml, and --params 7B gives a size"
        raise UsageError(f"unknown preset {options.model!r}", fix)
    return load_contract(options.model, options.overrides).value


def _model_of(options: Options, contract: Contract | None) -> Model:
    if options.params is not None:
        return model_of_size(parse_parameters(options.params), options.experts, options.active)
    assert options.model is not None
    section = contract.model if contract else ModelSection.model_validate(dict(PRESETS[options.model]))
    name = contract.run.name if contract else options.model
    vocabulary = section.vocab_size or BYTE_VOCABULARY
    if contract and section.vocab_size is None and contract.data.tokenizer != "bytes":
        cause = f"{options.model} does not say how many tokens its tokenizer has"
        raise ConfigError(cause, f"say it: --set model.vocab_size={USUAL_VOCABULARY}")
    return model_of_section(name, section, vocabulary, options.experts, options.active)


def _hardware_of(options: Options) -> Hardware:
    if not 0 < options.mfu <= 1:
        raise UsageError(f"--mfu is {options.mfu:g}", "give the share of the peak that computing reaches, such as 0.5")
    known = gpu_of(options.gpu) if None in (options.memory_gb, options.tflops, options.nvlink) else Gpu(0, 0, 0)
    gpu = Gpu(
        known.memory_bytes if options.memory_gb is None else options.memory_gb * 1e9,
        known.flops if options.tflops is None else options.tflops * 1e12,
        known.local_bps if options.nvlink is None else parse_bps(options.nvlink),
    )
    if gpu.memory_bytes <= 0 or gpu.flops <= 0:
        raise UsageError("a GPU without memory or speed", "give --memory in GB and --tflops above 0")
    fabric_bps = parse_bps(options.infiniband)
    return Hardware(options.gpu, gpu, options.gpus_per_node, options.nodes, fabric_bps, options.mfu)


def _job_of(options: Options, contract: Contract | None, model: Model, hardware: Hardware, peers: int) -> Job:
    sequence = options.sequence or (contract.data.sequence_length if contract else USUAL_SEQUENCE)
    if options.batch:
        batch = options.batch
    elif contract:
        batch = contract.inner.sequences_per_step
    else:  # by the scaling laws of DiLoCo, and such that all ranks get as many
        suggested = suggest(model.parameters, peers, sequence_length=sequence).sequences_per_peer
        batch = max(1, round(suggested / hardware.world)) * hardware.world
    if options.virtual_stages > model.layers:
        cause = f"{options.virtual_stages} pieces on each rank of a pipeline, of {model.layers} layers"
        raise UsageError(cause, "give fewer --virtual-stages")
    return Job(model, _precision_of(options, contract), sequence, batch, options.virtual_stages)


def _precision_of(options: Options, contract: Contract | None) -> Precision:
    if options.precision is not None:
        if options.precision not in PRECISIONS:
            raise UsageError(f"unknown precision {options.precision!r}", f"use {', '.join(PRECISIONS)}")
        return PRECISIONS[options.precision]
    if contract is None:
        return PRECISIONS["mixed"]
    known = PRECISIONS["autocast" if contract.inner.precision == "bf16" else "fp32"]
    return replace(known, optimizer=OPTIMIZER_BYTES[contract.inner.optimizer])


def _total_tokens(options: Options, contract: Contract | None, model: Model) -> int:
    if options.tokens:
        return parse_parameters(options.tokens)
    return contract.run.total_tokens if contract else TOKENS_PER_PARAMETER * model.parameters


def _recompute_of(options: Options) -> Recompute | None:
    for known in RECOMPUTE:
        if options.recompute == known:
            return known
    if options.recompute is not None:
        raise UsageError(f"unknown recomputation {options.recompute!r}", f"use {', '.join(RECOMPUTE)}")
    return None


# ---------------------------------------------------------------- answers inside an island


def _ranked(options: Options, job: Job, hardware: Hardware) -> list[Ranked]:
    layout = parse_layout(options.layout) if options.layout else None
    wrong = problem(layout, job.model, hardware, job.batch, job.sequence_length) if layout else None
    if wrong:
        raise UsageError(*wrong)
    ranked = rank(job, hardware, _recompute_of(options), options.micro_batch, layout)
    if not ranked:
        micro = f" in micro-batches of {options.micro_batch}" if options.micro_batch else ""
        cause = f"no layout of {hardware.world} ranks can share {job.batch} sequences per step{micro}"
        raise UsageError(cause, f"make --batch a multiple of {hardware.world * (options.micro_batch or 1)}")
    return ranked


def _table_layout(options: Options, hardware: Hardware) -> Layout:
    """Of the memory by ZeRO stage: as asked for, with all its data ranks sharing; or all ranks data parallel."""
    layout = parse_layout(options.layout) if options.layout else Layout(dp_shard=hardware.world)
    return replace(layout, dp_replicate=1, dp_shard=layout.dp_replicate * layout.dp_shard)


def _memory_rows(options: Options, job: Job, hardware: Hardware) -> list[MemoryRow]:
    layout, rows = _table_layout(options, hardware), []
    for stage, name in enumerate(STAGES):
        for recompute in RECOMPUTE:
            memory = memory_of(job, Choice(layout, stage, recompute, options.micro_batch or 1))
            rows.append(MemoryRow(name, recompute, memory, hardware.holds(memory.total)))
    return rows


def _pipeline_rows(job: Job, hardware: Hardware) -> list[PipelineRow]:
    rows, stages = [], 2
    while stages <= min(job.model.layers, hardware.world) and stages <= 64:
        micro_batches = max(1, job.batch * stages // hardware.world)
        interleaved = bubble_share(stages, micro_batches, 2) if 2 * stages <= job.model.layers else None
        rows.append(PipelineRow(stages, micro_batches, bubble_share(stages, micro_batches), interleaved))
        stages *= 2
    return rows


# ---------------------------------------------------------------- answers between islands


def _syncs(options: Options, contract: Contract | None, model: Model) -> tuple[Sync, ...]:
    inner_steps = options.inner_steps or (contract.inner.steps if contract else PUBLISHED_STEPS)
    known = methods(inner_steps, usual_fragments(model.layers, inner_steps))
    if contract is None:
        return known
    if options.inner_steps and options.inner_steps != contract.inner.steps:
        cause = "--inner-steps is for a model without a contract"
        raise UsageError(cause, f"use --set inner.steps={options.inner_steps}")
    return (*known, sync_of(contract))


def _wan(
    options: Options, syncs: Sequence[Sync], model: Model, peers: int, step_s: float, step_tokens: int,
    total_tokens: int,
) -> Wan:  # fmt: skip
    link_bps, latency_s = parse_bps(options.wan), parse_seconds(options.latency)
    rows = []
    for sync in syncs:
        sync_bytes = sync.sent_bits(model.parameters, peers) / 8
        share = utilisation(sync, model.parameters, peers, step_s, link_bps, latency_s)
        needed_bps = bandwidth_for(WANTED_UTILISATION, sync, model.parameters, peers, step_s)
        days = total_tokens / (peers * step_tokens) * step_s / share / DAY_S
        transfer_s = 8 * sync_bytes / sync.fragments / link_bps
        rows.append(WanRow(sync, sync_bytes, sync_bytes / sync.inner_steps, transfer_s, share, needed_bps, days))
    return Wan(peers, link_bps, latency_s, tuple(rows))
