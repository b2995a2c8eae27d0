"""Ranks that say what cannot be: their replica fails, and nothing else is harmed."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import anyio
import numpy as np
import pytest

import aiote
from aiote import service
from aiote.weights import Controller, Layout, Replicate, serve_source, serve_target
from aiote.weights.protocol import (
    LAYOUT_BYTES,
    Descriptors,
    Step,
    TargetService,
    TargetState,
    Update,
    UpdateOrder,
    layout_of,
    packed_layout,
)
from support.engines.false_descriptors import WRONG, claimed
from support.engines.opening import opened
from support.machine import LONG

# What is tried is the same on every loop.
pytestmark = [pytest.mark.anyio] if LONG else []

LAYOUT = Layout.over([0], {"a": ((64,), "F32", Replicate())})
PLACES = np.zeros((1, 2), np.uint64)
NOTHING = Descriptors.of([])


class Lying(TargetService):
    """A target that says these steps, of memory that it was given."""

    name = TargetService.name

    def __init__(self, steps: Callable[[Any], list[Step]], layout: Layout, *descriptors: bytes) -> None:
        self.steps, self.layout, self.descriptors = steps, layout, descriptors

    @service.method(idempotent=True)
    async def describe(self) -> TargetState:
        return TargetState(1, "liar", "inplace", "empty", None, packed_layout(self.layout), PLACES)

    @service.method
    async def update(self, order: UpdateOrder) -> AsyncIterator[Step]:
        for step in self.steps(Descriptors.of(self.descriptors)):
            yield step
        if self.steps(NOTHING):
            await anyio.sleep_forever()

    @service.method(idempotent=True)
    async def commit(self, update: Update) -> None:
        pass


LIES: dict[str, tuple[Callable[[Any], list[Step]], str]] = {
    "counted first": (lambda lent: [Step("counted")], "it reported 'counted' out of order"),
    "lent twice": (lambda lent: [Step("lent", [1], lent, PLACES)] * 2, "it reported 'lent' out of order"),
    "counted twice": (
        lambda lent: [Step("lent", [1], lent, PLACES), Step("counted"), Step("counted")],
        "it reported 'counted' out of order",
    ),
    "committed unasked": (
        lambda lent: [Step("lent", [1], lent, PLACES), Step("committed")],
        "it reported 'committed' out of order",
    ),
    "over without a word": (lambda lent: [], "ended the update before the commit"),
    "no memory": (lambda lent: [Step("lent", [1])], "did not describe the memory"),
    "a place nowhere": (lambda lent: [Step("lent", [1], lent, PLACES + np.uint64(7))], "regions to 1 sources"),
    "a place beyond": (
        lambda lent: [Step("lent", [1], lent, PLACES + np.array([0, 9999], np.uint64))],
        "begins at byte",
    ),
    "too few places": (lambda lent: [Step("lent", [1], lent, PLACES[:0])], "expected the places of 1 tensors"),
    "a large immediate": (lambda lent: [Step("lent", [1 << 40], lent, PLACES)], "Expected `int` <= 268435455"),
    "too few immediates": (lambda lent: [Step("lent", [], lent, PLACES)], "0 immediates to 1 sources"),
    "ends that go back": (
        lambda lent: [Step("lent", [1], Descriptors(lent.data, np.array([9, 2**64 - 1], np.uint64)), PLACES)],
        "descriptors of memory, got",
    ),
    "ends that are no row": (
        lambda lent: [Step("lent", [1], Descriptors(lent.data, np.array(3, np.uint64)), PLACES)],
        "descriptors of memory, got",
    ),
    "places without bytes": (lambda lent: [Step("lent", [1], lent, np.zeros((3, 0), np.uint64))], "did not describe"),
    "places that are no rows": (lambda lent: [Step("lent", [1], lent, np.array(1, np.uint64))], "did not describe"),
    "no descriptor": (lambda lent: [Step("lent", [1], Descriptors.of([b"none"]), PLACES)], "escriptor"),
}


@pytest.mark.parametrize("lie", list(LIES))
async def test_a_target_that_lies_fails_alone(lie):
    steps, text = LIES[lie]
    report, _, _ = await told(steps, own=True)
    assert report.committed == [""]
    assert text in report.failed["liar"], report.failed


async def test_nobody_is_made_to_write_to_another_s_memory():
    """The region is a third engine's, which has given it to somebody else."""
    report, memory, foreign = await told(lambda lent: [Step("lent", [1], lent, PLACES)], own=False)
    assert WRONG["another engine's"] in report.failed["liar"]
    assert not foreign.any()
    np.testing.assert_array_equal(memory, np.arange(64))


CLAIMS = WRONG | {"too short": "leaves its", "revoked": "revoked"}
"""What is said of memory that is not as claimed; a tensor has to end within it, however long that is."""


@pytest.mark.parametrize("how", CLAIMS)
async def test_memory_that_is_not_as_claimed_fails_its_target_alone(how):
    report, memory, foreign = await told(lambda lent: [Step("lent", [1], lent, PLACES)], own=True, how=how)
    assert report.committed == [""]
    assert re.search(CLAIMS[how], report.failed["liar"]), report.failed
    assert not foreign.any()
    np.testing.assert_array_equal(memory, np.arange(64))


async def test_a_target_that_falls_silent_fails_alone_and_by_the_limit():
    report, memory, _ = await told(lambda lent: [Step("lent", [1], lent, PLACES)], own=True, limit=5.0)
    assert report.committed == [""]
    assert "it did not have every byte 5.0 s (limit) after the sources had ended" in report.failed["liar"]
    np.testing.assert_array_equal(memory, np.arange(64))


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        "5",
        '{"shardings":[[["x"],[]]],"ranks":[],"tensors":{}}',
        '{"shardings":[[[Infinity],[]]],"ranks":[],"tensors":{}}',
        '{"shardings":[],"ranks":[],"tensors":[1]}',
    ],
    ids=lambda text: text[:30],
)
def test_a_layout_that_is_none_is_refused(text):
    with pytest.raises(aiote.UsageError, match="not the description of a layout"):
        layout_of(np.frombuffer(text.encode(), np.uint8))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"shardings":[' + "[]," * (LAYOUT_BYTES // 3) + "[]]}", "as JSON, expected at most"),
        ('{"shardings":[' + "[]," * 1000 + "[]]}", "not the description of a layout"),
        ('{"shardings":[[[' + "1," * 40 + "1],[]]],...", "length <= 32"),
    ],
    ids=["long", "empty", "many dimensions"],
)
def test_a_layout_does_not_become_many_objects(text, says):
    with pytest.raises(aiote.UsageError, match=says):
        layout_of(np.frombuffer(text.encode(), np.uint8))


async def told(steps: Callable[[Any], list[Step]], *, own: bool, limit: float = 60.0, how: str = "") -> Any:
    """Update an honest replica and one that lies."""
    values, memory, foreign = np.arange(64, dtype=np.float32), np.zeros(64, np.float32), np.zeros(64, np.float32)
    theirs = Layout.over([1], {"a": ((64,), "F32", Replicate())})
    async with AsyncExitStack() as stack:
        one, honest, liar, third, mine = [await stack.enter_async_context(opened("sim")) for _ in range(5)]
        await stack.enter_async_context(serve_source(one, LAYOUT, 0, {"a": values}))
        await stack.enter_async_context(serve_target(honest, LAYOUT, 0, {"a": memory}))
        region = (liar if own else third).register(foreign)
        descriptor = region.descriptor
        if how == "revoked":
            async with region.lease(slice(None), one.address) as lease:
                descriptor = lease.descriptor
        elif how:
            descriptor = claimed(how, descriptor, liar.address, third.address)
        await stack.enter_async_context(service.serve(liar, Lying(steps, theirs, descriptor)))
        controller = Controller(mine, [one.address], [honest.address, liar.address], limit=limit)
        report = await controller.update(1)
    return report, memory, foreign


async def test_a_rank_that_describes_another_s_tensors_is_refused():
    async with opened("sim") as one, opened("sim") as liar, opened("sim") as mine:
        values = {"a": np.zeros(64, np.float32)}
        async with (
            serve_source(one, LAYOUT, 0, values),
            service.serve(liar, Lying(lambda lent: [], LAYOUT)),
        ):
            with pytest.raises(aiote.UsageError, match="rank 1: the layout has other ranks' parts"):
                await Controller(mine, [one.address], [liar.address]).prepare()


async def test_arrays_that_cannot_be_written_are_refused_by_a_target():
    fixed = np.zeros(64, np.float32)
    fixed.flags.writeable = False
    async with opened("sim") as engine:
        with pytest.raises(aiote.UsageError, match="a: the array is read-only"):
            async with serve_target(engine, LAYOUT, 0, {"a": fixed}):
                pass
        async with serve_source(engine, LAYOUT, 0, {"a": fixed}):
            pass
        for serve in serve_source, serve_target:
            with pytest.raises(aiote.UsageError, match="a: the array: it has a mask"):
                async with serve(engine, LAYOUT, 0, {"a": np.ma.zeros(64, np.float32)}):
                    pass
