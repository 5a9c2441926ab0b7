"""What a round works on: one peer's weights, the outer state, and what is between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from diloco.base.clock import monotonic_s
from diloco.base.ranks import Alone, Ranks
from diloco.base.types import Closed, Commit, Contribution, Counted, Skip
from diloco.compress import Codec
from diloco.compress.encoding import Encode, encode_now
from diloco.outer.fragments import Fragment, Layout, Weights
from diloco.outer.state import FragmentState, OuterOptimizer, OuterState
from diloco.outer.weighing import Weighing

MAX_VALUE = torch.finfo(torch.float32).max / 2
"""Of anchor and local weights: the difference of two such is finite."""


@dataclass
class Trained:
    """What inner steps were done since a commit counted us last."""

    tokens: int = 0
    blocks: int = 0

    def add(self, tokens: int, blocks: int) -> None:
        self.tokens += tokens
        self.blocks += blocks

    def subtract(self, counted: Counted) -> None:
        self.tokens -= counted.tokens
        self.blocks -= counted.blocks


@dataclass(frozen=True)
class Sent:
    """A contribution on its way. Tensors are flat fp32, of its fragment."""

    contribution: Contribution
    local: Tensor | None
    """The local weights just after it was sent: what has changed since is progress of the next contribution. None
    while nothing has (`keep_local`)."""
    unsent: Tensor
    """In place of `local` when it comes to nothing: what has changed since *this* is all progress."""
    target: Tensor | None = None
    """What was encoded, when the codec's error is fed back. It becomes the residual (`left_over`)."""
    foreseen: FragmentState | None = None
    """What `eager` took ahead of the outer step."""
    passed: Commit | None = None
    """The first version that we could not apply and that counts it, for all we know: it is no progress any more,
    whatever comes of the rounds until a state is copied."""
    since_s: float = field(default_factory=monotonic_s)
    """When it was measured."""


class Exchanger(Protocol):
    """The part of the exchange that a round needs."""

    def offer(self, contribution: Contribution, leaving: bool) -> None: ...

    def outcome(self, patience: Callable[[], bool]) -> Sequence[Closed] | Skip: ...


@dataclass
class Line:
    """What a round works on: one peer's weights, the outer state, and what is between them.

    Invariant: local weights = anchor + progress that is not committed yet; `trained` counts that progress. For this the
    anchor is taken as the parameters' dtype holds it (`Weights.rounded`).

    Where the ranks of an island divide the outer state, each has a line of the parts that it holds. What the functions
    of this file do to the first's they have the others do to theirs (`Ranks.announce`).
    """

    peer: str
    weights: Weights
    layout: Layout
    codecs: Sequence[Codec]
    """By group of parameters (`Fragment.group_of`)."""
    optimizer: OuterOptimizer
    weighing: Weighing
    state: OuterState
    commit: Commit | None = None
    diverged: bool = False
    """Our state turned out to be another than that of `commit`."""
    trained: Trained = field(default_factory=Trained)
    sent: Sent | None = None
    """The contribution that others may hold already: until its version closes it is offered again unchanged."""
    ranks: Ranks = field(default_factory=Alone)
    merge: str = "carry"
    mix_alpha: float = 0.5
    """`SyncSection.merge` and `mix_alpha`."""
    feedback: float | None = None
    """Decay of the residual; None: no error feedback (`CodecSection.error_feedback`)."""
    residual_after_rejoin: float = 0.0
    residuals: dict[int, Tensor] = field(default_factory=dict)
    """By fragment, flat fp32; a fragment without an entry has none yet."""
    encode: Encode = encode_now
    """On this thread, or ahead of the exchange on another (`Encoder`)."""
    align: bool = False
    """Late pseudo-gradients are turned towards the outer momentum (`diloco.outer.align`)."""
    since: int = field(init=False)
    """The version at which the progress that is not committed yet began."""
    own: dict[int, FragmentState] = field(default_factory=dict)
    """By fragment, for `eager`: the outer steps that our contributions alone would have made."""
    spare: Callable[[], bool] = lambda: False
    """Whether nobody else needs the outer state any more, so that the next outer step may overwrite it."""

    def __post_init__(self) -> None:
        self.since = self.state.version
        for fragment in self.state.fragments:
            complete(self, fragment)

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The model's own, by name."""
        return self.weights.parameters

    @property
    def stands_at(self) -> Commit | None:
        """Before whose version no state is copied. None: there is none, or our state is wrong and any is better."""
        return None if self.diverged else self.commit

    @property
    def due(self) -> Fragment:
        """The fragment that the next version moves."""
        return self.layout.fragments[self.state.version % len(self.layout.fragments)]

    @property
    def trainers(self) -> int:
        """Members that contribute, as far as we know: with us at least one, also where a view has witnesses only."""
        return max(sum(not member.witness for member in self.commit.view), 1) if self.commit else 1

    @property
    def staleness(self) -> float:
        """Versions that closed since our progress began, over the trainers."""
        return (self.state.version - self.since) / self.trainers


def keep_local(line: Line) -> None:
    """Inner steps follow while a contribution is on its way: what they change is progress of the next one."""
    if line.sent is not None and line.sent.local is None:
        line.ranks.announce("keep_local")
        kept_local(line)


def kept_local(line: Line) -> None:
    """`keep_local` on one rank."""
    if line.sent is not None:
        contribution = line.sent.contribution
        len(contribution.parts[:])  # waits: it may be made of these very weights
        line.sent = replace(line.sent, local=line.weights.read(line.layout.fragments[contribution.fragment]))


@contextmanager
def weights_at_anchor(line: Line) -> Iterator[None]:
    """Meanwhile the model holds the anchor."""
    line.ranks.announce("stand_at_anchor")
    local = [line.weights.read(fragment) for fragment in line.layout.fragments]
    try:
        for fragment in line.layout.fragments:
            line.weights.write(fragment, line.state.fragments[fragment.index].anchor)
        yield
    finally:
        line.ranks.announce("stand_back")
        for fragment, weights in zip(line.layout.fragments, local, strict=True):
            line.weights.write(fragment, weights)


def complete(line: Line, state: FragmentState) -> None:
    """The ranks tell each other the hashes of the parts that they hold."""
    fragment = state.fragment
    if fragment is None or fragment.lanes == 1:
        return
    own = state.own_hashes
    told = line.ranks.gather(" ".join(text for name in own for text in own[name].values()))
    hashes = {name: [""] * fragment.parts for name in own}
    for lane, text in enumerate(told):
        cuts = fragment.on_lane(lane, fragment.lanes).cuts
        for (name, part), digest in zip(((name, part) for name in own for part in cuts), text.split(), strict=True):
            hashes[name][part] = digest
    state.keep_hashes(hashes)


class Diverged(Exception):
    """Our state is not the one that a version was made on: it must be copied anew."""

    def __init__(self, version: int) -> None:
        super().__init__(f"version {version} was made on another state than ours")
