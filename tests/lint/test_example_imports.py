"""Examples import public names only: what `__all__` lists of the packages in the table of docs/api.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def listed(package: str) -> set[str]:
    """Return what a package's `__all__` lists."""
    path = ROOT.joinpath(*package.split(".")) / "__init__.py"
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


PACKAGES = re.findall(r"^\| `(aiote[\w.]*)` \|", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
PUBLIC = {package: listed(package) for package in PACKAGES}


def complaints(text: str) -> Iterator[str]:
    """Yield what of aiote a program uses that is not public."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if ours(name.name) and name.name not in PUBLIC)
        elif isinstance(node, ast.ImportFrom) and ours(node.module or ""):
            known = PUBLIC.get(node.module, set()) | {package.removeprefix(f"{node.module}.") for package in PUBLIC}
            yield from (f"{node.module}.{name.name}" for name in node.names if name.name not in known)
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "aiote":
            known = node.attr in PUBLIC["aiote"] or f"aiote.{node.attr}" in PUBLIC
            yield from () if known else (f"aiote.{node.attr}",)


def ours(module: str) -> bool:
    return module.split(".")[0] in ("aiote", "aiote_native")


def test_examples_use_public_names():
    found = {path.name: list(complaints(path.read_text())) for path in (ROOT / "examples").rglob("*.py")}
    assert len(found) > 5
    assert {name: private for name, private in found.items() if private} == {}


def test_the_public_packages_say_what_is_public():
    assert {"aiote", "aiote.demo", "aiote.kvcache"} <= set(PUBLIC)
    assert all(PUBLIC.values())
    assert not any(part.startswith("_") for package in PUBLIC for part in package.split("."))


@pytest.mark.parametrize(
    "text",
    [
        "from aiote.demo.weights import load",
        "from aiote.cli import main",
        "import aiote.cli.app",
        "from aiote.kvcache.pool import PagePool",
        "from aiote.kvcache import PagedMoves",
        "from aiote import core",
        "import aiote_native.engine.core",
        "def main():\n    from aiote.links import Session",
        "import aiote\naiote.core.address",
    ],
)
def test_what_is_private_is_found(text):
    assert len(list(complaints(text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "import aiote\naiote.open_engine()\naiote.Address.parse('x').host",
        "from aiote.demo import Settings, weights\nweights.fingerprint(1)",
        "import aiote.kvcache\naiote.kvcache.Consumer",
        "import anyio\nfrom serving import core",
    ],
)
def test_what_is_public_passes(text):
    assert list(complaints(text)) == []
