"""scripts/mutants: the list fits the code, mechanical mutants change what they say, and a bug is found or is not."""

from __future__ import annotations

import ast
import json
import signal
import subprocess
import sys
import time
from argparse import ArgumentTypeError
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from textwrap import indent

import pytest

from diloco.base.types import Member
from diloco.simulate.virtual.search import run_seeds
from scripts.mutation.catalogue import (
    PACKAGE,
    RULES,
    CatalogueError,
    Mutant,
    doubled,
    fault_of,
    read_catalogue,
    unknown_survivors,
)
from scripts.mutation.drawn import KINDS, all_mutants, mutants_of, sample
from scripts.mutation.main import Budget, Row
from scripts.mutation.probe import alike
from scripts.mutation.reach import Looks, changed_seeds, look_at
from scripts.mutation.trial import VIRTUAL, Simulation, Template, Verdict
from tests.peers import until

SCRIPT = (sys.executable, str(Path(__file__).parent.parent / "scripts" / "mutants"))
DEADLINE_S = 120.0
LEAST_MUTANTS, LEAST_FOR_A_RULE = 100, 2
QUICK = (
    "coordinator-among-the-living",
    "asked-counts-as-voted",
    "accepted-in-the-first",
    "one-vote-decides",
    "vote-of-the-version-before",
    "vote-while-the-mean-comes",
    "coordinator-votes-first",
    "evict-without-effect",
    "lives-not-asked",
    "founded-one-short",
    "forks-under-wait",
    "lease-given-twice",
    "copied-over-the-state-in-use",
)
"""One for most rules of agreement, one for exactly once, one for copies: found within a few seeds."""
UNCHANGING = ("lease-of-the-version-before", "torn-tail-stays")
"""Change few seeds."""
MEMBER = Member("p0", 1, "127.0.0.1:1")

CODE = '''"""Counts."""

import logging

logger = logging.getLogger(__name__)
LIMIT = 1


class Counter:
    """A docstring with 1 < 2."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, number: int, names: dict[str, int]) -> str:
        """Another one: 1 == 1."""
        assert number < 9
        if number <= 0 and "é" not in names:
            logger.info("%d", number + 1)
            return f"{number < 2}"
        if number < 0:
            raise ValueError(1)
        self.total += number
        names["last"] = names["first"] if (number) is not None else self.steps[0]
        return str([name for name in names if names[name] > number])
'''
CHANGES = {
    ("guard", "number <= 0", "True"),
    ("guard", '"é" not in names', "True"),
    ("guard", 'number <= 0 and "é" not in names', "False"),
    ("guard", "number < 0", "False"),
    ("guard", "names[name] > number", "True"),
    ("turn", "<=", ">"),
    ("turn", "not in", "in"),
    ("turn", "<", ">="),
    ("turn", "is not", "is"),
    ("turn", ">", "<="),
    ("edge", "<=", "<"),
    ("edge", "<", "<="),
    ("edge", ">", ">="),
    ("edge", "0", "1"),
    ("drop", "self.total += number", "pass"),
    ("drop", 'names["last"] = names["first"] if (number) is not None else self.steps[0]', "pass"),
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of one file, with an empty list of mutants beside it."""
    folder = tmp_path / "pack" / "accounts"
    folder.mkdir(parents=True)
    (folder / "counter.py").write_text(CODE)
    (folder / "mutants.toml").write_text("")
    return folder.parent


def entry(**changes: str) -> str:
    wanted = {"name": "a", "file": "counter.py", "rule": "ledger", "why": "It counts down."}
    fields = {**wanted, "old": "self.total += number", "new": "self.total -= number", **changes}
    return "[[mutant]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in fields.items())


# ---------------------------------------------------------------- the list


def test_every_mutant_fits_the_code() -> None:
    """Each `old` occurs once, and each mutated file compiles: whoever edits such code edits its mutant."""
    times = Counter(mutant.rule for mutant in read_catalogue().mutants)
    assert times.total() >= LEAST_MUTANTS
    assert {rule: times[rule] for rule in RULES if times[rule] < LEAST_FOR_A_RULE} == {}


def test_every_mutated_file_has_the_names_that_it_uses(tmp_path: Path) -> None:
    for mutant in read_catalogue().mutants:
        text = mutant.applied_to((PACKAGE.parent / mutant.file).read_text())
        (tmp_path / f"{mutant.name}.py").write_text(text)
    check = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "E9,F821,F823", tmp_path]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_every_explanation_has_its_mutant() -> None:
    """A drawn mutant's name goes with the code that it changes: so does the need to explain it."""
    assert list(unknown_survivors(read_catalogue(), all_mutants())) == []


def test_a_mutant_that_was_written_down_is_read(package: Path) -> None:
    (package / "accounts" / "mutants.toml").write_text(f'{entry()}\n[survivors]\na = "Nobody looks."\n')
    catalogue = read_catalogue(package)
    (mutant,) = catalogue.mutants
    line = CODE[: CODE.index("self.total +=")].count("\n") + 1
    assert (mutant.file, mutant.line) == ("pack/accounts/counter.py", line)
    assert mutant.applied_to(CODE) == CODE.replace("total += number", "total -= number")
    assert catalogue.survivors == {"a": "Nobody looks."}
    with pytest.raises(CatalogueError, match="edited since"):
        mutant.applied_to(f"\n{CODE}")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (entry(old="number"), "occurs 9 times"),
        (entry(old="nothing of it"), "occurs 0 times"),
        (entry(new="self.total -= "), "does not compile"),
        (entry(old='"""Counts."""', new="return"), "does not compile"),
        (entry(new="self.total += number  # plus"), "runs as `old` does"),
        (entry(rule="legder"), "nearest: ledger"),
        (entry(file="../accounts/counter.py"), "no file of this folder"),
        (entry(file="count.py"), "no file of this folder"),
        (entry(more="1"), "wanted are texts for name, file"),
        (entry(why=""), "wanted are texts for name, file"),
        (entry() + entry(), "two mutants are named a"),
        ("[mutants]", "unknown key mutants"),
        ("[[mutant", "mutants.toml: "),
    ],
)
def test_a_list_that_does_not_fit_is_an_error(package: Path, text: str, fault: str) -> None:
    (package / "accounts" / "mutants.toml").write_text(text)
    with pytest.raises(CatalogueError, match=fault):
        read_catalogue(package)


# ---------------------------------------------------------------- mechanical mutants


def test_mechanical_mutants_change_code_and_nothing_else(package: Path) -> None:
    mutants = mutants_of(package / "accounts" / "counter.py", package)
    assert {(mutant.rule, mutant.old, mutant.new) for mutant in mutants} == CHANGES
    assert all(mutant.name.startswith("accounts.counter.Counter.") for mutant in mutants)
    for mutant in mutants:
        mutated = mutant.applied_to(CODE)
        ast.parse(mutated)
        before, after = CODE.splitlines(), mutated.splitlines()
        assert [line for line, (one, other) in enumerate(zip(before, after, strict=True), 1) if one != other] == [
            mutant.line
        ]


def test_a_name_stays_when_other_code_is_edited(package: Path) -> None:
    file = package / "accounts" / "counter.py"
    before = {mutant.name for mutant in mutants_of(file, package)}
    file.write_text(CODE.replace("LIMIT = 1\n", "LIMIT = 2\n\n").replace("if number < 0:", "if number < 1:"))
    after = {mutant.name for mutant in mutants_of(file, package)}
    # Of the line that was edited: the guard, the comparison turned and off by one, and the number.
    assert len(before - after) == len(after - before) == 4


def test_a_seed_draws_the_same_sample_in_edited_code() -> None:
    mutants = all_mutants()
    assert len(mutants) > 2000
    assert {mutant.rule for mutant in mutants} == set(KINDS)
    assert doubled(mutant.name for mutant in mutants) == []
    drawn = sample(mutants, 40, seed=1)
    assert len(drawn) == 40
    assert sample(mutants, 40, seed=1) == drawn != sample(mutants, 40, seed=2)
    assert len({mutant.name for mutant in sample(mutants[::2], 40, 1)} & {mutant.name for mutant in drawn}) >= 10
    assert not [fault for mutant in drawn if (fault := fault_of((PACKAGE.parent / mutant.file).read_text(), mutant))]


# ---------------------------------------------------------------- the command


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SCRIPT, *arguments], capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def test_the_budget_is_in_seeds_and_seconds() -> None:
    assert Budget.parse("300") == Budget(300, 10.0**6)
    assert Budget.parse("60s") == Budget(10**6, 60.0)
    assert Budget.parse("300,1.5s") == Budget(300, 1.5)
    for text in ("", "0", "60 s", "s", "300,", "300s,60", "-1"):
        with pytest.raises(ArgumentTypeError, match="no budget"):
            Budget.parse(text)


def test_the_list_is_printed() -> None:
    done = run("--list")
    assert done.returncode == 0
    assert all(name in done.stdout for name in QUICK)
    drawn = run("--list", "--sample", "7").stdout.splitlines()
    assert len([line for line in drawn if not line.startswith(" ")]) == 7  # below some stands why they survive


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--only", "lease-given-twise"], "no mutant lease-given-twise; nearest: lease-given-twice"),
        (["--only", "zzz*"], "--list` has all names"),
        (["--budget", "much"], "'much' is no budget"),
        (["--sample", "0"], "'0' is no whole number above 0"),
        (["--json", "no/such/folder/file.json"], "cannot write no/such/folder/file.json: No such file"),
    ],
)
def test_a_wrong_option_is_an_error(arguments: list[str], error: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert error in done.stderr
    assert "Traceback" not in done.stderr


def test_what_must_be_explained() -> None:
    def open_rows(outcome: str, rule: str, explained: str) -> bool:
        return Row("n", "f", outcome == "found", 1, 1, 1.0, "", outcome, rule, 1, "w", explained).open

    assert open_rows("survived", "majority", "")
    assert open_rows("unreached", "turn", "")
    assert open_rows("hung", "drop", "")
    assert not open_rows("survived", "majority", "because")
    assert not open_rows("found", "majority", "")
    assert open_rows("broken", "majority", "because")  # no bug that anybody would write: write another
    assert not open_rows("broken", "drop", "")


@pytest.mark.slow(queued=False)
def test_mutants_are_found(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = run(*(word for name in QUICK for word in ("--only", name)), "--budget", "8", "--json", file)
    assert done.returncode == 0, done.stdout + done.stderr
    tree = json.loads(file.read_text())
    assert (tree["mutants"], tree["found"], tree["score"]) == (len(QUICK), len(QUICK), 1.0)
    assert {row["name"] for row in tree["rows"]} == set(QUICK)
    for row in tree["rows"]:
        assert row["found"]
        assert 1 <= row["seeds"] <= 8
        assert row["by"].startswith(f"seed {row['seeds'] - 1}: I")
        assert row["rule"] in RULES
        assert f"found     {row['name']}" in done.stdout


@pytest.mark.slow(queued=True)
@pytest.mark.timeout(600)
def test_a_sample_runs_and_the_lines_that_no_seed_runs_are_known(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    run("--sample", "5", "--seed", "1", "--budget", "4", "--json", file)
    tree = json.loads(file.read_text())
    assert len(tree["rows"]) == tree["mutants"] == 5
    assert tree["unreached"] > 0
    assert tree["unreached"] < 5


@pytest.mark.slow(queued=True)
def test_an_interruption_loses_no_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = [*SCRIPT, "--jobs", "1", "--only", QUICK[0], "--only", "committed-not-booked", "--budget", "6"]
    command += ["--json", str(file)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    deadline_s = time.monotonic() + DEADLINE_S
    while not (file.exists() and json.loads(file.read_text())["rows"]):
        assert time.monotonic() < deadline_s
        assert child.poll() is None
        time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    output, _ = child.communicate(timeout=DEADLINE_S)
    tree = json.loads(file.read_text())
    assert child.returncode == 130
    assert tree["interrupted"]
    assert [row["name"] for row in tree["rows"]] == [QUICK[0]]
    assert "interrupted after 1 of 2 mutants: 1 found" in output


# ---------------------------------------------------------------- ends of a search


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Template]:
    with closing(Template(tmp_path_factory.mktemp("template"))) as made:
        yield made


def search_for(template: Template, old: str, new: str) -> Simulation:
    """A search with three seeds for a change of `diloco/protocol/vote.py`."""
    file = "diloco/protocol/vote.py"
    text = (template.unchanged / file).read_text()
    assert text.count(old) == 1
    copy = template.copy_with(Mutant("change", file, "majority", "", 1, text.index(old), old, new))
    return Simulation(template.warm, copy, range(3), DEADLINE_S)


def verdict_of(simulation: Simulation) -> Verdict:
    until(lambda: simulation.ended, "the search ends")
    return simulation.verdict()


FIRST_LINE = "    first = voters.index(drafter) if"
"""Its function is `seat`, which every seed calls."""


@pytest.mark.slow(queued=False)
def test_a_crash_in_the_first_seed_does_not_count(template: Template) -> None:
    verdict = verdict_of(search_for(template, FIRST_LINE, f"    1 / 0\n{FIRST_LINE}"))
    assert (verdict.outcome, verdict.seeds) == ("broken", 1)
    assert "ZeroDivisionError" in verdict.by


@pytest.mark.slow(queued=False)
def test_a_package_that_cannot_be_imported_is_broken(template: Template) -> None:
    verdict = verdict_of(search_for(template, "from typing import TypeVar\n", "from typings import TypeVar\n"))
    assert (verdict.outcome, verdict.seeds) == ("broken", 0)
    assert "typings" in verdict.by


@pytest.mark.slow(queued=False)
def test_a_seed_that_does_not_end_is_named(template: Template, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.mutation.trial.HUNG_S", 0.5)
    hung = tmp_path / "hung"
    hangs = f"    open({str(hung)!r}, 'w').close()\n    while True:\n        __import__('time').sleep(0.1)\n"
    simulation = search_for(template, FIRST_LINE, f"{hangs}{FIRST_LINE}")
    until(hung.exists, "its first seed hangs")
    simulation._seconds = time.monotonic() - simulation._began_s + 1.0
    verdict = verdict_of(simulation)
    assert (verdict.outcome, verdict.seeds) == ("hung", 0)
    assert "seed 0 did not end" in verdict.by


@pytest.mark.slow(queued=False)
def test_code_that_is_as_before_survives(template: Template) -> None:
    verdict = verdict_of(search_for(template, FIRST_LINE, f"    pass\n{FIRST_LINE}"))
    assert (verdict.outcome, verdict.seeds) == ("survived", 3)


# ---------------------------------------------------------------- which seeds a mutant changes


def places(*bodies: str) -> Looks:
    """Where the second body of a function differs from the first."""
    before, after = (ast.parse(f"def f(x, y):\n{indent(body, '    ')}\n") for body in bodies)
    looks = Looks()
    look_at(before, after, "name", looks)
    return looks


@pytest.mark.parametrize(
    ("before", "after", "expression"),
    [
        ("return x < y", "return x <= y", "x <= y"),
        ("if x and y:\n    return 1", "if x:\n    return 1", "x"),
        ("z = [n for n in x if n > y]", "z = [n for n in x if n > 1]", "1"),
        ("z = max(x)", "z = min(x)", "min(x)"),
        ("x.send(y + 1)", "x.send(y)", "y"),
        ("x.y = 1\nreturn y", "return y", ""),
        ("return y", "x.y = 1\nreturn y", ""),
        ("z = x", "z = x.pop()", ""),
        ("if x:\n    z = 1\nreturn y", "if x:\n    z = 1\n    y = 2\nreturn y", ""),
    ],
)
def test_an_expression_is_looked_at_where_that_changes_nothing_and_else_a_statement(
    before: str, after: str, expression: str
) -> None:
    looks = places(before, after)
    mutated = [ast.unparse(other) for looked in looks.expressions.values() for _, other in looked]
    assert mutated == ([expression] if expression else [])
    assert bool(looks.before or looks.after) == (not expression)


def test_values_are_alike_where_nothing_goes_on_otherwise() -> None:
    for one in (None, True, 1, 0.5, "a", b"a", (1, ("a", MEMBER)), MEMBER, frozenset({1})):
        assert alike(one, one)
    assert alike((1, MEMBER), (1, replace(MEMBER)))
    for one, other in (([1], [1]), (1, 1.0), (0.0, -0.0), ((1,), (2,)), (1, True), ("a", None)):
        assert not alike(one, other)
    assert alike([1], [1], fresh=True)
    assert alike(deque([1]), deque([1]), fresh=True)


@pytest.mark.slow(queued=False)
def test_seeds_that_a_mutant_does_not_change_run_as_without_it(template: Template) -> None:
    chosen = [mutant for mutant in read_catalogue().mutants if mutant.name in UNCHANGING]
    assert {mutant.name for mutant in chosen} == {*UNCHANGING}
    seeds, changed = changed_seeds(template, read_catalogue().mutants, range(2), DEADLINE_S, jobs=2)
    assert seeds == range(2)
    assert any(len(changed[mutant.name]) < len(seeds) for mutant in chosen)
    events = {seed: run_seeds([seed]).events for seed in seeds}
    for mutant in chosen:
        same = [seed for seed in seeds if seed not in changed[mutant.name]]
        if not same:
            continue
        copy = template.copy_with(mutant)
        output, errors = copy.parent / "output.json", copy.parent / "errors.txt"
        program = template.warm.start(copy, [*VIRTUAL, ",".join(map(str, same))], output, errors)
        assert program.wait(DEADLINE_S)
        report = json.loads(output.read_text())
        assert report["violations"] == 0
        assert report["events"] == sum(events[seed] for seed in same)
