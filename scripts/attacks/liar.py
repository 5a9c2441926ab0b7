"""A member that lies: `diloco peer` with one thing changed. `python -m scripts.attacks.liar LIE peer ...`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from diloco.__main__ import main as diloco
from diloco.base.decisions import Measure
from diloco.base.types import Commit, Voter
from diloco.exchange.engine import Exchange
from diloco.outer.line import Line, PendingContribution
from diloco.peer import rank
from diloco.protocol import effects as fx
from diloco.protocol import messages as m
from diloco.protocol.draft import Drafter
from diloco.protocol.membership import Membership
from diloco.protocol.post import Post
from diloco.round import Seconds, measure

FLIP = -10.0
"""Its contributions are that many times what it trained: not too large for `membership.max_norm_ratio`."""

LIES: dict[str, Callable[[], None]] = {}
"""Each changes this process before it becomes a peer."""


def lie(tell: Callable[[], None]) -> Callable[[], None]:
    """Register a lie by the name of its function."""
    LIES[tell.__name__.replace("_", "-")] = tell
    return tell


def _offers(**changed: Any) -> None:
    """All our offers say that."""
    feed = Exchange._feed

    def fed(exchange: Exchange, event: m.Event) -> None:
        feed(exchange, m.Offered(replace(event.offer, **changed)) if isinstance(event, m.Offered) else event)

    setattr(Exchange, "_feed", fed)  # noqa: B010


def _drafts(forge: Callable[[Commit], Commit]) -> None:
    """All version commits that we propose are forged."""
    draft = Drafter.version_commit
    setattr(Drafter, "version_commit", lambda drafter, reduction: forge(draft(drafter, reduction)))  # noqa: B010


def _announces(forge: Callable[[Commit], Commit]) -> None:
    """With each heartbeat we say that a commit holds which nobody has voted for."""
    beat = Membership.beat

    def lying(membership: Membership) -> None:
        head = membership.chain.commit
        if head is not None and membership.in_view:
            forged = replace(forge(head), height=head.height + 1, previous=head.digest)
            membership._post.send_all([one for one in head.view if one != membership.me], m.Committed(forged))
        beat(membership)

    setattr(Membership, "beat", lying)  # noqa: B010


def _beats(envelope: Callable[[m.Envelope], m.Envelope]) -> None:
    """As a member we send other heartbeats than we should."""
    emit = Post.emit

    def lying(post: Post, effect: fx.Effect) -> None:
        if isinstance(effect, fx.Send) and isinstance(effect.envelope.body, m.Heartbeat) and post.membership.in_view:
            effect = replace(effect, envelope=envelope(effect.envelope))
        emit(post, effect)

    setattr(Post, "emit", lying)  # noqa: B010


def _only_us(head: Commit, **changed: Any) -> Commit:
    """A commit that moves no anchor and makes no version, after that one."""
    nothing: dict[str, Any] = {"fragment": -1, "counted": (), "omitted": (), "mean_digest": "", "evicted": ()}
    return replace(head, **nothing, **changed)


@lie
def many_tokens() -> None:
    """A contribution of more tokens than a run has ends that run at its first version."""
    _offers(tokens=10**15)


@lie
def much_weight() -> None:
    """The mean is the liar's."""
    _offers(weight=2**40)


@lie
def many_blocks() -> None:
    """A contribution uses more data than the lease has."""
    _offers(blocks=10**9)


@lie
def no_weight() -> None:
    """A contribution that weighs nothing is divided by."""
    _offers(weight=0)


@lie
def forged_tokens() -> None:
    """The coordinator's commit has all tokens of the run."""
    _drafts(lambda commit: replace(commit, tokens=commit.tokens + 10**15))


@lie
def forged_leases() -> None:
    """The coordinator's commit takes all data."""
    _drafts(lambda commit: replace(commit, leases=replace(commit.leases, cursor=10**12)))


@lie
def forged_voters() -> None:
    """The coordinator's commit has no voters, and whatever is said suffices."""
    _drafts(lambda commit: replace(commit, voters=()))


@lie
def announced_tokens() -> None:
    """A view commit ends the run."""
    _announces(lambda head: _only_us(head, drafter="liar", state_digest="", tokens=10**15))


@lie
def announced_founding() -> None:
    """A founding within the lineage takes it over."""

    def founding(head: Commit) -> Commit:
        return _only_us(head, drafter="", state_digest="f" * 64, voters=(Voter("liar", 0, head.version - 1),))

    _announces(founding)


@lie
def false_head() -> None:
    """Heartbeats name another commit than all stand on."""
    _beats(lambda envelope: replace(envelope, head="f" * 64))


@lie
def flipped() -> None:
    """The progress of all others is undone twice over."""

    def changed(line: Line, how: Measure, seconds: Seconds) -> PendingContribution:
        sent = measure(line, how, seconds)
        fragment = line.layout.fragments[sent.contribution.fragment]
        parts = []
        for part, payload in enumerate(sent.contribution.parts):
            codec = line.codecs[fragment.group_of(part)]
            parts.append(codec.encode(codec.decode(payload, fragment.size_of(part)) * FLIP))
        line.sent = replace(sent, contribution=replace(sent.contribution, parts=parts))
        return line.sent

    setattr(rank, "measure", changed)  # noqa: B010


if __name__ == "__main__":
    LIES[sys.argv.pop(1)]()
    diloco()
