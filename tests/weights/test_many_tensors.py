"""Models of as many tensors as real ones have: no message grows with their number."""

from __future__ import annotations

import numpy as np
import pytest

from aiote.service import codec
from aiote.weights import Controller, Layout, Recipe, Replicate, serve_source, serve_target
from aiote.weights.protocol import Descriptors, Step, Update, WriteTarget
from support.engines.opening import opened
from support.machine import LONG

# What is tried is the same on every loop.
pytestmark = [pytest.mark.anyio] if LONG else []

MANY, FEW = 20_000 if LONG else 5000, 200


async def test_an_update_of_many_tensors():
    heads = ["model" if number < FEW else "rest" for number in range(MANY)]
    names = [f"{head}.layers.{i // 300}.mlp.experts.{i % 300}.down_proj.weight" for i, head in enumerate(heads)]
    layout = Layout.over([0], {name: ((3,), "F32", Replicate()) for name in names})
    values = np.arange(MANY * 3, dtype=np.float32).reshape(MANY, 3)
    memory = np.zeros_like(values)
    # In another order, so that where each lies matters.
    there = dict(zip(reversed(names), memory, strict=True))
    # Few of them are written: what is tried is what all ranks tell each other of all tensors.
    recipe = Recipe(unused=("rest.*",), untouched=("rest.*",))
    async with opened("sim") as one, opened("sim") as other, opened("sim") as own:
        async with (
            serve_source(one, layout, 0, dict(zip(names, values, strict=True)), recipe),
            serve_target(other, layout, 0, there, versions="inplace"),
        ):
            await Controller(own, [one.address], [other.address], recipe).update(1)
            np.testing.assert_array_equal(memory[-FEW:], values[:FEW][::-1])
            assert not memory[:-FEW].any()


def test_what_says_where_tensors_lie_is_arrays():
    descriptors = [bytes([number % 251]) * (100 + number % 3) for number in range(MANY)]
    places = np.zeros((MANY, 2), np.uint64)
    packed = Descriptors.of(descriptors)
    assert packed.unpacked(MANY) == descriptors
    for said in (Step("lent", 1, packed, places), WriteTarget(0, "", 1, packed, bytes(16), places), Update(1, 1)):
        assert len(codec.encode(said)[0]) < 1000
