"""The KV connector against vLLM's interface: the version that is installed, and a newer one by its Python files alone.

The latter come out of the official wheel (for CUDA, never installed), which `make test-connectors` fetches.
"""

from __future__ import annotations

import ast
import importlib.util
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONNECTOR = ROOT / "aiote" / "connectors" / "vllm" / "connector.py"
BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
# Of 0.33; 0.32 knows nothing of it and does not ask.
NEWER = {"supports_sleep_mode"}
Read = Callable[[str], str]


@pytest.fixture(params=["installed", "newer"])
def read(request: pytest.FixtureRequest) -> Read:
    """Return what reads a file of a version of vLLM."""
    if request.param == "installed":
        found = importlib.util.find_spec("vllm")
        assert found is not None
        assert found.origin is not None
        folder = Path(found.origin).parents[1]
        return lambda name: (folder / name).read_text()
    wanted = (Path(__file__).parent / "vllm_newer.txt").read_text().split()[-1].replace("==", "-")
    wheels = sorted((ROOT / "build" / "hosts").glob(f"{wanted}-*.whl"))
    assert wheels, f"no wheel of {wanted} in build/hosts: run make test-connectors"
    archive = zipfile.ZipFile(wheels[0])
    return lambda name: archive.read(name).decode()


def classes(text: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)}


def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}


def parameters(function: ast.FunctionDef) -> list[str]:
    return [one.arg for one in function.args.args] + ["**" + one.arg for one in [function.args.kwarg] if one]


def test_every_method_is_one_of_vllm_s_and_takes_the_same(read):
    base = classes(read(BASE))
    theirs = methods(base["KVConnectorBase_V1"]) | methods(base["SupportsHMA"])
    ours = methods(classes(CONNECTOR.read_text())["AioteConnector"])
    abstract = {
        name
        for name, one in theirs.items()
        if any(getattr(mark, "id", "") == "abstractmethod" for mark in one.decorator_list)
    }
    assert len(abstract) == 8
    assert abstract <= ours.keys()
    public = {name for name in ours if not name.startswith("_")} | {"__init__"}
    assert public - theirs.keys() <= NEWER
    for name in public & theirs.keys():
        assert parameters(ours[name]) == parameters(theirs[name]), name


def test_what_is_imported_is_there(read):
    """Each name that the connector imports, and what it uses of the classes."""
    for node in ast.walk(ast.parse(CONNECTOR.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
            text = read((node.module or "").replace(".", "/") + ".py") if node.module != "vllm.config" else None
            if text is not None:
                assert {alias.name for alias in node.names} <= names(text), node.module
    cache = classes(read("vllm/v1/kv_cache_interface.py"))
    assert "transfer_group_ids" in methods(cache["KVCacheConfig"])
    results = {
        one.target.id
        for one in classes(read(BASE))["KVConnectorTransferResults"].body
        if isinstance(one, ast.AnnAssign)
    }
    assert results == {"finished_sending", "finished_recving", "failed_recving"}
    assert {"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"} <= names(read("vllm/v1/request.py"))
    assert "P2P" in names(read("vllm/v1/metrics/cache_hit_source.py"))


def names(text: str) -> set[str]:
    """Return all names that a module or its classes give something."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found
