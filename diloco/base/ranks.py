"""Messages between the ranks of one peer; for a single process, a stand-in that sends nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Ranks(Protocol):
    """The ranks of a peer that divide its work (`diloco.island.Island`). Rank 0 decides; all do the same."""

    @property
    def rank(self) -> int:
        """Number of this process among the ranks; rank 0 leads."""

    def share(self, text: str = "") -> str:
        """Rank 0's text, on every rank."""

    def all(self, fine: bool) -> bool:
        """Whether the state of every rank is fine."""

    def total(self, sums: Tensor) -> Tensor:
        """The sum of a tensor over the ranks."""

    def gather(self, text: str) -> list[str]:
        """Every rank's text, by rank, on every rank."""


class Alone(Ranks):
    """The only rank of a peer that is a single process: it gets back what it gives."""

    rank = 0

    def share(self, text: str = "") -> str:
        return text

    def all(self, fine: bool) -> bool:
        return fine

    def total(self, sums: Tensor) -> Tensor:
        return sums

    def gather(self, text: str) -> list[str]:
        return [text]
