"""What a test waits for, read from its syntax tree: sleeps, limits and bounds that a busy machine would fail.

Found are, in each file and in the scripts that stand in it as text:

- a sleep, unless it is of 0 s, a step of polling (the nearest loop is a `while` that ends: by a condition other than
  the clock, by `break` or `return`, or by an exception that is expected), of a drawn length (a random moment), or of a
  minute and more (no test waits so long: it stands for waiting until cancelled);
- a limit below 2 s: the argument of `fail_after`, `timeout`, `wait_for`, `settimeout` and the like, unless the test
  expects it to pass, and whatever is given by a name such as `heartbeat_timeout`: a keyword, a key of a dictionary, a
  default, a constant of seconds that is replaced;
- an elapsed time that is compared with an upper bound below 20 s.

Values are followed through constants of the module and of those that it imports. Virtual time is exempt: what is marked
`virtual_time` or handed to `aiote.testing.run`, and what is mentioned from there alone.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

SHORTEST_LIMIT_S = 2.0
SHORTEST_BOUND_S = 20.0
FOR_EVER_S = 60.0

SLEEPERS = {"time", "anyio", "asyncio", "trio"}
CLOCKS = {"monotonic", "perf_counter", "time", "monotonic_ns", "perf_counter_ns"}
DRAWS = {"uniform", "random", "choice", "expovariate", "randint", "betavariate"}
LIMITED = {"fail_after": 0, "move_on_after": 0, "timeout": 0, "wait_for": 1, "settimeout": 0, "join": 0}
NAMED = re.compile(r"(^|_)(timeout|limit|patience|grace|deadline)(_s)?$", re.I)
PATCHED = re.compile(r"_S$")  # a constant of seconds that a test replaces
NO_SECONDS = {"rate_limit", "memory_limit"}

Unit: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class FoundWait:
    """One place: its file, the outermost function, class or constant that it stands in, and what is there."""

    file: str
    where: str
    line: int
    what: str

    @property
    def key(self) -> str:
        return f"{self.file}::{self.where}"


@dataclass
class Source:
    """One file, or a script that stands in one as text, with what it defines and imports."""

    file: str
    tree: ast.Module
    inside: str = ""  # for a script: where in the file it stands
    line: int = 0
    nodes: list[ast.AST] = field(default_factory=list)
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    constants: dict[str, ast.expr] = field(default_factory=dict)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)
    drivers: set[str] = field(default_factory=set)
    defined: dict[ast.AST, dict[str, Unit]] = field(default_factory=dict)  # by function, or the module

    def __post_init__(self) -> None:
        self.nodes = list(ast.walk(self.tree))
        for node in self.nodes:
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
            if isinstance(node, Unit):
                scope = next(one for one in self.above(node) if isinstance(one, Unit | ast.Module))
                self.defined.setdefault(scope, {})[node.name] = node
            if isinstance(node, ast.ImportFrom):
                names = {alias.asname or alias.name: alias.name for alias in node.names}
                self.imported |= {here: (node.module or "", there) for here, there in names.items()}
                if node.module == "aiote.testing":
                    self.drivers |= {here for here, there in names.items() if there in ("run", "VirtualLoop")}
        for statement in self.tree.body:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.constants[name] = value
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    self.constants[name] = value

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield what a node stands in, from the inside."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def where(self, node: ast.AST) -> str:
        if self.inside:
            return self.inside
        outermost = [node, *self.above(node)][-2]
        match outermost:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                return name
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                return name
        return ""

    @property
    def marks(self) -> str:
        """The marks of all tests of the module."""
        return ast.unparse(self.constants["pytestmark"]) if "pytestmark" in self.constants else ""

    def annotates(self, name: ast.Name) -> bool:
        """Tell whether a name stands in an annotation, which runs nothing."""
        inner: ast.AST = name
        for node in self.above(name):
            if inner in (getattr(node, "annotation", None), getattr(node, "returns", None)):
                return True
            if isinstance(node, ast.stmt):
                return False
            inner = node
        return False

    def units_above(self, node: ast.AST) -> list[Unit]:
        return [one for one in self.above(node) if isinstance(one, Unit)]


def called(node: ast.AST) -> str:
    """Return the last name of what a call calls."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", None) or getattr(node.func, "id", "")


def texts(source: Source) -> Iterator[Source]:
    """Yield each text in a file that is Python and does something."""
    for node in source.nodes:
        match node:
            case ast.Constant(value=str() as text):
                if isinstance(source.parents[node], ast.JoinedStr):
                    continue
            case ast.JoinedStr(values=values):
                text = "".join(str(v.value) if isinstance(v, ast.Constant) else "_0_" for v in values)
            case _:
                continue
        if "(" in text and ("\n" in text or ";" in text):
            try:
                tree = ast.parse(textwrap.dedent(text))
            except (SyntaxError, ValueError):
                continue
            yield Source(source.file, tree, source.where(node) or "text", node.lineno - 1)


class Waits:
    """All files below some folders, which call and import one another."""

    def __init__(self, *folders: Path) -> None:
        self.sources = [
            Source(str(path.relative_to(folder)), ast.parse(path.read_text()))
            for folder in folders
            for path in sorted(folder.rglob("*.py"))
        ]
        # By the dotted names by which tests import helpers, and by the bare ones by which programs import one another.
        self.modules = {Path(source.file).stem: source for source in self.sources}
        self.modules |= {source.file.removesuffix(".py").replace("/", "."): source for source in self.sources}
        self.sources += [script for source in list(self.sources) for script in texts(source)]
        self.virtual = self._virtual()

    def found(self) -> list[FoundWait]:
        """Return all places that are not in virtual time."""
        return [
            FoundWait(source.file, source.where(node), source.line + node.lineno, what)
            for source in self.sources
            for node, what in self._places(source)
            if not self.virtual.intersection((node, *source.above(node)))
        ]

    def _places(self, source: Source) -> Iterator[tuple[ast.expr, str]]:
        for node in source.nodes:
            if isinstance(node, ast.Call) and sleeps(source, node) and self._waits_for_a_duration(source, node):
                yield node, ast.unparse(node)
            for value, name in limits(node):
                seconds = self.value(source, value)
                if seconds is not None and 0 < seconds < SHORTEST_LIMIT_S and not has_to_pass(source, value):
                    yield value, f"{name} of {ast.unparse(value)}"
            match node:
                case ast.Compare(
                    left=ast.BinOp(left=clock, op=ast.Sub()), ops=[ast.Lt() | ast.LtE()], comparators=[most]
                ):
                    bound = self.value(source, most)
                    if called(clock) in CLOCKS and bound is not None and bound < SHORTEST_BOUND_S:
                        yield node, ast.unparse(node)

    def _waits_for_a_duration(self, source: Source, call: ast.Call) -> bool:
        if any(called(node) in DRAWS for node in ast.walk(call)):
            return False
        seconds = self.value(source, call.args[0]) if call.args else None
        if seconds is not None and (seconds == 0 or seconds >= FOR_EVER_S):
            return False
        return not polls(source, call)

    def value(self, source: Source, node: ast.expr, depth: int = 8) -> float | None:
        """Return the number that an expression stands for, as far as constants tell."""
        if depth == 0:
            return None
        match node:
            case ast.Constant(value=int() | float() as number):
                return float(number)
            case ast.Name(id=name) if name in source.constants:
                return self.value(source, source.constants[name], depth - 1)
            case ast.Name(id=name) if name in source.imported:
                module, there = source.imported[name]
                owner = self.modules.get(module)
                if owner is not None and owner is not source and there in owner.constants:
                    return self.value(owner, owner.constants[there], depth - 1)
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=key)) if name in source.constants:
                table = source.constants[name]
                if isinstance(table, ast.Dict):
                    keys = [getattr(one, "value", None) for one in table.keys]
                    return self.value(source, table.values[keys.index(key)], depth - 1) if key in keys else None
            case ast.IfExp(body=body, orelse=orelse):
                both = [self.value(source, body, depth - 1), self.value(source, orelse, depth - 1)]
                return None if None in both else min(one for one in both if one is not None)
            case ast.BinOp(left=left, op=op, right=right):
                one, other = self.value(source, left, depth - 1), self.value(source, right, depth - 1)
                if one is not None and other is not None:
                    return arithmetic(op, one, other)
        return None

    def _virtual(self) -> set[ast.AST]:
        """Return the functions, classes and constants that are for virtual time alone."""
        marked: set[ast.AST] = {source.tree for source in self.sources if "virtual_time" in source.marks}
        handed: set[ast.AST] = set()
        users: dict[ast.AST, list[ast.Name]] = {}
        above: dict[ast.Name, list[Unit]] = {}
        for source in self.sources:
            handed |= handed_to_the_loop(source)
            for node in source.nodes:
                if isinstance(node, Unit) and any("virtual_time" in ast.unparse(mark) for mark in node.decorator_list):
                    marked.add(node)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and not source.annotates(node):
                    used = self._resolve(source, node) or source.constants.get(node.id)
                    if used is not None:
                        above[node] = source.units_above(node)
                        users.setdefault(used, []).append(node)
        while True:
            more = set()
            for used, names in users.items():
                others = [name for name in names if used not in above[name]]
                if others and all(name in handed or marked.intersection(above[name]) for name in others):
                    more.add(used)
            more -= marked
            if not more:
                return marked
            marked |= more

    def _resolve(self, source: Source, name: ast.Name) -> Unit | None:
        """Return the function or class that a name stands for, by scope and by import."""
        for scope in source.above(name):
            unit = None if isinstance(scope, ast.ClassDef) else source.defined.get(scope, {}).get(name.id)
            if unit is not None:
                return unit
        module, there = source.imported.get(name.id, ("", ""))
        owner = self.modules.get(module)
        return owner.defined.get(owner.tree, {}).get(there) if owner else None


def sleeps(source: Source, call: ast.Call) -> bool:
    match call.func:
        case ast.Attribute(value=ast.Name(id=module), attr="sleep"):
            return module in SLEEPERS
        case ast.Name(id=name):
            return name == "quiet" or (source.imported.get(name, ("", ""))[0] in SLEEPERS and name == "sleep")
    return False


def has_to_pass(source: Source, value: ast.expr) -> bool:
    """Tell whether a limit is one that the test wants to be over: then a slow machine only makes it more so."""
    call = source.parents[value]
    statement = next((one for one in source.above(value) if isinstance(one, ast.With | ast.AsyncWith)), None)
    if statement is None or called(call) not in LIMITED:
        return False
    for one in (statement, *source.above(statement)):
        if raises(one, "TimeoutError"):
            return True
        if isinstance(one, Unit):
            scopes = [ast.unparse(item.optional_vars) for item in statement.items if item.optional_vars]
            checked = [ast.unparse(node.test) for node in ast.walk(one) if isinstance(node, ast.Assert)]
            return any(f"{scope}.cancel" in test and "not " not in test for scope in scopes for test in checked)
    return False


def handed_to_the_loop(source: Source) -> set[ast.AST]:
    """Return the names in calls of `aiote.testing.run`, and of functions that call it themselves."""
    drivers = set(source.drivers)
    for node in source.nodes:
        if isinstance(node, ast.Name) and node.id in source.drivers:
            drivers |= {unit.name for unit in source.units_above(node)}
    calls = [node for node in source.nodes if isinstance(node, ast.Call) and called(node) in drivers]
    return {
        name for call in calls for argument in call.args for name in ast.walk(argument) if isinstance(name, ast.Name)
    }


def polls(source: Source, call: ast.Call) -> bool:
    """Tell whether a sleep is a step of waiting for a condition."""
    for node in source.above(call):
        if isinstance(node, Unit | ast.For | ast.AsyncFor):
            return False
        if isinstance(node, ast.While):
            ends = any(isinstance(one, ast.Break | ast.Return) for one in ast.walk(node))
            expected = any(raises(one) for one in source.above(node))
            return ends or expected or not (isinstance(node.test, ast.Constant) or only_the_clock(node.test))
    return False


def raises(node: ast.AST, what: str = "") -> bool:
    """Tell whether a node is a block that has to end with an exception."""
    if not isinstance(node, ast.With | ast.AsyncWith):
        return False
    return any(ast.unparse(item.context_expr).startswith(f"pytest.raises({what}") for item in node.items)


def only_the_clock(test: ast.expr) -> bool:
    parts = test.values if isinstance(test, ast.BoolOp) else [test]
    return all(any(called(one) in CLOCKS for one in ast.walk(part)) for part in parts)


def limits(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Yield the values that a node gives to limits, with their names."""
    match node:
        case ast.Call(args=arguments, keywords=keywords):
            place = LIMITED.get(called(node))
            if place is not None and place < len(arguments):
                yield arguments[place], called(node)
            match arguments:
                case [_, ast.Constant(value=str() as name), value] if called(node) == "setattr":
                    if PATCHED.search(name):
                        yield value, name
            yield from ((one.value, one.arg) for one in keywords if one.arg and is_limit(one.arg))
            if called(node) in ("fail_after", "move_on_after"):
                yield from ((one.value, called(node)) for one in keywords if one.arg == "delay")
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str) and is_limit(key.value):
                    yield value, key.value
        case ast.FunctionDef(args=signature) | ast.AsyncFunctionDef(args=signature):
            positional = [*signature.posonlyargs, *signature.args]
            given = zip(positional[len(positional) - len(signature.defaults) :], signature.defaults, strict=True)
            named = zip(signature.kwonlyargs, signature.kw_defaults, strict=True)
            yield from ((value, one.arg) for one, value in (*given, *named) if value and is_limit(one.arg))


def is_limit(name: str) -> bool:
    return NAMED.search(name) is not None and name not in NO_SECONDS


def arithmetic(op: ast.operator, one: float, other: float) -> float | None:
    match op:
        case ast.Add():
            return one + other
        case ast.Sub():
            return one - other
        case ast.Mult():
            return one * other
        case ast.Div() if other:
            return one / other
        case ast.Pow():
            return float(one**other)
    return None
