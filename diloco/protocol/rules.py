"""Settings of the protocol: from the contract, the same for all peers, and from the site, for this one."""

from __future__ import annotations

from dataclasses import dataclass

from diloco.protocol.view import Policy


@dataclass(frozen=True, slots=True)
class Rules:
    """The contract's settings for rounds."""

    run: str
    contract: str
    """Digest of the contract."""
    parts: tuple[int, ...]
    """Parts of each fragment."""
    start_peers: int
    lease_blocks: int
    """Data blocks that every trainer holds at least after a commit."""
    policy: Policy
    backlog_versions: int
    """Commits that members keep for those who are behind."""
    continue_after_s: float | None = None
    """Without a majority for this long, go on as a lineage of our own; None: wait."""
    offences_allowed: int = 3
    """After so many contributions that no honest peer sends, a peer is put out of the run."""
    total_tokens: int | None = None
    """When so many are committed, only what is under way is still to come. None: never."""

    @property
    def means_kept(self) -> int:
        """Encoded means that a peer holds: those of the backlog, and of attempts that may still be proposed again."""
        return self.backlog_versions + 2


@dataclass(frozen=True, slots=True)
class Timing:
    """The site's settings for waiting."""

    heartbeat_s: float
    suspect_s: float
    stall_s: float

    @property
    def resend_s(self) -> float:
        """Unanswered messages are said again this often."""
        return self.heartbeat_s
