"""Settings for so many parameters and so many peers, by the scaling laws of DiLoCo (arXiv 2503.09799).

Fitted to runs of 35M to 2.4B parameters by 1, 2, 4 and 8 peers: AdamW inside, Nesterov at momentum 0.9 outside, H = 30,
20 tokens per parameter, sequences of 2048 tokens of C4, and one global batch that the peers share. The joint laws, with
N parameters and M peers:

    held-out loss   19.226   N^-0.0985  M^0.0116     nats per token
    inner rate      22256    N^-0.8827  M^0.2929
    global batch    0.00709  N^0.4695   M^0.3399     sequences (as tokens, 150M parameters would train on 49 at a time)

The loss is within 1.8 % of every published run from 35M to 4B parameters; at 10B it is 3.5 to 4.6 % too good.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from diloco.base.errors import UsageError

PUBLISHED_STEPS = 30
PUBLISHED_SEQUENCE = 2048
PUBLISHED_PARAMETERS = (35_000_000, 10_000_000_000)
TOKENS_PER_PARAMETER = 20
WARMUP_STEPS = 1000
MAX_WARMUP = 0.1
"""Ours, for models so small that 1,000 steps would be much of the run."""

OUTER_LR = {1: 0.4, 2: 0.6, 4: 0.6, 8: 0.8}
"""Best outer learning rate by number of peers, the same for every size from `OUTER_LR_FROM` parameters on."""
OUTER_LR_FROM = 335_000_000
OUTER_MOMENTUM = 0.9

_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Hyperparameters by the published laws, with the evidence for each."""

    parameters: int
    peers: int
    inner_steps: int
    """H."""
    sequence_length: int
    total_tokens: int
    sequences_per_peer: int
    """Sequences of one inner step of one peer."""
    batch_tokens: int
    """Tokens of one inner step of all peers."""
    inner_lr: float
    warmup: float
    """Share of the run."""
    outer_lr: float
    loss: float
    """Predicted, nats per token of C4."""
    loss_alone: float
    """The same with one peer."""
    caveats: tuple[str, ...]
    """Assumptions here that are not measured, one sentence each."""


def suggest(
    parameters: int, peers: int, inner_steps: int = PUBLISHED_STEPS, sequence_length: int = PUBLISHED_SEQUENCE
) -> Suggestion:
    """Hyperparameters by scaling laws for a model of `parameters` (all of them, embeddings too) and `peers`, each >= 1.

    H changes none of them, as there is no law for it; `sequence_length` only how many sequences make the batch.
    """
    total_tokens = TOKENS_PER_PARAMETER * parameters
    batch_tokens = 0.00709 * parameters**0.4695 * peers**0.3399 * PUBLISHED_SEQUENCE
    sequences = max(round(batch_tokens / peers / sequence_length), 1)
    batch_tokens = sequences * peers * sequence_length
    smallest, largest = PUBLISHED_PARAMETERS
    most = max(OUTER_LR)
    doubts = [
        (not smallest <= parameters <= largest, "Runs of 35M to 10B parameters were published: this is extrapolated."),
        (parameters < OUTER_LR_FROM, "Below 335M parameters the best outer rate varied with the size."),
        (peers > most, f"Nobody measured more than {most} peers: the outer rate is theirs, the rest extrapolated."),
        (peers < most and peers not in OUTER_LR, "1, 2, 4 and 8 peers were measured: the outer rate is in between."),
        (inner_steps != PUBLISHED_STEPS, f"Measured at H = {PUBLISHED_STEPS}: the best outer rate grows with H."),
    ]
    return Suggestion(
        parameters,
        peers,
        inner_steps,
        sequence_length,
        total_tokens,
        sequences,
        batch_tokens,
        inner_lr=22256 * parameters**-0.8827 * peers**0.2929,
        warmup=min(WARMUP_STEPS * batch_tokens / total_tokens, MAX_WARMUP),
        outer_lr=outer_lr(peers),
        loss=predicted_loss(parameters, peers),
        loss_alone=predicted_loss(parameters, 1),
        caveats=tuple(text for applies, text in doubts if applies),
    )


def predicted_loss(parameters: int, peers: int) -> float:
    """Held-out loss by the scaling law, in nats per token of C4, after 20 tokens per parameter."""
    return float(19.226 * parameters**-0.0985 * peers**0.0116)


def outer_lr(peers: int) -> float:
    """The suggested outer rate, of `OUTER_LR`; between two of its entries linear in log(peers), then constant."""
    for (low, low_lr), (high, high_lr) in pairwise(OUTER_LR.items()):
        if low <= peers <= high:
            return low_lr + (high_lr - low_lr) * math.log(peers / low) / math.log(high / low)
    return OUTER_LR[max(OUTER_LR)]


def to_toml(suggestion: Suggestion) -> str:
    """The scaling laws' suggestion as a contract, the model left out, with its source and its evidence as comments."""
    one = suggestion
    caveats = "".join(f"# {text}\n" for text in one.caveats)
    return f"""\
# {one.parameters:,} parameters, {one.peers} {"peer" if one.peers == 1 else "peers"}, by the scaling laws of DiLoCo \
(arXiv 2503.09799).
# They predict {one.loss:.3f} nats/token on C4, and {one.loss_alone:.3f} with one peer.
{caveats}
[run]
name = "suggested"  # choose your own
total_tokens = {one.total_tokens:_}  # {TOKENS_PER_PARAMETER} per parameter

[membership]
start_peers = {one.peers}

[data]
sequence_length = {one.sequence_length}

[inner]
steps = {one.inner_steps}
batch_size = {one.sequences_per_peer}  # with all peers {one.batch_tokens:,} tokens; `accumulation` splits it
lr = {one.inner_lr:.2e}
betas = [0.9, 0.99]
schedule = "cosine"
warmup = {one.warmup:.4f}  # {WARMUP_STEPS:,} steps, or a tenth of the run
final_lr = 0.05
clip = 1.0

[outer]
optimizer = "nesterov"
lr = {one.outer_lr:.2f}
momentum = {OUTER_MOMENTUM}
"""


def parse_parameters(text: str) -> int:
    """The plan's option of a number of parameters: `150M`, `1.3B`, `35e6`, `150_000_000`. Raises UsageError."""
    digits, unit = (text[:-1], _UNITS[text[-1].upper()]) if text[-1:].upper() in _UNITS else (text, 1)
    try:
        parameters = float(digits) * unit
    except ValueError:
        parameters = math.nan
    if not 1 <= parameters < math.inf:
        raise UsageError(f"cannot read {text!r} as a number of parameters", "write 150M, 1.3B or 150000000")
    return round(parameters)
