"""A plan as aligned text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from diloco.base.readable import aligned
from diloco.plan.answer import DAY_S, WANTED_UTILISATION, MemoryRow, Plan, Ranked, WanRow
from diloco.plan.hardware import USABLE, Hardware
from diloco.plan.published import UTILISATIONS, Cell
from diloco.plan.step import RECOMPUTE, STAGES, Choice, Job, Step
from diloco.plan.suggest import TOKENS_PER_PARAMETER

MAX_LAYOUTS = 8


def plan_text(plan: Plan) -> str:
    """Sections with a blank line between them."""
    sections = [_head(plan), _memory(plan), _layouts(plan), _collectives(plan.ranked[0]), _pipeline(plan), _wan(plan)]
    if plan.host:
        sections.append(_host(plan.host, plan.question.hardware.nodes))
    return "\n\n".join("\n".join(section) for section in sections if section)


def _head(plan: Plan) -> list[str]:
    question = plan.question
    job, model, tokens = question.job, question.job.model, question.total_tokens
    experts = f", {model.experts} experts, {model.active} of them for a token" if model.experts else ""
    chinchilla = f"{TOKENS_PER_PARAMETER} per parameter are {_count(TOKENS_PER_PARAMETER * model.parameters)}"
    of_state = job.precision.state
    how = "as measured" if question.step_s else f"with {plan.ranked[0].choice.layout}"
    return [
        f"model     {model.name}: {_count(model.parameters)} parameters, {model.layers} layers of {model.dim}, "
        f"{model.heads} heads{experts}",
        _hardware(question.hardware, job.precision.compute),
        f"state     {_bytes(of_state * model.parameters)} of weights, gradients and optimizer: {of_state} bytes a "
        "parameter",
        f"run       {_count(tokens)} tokens ({chinchilla}), {6 * model.active_parameters * tokens:.2e} FLOPs (6 N D)",
        f"step      {job.batch} sequences of {job.sequence_length}: {_duration(plan.step_s)} {how}; the run takes this "
        f"island alone {_duration(plan.alone_s)}",
    ]


def _hardware(hardware: Hardware, compute_bytes: int) -> str:
    gpu, nodes = hardware.gpu, "1 node" if hardware.nodes == 1 else f"{hardware.nodes} nodes"
    speed = f"{100 * hardware.efficiency:g} % of {gpu.flops / 1e12:g} TFLOP/s"
    speed += " (bf16's: say what fp32 has with --tflops)" if compute_bytes == 4 else ""
    links = [f"{_rate(gpu.local_bps)} inside a node"] if hardware.gpus_per_node > 1 else []
    links += [f"{_rate(hardware.fabric_bps)} per GPU between nodes"] if hardware.nodes > 1 else []
    size = f"{nodes} of {hardware.gpus_per_node}, {gpu.memory_bytes / 1e9:g} GB each"
    return f"hardware  {hardware.name}: {'; '.join([size, speed, *links])}"


def _memory(plan: Plan) -> list[str]:
    rows = [["", "weights", "gradients", "optimizer", "buffers", *(f"all: {kind}" for kind in RECOMPUTE)]]
    for name, of_stage in groupby(plan.memory, key=lambda row: row.stage):
        ways = list(of_stage)
        state = ways[0].memory.state
        sizes = (state.parameters, state.gradients, state.optimizer, ways[0].memory.buffers)
        totals = [_bytes(way.memory.total) + (" fits" if way.fits else "     ") for way in ways]
        rows.append([name, *(_bytes(size) for size in sizes), *totals])
    usable = _bytes(USABLE * plan.question.hardware.gpu.memory_bytes)
    return [
        f"each GPU with {plan.table_layout}; in all when nothing, attention's matrix or whole layers are computed "
        f"again; {usable} fit",
        *aligned(rows),
    ]


def _layouts(plan: Plan) -> list[str]:
    rows = [["layout", "sharded", "again", "micro", "memory", "step", "tokens/s", "MFU", ""]]
    for one in plan.ranked[:MAX_LAYOUTS]:
        choice = one.choice
        micro = f"{choice.micro_batches(plan.question.job)} x {choice.micro_batch}"
        speed = [_duration(one.step.total_s), f"{one.tokens_per_s:,.0f}", f"{100 * one.mfu:.1f} %"]
        how = [str(choice.layout), STAGES[choice.stage], choice.recompute, micro]
        rows.append([*how, _bytes(one.memory.total), *speed, one.why])
    fitting = sum(one.fits for one in plan.ranked)
    head = f"{fitting} of {len(plan.ranked)} layouts fit, the fastest first"
    if not fitting:
        head = "no layout fits: more GPUs, a smaller --batch, or --recompute full; the nearest ones"
    return [head, *aligned(rows), *_site(plan.ranked[0].choice, plan.question.job)]


SHARDS = ("none", "optimizer", "gradients", "parameters")
"""`mesh.shard` by ZeRO stage."""


def _site(choice: Choice, job: Job) -> list[str]:
    """Keys to write to get a layout: of the site, and of the contract."""
    layout, micro_batches = choice.layout, choice.micro_batches(job)
    keys = {"shard": f'"{SHARDS[choice.stage]}"'}
    keys |= {name: str(size) for name, size in asdict(layout).items() if size > 1}
    if layout.pp > 1:
        pieces = job.pieces(layout.pp)
        interleaved = pieces > 1 and micro_batches % layout.pp == 0
        keys["schedule"] = f'"{schedule_for(layout.pp, micro_batches, interleaved=interleaved)}"'
        keys |= {"chunks": str(pieces)} if interleaved else {}
    checkpointing = ' and [device] checkpointing = "full"' if choice.recompute == "full" else ""
    mesh = ", ".join(f"{name} = {value}" for name, value in keys.items())
    batch_size = choice.micro_batch * layout.data_ranks
    return [
        f"  the first as a site: [mesh] {mesh}{checkpointing}",
        f"  with a contract's inner.batch_size = {batch_size}, inner.accumulation = {micro_batches}",
    ]


def schedule_for(stages: int, micro_batches: int, *, interleaved: bool) -> str:
    """`mesh.schedule` of a pipeline: as good as its micro-batches allow."""
    if micro_batches < stages:
        return "gpipe"
    return "interleaved-1f1b" if interleaved else "1f1b"


def _collectives(best: Ranked) -> list[str]:
    """Lines on the collectives of the first layout, in one inner step."""
    if not best.step.collectives:
        return []
    rows = [["collective", "of", "link", "calls", "sent", "time", "waited"]]
    for one in best.step.collectives:
        times = [_duration(one.seconds), _duration(one.waited_s)]
        rows.append([one.name, one.dimension, one.link, f"{one.count:,}", _bytes(one.sent_bytes), *times])
    return [f"each rank in a step with {best.choice.layout}: {_losses(best.step)}", *aligned(rows, 3)]


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


def _wan(plan: Plan) -> list[str]:
    if not plan.wan:
        return []
    question = plan.question
    wanted = f"{100 * WANTED_UTILISATION:g} % needs"
    head = ["method", "H", "P", "overlap", "bits", "a sync", "a step", "transfer", "computing", wanted, "run"]
    late = f", {1000 * question.latency_s:g} ms one way" if question.latency_s else ""
    return [
        f"{question.peers} such islands over {question.link_bps / 1e9:g} Gbit/s{late}: bytes that each sends, time of "
        "one fragment on the link, share of time spent computing",
        *aligned([head, *map(_wan_row, plan.wan)]),
    ]


def _wan_row(row: WanRow) -> list[str]:
    sync = row.sync
    settings = [str(sync.inner_steps), str(sync.fragments), str(sync.overlap), f"{sync.bits:.4g}"]
    sizes = [_bytes(row.sync_bytes), _bytes(row.bytes_per_step), _duration(row.transfer_s)]
    needed = f"{row.needed_bps / 1e9:.3g} Gbit/s" if row.needed_bps else "less latency"
    return [sync.method, *settings, *sizes, f"{100 * row.utilisation:.1f} %", needed, _duration(row.run_s)]


def _host(host: Mapping[str, float], nodes: int) -> list[str]:
    rows = [["", ""], *([name, _bytes(size)] for name, size in host.items() if size)]
    total = sum(host.values())
    shared = f", {_bytes(total / nodes)} on each of {nodes} nodes" if nodes > 1 else ""
    return [f"host memory of the outer state: {_bytes(total)} at most{shared}", *aligned(rows)[1:]]


def bandwidth_table_text(cells: Sequence[Cell]) -> str:
    """The simulated table, and the published one in brackets."""
    rows = [["method", "model", *(f"{100 * share:g} %" for share in UTILISATIONS)]]
    for (method, model), of_row in groupby(cells, key=lambda cell: (cell.method, cell.model)):
        rows.append([method, model, *(f"{cell.gbit_s:.1f} ({cell.published_gbit_s:.1f})" for cell in of_row)])
    equal = sum(cell.grid_steps_apart == 0 for cell in cells)
    near = sum(abs(cell.grid_steps_apart) <= 1 for cell in cells)
    head = "Gbit/s for a compute utilisation, two peers, H = 100: simulated (published in arXiv 2501.18512)"
    tail = f"{equal} of {len(cells)} cells are equal, {near} within one step of the grid (a factor of 1.207)"
    return "\n".join([head, *aligned(rows, 2), tail])


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


def plan_json(plan: Plan) -> dict[str, Any]:
    """Values for JSON; a list of rows for each table of the text, with all layouts and not only the first ones."""
    question = plan.question
    model, ranks = question.job.model, plan.table_layout.shard_ranks
    return {
        "model": asdict(model),
        "hardware": asdict(question.hardware) | {"world": question.hardware.world},
        "training": _training_rows(plan),
        "memory": [_memory_rows(row) | {"ranks": ranks} for row in plan.memory],
        "pipeline": [asdict(row) for row in plan.pipeline],
        "layouts": list(_layout_rows(plan)),
        "collectives": [asdict(one) for one in plan.ranked[0].step.collectives],
        "wan": list(_wan_rows(plan)),
        "host_memory_bytes": plan.host,
    }


def _training_rows(plan: Plan) -> dict[str, Any]:
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


def _memory_rows(row: MemoryRow) -> dict[str, Any]:
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


def _layout_rows(plan: Plan) -> Iterator[dict[str, Any]]:
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


def _wan_rows(plan: Plan) -> Iterator[dict[str, Any]]:
    question = plan.question
    link = {"peers": question.peers, "link_bps": question.link_bps, "latency_s": question.latency_s}
    for row in plan.wan:
        tree = asdict(row)
        yield tree.pop("sync") | tree | link
