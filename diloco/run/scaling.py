"""Scaling of training speed with the ranks of an island: `diloco bench scaling`.

Real inner steps, on the contract's data, by 1, 2, 4, ... ranks, each number in processes of its own
(`python -m diloco.run.scaling JOB.json`). *Weak* scaling gives every rank as many rows as the smallest island's ranks
have; *strong* scaling divides the same rows among more ranks. Efficiency is tokens per second and rank beside those of
the smallest island, as usual for both.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from diloco.base.clock import monotonic_s
from diloco.base.errors import ResourceError, UsageError
from diloco.config.contract import Contract
from diloco.config.load import contract_from_json
from diloco.config.site import Site
from diloco.data.reader import BlockReader
from diloco.inner.rank_model import RankModel
from diloco.island import Island
from diloco.island.elastic import end_with_launcher, run_once
from diloco.island.mesh import check, sizes_of
from diloco.run.blocking import block
from diloco.run.trainer import ALL_BLOCKS, device_of

WARM_UPS = 2
"""Steps that are not timed: they compile, connect and allocate."""
GRACE_S = 5

Kind = Literal["weak", "strong"]


@dataclass(frozen=True, slots=True)
class IslandSpeed:
    """Inner steps of one island in `diloco bench scaling`."""

    ranks: int
    mesh: Mapping[str, int]
    """Sizes of more than one rank."""
    sequences: int
    """Sequences in one inner step of the island."""
    steps: int
    tokens_per_s: float
    """Tokens per second of the island."""
    flops_per_s: float | None
    mfu: float | None
    phases: Mapping[str, float]
    """Seconds on rank 0."""
    memory: Sequence[Mapping[str, int]]
    """By rank (numbers of `RankMemory`)."""

    @property
    def memory_bytes(self) -> int:
        """Most memory that one rank took in `bench scaling`: of its GPU, else of the host."""
        return max(rank["device_peak_bytes"] or rank["host_peak_bytes"] for rank in self.memory)


@dataclass(frozen=True, slots=True)
class Scaled:
    """An island in `diloco bench scaling` beside the smallest one."""

    scaling: Kind
    measured: IslandSpeed
    efficiency: float


@dataclass(frozen=True, slots=True)
class ScalingJob:
    """Measurement of one island for `diloco bench scaling`."""

    contract: Contract
    site: Site
    ranks: int


def jobs(contract: Contract, site: Site, ranks: Sequence[int]) -> list[tuple[Kind, ScalingJob]]:
    """Islands for `bench scaling` to measure, the smallest first, which counts for both kinds of scaling.

    One rank has the whole model, whatever the site's mesh. Raises UsageError and ConfigError.
    """
    if not ranks or sorted(set(ranks)) != list(ranks) or any(count % ranks[0] for count in ranks):
        cause = f"cannot compare islands of {', '.join(map(str, ranks))} ranks"
        raise UsageError(cause, "give rising multiples of the first number: --ranks 1,2,4")
    made: list[tuple[Kind, ScalingJob]] = []
    for kind in ("weak", "strong"):
        for count in ranks:
            rows = contract.inner.batch_size * (count // ranks[0] if kind == "weak" else 1)
            inner = contract.inner.model_copy(update={"batch_size": rows})
            agreed = contract.model_copy(update={"inner": inner})
            its_site = site if count > 1 else site.model_copy(update={"mesh": Site().mesh})
            check(sizes_of(its_site.mesh, count), its_site, agreed, count)
            if kind == "weak" or count > ranks[0]:
                made.append((kind, ScalingJob(agreed, its_site, count)))
    return made


def compare(jobs: Sequence[tuple[Kind, ScalingJob]], seconds: float, folder: Path) -> Iterator[Scaled]:
    """Run the jobs of `bench scaling`: start each island in turn, on this machine, and compare its speed with the
    smallest one's. `folder`: for files that are passed to the ranks.

    Raises ResourceError when one of them fails.
    """
    base: IslandSpeed | None = None
    reported, found = folder / "job.json", folder / "measured.json"
    for kind, job in jobs:
        found.unlink(missing_ok=True)
        tree = {"contract": job.contract.to_json(), "site": job.site.model_dump_json()}
        reported.write_text(json.dumps({**tree, "seconds": seconds, "found": str(found)}))
        code = run_once(job.ranks, "diloco.run.scaling", [str(reported)], GRACE_S)
        if not found.is_file():
            cause = f"the {job.ranks} ranks ended " + (f"with exit code {code}" if code else "before they had measured")
            raise ResourceError(cause, "their output says why")
        measured = IslandSpeed(**json.loads(found.read_text()))
        base = base or measured
        yield Scaled(kind, measured, measured.tokens_per_s / measured.ranks / (base.tokens_per_s / base.ranks))
        if measured is base:
            yield Scaled("strong", measured, 1.0)


def measure(contract: Contract, site: Site, island: Island, seconds: float) -> IslandSpeed | None:
    """One `bench scaling` island: inner steps for about so long, 3 at least; all ranks call it. None but on rank 0."""
    model = RankModel(contract, site, island)
    reader = BlockReader(model.dataset, contract.run.seed) if model.dataset is not None else None
    if reader is not None:
        reader.lease(ALL_BLOCKS)
    for _ in range(WARM_UPS):
        _step(model, reader)
    model.usage.begin()
    began_s, steps = monotonic_s(), 0
    goes_on = True
    while goes_on:
        _step(model, reader)
        steps += 1
        goes_on = bool(int(island.share(str(int(steps < 3 or monotonic_s() - began_s < seconds)))))
    took_s = monotonic_s() - began_s
    used, facts = model.used(), model.facts()
    island.close()
    if not island.leads:
        return None
    return IslandSpeed(
        island.size, facts["mesh"], contract.inner.sequences_per_step, steps, steps * contract.tokens_per_step / took_s,
        used["flops_per_s"], used["mfu"], used["phases"], [asdict(rank) for rank in used["memory"]],
    )  # fmt: skip


def _step(model: RankModel, reader: BlockReader | None) -> None:
    tokens, began_s, rows = model.contract.tokens_per_step, monotonic_s(), None
    if reader is not None:
        with model.inner.phases.host("data"):
            rows = reader.next(model.contract.inner.sequences_per_step)
    model.step(rows, (model.inner.steps + 1) * tokens)
    block(model.linger(began_s))
    model.usage.step(tokens, monotonic_s() - began_s)


def limited(site: Site) -> Site:
    """The site for `bench scaling` with a number of CPU threads for each rank of an island: one, unless the site sets
    it or a GPU trains. Ranks that each take all cores would measure how they fight for them."""
    if site.device.threads is not None or device_of(site).type != "cpu":
        return site
    return site.model_copy(update={"device": site.device.model_copy(update={"threads": 1})})


def main(arguments: Sequence[str]) -> None:
    """Entry point of one rank of an island that `diloco bench scaling` runs."""
    end_with_launcher()
    reported: dict[str, Any] = json.loads(Path(arguments[0]).read_text())
    contract, site = contract_from_json(reported["contract"]), Site.model_validate_json(reported["site"])
    measured = measure(contract, site, Island.here(device_of(site)), reported["seconds"])
    if measured is not None:
        Path(reported["found"]).write_text(json.dumps(asdict(measured)))


if __name__ == "__main__":
    main(sys.argv[1:])
