"""The plugins `blocking`, `leaks` and `not_run` catch what they are there for, and nothing else."""

from __future__ import annotations

import sys

import pytest

from support import TESTS
from support.plugins.inner_pytest import INI

PLUGINS = [f"support.plugins.{name}" for name in ("blocking", "leaks", "loops", "not_run")]
OPTIONS = """\
asyncio_debug = true
asyncio_default_fixture_loop_scope = function
markers =
  libfabric
  leaks_allowed
  blocking_allowed
  needs_gpu
  needs_rdma
"""


@pytest.fixture
def outcomes(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs a test module under the plugins and returns each test's outcomes, and the output."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))

    def run(source: str) -> tuple[dict[str, set[str]], str]:
        pytester.makeini(INI + OPTIONS)
        pytester.makeconftest(f"pytest_plugins = {PLUGINS}")
        pytester.makepyfile(source)
        result = pytester.run(sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-rN")
        seen: dict[str, set[str]] = {}
        for line in result.outlines:
            name, _, outcome = line.partition("::")[2].partition(" ")
            if outcome:
                seen.setdefault(name, set()).add(outcome.split()[0])
        return seen, result.stdout.str()

    return run


BLOCKING = """
import asyncio, socket, time
import anyio, anyio.to_thread
from support import TESTS
from support.plugins import blocking
import pytest

# What a step may take is asserted here, by the clock; a loop may tell of a step after the fixtures are torn down.
blocking.slowness = lambda: 1.0
tried = []

def spin(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass

async def test_sleep_on_the_default_loop():
    assert asyncio.get_running_loop().get_debug()
    time.sleep(0.001)

async def test_sleep_swallowed():
    try:
        time.sleep(0.001)
    except BaseException:
        pass

@pytest.fixture
async def sleepy(anyio_backend):
    time.sleep(0.001)

@pytest.mark.anyio
async def test_fixture(sleepy):
    pass

@pytest.mark.anyio
async def test_sleep():
    time.sleep(0.001)

@pytest.mark.anyio
async def test_spin():
    await anyio.sleep(0)
    spin(1.0)
    await anyio.sleep(0)

@pytest.mark.anyio
async def test_socket():
    left, right = socket.socketpair()
    with left, right:
        right.send(b"x")

@pytest.mark.anyio
async def test_resolve():
    socket.getaddrinfo("localhost", 80)

@pytest.mark.anyio
async def test_fine_waits():
    time.sleep(0)
    await anyio.sleep(0.26)
    await anyio.to_thread.run_sync(time.sleep, 0.26)
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        left.send(b"x")

@pytest.mark.anyio
async def test_fine_tcp():
    async def serve(stream):
        async with stream:
            await stream.send(b"x")
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.listeners[0].extra(anyio.abc.SocketAttribute.local_port)
    async with anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            assert await stream.receive() == b"x"
        group.cancel_scope.cancel()
    await listener.aclose()

@pytest.mark.anyio
@pytest.mark.blocking_allowed("on purpose")
async def test_fine_allowed():
    time.sleep(0.001)
    spin(0.5)

@pytest.mark.anyio
async def test_fine_on_a_slow_machine(monkeypatch):
    monkeypatch.setattr(blocking, "slowness", lambda: 20.0)
    spin(0.5)
    await anyio.sleep(0)

@pytest.mark.anyio
async def test_fine_the_second_time(request):
    if request.node.name not in tried:
        tried.append(request.node.name)
        spin(0.5)
        await anyio.sleep(0)

def test_fine_without_a_loop():
    time.sleep(0.3)

@pytest.mark.anyio
async def test_once_with_an_error_of_its_own(request):
    spin(1.0)
    if request.node.name not in tried:
        tried.append(request.node.name)
        raise ValueError
"""


def test_blocking_is_caught_on_every_loop(outcomes):
    seen, output = outcomes(BLOCKING)
    for name, found in seen.items():
        if name.startswith("test_fine"):
            assert found == {"PASSED"}, output
        elif name.startswith("test_fixture"):
            assert "ERROR" in found, output
        elif name.startswith("test_once"):
            assert found == {"FAILED", "ERROR"}, output
        else:
            assert found == {"FAILED"}, output
    assert {name.partition("[")[2] for name in seen if name.startswith("test_spin")} == {"asyncio]", "uvloop]", "trio]"}
    assert len(seen) == 3 + 3 * 11


LEAKS = """
import os, threading
from support import TESTS
from support.plugins import leaks
import pytest

leaks.GRACE_S = 0.3
ended = threading.Event()
kept = []

@pytest.fixture(scope="module")
def shared():
    read, write = os.pipe()
    yield
    os.close(read)
    os.close(write)

@pytest.mark.libfabric
def test_fine_closes(shared):
    read, write = os.pipe()
    os.close(read)
    os.close(write)

@pytest.mark.libfabric
def test_descriptor(shared):
    kept.append(os.pipe())

@pytest.mark.libfabric
def test_thread():
    thread = threading.Thread(target=ended.wait, daemon=True)
    kept.append(thread)
    thread.start()

@pytest.mark.libfabric
@pytest.mark.leaks_allowed("on purpose")
def test_fine_allowed():
    kept.append(os.pipe())

def test_fine_unmarked():
    kept.append(os.pipe())

@pytest.mark.needs_gpu
def test_gpu():
    pytest.skip("no kernel for it")

def test_end():
    ended.set()
"""


def test_leaks_are_caught_and_skips_are_told(outcomes):
    seen, output = outcomes(LEAKS)
    assert seen["test_descriptor"] == {"PASSED", "ERROR"}, output
    assert seen["test_thread"] == {"PASSED", "ERROR"}, output
    assert {name for name, found in seen.items() if "ERROR" not in found and name != "test_gpu"} == {
        "test_fine_closes",
        "test_fine_allowed",
        "test_fine_unmarked",
        "test_end",
    }
    assert "NOT RUN ON THIS MACHINE: 1" in output
    assert "1 x  no " in output
