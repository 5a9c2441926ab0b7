"""The inner side of a peer: data, model, inner loop. On rank 0 a trainer puts a loop around it, and leads.

All ranks of an island do a step, an evaluation, or a look at the optimizer's state together: rank 0 announces it, the
others do it too (`Bench.serve`). Rank 0 alone reads data; the rows of a step are told to all, and each trains on its
own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diloco.checkpoint import Checkpoint, JsonValue, reopen
from diloco.clock import monotonic_s
from diloco.config import Contract, Site
from diloco.data import open_dataset
from diloco.errors import ConfigError, StateError
from diloco.fragments import Fragment, Weights, named_parameters, read_fragment, write_fragment
from diloco.inner import InnerLoop, Ranks, evaluate, random_states, restore_random_states, seed_everything
from diloco.island import Island
from diloco.island.bridge import Bridge
from diloco.island.context import piece_of
from diloco.island.experts import balance_together
from diloco.island.mesh import DATA_DIMENSIONS, Mesh, check, divides, sizes_of
from diloco.island.parallel import Copies, checkpoint_blocks, divided
from diloco.models import build_model
from diloco.models.transformer import Transformer
from diloco.round import Line
from diloco.saving import Contents, Saver, Written
from diloco.slices import Pieces, Slices, whole_slices

IDLE_S = 60.0
"""How often the other ranks are told that rank 0 still waits for the world."""


class Bench:
    """One rank's part of it: the model, or its share of one, and the inner loop."""

    def __init__(self, contract: Contract, site: Site, island: Island, vocab_size: int) -> None:
        """All ranks make theirs together, with rank 0's contract. Raises ConfigError when they do not fit the model."""
        if site.mesh.offload and island.device.type == "cpu":
            raise ConfigError("mesh.offload moves shares from a GPU to the host", "leave it out on a CPU")
        sizes = sizes_of(site.mesh, island.size)
        check(sizes, site, contract, island.ranks_per_node)
        self.contract, self.site, self.island = contract, site, island
        self.mesh = Mesh.of(sizes, island.rank, island.device.type)
        self.vocab_size = vocab_size
        self.divided = island.size > 1 and divides(sizes, site.mesh)
        self.model, self.ranks, self.weights = self._divided() if self.divided else self._whole()
        if island.size > 1:
            balance_together(self.model)
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
        }
        if isinstance(self.weights, Bridge):
            self._tasks |= self.weights.tasks

    @staticmethod
    def follow(contract: Contract, site: Site, island: Island) -> None:
        """The life of a rank that does not lead."""
        Bench(contract, site, island, int(island.share())).serve()

    def serve(self) -> None:
        """Do what rank 0 announces, until the end."""
        self.island.serve(self._tasks)
        self.saver.wait()

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
        return model, Copies(model, island.device), Bridge(own, own, island)

    def _divided(self) -> tuple[nn.Module, Ranks, Weights]:
        """A model that each rank has a share of. Its values come from rank 0's host, where the whole one is built."""
        island, section = self.island, self.site.mesh
        whole = named_parameters(self._build()) if island.leads else {}
        with torch.device("meta"):
            model = self._build()
        assert isinstance(model, Transformer)
        ranks = divided(model, self.mesh, self.site, bf16=self.contract.inner.precision == "bf16")
        model.to_empty(device="cpu" if section.offload else island.device)
        bridge = Bridge(whole, named_parameters(model), island)
        bridge.begin()
        return model, ranks, bridge

    def _inner_section(self) -> Any:
        """Each rank trains its share of the peer's micro-batch."""
        share = self.contract.inner.batch_size // self.mesh.size(*DATA_DIMENSIONS)
        return self.contract.inner.model_copy(update={"batch_size": share})

    # ------------------------------------------------------------ what all ranks do together

    def _step(self, position: int, shape: tuple[int, int], block: Tensor | None = None) -> float:
        block = self._told(block, shape)
        micro_batches = torch.split(block, self.contract.inner.batch_size)
        ranks, place = self.mesh.size(*DATA_DIMENSIONS), self.mesh.place(*DATA_DIMENSIONS)
        mine = torch.cat([micro_batch.chunk(ranks)[place] for micro_batch in micro_batches])
        return self.island.mean(self.inner.step(self._piece(mine), position))

    def _evaluate(self, shape: tuple[int, int], blocks: Tensor | None = None) -> float:
        blocks = self._told(blocks, shape)
        batch_size, device = self.contract.inner.batch_size, self.island.device
        loss = evaluate(self.model, self._piece(blocks), batch_size, device, self.ranks)
        return self.island.mean(loss) if self.mesh.size("cp") > 1 else loss

    def _piece(self, rows: Tensor) -> Tensor:
        """What this rank has of these sequences."""
        return piece_of(rows, self.mesh.place("cp"), self.mesh.size("cp"))

    def _live(self, without: Sequence[str] | None) -> Slices:
        """What this rank holds, and inner steps move: the optimizer's state; the weights, unless it is None, without
        these."""
        live = {"inner": self.inner.state()}
        if without is not None:
            live["local"] = [one for one in self.inner.weights() if one.box.name not in without]
        return live

    def _save_part(self, without: Sequence[str] | None) -> None:
        self.saver.save_part(self._live(without))

    def _restore(self, path: str, digest: str) -> None:
        self._take_together(lambda: reopen(Path(path), digest))

    def _take_together(self, opened: Callable[[], Checkpoint]) -> None:
        """Each rank reads what it holds. Raises StateError on all ranks when one cannot."""
        mine = [one.box.name for one in self.inner.weights()]
        known = {name for names in self.island.gather(json.dumps(mine)) for name in json.loads(names)}
        refused = ""
        try:
            self._take(opened(), known)
        except StateError as error:
            refused = json.dumps([error.cause, error.fix])
        for answer in self.island.gather(refused):
            if answer:
                raise StateError(*json.loads(answer))

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
        self._told_s = monotonic_s()

    def step(self, block: Tensor, position: int) -> float:
        """One inner step of the whole island, at this many tokens of the run. Returns the mean loss."""
        shape = (block.shape[0], block.shape[1])
        self._announce("step", position=position, shape=shape)
        if isinstance(self.weights, Bridge):
            self.weights.moved()
        return self._step(position, shape, block)

    def idle(self) -> bool:
        """Say to the other ranks now and then that we wait for the world. Always true."""
        if monotonic_s() - self._told_s > IDLE_S:
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
        local = []
        for fragment in line.layout.fragments:
            line.fetch(fragment)
            local.append(read_fragment(line.parameters, fragment))
        try:
            for fragment in line.layout.fragments:
                self._put(line, fragment, line.state.fragments[fragment.index].anchor)
            heldout = self.dataset.heldout(self.contract.eval.sequences)
            if not self.divided:  # rank 0 has all that it takes
                return evaluate(self.model, heldout, self.contract.inner.batch_size, self.island.device)
            shape = (heldout.shape[0], heldout.shape[1])
            self._announce("evaluate", shape=shape)
            return self._evaluate(shape, heldout.contiguous())
        finally:
            for fragment, weights in zip(line.layout.fragments, local, strict=True):
                self._put(line, fragment, weights)

    def _put(self, line: Line, fragment: Fragment, flat: Tensor) -> None:
        write_fragment(line.parameters, fragment, flat)
        if self.divided:
            line.flush(fragment)

    def save(self, directory: Path, version: int, contents: Contents, keep: int) -> Future[Written]:
        """Begin a checkpoint: of `contents`, and the inner side of all ranks; of their weights if there is a group
        `local`, but those that are in it. Training may go on at once."""
        groups, meta = contents
        without = [one.box.name for one in groups["local"]] if "local" in groups else None
        self._announce("save", without=without)
        random = random_states()
        groups["random"] = whole_slices({key: value for key, value in random.items() if isinstance(value, Tensor)})
        numbers: dict[str, JsonValue] = {
            "vocab_size": self.vocab_size,
            "inner": self.inner.numbers(),
            "random": {key: value for key, value in random.items() if not isinstance(value, Tensor)},
        }
        return self.saver.save(directory, version, groups, self._live(without), {**numbers, **meta}, keep)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take back the inner side of a checkpoint, and the weights that are in it, saved on whatever mesh. The
        parameters are the anchor. Raises StateError."""
        self._announce("restore", path=str(checkpoint.path.resolve()), digest=checkpoint.digest)
        self._take_together(lambda: checkpoint)
        if isinstance(self.weights, Bridge):
            self.weights.moved()
        restore_random_states({**checkpoint.groups.get("random", {}), **checkpoint.value("random", dict)})

    def close(self) -> None:
        """The end, for all ranks."""
        self.island.dismiss()
        self.island.close()

    def _announce(self, task: str, **details: Any) -> None:
        self._told_s = monotonic_s()
        self.island.announce(task, **details)
