"""The cases that `scripts/model-check` searches: each rule of agreement as it stands, and with one clause left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scripts.models.agreement import Agreement
from scripts.models.counting import ExactlyOnce
from scripts.models.growth import Growth
from scripts.models.search import Model


@dataclass(frozen=True)
class Case:
    """A case, and what its search is expected to find."""

    name: str
    about: str
    of: Agreement | Growth | ExactlyOnce
    expected: str
    """`Found.verdict`."""
    quick: bool = False
    """It takes a second or two, and is searched in the tests."""

    @property
    def model(self) -> Model[Any]:
        """The model to search."""
        return self.of.model()


BESIDE: Any = {"views": True, "reduction": True}
"""A view commit beside a reduction that is under way."""
TWO: Any = {"leavers": (0, 2), "crashes": 0}
ALL: Any = {"views": True, "anew": False}
WITNESS: Any = {"trainers": 2, "witnesses": 1, "attempts": 3}
HALF: Any = {"trainers": 2, "halves": True, "crashes": 2}

CASES = (
    Case("three", "3 voters, one crashes and comes back", Agreement(), "holds", True),
    Case("three-attempts", "the same with 3 attempts", Agreement(attempts=3), "holds"),
    Case("seat-restarts", "the seat of the second crashes", Agreement(attempts=3, mortal=(1,)), "holds"),
    Case("two", "2 voters, two crashes", Agreement(2, attempts=4, crashes=2), "holds", True),
    Case(
        "view",
        "a joiner's view commit beside a reduction; who crashes may stay away",
        Agreement(forever=True, **BESIDE),
        "holds",
    ),
    Case(
        "views-first",
        "a view commit before a mean that is there",
        Agreement(views=True, crashes=0, mean_first=False),
        "holds",
    ),
    Case(
        "heads-unnamed",
        "promises do not name the head",
        Agreement(views=True, crashes=0, heads_named=False, mean_first=False),
        "BROKEN",
        True,
    ),
    Case(
        "record-first",
        "the record of the new head is on the disk before its commit",
        Agreement(commit_first=False, **BESIDE),
        "BROKEN",
    ),
    Case("leaves", "one of three leaves", Agreement(leavers=(2,), **BESIDE), "holds"),
    Case(
        "leaves-dead",
        "it dies for good at any time",
        Agreement(leavers=(2,), mortal=(2,), forever=True, **BESIDE),
        "holds",
    ),
    Case("leaves-late", "its `leave_s` is over", Agreement(leavers=(2,), go="leave_s", crashes=0, **BESIDE), "holds"),
    Case(
        "leaves-unfetched",
        "the seat does not fetch the mean, and begins anew",
        Agreement(leavers=(2,), fetches=False, mortal=(0,), **BESIDE),
        "holds",
    ),
    Case(
        "leaves-neither",
        "it does neither",
        Agreement(leavers=(2,), fetches=False, anew=False, mortal=(0,), **BESIDE),
        "STUCK",
    ),
    Case("leader-leaves", "the seat that began the reduction leaves", Agreement(leavers=(0,), **BESIDE), "holds"),
    Case("two-leave", "two of three leave at once", Agreement(**TWO, **BESIDE), "holds"),
    Case("two-leave-early", "they go as soon as they know the commit", Agreement(go="knows", **TWO, **BESIDE), "STUCK"),
    Case(
        "two-leave-late",
        "their `leave_s` is over before it (a person is needed)",
        Agreement(go="leave_s", **TWO, **BESIDE),
        "STUCK",
    ),
    Case(
        "two-leave-mean",
        "they wait for the mean: there are no view commits",
        Agreement(reduction=True, **TWO),
        "holds",
        True,
    ),
    Case("one-of-two-leaves", "one of two leaves", Agreement(2, leavers=(1,), attempts=3, **BESIDE), "holds"),
    Case("leader-of-two-leaves", "the seat of two leaves", Agreement(2, leavers=(0,), attempts=3, **BESIDE), "holds"),
    Case(
        "leader-of-two-early",
        "it goes as soon as it knows the commit",
        Agreement(2, leavers=(0,), go="knows", **BESIDE),
        "STUCK",
        True,
    ),
    Case(
        "leader-of-two-dead",
        "it dies for good before the commit (a person is needed)",
        Agreement(2, leavers=(0,), mortal=(0,), forever=True, **BESIDE),
        "STUCK",
        True,
    ),
    Case(
        "hand-over",
        "the only voter leaves, and a learner votes in its place",
        Agreement(2, leavers=(0,), learners=(1,), attempts=3, **BESIDE),
        "holds",
        True,
    ),
    Case("hand-over-two", "both voters leave", Agreement(leavers=(0, 1), learners=(2,), **BESIDE), "holds"),
    Case(
        "hand-over-early",
        "the voter goes as soon as it knows the commit",
        Agreement(2, leavers=(0,), learners=(1,), go="knows", crashes=0, **BESIDE),
        "STUCK",
        True,
    ),
    Case("both-leave", "both of two leave", Agreement(2, leavers=(0, 1), attempts=3, **ALL), "holds", True),
    Case("all-leave", "all of three leave", Agreement(leavers=(0, 1, 2), **ALL), "holds", True),
    Case(
        "both-leave-early",
        "both of two go as soon as they know the commit",
        Agreement(2, leavers=(0, 1), attempts=3, crashes=0, go="knows", **ALL),
        "STUCK",
        True,
    ),
    Case("half", "half of two decides on a proof of death", Agreement(attempts=3, **HALF), "holds", True),
    Case("half-of-versions", "the same over two versions", Agreement(versions=2, **HALF), "holds"),
    Case(
        "half-late-proof",
        "a proof is believed when the peer is up again",
        Agreement(versions=2, late_proofs=True, **HALF),
        "holds",
    ),
    Case("half-of-four", "half of four decides on proofs", Agreement(4, halves=True, crashes=2), "holds"),
    Case("witness", "2 trainers and a witness, two crashes", Agreement(crashes=2, **WITNESS), "holds"),
    Case(
        "witness-early",
        "the witness votes before any trainer",
        Agreement(crashes=2, witness_last=False, **WITNESS),
        "holds",
    ),
    Case(
        "mean-unlogged",
        "a vote does not say that the mean is on the disk",
        Agreement(mean_logged=False, **WITNESS),
        "STUCK",
        True,
    ),
    Case("disk-lost", "a trainer's disk never comes back (a person is needed)", Agreement(disks=1, **WITNESS), "STUCK"),
    Case("grows", "4 joiners become voters", Growth(), "holds", True),
    Case("grows-from-four", "4 joiners beside 4 old voters", Growth(old=4), "holds", True),
    Case("grows-all", "every live joiner votes in the end", Growth(3, all_vote=True), "holds", True),
    Case("grows-undropped", "dead voters are never dropped", Growth(3, all_vote=True, drops=False), "STUCK", True),
    Case("grows-by-half", "half as many new voters as old ones", Growth(proven_majority=False), "BROKEN", True),
    Case("grows-by-half-of-four", "the same from 4 voters", Growth(old=4, proven_majority=False), "BROKEN", True),
    Case("grows-by-views", "view commits name voters", Growth(views_name=True), "BROKEN", True),
    Case("second-dies", "the second voter dies without proof (by design)", Growth(mortal_second=True), "BROKEN", True),
    Case("once", "offers and reductions have names of their own", ExactlyOnce(), "holds", True),
    Case("once-restart", "and a peer restarts", ExactlyOnce(crashes=1), "holds"),
    Case(
        "once-by-peer",
        "offers are named by peer, until any commit",
        ExactlyOnce(named_offers=False, kept_offers=False),
        "BROKEN",
        True,
    ),
    Case(
        "once-by-attempt",
        "reductions are named by version and attempt",
        ExactlyOnce(named_reductions=False),
        "BROKEN",
        True,
    ),
    Case(
        "once-by-peer-restart",
        "offers are named by peer, and one restarts",
        ExactlyOnce(named_offers=False, crashes=1),
        "BROKEN",
        True,
    ),
)
