"""What waits in torch's connector: interrupted it ends its transfer, and on the bridge's thread it is refused.

Over a real engine, with stand-ins for torch.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import anyio
import numpy as np
import pytest

import aiote
from aiote.connectors import torch_memory
from support.connectors.tensors import tensor
from support.connectors.torch_stand_in import SIZE, Pair, registered
from support.engines.opening import PATIENCE_S
from support.machine import LONG
from support.process.interrupts import Interrupts, thrown_at
from support.service.bridges import Stubborn, aside, value

STEPS = range(0, 10_000, 1 if LONG else 5)
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """What was interrupted before it had begun is warned of here, and not in another test."""
    yield
    gc.collect()


def over(pair: Pair) -> None:
    """Fail unless no transfer is under way, or begins, and others go on."""
    mine, theirs = pair.local, pair.theirs
    assert all(one.done() for one, _ in pair.transport._under_way())
    mine[:], theirs[:] = 5, 6
    # Others, which need what locks an interrupted thread may have kept.
    assert aside(pair.transport.write, pair.memory.to_view(0, 8), pair.remote) == 0
    assert (mine == 5).all()
    assert (theirs[:8] == 5).all()
    assert (theirs[8:] == 6).all()


def write(pair: Pair) -> None:
    pair.transport.write(pair.memory.to_view(), pair.remote)


def read_within(pair: Pair) -> None:
    pair.transport.read(pair.memory.to_mutable_view(), pair.remote, timeout=PATIENCE_S)


@pytest.mark.parametrize("wait", [write, read_within])
def test_a_transfer_that_is_interrupted_at_any_step_is_over(pair, wait):
    def tried(at: int) -> bool:
        steps = Interrupts(at)
        try:
            with steps.armed():
                wait(pair)
        except KeyboardInterrupt:
            pass
        over(pair)
        return steps.happened

    assert next(at for at in STEPS if not aside(tried, at)) > 50


def test_a_work_that_is_interrupted_at_any_step_is_over(pair):
    def tried(at: int) -> bool:
        steps = Interrupts(at)
        work = pair.transport.write(pair.memory.to_view(), pair.remote, async_op=True)
        try:
            with steps.armed():
                assert work.wait()
        except KeyboardInterrupt:
            # Where it was interrupted before it began to wait, it goes on.
            futures.wait([work._call], PATIENCE_S)
        assert work.is_completed()
        over(pair)
        return steps.happened

    assert next(at for at in itertools.count() if not aside(tried, at)) > 10


async def write_async(pair: Pair) -> None:
    await pair.transport.write_async(pair.memory.to_view(), pair.remote)


async def read_async(pair: Pair) -> None:
    await pair.transport.read_async(pair.memory.to_mutable_view(), pair.remote, timeout=PATIENCE_S)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop", "trio"])
@pytest.mark.parametrize("wait", [write_async, read_async])
def test_an_awaited_transfer_that_is_interrupted_anywhere_is_over(pair, loop, wait):
    async def main() -> int:
        for at in STEPS:
            steps = Interrupts(at, awaited=True)
            try:
                with steps.armed():
                    await wait(pair)
            except KeyboardInterrupt:
                pass
            over(pair)
            if not steps.happened:
                break
        told: list[int] = []
        try:
            await thrown_at(wait(pair), 0, lambda: told.append(1))
        except KeyboardInterrupt:
            assert told
        over(pair)
        return at

    backend = "trio" if loop == "trio" else "asyncio"
    options = {"use_uvloop": True} if loop == "uvloop" else {}
    assert aside(lambda: anyio.run(main, backend=backend, backend_options=options)) > 20


WAITS: dict[str, Callable[[Pair, Any], object]] = {
    "write": lambda pair, _: pair.transport.write(pair.memory.to_view(), pair.remote),
    "read": lambda pair, _: pair.transport.read(pair.memory.to_mutable_view(), pair.remote),
    "wait": lambda _, work: work.wait(),
    "result": lambda _, work: work.result(),
    "synchronize": lambda _, work: work.synchronize(),
    "future": lambda _, work: work.get_future().wait(),
    "register_memory": lambda pair, _: pair.transport.register_memory(tensor(10)),
    "unregister_memory": lambda pair, _: pair.transport.unregister_memory(pair.memory),
    "close": lambda pair, _: pair.transport.close(),
}


def gated(monkeypatch: pytest.MonkeyPatch, transport: Any) -> threading.Event:
    """Hold up the transfers that begin from now on until an event: their callbacks are added before they end."""
    may_move, move = threading.Event(), transport._move

    async def later(*arguments: Any) -> None:
        while not may_move.is_set():
            await asyncio.sleep(0.001)
        await move(*arguments)

    monkeypatch.setattr(transport, "_move", later)
    return may_move


@pytest.mark.parametrize("name", WAITS)
def test_a_callback_of_a_work_that_would_wait_is_refused(pair, monkeypatch, name):
    """It runs on the thread that ends all transfers of the process."""
    transport, view = pair.transport, pair.memory.to_view()
    stubborn, told = Stubborn(), futures.Future[object]()
    with monkeypatch.context() as patched:
        patched.setattr(transport, "_move", lambda *_: stubborn.run())
        other = transport.write(view, pair.remote, async_op=True)
        stubborn.until(stubborn.begun)
    may_move = gated(monkeypatch, transport)

    def callback(_: object) -> None:
        try:
            told.set_result(WAITS[name](pair, other))
        except BaseException as error:
            told.set_exception(error)

    work = transport.write(view, pair.remote, async_op=True)
    work.get_future().add_done_callback(callback)
    may_move.set()
    with pytest.raises(aiote.UsageError, match="the bridge's own thread, which would wait for itself"):
        told.result(PATIENCE_S)
    other._call.cancel()
    stubborn.may_end.set()
    with pytest.raises(futures.CancelledError):
        aside(other.wait)
    # Nothing of what was refused is half done.
    assert aside(transport.write, view, pair.remote) == 0


def test_a_callback_may_begin_a_transfer_while_another_thread_registers(pair, monkeypatch):
    """Whoever registers waits for the thread that callbacks run on."""
    transport, view = pair.transport, pair.memory.to_view()
    second, register = futures.Future[Any](), pair.transport._bridge.register
    began, may_register = threading.Event(), threading.Event()

    def late(*arguments: Any) -> Any:
        began.set()
        assert may_register.wait(PATIENCE_S)
        return register(*arguments)

    monkeypatch.setattr(transport._bridge, "register", late)
    registering = threading.Thread(target=transport.register_memory, args=(tensor(10),))
    registering.start()
    assert began.wait(PATIENCE_S)
    may_move = gated(monkeypatch, transport)
    work = transport.write(view, pair.remote, async_op=True)
    work.get_future().add_done_callback(lambda _: second.set_result(transport.write(view, pair.remote, async_op=True)))
    may_move.set()
    assert aside(second.result(PATIENCE_S).wait)
    may_register.set()
    registering.join(PATIENCE_S)
    assert not registering.is_alive()


def test_a_cancelled_copy_between_two_transports_of_a_process_has_ended(torch, pair, monkeypatch):
    """A thread makes it, which nothing interrupts."""
    a, b = torch.AioteTransport(), torch.AioteTransport()
    aside(a.connect, b.bind())
    source, into = (aside(one.register_memory, tensor(SIZE, number)) for number, one in enumerate((a, b), 1))
    copying, may_copy, copied, copyto = threading.Event(), threading.Event(), [], np.copyto

    def copy(*what: Any) -> None:
        copying.set()
        assert may_copy.wait(PATIENCE_S)
        copyto(*what)
        copied.append(1)

    monkeypatch.setattr(torch_memory.np, "copyto", copy)
    remote = into.to_remote_buffer()

    async def main() -> None:
        writing = asyncio.ensure_future(a.write_async(source.to_view(), remote))
        await asyncio.to_thread(copying.wait, PATIENCE_S)
        writing.cancel()
        for _ in range(50):
            await asyncio.to_thread(pair.bridge.call, value(0))
            assert not writing.done()
        may_copy.set()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert copied

    aside(asyncio.run, main())
    for one in (a, b):
        aside(one.close)


def test_memory_at_the_address_of_freed_memory_is_registered_anew(pair):
    """As FSDP frees a parameter by resizing its storage; torch gives the address to the next tensor."""
    transport, before = pair.transport, registered(pair.bridge)
    freed = tensor(SIZE, 3)
    old = aside(transport.register_memory, freed)
    at, freed.data_ptr = freed.ctypes.data, lambda: 0
    with pytest.raises(RuntimeError, match="was resized or its storage was replaced"):
        old.to_view()
    again = tensor(SIZE, 4)
    again.data_ptr = lambda: at
    new = aside(transport.register_memory, again)
    assert new.registration is not old.registration
    assert not old.registration.active
    assert aside(transport.register_memory, again).registration is new.registration
    aside(transport.write, new.to_view(0, 1), pair.remote)
    # An old handle ends nobody else's registration.
    aside(transport.unregister_memory, old)
    assert new.to_view().size() == SIZE
    aside(transport.unregister_memory, new)
    assert registered(pair.bridge) == before
