"""Ranks that a group names and that never open it: the others hear who came, within `connect_timeout`."""

from __future__ import annotations

import math

import anyio
import pytest

import aiote
from aiote.moe import MoeConfig, open_group
from aiote.testing import Fabric, run

CONFIG = MoeConfig(experts=6, top_k=3, hidden=8, tokens=7, dtype="float32", out_dtype="float32")


def test_a_rank_that_never_opens_the_group_is_named_with_those_that_came():
    async def main(fabric: Fabric) -> None:
        engines = [await fabric.open_engine() for _ in range(3)]
        members, errors = [engine.address for engine in engines], []

        async def come(rank: int) -> None:
            with pytest.raises(aiote.ConnectTimeoutError) as caught:
                async with open_group(engines[rank], members, rank, CONFIG):
                    raise AssertionError
            errors.append(caught.value)

        begun, limit = fabric.now, engines[0].config.connect_timeout
        async with anyio.create_task_group() as group:
            for rank in (0, 2):
                group.start_soon(come, rank)
        assert fabric.now - begun < limit + 2
        for error in errors:
            assert error.peer == str(members[1])
            assert f"ranks [1] of the group have not opened it within {limit} s (open_timeout)" in str(error)
        assert any("ranks [0, 2] have" in str(error) for error in errors)
        for engine in engines:
            await engine.aclose()

    run(main, seed=1)


def test_a_group_without_a_limit_waits_for_a_late_rank():
    async def main(fabric: Fabric) -> None:
        engines = [await fabric.open_engine() for _ in range(2)]
        members = [engine.address for engine in engines]

        async def come(rank: int, late: float) -> None:
            await anyio.sleep(late)
            async with open_group(engines[rank], members, rank, CONFIG, open_timeout=math.inf) as moe:
                assert moe.active.all()

        async with anyio.create_task_group() as group:
            group.start_soon(come, 0, 0)
            group.start_soon(come, 1, 20 * engines[0].config.connect_timeout)
        for engine in engines:
            await engine.aclose()

    run(main, seed=1)
