"""The DDP baseline of a simulation: the same model on the same tokens by torch's DistributedDataParallel over gloo.

One process per peer: `python -m diloco.simulate.local.ddp CONTRACT.json RANK SIZE DIRECTORY`. Every rank reads the same
blocks as its peer in the DiLoCo run, at the same learning rates, so that only the way of synchronising differs.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import torch

from diloco.base.clock import monotonic_s
from diloco.config.contract import Contract
from diloco.config.load import contract_from_json
from diloco.data import open_dataset
from diloco.data.reader import BlockReader
from diloco.inner.loop import InnerLoop, evaluate, seed_everything
from diloco.island import Island
from diloco.island.parallel import DataParallelRanks
from diloco.models import build_model
from diloco.observe.event_log import Events
from diloco.observe.events import BaselineStep, Ended, Evaluated
from diloco.protocol import leases
from diloco.transport.sockets import SocketCounter


def train(contract: Contract, island: Island, data_root: Path, events: Events) -> None:
    """Train a simulation's DDP baseline to `run.total_tokens`, emitting "step", "eval" and "end" events on rank 0."""
    dataset = open_dataset(contract.data, data_root)
    seed = contract.run.seed
    model = build_model(contract.model, dataset.vocab_size, seed, data_root)
    seed_everything(seed)
    counter = SocketCounter()
    ranks = DataParallelRanks(model, island.device) if island.size > 1 else None
    inner = InnerLoop(model, contract.inner, contract.run.total_tokens, island.device, ranks=ranks)
    heldout = dataset.heldout(contract.eval.sequences)
    names = [f"p{rank}" for rank in range(island.size)]
    reader = BlockReader(dataset, seed)
    blocks = contract.blocks_per_round
    held = leases.found(names, contract.lease_blocks)
    reader.lease(held.held[names[island.rank]])
    tokens, version, started_s = 0, 0, monotonic_s()

    def sent_bytes() -> int | None:
        sample = counter.sample()
        return sample.sent if sample else None

    while tokens < contract.run.total_tokens:
        for _ in range(contract.steps_per_round):
            tokens += contract.tokens_per_step * island.size
            loss = inner.step(reader.next(contract.inner.sequences_per_step), tokens)
            events.emit(BaselineStep(tokens, inner.steps, loss, monotonic_s() - started_s, sent_bytes()))
        version += 1
        held = leases.advance(held, dict.fromkeys(names, blocks), names, contract.lease_blocks)
        reader.lease(held.held[names[island.rank]], blocks)
        if contract.eval.every_versions and version % contract.eval.every_versions == 0 and island.leads:
            val_loss = evaluate(model, heldout, contract.inner.batch_size, island.device)
            events.emit(Evaluated(version=version, tokens=tokens, val_loss=val_loss))
    wall_s = monotonic_s() - started_s
    sent = sent_bytes()
    final_loss = evaluate(model, heldout, contract.inner.batch_size, island.device) if island.leads else None
    ended = Ended(
        version=version, tokens=tokens, val_loss=final_loss, wall_s=wall_s, wire_bytes_sent=sent, reason="done"
    )
    events.emit(ended)


def main(arguments: list[str]) -> None:
    """Entry point of one rank of a simulation's DDP baseline."""
    contract_path, rank, size, directory, data_root, threads = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the simulation ends its baselines by SIGTERM
    torch.set_num_threads(int(threads))
    contract = contract_from_json(Path(contract_path).read_text())
    here = Path(directory)
    meeting = f"file://{(here / 'rendezvous').resolve()}"
    island = Island.at(int(rank), int(size), torch.device("cpu"), rendezvous=meeting)
    events = Events(here / ("events.jsonl" if rank == "0" else f"rank{rank}.jsonl"), f"rank{rank}")
    train(contract, island, Path(data_root), events)
    island.close()


if __name__ == "__main__":
    main(sys.argv[1:])
