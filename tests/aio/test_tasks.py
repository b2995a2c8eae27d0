"""Tasks beside a body: what fails there ends the body, and comes out as it is."""

from __future__ import annotations

import anyio
import pytest

from aiote.aio import plain_errors, run_background_tasks

pytestmark = pytest.mark.anyio


async def test_an_error_of_the_background_ends_the_body_and_comes_out_unchanged():
    async def fail() -> None:
        await anyio.sleep(0)
        raise OSError("beside")

    with pytest.raises(OSError, match="beside"):
        async with run_background_tasks(fail):
            await anyio.sleep_forever()


async def test_an_error_of_the_body_comes_out_unchanged():
    with pytest.raises(KeyError):
        async with run_background_tasks(anyio.sleep_forever):
            raise KeyError("mine")
    with anyio.move_on_after(0.01) as scope:
        async with run_background_tasks(anyio.sleep_forever):
            await anyio.sleep_forever()
    assert scope.cancelled_caught


async def test_what_is_started_last_begins_before_it_is_cancelled():
    """What it was handed has to be given back, and nobody else does."""
    begun = []

    async def note() -> None:
        begun.append(True)

    async with run_background_tasks() as scope:
        scope.start(note)
    assert begun


async def test_the_first_error_of_nested_groups_is_raised_as_it_is():
    async def fail() -> None:
        raise OSError("inside")

    with pytest.raises(OSError, match="inside"), plain_errors():
        async with anyio.create_task_group() as outer:

            async def nested() -> None:
                async with anyio.create_task_group() as inner:
                    inner.start_soon(fail)

            outer.start_soon(nested)
