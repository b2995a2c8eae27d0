"""Calls can be read where they are made: few arguments by position, and no bare True or False."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
POSITIONAL = 6
FOREIGN = {"aiote/connectors/vllm_moe.py", "aiote/moe/deep_ep.py"}
"""Modules with the functions of other projects' interfaces, which name their arguments."""
BOOLEANS = {"Option", "_setting", "apply", "get", "getattr", "setblocking"}
"""Functions that take a boolean as the value that they are about: a default, or the state to set."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((ROOT / "aiote").rglob("*.py")):
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def is_command(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is a command of the shell, whose parameters are its options."""
    return function.name == "command" or any(
        "Annotated" in ast.unparse(one.annotation) for one in function.args.args if one.annotation is not None
    )


def crowded(tree: ast.AST) -> list[str]:
    """Return the functions that take more than POSITIONAL arguments by position, not counting `self`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_command(node):
            names = [one.arg for one in (*node.args.posonlyargs, *node.args.args) if one.arg not in ("self", "cls")]
            found += [node.name] if len(names) > POSITIONAL else []
    return found


def bare(tree: ast.AST) -> list[int]:
    """Return the lines of calls that are given True or False by position."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and any(isinstance(one, ast.Constant) and isinstance(one.value, bool) for one in node.args)
        and ast.unparse(node.func).rpartition(".")[2] not in BOOLEANS
    ]


def test_no_function_takes_many_arguments_by_position():
    found = {path: crowded(tree) for path, tree in modules() if path not in FOREIGN}
    assert len(found) > 100
    assert {path: names for path, names in found.items() if names} == {}


def test_no_call_is_given_a_bare_boolean():
    assert {path: lines for path, tree in modules() if (lines := bare(tree))} == {}


@pytest.mark.parametrize(
    ("text", "many", "lines"),
    [
        ("def f(a, b, c, d, e, f, g): ...", ["f"], []),
        ("def f(self, a, b, c, d, e, f, *, g): ...", [], []),
        ("async def f(a, b, /, c, d, e, f, g): ...", ["f"], []),
        ("f(1, True)", [], [1]),
        ("f(1, on=True)\nthe.field.get('name', False)", [], []),
        ("\nself.f(False)", [], [2]),
    ],
)
def test_crowded_functions_and_bare_booleans_are_found(text, many, lines):
    tree = ast.parse(text)
    assert (crowded(tree), bare(tree)) == (many, lines)
