"""The layering is a test: what each module imports is read from its syntax tree, whether or not it would run.

A lower floor never imports a higher one; imports under `TYPE_CHECKING` and inside functions count as well.
`aiote.errors` may be imported from every floor of `aiote`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("aiote", "aiote_native")

# What plans an update of weights computes, as the core does, and must run anywhere.
PLANNER = (
    "assignment",
    "balance",
    "boxes",
    "cells",
    "copies",
    "dtypes",
    "entries",
    "layout",
    "placement",
    "plan",
    "recipe",
)
PLANNER += ("copy_log", "record", "stand_in", "tasks", "traced", "traced_numpy", "traced_torch", "watched")
ROUNDS = ("config", "plan", "states", "wire")
PURE = ("aiote.core.", *(f"aiote.weights.{name}" for name in PLANNER), "aiote.connectors.buckets")
PURE += ("aiote.kvcache.tensors",)
PURE += tuple(f"aiote.moe.{name}" for name in ROUNDS)

# From the lowest; the longest prefix decides. The public names of `aiote` itself are a floor, on which services stand.
ORDER = (
    ("aiote_native",),
    ("aiote.errors", "aiote.core", *PURE[1:]),
    ("aiote.observe",),
    ("aiote.machine",),
    ("aiote.rails",),
    ("aiote.aio",),
    ("aiote.config",),
    ("aiote.host",),
    ("aiote.runtime",),
    ("aiote.transfers",),
    ("aiote.links.held_leases", "aiote.links.granted_leases", "aiote.links.heartbeat_timer", "aiote.links.nic_events"),
    ("aiote.links.connection",),
    ("aiote.links.channels", "aiote.links.joining", "aiote.links.sharing"),
    ("aiote.links.liveness",),
    ("aiote.links.session",),
    ("aiote.links",),
    ("aiote.engine",),
    ("aiote.gpu",),
    ("aiote",),
    ("aiote.service", "aiote.testing"),
    ("aiote.bridge",),
    ("aiote.discovery",),
    ("aiote.kvcache", "aiote.moe", "aiote.weights"),
    ("aiote.connectors.bucket_broadcast",),
    ("aiote.connectors.host",),
    ("aiote.connectors",),
    ("aiote.diagnosis", "aiote.plan"),
    ("aiote.demo",),
    ("aiote.cli", "aiote.bench", "aiote.__main__"),
)
NATIVE_USERS = ("aiote.rails.", "aiote.gpu.", "aiote.moe.kernels")
FLOORS = {name: number for number, names in enumerate(ORDER) for name in names}
ENGINE = FLOORS["aiote"]
LOOPS = {"asyncio", "anyio", "trio", "uvloop", "sniffio"}
IO = LOOPS | {"io", "mmap", "multiprocessing", "os", "pathlib", "select", "selectors", "shutil", "signal", "socket"}
IO |= {"ssl", "subprocess", "tempfile", "threading", "time", "ctypes", "aiote_native"}


def floor(module: str) -> int:
    parts = module.split(".")
    return next(FLOORS[name] for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in FLOORS)


def python_imports(path: Path, module: str) -> Iterator[str]:
    """Yield every module that a file imports, in full, and for `from a import b` also `a.b`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            # A name of the package itself may be a module of any floor: then that one counts, not the package.
            yield from (f"{source}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            yield from (arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))


def cython_imports(path: Path) -> Iterator[str]:
    for match in re.finditer(r"^\s*(?:from\s+([\w.]+)\s+c?import|c?import\s+([\w.]+))", path.read_text(), re.M):
        yield match[1] or match[2]


def reads_settings(path: Path) -> bool:
    """Tell whether a file touches the environment and spells the name of a setting."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    environment = any(getattr(n, "attr", getattr(n, "name", "")) in ("environ", "getenv", "environb") for n in nodes)
    names = (n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return environment and any(re.fullmatch(r"AIOTE_[A-Z0-9_]*", name) for name in names)


def complaints(module: str, imported: str) -> Iterator[str]:
    """Yield what is wrong with `module` importing `imported`."""
    top, here = imported.split(".")[0], floor(module)
    if top in ("aiote", "aiote_native") and not imported.startswith("aiote.errors") and floor(imported) > here:
        yield f"{module} (floor {here}) imports {imported} (floor {floor(imported)})"
    if here == 0 and top == "aiote":
        yield f"{module} imports {imported}: native modules know nothing of aiote"
    if here <= ENGINE and top in LOOPS and not module.startswith("aiote.aio."):
        yield f"{module} imports {imported}: only aiote.aio touches an event loop"
    if top == "aiote_native" and here > 0 and not module.startswith(NATIVE_USERS):
        yield f"{module} imports {imported}: only aiote.rails and aiote.gpu do, and what calls the kernels of aiote.moe"
    if module.startswith(PURE) and top in IO:
        yield f"{module} imports {imported}: the core is pure"


def sources(root: Path) -> list[Path]:
    files = (path for package in PACKAGES for path in (root / package).rglob("*"))
    return sorted(path for path in files if path.suffix in (".py", ".pyi", ".pyx", ".pxd"))


def violations(root: Path) -> list[str]:
    found = []
    for path in sources(root):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        imports = cython_imports(path) if path.suffix in (".pyx", ".pxd") else python_imports(path, module)
        name = module.removesuffix(".__init__")
        # The name with `.__init__` makes a package's own file match its prefix like any file in it.
        found += [wrong for imported in imports for wrong in complaints(module, imported)]
        if path.suffix == ".py" and name != "aiote.config" and reads_settings(path):
            found.append(f"{name} reads AIOTE_* from the environment: only aiote.config does")
    return found


def test_no_floor_reaches_up():
    assert len(sources(ROOT)) > 100
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("aiote/core/a.py", "from aiote.rails import x"),
        ("aiote/core/a.py", "from .. import engine"),
        ("aiote/core/a.py", "def f():\n    import time"),
        ("aiote/core/__init__.py", "import socket"),
        ("aiote/observe/a.py", "from __future__ import annotations\nif TYPE_CHECKING:\n    from ..aio.loop import L"),
        ("aiote/rails/a.py", "import asyncio"),
        ("aiote/aio/a.py", "from aiote import Engine"),
        ("aiote/aio/a.py", "import aiote_native.system.base"),
        ("aiote/engine/a.py", "import importlib\nimportlib.import_module('aiote_native.system.base')"),
        ("aiote/engine/a.py", "import anyio"),
        ("aiote/engine/a.py", "from aiote.kvcache import pages"),
        ("aiote/transfers/a.py", "from __future__ import annotations\nif TYPE_CHECKING:\n    from ..links import Peer"),
        ("aiote/links/a.py", "from ..engine import Engine"),
        ("aiote/links/connection.py", "if TYPE_CHECKING:\n    from .session import Session"),
        ("aiote/links/a.py", "import aiote"),
        ("aiote/runtime.py", "from .transfers import Transfer"),
        ("aiote/kvcache/a.py", "from ..cli import main"),
        ("aiote/weights/plan.py", "from .. import open_engine"),
        ("aiote/weights/layout.py", "import socket"),
        ("aiote/moe/plan.py", "from .. import open_engine"),
        ("aiote/moe/states.py", "import time"),
        ("aiote/moe/group.py", "import aiote_native.kernels.moe"),
        ("aiote/connectors/bucket_broadcast.py", "from .host import party"),
        ("aiote/connectors/host.py", "from .verl import AioteCheckpointEngine"),
        ("aiote/bridge/a.py", "from ..connectors import host"),
        ("aiote/rails/a.py", "import os\nx = os.environ.get('AIOTE_LIBFABRIC')"),
        ("aiote/engine/a.py", "from os import environ\nx = environ['AIOTE_CLUSTER_KEY']"),
        ("aiote_native/a.py", "import aiote.errors"),
        ("aiote_native/a.pyx", "cdef int x\nfrom aiote.errors import FabricError"),
        ("aiote_native/a.pyx", "import asyncio"),
    ],
)
def test_what_is_forbidden_is_found(tmp_path, file, text):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert len(violations(tmp_path)) >= 1


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("aiote/core/a.py", "from ..errors import UsageError\nfrom . import b\nimport dataclasses"),
        ("aiote/aio/__init__.py", "import asyncio\nfrom ..rails import Rail"),
        ("aiote/rails/a.py", "from aiote_native.libfabric import device\nfrom aiote.core.paging import cut"),
        ("aiote/rails/a.py", "import os\nos.environ['FI_X'] = '0'\nraise OSError('set AIOTE_LIBFABRIC')"),
        ("aiote/config.py", "import os\nx = os.environ.get('AIOTE_LIBFABRIC')"),
        ("aiote/__init__.py", "from .engine import Engine"),
        ("aiote/links/a.py", "from ..transfers import Peer\nfrom ..runtime import Runtime"),
        ("aiote/links/session.py", "from .connection import Connection\nfrom .channels import Channels"),
        ("aiote/cli/a.py", "import aiote\nimport anyio"),
        ("aiote_native/a.pyx", "from aiote_native.system.base cimport check\ncimport cython"),
    ],
)
def test_what_is_allowed_passes(tmp_path, file, text):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert violations(tmp_path) == []
