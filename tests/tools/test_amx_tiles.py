"""Where AMX is listed and does not work, vLLM's tests run, on its vector kernel."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))

import amx_tiles

ASKED = "import torch.cpu; print(torch.cpu._is_amx_tile_supported(), torch.cpu.count)"


@pytest.fixture
def torch(tmp_path: Path) -> Path:
    """Return a folder with a package that says what torch says on a processor with AMX."""
    package = tmp_path / "torch" / "cpu"
    package.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text("from . import cpu\n")
    (package / "__init__.py").write_text("count = 7\ndef _is_amx_tile_supported():\n    return True\n")
    return tmp_path


@pytest.mark.parametrize(("works", "said"), [(True, "True 7"), (False, "False 7")], ids=["granted", "refused"])
def test_torch_says_in_every_process_whether_tiles_work(works, said, torch, monkeypatch):
    monkeypatch.setattr(amx_tiles, "listed", lambda: True)
    environment, why = amx_tiles.environment({**os.environ, "PYTHONPATH": str(torch)}, works=works)
    assert bool(why) is not works
    ran = subprocess.run([sys.executable, "-c", ASKED], env=environment, capture_output=True, text=True, timeout=60)
    assert ran.stdout.strip() == said, ran.stderr


def test_nothing_changes_for_a_processor_without_amx(tmp_path, monkeypatch):
    cpuinfo = tmp_path / "cpuinfo"
    for flags, found in (("avx2 amx_bf16", False), ("avx2 amx_tile amx_int8", True), ("avx2 amx_tile", True)):
        cpuinfo.write_text(f"flags\t\t: fpu {flags}\nbugs\t\t:\n")
        assert amx_tiles.listed(cpuinfo) is found
    monkeypatch.setattr(amx_tiles, "listed", lambda: False)
    assert amx_tiles.environment({"A": "b"}, works=False) == ({"A": "b"}, "")


def test_tiles_that_are_not_listed_do_not_work():
    """A child uses a tile, and whatever becomes of it is an answer."""
    works = amx_tiles.work()
    assert amx_tiles.listed() or not works


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is of x86-64")
def test_the_instructions_are_those_that_the_assembler_makes(tmp_path):
    source, made, raw = tmp_path / "tile.s", tmp_path / "tile.o", tmp_path / "tile"
    source.write_text("ldtilecfg (%rdi)\ntilezero %tmm0\ntilerelease\nret\n")
    subprocess.run(["as", source, "-o", made], check=True)
    subprocess.run(["objcopy", "-O", "binary", "-j", ".text", made, raw], check=True)
    assert raw.read_bytes() == amx_tiles.CODE
