"""aiote.connectors.torch without torch: over a real engine, with stand-ins for what it uses of torch.

The real one is in programs/hosts.
"""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.connectors.tensors import tensor
from support.connectors.torch_stand_in import SIZE, registered
from support.engines.opening import PATIENCE_S
from support.service.bridges import Stubborn, aside, drop


def test_bytes_go_to_the_peer_and_come_from_it(pair):
    assert aside(pair.transport.write, pair.memory.to_view(0, 100), pair.remote) == 0
    assert pair.theirs.tolist() == [1] * 100 + [2] * (SIZE - 100)
    assert aside(pair.transport.read, pair.memory.to_mutable_view(SIZE - 300, 300), pair.remote) == 0
    assert pair.local.tolist() == [1] * (SIZE - 300) + [1] * 100 + [2] * 200


def test_a_work_ends_with_its_transfer_and_its_future_with_it(pair, monkeypatch):
    gate, move = threading.Event(), pair.transport._move

    async def late(*arguments: Any) -> None:
        while not gate.is_set():
            await asyncio.sleep(0.001)
        await move(*arguments)

    monkeypatch.setattr(pair.transport, "_move", late)
    work = pair.transport.write(pair.memory.to_view(), pair.remote, async_op=True)
    with pytest.raises(TimeoutError, match="remains pending"):
        aside(work.wait, timedelta(seconds=0.01))
    assert not work.is_completed()
    assert not work.get_future().done()
    gate.set()
    assert aside(work.wait)
    assert work.get_future().result(PATIENCE_S) == []
    assert work.is_success()
    assert np.array_equal(pair.theirs, pair.local)


def test_a_cancelled_transfer_has_ended_when_it_raises(pair, monkeypatch):
    stubborn = Stubborn()
    monkeypatch.setattr(pair.transport, "_move", lambda *_: stubborn.run())

    async def cancel() -> None:
        writing = asyncio.ensure_future(pair.transport.write_async(pair.memory.to_view(), pair.remote))
        await asyncio.to_thread(stubborn.until, stubborn.begun)
        writing.cancel()
        await asyncio.to_thread(stubborn.until, stubborn.cancelled)
        await asyncio.sleep(0.05)
        assert not writing.done()
        with pytest.raises(RuntimeError, match="pending transfers"):
            pair.transport.unregister_memory(pair.memory)
        stubborn.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert stubborn.ended

    aside(asyncio.run, cancel())
    aside(pair.transport.unregister_memory, pair.memory)


@pytest.mark.parametrize("name", ["write", "read"])
def test_an_awaited_transfer_that_times_out_has_ended_when_it_raises(pair, monkeypatch, name):
    stubborn = Stubborn()
    monkeypatch.setattr(pair.transport, "_move", lambda *_: stubborn.run())
    ended: list[bool] = []

    def transfer() -> None:
        with pytest.raises(TimeoutError, match=rf"the {name} of {SIZE} bytes did not end within 0.01 s"):
            move = getattr(pair.transport, f"{name}_async")
            asyncio.run(move(pair.memory.to_mutable_view(), pair.remote, timeout=0.01))
        ended.append(stubborn.ended)

    def release() -> None:
        stubborn.until(stubborn.cancelled)
        threading.Timer(0.05, stubborn.may_end.set).start()

    releasing = threading.Thread(target=release)
    releasing.start()
    aside(transfer)
    releasing.join()
    assert ended == [True]


def test_a_thread_moves_bytes_without_the_loop(pair, monkeypatch):
    view = pair.memory.to_mutable_view()
    for move in (pair.transport.write, pair.transport.read):
        aside(move, view, pair.remote)
    monkeypatch.setattr(pair.transport._bridge, "_call", None)
    for move in (pair.transport.write, pair.transport.read):
        assert aside(move, view, pair.remote) == 0
    assert aside(pair.transport.write, pair.memory.to_view(0, 0), pair.remote) == 0


class DelayedWrite:
    """Holds a bridge's write up until it may go on, and then makes it, or fails as one that was late."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bridge: Any) -> None:
        self.begun, self.may_end, self.late = threading.Event(), threading.Event(), False
        self._write = bridge.write
        monkeypatch.setattr(bridge, "write", self)

    def __call__(self, *arguments: Any) -> None:
        self.begun.set()
        assert self.may_end.wait(PATIENCE_S)
        if self.late:
            raise TimeoutError("did not end within")
        self._write(*arguments)


@pytest.mark.parametrize("awaited", [False, True], ids=["close", "close_async"])
def test_memory_that_another_thread_is_moving_is_not_let_go_of(pair, monkeypatch, awaited):
    transport, held = pair.transport, DelayedWrite(monkeypatch, pair.transport._bridge)

    def closed(timeout: float | None) -> None:
        if awaited:
            asyncio.run(transport.close_async(timeout=timeout))
        else:
            transport.close(timeout=timeout)

    moving = threading.Thread(target=transport.write, args=(pair.memory.to_view(), pair.remote))
    moving.start()
    assert held.begun.wait(PATIENCE_S)
    with pytest.raises(RuntimeError, match="pending transfers"):
        aside(transport.unregister_memory, pair.memory)
    with pytest.raises(TimeoutError):
        aside(closed, 0.01)
    assert pair.memory.registration.active
    held.may_end.set()
    aside(closed, None)
    moving.join(PATIENCE_S)
    assert not moving.is_alive()
    assert np.array_equal(pair.theirs, pair.local)


def test_a_threads_transfer_that_is_late_says_what_it_was(pair, monkeypatch):
    held = DelayedWrite(monkeypatch, pair.transport._bridge)
    held.late = True
    held.may_end.set()
    with pytest.raises(TimeoutError, match=rf"the write of {SIZE} bytes did not end within {PATIENCE_S} s"):
        aside(partial(pair.transport.write, timeout=PATIENCE_S), pair.memory.to_view(), pair.remote)
    aside(pair.transport.unregister_memory, pair.memory)


@pytest.mark.parametrize("name", ["unregister_memory", "close"])
def test_memory_that_a_thread_copies_to_is_let_go_of_after_the_copy(torch, pair, monkeypatch, name):
    a, b = torch.AioteTransport(), torch.AioteTransport()
    aside(a.connect, b.bind())
    copyto, copying, order = np.copyto, threading.Event(), []
    source, target = (aside(one.register_memory, tensor(SIZE, 1)) for one in (a, b))

    def ended() -> None:
        assert copying.wait(PATIENCE_S)
        getattr(b, name)(*[target][: name == "unregister_memory"])
        order.append("let go")

    def copy(*what: Any) -> None:
        copying.set()
        ending.join(0.2)
        copyto(*what)
        order.append("copied")

    ending = threading.Thread(target=ended)
    ending.start()
    monkeypatch.setattr(np, "copyto", copy)
    remote = target.to_remote_buffer()
    aside(a.write, source.to_view(), remote)
    ending.join(PATIENCE_S)
    assert order == ["copied", "let go"]
    with pytest.raises(RuntimeError, match="unregistered"):
        aside(a.write, source.to_view(), remote)
    for one in (a, b):
        aside(one.close)


def test_other_memory_than_the_peers_is_refused(torch, pair):
    transport, view = pair.transport, pair.memory.to_mutable_view()
    ours = pair.memory.to_remote_buffer()
    for remote in (
        torch.AioteRemoteBuffer("another", pair.descriptor),
        torch.AioteRemoteBuffer("peer", ours.descriptor),
        ours,
    ):
        with pytest.raises(ValueError, match="does not belong to the connected peer"):
            aside(transport.write, view, remote)
    large = aside(transport.register_memory, tensor(SIZE + 1))
    with pytest.raises(ValueError, match="does not fit"):
        aside(transport.write, large.to_view(), pair.remote)
    with pytest.raises(TypeError, match="or is read-only"):
        aside(transport.read, pair.memory.to_view(), pair.remote)
    with pytest.raises(TypeError, match="does not come from an aiote transport"):
        aside(transport.write, view, pair.descriptor)
    assert transport._pending == {}
    assert np.all(pair.theirs == 2)


@given(st.binary() | st.text().map(str.encode))
def test_any_bytes_are_a_descriptor_or_refused(torch, data):
    for kind in (torch.TransportEndpoint, torch.AioteRemoteBuffer):
        with pytest.raises(ValueError, match="malformed descriptor"):
            kind.deserialize(data)
        with pytest.raises(TypeError, match="is bytes"):
            kind.deserialize(bytearray(data))


@given(st.data())
def test_a_changed_descriptor_is_refused_or_says_so_by_its_owner(torch, data):
    url = torch.TransportEndpoint("peer", "aiote://here").serialize()
    at = data.draw(st.integers(0, len(url) - 1))
    changed = url[:at] + bytes([data.draw(st.integers(0, 255))]) + url[at + 1 :]
    try:
        found = torch.TransportEndpoint.deserialize(changed)
    except ValueError as error:
        assert "malformed descriptor" in str(error)
    else:
        assert torch.TransportEndpoint.deserialize(found.serialize()) == found


def test_a_dropped_transport_lets_go_of_its_memory(torch, pair):
    before = registered(pair.bridge), len(torch.registered_here), pair.bridge._thread.users
    made = torch.AioteTransport()
    memory = aside(made.register_memory, tensor(100))
    assert (registered(pair.bridge), len(torch.registered_here)) == (before[0] + 1, before[1] + 1)
    held = [made, memory]
    del made, memory
    drop(held)
    for _ in range(int(PATIENCE_S * 100)):
        if (now := (registered(pair.bridge), len(torch.registered_here), pair.bridge._thread.users)) == before:
            break
        threading.Event().wait(0.01)
    assert now == before
