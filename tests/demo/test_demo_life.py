"""What a server waits for: the first of several things."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from aiote.demo.life import first_of
from support.engines.opening import PATIENCE_S

pytestmark = pytest.mark.anyio


async def test_the_first_task_to_end_cancels_the_others():
    ended = []

    async def quick():
        await anyio.lowlevel.checkpoint()

    async def endless():
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("endless")

    with anyio.fail_after(PATIENCE_S):
        await first_of(endless, quick)
    assert ended == ["endless"]
