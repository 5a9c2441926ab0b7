"""Means and versions of a simulation made once more, from contributions as their makers recorded them.

Means apart from production's code, in plain numpy; all versions by `diloco.accounts.replay`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from diloco.accounts.books import ChainRecord
from diloco.accounts.journal import Recording
from diloco.accounts.replay import Replay, Replayer, shelve
from diloco.base.types import Counted
from diloco.compress import Codec
from diloco.simulate.virtual.setup import SimulationSetup


@dataclass(frozen=True)
class Kept(Recording):
    """A simulated peer's recorded contribution that stays in memory."""

    held: Sequence[bytes] = ()

    def payloads(self) -> Iterator[bytes]:
        return iter(self.held)


def remake(
    chain: ChainRecord, recorded: Iterable[tuple[Counted, int, Sequence[bytes]]], setup: SimulationSetup
) -> Replay:
    """Replay a simulation. `recorded`: how a commit counts each contribution, its fragment, its parts."""
    fragments = setup.layout.fragments
    shelf = shelve(Kept(Path(), fragments[index], counted, 0, (), parts) for counted, index, parts in recorded)
    made_with = setup.codecs, setup.optimizer, setup.weighing
    replayer = Replayer(chain, shelf, *made_with, lambda: setup.start, {}, setup.radial)
    return replayer.replay(lambda done, total: None)


def plain_mean(terms: Sequence[tuple[int, bytes]], elements: int, codec: Codec) -> bytes:
    """The simulator's check of a weighted mean, encoded: fp32 in the order given, apart from
    `diloco.outer.average.fold`. Or the bundle."""
    if codec.gathered:
        table = b"".join(weight.to_bytes(8, "little") + len(payload).to_bytes(4, "little") for weight, payload in terms)
        return len(terms).to_bytes(4, "little") + table + b"".join(payload for _, payload in terms)
    unit = math.gcd(*(weight for weight, _ in terms)) or 1
    total = np.zeros(elements, dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for index, (weight, payload) in enumerate(terms):
            values = codec.decode(payload, elements).numpy() * np.float32(weight // unit)
            total = values if index == 0 else total + values
        mean = total / np.float32(sum(weight for weight, _ in terms) // unit)
    return codec.encode(torch.from_numpy(mean).nan_to_num_())


def plain_radial(terms: Sequence[tuple[int, bytes]], elements: int, codec: Codec) -> bytes:
    """The simulator's check of a radial mean, encoded: mean length in the mean direction, in fp64, in plain numpy."""
    counted = [(weight, codec.decode(payload, elements)) for weight, payload in terms if weight > 0]
    if len(counted) == 1:
        return codec.encode(counted[0][1].nan_to_num_())
    values = np.stack([value.double().numpy() for _, value in counted])
    weights = np.array([float(weight) for weight, _ in counted])
    lengths = np.sqrt((values**2).sum(axis=1))
    units = values / np.where(lengths == 0, 1.0, lengths)[:, None]
    direction = (weights[:, None] * units).sum(axis=0)
    resultant = np.sqrt((direction**2).sum())
    if resultant <= weights.sum() * 2.0**-23:
        return codec.encode(torch.zeros(elements))
    mean = direction * ((weights * lengths).sum() / weights.sum() / resultant)
    return codec.encode(torch.from_numpy(mean.astype(np.float32)).nan_to_num_())


def plain_gathered(terms: Sequence[tuple[int, bytes]], elements: int, codec: Codec, by_senders: bool) -> np.ndarray:
    """The simulator's check of a bundle's mean, in fp64: over the weights of all, or of those with a value not zero."""
    values = np.stack([codec.decode(payload, elements).double().numpy() for _, payload in terms])
    weights = np.array([float(weight) for weight, _ in terms])[:, None]
    divisor = (weights * (values != 0)).sum(axis=0) if by_senders else weights.sum(axis=0)
    mean: np.ndarray = (weights * values).sum(axis=0) / np.where(divisor == 0, 1.0, divisor)
    return mean
