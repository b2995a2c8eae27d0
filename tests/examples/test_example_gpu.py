"""The examples with arrays of cupy: on the stand-in for the driver, and where there is no cupy or no GPU."""

from __future__ import annotations

import pytest

from support import TESTS

STANDIN = str(TESTS / "support" / "gpu" / "standin" / "cupy_on_standin")
NAMES = ["kvcache.py", "weights.py", "moe.py"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("kvcache.py", "7 pages in 4 layers: True\n"),
        ("weights.py", "version 1: [[10], [11]]\nversion 2: [[20], [21]]\n"),
    ],
)
def test_bytes_go_between_arrays_of_cupy(start, name, says):
    program = start(f"gpu/{name}", PYTHONPATH=STANDIN)
    assert program.end() == 0, program.err
    assert program.out == says


@pytest.mark.parametrize("name", NAMES)
def test_without_cupy_or_a_gpu_an_example_says_so(start, tmp_path, name):
    (tmp_path / "cupy.py").write_text("raise ImportError('no cupy')\n")
    program = start(f"gpu/{name}", PYTHONPATH=str(tmp_path))
    assert program.end() == 1
    assert program.err == f"{name}: this needs cupy and a GPU: pip install 'aiote[cuda]'\n"
    if name == "kvcache.py":
        program = start(f"gpu/{name}", PYTHONPATH=STANDIN, GPUS="0")
        assert program.end() == 1
        assert program.err == f"{name}: this needs a GPU, and cupy finds none\n"
