"""Codecs by group of parameters: no part has two of them, and everybody makes the same of each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from diloco.accounts.journal import RECORDED, recordings
from diloco.accounts.replay import Verdict, replay
from diloco.base.errors import ConfigError, StateError
from diloco.base.sealed import sealed_line
from diloco.base.types import Omitted
from diloco.compress import PayloadError, open_codecs
from diloco.compress.bundle import MAX_CONTRIBUTIONS
from diloco.config.contract import Contract
from diloco.config.load import contract_from_json, load_contract
from diloco.exchange.terms import max_part_bytes
from diloco.outer.average import unpack
from diloco.outer.fragments import Fragment, Layout
from diloco.outer.pseudograd import pseudo_gradient
from diloco.peer.terms import rules_of
from diloco.simulate.virtual.plans.draw import draw
from diloco.simulate.virtual.search import narrate
from tests.paper import PaperRun, contract
from tests.test_fragments import models

Named = list[tuple[str, tuple[int, ...]]]
POOL = [("*norm*",), ("embedding.*", "head.*"), ("*.ffn.*",), ("*attention*",)]
NORMS = {"match": ("*norm*",), "name": "bf16", "zstd": False}
EMBEDDING = {"match": ("embed.*",), "name": "int8", "zstd": False}
CODEC = {"name": "topk", "density": 0.1, "values": "fp16", "zstd": False, "groups": (NORMS, EMBEDDING)}
SYNC = {"fragments": 2, "part_elements": 1024}


def fitting(name: str, groups: Sequence[Sequence[str]]) -> int:
    """The number of the first group that a name fits; 0 for none."""
    return next((n for n, group in enumerate(groups, 1) if any(fnmatchcase(name, glob) for glob in group)), 0)


# ---------------------------------------------------------------- the layout


@pytest.mark.slow(queued=False)
@given(models(), st.permutations(POOL), st.integers(0, len(POOL)), st.data())
def test_every_element_in_one_part_and_no_part_in_two_groups(
    model: tuple[Named, int], pool: list[tuple[str, ...]], count: int, data: st.DataObject
) -> None:
    named, layers = model
    groups, fragments = pool[:count], data.draw(st.integers(1, layers))
    part_elements = data.draw(st.none() | st.integers(1, 50))
    plain = Layout.of(named, fragments, part_elements=part_elements)
    layout = Layout.of(named, fragments, part_elements=part_elements, groups=groups)

    for before, fragment in zip(plain.fragments, layout.fragments, strict=True):
        assert fragment.elements == before.elements
        names = [entry.name for entry in fragment.entries]
        assert names == sorted((entry.name for entry in before.entries), key=lambda name: fitting(name, groups))
        bounds = [fragment.part_bounds(part) for part in range(fragment.parts)]
        assert [element for start, stop in bounds for element in range(start, stop)] == list(range(fragment.elements))
        assert all(0 < stop - start <= fragment.part_elements for start, stop in bounds)
        for entry in fragment.entries:
            inside = range(entry.offset, entry.offset + entry.elements)
            mine = [part for part, (start, stop) in enumerate(bounds) if start < inside.stop and inside.start < stop]
            assert {fragment.group_of(part) for part in mine} == {fitting(entry.name, groups)}


def test_without_groups_there_is_one() -> None:
    (fragment,) = Layout.of([("a", (10,)), ("b", (5,))], part_elements=4).fragments
    assert fragment.groups == ((0, 15),)
    assert [fragment.part_bounds(part) for part in range(fragment.parts)] == [(0, 4), (4, 8), (8, 12), (12, 15)]


def test_parts_are_cut_inside_each_group() -> None:
    named = [("a.norm", (3,)), ("a", (10,)), ("b.norm", (3,)), ("b", (1,))]
    (fragment,) = Layout.of(named, part_elements=4, groups=[["*.norm"]]).fragments
    assert [entry.name for entry in fragment.entries] == ["a", "b", "a.norm", "b.norm"]
    bounds = [(*fragment.part_bounds(part), fragment.group_of(part)) for part in range(fragment.parts)]
    assert bounds == [(0, 4, 0), (4, 8, 0), (8, 11, 0), (11, 15, 1), (15, 17, 1)]


@pytest.mark.parametrize(
    ("groups", "cause", "fix"),
    [
        ([["a.*"], ["*.nrom", "x"]], "group 2 of codec.groups ('*.nrom', 'x') is empty", "'b.norm'"),
        ([["*"], ["*.norm"]], "group 2 of codec.groups ('*.norm') is empty", "none"),
        ([["\x1b[31m" + "x" * 90]], "('\\x1b[31mxxx", "'a.norm', 'b.norm'"),
    ],
)
def test_a_group_without_parameters_is_a_mistake(groups: list[list[str]], cause: str, fix: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Layout.of([("a.norm", (3,)), ("b.norm", (3,))], groups=groups)
    assert cause in raised.value.cause
    assert fix in raised.value.fix
    assert (raised.value.cause + raised.value.fix).isprintable()


def test_of_many_parameters_those_with_names_like_an_empty_groups_are_told() -> None:
    names = [f"blocks.{layer}.{part}.weight" for layer in range(4) for part in ("attn.q", "ffn_norm", "ffn.up")]
    with pytest.raises(ConfigError) as raised:
        Layout.of([(name, (3,)) for name in ("embed.weight", *names)], groups=[["embed.*"], ["*.fnn_norm.*"]])
    assert "no parameter that groups before it leave has such a name" in raised.value.cause
    assert "leave: 'blocks.0.ffn_norm.weight', 'blocks.1.ffn_norm.weight'" in raised.value.fix


def test_a_strangers_glob_takes_no_time() -> None:
    """A regular expression of the same shape would not finish in a year."""
    begun_s = monotonic()
    for glob in ("*a" * 50, "*[ab]?" * 16, "*" * 100):
        Layout.of([("a" * 3000 + "b", (3,)), ("x", (1,))], groups=[[glob, "x"]])
    assert monotonic() - begun_s < 60.0


# ---------------------------------------------------------------- the contract

RUN = '[run]\nname = "test"\ntotal_tokens = 1000\n'
GROUP = '[[codec.groups]]\nmatch = ["*norm*"]\n'


def loaded(tmp_path: Path, text: str, *overrides: str) -> Contract:
    path = tmp_path / "contract.toml"
    path.write_text(RUN + text)
    return load_contract(path, overrides).value


def test_a_group_has_defaults_of_its_own(tmp_path: Path) -> None:
    run = loaded(tmp_path, f"[codec]\nname = 'int4'\nscale = 'statistical'\nzstd = false\n{GROUP}name = 'bf16'")
    assert run.codec.groups[0].match == ("*norm*",)
    assert (run.codec.groups[0].scale, run.codec.groups[0].zstd) == ("absmax", True)
    assert [codec.name for codec in open_codecs(run.codec)] == ["int4-statistical", "bf16+zstd"]
    assert contract_from_json(run.to_json()) == run
    assert loaded(tmp_path, "", "codec.groups=[{match = ['*norm*']}]").codec == loaded(tmp_path, GROUP).codec
    assert loaded(tmp_path, GROUP).digest != loaded(tmp_path, "").digest


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("[[codec.groups]]\nname = 'bf16'", "codec.groups.0.match is missing"),
        ("[[codec.groups]]\nmatch = []", "codec.groups.0.match: Tuple should have at least 1 item"),
        ("[[codec.groups]]\nmatch = ['']", "codec.groups.0.match.0: String should have at least 1 character"),
        (f"{GROUP}name = 'int7'", "codec.groups.0.name: Input should be 'fp32'"),
        (f"{GROUP}error_feedback = 0.9", "codec.groups.0.error_feedback: Extra inputs are not permitted"),
        (f"{GROUP}{GROUP}name = 'fp16'\nscale = 'statistical'", "codec.groups.1: codec.scale 'statistical' is for"),
        (f"{GROUP}name = 'topk'\n[outer]\naveraging = 'radial'", "not 'topk'"),
        (GROUP * 65, "at most 64 items"),
    ],
)
def test_a_mistake_in_a_group_is_explained(tmp_path: Path, text: str, cause: str) -> None:
    with pytest.raises(ConfigError) as raised:
        loaded(tmp_path, text)
    assert cause in raised.value.cause
    assert "contract.toml" in raised.value.cause


def test_radial_with_groups_whose_means_are_made_once() -> None:
    radial = {"averaging": "radial"}
    assert contract(codec={"name": "fp32", "groups": (NORMS, EMBEDDING)}, outer=radial).outer.averaging == "radial"
    with pytest.raises(ValidationError, match="radial"):
        contract(codec=CODEC, outer=radial)


@pytest.mark.parametrize(
    ("codec", "most"),
    [
        ({"name": "int8", "groups": (NORMS,)}, None),
        ({"name": "int8", "groups": ({"match": ("blocks.*",), "name": "topk"},)}, MAX_CONTRIBUTIONS),
        (CODEC, MAX_CONTRIBUTIONS),
    ],
)
def test_any_gathered_group_limits_the_contributors(codec: dict[str, Any], most: int | None) -> None:
    assert rules_of(contract(codec=codec), (1,)).policy.max_peers == most


# ---------------------------------------------------------------- a run on paper


def spans(fragment: Fragment, group: int) -> list[slice]:
    cuts = [(*fragment.part_bounds(part), fragment.group_of(part)) for part in range(fragment.parts)]
    return [slice(start, stop) for start, stop, number in cuts if number == group]


def test_the_mean_of_every_group_is_what_its_codec_makes_of_it(tmp_path: Path) -> None:
    run = PaperRun(tmp_path, record=False, sync={**SYNC, "fragments": 1}, codec=CODEC)
    line = run.peers["a"].line
    (fragment,) = line.layout.fragments
    assert [number for number, _ in fragment.groups] == [0, 1, 2]
    peers = run.offer()
    anchor = line.state.fragments[0].anchor
    sent = [peer.line.sent for peer in peers]
    gradients = torch.stack([pseudo_gradient(anchor, one.local) for one in sent if one])
    closed = run.close(peers[0], peers)
    mean = unpack(closed.parts, fragment, line.codecs)

    for norms in spans(fragment, 1):
        rounded = [row.bfloat16().float() for row in gradients[:, norms]]
        assert torch.equal(mean[norms], ((rounded[0] + rounded[1] + rounded[2]) / 3).bfloat16().float())
    for embedding in spans(fragment, 2):
        error = (mean[embedding] - gradients[:, embedding].mean(dim=0)).abs().max()
        assert 0 < error <= 1.01 * gradients[:, embedding].abs().max() / 127
    for matrices in spans(fragment, 0):
        assert_largest(mean[matrices], gradients[:, matrices])
    assert max(map(len, closed.parts)) <= max_part_bytes(line.layout, line.codecs)
    for wrong in (closed.parts[::-1], [*closed.parts[:-1], closed.parts[0]]):
        with pytest.raises(PayloadError):
            unpack(wrong, fragment, line.codecs)
    run.end()


def assert_largest(mean: Tensor, gradients: Tensor) -> None:
    """The mean over those who sent a value; each sends a tenth of its values, the largest."""
    kept = gradients.abs() >= gradients.abs().quantile(0.9, dim=1, keepdim=True)
    expected = (gradients * kept).sum(dim=0) / kept.sum(dim=0).clamp(min=1)
    close = torch.isclose(mean, expected, rtol=2e-3, atol=1e-6)
    assert close.float().mean() > 0.97  # but for a few at the edge of the tenth
    assert 0.1 < mean.count_nonzero() / mean.numel() < 0.35


def test_peers_agree_and_replay_makes_every_version_again(tmp_path: Path) -> None:
    codec = {**CODEC, "error_feedback": 0.95}
    run = PaperRun(tmp_path, sync=SYNC, codec=codec)
    a, b, c = run.peers.values()
    a.save()
    run.round()
    run.round(count=[a, c])
    run.round(omitted=[Omitted("b", 0, 2)])
    for _ in range(3):
        run.round()
    assert len({peer.line.state.digest for peer in (a, b, c)}) == 1
    for fragment in a.line.layout.fragments:
        lost = {group: [a.line.residuals[fragment.index][span].abs().max() for span in spans(fragment, group)]
                for group, _ in fragment.groups}  # fmt: skip
        assert set(lost) >= {0, 1}
        assert all(largest > 0 for group in lost.values() for largest in group)
        assert max(lost[1]) < 0.01 * max(lost[0])  # bf16 drops little, topk nine tenths
    run.end()
    result = replay([tmp_path], Path(), lambda done, total: None)
    assert [one.verdict for one in result.versions] == [Verdict.REPRODUCED] * 7


def rewritten(path: Path, **changes: Any) -> None:
    line, _, parts = path.read_bytes().partition(b"\n")
    header = {**json.loads(line.partition(b" ")[2]), **changes}
    path.write_bytes(sealed_line({key: value for key, value in header.items() if value is not None}) + parts)


def test_recordings_say_how_their_parts_are_cut(tmp_path: Path) -> None:
    run = PaperRun(tmp_path, "a", sync=SYNC, codec=CODEC)
    run.round()
    run.end()
    (recording,) = recordings(tmp_path / "a")
    (fragment, _) = run.peers["a"].line.layout.fragments
    assert replace(recording.fragment, entries=fragment.entries) == fragment
    rewritten(recording.path, groups=[[0, fragment.elements * 2]])
    with pytest.raises(StateError, match="its groups make"):
        recordings(tmp_path / "a")


def test_recordings_of_before_there_were_groups_are_read(tmp_path: Path) -> None:
    run = PaperRun(tmp_path, "a")
    run.round()
    run.end()
    (recording,) = recordings(tmp_path / "a")
    rewritten(next((tmp_path / "a" / RECORDED).iterdir()), groups=None, elements=recording.fragment.elements)
    (again,) = recordings(tmp_path / "a")
    assert again.fragment == recording.fragment


# ---------------------------------------------------------------- under faults


@pytest.mark.no_cover  # which makes a simulation nearly twice as slow
@pytest.mark.slow(queued=False)
@pytest.mark.parametrize("codec", ["topk/fp16", "int8/topk-all/fp32"])
def test_groups_hold_in_virtual_time(codec: str) -> None:
    torch.set_num_threads(1)
    for seed in range(3):
        outcome = narrate(replace(draw(seed), codec=codec, radial=False))
        assert not outcome.violation, outcome.violation
