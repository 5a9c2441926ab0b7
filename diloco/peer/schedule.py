"""When a round's bytes go out and when a run is over: fragments and overlap in inner steps and versions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from diloco.base.types import Commit
from diloco.config.contract import Contract

MIN_SHARE = 1 / 16
"""Least share of a round's steps that the slowest peer does, whatever another claims of its own pace."""
OFFERED_AGAIN = 3
"""Times that a contribution is offered once more (`async`) before more inner steps are done."""


@dataclass(frozen=True)
class Cadence:
    """The inner steps of one round of a peer: some before the contribution is measured, some while it is on its way.

    A round has H / P inner steps, and the last `overlap` of them hide the exchange (Streaming DiLoCo, arXiv
    2501.18512). What they bring is progress of the next contribution.
    """

    steps: int
    overlap: int

    @staticmethod
    def of(contract: Contract) -> Cadence:
        """The contract's cadence of a peer's rounds."""
        return Cadence(contract.steps_per_round, contract.sync.overlap)

    def sized(self, pace: float, fastest: float) -> Cadence:
        """For a peer of this pace beside the fastest: floor(H v / max v) steps, `MIN_SHARE` of H at least (DyLU).

        Paces in tokens per second; 0: not known yet, which changes nothing.
        """
        if not 0 < pace < fastest:
            return self
        steps = max(math.floor(self.steps * max(pace / fastest, MIN_SHARE)), 1)
        return Cadence(steps, min(self.overlap, steps))

    def stretched(self, step_s: float, sync_s: float, share: float, most: int) -> Cadence:
        """A cadence of so many steps, `most` at most, that the part of an exchange of `sync_s` which no steps overlap
        with is at most this `share` of the round."""
        waited_s = sync_s - self.overlap * step_s
        if waited_s <= 0 or step_s <= 0:
            return self
        steps = math.ceil(waited_s * (1 / share - 1) / step_s)
        return Cadence(max(self.steps, min(steps, most)), self.overlap)

    @staticmethod
    def fitted(contract: Contract, pace: float, fastest: float, sync_s: float) -> Cadence:
        """The contract's cadence, for a peer of this pace beside the fastest (tokens per second, 0: not known) whose
        last exchange took `sync_s`."""
        cadence, inner = Cadence.of(contract), contract.inner
        if inner.comm_share and pace:
            step_s = contract.tokens_per_step / pace
            cadence = cadence.stretched(step_s, sync_s, inner.comm_share, contract.max_steps_per_round)
        return cadence.sized(pace, fastest) if inner.sized_by == "speed" else cadence

    def before(self, trained_tokens: int) -> int:
        """Inner steps before the contribution is measured. With nothing trained yet they are a whole round's, lest
        the first contribution be empty (`overlap` may be the whole round)."""
        return self.steps - self.overlap if trained_tokens else self.steps


@dataclass
class RunEnd:
    """When a peer's rounds are over: the run has its tokens, and then, without inner steps, what is uncommitted.

    The last versions are the final blocking sync before evaluation and export: with several fragments each moves once
    more, and steps that overlapped with the exchange, or that a version did not wait for, are committed, too. Where
    contributors take turns (`max_peers`), each gets its turn for each fragment.
    """

    total_tokens: int
    fragments: int
    may_leave_progress: bool
    """Whether there may be progress that the version that has the tokens leaves over, also of its own fragment."""
    max_peers: int | None = None
    """`Policy.max_peers`."""
    last_version: int | None = None
    version: int = 0
    late: bool = False
    """Whether the peer copied a state of the final sync. It takes no part in it, for it cannot know where that ends,
    and its state may not be the run's last."""

    @staticmethod
    def of(contract: Contract, max_peers: int | None = None) -> RunEnd:
        """The contract's end of a peer's rounds."""
        may_leave_progress = contract.sync.overlap > 0 or contract.membership.policy != "sync"
        return RunEnd(contract.run.total_tokens, contract.sync.fragments, may_leave_progress, max_peers)

    def further_versions(self, commit: Commit) -> int:
        """Number of a peer's last rounds, without inner steps: versions after the one that has the tokens."""
        trainers = sum(not member.witness for member in commit.view)
        turns = max(math.ceil(trainers / (self.max_peers or math.inf)), 1)
        return turns * self.fragments - (0 if self.may_leave_progress else 1)

    def on_commit(self, commit: Commit, copied: bool = False) -> None:
        """The peer has applied this commit, or copied its state. A witness may miss some."""
        copied = copied or (commit.fragment >= 0 and commit.version > self.version + 1)
        self.version = commit.version
        if commit.tokens < self.total_tokens:  # which never fall but where another history is copied
            self.last_version, self.late = None, False
        if commit.tokens >= self.total_tokens and self.last_version is None:
            before = commit.tokens - sum(counted.tokens for counted in commit.counted)
            further = self.further_versions(commit)
            copied_later = copied and before >= self.total_tokens
            self.late = copied_later and further > 1  # of one, it is the last
            self.last_version = commit.version + (0 if copied_later else further)

    @property
    def finishing(self) -> bool:
        """Whether this peer has only rounds without inner steps ahead."""
        return self.last_version is not None

    @property
    def done(self) -> bool:
        """Whether this peer's last round is over."""
        return self.last_version is not None and self.version >= self.last_version


class PeerStopwatch:
    """A peer's pace in inner steps alone, of the round before: its cadence follows it."""

    def __init__(self) -> None:
        self.pace = 0.0
        """Tokens per second; 0 before the first round."""
        self._tokens = 0
        self._seconds = 0.0

    def step(self, tokens: int, seconds: float) -> None:
        """Count one inner step of the peer towards its pace."""
        self._tokens += tokens
        self._seconds += seconds

    def round(self) -> float:
        """End a round of the peer. Returns its pace for the cadence, tokens per second."""
        if self._seconds > 0:
            self.pace = self._tokens / self._seconds
        self._tokens, self._seconds = 0, 0.0
        return self.pace
