"""`diloco bench`: measures collectives and scaling on this hardware, and prints tables of them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option, Typer

from diloco.base.errors import UsageError
from diloco.base.readable import aligned, readable_bytes, readable_flops, readable_share
from diloco.cli.options import raise_when_stopped, write_json

if TYPE_CHECKING:
    from diloco.config.contract import Contract
    from diloco.config.site import Site
    from diloco.island.collectives import Measured
    from diloco.run.scaling import IslandSpeed

EPILOG = (
    "Examples:  torchrun --nproc-per-node 8 -m diloco bench collectives --link 450GB/s   |   "
    "torchrun --nproc-per-node 8 -m diloco bench collectives --layout dp_shard=4,tp=2 --sizes 1M,64M"
)
SCALING_EPILOG = (
    "Examples:  diloco bench scaling configs/quick.toml --ranks 1,2,4 --set mesh.shard=parameters   |   "
    "diloco bench scaling scaling-1.3b --ranks 1,2,4,8 --site peers/node-8gpu.toml --set inner.batch_size=8 "
    "--set data.sequence_length=2048   |   torchrun --nnodes 2 --nproc-per-node 8 -m diloco bench scaling ..."
)
MODEL_HELP = "A contract (configs/*.toml), or a preset (diloco config presets) with a contract's defaults."
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}

bench_app = Typer(help="Measure parts of a peer on this hardware.", no_args_is_help=True)


@bench_app.command(epilog=EPILOG)
def collectives(
    sizes: Annotated[str, Option(help="Bytes of a message, with K, M or G of 1024.")] = "64K,1M,16M,64M",
    layout: Annotated[str | None, Option(help="Each dimension of it: dp_shard=4,tp=2. All ranks at once.")] = None,
    seconds: Annotated[float, Option(min=0, help="About so long for each measurement.")] = 0.5,
    link: Annotated[str | None, Option(help="What the link can do one way, to compare with: 450GB/s.")] = None,
    site: Annotated[Path | None, Option(help="Local settings (peers/*.toml): device.")] = None,
    json_file: Annotated[Path | None, Option("--json", help="Also write all numbers to this file.")] = None,
) -> None:
    """All-reduce, all-gather, reduce-scatter, all-to-all, send and receive between the ranks that torchrun started.

    By NCCL on GPUs, by gloo on CPUs. Bandwidths are defined as in NCCL-tests: the bus one compares with a link.
    """
    from diloco.config.load import load_site
    from diloco.island import Island
    from diloco.island.collectives import measure
    from diloco.plan.hardware import parse_bps, parse_layout
    from diloco.run.trainer import device_of

    wanted = _parse_sizes(sizes)
    mesh = parse_layout(layout) if layout else None
    link_bps = parse_bps(link) if link else None
    island = Island.here(device_of(load_site(site).value))
    try:
        measured = list(measure(island, mesh, wanted, seconds))
    finally:
        island.close()
    if island.leads:
        _show_collectives(measured, link_bps, json_file)


@bench_app.command(epilog=SCALING_EPILOG)
def scaling(
    model: Annotated[str, Argument(help=MODEL_HELP)],
    ranks: Annotated[str, Option(help="Islands to compare; the first one is the measure.")] = "1,2,4",
    seconds: Annotated[float, Option(min=0, help="About so long for each island, after 2 steps.")] = 10.0,
    site: Annotated[Path | None, Option(help="Local settings (peers/*.toml): mesh, device.")] = None,
    overrides: Annotated[
        list[str] | None, Option("--set", help="section.key=value of contract or site. Repeatable.")
    ] = None,
    json_file: Annotated[
        Path | None, Option("--json", help="Also write all numbers to this file, and a table for `report`.")
    ] = None,
) -> None:
    """Inner steps by 1, 2, 4, ... ranks of this machine on the site's mesh: how much faster more ranks train.

    Each number is an island of its own, started in turn; under torchrun or srun only the ranks that were started. One
    rank has the whole model. On a CPU a rank has one thread, or device.threads.

    Columns: scaling (weak: as many rows for each rank; strong: the same rows for all together), ranks, mesh, rows (of
    one inner step of the island), tokens/s (of the island), efficiency (tokens/s of each rank beside the first
    island's), memory (the most that a rank took: of its GPU, else of the host), FLOP/s (of the model, all ranks), MFU
    (of the ranks' peak, where it is known: device.peak_tflops).
    """
    from diloco.config.load import load_site, split_overrides
    from diloco.island import Island, given_ranks
    from diloco.run.scaling import compare, jobs, limited, measure
    from diloco.run.trainer import device_of

    local, shared = split_overrides(overrides or [])
    here, contract = limited(load_site(site, local).value), _contract_of(model, shared)
    if given_ranks() is not None:  # started by torchrun or srun: one island, which is compared with none
        measured = measure(contract, here, Island.here(device_of(here)), seconds)
        if measured is not None:
            _show_scaling(contract.run.name, here, [(None, None, measured)], json_file)
        return
    pieces = [piece.strip() for piece in ranks.split(",")]
    if not all(piece.isascii() and piece.isdigit() and int(piece) for piece in pieces):
        raise UsageError(f"cannot read {ranks!r} as numbers of ranks", "write them with commas: --ranks 1,2,4")
    wanted = jobs(contract, here, list(map(int, pieces)))
    raise_when_stopped()  # the ranks that were started are ended
    with tempfile.TemporaryDirectory() as folder:
        found = list(compare(wanted, seconds, Path(folder)))
    weak_first = sorted(found, key=lambda row: row.scaling != "weak")
    _show_scaling(model, here, [(row.scaling, row.efficiency, row.measured) for row in weak_first], json_file)


def _contract_of(model: str, overrides: Sequence[str]) -> Contract:
    """The contract for `diloco bench`: a file, a shipped one, or the defaults with a preset's model."""
    from diloco.config.load import load_contract
    from diloco.config.presets import PRESETS

    if model not in PRESETS:
        return load_contract(model, overrides).value
    named = ["run.name=scaling", "run.total_tokens=1_000_000_000", f"model.preset='{model}'"]
    return load_contract(None, [*named, *overrides]).value


def _show_scaling(
    model: str, site: Site, islands: Sequence[tuple[str | None, float | None, IslandSpeed]], json_file: Path | None
) -> None:
    """Print `bench scaling`: a row for each island, with kind and efficiency, if it was compared, and speed."""
    header = ("scaling", "ranks", "mesh", "rows", "tokens/s", "efficiency", "memory", "FLOP/s", "MFU")
    rows, numbers = [], []
    for scaling, efficiency, measured in islands:
        mesh = " x ".join(f"{name} {size}" for name, size in measured.mesh.items()) or "one rank"
        share = "-" if efficiency is None else f"{100 * efficiency:.0f} %"
        speed = [f"{measured.tokens_per_s:,.0f}", share]
        hardware = [readable_bytes(measured.memory_bytes), readable_flops(measured.flops_per_s)]
        counts = [scaling or "-", str(measured.ranks), mesh, str(measured.sequences)]
        rows.append([*counts, *speed, *hardware, readable_share(measured.mfu)])
        kind = {} if scaling is None else {"scaling": scaling}
        numbers.append({**kind, "efficiency": efficiency, **asdict(measured)})
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = site.device.threads
    where = f"{cores} cores here" + (f", {threads} for each rank" if threads else "")
    print("\n".join([*aligned([header, *rows], 3), f"  {where}"]))
    table = {"title": f"Scaling of {model} ({where})", "header": header, "rows": rows}
    write_json(json_file, {"cores": cores, "threads": threads, "rows": numbers, "table": table})


def _parse_sizes(text: str) -> list[int]:
    """The option `--sizes` of `diloco bench`: sizes of messages in bytes, from `64K,1M`. Raises UsageError."""
    sizes = []
    for piece in text.split(","):
        digits = piece.strip().rstrip("KMG")
        unit = piece.strip()[len(digits) :]
        if not (digits.isascii() and digits.isdigit() and int(digits) and unit in ("", *UNITS)):
            raise UsageError(f"cannot read {piece!r} as a size", "write bytes: --sizes 64K,1M,64M")
        sizes.append(int(digits) * UNITS.get(unit, 1))
    return sizes


def _show_collectives(measured: Sequence[Measured], link_bps: float | None, json_file: Path | None) -> None:
    """Print `bench collectives`' row for each collective, dimension of the mesh and size of a message."""
    numbers: list[dict[str, object]] = []
    rows = [["collective", "over", "ranks", "bytes", "time us", "algorithm GB/s", "bus GB/s", "of the link"]]
    for one in measured:
        share = f"{100 * one.bus_bps / link_bps:.1f} %" if link_bps else "-"
        bandwidths = [f"{bps / 8e9:.3g}" for bps in (one.algorithm_bps, one.bus_bps)]
        micros = f"{1e6 * one.seconds:,.0f}"
        rows.append([one.collective, one.dimension, str(one.ranks), f"{one.size_bytes:,}", micros, *bandwidths, share])
        link_share = one.bus_bps / link_bps if link_bps else None
        derived = {"algorithm_bps": one.algorithm_bps, "bus_bps": one.bus_bps, "link_share": link_share}
        numbers.append({**asdict(one), **derived})
    print("\n".join(aligned(rows, 2)))
    write_json(json_file, numbers)
