"""A plan as aligned text, and as rows for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from diloco.columns import aligned
from diloco.plan.hardware import USABLE
from diloco.plan.job import RECOMPUTE, STAGES
from diloco.plan.published import UTILISATIONS, Cell
from diloco.plan.question import DAY_S, WANTED_UTILISATION, Plan, Wan
from diloco.plan.ranking import Ranked
from diloco.plan.step import Step
from diloco.suggest import TOKENS_PER_PARAMETER

SHOWN_LAYOUTS = 8


def plan_text(plan: Plan) -> str:
    """Sections with a blank line between them."""
    best = plan.ranked[0]
    sections = [_head(plan), _memory(plan), _layouts(plan), _collectives(best), _pipeline(plan)]
    sections += [_wan(plan.wan)] if plan.wan else []
    sections += [_host(plan.host, plan.hardware.nodes)] if plan.host else []
    return "\n\n".join("\n".join(section) for section in sections if section)


def _head(plan: Plan) -> list[str]:
    job, model, hardware, best = plan.job, plan.job.model, plan.hardware, plan.ranked[0]
    gpu = hardware.gpu
    experts = f", {model.experts} experts, {model.active} of them for a token" if model.experts else ""
    flops = 6 * model.active_parameters * plan.total_tokens
    alone_s = plan.total_tokens / job.tokens * plan.step_s
    nodes = f"{hardware.nodes} {'node' if hardware.nodes == 1 else 'nodes'} of {hardware.gpus_per_node}"
    chinchilla = f"{TOKENS_PER_PARAMETER} per parameter are {_count(TOKENS_PER_PARAMETER * model.parameters)}"
    state = model.parameters * _state_bytes(plan)
    return [
        f"model     {model.name}: {_count(model.parameters)} parameters, {model.layers} layers of {model.dim}, "
        f"{model.heads} heads{experts}",
        f"hardware  {hardware.name}: {nodes}, {gpu.memory_bytes / 1e9:g} GB each; "
        f"{100 * hardware.efficiency:g} % of {gpu.flops / 1e12:g} TFLOP/s; {_rate(gpu.local_bps)} inside a node, "
        f"{_rate(hardware.fabric_bps)} per GPU between nodes",
        f"state     {_bytes(state)} of weights, gradients and optimizer: {_state_bytes(plan)} bytes a parameter",
        f"run       {_count(plan.total_tokens)} tokens ({chinchilla}), {flops:.2e} FLOPs (6 N D)",
        f"step      {job.batch} sequences of {job.sequence_length}: {_duration(plan.step_s)}"
        + (", as measured" if plan.measured else f" with {best.choice.layout}")
        + f"; the run takes this island alone {_duration(alone_s)}",
    ]


def _state_bytes(plan: Plan) -> int:
    """Of weights, gradients and optimizer, for each parameter."""
    precision = plan.job.precision
    return precision.parameter + precision.gradient + precision.optimizer


def _memory(plan: Plan) -> list[str]:
    rows = [["", "weights", "gradients", "optimizer", "buffers", *(f"all: {kind}" for kind in RECOMPUTE)]]
    for name, of_stage in groupby(plan.memory, key=lambda row: row.stage):
        ways = list(of_stage)
        state = ways[0].memory.state
        sizes = (state.parameters, state.gradients, state.optimizer, ways[0].memory.buffers)
        totals = [_bytes(way.memory.total) + (" fits" if way.fits else "     ") for way in ways]
        rows.append([name, *(_bytes(size) for size in sizes), *totals])
    usable = _bytes(USABLE * plan.hardware.gpu.memory_bytes)
    return [
        f"each GPU with {plan.table_layout}; in all when nothing, attention's matrix or whole layers are computed "
        f"again; {usable} fit",
        *aligned(rows),
    ]


def _layouts(plan: Plan) -> list[str]:
    rows = [["layout", "sharded", "again", "micro", "memory", "step", "tokens/s", "MFU", ""]]
    for one in plan.ranked[:SHOWN_LAYOUTS]:
        choice = one.choice
        rows.append(
            [
                str(choice.layout), STAGES[choice.stage], choice.recompute,
                f"{choice.micro_batches(plan.job)} x {choice.micro_batch}", _bytes(one.memory.total),
                _duration(one.step.total_s), f"{one.tokens_per_s:,.0f}", f"{100 * one.mfu:.1f} %", one.why,
            ]
        )  # fmt: skip
    fitting = sum(one.fits for one in plan.ranked)
    if not fitting:
        return [
            "no layout fits: more GPUs, a smaller --batch, or --recompute full; the nearest ones",
            *aligned(rows, 1),
        ]
    return [f"{fitting} of {len(plan.ranked)} layouts fit, the fastest first", *aligned(rows, 1)]


def _collectives(best: Ranked) -> list[str]:
    """Of the first layout, in one inner step."""
    if not best.step.collectives:
        return []
    rows = [["collective", "of", "link", "calls", "sent", "seconds", "waited"]]
    for one in best.step.collectives:
        times = [_duration(one.seconds), _duration(one.waited_s)]
        rows.append([one.name, one.dimension, one.link, f"{one.count:,}", _bytes(one.sent_bytes), *times])
    return [f"each rank in a step with {best.choice.layout}: {_losses(best.step)}", *aligned(rows, 1)]


def _losses(step: Step) -> str:
    parts = [f"computing {_duration(step.compute_s)}"]
    parts += [f"{cause} {_duration(seconds)}" for cause, seconds in step.losses.items() if seconds]
    return ", ".join(parts)


def _pipeline(plan: Plan) -> list[str]:
    if not plan.pipeline:
        return []
    rows = [["stages", "micro-batches", "bubble", "interleaved by 2"]]
    for one in plan.pipeline:
        interleaved = f"{100 * one.interleaved:.1f} %" if one.interleaved is not None else "too few layers"
        rows.append([str(one.stages), str(one.micro_batches), f"{100 * one.bubble:.1f} %", interleaved])
    return ["a pipeline's bubble, (P - 1) / (m + P - 1), where all other ranks are data parallel", *aligned(rows)]


def _wan(wan: Wan) -> list[str]:
    rows = [
        [
            "method",
            "H",
            "P",
            "overlap",
            "bits",
            "a sync",
            "a step",
            "transfer",
            "computing",
            f"{100 * WANTED_UTILISATION:g} % needs",
            "run",
        ]
    ]
    for one in wan.rows:
        sync = one.sync
        rows.append(
            [
                sync.method, str(sync.inner_steps), str(sync.fragments), str(sync.overlap), f"{sync.bits:.4g}",
                _bytes(one.sync_bytes), _bytes(one.bytes_per_step), _duration(one.transfer_s),
                f"{100 * one.utilisation:.1f} %", f"{one.needed_bps / 1e9:.3g} Gbit/s", _duration(one.days * DAY_S),
            ]
        )  # fmt: skip
    late = f", {1000 * wan.latency_s:g} ms one way" if wan.latency_s else ""
    return [
        f"{wan.peers} such islands over {wan.link_bps / 1e9:g} Gbit/s{late}: bytes that each sends, seconds of one "
        "fragment on the link, share of time spent computing",
        *aligned(rows),
    ]


def _host(host: dict[str, float], nodes: int) -> list[str]:
    rows = [[name, _bytes(size)] for name, size in host.items() if size]
    total = sum(host.values())
    shared = f", {_bytes(total / nodes)} on each of {nodes} nodes" if nodes > 1 else ""
    return [f"host memory of the outer state: {_bytes(total)} at most{shared}", *aligned(rows)]


# ---------------------------------------------------------------- the published table


def bandwidth_table_text(cells: Sequence[Cell]) -> str:
    """Ours beside the published ones, in Gbit/s."""
    rows = [["method", "model", *(f"{100 * share:g} %" for share in UTILISATIONS)]]
    for (method, model), of_row in groupby(
        sorted(cells, key=_method_first(cells)), key=lambda cell: (cell.method, cell.model)
    ):
        rows.append([method, model, *(_cell(cell) for cell in of_row)])
    equal = sum(cell.grid_steps_apart == 0 for cell in cells)
    near = sum(abs(cell.grid_steps_apart) <= 1 for cell in cells)
    head = "Gbit/s for a compute utilisation, two peers, H = 100: simulated (published in arXiv 2501.18512)"
    tail = f"{equal} of {len(cells)} cells are equal, {near} within one step of the grid (a factor of 1.207)"
    return "\n".join([head, *aligned(rows, 2), tail])


def _method_first(cells: Sequence[Cell]) -> Any:
    methods = list(dict.fromkeys(cell.method for cell in cells))
    return lambda cell: methods.index(cell.method)


def _cell(cell: Cell) -> str:
    return f"{cell.gbit_s:.1f} ({cell.published_gbit_s:.1f})"


def bandwidth_table_json(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """A row for each cell."""
    return [asdict(cell) for cell in cells]


# ---------------------------------------------------------------- for programs


def plan_json(plan: Plan) -> dict[str, Any]:
    """All numbers, in bytes, seconds, bits per second; rows where the text has a table."""
    job, model = plan.job, plan.job.model
    return {
        "model": asdict(model),
        "hardware": asdict(plan.hardware) | {"world": plan.hardware.world},
        "training": {
            "tokens": plan.total_tokens,
            "chinchilla_tokens": TOKENS_PER_PARAMETER * model.parameters,
            "state_bytes": model.parameters * _state_bytes(plan),
            "state_bytes_per_parameter": _state_bytes(plan),
            "flops": 6 * model.active_parameters * plan.total_tokens,
            "batch": job.batch,
            "sequence_length": job.sequence_length,
            "step_s": plan.step_s,
            "days_alone": plan.total_tokens / job.tokens * plan.step_s / DAY_S,
        },
        "memory": [_memory_json(plan, row.stage, row.recompute, row.memory, row.fits) for row in plan.memory],
        "pipeline": [asdict(row) for row in plan.pipeline],
        "layouts": list(_layouts_json(plan)),
        "collectives": [asdict(one) for one in plan.ranked[0].step.collectives],
        "wan": list(_wan_json(plan.wan)) if plan.wan else [],
        "host_memory_bytes": plan.host,
    }


def _memory_json(plan: Plan, stage: str, recompute: str, memory: Any, fits: bool) -> dict[str, Any]:
    state = asdict(memory.state)
    return {
        "stage": stage,
        "recompute": recompute,
        "ranks": plan.table_layout.shard_ranks,
        **{f"{name}_bytes": size for name, size in state.items()},
        "buffers_bytes": memory.buffers,
        "activations_bytes": memory.activations,
        "total_bytes": memory.total,
        "fits": fits,
    }


def _layouts_json(plan: Plan) -> Iterator[dict[str, Any]]:
    for one in plan.ranked:
        choice = one.choice
        yield {
            **asdict(choice.layout),
            "world": choice.layout.world,
            "stage": STAGES[choice.stage],
            "recompute": choice.recompute,
            "micro_batch": choice.micro_batch,
            "micro_batches": choice.micro_batches(plan.job),
            "memory_bytes": one.memory.total,
            "fits": one.fits,
            "step_s": one.step.total_s,
            "compute_s": one.step.compute_s,
            "lost_s": one.step.losses,
            "tokens_per_s": one.tokens_per_s,
            "mfu": one.mfu,
            "why": one.why,
        }


def _wan_json(wan: Wan) -> Iterator[dict[str, Any]]:
    for one in wan.rows:
        row = asdict(one) | asdict(one.sync)
        del row["sync"]
        yield {**row, "peers": wan.peers, "link_bps": wan.link_bps, "latency_s": wan.latency_s}


# ---------------------------------------------------------------- numbers


def _scaled(value: float, units: Sequence[str]) -> str:
    """Three digits and the unit: of 1, of 1000, ..."""
    power = min(max(int(math.log10(value) // 3), 0), len(units) - 1) if value > 0 else 0
    return f"{value / 1000**power:.3g} {units[power]}"


def _bytes(size: float) -> str:
    return _scaled(size, ("B", "kB", "MB", "GB", "TB", "PB"))


def _rate(bps: float) -> str:
    return _scaled(bps / 8, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"))


def _count(number: float) -> str:
    return _scaled(number, ("", "thousand", "million", "billion", "trillion", "quadrillion")).strip()


def _duration(seconds: float) -> str:
    """In a unit that leaves few digits."""
    if seconds == 0:
        return "0"
    if seconds < 0.1:
        return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-4 else f"{1e6 * seconds:.3g} us"
    for least, unit_s, unit in ((2 * DAY_S, DAY_S, "days"), (7200, 3600, "hours"), (120, 60, "min")):
        if seconds >= least:
            return f"{seconds / unit_s:,.0f} {unit}" if seconds >= 1000 * unit_s else f"{seconds / unit_s:.3g} {unit}"
    return f"{seconds:.3g} s"
