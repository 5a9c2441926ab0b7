"""Attacks by a member: it knows the run's secret, and lies."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from diloco.simulate.local.processes import end_all
from scripts.attacks.victims import CALM_S, Attack, NotHeld, Victims

HONEST = ("p0", "p1", "p2")
VOTES_S = 60.0
"""For a member to be named a voter, which coordinates."""


def claims(lie: str) -> Callable[[Victims], str]:
    """A contribution claims what no honest peer can (`scripts.attacks.liar`)."""

    def attack(victims: Victims) -> str:
        victims.join_liar("liar", lie)
        assert victims.row is not None
        victims.row.versions_during = victims.versions_in(CALM_S)
        if any("liar" in event["counted"] for event in victims.events("p0", "version")):
            raise NotHeld("the liar was counted")
        return _caught(victims)

    return attack


def forges(lie: str, coordinates: bool = False) -> Callable[[Victims], str]:
    """A member has others take a commit that no honest peer makes: as a coordinator, or without asking anybody."""

    def attack(victims: Victims) -> str:
        victims.join_liar("liar", lie)
        if coordinates:
            caught = lambda: any("proposes a commit that cannot be" in why for why in _refusals(victims))  # noqa: E731
            victims.until(caught, "the liar coordinates", VOTES_S)
        assert victims.row is not None
        victims.row.versions_during = victims.versions_in(CALM_S)
        return _caught(victims)

    return attack


def false_head(victims: Victims) -> str:
    """A member's heartbeats name another history: the vote stops, an operator learns who it is, ends and evicts it."""
    victims.join_liar("liar", "false-head")
    victims.until(lambda: _has_joined(victims), "the liar is a member")
    victims.until(lambda: all(_alarms(victims, peer) for peer in HONEST), "all name the liar")
    end_all([victims.peers.pop()])
    evict = [sys.executable, "-m", "diloco", "evict", victims.address("p0"), "liar"]
    subprocess.run(evict, env={**os.environ, **victims.variables}, check=True, capture_output=True)
    return _alarms(victims, "p0")[0]


def _alarms(victims: Victims, peer: str) -> list[str]:
    return [why for why in _reasons(victims, peer) if "two histories" in why and "liar stands on" in why]


def _reasons(victims: Victims, peer: str) -> list[str]:
    return [str(event["text"]) for event in victims.events(peer, "reason")]


def _has_joined(victims: Victims) -> bool:
    return all(any("liar" in event["joined"] for event in victims.events(peer, "view")) for peer in HONEST)


def _refusals(victims: Victims) -> list[str]:
    reasons = _reasons(victims, "p0") + _reasons(victims, "p1")
    return [reason for reason in reasons if reason.startswith("refused, from liar")]


def _caught(victims: Victims) -> str:
    """The first reason for which the liar was refused. Raises NotHeld where nobody says it, or the audit finds more."""
    if not (found := _refusals(victims)):
        raise NotHeld("nobody says who lies")
    victims.audit()
    return found[0]


ATTACKS = (
    Attack("many-tokens", "member", claims("many-tokens"), peers=2),
    Attack("much-weight", "member", claims("much-weight"), peers=2),
    Attack("many-blocks", "member", claims("many-blocks"), peers=2, short=False),
    Attack("no-weight", "member", claims("no-weight"), peers=2, short=False),
    Attack("forged-tokens", "member", forges("forged-tokens", coordinates=True), peers=2, short=False),
    Attack("forged-leases", "member", forges("forged-leases", coordinates=True), peers=2, short=False),
    Attack("forged-voters", "member", forges("forged-voters", coordinates=True), peers=2, short=False),
    Attack("announced-tokens", "member", forges("announced-tokens"), peers=2),
    Attack("announced-founding", "member", forges("announced-founding"), peers=2, short=False),
    Attack("false-head", "member", false_head, peers=3),
)
