"""The example of a layer of experts over four ranks."""

from __future__ import annotations


def test_the_ranks_get_the_sums_that_one_would(start):
    program = start("moe/minimal.py")
    assert program.end() == 0, program.err
    lines = sorted(program.out.splitlines())
    assert [line.partition(":")[0] for line in lines] == [f"rank {rank}" for rank in range(4)]
    assert all(line.endswith("the same sums as alone") for line in lines)
