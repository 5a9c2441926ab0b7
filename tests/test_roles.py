"""The roles of the protocol's state machine: each owns its state, and nobody else writes to it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import diloco.protocol

FOLDER = Path(diloco.protocol.__file__).parent
ROLES = ("acceptor", "chain", "contributor", "coordinator", "lineage", "membership")
PARTS = ("reduction", "roster", "view")
"""Files with what a role holds: tallies, reductions, the roster, the electorate."""
GIVEN = {"_rules", "_timing", "_post"}
MOST_ATTRIBUTES = 12
CONTAINERS = {
    "add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "insert", "intersection_update",
    "pop", "popitem", "popleft", "remove", "reverse", "setdefault", "sort", "update",
}  # fmt: skip


def root(node: ast.AST) -> tuple[list[str], str]:
    """Names of an attribute chain, and of what it begins with: `a.b[0].c` is ["b", "c"] and "a"."""
    names: list[str] = []
    while True:
        if isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        elif isinstance(node, ast.Subscript | ast.Starred):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return names, node.id if isinstance(node, ast.Name) else ""


def written(function: ast.AST) -> Iterator[ast.AST]:
    """Everything that a function assigns to or deletes."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node


def changing_methods(source: str) -> set[str]:
    """Methods that change the object they are of."""
    found = set()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or function.name.startswith("__"):
            continue
        assigns = any(root(node)[1] == "self" for node in written(function))
        calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
        changes = any(root(call)[1] == "self" and (root(call)[0] or [""])[-1] in CONTAINERS for call in calls)
        if assigns or changes:
            found.add(function.name)
    return found


MUTATORS = CONTAINERS.union(*(changing_methods((FOLDER / f"{name}.py").read_text()) for name in PARTS))


def own_attributes(role: ast.ClassDef) -> set[str]:
    """Attributes that the methods of a role assign, without what it was given."""
    attributes = [root(node) for node in written(role)]
    return {names[0] for names, start in attributes if start == "self" and len(names) == 1} - GIVEN


def others(role: ast.ClassDef) -> set[str]:
    """Other roles that a role asks."""
    return {
        node.target.id for node in role.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def depth(node: ast.AST, asked: set[str], local: Mapping[str, int]) -> int:
    """How many attributes deep in other roles something is: 1 is a role, 2 a part of it; 0: it is in none."""
    names, start = root(node)
    if start == "self":
        return len(names) if names and names[0] in asked else 0
    return local[start] + len(names) if start in local else 0


def bindings(function: ast.AST) -> Iterator[tuple[ast.AST, ast.AST, int]]:
    """Every target of an assignment or a loop, with the value, and how many parts deeper than it the target is."""
    for node in ast.walk(function):
        if isinstance(node, ast.For | ast.comprehension):
            yield node.target, node.iter, 1
        elif isinstance(node, ast.NamedExpr | ast.AnnAssign) and node.value is not None:
            yield node.target, node.value, 0
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from ((name, value, 0) for name, value in zip(target.elts, node.value.elts, strict=False))
                else:
                    yield target, node.value, 0


def aliases(function: ast.AST, asked: set[str]) -> dict[str, int]:
    """Local names of other roles, and of their parts, with the depth of each."""
    found: dict[str, int] = {}
    for target, value, deeper in bindings(function):
        deep = depth(value, asked, found)
        # A query of a role answers with a list of its own; one of a part may answer with what is in it.
        if isinstance(target, ast.Name) and deep and (deep > 2 or not isinstance(value, ast.Call)):
            found[target.id] = deep + deeper
    return found


def violations(source: str, held: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
    """Places where a role writes to another, or to a part of it, or keeps one: `held` are others that it was given."""
    found = []
    for role in (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
        asked = others(role) | held
        for function in (node for node in role.body if isinstance(node, ast.FunctionDef)):
            local, where = aliases(function, asked), f"{role.name}.{function.name}"
            begins = function.name == "__init__"
            writes = [node for node in written(function) if depth(node, asked, local) > begins]
            found += [f"{where} writes {ast.unparse(node)}" for node in writes]
            for target, value, _ in bindings(function):
                named = isinstance(value, ast.Attribute | ast.Name) and depth(value, asked, local)
                kept = named and ast.unparse(value).rpartition(".")[2] != "now"  # the time of a step is a number
                if kept and root(target)[1] == "self" and not depth(target, asked, local):
                    found.append(f"{where} keeps {ast.unparse(value)}")
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                sets = isinstance(call.func, ast.Name) and call.func.id in {"setattr", "delattr"}
                changes = isinstance(call.func, ast.Attribute) and call.func.attr in MUTATORS
                if (changes and depth(call.func, asked, local) > 2) or (sets and depth(call.args[0], asked, local)):
                    found.append(f"{where} calls {ast.unparse(call.func)}")
    return found


def roles() -> Iterator[tuple[str, ast.ClassDef]]:
    """Every role, with the source of its file."""
    for name in ROLES:
        source = (FOLDER / f"{name}.py").read_text()
        yield source, next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))


def test_no_role_writes_to_another_or_to_a_part_of_it() -> None:
    assert [place for source, _ in roles() for place in violations(source, GIVEN)] == []
    assert violations((FOLDER / "post.py").read_text(), {"_rules"}) == []


def test_the_router_writes_to_no_role() -> None:
    held = {f"_{name}" for name in ROLES}
    source = (FOLDER / "machine.py").read_text()
    assert all(f"self.{name} = " in source for name in held)
    assert violations(source, held) == []


def test_a_role_has_few_attributes_of_its_own_and_never_the_machine() -> None:
    for source, role in roles():
        assert len(own_attributes(role)) <= MOST_ATTRIBUTES, (role.name, own_attributes(role))
        assert "machine" not in source.lower().replace("state machine", ""), role.name


def test_what_changes_a_part_of_a_role_is_known() -> None:
    known = {
        "heard",
        "introduce",
        "offended",
        "part_with",
        "bequeath",
        "stand",
        "evict",
        "died",
        "hear",
        "repair",
        "replayed",
    }
    assert known <= MUTATORS
    assert MUTATORS.isdisjoint({"alive", "at_the_door", "last_heard_s", "voters", "needed", "missing", "counted"})


@pytest.mark.parametrize(
    "line",
    [
        "self.chain.commit = None",
        "self.chain.view[0] = None",
        "del self.chain.commit",
        "self.chain.sync_s += 1.0",
        "chain = self.chain; chain.commit = None",
        "a, b = 1, self.chain; b.commit = None",
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
    ],
)
def test_such_a_line_would_be_found(line: str) -> None:
    body = "\n".join(f"        {part}" for part in line.split("; "))
    assert len(violations(f"class Role:\n    chain: object\n\n    def act(self):\n{body}\n", GIVEN)) == 1


def test_a_role_may_ask_another_and_have_it_go_on() -> None:
    body = "        self.chain.adopt(1)\n        chain = self.chain\n        chain.adopt(chain.roster.alive(2))\n"
    body += "        names = chain.names()\n        names.append('x')\n        self._post.send(names)\n"
    assert not violations(f"class Role:\n    chain: object\n\n    def act(self):\n{body}\n", GIVEN)
