"""Attacks by a member whose contributions are well-formed, and not what it trained. One of four peers lies."""

from __future__ import annotations

from statistics import fmean

from scripts.attacks.victims import CALM_S, Attack, NotHeld, Victims

VERSIONS = 15
"""Versions that count the liar, before the loss is looked at."""
WORSE = 0.1
"""Nats per token by which the loss may rise meanwhile: it falls where nobody lies."""
LOSS_VERSIONS = 5
"""The loss is a mean over the latest versions, so many."""


def flipped_values(victims: Victims) -> str:
    """A liar joins, is counted, and the honest peers' loss does not rise."""
    before = _loss(victims)
    victims.join_liar("liar", "flipped")
    victims.until(lambda: _counted(victims) > 0, "the liar is counted")
    assert victims.row is not None
    victims.row.versions_during = victims.versions_in(CALM_S)
    victims.until(lambda: _counted(victims) >= VERSIONS, f"{VERSIONS} versions count the liar")
    after = _loss(victims)
    closed = [event for name in ("p0", "p1", "p2") for event in victims.events(name, "version")]
    outliers = {int(event["version"]) for event in closed if "liar" in (event.get("outliers") or {})}
    said = f"loss {before:.2f}, then {after:.2f}; outliers in {len(outliers)} of {_counted(victims)} versions"
    if not after < before + WORSE:
        raise NotHeld(said)
    return said


def _counted(victims: Victims) -> int:
    return sum("liar" in event["counted"] for event in victims.events("p0", "version"))


def _loss(victims: Victims) -> float:
    return fmean(float(event["loss"] or "nan") for event in victims.events("p0", "version")[-LOSS_VERSIONS:])


CENTRED, TRIMMED = ("outer.aggregation=centred",), ("outer.aggregation=trimmed",)
ATTACKS = (
    Attack("flipped-values", "member", flipped_values, peers=3, settings=CENTRED),
    Attack("flipped-values-trimmed", "member", flipped_values, peers=3, short=False, settings=TRIMMED),
)
