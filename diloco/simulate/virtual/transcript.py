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
        case m.Begin(height, attempt, contributors, receivers, spans):
            who = " ".join(counted.peer for counted in contributors)
            others = [member.peer for member in receivers if member.peer not in who.split()]
            extra = f", also to {' '.join(others)}" if others else ""
            return f"Begin {height}.{attempt} with {who}{extra}; {_spans(spans)}"
        case m.Repair(height, attempt, generation, gone, spans):
            return f"Repair {height}.{attempt} number {generation} without {' '.join(gone)}; {_spans(spans)}"
        case m.Abort(height, attempt, without, reason):
            return f"Abort {height}.{attempt} without {' '.join(without) or 'nobody'}: {reason}"
        case m.Stalled(height, attempt, missing, reason):
            return f"Stalled {height}.{attempt} for {' '.join(missing) or 'nobody'}: {reason}"
        case m.Propose(height, attempt, commit):
            return f"Propose {height}.{attempt} counting {counted(commit)}"
        case m.Accept(height, attempt):
            return f"Accept {height}.{attempt}"
        case m.Gather(height, attempt, reason):
            return f"Gather {height}.{attempt}: {reason}"
        case m.Committed(commit):
            return f"Committed {commit.version}{f' at {commit.height}' if commit.drafter else ''}"
        case m.Goodbye():
            return "Goodbye"
        case m.Evict(peer):
            return f"Evict {peer}"
        case _:
            return type(message).__name__


def closed(commit: Commit) -> str:
    """A commit that the first simulated peer stands on, in words of a transcript; with its voters, if not all are."""
    members, voters = [member.peer for member in commit.view], [voter.peer for voter in commit.voters]
    view = f"view {' '.join(members)}"
    if set(voters) != set(members):
        view += f"; {' '.join(voters)} {'votes' if len(voters) == 1 else 'vote'}"
    if commit.founds:
        return f"FOUNDS version {commit.version}, {view}"
    if not commit.moves:
        return f"CHANGES members at version {commit.version}, {view}"
    return f"CLOSES version {commit.version} counting {counted(commit)}; {view}"


def counted(commit: Commit) -> str:
    """Contributors of a commit in a simulation's transcript, and the parts where one is omitted."""
    names = " ".join(entry.peer for entry in commit.counted) or "nobody"
    omitted = ", ".join(f"not {entry.peer} in {_range(entry.start, entry.stop)}" for entry in commit.omitted)
    return f"{names} ({omitted})" if omitted else names


def _spans(spans: tuple[m.Span, ...]) -> str:
    return " ".join(f"{span.owner}:{_range(span.start, span.stop)}" for span in spans)


def _range(start: int, stop: int) -> str:
    return f"{start}" if stop == start + 1 else f"{start}-{stop - 1}"
