"""Messages between the ranks of one peer; for a single process, a stand-in that sends nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Ranks(Protocol):
    """The ranks of a peer that divide its work (`diloco.island.Island`). The first decides; all do the same."""

    @property
    def rank(self) -> int:
        """Number of this process within its island; rank 0 leads."""

    def share(self, text: str = "") -> str:
        """The first's text, on every rank."""

    def all(self, fine: bool) -> bool:
        """Whether it is fine on every rank."""

    def total(self, sums: Tensor) -> Tensor:
        """The sum over the ranks."""

    def gather(self, text: str) -> list[str]:
        """Every rank's text, by rank, on every rank."""


class Alone(Ranks):
    """There is one."""

    rank = 0

    def share(self, text: str = "") -> str:
        return text

    def all(self, fine: bool) -> bool:
        return fine

    def total(self, sums: Tensor) -> Tensor:
        return sums

    def gather(self, text: str) -> list[str]:
        return [text]
