"""`diloco bench` at the command line: what it measures and prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli_plan import write_json
from diloco.columns import aligned
from diloco.errors import UsageError

if TYPE_CHECKING:
    from diloco.island.collectives import Measured

EPILOG = (
    "Examples:  torchrun --nproc-per-node 8 -m diloco bench collectives --link 450GB/s   |   "
    "torchrun --nproc-per-node 8 -m diloco bench collectives --layout dp_shard=4,tp=2 --sizes 1M,64M"
)
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}

bench_app = typer.Typer(help="Measure parts of a peer on this hardware.", no_args_is_help=True)


@bench_app.command(epilog=EPILOG)
def collectives(
    sizes: Annotated[str, typer.Option(help="Bytes of a message, with K, M or G of 1024.")] = "64K,1M,16M,64M",
    layout: Annotated[
        str | None, typer.Option(help="Each dimension of it: dp_shard=4,tp=2. All ranks at once.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="About so long for each measurement.")] = 0.5,
    link: Annotated[str | None, typer.Option(help="What the link can do one way, to compare with: 450GB/s.")] = None,
    site: Annotated[Path | None, typer.Option(help="Local settings (peers/*.toml): device.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write all numbers to this file.")] = None,
) -> None:
    """All-reduce, all-gather, reduce-scatter, all-to-all, send and receive between the ranks that torchrun started.

    By NCCL on GPUs, by gloo on CPUs. Bandwidths are defined as in NCCL-tests: the bus one compares with a link.
    """
    from diloco.config import load_site
    from diloco.island import Island
    from diloco.island.collectives import measure
    from diloco.plan.hardware import parse_bps
    from diloco.plan.layout import parse_layout
    from diloco.trainer import device_of

    wanted = _parse_sizes(sizes)
    mesh = parse_layout(layout) if layout else None
    link_bps = parse_bps(link) if link else None
    island = Island.here(device_of(load_site(site).value))
    try:
        measured = list(measure(island, mesh, wanted, seconds))
    finally:
        island.close()
    if island.leads:
        print("\n".join(aligned(_rows(measured, link_bps), 2)))
        if json_file is not None:
            write_json(json_file, [_row_json(one, link_bps) for one in measured])


def _parse_sizes(text: str) -> list[int]:
    sizes = []
    for piece in text.split(","):
        digits = piece.strip().rstrip("KMG")
        unit = piece.strip()[len(digits) :]
        if not (digits.isascii() and digits.isdigit() and int(digits) and unit in ("", *UNITS)):
            raise UsageError(f"cannot read {piece!r} as a size", "write bytes: --sizes 64K,1M,64M")
        sizes.append(int(digits) * UNITS.get(unit, 1))
    return sizes


def _rows(measured: Sequence[Measured], link_bps: float | None) -> list[list[str]]:
    rows = [["collective", "over", "ranks", "bytes", "time us", "algorithm GB/s", "bus GB/s", "of the link"]]
    for one in measured:
        share = f"{100 * one.bus_bps / link_bps:.1f} %" if link_bps else "-"
        bandwidths = [f"{bps / 8e9:.3g}" for bps in (one.algorithm_bps, one.bus_bps)]
        micros = f"{1e6 * one.seconds:,.0f}"
        rows.append([one.collective, one.dimension, str(one.ranks), f"{one.size_bytes:,}", micros, *bandwidths, share])
    return rows


def _row_json(one: Measured, link_bps: float | None) -> dict[str, object]:
    share = one.bus_bps / link_bps if link_bps else None
    return {**asdict(one), "algorithm_bps": one.algorithm_bps, "bus_bps": one.bus_bps, "link_share": share}
