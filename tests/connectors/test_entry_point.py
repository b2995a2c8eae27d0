"""What vLLM loads is harmless without it, and what connectors share needs neither torch nor a host."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace

import pytest

from aiote.connectors import vllm

HOSTS = {"torch", "vllm", "verl", "ray"}


def test_it_is_the_entry_point_that_vllm_asks_for():
    (found,) = [one for one in entry_points(group="vllm.general_plugins") if one.name == "aiote"]
    assert found.load() is vllm.register


def test_without_vllm_nothing_happens_and_nothing_is_imported():
    code = "import aiote.connectors.vllm as vllm, aiote.connectors.host, sys; vllm.register(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert set(done.stdout.split()) & HOSTS == set()


class Registry:
    """As vLLM's: a name is registered once."""

    def __init__(self) -> None:
        self.names: dict[str, tuple[str, str]] = {}

    def register_engine(self, name: str, module: str, what: str) -> None:
        if name in self.names:
            raise ValueError(f"{name} is registered")
        self.names[name] = module, what


@pytest.fixture
def registries(monkeypatch) -> tuple[Registry, Registry]:
    """Stand in for vLLM's two registries."""
    workers, trainers = Registry(), Registry()
    factory = SimpleNamespace(WeightTransferEngineFactory=workers, WeightTransferTrainerFactory=trainers)
    package = ModuleType("vllm.distributed.weight_transfer")
    package.factory = factory  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    return workers, trainers


def test_registering_twice_is_registering_once(registries):
    vllm.register()
    vllm.register()
    assert [set(one.names) for one in registries] == [{"aiote"}, {"aiote"}]
    assert all(module == "aiote.connectors.vllm.weights" for one in registries for module, _ in one.names.values())


def test_torch_finds_the_transport_by_its_entry_point():
    (found,) = [one for one in entry_points(group="torch.distributed.transports") if one.name == "aiote"]
    assert found.value == "aiote.connectors.torch:AioteTransport"
