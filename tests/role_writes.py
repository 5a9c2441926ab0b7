"""A reader of the protocol's source: the places where a role writes to another, or keeps a part of one."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from enum import IntEnum

CONTAINERS = {
    "add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "insert", "intersection_update",
    "move_to_end", "pop", "popitem", "popleft", "remove", "reverse", "setdefault", "sort",
    "symmetric_difference_update", "update", "__delitem__", "__setattr__", "__setitem__",
}  # fmt: skip
"""Methods that change a container."""
COPIES = {"copy", "items", "keys", "values", "difference", "intersection", "union"}
"""Methods of a container that answer with a container of their own."""
WRAPPERS = {
    "dict",
    "enumerate",
    "filter",
    "frozenset",
    "iter",
    "list",
    "map",
    "reversed",
    "set",
    "sorted",
    "tuple",
    "zip",
}
PICKS = {"cast", "getattr", "max", "min", "next", "vars"}
SETTERS = {"delattr", "heapify", "heappop", "heappush", "setattr", "shuffle"}
"""Functions that change their first argument."""


class Reach(IntEnum):
    """Ways in which an expression of a role leads to other roles."""

    OWN = 0
    HOLDS = 1
    """A container of its own, or an answer to a query, whose elements are a part of another role."""
    ROLE = 2
    """Another role: it may be asked, and go on by a call."""
    PART = 3
    """A part of another role: it may be read."""


def inside(reach: Reach) -> Reach:
    """An attribute or an element of something that reaches so."""
    return Reach.PART if reach else Reach.OWN


def names_in(target: ast.AST) -> Iterator[ast.Name]:
    """The names that a target binds."""
    return (node for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))


def parameters(function: ast.FunctionDef | ast.Lambda) -> list[str]:
    """Names of a function's parameters, in order."""
    arguments = function.args
    rest = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    return [item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *rest)]


class Reader:
    """The local names of one function of a role, with how each leads to other roles."""

    def __init__(self, function: ast.AST, roles: set[str], given: Mapping[str, Reach]) -> None:
        """`roles`: attributes of `self` that are other roles. `given`: what parameters, and `self`, lead to."""
        self.function, self.roles, self.local = function, roles, dict(given)
        for node in ast.walk(function):
            if node is not function and isinstance(node, ast.FunctionDef | ast.Lambda):
                outer = max(given.values(), default=Reach.OWN)
                self.local |= dict.fromkeys(parameters(node), Reach.PART if outer or roles else Reach.OWN)
        before: dict[str, Reach] | None = None
        while before != self.local:  # a name may be bound below its use, in a loop
            before = dict(self.local)
            for target, reach in self.bindings():
                for name in names_in(target):
                    deeper = reach if target is name else inside(reach)
                    self.local[name.id] = max(self.local.get(name.id, Reach.OWN), deeper)

    def of(self, node: ast.AST | None) -> Reach:
        """The way in which an expression leads to other roles."""
        match node:
            case ast.Attribute(attr="now"):
                return Reach.OWN  # the time of a step is a number
            case ast.Name():
                return self.local.get(node.id, Reach.OWN)
            case ast.Attribute(ast.Name("self"), name) if name in self.roles:
                return Reach.ROLE
            case ast.Attribute() | ast.Subscript():
                return inside(self.of(node.value))
            case ast.Starred() | ast.NamedExpr() | ast.Await():
                return self.of(node.value)
            case ast.IfExp():
                return max(self.of(node.body), self.of(node.orelse))
            case ast.BoolOp():
                return max(self.of(value) for value in node.values)
            case ast.BinOp():
                return Reach.HOLDS if self.of(node.left) or self.of(node.right) else Reach.OWN
            case ast.Tuple() | ast.List() | ast.Set():
                return self.held(*node.elts)
            case ast.Dict():
                return self.held(*node.keys, *node.values)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                return self.held(node.elt)
            case ast.DictComp():
                return self.held(node.key, node.value)
            case ast.Call():
                return self._answer(node)
        return Reach.OWN

    def held(self, *nodes: ast.AST | None) -> Reach:
        """A container of these elements."""
        return Reach.HOLDS if any(self.of(node) for node in nodes) else Reach.OWN

    def _answer(self, call: ast.Call) -> Reach:
        if isinstance(call.func, ast.Attribute):
            asked = self.of(call.func.value)
            # A query of a role answers with a list of its own; one of a part may answer with what is in it.
            own = asked is Reach.ROLE or (asked and call.func.attr in COPIES)
            return Reach.HOLDS if own else inside(asked)
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        if name in WRAPPERS:
            return self.held(*arguments)
        if name in PICKS:
            return inside(self.held(*arguments))
        return inside(self.of(call.func))

    def bindings(self) -> Iterator[tuple[ast.AST, Reach]]:
        """Every target of an assignment, a loop, a `with` or a pattern, and how its value leads to other roles."""
        for target, value, elements in bound(self.function):
            reach = self.of(value)
            yield target, inside(reach) if elements else reach


def bound(function: ast.AST) -> Iterator[tuple[ast.AST, ast.AST, bool]]:
    """Every target in a function with its value; whether the target gets an element of it."""
    for node in ast.walk(function):
        match node:
            case ast.For() | ast.comprehension():
                yield node.target, node.iter, True
            case ast.NamedExpr() | ast.AnnAssign() | ast.AugAssign() if node.value is not None:
                yield node.target, node.value, False
            case ast.withitem() if node.optional_vars is not None:
                yield node.optional_vars, node.context_expr, False
            case ast.Match():
                for pattern in (inner for case in node.cases for inner in ast.walk(case.pattern)):
                    name = getattr(pattern, "name", None) or getattr(pattern, "rest", None)
                    if name is not None:
                        yield ast.Name(name, ast.Store()), node.subject, True
            case ast.Assign():
                for target in node.targets:
                    yield from _paired(target, node.value)


def _paired(target: ast.AST, value: ast.AST) -> Iterator[tuple[ast.AST, ast.AST, bool]]:
    """The targets of an assignment, each with its own value where that is written out."""
    if (
        isinstance(target, ast.Tuple | ast.List)
        and isinstance(value, ast.Tuple | ast.List)
        and not any(isinstance(item, ast.Starred) for item in (*target.elts, *value.elts))
    ):
        for one, its in zip(target.elts, value.elts, strict=True):
            yield from _paired(one, its)
        return
    yield target, value, False


def written(function: ast.AST) -> Iterator[ast.Attribute | ast.Subscript]:
    """Everything that a function assigns to or deletes."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node


def changes(reader: Reader, mutators: set[str], begins: bool = False) -> Iterator[str]:
    """Every place where a function changes another role or a part of it. One that `begins` a role gives it others."""
    for target in written(reader.function):
        held = reader.of(target.value)
        fresh = held is Reach.HOLDS and isinstance(target, ast.Subscript)
        if (held and not fresh) or (reader.of(target) is Reach.ROLE and not begins):
            yield f"writes {ast.unparse(target)}"
    calls = [node for node in ast.walk(reader.function) if isinstance(node, ast.Call)]
    methods = [value for _, value, _ in bound(reader.function)]  # a name for a method may be called later
    for call in calls:
        called = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        if called in SETTERS and call.args and reader.of(call.args[0]) >= Reach.ROLE:
            yield f"calls {ast.unparse(call.func)}"
        methods += [call.func, *call.args, *(keyword.value for keyword in call.keywords)]
    for method in methods:
        if isinstance(method, ast.Attribute) and method.attr in mutators:
            held = reader.of(method.value)
            if held is Reach.PART or (held is Reach.HOLDS and method.attr not in CONTAINERS):
                yield f"calls {ast.unparse(method)}"
    for node in ast.walk(reader.function):
        if (
            isinstance(node, ast.AugAssign)
            and reader.of(node.target) is Reach.PART
            and isinstance(node.target, ast.Name)
        ):
            yield f"writes {ast.unparse(node.target)}"  # which changes a list, a set or a dict


def keeps(reader: Reader) -> Iterator[str]:
    """Every place where a function puts another role, or a part of one, into an attribute of its own."""
    for target, value, _ in bound(reader.function):
        if isinstance(target, ast.Attribute | ast.Subscript) and not reader.of(target) and _kept(reader, value):
            yield f"keeps {ast.unparse(value)}"
    for call in (node for node in ast.walk(reader.function) if isinstance(node, ast.Call)):
        holder = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr in CONTAINERS else None
        if holder is not None and _of_self(holder) and not reader.of(holder):
            yield from (f"keeps {ast.unparse(value)}" for value in call.args if _kept(reader, value))


def _of_self(node: ast.AST) -> bool:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "self"


def _kept(reader: Reader, value: ast.AST) -> bool:
    """Whether a value is another role, a part of one, or a container that was made of such."""
    match value:
        case ast.Attribute() | ast.Name() | ast.Subscript():
            return reader.of(value) >= Reach.ROLE
        case ast.IfExp():
            return _kept(reader, value.body) or _kept(reader, value.orelse)
        case ast.BoolOp():
            return any(_kept(reader, item) for item in value.values)
        case ast.Tuple() | ast.List() | ast.Set():
            return any(_kept(reader, item) for item in value.elts)
        case ast.Dict():
            return any(_kept(reader, item) for item in value.values)
        case ast.NamedExpr():
            return _kept(reader, value.value)
    return False


def changing_methods(source: str) -> set[str]:
    """Methods that change the object they are of, or a part of it, themselves or by another method of it."""
    found: set[str] = set()
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    functions = [function for function in functions if not function.name.startswith("__")]
    before = -1
    while before != len(found):
        before = len(found)
        for function in functions:
            reader = Reader(function, set(), {"self": Reach.PART})
            if any(changes(reader, CONTAINERS | found)):
                found.add(function.name)
    return found


def others(role: ast.ClassDef) -> set[str]:
    """Other roles that a role asks."""
    return {
        node.target.id for node in role.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


class _Role:
    """The functions of one role, and of the module beside it, and what they pass to each other."""

    def __init__(self, role: ast.ClassDef, module: ast.Module, held: set[str]) -> None:
        self.name, self._roles = role.name, others(role) | held
        functions = [node for node in (*module.body, *role.body) if isinstance(node, ast.FunctionDef)]
        self.functions = {function.name: function for function in functions}
        self._passed: dict[str, Reach] = {}
        before: dict[str, Reach] | None = None
        while before != self._passed:
            before = dict(self._passed)
            for function in functions:
                self._pass_on(self.reader(function, Reach.PART))

    def reader(self, function: ast.FunctionDef, foreign: Reach) -> Reader:
        """Reads a function. What a public one is given is `foreign`; what a private one is given, its callers say."""
        names = [name for name in parameters(function) if name != "self"]
        public = not function.name.startswith("_") or function.name == "__init__"
        given = {name: foreign if public else self._passed.get(f"{function.name}.{name}", Reach.OWN) for name in names}
        return Reader(function, self._roles, given)

    def _pass_on(self, reader: Reader) -> None:
        """Note what one function passes to private ones. A function that is a value may be given anything."""
        nodes = [*ast.walk(reader.function)]
        called = [node.func for node in nodes if isinstance(node, ast.Call)]
        for node in nodes:
            name = _private(node.func if isinstance(node, ast.Call) else node)
            if name not in self.functions or node in called:
                continue
            wanted = [item for item in parameters(self.functions[name]) if item != "self"]
            if isinstance(node, ast.Call):
                given = [*zip(wanted, node.args, strict=False), *((word.arg, word.value) for word in node.keywords)]
                found = [(parameter, reader.of(value)) for parameter, value in given]
            else:
                found = [(parameter, Reach.PART) for parameter in wanted]
            for parameter, reach in found:
                key = f"{name}.{parameter}"
                self._passed[key] = max(self._passed.get(key, Reach.OWN), reach)


def _private(node: ast.AST) -> str:
    """Name of a private function, of the role or beside it; empty: it is none."""
    match node:
        case ast.Attribute(ast.Name("self"), name) | ast.Name(name):
            return name if name.startswith("_") else ""
    return ""


def violations(source: str, mutators: set[str], held: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
    """Places where a role writes to another, or to a part of it, or keeps one: `held` are others that it was given."""
    module, found = ast.parse(source), []
    for definition in (node for node in module.body if isinstance(node, ast.ClassDef)):
        role = _Role(definition, module, held)
        for function in role.functions.values():
            begins = function.name == "__init__"
            places = [*changes(role.reader(function, Reach.PART), mutators, begins)]
            places += keeps(role.reader(function, Reach.OWN))  # messages are values: who gets one may keep it
            found += [f"{role.name}.{function.name} {place}" for place in places]
    return found
