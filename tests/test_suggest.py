"""Suggested settings against what was published, and as a contract."""

from __future__ import annotations

import json
import tomllib

import pytest

from diloco.base.errors import UsageError
from diloco.config.contract import Contract
from diloco.plan.suggest import outer_lr, parse_parameters, predicted_loss, suggest, to_toml
from tests.peers import run_cli

# Held-out loss with 1, 2, 4 and 8 peers (arXiv 2503.09799); 4B and 10B were not trained by 8.
PUBLISHED_LOSS = {
    35_000_000: (3.482, 3.508, 3.554, 3.621),
    90_000_000: (3.162, 3.182, 3.213, 3.265),
    180_000_000: (2.943, 2.957, 2.981, 3.019),
    335_000_000: (2.777, 2.788, 2.808, 2.841),
    550_000_000: (2.645, 2.657, 2.673, 2.698),
    1_300_000_000: (2.451, 2.464, 2.472, 2.493),
    2_400_000_000: (2.317, 2.323, 2.332, 2.351),
    4_000_000_000: (2.219, 2.220, 2.230),
    10_000_000_000: (2.086, 2.086, 2.096),
}
# The laws that were fitted to each number of peers on its own: inner rate and global batch, A x N^a.
# Left out is that of the inner rate for 8 peers, 618986 N^-1.102: a fifth of the joint law, which we follow.
INNER_LR = {1: (74620.6, -0.945), 2: (3978.82, -0.780), 4: (4512.99, -0.789)}
BATCH = {1: (0.01361, 0.435), 2: (0.00769, 0.479), 4: (0.00535, 0.510), 8: (0.01859, 0.455)}

CELLS = [
    (size, peers, loss) for size, row in PUBLISHED_LOSS.items() for peers, loss in zip((1, 2, 4, 8), row, strict=False)
]


@pytest.mark.parametrize(("parameters", "peers", "loss"), CELLS)
def test_predicted_loss_is_near_the_published_one(parameters: int, peers: int, loss: float) -> None:
    tolerance = 0.02 if parameters <= 4_000_000_000 else 0.05
    assert predicted_loss(parameters, peers) == pytest.approx(loss, rel=tolerance)


@pytest.mark.parametrize("parameters", [335_000_000, 1_300_000_000])
def test_rate_and_batch_agree_with_the_law_of_that_number_of_peers(parameters: int) -> None:
    """In the middle of the range; at its ends the exponents, fitted to few sizes, drift apart."""
    for peers, (factor, exponent) in INNER_LR.items():
        assert suggest(parameters, peers).inner_lr == pytest.approx(factor * parameters**exponent, rel=0.4)
    for peers, (factor, exponent) in BATCH.items():
        sequences = suggest(parameters, peers).batch_tokens / 2048
        assert sequences == pytest.approx(factor * parameters**exponent, rel=0.15)


def test_outer_rates_are_the_published_ones_and_lie_between() -> None:
    assert [outer_lr(peers) for peers in (1, 2, 4, 8)] == [0.4, 0.6, 0.6, pytest.approx(0.8)]
    assert outer_lr(3) == pytest.approx(0.6)
    assert 0.6 < outer_lr(5) < outer_lr(6) < outer_lr(7) < 0.8
    assert outer_lr(64) == outer_lr(8)


def test_a_batch_is_shared_by_the_peers() -> None:
    """150M parameters, 4 peers: 78.3 sequences of 2048 in all, 20 each; of 512 tokens four times as many."""
    one = suggest(150_000_000, 4)
    assert (one.sequences_per_peer, one.batch_tokens) == (20, 4 * 20 * 2048)
    assert suggest(150_000_000, 4, sequence_length=512).sequences_per_peer == 78
    assert suggest(1_000_000, 64).sequences_per_peer == 1
    assert one.total_tokens == 3_000_000_000
    assert one.warmup == pytest.approx(1000 * one.batch_tokens / one.total_tokens)


def test_more_peers_cost_loss_and_larger_models_less() -> None:
    small = [predicted_loss(35_000_000, peers) for peers in (1, 2, 4, 8)]
    assert small == sorted(small)
    assert predicted_loss(2_400_000_000, 8) < predicted_loss(35_000_000, 1)
    assert suggest(35_000_000, 8).loss_alone == small[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((10**9, 4), []),
        ((150_000_000, 4), ["varied with the size"]),
        ((10**6, 1), ["extrapolated", "varied with the size"]),
        ((10**9, 3), ["in between"]),
        ((10**9, 16), ["more than 8 peers"]),
        ((10**9, 8, 100), ["grows with H"]),
    ],
)
def test_what_was_not_measured_is_said(arguments: tuple[int, ...], words: list[str]) -> None:
    caveats = suggest(*arguments).caveats
    assert len(caveats) == len(words)
    assert all(word in text for word, text in zip(words, caveats, strict=True))


@pytest.mark.parametrize(("parameters", "peers", "steps"), [(10**6, 1, 10), (150_000_000, 6, 30), (10**10, 100, 500)])
def test_the_text_is_a_part_of_a_contract(parameters: int, peers: int, steps: int) -> None:
    suggestion = suggest(parameters, peers, steps)
    tree = tomllib.loads(to_toml(suggestion))
    contract = Contract.model_validate_json(json.dumps(tree))
    assert contract.inner.lr == pytest.approx(suggestion.inner_lr, rel=0.01)
    assert contract.outer.lr == pytest.approx(suggestion.outer_lr, abs=0.005)
    assert contract.tokens_per_step * peers == suggestion.batch_tokens
    assert (contract.inner.steps, contract.membership.start_peers) == (steps, peers)
    assert all(f"# {text}" in to_toml(suggestion) for text in suggestion.caveats)


@pytest.mark.parametrize(
    ("text", "parameters"),
    [("150M", 150_000_000), ("1.3b", 1_300_000_000), ("35e6", 35_000_000), ("1_000", 1000), ("2k", 2000)],
)
def test_sizes_are_read(text: str, parameters: int) -> None:
    assert parse_parameters(text) == parameters


@pytest.mark.parametrize("text", ["", "M", "many", "-3M", "0", "nan", "inf", "1e999", "150 MB"])
def test_what_is_no_size_is_explained(text: str) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        parse_parameters(text)


def test_the_command_prints_toml_or_json() -> None:
    shown = run_cli("config", "suggest", "--params", "150M", "--peers", "4")
    assert shown.returncode == 0, shown.stderr
    assert tomllib.loads(shown.stdout)["outer"] == {"optimizer": "nesterov", "lr": 0.6, "momentum": 0.9}
    as_json = json.loads(run_cli("config", "suggest", "--params", "150M", "--peers", "4", "--json").stdout)
    assert as_json["sequences_per_peer"] == 20
    wrong = run_cli("config", "suggest", "--params", "big", "--peers", "4")
    assert wrong.returncode == 2
    assert "cannot read 'big'" in wrong.stderr
