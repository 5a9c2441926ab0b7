"""Robust means: by hand, against another implementation, against liars, and the same on every peer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from diloco.base.types import Counted, Member
from diloco.compress import Codec, open_codec
from diloco.config.codec import CodecSection
from diloco.exchange.work import LanePayloads
from diloco.outer.average import Averaging, fold, mean_into
from diloco.outer.fragments import Layout
from diloco.outer.robust import CHUNK, ROBUST, Rule, codecs_of, robust_mean
from diloco.protocol.messages import Begin, Span
from diloco.simulate.virtual.oracle.robust import plain_robust
from diloco.simulate.virtual.plans.draw import draw
from diloco.simulate.virtual.search import narrate
from tests.test_codec_groups import contract

FP32 = open_codec(CodecSection(name="fp32", zstd=False))
each_rule = pytest.mark.parametrize("rule", ROBUST)


def drawn(count: int, elements: int = 2000) -> list[Tensor]:
    """Contributions that have half of their squares in common, as those of peers that train on other data."""
    generator = torch.Generator().manual_seed(count)
    common = torch.randn(elements, generator=generator)
    return [common + torch.randn(elements, generator=generator) for _ in range(count)]


def encoded(values: list[Tensor], codec: Codec = FP32, weights: list[int] | None = None) -> list[tuple[int, bytes]]:
    return [(w, codec.encode(one)) for w, one in zip(weights or [1] * len(values), values, strict=True)]


# ---------------------------------------------------------------- by hand


@pytest.mark.parametrize(
    ("rule", "mean"),
    [("clip", [(1 + 2 + 3) / 3]), ("median", [2.0]), ("trimmed", [2.0]), ("centred", [2.0 + 1 / 3 - 1 / 3])],
)
def test_one_of_three_values_that_is_no_further_than_others(rule: Rule, mean: list[float]) -> None:
    found, _ = robust_mean([torch.tensor([value]) for value in (1.0, 2.0, 3.0)], [1, 1, 1], rule)
    assert found.tolist() == mean


@pytest.mark.parametrize(
    ("rule", "mean"), [("clip", (1 + 2 + 2.5 - 3) / 4), ("median", 1.5), ("trimmed", 1.5), ("centred", None)]
)
def test_a_liar_among_four(rule: Rule, mean: float | None) -> None:
    found, outliers = robust_mean([torch.tensor([value]) for value in (1.0, 2.0, 2.5, -100.0)], [1, 1, 1, 1], rule)
    assert mean is None or found.item() == mean
    assert 0 < found.item() < 2
    assert outliers == [3]


def test_who_weighs_more_moves_what_is_left_and_cuts_nobody() -> None:
    values = [torch.tensor([value]) for value in (1.0, 2.0, 3.0, 4.0, 9.0)]
    assert robust_mean(values, [1, 2, 1, 1, 1], "trimmed")[0].item() == pytest.approx((2 * 2 + 3 + 4) / 4)
    assert robust_mean(values, [1, 2, 1, 1, 1], "median")[0].item() == 3.0
    # A claim beyond twice the median weight is that.
    assert torch.equal(
        robust_mean(values, [1, 2, 1, 1, 1], "clip")[0], robust_mean(values, [1, 10**9, 1, 1, 1], "clip")[0]
    )


# ---------------------------------------------------------------- properties


@each_rule
@pytest.mark.parametrize("count", [3, 4, 5, 8])
@pytest.mark.parametrize("elements", [1, 1000, CHUNK + 7])
def test_another_implementation_finds_the_same(rule: Rule, count: int, elements: int) -> None:
    values, weights = drawn(count, elements), [1 + place % 3 for place in range(count)]
    values[-1] *= -10
    values[0][: elements // 2] = values[1][: elements // 2]  # equal values are trimmed by their number, not by whose
    expected = plain_robust(encoded(values, weights=weights), elements, FP32, rule)
    assert expected is not None
    torch.testing.assert_close(robust_mean(values, weights, rule)[0], torch.from_numpy(expected).float())


@each_rule
def test_only_ratios_of_weights_count_and_no_weight_is_no_contribution(rule: Rule) -> None:
    values = drawn(4)
    mean = robust_mean(values, [1, 2, 2, 1], rule)[0]
    assert torch.equal(mean, robust_mean(values, [10**12, 2 * 10**12, 2 * 10**12, 10**12], rule)[0])
    found, outliers = robust_mean([torch.full_like(values[0], 1e30), *values], [0, 1, 2, 2, 1], rule)
    assert torch.equal(mean, found)
    assert not outliers


@each_rule
@pytest.mark.parametrize("weights", [[1], [1, 1], [1, 0, 1], [0, 0, 0]])
def test_fewer_than_three_are_averaged_plainly(rule: Rule, weights: list[int]) -> None:
    payloads = encoded(drawn(len(weights)), weights=weights)
    outliers: list[int] = []
    assert fold(payloads, 2000, FP32, rule=rule, outliers=outliers) == fold(payloads, 2000, FP32)
    assert not outliers


@each_rule
def test_extremes_stay_finite_and_zeros_have_one_sign(rule: Rule) -> None:
    most = torch.finfo(torch.float32).max
    assert (
        robust_mean([torch.full((9,), most), torch.full((9,), -most), torch.full((9,), most)], [1, 1, 1], rule)[0]
        .isfinite()
        .all()
    )
    zeros = [torch.tensor([0.0]), torch.tensor([-0.0]), torch.tensor([-0.0])]
    assert not robust_mean(zeros, [1, 1, 1], rule)[0].signbit().any()


@each_rule
def test_threads_change_no_bit(rule: Rule) -> None:
    values, threads = drawn(5, 3 * CHUNK), torch.get_num_threads()
    found = set()
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        found.add(robust_mean(values, [3, 1, 2, 1, 1], rule)[0].numpy().tobytes())
    torch.set_num_threads(threads)
    assert len(found) == 1


@pytest.mark.parametrize("rule", ["centred", "trimmed", "median"])
@pytest.mark.parametrize(("count", "liars"), [(4, 1), (8, 2)])
@pytest.mark.parametrize("strength", [1, 2, 10, 99])
def test_a_quarter_that_lies_leaves_the_honest_direction(rule: Rule, count: int, liars: int, strength: int) -> None:
    values = drawn(count)
    honest = torch.stack(values[:-liars]).mean(0)
    for value in values[-liars:]:
        value.mul_(-strength)
    found, outliers = robust_mean(values, [1] * count, rule)
    assert torch.cosine_similarity(found, honest, 0) > 0.8
    assert 0.4 < found.norm() / honest.norm() < 1.1
    if strength > 2:  # else a liar is as near as the others
        assert outliers == list(range(count - liars, count))


# ---------------------------------------------------------------- gathered codecs, lanes


@pytest.mark.parametrize("name", ["topk", "dct", "lowrank"])
@pytest.mark.parametrize("rule", ["clip", "centred"])
def test_of_a_bundle_every_receiver_makes_the_robust_mean(name: str, rule: Rule) -> None:
    sparse = {"mean": "all"} if name != "lowrank" else {}
    (codec,) = codecs_of(contract(codec={"name": name, **sparse}, outer={"aggregation": rule}))
    values = drawn(4, 4096)
    values[-1] *= -10
    payloads, mean, outliers = encoded(values, codec), torch.empty(4096), list[int]()
    bundle = fold(payloads, 4096, codec, rule=rule, outliers=outliers)
    mean_into(bundle, codec, mean)
    assert torch.equal(mean, robust_mean([codec.decode(payload, 4096) for _, payload in payloads], [1] * 4, rule)[0])
    assert outliers == [3]
    if name != "lowrank":  # which keeps hardly anything of noise
        assert torch.cosine_similarity(mean, torch.stack(values[:3]).mean(0), 0) > 0.3


def test_an_owner_counts_outliers_among_those_that_a_part_counts() -> None:
    (fragment,) = Layout.of([("a", (16,))]).fragments
    members = [Member(name, 1, f"{name}:1") for name in "abcde"]
    counted = tuple(Counted(one.peer, 0, 0, 1, 1, 1) for one in members)
    averaging = Averaging("trimmed")
    begin = Begin(1, 0, counted, tuple(members), (Span("a", 0, 1),), "")
    payloads = LanePayloads(begin, "a", fragment, [FP32], 0.0, averaging)
    for value, member in zip((1.0, 2.0, 2.5, 2.0, -100.0), members, strict=True):
        payloads.put_contribution(member.peer, 0, FP32.encode(torch.full((16,), value)))
    mean, _ = payloads.fold(0, ["b"])
    assert FP32.decode(mean, 16).tolist() == [1.5] * 16
    assert averaging.take() == {"e": 1}
    assert averaging.take() == {}


# ---------------------------------------------------------------- the contract, whole peers


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"outer": {"aggregation": "clip", "averaging": "radial"}}, "leave out outer.averaging"),
        ({"codec": {"name": "topk", "mean": "all"}, "outer": {"aggregation": "median"}}, "take 'clip' or 'centred'"),
        ({"codec": {"name": "topk"}, "outer": {"aggregation": "clip"}}, "set codec.mean to 'all'"),
        ({"outer": {"aggregation": "krum"}}, "aggregation"),
    ],
)
def test_what_does_not_go_with_a_robust_mean_is_refused(sections: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        contract(**sections)


def test_the_default_is_the_mean() -> None:
    assert Averaging.of(contract()) == Averaging("mean")
    assert Averaging.of(contract(outer={"averaging": "radial"})).rule == "radial"
    assert Averaging.of(contract(outer={"aggregation": "clip"})).is_mean_of_few([1, 1])
    assert not Averaging.of(contract()).is_mean_of_few([1])


@pytest.mark.no_cover  # which makes a simulation nearly twice as slow
@pytest.mark.slow(queued=False)
@pytest.mark.parametrize(
    ("seed", "rule", "codec"),
    [(0, "centred", "int8"), (2, "trimmed", "sign"), (0, "clip", "topk-all"), (2, "median", "")],
)
def test_robust_means_hold_in_virtual_time(seed: int, rule: Rule, codec: str) -> None:
    """I3 against the other implementation, and `diloco replay` of all versions."""
    plan = replace(draw(seed), radial=False, aggregation=rule)
    outcome = narrate(replace(plan, codec=codec or plan.codec))
    assert not outcome.violation, outcome.violation
