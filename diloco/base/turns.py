"""The turns of fragments: which one a version moves. Every peer computes it, and `diloco audit` does so again."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diloco.config.contract import Contract


@dataclass(frozen=True, slots=True)
class Turns:
    """The contract's rule for the fragment that a version moves: of P versions in a row each moves another one.

    Under `sync` fragments come in order. A version that does not wait for all may count a peer in every n-th version
    only. In order, these would always move the same fragments where n and P have a common divisor, as of two peers of
    one pace and two fragments: the peer's progress in the others would never be counted. So the order is drawn anew for
    every P versions. The final sync goes in order, so that its first P versions move each fragment, wherever it begins.
    """

    fragments: int = 1
    """P."""
    in_order: float = math.inf
    """The first so many versions close as under `sync`."""
    total_tokens: float = math.inf
    """When so many are committed, the final sync begins."""

    @staticmethod
    def of(contract: Contract) -> Turns:
        """A contract's turns of fragments."""
        membership = contract.membership
        in_order = math.inf if membership.policy == "sync" else membership.sync_versions
        return Turns(contract.sync.fragments, in_order, contract.run.total_tokens)

    def is_final(self, tokens: int) -> bool:
        """Whether what follows is the final sync, in which nobody trains. `tokens`: committed so far."""
        return tokens >= self.total_tokens

    def leaves_over(self, tokens: int) -> bool:
        """Whether what follows counts progress left over in the fragments, whose tokens others of them may have brought
        in. `tokens`: committed so far."""
        return self.fragments > 1 and self.is_final(tokens)

    def next(self, version: int, tokens: int) -> int:
        """The fragment that the version after this one moves. `tokens`: committed so far."""
        turn, place = divmod(version, self.fragments)
        if turn * self.fragments < self.in_order or self.is_final(tokens):
            return place
        return _drawn(turn, self.fragments)[place]


@lru_cache(maxsize=64)
def _drawn(turn: int, fragments: int) -> list[int]:
    """An order of the fragments for one turn, which looks random and is the same everywhere."""
    return sorted(range(fragments), key=lambda index: hashlib.sha256(f"{turn}/{index}".encode()).digest())
