"""The examples of a layer of experts over four ranks, in NumPy and in torch."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("minimal.py", "the same sums as alone"),
        pytest.param("torch_layer.py", "the same sums as one process with all 16", marks=pytest.mark.needs_torch),
    ],
)
def test_the_ranks_get_the_sums_that_one_would(start, name, says):
    program = start(f"moe/{name}")
    assert program.end() == 0, program.err
    lines = sorted(program.out.splitlines())
    assert [line.partition(":")[0] for line in lines] == [f"rank {rank}" for rank in range(4)]
    assert all(says in line for line in lines)


def test_without_torch_the_example_says_so(start, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch')\n")
    program = start("moe/torch_layer.py", PYTHONPATH=str(tmp_path))
    assert program.end() == 1
    assert program.err == "torch_layer.py: this needs torch: pip install torch\n"
