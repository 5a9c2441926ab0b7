"""A plan as aligned text for people, and as rows for programs: bytes, seconds, bits per second."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from diloco.base.readable import aligned, readable_bytes, readable_count
from diloco.plan.answer import WANTED_UTILISATION, Plan
from diloco.plan.cost import RECOMPUTE, STAGES, Choice, Job
from diloco.plan.hardware import USABLE
from diloco.plan.suggest import TOKENS_PER_PARAMETER
from diloco.plan.timeline import UTILISATIONS, Cell

MAX_LAYOUTS = 8
DAY_S = 86_400


def plan_text(plan: Plan) -> str:
    """The plan in sections with a blank line between them."""
    sections = (_head, _memory, _layouts, _collectives, _pipeline, _wan, _host)
    return "\n\n".join("\n".join(lines) for lines in (section(plan) for section in sections) if lines)


def _head(plan: Plan) -> list[str]:
    question = plan.question
    job, model, tokens, hardware = question.job, question.job.model, question.total_tokens, question.hardware
    experts = f", {model.experts} experts, {model.active} of them for a token" if model.experts else ""
    chinchilla = f"{TOKENS_PER_PARAMETER} per parameter are {_count(TOKENS_PER_PARAMETER * model.parameters)}"
    gpu, nodes = hardware.gpu, "1 node" if hardware.nodes == 1 else f"{hardware.nodes} nodes"
    island = [
        f"{nodes} of {hardware.gpus_per_node}, {gpu.memory_bytes / 1e9:g} GB each",
        f"{100 * hardware.efficiency:g} % of {gpu.flops / 1e12:g} TFLOP/s"
        + (" (bf16's: say what fp32 has with --tflops)" if job.precision.compute == 4 else ""),
        *([f"{_rate(gpu.local_bps)} inside a node"] if hardware.gpus_per_node > 1 else []),
        *([f"{_rate(hardware.fabric_bps)} per GPU between nodes"] if hardware.nodes > 1 else []),
    ]
    of_state = job.precision.state
    how = "as measured" if question.step_s else f"with {plan.ranked[0].choice.layout}"
    return [
        f"model     {model.name}: {_count(model.parameters)} parameters, {model.layers} layers of {model.dim}, "
        f"{model.heads} heads{experts}",
        f"hardware  {hardware.name}: {'; '.join(island)}",
        f"state     {readable_bytes(of_state * model.parameters)} of weights, gradients and optimizer: {of_state} "
        "bytes a parameter",
        f"run       {_count(tokens)} tokens ({chinchilla}), {6 * model.active_parameters * tokens:.2e} FLOPs (6 N D)",
        f"step      {job.batch} sequences of {job.sequence_length}: {_duration(plan.step_s)} {how}; the run takes this "
        f"island alone {_duration(plan.alone_s)}",
    ]


def _memory(plan: Plan) -> list[str]:
    rows = [["", "weights", "gradients", "optimizer", "buffers", *(f"all: {kind}" for kind in RECOMPUTE)]]
    hardware = plan.question.hardware
    for stage, of_stage in groupby(plan.memory, key=lambda row: row[0].stage):
        ways = [memory for _, memory in of_stage]
        state = ways[0].state
        sizes = (state.parameters, state.gradients, state.optimizer, ways[0].buffers)
        totals = [readable_bytes(way.total) + (" fits" if hardware.holds(way.total) else "     ") for way in ways]
        rows.append([STAGES[stage], *map(readable_bytes, sizes), *totals])
    usable = readable_bytes(USABLE * hardware.gpu.memory_bytes)
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
        rows.append([*how, readable_bytes(one.memory.total), *speed, one.why])
    fitting = sum(one.fits for one in plan.ranked)
    head = f"{fitting} of {len(plan.ranked)} layouts fit, the fastest first"
    if not fitting:
        head = "no layout fits: more GPUs, a smaller --batch, or --recompute full; the nearest ones"
    return [head, *aligned(rows), *_site(plan.ranked[0].choice, plan.question.job)]


SHARDS = ("none", "optimizer", "gradients", "parameters")
"""`mesh.shard` by ZeRO stage."""


def _site(choice: Choice, job: Job) -> list[str]:
    """Lines of the plan with the keys of site and contract that give a layout."""
    layout, micro_batches, pieces = choice.layout, choice.micro_batches(job), job.pieces(choice.layout.pp)
    keys = {"shard": f'"{SHARDS[choice.stage]}"'}
    keys |= {name: str(size) for name, size in asdict(layout).items() if size > 1}
    if layout.pp > 1:  # the best schedule that its micro-batches allow
        if micro_batches < layout.pp:
            keys["schedule"] = '"gpipe"'
        elif pieces > 1 and micro_batches % layout.pp == 0:
            keys |= {"schedule": '"interleaved-1f1b"', "chunks": str(pieces)}
        else:
            keys["schedule"] = '"1f1b"'
    checkpointing = ' and [device] checkpointing = "full"' if choice.recompute == "full" else ""
    mesh = ", ".join(f"{name} = {value}" for name, value in keys.items())
    batch_size = choice.micro_batch * layout.data_ranks
    return [
        f"  the first as a site: [mesh] {mesh}{checkpointing}",
        f"  with a contract's inner.batch_size = {batch_size}, inner.accumulation = {micro_batches}",
    ]


def _collectives(plan: Plan) -> list[str]:
    """Lines of the plan on the collectives of the first layout, in one inner step."""
    step = plan.ranked[0].step
    if not step.collectives:
        return []
    rows = [["collective", "of", "link", "calls", "sent", "time", "waited"]]
    for one in step.collectives:
        times = [_duration(one.seconds), _duration(one.waited_s)]
        rows.append([one.name, one.dimension, one.link, f"{one.count:,}", readable_bytes(one.sent_bytes), *times])
    parts = {"computing": step.compute_s} | {cause: seconds for cause, seconds in step.losses.items() if seconds}
    by_cause = ", ".join(f"{cause} {_duration(seconds)}" for cause, seconds in parts.items())
    return [f"each rank in a step with {plan.ranked[0].choice.layout}: {by_cause}", *aligned(rows, 3)]


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
    rows = [["method", "H", "P", "overlap", "bits", "a sync", "a step", "transfer", "computing", wanted, "run"]]
    for row in plan.wan:
        sync = row.sync
        settings = [str(sync.inner_steps), str(sync.fragments), str(sync.overlap), f"{sync.bits:.4g}"]
        sizes = [readable_bytes(row.sync_bytes), readable_bytes(row.bytes_per_step), _duration(row.transfer_s)]
        needed = f"{row.needed_bps / 1e9:.3g} Gbit/s" if row.needed_bps else "less latency"
        rows.append([sync.method, *settings, *sizes, f"{100 * row.utilisation:.1f} %", needed, _duration(row.run_s)])
    late = f", {1000 * question.latency_s:g} ms one way" if question.latency_s else ""
    return [
        f"{question.peers} such islands over {question.link_bps / 1e9:g} Gbit/s{late}: bytes that each sends, time of "
        "one fragment on the link, share of time spent computing",
        *aligned(rows),
    ]


def _host(plan: Plan) -> list[str]:
    if not plan.host:
        return []
    rows = [["", ""], *([name, readable_bytes(size)] for name, size in plan.host.items() if size)]
    total, nodes = sum(plan.host.values()), plan.question.hardware.nodes
    shared = f", {readable_bytes(total / nodes)} on each of {nodes} nodes" if nodes > 1 else ""
    return [f"host memory of the outer state: {readable_bytes(total)} at most{shared}", *aligned(rows)[1:]]


def bandwidth_table_text(cells: Sequence[Cell]) -> str:
    """The plan's table of bandwidths by arithmetic, and the published one in brackets."""
    rows = [["method", "model", *(f"{100 * share:g} %" for share in UTILISATIONS)]]
    for (method, model), of_row in groupby(cells, key=lambda cell: (cell.method, cell.model)):
        rows.append([method, model, *(f"{cell.gbit_s:.1f} ({cell.published_gbit_s:.1f})" for cell in of_row)])
    equal = sum(cell.grid_steps_apart == 0 for cell in cells)
    near = sum(abs(cell.grid_steps_apart) <= 1 for cell in cells)
    head = "Gbit/s for a compute utilisation, two peers, H = 100: simulated (published in arXiv 2501.18512)"
    tail = f"{equal} of {len(cells)} cells are equal, {near} within one step of the grid (a factor of 1.207)"
    return "\n".join([head, *aligned(rows, 2), tail])


# ---------------------------------------------------------------- numbers

WORDS = {"k": " thousand", "M": " million", "G": " billion", "T": " trillion"}


def _count(number: float) -> str:
    """A number in the plan's text: 9.81 billion, as people name sizes of models."""
    text = readable_count(number)
    return text[:-1] + WORDS[text[-1]] if text[-1] in WORDS else text


def _rate(bps: float) -> str:
    return readable_bytes(bps / 8) + "/s"


def _duration(seconds: float) -> str:
    """Seconds in the plan's text, with few digits: `readable_duration` neither goes below 10 ms nor names days."""
    if seconds == 0:
        return "0"
    if seconds < 0.1:
        return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-4 else f"{1e6 * seconds:.3g} us"
    for least, unit_s, unit in ((2 * DAY_S, DAY_S, "days"), (7200, 3600, "hours"), (120, 60, "min")):
        if seconds >= least:
            return f"{seconds / unit_s:,.0f} {unit}" if seconds >= 1000 * unit_s else f"{seconds / unit_s:.3g} {unit}"
    return f"{seconds:.3g} s"


# ---------------------------------------------------------------- rows for programs


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as values for JSON: a list of rows for each table of the text, with all layouts, not only the first."""
    question, job, model = plan.question, plan.question.job, plan.question.job.model
    link = {"peers": question.peers, "link_bps": question.link_bps, "latency_s": question.latency_s}
    return {
        "model": asdict(model),
        "hardware": asdict(question.hardware) | {"world": question.hardware.world},
        "training": {
            "tokens": question.total_tokens,
            "chinchilla_tokens": TOKENS_PER_PARAMETER * model.parameters,
            "flops": 6 * model.active_parameters * question.total_tokens,
            "state_bytes_per_parameter": job.precision.state,
            "state_bytes": job.precision.state * model.parameters,
            "batch": job.batch,
            "sequence_length": job.sequence_length,
            "step_s": plan.step_s,
            "alone_s": plan.alone_s,
        },
        "memory": [
            {
                "stage": STAGES[choice.stage],
                "recompute": choice.recompute,
                **{f"{name}_bytes": size for name, size in asdict(memory.state).items()},
                "buffers_bytes": memory.buffers,
                "activations_bytes": memory.activations,
                "total_bytes": memory.total,
                "fits": question.hardware.holds(memory.total),
                "ranks": plan.table_layout.shard_ranks,
            }
            for choice, memory in plan.memory
        ],
        "pipeline": [asdict(row) for row in plan.pipeline],
        "layouts": list(_layout_rows(plan)),
        "collectives": [asdict(one) for one in plan.ranked[0].step.collectives],
        "wan": [row.pop("sync") | row | link for row in map(asdict, plan.wan)],
        "host_memory_bytes": plan.host,
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
