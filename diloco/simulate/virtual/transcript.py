"""Transcript of a simulation, as lines that people read: time, peer, event."""

from __future__ import annotations

from diloco.base.types import Commit
from diloco.protocol import messages as m

QUIET = (m.Heartbeat, m.Ready, m.Accept)
"""Said all the time, when all goes well."""


def line(now_s: float, name: str, what: str) -> str:
    """One line of a simulation's transcript."""
    return f"{now_s:7.2f}  {name:4} {what}"


def said(what: str, to: str) -> str:
    """A sent message as it appears in a simulation's transcript."""
    return f"-> {to}: {what}"


def said_also_to(line: str, to: str) -> str:
    """The same line of a simulation's transcript with one more receiver."""
    head, _, what = line.partition(": ")
    return line if to in head.split() else f"{head} {to}: {what}"


def body(message: m.Body) -> str:
    """A message's content in a few words, for a simulation's transcript."""
    match message:
        case m.Begin(version, attempt, contributors, receivers, spans):
            who = " ".join(counted.peer for counted in contributors)
            others = [member.peer for member in receivers if member.peer not in who.split()]
            extra = f", also to {' '.join(others)}" if others else ""
            return f"Begin {version}.{attempt} with {who}{extra}; {_spans(spans)}"
        case m.Repair(version, attempt, generation, gone, spans):
            return f"Repair {version}.{attempt} number {generation} without {' '.join(gone)}; {_spans(spans)}"
        case m.Abort(version, attempt, without, reason):
            return f"Abort {version}.{attempt} without {' '.join(without) or 'nobody'}: {reason}"
        case m.Stalled(version, attempt, missing, reason):
            return f"Stalled {version}.{attempt} for {' '.join(missing) or 'nobody'}: {reason}"
        case m.Propose(version, attempt, commit):
            return f"Propose {version}.{attempt} counting {counted(commit)}"
        case m.Accept(version, attempt):
            return f"Accept {version}.{attempt}"
        case m.Gather(version, attempt, reason):
            return f"Gather {version}.{attempt}: {reason}"
        case m.Committed(commit):
            return f"Committed {commit.version}"
        case m.Goodbye(version, attempt, heir):
            return f"Goodbye at {version}.{attempt}, my vote to {heir or 'nobody'}"
        case m.Evict(peer):
            return f"Evict {peer}"
        case _:
            return type(message).__name__


def closed(commit: Commit) -> str:
    """A version that the first simulated peer closed, as words of a transcript."""
    view = " ".join(member.peer for member in commit.view)
    if commit.fragment == -1:
        return f"FOUNDS version {commit.version}, view {view}"
    return f"CLOSES version {commit.version} counting {counted(commit)}; view {view}"


def counted(commit: Commit) -> str:
    """Contributors of a commit in a simulation's transcript, and the parts where one is omitted."""
    names = " ".join(entry.peer for entry in commit.counted) or "nobody"
    omitted = ", ".join(f"not {entry.peer} in {_range(entry.start, entry.stop)}" for entry in commit.omitted)
    return f"{names} ({omitted})" if omitted else names


def _spans(spans: tuple[m.Span, ...]) -> str:
    return " ".join(f"{span.owner}:{_range(span.start, span.stop)}" for span in spans)


def _range(start: int, stop: int) -> str:
    return f"{start}" if stop == start + 1 else f"{start}-{stop - 1}"
