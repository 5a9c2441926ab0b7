"""Terms of a gossip exchange, from contract and site."""

from __future__ import annotations

from typing import Any, Protocol

from diloco.config.contract import Contract
from diloco.config.site import Site
from diloco.gossip.transfer import GossipTerms
from diloco.outer.line import Line
from diloco.peer.terms import serve_bps_of, timing_of


class SwapRecord(Protocol):
    """Whoever records what happens to a peer (`diloco.run.run.Chronicle`)."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens that this peer trained per second, since its life began to train."""

    def begin(self) -> None:
        """Training begins here."""

    def take_loss(self) -> float | None:
        """Mean over the inner steps since it was taken last."""

    def numbers(self) -> dict[str, Any]:
        """What a checkpoint holds of who trains, on rank 0 alone: JSON."""


def gossip_terms(contract: Contract, site: Site, line: Line, data: str) -> GossipTerms:
    """`data`: fingerprint of the training data."""
    return GossipTerms(
        contract_json=contract.to_json().encode(),
        run=contract.run.name,
        contract=contract.digest,
        timing=timing_of(site),
        layout=line.layout,
        codecs=line.codecs,
        optimizer=line.optimizer,
        total_tokens=contract.run.total_tokens,
        tokens_per_step=contract.tokens_per_step,
        data=data,
        offences_allowed=contract.membership.offences_allowed,
        serve_bps=serve_bps_of(site),
    )
