"""The schema of events: what is written is read back, what is wrong is refused, old files and damaged ones are read."""

import math
from dataclasses import MISSING, fields
from typing import Any

import pytest

from diloco.observe.events import (
    KINDS,
    CheckpointWritten,
    Departure,
    Ended,
    Event,
    HardwareUsed,
    RankMemory,
    Stamped,
    TrainingProgress,
    VersionClosed,
    ViewChanged,
    from_json,
    timed,
    to_json,
)

EXAMPLES = {
    "usage": HardwareUsed(1.0, 2.0, 64, (RankMemory(1, 2, 3), RankMemory(4, 5)), {"forward": 0.5}, mfu=0.1),
    "view": ViewChanged(3, ("a", "b"), (Departure("c", "left"),)),
    "version": VersionClosed(3, 640, members=("a",), blocks=((0, 8), (12, 16)), seconds={"inner": 1}, loss=2),
    "checkpoint": CheckpointWritten(2, 0.5, 0.1, 1000),
}
PLAIN: dict[str, Any] = {"str": "x", "int": 1, "float": 0.5, "bool": True}


def example(kind: type[Event]) -> Event:
    needed = [one for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING]  # type: ignore
    return EXAMPLES.get(kind.kind) or kind(**{one.name: PLAIN[str(one.type)] for one in needed})


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_every_kind_is_read_as_it_was_written(kind: type[Event]) -> None:
    stamped = Stamped(1.5, 100.0, "tokyo", example(kind))
    line = to_json(stamped)
    assert line["kind"] == kind.kind
    assert from_json(line) == stamped
    assert from_json(line | {"news": [1]}) == stamped  # written by a later release


def test_names_in_files_are_those_of_the_first_release() -> None:
    assert {"seconds": 0.5, "held_s": 0.1, "bytes": 1000}.items() <= to_json(
        Stamped(0.0, 0.0, "a", EXAMPLES["checkpoint"])
    ).items()
    assert to_json(Stamped(0.0, 0.0, "a", EXAMPLES["view"]))["left"] == [{"peer": "c", "reason": "left"}]


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (VersionClosed, {"version": "3", "tokens": 1}),
        (VersionClosed, {"version": True, "tokens": 1}),
        (VersionClosed, {"version": 3, "tokens": 1.5}),
        (VersionClosed, {"version": 3, "tokens": 1, "members": ["a"]}),
        (VersionClosed, {"version": 3, "tokens": 1, "members": (1,)}),
        (VersionClosed, {"version": 3, "tokens": 1, "blocks": ((1,),)}),
        (VersionClosed, {"version": 3, "tokens": 1, "seconds": {"inner": None}}),
        (ViewChanged, {"left": ("a",)}),
        (TrainingProgress, {"loss": "2.0"}),
    ],
)
def test_a_field_of_another_type_is_refused(kind: type[Event], wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        kind(**wrong)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_float_that_is_not_finite_is_unknown(value: float) -> None:
    assert TrainingProgress(loss=value) == TrainingProgress(loss=None)


@pytest.mark.parametrize(
    "damage",
    [
        {"kind": "nothing"}, {"kind": 3}, {"kind": []}, {"t": "1"}, {"time": 1e40}, {"peer": None}, {"version": None},
        {"version": 2**60}, {"tokens": "1"}, {"members": "a"}, {"members": [1]}, {"seconds": [1.0]}, {"loss": 1e31},
        {"blocks": [[1]]}, {"seconds": {"inner": "1"}},
    ],
)  # fmt: skip
def test_a_damaged_line_is_no_event(damage: dict[str, Any]) -> None:
    line = to_json(Stamped(0.0, 0.0, "a", EXAMPLES["version"]))
    assert from_json(line) is not None
    assert from_json(line | damage) is None


def test_what_may_be_missing_is_missing() -> None:
    stamp = {"t": 0, "time": 0, "peer": "a"}
    assert from_json({**stamp, "kind": "end", "reason": "done"}) == Stamped(0, 0, "a", Ended("done"))
    assert from_json({**stamp, "kind": "version", "version": 1}) is None


def test_timed_adds_up_also_when_the_body_raises() -> None:
    seconds = {"inner": 100.0}
    with timed(seconds, "inner"), timed(seconds, "merge"):
        pass
    assert 100.0 < seconds["inner"] < 101.0
    with pytest.raises(ZeroDivisionError), timed(seconds, "outer"):
        _ = 1 / 0
    assert seconds["outer"] >= 0.0
