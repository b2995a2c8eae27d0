"""Make torch say that this processor has no AMX tiles, in each process that has this folder in PYTHONPATH.

vLLM asks `torch.cpu._is_amx_tile_supported`, which knows the processor and not whether the kernel grants the tiles, and
dies of an illegal instruction in `cpu_attention_with_kv_cache` where it does not. See tools/amx_tiles.py.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NAME = "torch.cpu"


class WithoutTiles(Loader):
    """Load `torch.cpu` as its own loader does, and replace the one answer."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module._is_amx_tile_supported = lambda: False  # type: ignore[attr-defined]


class Finder(MetaPathFinder):
    """Find `torch.cpu`, and nothing else."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == NAME else None
        if spec is not None:
            spec.loader = WithoutTiles(spec.loader)
        return spec


sys.meta_path.insert(0, Finder())
