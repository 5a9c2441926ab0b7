"""The layouts that fit, the fastest first, and what costs them most."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from diloco.plan.hardware import USABLE, Hardware
from diloco.plan.job import RECOMPUTE, Choice, Job, Recompute
from diloco.plan.layout import MeshLayout, layouts
from diloco.plan.memory import Memory, memory_of
from diloco.plan.step import Step, model_flops, step_of

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
    """One way to train, judged."""

    choice: Choice
    memory: Memory
    step: Step
    fits: bool
    tokens_per_s: float
    """Tokens per second of the island."""
    mfu: float
    """Model FLOPs by the peak of all GPUs: the efficiency that was given, times what waits leave of it."""
    why: str


def judged(job: Job, choice: Choice, hardware: Hardware) -> Ranked:
    """Memory and time of one choice."""
    memory, step = memory_of(job, choice), step_of(job, choice, hardware)
    fits = hardware.holds(memory.total)
    mfu = model_flops(job) / step.total_s / (hardware.world * hardware.gpu.flops)
    return Ranked(choice, memory, step, fits, job.tokens / step.total_s, mfu, _why(memory, step, hardware, fits))


def rank(
    job: Job, hardware: Hardware, recompute: Recompute | None = None, micro_batch: int | None = None,
    layout: MeshLayout | None = None,
) -> list[Ranked]:  # fmt: skip
    """The best choice of ZeRO stage, recomputation and micro-batch for each layout (or for one), those that fit first,
    by tokens per second; of equally fast ones (1 %) that whose links are busy for the shortest time. What does not fit
    is ordered by memory.
    """
    best = []
    for candidate in [layout] if layout else layouts(hardware, job.model, job.batch, job.sequence_length):
        ways = [judged(job, choice, hardware) for choice in _choices(job, candidate, recompute, micro_batch)]
        if ways:
            best.append(min(ways, key=_order))
    return sorted(best, key=_order)


def _choices(job: Job, layout: MeshLayout, recompute: Recompute | None, micro_batch: int | None) -> Iterator[Choice]:
    shared = job.batch // layout.data_ranks
    sizes = [micro_batch] if micro_batch else [1 << power for power in range(MAX_MICRO_BATCH.bit_length())]
    # Under DDP `dp_shard` is `dp_replicate` by another name, which is tried as such.
    first_stage, last_stage = 1 if layout.dp_shard > 1 else 0, layout.last_zero_stage if layout.shard_ranks > 1 else 0
    for stage in range(first_stage, last_stage + 1):
        for again in [recompute] if recompute else RECOMPUTE:
            yield from (Choice(layout, stage, again, size) for size in sizes if shared % size == 0)


def _order(one: Ranked) -> tuple[bool, float, float]:
    speed = -round(100 * math.log(one.tokens_per_s)) if one.fits else 0.0
    return not one.fits, speed, sum(part.seconds for part in one.step.collectives) if one.fits else one.memory.total


def _why(memory: Memory, step: Step, hardware: Hardware, fits: bool) -> str:
    if not fits:
        kinds = {
            "weights": memory.state.parameters,
            "gradients": memory.state.gradients,
            "optimizer state": memory.state.optimizer,
            "gathered layers": memory.buffers,
            "activations": memory.activations,
        }
        most = max(kinds, key=kinds.__getitem__)
        over = memory.total / (USABLE * hardware.gpu.memory_bytes)
        return f"{over:.1f}x of what fits: most is {most}, {kinds[most] / 1e9:.1f} GB"
    losses = step.losses
    worst = max(losses, key=losses.__getitem__)
    share = losses[worst] / step.total_s
    return f"{CAUSES[worst]}: {100 * share:.0f} %" if share >= WORTH_SAYING else "computing decides"
