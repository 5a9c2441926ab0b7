"""The plan that answers a question: layouts by speed, and tables of memory, pipelines and links.

A layout is judged with the best choice of ZeRO stage, recomputation and micro-batch in it, and with what costs it most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from diloco.base.errors import UsageError
from diloco.config.contract import GATHERED_CODECS, Contract
from diloco.plan.cost import RECOMPUTE, Choice, Job, Memory, Recompute, StepEstimate, bubble_share, memory_of, step_of
from diloco.plan.hardware import USABLE, Hardware, MeshLayout, layouts
from diloco.plan.question import Question
from diloco.plan.timeline import Sync, bandwidth_for, utilisation

# ---------------------------------------------------------------- layouts

MAX_MICRO_BATCH = 16
"""Sequences: beyond it only memory grows."""
WORTH_SAYING = 0.02
"""Share of a step below which a loss decides nothing."""

CAUSES = {
    "tp": "tensor parallel all-reduces",
    "cp": "keys and values of ring attention",
    "ep": "all-to-all between experts",
    "pp": "activations between stages",
    "data parallel": "gradients and weights",
    "recomputation": "activations computed again",
    "bubble": "the pipeline's bubble",
    "stages": "stages of unequal length",
}


@dataclass(frozen=True, slots=True)
class Ranked:
    """One way to train, with its memory and speed on the hardware."""

    choice: Choice
    memory: Memory
    step: StepEstimate
    fits: bool
    tokens_per_s: float
    """Tokens per second of the island."""
    mfu: float
    """Model FLOPs by the peak of all GPUs: the efficiency that was given, times what waits leave of it."""
    why: str

    def order(self) -> tuple[bool, float, float]:
        """Sort key of planned layouts: what fits first, by speed to 1 %, then by time on links; the rest by memory."""
        if not self.fits:
            return True, 0.0, self.memory.total
        on_links_s = sum(part.seconds for part in self.step.collectives)
        return False, -round(100 * math.log(self.tokens_per_s)), on_links_s


def rank(
    job: Job, hardware: Hardware, recompute: Recompute | None = None, micro_batch: int | None = None,
    layout: MeshLayout | None = None,
) -> list[Ranked]:  # fmt: skip
    """Rank planned layouts (or one), each with its best ZeRO stage, recomputation and micro-batch: what fits first, by
    tokens per second; of equally fast ones (1 %) that whose links are busy for the shortest time. What does not fit
    is ordered by memory.
    """
    best = []
    for candidate in [layout] if layout else layouts(hardware, job.model, job.batch, job.sequence_length):
        ways = [_judged(job, choice, hardware) for choice in _choices(job, candidate, recompute, micro_batch)]
        if ways:
            best.append(min(ways, key=Ranked.order))
    return sorted(best, key=Ranked.order)


def _choices(job: Job, layout: MeshLayout, recompute: Recompute | None, micro_batch: int | None) -> Iterator[Choice]:
    shared = job.batch // layout.data_ranks
    sizes = [micro_batch] if micro_batch else [1 << power for power in range(MAX_MICRO_BATCH.bit_length())]
    # Under DDP `dp_shard` is `dp_replicate` by another name, which is tried as such.
    first_stage, last_stage = 1 if layout.dp_shard > 1 else 0, layout.last_zero_stage if layout.shard_ranks > 1 else 0
    for stage in range(first_stage, last_stage + 1):
        for again in [recompute] if recompute else RECOMPUTE:
            yield from (Choice(layout, stage, again, size) for size in sizes if shared % size == 0)


def _judged(job: Job, choice: Choice, hardware: Hardware) -> Ranked:
    memory, step = memory_of(job, choice), step_of(job, choice, hardware)
    fits = hardware.holds(memory.total)
    if fits:
        losses = step.losses
        worst = max(losses, key=losses.__getitem__)
        share = losses[worst] / step.total_s
        why = f"{CAUSES[worst]}: {100 * share:.0f} %" if share >= WORTH_SAYING else "computing decides"
    else:
        kinds = {
            "weights": memory.state.parameters,
            "gradients": memory.state.gradients,
            "optimizer state": memory.state.optimizer,
            "gathered layers": memory.buffers,
            "activations": memory.activations,
        }
        most = max(kinds, key=kinds.__getitem__)
        over = memory.total / (USABLE * hardware.gpu.memory_bytes)
        why = f"{over:.1f}x of what fits: most is {most}, {kinds[most] / 1e9:.1f} GB"
    mfu = step.flops / step.total_s / (hardware.world * hardware.gpu.flops)
    return Ranked(choice, memory, step, fits, job.tokens / step.total_s, mfu, why)


# ---------------------------------------------------------------- the plan

WANTED_UTILISATION = 0.95
PIPELINES = (2, 4, 8, 16, 32, 64)
"""Numbers of stages whose bubble is shown."""


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
    """One way to synchronise the islands, with its cost on their link."""

    sync: Sync
    sync_bytes: float
    """Bytes that one peer sends when all parameters are synchronised once."""
    bytes_per_step: float
    transfer_s: float
    """On the link, for one fragment."""
    utilisation: float
    needed_bps: float | None
    """For `WANTED_UTILISATION`; None where no bandwidth is enough, for the latency."""
    run_s: float
    """Seconds of the whole run."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer to a question: layouts by speed, and tables of memory, pipelines and links."""

    question: Question
    step_s: float
    """Seconds of an inner step: as measured, or with the first layout."""
    table_layout: MeshLayout
    """Layout that `memory` is computed for: as asked for, with all its data ranks sharing; or all ranks data
    parallel."""
    memory: tuple[tuple[Choice, Memory], ...]
    """Memory by ZeRO stage, with each kind of recomputation."""
    pipeline: tuple[PipelineRow, ...]
    ranked: tuple[Ranked, ...]
    wan: tuple[WanRow, ...]
    """None of them when there is one peer."""
    host: dict[str, float] | None
    """Bytes by purpose, with a contract."""

    @property
    def alone_s(self) -> float:
        """Estimated seconds of the whole run by this island alone."""
        return self.question.total_tokens / self.question.job.tokens * self.step_s


def make_plan(question: Question) -> Plan:
    """The plan of a run. Raises UsageError when no layout is possible; one that does not fit is ranked all the same."""
    contract, job, hardware, micro_batch = question.contract, question.job, question.hardware, question.micro_batch
    ranked = rank(job, hardware, question.recompute, micro_batch, question.layout)
    if not ranked:
        micro = f" in micro-batches of {micro_batch}" if micro_batch else ""
        cause = f"no layout of {hardware.world} ranks can share {job.batch} sequences per step{micro}"
        raise UsageError(cause, f"make --batch a multiple of {hardware.world * (micro_batch or 1)}")
    step_s = question.step_s or ranked[0].step.total_s
    layout = question.layout or MeshLayout(dp_shard=hardware.world)
    layout = replace(layout, dp_replicate=1, dp_shard=layout.dp_replicate * layout.dp_shard)
    stages = range(layout.last_zero_stage + 1)
    sharded = [Choice(layout, stage, again, micro_batch or 1) for stage in stages for again in RECOMPUTE]
    return Plan(
        question,
        step_s,
        layout,
        tuple((choice, memory_of(job, choice)) for choice in sharded),
        tuple(_pipeline_rows(job, hardware.world)),
        tuple(ranked),
        tuple(_wan_row(question, sync, step_s) for sync in question.syncs) if question.peers > 1 else (),
        host_memory(contract, job.model.parameters, question.syncs[-1].bits, question.peers) if contract else None,
    )


def _pipeline_rows(job: Job, world: int) -> Iterator[PipelineRow]:
    for stages in (size for size in PIPELINES if size <= min(job.model.layers, world)):
        micro_batches = max(1, job.batch * stages // world)
        interleaved = bubble_share(stages, micro_batches, 2) if 2 * stages <= job.model.layers else None
        yield PipelineRow(stages, micro_batches, bubble_share(stages, micro_batches), interleaved)


def _wan_row(question: Question, sync: Sync, step_s: float) -> WanRow:
    parameters, peers, latency_s = question.job.model.parameters, question.peers, question.latency_s
    steps = question.total_tokens / (peers * question.job.tokens)
    sync_bytes = sync.sent_bits(parameters, peers) / 8
    share = utilisation(sync, parameters, peers, step_s, question.link_bps, latency_s)
    return WanRow(
        sync,
        sync_bytes,
        bytes_per_step=sync_bytes / sync.inner_steps,
        transfer_s=8 * sync_bytes / sync.fragments / question.link_bps,
        utilisation=share,
        needed_bps=bandwidth_for(WANTED_UTILISATION, sync, parameters, peers, step_s, latency_s),
        run_s=steps * step_s / share,
    )


OUTER_BUFFERS = {"sgd": 1, "nesterov": 2, "buffered_nesterov": 3, "delayed_nesterov": 3, "adam": 3}
"""fp32 values per parameter that `diloco.outer.optimizers` keeps: the anchor and each moment."""


def host_memory(contract: Contract, parameters: int, bits: float, peers: int = 1) -> dict[str, float]:
    """Estimated bytes of host memory of one island by purpose, at most; `bits`: of an encoded value. A gathered codec's
    mean is the contributions of all `peers`.

    As docs/how/overview.md counts ("Costs"): a fragment's buffers are there while it is under way.
    """
    fragment = parameters / contract.sync.fragments
    outer = 4 * OUTER_BUFFERS[contract.outer.optimizer]
    feedback = contract.codec.error_feedback is not None
    encoded = fragment * bits / 8
    mean = encoded * (peers if contract.codec.name in GATHERED_CODECS else 1)
    return {
        "anchor and outer moments": outer * parameters,
        "the version that is made": outer * fragment,
        "a contribution under way": (8 if feedback else 4) * fragment + encoded + mean,
        "encoded means that are kept": (contract.membership.backlog_versions + 3) * mean,
        "residual of error feedback": 4.0 * parameters if feedback else 0.0,
        "what eager foresaw": 4.0 * parameters if contract.sync.merge == "eager" else 0.0,
    }
