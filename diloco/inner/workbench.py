"""The inner side of a peer: data, model, inner loop. On rank 0 a trainer puts a loop around it, and leads.

All ranks of an island do a step, an evaluation, or a look at the optimizer's state together: rank 0 announces it, the
others do it too (`Bench.serve`). Rank 0 alone reads data; the rows of a step are told to all, and each trains on its
own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diloco.base.clock import monotonic_s
from diloco.base.errors import StateError
from diloco.config.contract import Contract
from diloco.config.site import Site
from diloco.data import open_dataset
from diloco.inner.loop import InnerLoop, Ranks, evaluate, random_states, restore_random_states, seed_everything
from diloco.inner.meter import Usage, device_name, memory_of, peak_flops
from diloco.inner.tracing import Trace
from diloco.island import Island
from diloco.island.bridge import Bridge, Led
from diloco.island.context import piece_of
from diloco.island.experts import balance_together
from diloco.island.mesh import DATA_DIMENSIONS, Mesh, check, check_device, divides, sizes_of
from diloco.island.parallel import Copies, checkpoint_blocks, divide, divided
from diloco.island.pipeline import Pipelined, column_of, cut_into_stages
from diloco.island.slices import Pieces, Slices, whole_slices
from diloco.models import build_model, count_parameters
from diloco.models.transformer import Transformer
from diloco.observe.events import RankMemory
from diloco.outer.fragments import Layout, Weights, named_parameters
from diloco.outer.line import Line, weights_at_anchor
from diloco.plan.model import flops_per_token
from diloco.storage.checkpoint import Checkpoint, JsonValue, read_together, reopen
from diloco.storage.saving import Contents, Saver, Written

IDLE_SHARE = 0.1
"""Of the time for which ranks wait for each other: how often they are told that rank 0 still waits for the world."""


class Bench:
    """One rank's part of it: the model, or its share of one, and the inner loop."""

    def __init__(self, contract: Contract, site: Site, island: Island, vocab_size: int) -> None:
        """All ranks make theirs together, with rank 0's contract. Raises ConfigError when they do not fit the model."""
        check_device(site, contract, island.device.type)
        sizes = sizes_of(site.mesh, island.size)
        check(sizes, site, contract, island.ranks_per_node)
        self.contract, self.site, self.island = contract, site, island
        self.mesh = Mesh.of(sizes, island.rank, island.device.type, island.timeout_s)
        self.vocab_size = vocab_size
        self.divided = island.size > 1 and divides(sizes, site.mesh)
        self.model, self.ranks, self.weights = self._divided() if self.divided else self._whole()
        if island.size > 1:
            balance_together(self.model, self.mesh.of_one_stage() if self.mesh.size("pp") > 1 else None)
        seed_everything(contract.run.seed)
        compiled = site.device.compile and not self.divided  # else its blocks are
        total = contract.run.total_tokens
        self.inner = InnerLoop(
            self.model, self._inner_section(), total, island.device, compile=compiled, ranks=self.ranks
        )
        self.saver = Saver(island)
        self._tasks: dict[str, Callable[..., object]] = {
            "idle": lambda: None,
            "step": self._step,
            "evaluate": self._evaluate,
            "save": self._save_part,
            "restore": self._restore,
            "memory": self._memory,
            "trace": self._begin_trace,
        }
        self.kept: Callable[[], Slices] = dict
        """What this rank holds of the outer side, to be saved with rank 0's."""
        self._trace: Trace | None = None
        self._on_traced: Callable[[Path], None] = lambda _: None

    @staticmethod
    def follow(contract: Contract, site: Site, island: Island) -> None:
        """The life of a rank whose rank 0 holds the whole outer state, or none."""
        bench = Bench(contract, site, island, int(island.share()))
        fragments = Layout.agreed(bench.weights.shapes, contract).on_lane(island.rank, 1).fragments
        nothing = torch.empty(0)
        bench.serve(
            read=lambda fragment: bench.weights.read(fragments[fragment]),
            write=lambda fragment: bench.weights.write(fragments[fragment], nothing),
        )

    def serve(self, **tasks: Callable[..., object]) -> None:
        """Do what rank 0 announces, until the end: what is told here, and `tasks`."""
        self.island.serve({**self._tasks, **tasks})
        self.saver.wait()

    @property
    def parameters(self) -> int:
        """Elements of all parameters of the whole model, shared ones once."""
        pipeline = self.ranks.pipeline if self.ranks else None
        return count_parameters(pipeline.whole_model if pipeline else self.model)

    def _build(self) -> nn.Module:
        contract = self.contract
        return build_model(contract.model, self.vocab_size, contract.run.seed, Path(self.site.data.root))

    def _whole(self) -> tuple[nn.Module, Ranks | None, Weights]:
        """A model that each rank has all of."""
        island = self.island
        model = self._build().to(island.device)
        if isinstance(model, Transformer):
            checkpoint_blocks(model, self.site.device.checkpointing)
        own = named_parameters(model)
        if island.size == 1:
            return model, None, Weights(own)
        return model, Copies(model, island.device), self._bridged(Bridge(own, island))

    def _divided(self) -> tuple[nn.Module, Ranks, Weights]:
        """A model that each rank has a share of. Its values come from rank 0's host, where the whole one is built."""
        island, section = self.island, self.site.mesh
        whole = named_parameters(self._build()) if island.leads else {}
        with torch.device("meta"):
            model = self._build()
        assert isinstance(model, Transformer)
        bf16 = self.contract.inner.precision == "bf16"
        if self.mesh.size("pp") > 1:
            return self._in_stages(model, whole, bf16=bf16)
        ranks = divided(model, self.mesh, self.site, bf16=bf16)
        model.to_empty(device="cpu" if section.offload else island.device)
        bridge = Bridge(named_parameters(model), island)
        bridge.begin(whole)
        return model, ranks, self._bridged(bridge)

    def _bridged(self, bridge: Bridge) -> Weights:
        """Under gossip rank 0 holds all of the outer state, and nobody announces the steps of a round."""
        gossip = self.contract.membership.policy == "gossip"
        return Led(bridge, self.island) if gossip and self.island.leads else bridge

    def _in_stages(
        self, model: Transformer, whole: dict[str, Tensor], *, bf16: bool
    ) -> tuple[nn.Module, Ranks, Weights]:
        """A model, given on the meta device, of which each rank has some layers, and a share of those."""
        section, device = self.site.mesh, self.island.device
        length = self.contract.data.sequence_length
        stages, layers = cut_into_stages(model, self.mesh, section, self.contract.model, length, bf16=bf16)
        for stage in stages.stages:
            divide(stage.part, stage, self.mesh, self.site, bf16=bf16)
        stages.to_empty(device=device)
        column = column_of(model, layers, self.mesh, section, device)
        bridge = Bridge(named_parameters(stages), self.island, column)
        bridge.begin(whole)
        return stages, Pipelined(stages, model, self.mesh, section, column), self._bridged(bridge)

    def _inner_section(self) -> Any:
        """Each rank trains its share of the peer's micro-batch, in pieces."""
        share = self.contract.inner.batch_size // self.mesh.size(*DATA_DIMENSIONS)
        return self.contract.inner.model_copy(update={"batch_size": share // self.site.mesh.micro_batches})

    # ------------------------------------------------------------ what all ranks do together

    def _step(self, position: int, shape: tuple[int, int], block: Tensor | None = None) -> float:
        with self.inner.phases.host("data"):
            block = self._told(block, shape)
        micro_batches = torch.split(block, self.contract.inner.batch_size)
        ranks, place = self.mesh.size(*DATA_DIMENSIONS), self.mesh.place(*DATA_DIMENSIONS)
        mine = torch.cat([micro_batch.chunk(ranks)[place] for micro_batch in micro_batches])
        loss = self.inner.step(self._piece(mine), position)
        with self.inner.phases.host("wait"):  # for the slowest rank
            loss = self.island.mean(loss)
        self._traced()
        return loss

    def _begin_trace(self, folder: str, steps: int) -> None:
        path = Path(folder) / f"rank-{self.island.rank}.json.gz"
        self._trace = Trace(path, steps, self.island.device)

    def _traced(self) -> None:
        """An inner step is over, which may be the last of a trace."""
        if self._trace is not None and self._trace.step():
            if self._trace.path.is_file():
                self._on_traced(self._trace.path)
            self._trace = None

    def _evaluate(self, shape: tuple[int, int], blocks: Tensor | None = None) -> float:
        blocks = self._told(blocks, shape)
        batch_size, device = self.contract.inner.batch_size, self.island.device
        loss = evaluate(self.model, self._piece(blocks), batch_size, device, self.ranks)
        return self.island.mean(loss) if self.mesh.size("cp") > 1 else loss

    def _piece(self, rows: Tensor) -> Tensor:
        """What this rank has of these sequences."""
        return piece_of(rows, self.mesh.place("cp"), self.mesh.size("cp"))

    def _memory(self) -> list[list[int]]:
        """Numbers of `RankMemory` by rank."""
        told = self.island.gather(json.dumps(memory_of(self.island.device)))
        return [json.loads(one) for one in told]

    def _live(self, *, local: bool) -> Slices:
        """What this rank holds, and inner steps move: the optimizer's state, and the weights if they are wanted."""
        live = {"inner": self.inner.state()}
        return {**live, "local": self.inner.weights()} if local else live

    def _save_part(self, local: bool) -> None:
        self.saver.save_part(self.kept(), self._live(local=local))

    def _restore(self, path: str, digest: str) -> None:
        self._take_together(lambda: reopen(Path(path), digest))

    def _take_together(self, opened: Callable[[], Checkpoint]) -> None:
        """Each rank reads what it holds. Raises StateError on all ranks when one cannot."""
        mine = [one.box.name for one in self.inner.weights()]
        known = {name for names in self.island.gather(json.dumps(mine)) for name in json.loads(names)}
        read_together(self.island, lambda: self._take(opened(), known))

    def _take(self, checkpoint: Checkpoint, known: Collection[str]) -> None:
        """`known`: parameters of all ranks."""
        state, weights = checkpoint.groups.get("inner", Pieces(())), checkpoint.groups.get("local", Pieces(()))
        mine = {one.box.name: one for one in self.inner.weights()} if weights else {}
        if any(name not in weights or weights.shape(name) != one.box.shape for name, one in mine.items()):
            cause = f"the weights in checkpoint {checkpoint.path} are not those of this model"
            raise StateError(cause, "resume with the contract that wrote the checkpoint")
        elsewhere = {entry for entry in self.inner.foreign(state) if entry.rpartition("/")[0] in known}
        self.inner.load_state(checkpoint.value("inner", dict), state, elsewhere)
        for one in mine.values():
            weights.read(one)

    def _told(self, block: Tensor | None, shape: tuple[int, int]) -> Tensor:
        """Rank 0's rows of tokens."""
        return self.island.share_tensor(torch.empty(shape, dtype=torch.int64) if block is None else block)


class Workbench(Bench):
    """What inner steps are done on, for the trainer on rank 0."""

    def __init__(self, contract: Contract, site: Site, island: Island) -> None:
        self.dataset = open_dataset(contract.data, Path(site.data.root))
        super().__init__(contract, site, island, int(island.share(str(self.dataset.vocab_size))))
        device, precision = site.device, contract.inner.precision
        self.usage = Usage(
            flops_per_token(contract, self.vocab_size),
            peak_flops(device, island.device, precision),
            island.size,
            self.inner.phases,
        )
        self._told_s = monotonic_s()
        self._steps = 0
        self._trace_folder: Path | None = None

    def trace_into(self, folder: Path, on_traced: Callable[[Path], None]) -> None:
        """Where the ranks write the traces that `device.profile_steps` asks for, and whom to tell of rank 0's."""
        self._trace_folder, self._on_traced = folder.resolve(), on_traced

    def facts(self) -> dict[str, Any]:
        """What an event tells of this island once."""
        return {
            "ranks": self.island.size,
            "mesh": {name: size for name, size in self.mesh.sizes.items() if size > 1},
            "device": device_name(self.island.device),
            "flops_per_token": self.usage.flops_per_token,
            "peak_flops_per_rank": self.usage.peak_flops,
        }

    def used(self) -> dict[str, Any]:
        """What an event tells of the hardware since that was told last: `Usage.told`, and memory by rank."""
        self._announce("memory")
        memory = tuple(RankMemory(*numbers) for numbers in self._memory())
        return {**self.usage.told(), "memory": memory}

    def step(self, block: Tensor, position: int) -> float:
        """One inner step of the whole island, at this many tokens of the run. Returns the mean loss."""
        shape = (block.shape[0], block.shape[1])
        self._trace_if_due()
        self._announce("step", position=position, shape=shape)
        return self._step(position, shape, block)

    def _trace_if_due(self) -> None:
        device = self.site.device
        if self._trace_folder is not None and device.profile_steps and self._steps == device.profile_after:
            folder, steps = str(self._trace_folder), device.profile_steps
            self._announce("trace", folder=folder, steps=steps)
            self._begin_trace(folder, steps)
        self._steps += 1

    def idle(self) -> bool:
        """Say to the other ranks now and then that we wait for the world. Always true."""
        if monotonic_s() - self._told_s > IDLE_SHARE * self.island.timeout_s:
            self._announce("idle")
        return True

    def linger(self, began_s: float) -> None:
        """As slow as `device.step_s` and `device.speed` have it."""
        device = self.site.device
        lasts_s = max(monotonic_s() - began_s, device.step_s) / device.speed
        if device.step_s or device.speed < 1:
            time.sleep(max(began_s + lasts_s - monotonic_s(), 0.0))

    def evaluate(self, line: Line) -> float:
        """Held-out loss of the anchor (nats per token); local weights are put back afterwards."""
        heldout = self.dataset.heldout(self.contract.eval.sequences)
        with weights_at_anchor(line):
            if not self.divided:  # rank 0 has all that it takes
                return evaluate(self.model, heldout, self.contract.inner.batch_size, self.island.device)
            shape = (heldout.shape[0], heldout.shape[1])
            self._announce("evaluate", shape=shape)
            return self._evaluate(shape, heldout.contiguous())

    def save(self, directory: Path, version: int, contents: Contents, keep: int) -> Future[Written]:
        """Begin a checkpoint: of `contents`, and the inner side of all ranks; of their weights, too, if there is a
        group `local`. Training may go on at once."""
        groups, meta = contents
        local = "local" in groups
        self._announce("save", local=local)
        random = random_states()
        groups["random"] = whole_slices({key: value for key, value in random.items() if isinstance(value, Tensor)})
        numbers: dict[str, JsonValue] = {
            "vocab_size": self.vocab_size,
            "inner": self.inner.numbers(),
            "random": {key: value for key, value in random.items() if not isinstance(value, Tensor)},
        }
        return self.saver.save(directory, version, groups, self._live(local=local), {**numbers, **meta}, keep)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take back the inner side of a checkpoint, and the weights that are in it, saved on whatever mesh. The
        parameters are the anchor. Raises StateError."""
        self._announce("restore", path=str(checkpoint.path.resolve()), digest=checkpoint.digest)
        self._take_together(lambda: checkpoint)
        restore_random_states({**checkpoint.groups.get("random", {}), **checkpoint.value("random", dict)})

    def close(self) -> None:
        """The end, for all ranks."""
        self.island.dismiss()
        self.island.close()

    def _announce(self, task: str, **details: Any) -> None:
        self._told_s = monotonic_s()
        self.island.announce(task, **details)
