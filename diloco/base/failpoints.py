"""Named places in the code where a test or an operator's drill can put a death, a stop or a delay. Off by default.

    DILOCO_FAILPOINTS="before-accept=kill"                     at the first time
    DILOCO_FAILPOINTS="mid-mean=kill@3,before-outer=sleep:2"   at the third time; two seconds each time
    DILOCO_FAILPOINTS="before-fold=stop"                       SIGSTOP: the sockets stay open, nothing moves

A place says `failpoints.hit("before-accept")`: one look-up in an empty dict. `kill` and `stop` happen once, at
the n-th time (the first unless `@n` says otherwise); `sleep` from the n-th time on, in the thread that comes by.
"""

from __future__ import annotations

import difflib
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from diloco.base.errors import UsageError

VARIABLE: Final = "DILOCO_FAILPOINTS"

POINTS: Final[Mapping[str, str]] = {
    "after-inner-steps": "the inner steps of a round are done, nobody was told",
    "before-contribution": "a contribution is about to go to the owner of a part, no byte of it has gone",
    "mid-contribution": "half of the parts for one owner were handed to the network",
    "after-contribution": "one owner has all of our contribution that it needs",
    "before-fold": "all contributions of an own part are here, it is not averaged yet",
    "after-fold": "an own part is averaged, nobody has its mean",
    "mid-mean": "half of our means were handed to the network for one receiver",
    "after-mean": "the whole mean is here, not yet hashed",
    "before-accept": "the mean is the proposed one, the coordinator was not told",
    "after-accept": "the coordinator has our acceptance",
    "before-propose": "the coordinator holds the mean and has proposed nothing",
    "after-propose": "somebody was told the coordinator's proposal",
    "before-commit": "a majority accepted, nobody was told that the version is committed",
    "after-commit": "somebody was told that the version is committed",
    "in-repair": "a death in the round was noticed and its parts get new owners",
    "before-outer": "a committed version is about to be applied",
    "before-merge": "the outer step is done, the weights and the state are still the old ones",
    "before-vote-sync": "a promise, a vote or a new head is written down, but not synced to the disk",
    "before-log-sync": "a mean is whole in the log, but not synced to the disk",
    "before-ledger-sync": "a commit is written to the ledger, but not synced to the disk",
    "mid-checkpoint": "the first file of a checkpoint is written, others and manifest are not; training goes on",
    "serving-state": "a joiner was given a chunk of the state by us",
    "copying-state": "we have a chunk of the state and want more",
}
"""Every failpoint and what has happened when it is reached."""

_SETTING = re.compile(r"(?P<point>[a-z-]+)=(?P<action>kill|stop|sleep:(?P<seconds>\d+(\.\d+)?))(@(?P<at>[1-9]\d*))?")
_FIX = "write NAME=kill, NAME=stop or NAME=sleep:SECONDS, with @N for the N-th time, separated by commas"


def hit(point: str) -> None:
    """Pass a failpoint in the code. Does nothing unless it is armed."""
    trigger = _armed.get(point)
    if trigger is not None:
        trigger.pull()


def arm(settings: str) -> None:
    """Arm the failpoints that `settings` names (the text of the variable), disarm the rest. Raises UsageError."""
    triggers = {}
    for text in filter(None, map(str.strip, settings.split(","))):
        match = _SETTING.fullmatch(text)
        if match is None:
            raise UsageError(f"{VARIABLE}: {text!r} is no setting of a failpoint", _FIX)
        point = match["point"]
        if point not in POINTS:
            near = difflib.get_close_matches(point, POINTS, 1)
            known = f"did you mean {near[0]}?" if near else f"known: {', '.join(POINTS)}"
            raise UsageError(f"{VARIABLE}: there is no failpoint {point!r}", known)
        action = match["action"].partition(":")[0]
        triggers[point] = _Trigger(action, float(match["seconds"] or 0), int(match["at"] or 1))
    _armed.clear()
    _armed.update(triggers)


def arm_from_environment() -> None:
    """Arm the failpoints that the environment variable names; none when it is not set. Raises UsageError."""
    arm(os.environ.get(VARIABLE, ""))


@dataclass
class _Trigger:
    """The action of an armed failpoint."""

    action: str
    seconds: float
    at: int
    """Which time it happens, counted from 1."""
    _times: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def pull(self) -> None:
        with self._lock:  # the training thread and the exchange's may come to one place
            self._times += 1
            times = self._times
        if self.action in ("kill", "stop") and times == self.at:
            os.kill(os.getpid(), getattr(signal, f"SIG{self.action.upper()}"))
        elif self.action == "sleep" and times >= self.at:
            time.sleep(self.seconds)


_armed: dict[str, _Trigger] = {}
