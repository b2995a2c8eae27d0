"""Engines for tests: opened alone and in pairs, with memory on both sides; and scripts in processes of their own."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest

import aiote
from aiote.machine.ports import read_ports
from aiote.testing import Fabric
from support.gpu.standin_cuda import adopted, driver, paced, standin_path
from support.machine import SLOWER

FORKS = "ignore:This process (pid=:DeprecationWarning"
"""An option for -W. Since Python 3.12 a fork warns of threads; a test compares what its program writes."""
UNTRIED = "ignore:provider='efa' was never:RuntimeWarning"
"""The same for a program that opens an engine on `efa`. Python would drop this if PYTHONWARNINGS had the same text."""
PATIENCE_S = 60 * SLOWER**0.25
"""A test that takes longer hangs."""

LOST_SOON = {"heartbeat_interval": 0.25 * SLOWER**0.5, "heartbeat_timeout": 2.0 * SLOWER**0.5}
"""For who waits until a silent peer is lost: soon, and yet longer than a busy machine keeps a live one from running."""

UNHURRIED = {"heartbeat_timeout": 10.0, "drain_timeout": 10.0}
"""Limits for who is not about them: a machine may stand still for longer than by default."""

PROVED = [each for each in ("efa",) if os.environ.get("PROVE_OVER") == each]
"""What `aiote prove` runs the tests over, unless they run over it anyway."""
each_provider = pytest.mark.parametrize("provider", ["tcp", "shm", "local", "socket", "sim", "verbs", *PROVED])
real_provider = pytest.mark.parametrize("provider", ["tcp", "shm", "local", "socket", "verbs", *PROVED])
"""For what is about other processes or the system's own resources."""
served_by_process = pytest.mark.parametrize("provider", ["tcp", "shm", "local", "socket"])
"""For what a stopped process keeps from being done: where there are NICs, its own answers for it."""
each_memory = pytest.mark.parametrize(
    "provider", ["tcp", "shm", "local", "socket", "sim", "verbs", "local+cuda", "socket+cuda", *PROVED]
)
"""As `each_provider`, and with what is registered in memory of two GPUs, on the stand-in for their driver."""
each_progress = pytest.mark.parametrize("progress", ["adaptive", "thread"])
two_kinds = pytest.mark.parametrize(("provider", "progress"), [("tcp", "adaptive"), ("shm", "thread")])
"""For scripts, which take half a second each with libfabric 1.17."""

FENCE = 0x5E771ED
"""The immediate of `round_trips`."""

_fabrics: list[Fabric] = []
_devices = itertools.count()


def fabric() -> Fabric:
    """Return the simulated network of the running test."""
    if not _fabrics:
        _fabrics.append(Fabric(seed=1, rails=4))
    return _fabrics[0]


@pytest.fixture(autouse=True)
def no_fabric_stays() -> Iterator[None]:
    yield
    while _fabrics:
        _fabrics.pop().close()


@pytest.fixture(autouse=True)
def gpus_are_there(request: pytest.FixtureRequest) -> None:
    """Compile and load the stand-in before the loop runs, where a test or its module uses it."""
    chosen = getattr(getattr(request.node, "callspec", None), "params", {})
    used = any(getattr(value, "__module__", "") == driver.__module__ for value in vars(request.module).values())
    if used or str(chosen.get("provider")).endswith("+cuda"):
        driver()


@functools.cache
def ports() -> Iterator[str]:
    """Yield the RDMA ports of this machine in turn, so that two engines of a test are on two of them."""
    return itertools.cycle(port.name for port in read_ports() if port.up)


def opened(provider: str, rails: list[str] | None = None, **settings: Any) -> Any:
    """Open an engine whose config has these settings; a simulated one on the running test's network. The others wait
    longer than by default for what a busy machine delays.
    """
    if provider.endswith("+cuda"):
        return on_gpu(provider.removesuffix("+cuda"), rails, **settings)
    if provider == "sim":
        return fabric().open_engine(rails or ["sim0"], aiote.EngineConfig(**settings))
    settings = UNHURRIED | settings
    if provider == "verbs":
        rails = rails or [next(ports())]
    return aiote.open_engine(provider, rails, aiote.EngineConfig(**settings))


@asynccontextmanager
async def on_gpu(provider: str, rails: list[str] | None, **settings: Any) -> AsyncIterator[aiote.Engine]:
    """Open an engine that has each array of the host's for memory of a GPU, of another one than the engine before."""
    device = next(_devices) % 2
    with paced(1):
        async with opened(provider, rails, libcuda=standin_path(), **settings) as engine:
            register, slowly = engine.register, engine.register_async
            engine.register = lambda array, *more: register(adopted(array, device), *more)  # type: ignore[method-assign]
            engine.register_async = lambda array, *more: slowly(adopted(array, device), *more)  # type: ignore[method-assign]
            yield engine


@asynccontextmanager
async def pair(
    provider: str, rails: list[str] | None = None, **settings: Any
) -> AsyncIterator[tuple[aiote.Engine, aiote.Engine]]:
    """Open two engines with the same settings, and bound the time of what is done with them."""
    with anyio.fail_after(PATIENCE_S):
        async with opened(provider, rails, **settings) as left, opened(provider, rails, **settings) as right:
            yield left, right


@asynccontextmanager
async def linked(
    provider: str, rails: list[str] | None = None, **settings: Any
) -> AsyncIterator[tuple[aiote.Engine, aiote.Engine]]:
    """Open two engines that are connected."""
    async with pair(provider, rails, **settings) as (left, right):
        await left.connect(right.address)
        yield left, right


def noise(size: int, seed: int = 1) -> np.ndarray:
    """Return bytes that are drawn."""
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def across(user: aiote.Engine, owner: aiote.Engine, memory: Any) -> aiote.RemoteRegion:
    """Register memory with its owner and attach it at its user."""
    return user.attach(owner.register(memory).descriptor)


async def served_on(engine: aiote.Engine, other: aiote.Engine) -> None:
    """Check that another peer of the engine is served as if nothing had been."""
    memory = bytearray(1 << 16)
    source, target = engine.register(b"s" * (1 << 16)), other.register(memory)
    await engine.write_imm(source, engine.attach(target.descriptor), 3)
    await other.counter(3).wait(1)
    assert memory == b"s" * (1 << 16)
    await other.send(engine.address, b"fine")
    assert (await engine.recv()).data == b"fine"
    await source.aclose()
    await target.aclose()


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until something holds."""
    while not condition():
        await anyio.sleep(0.001)


async def go_round(count: int = 20) -> None:
    """Let the loop go round so often: whatever is ready has run, and what waits has come to where it waits."""
    for _ in range(count):
        await anyio.sleep(0)


async def round_trips(one: aiote.Engine, other: aiote.Engine, count: int = 5) -> None:
    """Let two connected engines do what they have to: what does not happen meanwhile, does not happen."""
    with one.counter(FENCE) as here, other.counter(FENCE) as there:
        for _ in range(count):
            await one.write_imm(None, other.address, FENCE)
            await there.wait(1)
            await other.write_imm(None, one.address, FENCE)
            await here.wait(1)


def run_script(text: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python text in a process of its own and return what it said; a hang fails the test."""
    return subprocess.run(
        [sys.executable, "-P", "-W", "default", "-W", FORKS, "-W", UNTRIED, "-c", textwrap.dedent(text), *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
