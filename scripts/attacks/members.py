"""Attacks by a member: it knows the run's secret, and lies."""

from __future__ import annotations

from scripts.attacks.victims import CALM_S, Attack, NotHeld, Victims


def many_tokens(victims: Victims) -> str:
    """A contribution claims more tokens than the run has left."""
    victims.join_liar("liar", "many-tokens")
    _goes_on(victims)
    return ""


def much_weight(victims: Victims) -> str:
    """A contribution claims a weight that makes the mean its own."""
    victims.join_liar("liar", "much-weight")
    _goes_on(victims)
    return ""


def _goes_on(victims: Victims) -> None:
    """Versions go on without the liar's claim: no commit counts it as it says."""
    assert victims.row is not None
    victims.row.versions_during = victims.versions_in(CALM_S)
    if any("liar" in event["counted"] for event in victims.events("p0", "version")):
        raise NotHeld("the liar was counted")


ATTACKS = (
    Attack("many-tokens", "member", many_tokens, peers=2),
    Attack("much-weight", "member", much_weight, peers=2),
)
