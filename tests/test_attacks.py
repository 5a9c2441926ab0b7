"""Attacks on runs of real peers, those of `scripts/attack` that take least: one by an outsider, one by a member."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scripts.attacks.main import ATTACKS, line
from scripts.attacks.victims import PACE, Attack, Victims, outcome

SHOWN = ("idle-connections", "many-tokens")
COUNTED_S = 4.0
"""Seconds in which versions are counted here; the script takes 10."""


@pytest.mark.slow
@pytest.mark.parametrize("attack", [one for one in ATTACKS if one.name in SHOWN], ids=lambda attack: attack.name)
def test_a_run_goes_on_under_attack(attack: Attack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script says how much slower a run is; here, beside other tests, a tenth of the versions is enough, and they
    are paced, so that other tests have the machine."""
    versions_in = Victims.versions_in
    monkeypatch.setattr(Victims, "versions_in", lambda victims, seconds: versions_in(victims, COUNTED_S))
    row = outcome(replace(attack, slower=0.9, settings=PACE), tmp_path)
    assert row.held, line(row)
    assert row.versions_during, line(row)


@pytest.mark.slow
def test_another_user_of_the_machine_is_kept_out(tmp_path: Path) -> None:
    (attack,) = [one for one in ATTACKS if one.name == "another-user"]
    row = outcome(attack, tmp_path)
    assert row.held, line(row)
