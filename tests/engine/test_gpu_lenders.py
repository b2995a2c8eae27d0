"""GPU memory of every library is a region: what each offers is enough, and none is asked for more than it gives."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import aiote
from support.engines.opening import across, linked
from support.gpu.lenders import LENDERS, TorchFloat8
from support.gpu.standin_cuda import captured, new_stream, standin_path
from support.rails.rail_pair import filled

pytestmark = pytest.mark.libfabric

SIZE = 70_000
gpus = functools.partial(linked, libcuda=standin_path())
each_lender = pytest.mark.parametrize("library", LENDERS)


@each_lender
@pytest.mark.parametrize("provider", ["local", "socket"])
@pytest.mark.parametrize("device", [0, 1])
async def test_bytes_go_from_and_to_arrays_of_every_library(library, provider, device):
    async with gpus(provider) as (left, right):
        source, target = LENDERS[library](SIZE, device), LENDERS[library](SIZE, 1 - device)
        source.seen[:] = filled(SIZE)
        region, remote = left.register(source), across(left, right, target)
        assert region.device == f"cuda:{device}"
        await left.write(region, remote)
        assert np.array_equal(source.seen, target.seen)
        source.seen[:] = 0
        await left.read(remote, region)
        assert np.array_equal(source.seen, target.seen)


@each_lender
async def test_no_lender_is_made_to_order_a_stream_or_breaks_a_capture(library):
    async with gpus("local") as (left, _right):
        lender = LENDERS[library](SIZE)
        with new_stream(blocking=True) as stream, captured(stream) as broken_by_us:
            await left.register(lender).aclose()
            assert not broken_by_us()
        assert set(lender.asked) <= {-1}


@each_lender
async def test_read_only_arrays_are_sources_alone(library):
    async with gpus("local") as (left, right):
        lender = LENDERS[library](64, readonly=True)
        lender.seen[:] = 5
        region, target = left.register(lender), bytearray(64)
        remote = across(left, right, target)
        await left.write(region, remote)
        assert target == b"\5" * 64
        with pytest.raises(aiote.UsageError, match="read-only"):
            await left.read(remote, region)


async def test_what_no_protocol_has_a_name_for_is_refused_with_what_to_do():
    async with gpus("local") as (left, _right):
        with pytest.raises(aiote.UsageError, match=r"float8_e4m3fn.*view it as uint8"):
            left.register(TorchFloat8(64))
