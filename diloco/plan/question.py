"""The question to `diloco plan`, from the texts of the command line. Everything wrong with them is an error here."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from diloco.base.errors import ConfigError, UsageError
from diloco.config.contract import Contract, ModelSection
from diloco.config.load import load_contract, shipped_contracts
from diloco.config.presets import PRESETS
from diloco.plan.cost import PRECISIONS, RECOMPUTE, Job, Recompute
from diloco.plan.hardware import Gpu, Hardware, MeshLayout, gpu_of, parse_bps, parse_layout, parse_seconds, problem
from diloco.plan.model import BYTE_VOCABULARY, USUAL_VOCABULARY, Model, check_experts, model_of_section, model_of_size
from diloco.plan.suggest import TOKENS_PER_PARAMETER, parse_parameters, suggest
from diloco.plan.timeline import PUBLISHED_STEPS, Sync, methods, sync_of

USUAL_SEQUENCE = 2048
USUAL_PEERS = 2
OPTIMIZER_BYTES = {"adamw": 8, "muon": 4, "sgd": 0}
"""fp32 moments of a contract's inner optimizer; of Muon those of the matrices, which are nearly all."""
LAYERS_PER_FRAGMENT = 3
"""Layers of a fragment of Streaming DiLoCo (arXiv 2501.18512)."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options of the model, as typed, like those of the following classes; None: to be chosen."""

    model: str | None
    """A preset, or the path of a contract."""
    params: str | None
    overrides: Sequence[str]
    experts: int
    active: int


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Options of the training job: batch, precision and layout."""

    sequence: int | None
    batch: int | None
    tokens: str | None
    precision: str | None
    recompute: str | None
    micro_batch: int | None
    virtual_stages: int
    layout: str | None


@dataclass(frozen=True, slots=True)
class HardwareOptions:
    """Options of the island's hardware."""

    gpu: str
    memory_gb: float | None
    tflops: float | None
    nvlink: str | None
    infiniband: str
    gpus_per_node: int
    nodes: int
    mfu: float
    step_time: str | None


@dataclass(frozen=True, slots=True)
class WanOptions:
    """Options of the links between islands, and of the peers at their ends."""

    wan: str
    latency: str
    peers: int | None
    inner_steps: int | None


@dataclass(frozen=True, slots=True)
class Question:
    """Question to `diloco plan`: the job, the hardware and the links."""

    contract: Contract | None
    job: Job
    hardware: Hardware
    total_tokens: int
    layout: MeshLayout | None
    """None: all that are possible; as for the next two."""
    recompute: Recompute | None
    micro_batch: int | None
    step_s: float | None
    """As measured; None: to be estimated."""
    peers: int
    link_bps: float
    latency_s: float
    syncs: tuple[Sync, ...]
    """Methods to compare; a contract's own is the last one."""


def question(model: ModelOptions, job: JobOptions, hardware: HardwareOptions, wan: WanOptions) -> Question:
    """The question that these options ask of the plan. Raises UsageError and ConfigError."""
    contract = _contract_of(model)
    shape = _model_of(model, contract)
    island = _hardware_of(hardware)
    peers = wan.peers or (contract.membership.start_peers if contract else USUAL_PEERS)
    task = _job_of(job, contract, shape, island, peers)
    if job.tokens:
        tokens = parse_parameters(job.tokens)
    else:
        tokens = contract.run.total_tokens if contract else TOKENS_PER_PARAMETER * shape.parameters
    layout = None if job.layout is None else parse_layout(job.layout)
    if layout and (wrong := problem(layout, shape, island, task.batch, task.sequence_length)):
        raise UsageError(*wrong)
    recompute = next((known for known in RECOMPUTE if known == job.recompute), None)
    if recompute != job.recompute:
        raise UsageError(f"unknown recomputation {job.recompute!r}", f"use {', '.join(RECOMPUTE)}")
    step_s = None if hardware.step_time is None else parse_seconds(hardware.step_time)
    if step_s == 0:
        raise UsageError("an inner step takes no time", "give --step-time as measured, such as 0.8s")
    link_bps, latency_s = parse_bps(wan.wan), parse_seconds(wan.latency)
    if contract and wan.inner_steps:
        cause = "--inner-steps is for a model without a contract"
        raise UsageError(cause, f"use --set inner.steps={wan.inner_steps}")
    inner_steps = contract.inner.steps if contract else wan.inner_steps or PUBLISHED_STEPS
    fragments = max(1, min(shape.layers // LAYERS_PER_FRAGMENT, inner_steps))
    syncs = (*methods(inner_steps, fragments), *([sync_of(contract)] if contract else []))
    return Question(
        contract, task, island, tokens, layout, recompute, job.micro_batch, step_s, peers, link_bps, latency_s, syncs
    )


def _contract_of(options: ModelOptions) -> Contract | None:
    name = options.model
    is_contract = name is not None and name not in PRESETS and (name.endswith(".toml") or name in shipped_contracts())
    if options.overrides and not is_contract:
        raise UsageError("--set changes a contract, and there is none", "name one, or leave --set out")
    if name is None and options.params is None:
        raise UsageError("no model to plan for", "name a preset or a contract, or say how large: --params 7B")
    if name in PRESETS and options.params:
        raise UsageError(f"{name} has its own size, and --params gives another", "leave one of the two out")
    if name is None or name in PRESETS:
        return None
    if not is_contract:
        close = difflib.get_close_matches(name, [*PRESETS, *shipped_contracts()], n=1)
        fix = f"did you mean {close[0]}? " if close else ""
        fix += "`diloco config presets` lists them; a contract is a file.toml or shipped, and --params 7B gives a size"
        raise UsageError(f"unknown preset {name!r}", fix)
    return load_contract(name, options.overrides).value


def _model_of(options: ModelOptions, contract: Contract | None) -> Model:
    if options.params is not None:
        return model_of_size(parse_parameters(options.params), options.experts, options.active)
    assert options.model is not None
    section = contract.model if contract else ModelSection.model_validate(dict(PRESETS[options.model]))
    name = contract.run.name if contract else options.model
    vocabulary = section.vocab_size or BYTE_VOCABULARY
    if contract and section.vocab_size is None and contract.data.tokenizer != "bytes":
        cause = f"{options.model} does not say how many tokens its tokenizer has"
        raise ConfigError(cause, f"say it: --set model.vocab_size={USUAL_VOCABULARY}")
    check_experts(options.experts, options.active)
    if options.experts:  # in place of each feed-forward layer, each as wide as that
        experts = {"experts": options.experts, "experts_per_token": options.active, "expert_dim": section.ffn_width}
        section = section.model_copy(update=experts | {"shared_experts": 0})
    return model_of_section(name, section, vocabulary)


def _hardware_of(options: HardwareOptions) -> Hardware:
    if not 0 < options.mfu <= 1:
        raise UsageError(f"--mfu is {options.mfu:g}", "give the share of the peak that computing reaches, such as 0.5")
    known = gpu_of(options.gpu) if None in (options.memory_gb, options.tflops, options.nvlink) else Gpu(0, 0, 0)
    gpu = Gpu(
        known.memory_bytes if options.memory_gb is None else options.memory_gb * 1e9,
        known.flops if options.tflops is None else options.tflops * 1e12,
        known.local_bps if options.nvlink is None else parse_bps(options.nvlink),
    )
    if not (0 < gpu.memory_bytes < math.inf and 0 < gpu.flops < math.inf):
        raise UsageError("a GPU without memory or speed, or without end", "give --memory in GB and --tflops above 0")
    return Hardware(options.gpu, gpu, options.gpus_per_node, options.nodes, parse_bps(options.infiniband), options.mfu)


def _job_of(options: JobOptions, contract: Contract | None, model: Model, hardware: Hardware, peers: int) -> Job:
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
    precision = PRECISIONS["mixed"]
    if options.precision is not None:
        if options.precision not in PRECISIONS:
            raise UsageError(f"unknown precision {options.precision!r}", f"use {', '.join(PRECISIONS)}")
        precision = PRECISIONS[options.precision]
    elif contract:
        precision = PRECISIONS["autocast" if contract.inner.precision == "bf16" else "fp32"]
        precision = replace(precision, optimizer=OPTIMIZER_BYTES[contract.inner.optimizer])
    return Job(model, precision, sequence, batch, options.virtual_stages)
