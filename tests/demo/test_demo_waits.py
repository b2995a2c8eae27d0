"""Waiting for the first of several things."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from aiote.cli.demo.waits import first_of

pytestmark = pytest.mark.anyio


async def test_the_first_ends_the_others():
    ended = []

    async def quick():
        await anyio.lowlevel.checkpoint()

    async def endless():
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("endless")

    with anyio.fail_after(5):
        await first_of(endless, quick)
    assert ended == ["endless"]
