"""Prefillers in processes of their own that are killed and stopped: nothing of theirs lands too late.

At a few moments, for a process takes its time to start; at all of them in virtual time, in test_transfer_faults.py.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import anyio
import anyio.to_thread
import numpy as np
import pytest

from aiote.kvcache import PrefillError
from engines import LOST_SOON, PATIENCE_S, opened, served_by_process, until
from kv_harm import Child
from kvcaches import decode_rank

pytestmark = [pytest.mark.anyio, pytest.mark.libfabric, pytest.mark.one_library]

PROMPT = np.arange(37) + 3
PAGES = 32
LAYER_S = 0.01
"""Five chunks of three layers: a request takes 150 ms at least."""
LIMITS = {"stall_limit": 2 * LOST_SOON["heartbeat_timeout"], "confirm_limit": LOST_SOON["heartbeat_timeout"]}


@pytest.fixture
def prefills(request: pytest.FixtureRequest) -> Iterator[list[Child]]:
    """One process, or as many as are asked for; started before the loop runs, for that blocks."""
    provider = request.getfixturevalue("provider")
    made = [Child("prefill_process.py", provider, LAYER_S) for _ in range(getattr(request, "param", 1))]
    yield made
    for prefill in made:
        prefill.end()


def open_engine(provider: str):
    return lambda: opened(provider, **LOST_SOON)


@served_by_process
@pytest.mark.parametrize(
    ("how", "moment"),
    # Before anything can be there, when something is, and near the end, when the first layer is whole.
    [(signal.SIGKILL, "early"), (signal.SIGKILL, "middle"), (signal.SIGKILL, "late"), (signal.SIGSTOP, "middle")],
    ids=["killed-early", "killed", "killed-late", "stopped"],
)
@pytest.mark.parametrize("prefills", [2], indirect=True, ids=["two"])
async def test_a_request_of_a_killed_or_stopped_prefiller_is_done_by_another(provider, prefills, how, moment):
    """Whenever it happens, the cache that the other one wrote is whole, and stays so when the first one wakes up."""
    victim, spare = prefills
    with anyio.fail_after(PATIENCE_S):
        async with decode_rank(open_engine(provider), pages=PAGES, tail_bytes=24, **LIMITS) as decode:
            decoder = decode.decoder
            async with decoder.request(PROMPT, [victim.address], alternatives=[[spare.address]]) as slot:
                if moment == "middle":
                    await until(decode.memory.any)
                elif moment == "late":
                    await anext(slot.layers())
                victim.signal(how)
                await slot.arrived()
                decode.check(slot)
                if how == signal.SIGSTOP:
                    victim.signal(signal.SIGCONT)
                    await anyio.sleep(0.3)
                decode.check(slot)
            await at_rest(decoder)
            before = decode.memory.copy()
            await anyio.sleep(0.1)
            assert np.array_equal(decode.memory, before)


@served_by_process
async def test_a_request_without_another_prefiller_fails_with_its_reason_and_frees_its_pages(provider, prefills):
    (victim,) = prefills
    with anyio.fail_after(PATIENCE_S):
        async with decode_rank(open_engine(provider), pages=PAGES, **LIMITS) as decode:
            with pytest.raises(PrefillError) as told:
                async with decode.decoder.request(PROMPT, [victim.address]) as slot:
                    async for _layer in slot.layers():
                        victim.signal(signal.SIGKILL)
            assert told.value.reasons
            await at_rest(decode.decoder)
            decode.memory[:] = 0xEE
            await anyio.sleep(0.1)
            assert (decode.memory == 0xEE).all()


@served_by_process
async def test_a_request_cancelled_while_its_prefiller_is_stopped_gets_no_late_write(provider, prefills):
    """What is given back is filled with poison, and then the prefiller wakes up and goes on."""
    (victim,) = prefills
    with anyio.fail_after(PATIENCE_S):
        async with decode_rank(open_engine(provider), pages=PAGES, stall_limit=PATIENCE_S, confirm_limit=0.2) as decode:
            async with decode.decoder.request(PROMPT, [victim.address]) as slot:
                async for _layer in slot.layers():
                    break
                victim.signal(signal.SIGSTOP)
            await at_rest(decode.decoder)
            decode.memory[:] = 0xEE
            victim.signal(signal.SIGCONT)
            await anyio.sleep(0.5)
            assert (decode.memory == 0xEE).all()


async def at_rest(decoder) -> None:
    """Wait until all pages are nobody's."""
    while decoder.free_pages < PAGES or decoder.requests:
        await anyio.sleep(0.01)
