"""The cases that `scripts/model-check` searches: each rule of agreement as it stands, and with one clause left out."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from scripts.models import bugs
from scripts.models.agreement import Agreement
from scripts.models.bugs import Bug
from scripts.models.counting import ExactlyOnce
from scripts.models.growth import Growth
from scripts.models.search import MAX_STATES, Found, Model, search


@dataclass(frozen=True)
class Case:
    """A case, and what its search is expected to find."""

    name: str
    about: str
    of: Agreement | Growth | ExactlyOnce
    expected: str
    """Its verdict."""
    quick: bool = False
    """It takes a second or two, and is searched in the tests."""
    bugs: tuple[Bug, ...] = ()
    least: int = 1000
    """States that a case that holds judges at least, or visits where none is judged: fewer prove nothing."""

    def search(self, max_states: int = MAX_STATES) -> Found:
        """Search the model with the bugs planted."""
        with ExitStack() as planted:
            for bug in self.bugs:
                planted.enter_context(patch.object(*bug))
            model: Model[Any] = self.of.model()
            return search(model, max_states)

    def verdict(self, found: Found) -> str:
        """Verdict of a search, or `vacuous` where it holds over fewer states than there should be."""
        few = (found.judged_states or found.states) < self.least
        return "vacuous" if found.verdict == "holds" and few else found.verdict


BESIDE: Any = {"views": True, "reduction": True}
"""A view commit beside a reduction that is under way."""
TWO: Any = {"leavers": (0, 2), "crashes": 0}
ALL: Any = {"views": True, "anew": False}
WITNESS: Any = {"trainers": 2, "witnesses": 1, "attempts": 3}
WITNESS_TWICE: Any = {**WITNESS, "attempts": 2}
HALF: Any = {"trainers": 2, "halves": True, "crashes": 2}

CASES = (
    Case("three", "3 voters, one crashes and comes back", Agreement(), "holds", True, least=1_300),
    Case("three-attempts", "the same with 3 attempts", Agreement(attempts=3), "holds", least=25_000),
    Case("seat-restarts", "the seat of the second crashes", Agreement(attempts=3, mortal=(1,)), "holds", least=9_700),
    Case("two", "2 voters, two crashes", Agreement(2, attempts=4, crashes=2), "holds", True, least=22_000),
    Case(
        "promise-unsynced",
        "a promise is given before it is on the disk",
        Agreement(late_sync="promised"),
        "BROKEN",
        True,
    ),
    Case("vote-unsynced", "a vote is said before it is on the disk", Agreement(late_sync="attempt"), "BROKEN", True),
    Case(
        "lead-unsynced",
        "a seat proposes before the disk knows that it leads",
        Agreement(late_sync="led", mortal=(0,), views=True, mean_first=False),
        "BROKEN",
        True,
    ),
    Case(
        "promise-broken",
        "a voter votes below its promise",
        Agreement(crashes=0),
        "BROKEN",
        True,
        (bugs.BREAKS_PROMISES,),
    ),
    Case(
        "vote-forgotten",
        "a promise forgets the vote before it",
        Agreement(attempts=3, crashes=0),
        "BROKEN",
        True,
        (bugs.FORGETS_ITS_VOTE,),
    ),
    Case(
        "leads-again",
        "a seat leads an attempt twice: harmless here, where voters take one value in each",
        Agreement(),
        "holds",
        True,
        (bugs.LEADS_AGAIN,),
        least=1_600,
    ),
    Case(
        "two-values",
        "and voters take a second value in an attempt",
        Agreement(),
        "BROKEN",
        True,
        (bugs.LEADS_AGAIN, bugs.ACCEPTS_ANOTHER),
    ),
    Case(
        "leads-again-later",
        "a seat leads an attempt twice beside a view commit: attempts that follow pick among two values",
        Agreement(crashes=0, **BESIDE),
        "BROKEN",
        True,
        (bugs.LEADS_AGAIN,),
    ),
    Case(
        "oldest-value",
        "of accepted values the first is proposed, not the latest",
        Agreement(attempts=3, crashes=0),
        "BROKEN",
        True,
        (bugs.TAKES_THE_OLDEST,),
    ),
    Case("passed-over", "an accepted value is passed over", Agreement(crashes=0), "BROKEN", True, (bugs.PASSES_OVER,)),
    Case(
        "record-kept",
        "attempts go on under the next head",
        Agreement(views=True, crashes=0, mean_first=False),
        "STUCK",
        True,
        (bugs.KEEPS_THE_RECORD,),
    ),
    Case(
        "view",
        "a joiner's view commit beside a reduction; who crashes may stay away",
        Agreement(forever=True, **BESIDE),
        "holds",
        least=160_000,
    ),
    Case(
        "views-first",
        "a view commit before a mean that is there",
        Agreement(views=True, crashes=0, mean_first=False),
        "holds",
        least=11_000,
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
    Case("leaves", "one of three leaves", Agreement(leavers=(2,), **BESIDE), "holds", least=100_000),
    Case(
        "leaves-dead",
        "it dies for good at any time",
        Agreement(leavers=(2,), mortal=(2,), forever=True, **BESIDE),
        "holds",
        least=30_000,
    ),
    Case(
        "leaves-late",
        "its `leave_s` is over",
        Agreement(leavers=(2,), go="leave_s", crashes=0, **BESIDE),
        "holds",
        least=13_000,
    ),
    Case(
        "leaves-unfetched",
        "the seat does not fetch the mean, and begins anew",
        Agreement(leavers=(2,), fetches=False, mortal=(0,), **BESIDE),
        "holds",
        least=63_000,
    ),
    Case(
        "leaves-neither",
        "it does neither",
        Agreement(leavers=(2,), fetches=False, anew=False, mortal=(0,), **BESIDE),
        "STUCK",
    ),
    Case(
        "leader-leaves",
        "the seat that began the reduction leaves",
        Agreement(leavers=(0,), **BESIDE),
        "holds",
        least=110_000,
    ),
    Case("two-leave", "two of three leave at once", Agreement(**TWO, **BESIDE), "holds", least=22_000),
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
        least=400,
    ),
    Case(
        "one-of-two-leaves",
        "one of two leaves",
        Agreement(2, leavers=(1,), attempts=3, **BESIDE),
        "holds",
        least=67_000,
    ),
    Case(
        "leader-of-two-leaves",
        "the seat of two leaves",
        Agreement(2, leavers=(0,), attempts=3, **BESIDE),
        "holds",
        least=79_000,
    ),
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
        least=16_000,
    ),
    Case(
        "hand-over-two", "both voters leave", Agreement(leavers=(0, 1), learners=(2,), **BESIDE), "holds", least=22_000
    ),
    Case(
        "hand-over-early",
        "the voter goes as soon as it knows the commit",
        Agreement(2, leavers=(0,), learners=(1,), go="knows", crashes=0, **BESIDE),
        "STUCK",
        True,
    ),
    Case(
        "both-leave", "both of two leave", Agreement(2, leavers=(0, 1), attempts=3, **ALL), "holds", True, least=1_900
    ),
    Case("all-leave", "all of three leave", Agreement(leavers=(0, 1, 2), **ALL), "holds", True, least=3_200),
    Case(
        "both-leave-early",
        "both of two go as soon as they know the commit",
        Agreement(2, leavers=(0, 1), attempts=3, crashes=0, go="knows", **ALL),
        "STUCK",
        True,
    ),
    Case(
        "both-leave-at-once",
        "no leaver looks who stands on the commit",
        Agreement(2, leavers=(0, 1), attempts=3, crashes=0, **ALL),
        "STUCK",
        True,
        (bugs.GOES_AT_ONCE,),
    ),
    Case("half", "half of two decides on a proof of death", Agreement(attempts=3, **HALF), "holds", True, least=6_400),
    Case("half-of-versions", "the same over two versions", Agreement(versions=2, **HALF), "holds", least=23_000),
    Case(
        "half-late-proof",
        "the same; a proof is believed when the peer is up again: the boots that a head names make it harmless",
        Agreement(versions=2, late_proofs=True, **HALF),
        "holds",
        least=35_000,
    ),
    Case(
        "half-any-death",
        "a proof of an earlier boot than the head names counts",
        Agreement(versions=2, late_proofs=True, **HALF),
        "BROKEN",
        True,
        (bugs.TAKES_ANY_DEATH,),
    ),
    Case(
        "half-any-boot",
        "votes of later boots than the head names count in the half",
        Agreement(**HALF),
        "BROKEN",
        True,
        (bugs.TAKES_ANY_BOOT,),
    ),
    Case(
        "any-half",
        "half decides without a proof",
        Agreement(2, crashes=0),
        "BROKEN",
        True,
        (bugs.TAKES_ANY_HALF,),
    ),
    Case("half-of-four", "half of four decides on proofs", Agreement(4, halves=True, crashes=2), "holds", least=54_000),
    Case("witness", "2 trainers and a witness, two crashes", Agreement(crashes=2, **WITNESS), "holds", least=99_000),
    Case(
        "witness-last",
        "the seat of the second stays away",
        Agreement(mortal=(1,), forever=True, **WITNESS),
        "holds",
        least=6_200,
    ),
    Case(
        "witness-early",
        "the same; the witness is asked before the other trainer has voted",
        Agreement(mortal=(1,), forever=True, witness_last=False, **WITNESS),
        "STUCK",
        True,
    ),
    Case(
        "mean-unlogged",
        "a vote does not say that the mean is on the disk",
        Agreement(mean_logged=False, crashes=2, **WITNESS_TWICE),
        "STUCK",
        True,
    ),
    Case(
        "disk-lost",
        "a trainer's disk never comes back (a person is needed)",
        Agreement(disks=1, crashes=2, **WITNESS_TWICE),
        "STUCK",
        True,
    ),
    Case("grows", "4 joiners become voters", Growth(), "holds", True, least=1_000),
    Case("grows-from-four", "4 joiners beside 4 old voters", Growth(old=4), "holds", True, least=2_300),
    Case("grows-all", "every live joiner votes in the end", Growth(3, all_vote=True), "holds", True, least=190),
    Case("grows-undropped", "dead voters are never dropped", Growth(3, all_vote=True, drops=False), "STUCK", True),
    Case("grows-by-half", "half as many new voters as old ones", Growth(proven_majority=False), "BROKEN", True),
    Case("grows-by-half-of-four", "the same from 4 voters", Growth(old=4, proven_majority=False), "BROKEN", True),
    Case(
        "grows-twofold",
        "as many new voters as old ones",
        Growth(old=4),
        "BROKEN",
        True,
        (bugs.NAMES_ALL,),
    ),
    Case("grows-by-views", "view commits name voters", Growth(views_name=True), "BROKEN", True),
    Case("second-dies", "the second voter dies without proof (by design)", Growth(mortal_second=True), "BROKEN", True),
    Case("once", "offers and reductions have names of their own", ExactlyOnce(), "holds", True, least=27_000),
    Case("once-restart", "and a peer restarts", ExactlyOnce(crashes=1), "holds", least=270_000),
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
