"""Weights in memory of GPUs, on the stand-in for the driver: every byte of an update is as on the CPU."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import aiote
from aiote import gpu
from aiote.weights import Controller, Layout, Recipe, Replicate, Shard, serve_source, serve_target, source
from support.engines.opening import opened
from support.gpu.standin_cuda import (
    Adopted,
    GpuArray,
    broken,
    driver,
    failing,
    gpu_copy,
    launched,
    new_stream,
    paced,
    standin_path,
)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    driver()
    monkeypatch.setenv("AIOTE_LIBCUDA", standin_path())


CONVERTED = {
    "cast": (Recipe({"w": source("w").cast("F16")}), "F16", np.float16),
    "transposed": (Recipe({"w": source("w").permute(1, 0)}), "F32", np.float32),
}


@pytest.mark.parametrize("what", CONVERTED)
@pytest.mark.parametrize("ends", ["gpu to gpu", "gpu to host", "host to gpu"])
async def test_what_is_converted_on_its_way_comes_from_and_goes_to_gpus(what, ends):
    recipe, dtype, kind = CONVERTED[what]
    layout = Layout.over([0], {"w": ((48, 48), "F32", Shard(0))})
    there = Layout.over([0], {"w": ((48, 48), dtype, Replicate())})
    values = np.arange(48 * 48, dtype=np.float32).reshape(48, 48) % 509
    got = np.zeros((48, 48), kind)
    near, far = ends.split(" to ")
    async with opened("local") as one, opened("local") as other, opened("local") as own:
        async with (
            serve_source(one, layout, 0, {"w": Adopted(values) if near == "gpu" else values}, recipe),
            serve_target(other, there, 0, {"w": Adopted(got, 1) if far == "gpu" else got}, versions="inplace"),
        ):
            await Controller(own, [one.address], [other.address], recipe).update(1)
    assert np.array_equal(got, values.astype(kind) if what == "cast" else values.T)


def filled(value: int) -> Any:
    return np.full(5000, value, np.uint8)


@pytest.mark.parametrize("pair", ["gpu to host", "host to gpu", "gpu to gpu"])
def test_a_copy_is_behind_the_kernels_and_over_when_it_returns(pair):
    near, far = pair.split(" to ")
    source_array = gpu_copy(filled(1)) if near == "gpu" else filled(9)
    target = GpuArray(5000) if far == "gpu" else filled(0)
    with new_stream(blocking=True) as stream:
        if near == "gpu":
            launched(source_array, 9, 4000, stream)
        gpu.copy(target, source_array)
    assert (getattr(target, "seen", target) == 9).all()


def test_a_copy_of_what_is_no_pair_is_refused_and_a_failure_is_told():
    there = GpuArray(5000)
    for wrong in ((filled(0), filled(0)), (GpuArray(10), filled(0)), (bytes(5000), there), (5, there)):
        with pytest.raises(aiote.UsageError, match="copy: "):
            gpu.copy(*wrong)
    # An engine of an earlier test may not have been collected yet.
    gc.collect()
    kept = driver().standin_contexts(), driver().standin_events()
    for name in ("cuMemcpyAsync", "cuEventCreate", "cuPointerGetAttribute", "cuCtxPushCurrent_v2"):
        with failing(name), pytest.raises(aiote.FabricError, match="CUDA_ERROR_OUT_OF_MEMORY"):
            gpu.copy(there, filled(1))
    for name in ("cuEventRecord", "cuEventQuery", "cuCtxPopCurrent_v2"):
        # The copy is under way then: it is over when this returns, all the same.
        with failing(name), paced(500):
            gpu.copy(there, filled(3))
        assert (there.seen == 3).all()
        there.seen[:] = 0
    with broken(), pytest.raises(aiote.FabricError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        gpu.copy(there, filled(1))
    assert (driver().standin_contexts(), driver().standin_events()) == kept
