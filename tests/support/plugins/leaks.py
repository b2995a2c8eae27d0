"""A pytest plugin: a test marked `libfabric` leaves no file descriptor and no thread behind.

The baseline is taken after fixtures of wider scope were made and before the test's own. Native threads count as well.
`leaks_allowed(reason)` exempts one test.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker

import pytest
import uvloop

import aiote
from support.gpu.hardware_cuda import ON_GPU
from support.gpu.standin_cuda import driver
from support.process import open_resources as leftovers

GRACE_S = 20.0


def descriptors() -> dict[int, str]:
    """Return every open descriptor with what it leads to, without the one that `multiprocessing` keeps for good, and
    without those of CUDA's driver: of memory that the stand-in has given a test, or of a real GPU.
    """
    kept = getattr(resource_tracker._resource_tracker, "_fd", None)
    drivers = ("/memfd:gpu ", "/dev/nvidia")
    return {fd: to for fd, to in leftovers.descriptors().items() if fd != kept and not to.startswith(drivers)}


def threads() -> dict[int, str]:
    """Return every thread of the process by its kernel id, without those of the loops' own pools: trio keeps idle ones
    for ten seconds, asyncio as many as it once needed at a time.
    """
    cached = {
        thread.native_id for thread in threading.enumerate() if thread.name.startswith(("Trio thread", "asyncio_"))
    }
    return {
        number: comm
        for number, comm in leftovers.threads().items()
        if number not in cached and comm != "standin-default" and not comm.startswith("cuda")
    }


def left_behind(fds: dict[int, str], tasks: dict[int, str]) -> list[str]:
    """Return what is open now and was not in the two baselines, after giving late closers a grace period."""
    until = time.monotonic() + GRACE_S
    while True:
        gc.collect()
        now_fds, now_tasks = descriptors(), threads()
        found = [leftovers.described(fd, to) for fd, to in now_fds.items() if fds.get(fd) != to]
        found += [f"thread {number} ({comm})" for number, comm in now_tasks.items() if number not in tasks]
        if not found or (len(now_fds) <= len(fds) and len(now_tasks) <= len(tasks)):
            return []
        if time.monotonic() > until:
            return found
        time.sleep(0.02)


async def _open_engine() -> None:
    async with aiote.open_engine("tcp"):
        pass


@pytest.fixture(scope="session")
def process_wide() -> None:
    """Make what is made once and kept: uvloop's signal pipe and the threads that resolve names; libfabric's providers.

    libfabric 1.17 takes half a second for these, which no test's loop is to be blamed for.
    """
    loop = uvloop.new_event_loop()
    loop.run_until_complete(loop.getaddrinfo("localhost", 1))
    loop.close()
    asyncio.run(_open_engine())
    if ON_GPU:
        driver()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test's teardown on descriptors or threads that it left behind."""
    if not request.node.get_closest_marker("libfabric") or request.node.get_closest_marker("leaks_allowed"):
        yield
        return
    request.getfixturevalue("process_wide")
    fds, tasks = descriptors(), threads()
    yield
    if found := left_behind(fds, tasks):
        pytest.fail("left behind by the test:\n  " + "\n  ".join(sorted(found)), pytrace=False)
