"""The blocks of code in the docs, and how pieces of programs among them are run."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from typing import Any

import anyio

from support import ROOT
from support.engines.opening import PATIENCE_S

DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```(?:python|toml|json|yaml|bash|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[str]:
    """Return the blocks of a page that are code or configuration."""
    return BLOCK.findall((DOCS / f"{page}.md").read_text())


def block(page: str, number: int) -> str:
    """Return one of the blocks of a page; `test_every_block_is_run` reads the arguments, which must be literals."""
    return blocks(page)[number]


def parts(text: str, *ends: str) -> list[str]:
    """Return the parts of a block for several engines; each of `ends` begins the next part."""
    places = [0, *(text.index(end) for end in ends), len(text)]
    return [text[first:last] for first, last in itertools.pairwise(places)]


def replaced(text: str, place: str, code: str) -> str:
    """Replace a place that a block leaves to its reader."""
    assert text.count(place) == 1, f"{text.count(place)} times {place!r} in:\n{text}"
    return text.replace(place, code)


async def run(text: str, **names: Any) -> dict[str, Any]:
    """Run a piece of a module or of a coroutine with these names; return all names that there are at its end."""
    code = compile(text, "a block", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    with anyio.fail_after(PATIENCE_S):
        ran = eval(code, names)
        if inspect.iscoroutine(ran):
            await ran
    return names
