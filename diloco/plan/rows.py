"""A plan as rows for programs: bytes, seconds, bits per second."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from diloco.plan.answer import MemoryRow, Plan
from diloco.plan.job import STAGES
from diloco.plan.suggest import TOKENS_PER_PARAMETER


def plan_json(plan: Plan) -> dict[str, Any]:
    """Values for JSON; a list of rows for each table of the text, with all layouts and not only the first ones."""
    question = plan.question
    model, ranks = question.job.model, plan.table_layout.shard_ranks
    return {
        "model": asdict(model),
        "hardware": asdict(question.hardware) | {"world": question.hardware.world},
        "training": _training(plan),
        "memory": [_memory(row) | {"ranks": ranks} for row in plan.memory],
        "pipeline": [asdict(row) for row in plan.pipeline],
        "layouts": list(_layouts(plan)),
        "collectives": [asdict(one) for one in plan.ranked[0].step.collectives],
        "wan": list(_wan(plan)),
        "host_memory_bytes": plan.host,
    }


def _training(plan: Plan) -> dict[str, Any]:
    job, tokens = plan.question.job, plan.question.total_tokens
    return {
        "tokens": tokens,
        "chinchilla_tokens": TOKENS_PER_PARAMETER * job.model.parameters,
        "flops": 6 * job.model.active_parameters * tokens,
        "state_bytes_per_parameter": job.precision.state,
        "state_bytes": job.precision.state * job.model.parameters,
        "batch": job.batch,
        "sequence_length": job.sequence_length,
        "step_s": plan.step_s,
        "alone_s": plan.alone_s,
    }


def _memory(row: MemoryRow) -> dict[str, Any]:
    memory = row.memory
    return {
        "stage": row.stage,
        "recompute": row.recompute,
        **{f"{name}_bytes": size for name, size in asdict(memory.state).items()},
        "buffers_bytes": memory.buffers,
        "activations_bytes": memory.activations,
        "total_bytes": memory.total,
        "fits": row.fits,
    }


def _layouts(plan: Plan) -> Iterator[dict[str, Any]]:
    for one in plan.ranked:
        choice = one.choice
        yield {
            **asdict(choice.layout),
            "world": choice.layout.world,
            "stage": STAGES[choice.stage],
            "recompute": choice.recompute,
            "micro_batch": choice.micro_batch,
            "micro_batches": choice.micro_batches(plan.question.job),
            "memory_bytes": one.memory.total,
            "fits": one.fits,
            "step_s": one.step.total_s,
            "compute_s": one.step.compute_s,
            "lost_s": one.step.losses,
            "tokens_per_s": one.tokens_per_s,
            "mfu": one.mfu,
            "why": one.why,
        }


def _wan(plan: Plan) -> Iterator[dict[str, Any]]:
    question = plan.question
    link = {"peers": question.peers, "link_bps": question.link_bps, "latency_s": question.latency_s}
    for row in plan.wan:
        tree = asdict(row)
        yield tree.pop("sync") | tree | link
