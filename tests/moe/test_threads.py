"""Rows of large rounds are placed and added up in a thread, beside the event loop."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import anyio
import pytest

import aiote
from aiote.moe import MoeGroup, kernels, lane
from support.engines.opening import PATIENCE_S, opened, until
from support.moe.ranks import SHAPES, Tokens, all_of, compute, ranks
from support.moe.sharing import CONFIG, each_shape, given, rounds, shaped


@pytest.fixture(autouse=True)
def offloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a round of any size use threads."""
    monkeypatch.setattr(lane, "OFFLOADED", 1)


class Blocked:
    """The kernel that adds up rows, which waits in its thread until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._combine, self._lock = kernels.combine, threading.Lock()
        self.may_go = threading.Event()
        self.begun = self.ended = 0
        self.seen: set[int] = set()
        monkeypatch.setattr(kernels, "combine", self)

    def __call__(self, *arguments: Any, **named: Any) -> None:
        with self._lock:
            self.begun += 1
            self.seen.add(threading.get_ident())
        assert self.may_go.wait(PATIENCE_S), "the event loop does not run beside the kernel"
        self._combine(*arguments, **named)
        with self._lock:
            self.ended += 1


async def turns() -> None:
    """Let the loop do whatever it would do at once."""
    for _ in range(200):
        await anyio.sleep(0)


async def one_round(group: MoeGroup, own: Tokens) -> None:
    batch = await group.dispatch(own.x, own.ids, own.weights, own.scales)
    await group.combine(batch, compute(group, batch))


@each_shape
async def test_rounds_that_use_threads_give_the_same(shape, monkeypatch):
    used, in_thread = [], lane.in_thread

    async def counted(function: Any) -> Any:
        used.append(function)
        return await in_thread(function)

    monkeypatch.setattr(lane, "in_thread", counted)
    async with ranks(lambda: opened("local"), 2, shaped(shape)) as groups:
        used.clear()
        await rounds(groups, 2)
        # Two ranks add up in each of two rounds. With placement "direct" no row has to be placed.
        assert len(used) == (4 if groups[0].sizes.direct else 8)


async def test_the_loop_runs_while_rows_are_added_up(monkeypatch):
    async with ranks(lambda: opened("local"), 2, CONFIG) as groups:
        blocked = Blocked(monkeypatch)

        async def lets_go() -> None:
            await until(lambda: blocked.begun == 2)
            blocked.may_go.set()

        tokens = given(CONFIG, 2)
        await all_of(lets_go, *[lambda g=g, t=t: one_round(g, t) for g, t in zip(groups, tokens, strict=True)])
        assert threading.get_ident() not in blocked.seen
        await rounds(groups)


@pytest.mark.parametrize("config", [CONFIG, SHAPES["mask"]])
async def test_a_reset_waits_for_the_threads_of_a_round(config, monkeypatch):
    """Otherwise rows of the next epoch would come into memory that a thread reads."""
    async with ranks(lambda: opened("local"), 2, config) as groups:
        blocked, broken, taken = Blocked(monkeypatch), [], []
        for group in groups:
            take = group.memory.take_all_back
            monkeypatch.setattr(group.memory, "take_all_back", lambda take=take: taken.append(blocked.ended) or take())

        async def breaks(group: MoeGroup, own: Tokens) -> None:
            try:
                await one_round(group, own)
            except aiote.AioteError as error:
                broken.append(error)

        async def resets() -> None:
            await until(lambda: blocked.begun == 2)
            async with anyio.create_task_group() as tasks:
                for group in groups:
                    tasks.start_soon(group.reset)
                await until(lambda: all(group.membership.failure for group in groups))
                await turns()
                assert not taken
                blocked.may_go.set()

        tokens = given(config, 2)
        with anyio.fail_after(PATIENCE_S):
            await all_of(resets, *[lambda g=g, t=t: breaks(g, t) for g, t in zip(groups, tokens, strict=True)])
        assert len(broken) == 2
        assert min(taken) >= 1
        assert {group.epoch for group in groups} == {2}
        await rounds(groups)


async def test_a_cancelled_step_ends_after_its_thread(monkeypatch):
    async with ranks(lambda: opened("local"), 2, CONFIG) as groups:
        blocked, scope, ended = Blocked(monkeypatch), anyio.CancelScope(), []

        async def cancelled(own: Tokens) -> None:
            with scope:
                await one_round(groups[0], own)
            ended.append(blocked.ended)

        async def other(own: Tokens) -> None:
            with suppress(aiote.AioteError):  # It may have its sums before it hears that the round was broken.
                await one_round(groups[1], own)

        async def cancels() -> None:
            await until(lambda: blocked.begun == 2)
            scope.cancel()
            await turns()
            assert not ended
            blocked.may_go.set()

        own, others = given(CONFIG, 2)
        with anyio.fail_after(PATIENCE_S):
            await all_of(cancels, lambda: cancelled(own), lambda: other(others))
        assert ended[0] >= 1
        assert groups[0].membership.failure is not None
        await all_of(*[group.reset for group in groups])
        await rounds(groups)
