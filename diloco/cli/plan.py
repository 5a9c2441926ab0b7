"""`diloco plan`: memory, time and traffic of a model by arithmetic, printed or written as JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Option, Typer

from diloco.base.errors import UsageError
from diloco.cli.options import write_json

commands = Typer()

EPILOG = (
    "Examples:  diloco plan scaling-10b   |   diloco plan --params 70B --nodes 16 --peers 4 --wan 10Gbit/s   |   "
    "diloco plan muloco --gpus-per-node 1 --wan 1Gbit/s --peers 4   |   diloco plan --bandwidth-table"
)
MODEL_HELP = "A preset (diloco config presets) or a contract (a file, or a shipped name), whose settings are taken."
PARAMS_HELP = "Instead of a preset: so many parameters in a usual shape (70B). Beats a contract's model."
TABLE_HELP = "Print the published table of bandwidth for a compute utilisation beside a simulated one."


@commands.command(epilog=EPILOG)
def plan(
    model: Annotated[str | None, Argument(help=MODEL_HELP)] = None,
    params: Annotated[str | None, Option(help=PARAMS_HELP)] = None,
    overrides: Annotated[list[str] | None, Option("--set", help="section.key=value of the contract.")] = None,
    experts: Annotated[int, Option(min=0, help="Experts in each layer; 0: a dense model.")] = 0,
    active: Annotated[int, Option(min=1, help="Experts that a token goes through.")] = 1,
    sequence: Annotated[int | None, Option(min=1, help="Tokens of one sequence; 2048.")] = None,
    batch: Annotated[int | None, Option(min=1, help="Sequences of an inner step of one island.")] = None,
    tokens: Annotated[str | None, Option(help="Of the whole run; 20 per parameter.")] = None,
    precision: Annotated[str | None, Option(help="mixed, autocast (a contract's bf16) or fp32.")] = None,
    recompute: Annotated[str | None, Option(help="Activations: none, selective or full; what is best.")] = None,
    micro_batch: Annotated[int | None, Option(min=1, help="Sequences of a micro-batch; what is best.")] = None,
    virtual_stages: Annotated[int, Option(min=1, help="Pieces of the model on a rank of a pipeline.")] = 1,
    layout: Annotated[str | None, Option(help="Only this one: dp_shard=4,tp=2.")] = None,
    gpu: Annotated[str, Option(help="a100-40, a100, h100, h200, b200, l40s, rtx4090, rtx5090.")] = "h100",
    memory: Annotated[float | None, Option(help="GB of one GPU, if it is another one.")] = None,
    tflops: Annotated[float | None, Option(help="Its peak, dense bf16.")] = None,
    nvlink: Annotated[str | None, Option(help="Its link inside the node, one way: 450GB/s.")] = None,
    infiniband: Annotated[str, Option(help="Between nodes, for each GPU, one way.")] = "400Gbit/s",
    gpus_per_node: Annotated[int, Option(min=1, help="GPUs of a node.")] = 8,
    nodes: Annotated[int, Option(min=1, help="Nodes of one island.")] = 1,
    mfu: Annotated[float, Option(help="Share of the peak while nothing is waited for.")] = 0.5,
    step_time: Annotated[str | None, Option(help="An inner step as measured: 0.8s.")] = None,
    wan: Annotated[str, Option(help="What one island can send to the others.")] = "1Gbit/s",
    latency: Annotated[str, Option(help="Of the WAN, one way: 50ms.")] = "0",
    peers: Annotated[int | None, Option(min=1, help="Islands; 2, or the contract's start_peers.")] = None,
    inner_steps: Annotated[int | None, Option(min=1, help="H, without a contract; 100.")] = None,
    bandwidth_table: Annotated[bool, Option("--bandwidth-table", help=TABLE_HELP)] = False,
    json_file: Annotated[Path | None, Option("--json", help="Also write all numbers to this file.")] = None,
) -> None:  # fmt: skip
    """Tell what a model needs on given hardware, inside an island and between islands: memory, time and traffic.

    By arithmetic, from data sheets and published formulas. Ranks the layouts that fit, and says what decides.
    """
    from diloco.plan import question as ask
    from diloco.plan.answer import make_plan
    from diloco.plan.text import bandwidth_table_text, plan_json, plan_text
    from diloco.plan.timeline import bandwidth_table as published_table

    if bandwidth_table:
        if model or params:
            raise UsageError("--bandwidth-table is of the published models", "leave the model out")
        cells = list(published_table())
        print(bandwidth_table_text(cells))
        write_json(json_file, [asdict(cell) for cell in cells])
        return
    made = make_plan(
        ask.question(
            ask.ModelOptions(model, params, overrides or (), experts, active),
            ask.JobOptions(sequence, batch, tokens, precision, recompute, micro_batch, virtual_stages, layout),
            ask.HardwareOptions(gpu, memory, tflops, nvlink, infiniband, gpus_per_node, nodes, mfu, step_time),
            ask.WanOptions(wan, latency, peers, inner_steps),
        )
    )
    print(plan_text(made))
    write_json(json_file, plan_json(made))
