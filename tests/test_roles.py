"""The roles of the protocol's state machine: each owns its state, and nobody else writes to it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import diloco.protocol
from tests.role_writes import CONTAINERS, changing_methods, violations, written

FOLDER = Path(diloco.protocol.__file__).parent
ROLES = ("acceptor", "chain", "contributor", "coordinator", "drafter", "lineage", "membership")
FILES = {**{name: name for name in ROLES}, "drafter": "draft"}
PARTS = sorted({path.stem for path in FOLDER.glob("*.py")} - {*FILES.values(), "machine", "post"})
"""Files with what a role holds: tallies, reductions, the roster, the electorate."""
GIVEN = {"_rules", "_timing", "_post"}
MOST_ATTRIBUTES = 12
VALUES = [
    "Acceptor._bind keeps accepted",
    "Acceptor._bind keeps (self._number, then)",
    "Coordinator._propose keeps whole.key if whole is not None else (-1, -1)",
    "Membership.stand keeps chain.height",
]
"""Places that keep a commit, a number or a function: nobody can change these."""

MUTATORS = CONTAINERS.union(*(changing_methods((FOLDER / f"{name}.py").read_text()) for name in PARTS))


def own_attributes(role: ast.AST) -> set[str]:
    """Attributes that the methods of a role assign, without what it was given."""
    assigned = [node for node in written(role) if isinstance(node.value, ast.Name) and node.value.id == "self"]
    return {node.attr for node in assigned if isinstance(node, ast.Attribute)} - GIVEN


def roles() -> Iterator[tuple[str, ast.ClassDef]]:
    """Every role, with the source of its file."""
    for name in ROLES:
        source = (FOLDER / f"{FILES[name]}.py").read_text()
        yield source, next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))


def test_no_role_writes_to_another_or_to_a_part_of_it() -> None:
    assert [place for source, _ in roles() for place in violations(source, MUTATORS, GIVEN)] == VALUES
    assert violations((FOLDER / "post.py").read_text(), MUTATORS, {"_rules"}) == []


def test_the_router_writes_to_no_role() -> None:
    held = {f"_{name}" for name in ROLES}
    source = (FOLDER / "machine.py").read_text()
    assert all(f"self.{name} = " in source for name in held)
    assert violations(source, MUTATORS, held) == [
        "Machine._introduce calls setattr"
    ]  # which gives each role the others


def test_a_role_has_few_attributes_of_its_own_and_never_the_machine() -> None:
    for source, role in roles():
        assert len(own_attributes(role)) <= MOST_ATTRIBUTES, (role.name, own_attributes(role))
        assert "machine" not in source.lower().replace("state machine", ""), role.name


def test_a_part_of_a_role_has_few_attributes_of_its_own() -> None:
    sources = [ast.parse((FOLDER / f"{name}.py").read_text()) for name in PARTS]
    classes = [node for source in sources for node in source.body if isinstance(node, ast.ClassDef)]
    assert {"Reduction", "Roster", "Electorate"} <= {part.name for part in classes}
    assert {
        part.name: len(own_attributes(part)) for part in classes if len(own_attributes(part)) > MOST_ATTRIBUTES
    } == {}


def test_what_changes_a_part_of_a_role_is_known() -> None:
    known = {
        "heard",
        "introduce",
        "offended",
        "part_with",
        "stand",
        "evict",
        "died",
        "hear",
        "repair",
        "replayed",
    }
    assert known <= MUTATORS
    assert MUTATORS.isdisjoint({"alive", "at_the_door", "last_heard_s", "voters", "needed", "missing", "counted"})


def found(line: str, *more: str) -> list[str]:
    """Violations of a role whose method has that line; `;` begins another one, and `more` are other functions."""
    body = "\n".join(f"        {part}" for part in line.split("; "))
    methods = "".join(f"\n    {method}\n" for method in more)
    return violations(f"class Role:\n    chain: object\n\n    def act(self):\n{body}\n{methods}", MUTATORS, GIVEN)


@pytest.mark.parametrize(
    "line",
    [
        "self.chain.commit = None",
        "self.chain.view[0] = None",
        "del self.chain.commit",
        "self.chain.sync_s += 1.0",
        "self.chain = None",
        "chain = self.chain; chain.commit = None",
        "a, b = 1, self.chain; b.commit = None",
        "(a, (b, c)) = 1, (2, self.chain); c.commit = None",
        "self.chain.roster.heard(None, 0.0)",
        "chain = self.chain; chain.roster.heard(None, 0.0)",
        "roster = self.chain.roster; roster.heard(None, 0.0)",
        "self.chain.names.append('x')",
        "roster: object = self.chain.roster; roster.heard(None, 0.0)",
        "print(roster := self.chain.roster, roster.heard(None, 0.0))",
        "for entry in self.chain.roster: entry.left = True",
        "entry = self.chain.roster.get('x'); entry.left = True",
        "setattr(self.chain, 'commit', None)",
        "self.kept = self.chain.roster",
        "roster = self.chain.roster; self.kept = roster",
        "self._post.reason = ''",
        "self._post.effects.append(None)",
        # bound by `with`, by patterns, by loops over what holds others
        "with self.chain.roster as roster: roster.heard(None, 0.0)",
        "with self.chain.held() as entry: entry.left = True",
        "match self.chain.roster.get('x'):;     case object(entry=entry): entry.left = True",
        "for name, entry in self.chain.roster.entries.items(): entry.left = True",
        "for number, entry in enumerate(self.chain.entries()): entry.left = True",
        "for entry in sorted(self.chain.entries()): entry.names.append('x')",
        "for entry in [entry for entry in self.chain.entries() if entry.alive]: entry.left = True",
        "for role in (self.chain, self.other): role.commit = None",
        "first, *rest = self.chain.entries(); rest[0].left = True",
        "[entry.names.append('x') for entry in self.chain.entries()]",
        # aliases
        "chain = self.chain if self.on else None; chain.commit = None",
        "roster = self.on and self.chain.roster; roster.heard(None, 0.0)",
        "known = {'x': self.chain.roster}; known['x'].heard(None, 0.0)",
        "append = self.chain.names.append; append('x')",
        "names = self.chain.names; names += ['x']",
        "while True:;     entry.left = True;     entry = self.chain.roster.get('x')",
        "chain = getattr(self, 'x', self.chain); chain.names.append('x')",
        "vars(self.chain)['commit'] = None",
        "list(map(self.chain.names.append, 'xy'))",
        "list(map(lambda entry: entry.names.append('x'), self.chain.entries()))",
        "heappush(self.chain.waits, 1.0)",
        # containers in containers
        "self.chain.votes['x'].add('y')",
        "votes = self.chain.votes['x']; votes.add('y')",
        "self.chain.votes.get('x').discard('y')",
        "votes = self.chain.votes(); votes['x'].add('y')",
        "entries = list(self.chain.entries()); entries[0].left = True",
        "entry = self.chain.entry('x'); entry.left = True",
        "entry = max(self.chain.entries()); entry.left = True",
        "roster = self.chain.get_roster(); roster.heard(None, 0.0)",
        # kept
        "self.kept = [self.chain.roster]",
        "self.kept['x'] = self.chain.roster",
        "self.kept.append(self.chain.roster)",
        "self.kept = self.chain.roster if self.on else None",
        "self.kept = self.chain.votes['x']",
        "for entry in self.chain.entries(): self.kept = entry",
    ],
)
def test_such_a_line_would_be_found(line: str) -> None:
    assert len(set(found(line))) == 1


@pytest.mark.parametrize(
    ("line", "method"),
    [
        ("pass", "def hear(self, entry): entry.left = True"),
        ("pass", "def hear(self, names): names.append('x')"),
        ("pass", "def hear(self, *, votes): votes['x'].add('y')"),
        ("pass", "def hear(self, entries): entries[0].left = True"),
        ("self._leave(self.chain.roster.get('x'))", "def _leave(self, entry): entry.left = True"),
        ("self._leave(entry=self.chain.roster.get('x'))", "def _leave(self, entry): entry.left = True"),
        ("for entry in self.chain.entries(): self._leave(entry)", "def _leave(self, entry): entry.left = True"),
        ("list(map(self._leave, self.chain.entries()))", "def _leave(self, entry): entry.left = True"),
        ("self._keep(self.chain.roster)", "def _keep(self, roster): self.kept = roster"),
    ],
)
def test_a_write_through_a_parameter_would_be_found(line: str, method: str) -> None:
    assert len(found(line, method)) == 1


def test_a_write_through_a_function_beside_the_role_would_be_found() -> None:
    source = "def _leave(entry):\n    entry.left = True\n\n\nclass Role:\n    chain: object\n\n    def act(self):\n"
    assert len(violations(f"{source}        _leave(self.chain.roster.get('x'))\n", MUTATORS)) == 1
    assert not violations(f"{source}        _leave(self.entry)\n", MUTATORS)


@pytest.mark.parametrize(
    "line",
    [
        "self.chain.adopt(1); chain = self.chain; chain.adopt(chain.roster.alive(2))",
        "names = self.chain.names(); names.append('x'); self._post.send(names)",
        "names = [*self.chain.roster.names]; names.sort(); names[0] = 'x'",
        "names = dict(self.chain.roster.names); names['x'] = 1",
        "self._tally(); tally = self.tally; tally.votes['x'] = self._post.now",
        "for entry in self.entries: entry.left = True",
        "now, chain = self._post.now, self.chain; self.began_at = now",
        "self.count += self.chain.count()",
        "self.kept.append(self.chain.names())",
    ],
)
def test_a_role_may_ask_another_and_have_it_go_on(line: str) -> None:
    assert not found(line)


def test_a_role_may_write_to_its_own_through_a_private_function() -> None:
    assert not found(
        "self._leave(self.entries['x'], self.chain)", "def _leave(self, entry, chain): entry.left = chain.on()"
    )


def test_a_method_changes_its_object_also_through_another_method_or_an_alias() -> None:
    lines = ["entry = self.entries['x']", "entry.left = True"]
    source = (
        f"class Roster:\n    def left(self):\n        {'; '.join(lines)}\n\n    def gone(self):\n        self.left()\n"
    )
    source += "\n    def alive(self):\n        return [entry for entry in self.entries.values() if not entry.left]\n"
    assert changing_methods(source) == {"left", "gone"}
