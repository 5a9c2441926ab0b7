"""One peer's life under gossip, top to bottom: enter, inner steps with swaps between them, the final average."""

from __future__ import annotations

from collections.abc import Callable

from diloco.base.decisions import Evaluate, Train
from diloco.base.life import Life
from diloco.base.types import Phase
from diloco.gossip.peer import GossipPeer
from diloco.peer.life import Ending


class GossipLife:
    """The other way of life: nobody agrees on versions, and nobody waits. The interface is `AgreedLife`'s."""

    def __init__(self, peer: GossipPeer, stop: Callable[[], bool]) -> None:
        """`stop`: whether this peer is asked to leave."""
        self.peer = peer
        self._stop = stop
        self._left = self._averaged = False
        self.sync_now = False
        """There is no sync to want."""
        peer.asked_to_leave = lambda: self.leaving

    @property
    def leaving(self) -> bool:
        """Whether the peer is asked to leave."""
        self._left = self._left or self._stop()
        return self._left

    def leave(self) -> None:
        """Leave, after one more swap if somebody is there."""
        self._left = True

    def trained(self, tokens: int, blocks: int, seconds: float, loss: float | None) -> None:
        """An inner step was done, of so many tokens in so much time."""
        self.peer.trained(tokens, seconds)

    def interrupted(self) -> None:
        """Nothing is read of the weights that somebody trains on."""

    def ready(self, steps: int) -> Train:
        """What ends a meeting."""
        peer = self.peer
        return Train(
            steps,
            version=peer.version,
            tokens=peer.position(),
            peers=(peer.name, *(word.member.peer for word in peer.exchange.alive())),
            digest=peer.line.state.digest,
            entered=peer.progress.phase != Phase.WAITING,
            done=self._averaged,
            leaving=self.leaving,
            spread=peer.spread,
        )

    def open(self) -> Life[None]:
        """Listen, find the others, get a state."""
        yield from self.peer.open()

    def live(self) -> Life[None]:
        """Until the run has its tokens, or this peer is to leave."""
        yield from self.peer.enter()
        while not (self.peer.finishing or self.leaving):
            self.peer.keeper.look()
            yield self.ready(1)
            self.peer.between_steps()
        if self.peer.finishing:
            yield from self.peer.average()
            self._averaged = True

    def end(self) -> Life[Ending]:
        """One last swap, where there was no final average; and the held-out loss."""
        peer, done = self.peer, self._averaged
        if not done:
            yield from peer.leave()
        yield from peer.do(Evaluate())
        return Ending(
            reason="done" if done else "left",
            version=peer.version,
            tokens=peer.position(),
            state_digest=peer.line.state.digest,
            chain_digest="",
            val_loss=peer.rank.val_loss,
            discarded_tokens=peer.discarded_tokens,
            spread=peer.spread if done else None,
        )
