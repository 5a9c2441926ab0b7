"""Data, model and inner loop of one rank. All ranks of an island make the same calls in the same order.

Rank 0 alone reads data; the rows of a step are sent to all, and each trains on its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diloco.base.clock import monotonic_s
from diloco.base.errors import StateError
from diloco.base.life import Life, Wait
from diloco.base.limits import check_bytes
from diloco.config.contract import Contract
from diloco.config.site import Site
from diloco.data import open_dataset
from diloco.inner.loop import InnerLoop, evaluate, random_states, restore_random_states, seed_everything
from diloco.inner.meter import Throughput, Trace, device_bytes, device_name, memory_of, peak_flops
from diloco.island import Island
from diloco.island.bridge import Bridge
from diloco.island.context import piece_of
from diloco.island.experts import balance_together
from diloco.island.mesh import DATA_DIMENSIONS, Mesh, check, check_device, divides, sizes_of
from diloco.island.parallel import DataParallelRanks, Divided, ModelRanks, checkpoint_blocks, divide
from diloco.island.pipeline import Pipelined, pipelined
from diloco.island.slices import Pieces, Slices, whole_slices
from diloco.models import build_model, count_parameters, logit_rows
from diloco.models.transformer import Transformer
from diloco.observe.events import RankMemory
from diloco.outer.fragments import Weights, named_parameters
from diloco.plan.model import activation_bytes, check_size, flops_per_token
from diloco.storage.checkpoint import Checkpoint, read_together
from diloco.storage.disk import JsonValue
from diloco.storage.saving import Contents


class RankModel:
    """A rank's model, or its share of one, and the inner loop on it. A run's `PeerTraining`."""

    def __init__(self, contract: Contract, site: Site, island: Island) -> None:
        """All ranks make theirs together. Raises ConfigError when they do not fit the model."""
        self.dataset = data = open_dataset(contract.data, Path(site.data.root)) if island.leads else None
        about = None if data is None else [data.vocab_size, data.blocks_per_epoch, data.fingerprint]
        self.vocab_size, self.blocks_per_epoch, self.fingerprint = json.loads(island.share(json.dumps(about)))
        check_device(site, contract, island.device.type)
        sizes = sizes_of(site.mesh, island.size)
        check(sizes, site, contract, island.ranks_per_node)
        self.contract, self.site, self.island = contract, site, island
        check_size(contract, self.vocab_size, site.device.max_params)  # the embedding's rows are known only now
        self._check_step()
        self.mesh = Mesh.of(sizes, island.rank, island.device.type, island.timeout_s)
        self.divided = island.size > 1 and divides(sizes, site.mesh)
        self.model, self.ranks, self.weights = self._divided() if self.divided else self._whole()
        if island.size > 1:
            balance_together(self.model, self.mesh.of_one_stage() if self.mesh.size("pp") > 1 else None)
        seed_everything(contract.run.seed)
        compiled = site.device.compile and not self.divided  # else its blocks are
        # Each rank trains its share of the peer's micro-batch, in pieces.
        share = contract.inner.batch_size // self.mesh.size(*DATA_DIMENSIONS)
        section = contract.inner.model_copy(update={"batch_size": share // site.mesh.micro_batches})
        total = contract.run.total_tokens
        self.inner = InnerLoop(self.model, section, total, island.device, compile=compiled, ranks=self.ranks)
        peak = peak_flops(site.device, island.device, contract.inner.precision)
        self.usage = Throughput(flops_per_token(contract, self.vocab_size), peak, island.size, self.inner.phases)
        self._trace: Trace | None = None
        self._trace_folder: Path | None = None
        self._on_traced: Callable[[Path], None] = lambda _: None
        self._steps = 0

    @property
    def parameters(self) -> int:
        """Parameters of the model that the inner loop trains: elements of all, over all ranks, shared ones once."""
        return count_parameters(self.ranks.whole_model if isinstance(self.ranks, Pipelined) else self.model)

    def _build(self) -> nn.Module:
        run = self.contract.run
        root, limit = Path(self.site.data.root), self.site.device.max_params
        return build_model(self.contract.model, self.vocab_size, run.seed, root, limit)

    def _check_step(self) -> None:
        """Refuse a contract whose inner steps cannot fit into this rank's device. Raises ConfigError."""
        contract, site, island = self.contract, self.site, self.island
        if site.mesh.pp != 1:
            return  # stages differ in what they keep, and so may their devices
        rows = logit_rows(contract.model, self.vocab_size, Path(site.data.root))
        share = 1 if island.device.type == "cuda" else island.ranks_per_node  # ranks on CPUs share their memory
        needed = share * activation_bytes(contract, rows, island.size * site.mesh.micro_batches)
        batch, length = contract.inner.batch_size, contract.data.sequence_length
        what = f"an inner step of run {contract.run.name} ({batch:,} x {length:,} tokens, {rows:,} logits each)"
        fix = "use a larger device, more ranks (device.ranks), or smaller pieces (mesh.micro_batches)"
        check_bytes(what, needed, device_bytes(island.device), fix)

    def _whole(self) -> tuple[nn.Module, ModelRanks | None, Weights]:
        """Model for the inner loop that each rank has all of."""
        island = self.island
        model = self._build().to(island.device)
        if isinstance(model, Transformer):
            checkpoint_blocks(model, self.site.device.checkpointing)
        own = named_parameters(model)
        if island.size == 1:
            return model, None, Weights(own)
        return model, DataParallelRanks(model, island.device), Bridge(own, island)

    def _divided(self) -> tuple[nn.Module, ModelRanks, Weights]:
        """Model for the inner loop that each rank has a share of. Its values come from rank 0, built whole there."""
        island, mesh, site = self.island, self.mesh, self.site
        whole = named_parameters(self._build()) if island.leads else {}
        with torch.device("meta"):
            model = self._build()
        assert isinstance(model, Transformer)
        bf16 = self.contract.inner.precision == "bf16"
        ranks: Divided | Pipelined
        if mesh.size("pp") > 1:
            ranks = pipelined(model, mesh, site, self.contract, island.device, bf16=bf16)
        else:
            divide(model, model, mesh, site, bf16=bf16)
            model.to_empty(device="cpu" if site.mesh.offload else island.device)
            ranks = Divided(model, site.mesh, mesh, bf16=bf16)
        column = ranks.column if isinstance(ranks, Pipelined) else None
        bridge = Bridge(named_parameters(ranks.forward), island, column)
        bridge.begin(whole)
        return ranks.forward, ranks, bridge

    # ------------------------------------------------------------ inner steps

    def step(self, block: Tensor | None, position: int) -> float:
        """One inner step of the whole island. Returns the mean loss over the ranks, nats per token.

        `block`: (sequences, L + 1) token ids, on rank 0. `position`: tokens of the run at its end, which sets the
        learning rate.
        """
        device = self.site.device
        if self._trace_folder is not None and device.profile_steps and self._steps == device.profile_after:
            path = self._trace_folder / f"rank-{self.island.rank}.json.gz"
            self._trace = Trace(path, device.profile_steps, self.island.device)
        self._steps += 1
        with self.inner.phases.host("data"):
            shape = self.contract.inner.sequences_per_step, self.contract.data.sequence_length + 1
            block = self._shared_rows(block, shape)
        micro_batches = torch.split(block, self.contract.inner.batch_size)
        ranks, place = self.mesh.size(*DATA_DIMENSIONS), self.mesh.place(*DATA_DIMENSIONS)
        mine = torch.cat([micro_batch.chunk(ranks)[place] for micro_batch in micro_batches])
        loss = self.inner.step(self._piece(mine), position)
        with self.inner.phases.host("wait"):  # for the slowest rank
            loss = self.island.mean(loss)
        if self._trace is not None and self._trace.step():  # the last step of the trace
            if self._trace.path.is_file():
                self._on_traced(self._trace.path)
            self._trace = None
        return loss

    def linger(self, began_s: float) -> Life[None]:
        """Slow the inner loop down after a step that began then, as `device.step_s` and `device.speed` have it."""
        device = self.site.device
        if device.step_s or device.speed < 1:
            lasts_s = max(monotonic_s() - began_s, device.step_s) / device.speed
            yield Wait(None, max(began_s + lasts_s - monotonic_s(), 0.0))

    def trace_into(self, folder: Path, on_traced: Callable[[Path], None]) -> None:
        """Trace inner steps (`device.profile_steps`) into a file of `folder`; `on_traced` is called with its path."""
        self._trace_folder, self._on_traced = folder.resolve(), on_traced

    def _piece(self, rows: Tensor) -> Tensor:
        """This rank's piece of each sequence of an inner step, under context parallelism."""
        return piece_of(rows, self.mesh.place("cp"), self.mesh.size("cp"))

    def _shared_rows(self, block: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """Rank 0's rows of tokens for an inner step or an evaluation, on every rank."""
        block = torch.empty(shape, dtype=torch.int64) if block is None else block.contiguous()
        return self.island.share_tensor(block)

    # ------------------------------------------------------------ evaluation and events

    def evaluate(self) -> float:
        """Evaluation: held-out loss of the model on its ranks, nats per token; the same on every rank."""
        heldout = self.dataset.heldout(self.contract.eval.sequences) if self.dataset is not None else None
        batch_size, device = self.contract.inner.batch_size, self.island.device
        if not self.divided:  # rank 0 has all that it takes
            loss = evaluate(self.model, heldout, batch_size, device) if heldout is not None else 0.0
            return float(self.island.share(repr(loss)))
        shape = json.loads(self.island.share(json.dumps(heldout.shape) if heldout is not None else ""))
        blocks = self._shared_rows(heldout, tuple(shape))
        loss = evaluate(self.model, self._piece(blocks), batch_size, device, self.ranks)
        return self.island.mean(loss) if self.mesh.size("cp") > 1 else loss

    def facts(self) -> dict[str, Any]:
        """Fields of the event `Started` that describe the model of the inner loop, its ranks and device."""
        return {
            "parameters": self.parameters,
            "blocks_per_epoch": self.blocks_per_epoch,
            "ranks": self.island.size,
            "mesh": {name: size for name, size in self.mesh.sizes.items() if size > 1},
            "device": device_name(self.island.device),
            "flops_per_token": self.usage.flops_per_token,
            "peak_flops_per_rank": self.usage.peak_flops,
        }

    def version_fields(self) -> dict[str, Any]:
        """Learning rate and expert imbalance of inner steps, as fields of the event `VersionClosed`."""
        return {"lr": self.inner.lr, "expert_imbalance": tuple(self.inner.expert_imbalance())}

    def used(self) -> dict[str, Any]:
        """Throughput of inner steps since the last call and memory of the ranks: fields of the event `HardwareUsed`."""
        memories = self.island.gather(json.dumps(memory_of(self.island.device)))
        memory = tuple(RankMemory(*json.loads(one)) for one in memories)
        return {**self.usage.fields(), "memory": memory}

    # ------------------------------------------------------------ checkpoints (`PeerTraining`)

    def live(self, *, local: bool) -> Slices:
        """Slices for a checkpoint that this rank holds and inner steps move: the inner optimizer's state, and with
        `local` the weights."""
        live = {"inner": self.inner.state()}
        return {**live, "local": self.inner.weights()} if local else live

    def kept(self) -> Contents:
        """Inner loop's contents of a checkpoint that only rank 0 saves: random states, step counts."""
        random = random_states()
        numbers: dict[str, JsonValue] = {
            "vocab_size": self.vocab_size,
            "inner": self.inner.numbers(),
            "random": {key: value for key, value in random.items() if not isinstance(value, Tensor)},
        }
        slices = whole_slices({key: value for key, value in random.items() if isinstance(value, Tensor)})
        return {"random": slices}, numbers

    def restore(self, opened: Callable[[], Checkpoint]) -> None:
        """Restore the inner loop from a checkpoint, and the weights that are in it, saved on whatever mesh. The
        parameters are the anchor. Raises StateError on all ranks when one cannot."""
        mine = [one.box.name for one in self.inner.weights()]
        known = {name for names in self.island.gather(json.dumps(mine)) for name in json.loads(names)}
        read_together(self.island, lambda: self._take(opened(), known))

    def _take(self, checkpoint: Checkpoint, known: Collection[str]) -> None:
        """Load this rank's inner loop from a checkpoint. `known`: parameters of all ranks. Raises StateError."""
        state, weights = checkpoint.groups.get("inner", Pieces(())), checkpoint.groups.get("local", Pieces(()))
        mine = {one.box.name: one for one in self.inner.weights()} if weights else {}
        if any(name not in weights or weights.shape(name) != one.box.shape for name, one in mine.items()):
            cause = f"the weights in checkpoint {checkpoint.path} are not those of this model"
            raise StateError(cause, "resume with the contract that wrote the checkpoint")
        self.inner.load_state(checkpoint.value("inner", dict), state, known)
        for one in mine.values():
            weights.read(one)
        if self.island.leads:
            restore_random_states({**checkpoint.groups.get("random", {}), **checkpoint.value("random", dict)})
