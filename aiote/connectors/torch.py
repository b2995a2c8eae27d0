"""torch's `torch.distributed._transport.Transport`: one-sided reads and writes between tensors on the CPU, over aiote.

torch finds it by its entry point: `new_transport("aiote", "cpu")`. All transports of a process share the bridge's
engine. A transport moves nothing by itself; it has one peer, and refuses descriptors of any other. An engine has no
connection to itself, so between two transports of one process a thread copies. See docs/connectors.md.

Each transfer is a call on the bridge, which is done when the NIC uses the tensors no more. `Work` is what torch makes
of that; its timeout ends the wait alone, as torch has it. What is awaited, or called without `async_op`, ends the
transfer itself. (Time-outs are parameters, which our own API has nowhere, because torch has them.)
"""

from __future__ import annotations

import math
import operator
import secrets
import threading
import weakref
from concurrent import futures
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Literal, Self

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import torch
from torch.distributed import Work
from torch.distributed._transport import Transport, wait_all

from .. import bridge as bridges
from ..core.address import Address
from ..core.descriptor import RegionDescriptor
from .views import bytes_at

__all__ = ["AioteMemory", "AioteMemoryView", "AioteMutableMemoryView", "AioteRemoteBuffer", "AioteTransport"]

_here: weakref.WeakValueDictionary[tuple[str, bytes], _Registration] = weakref.WeakValueDictionary()
"""This process's registrations by transport and descriptor, for peers in it; a dropped transport's go with it."""


def _seconds(timeout: float | None) -> None:
    """Raise ValueError for what is no time-out."""
    if timeout is not None and not (0 <= timeout < math.inf):
        raise ValueError("timeout must be finite and nonnegative")


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What peers exchange: JSON with a tag for each kind, bytes in base64."""

    version: Literal[1] = 1

    def serialize(self) -> bytes:
        """Return the bytes that `deserialize` reads."""
        return msgspec.json.encode(self)

    @classmethod
    def deserialize(cls, data: bytes) -> Self:
        """Return what was serialized. Raises TypeError for what are no bytes, ValueError for other ones."""
        if type(data) is not bytes:
            raise TypeError("a serialized descriptor is bytes")
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise ValueError(f"malformed descriptor: {error}") from error


class _Url(_Wire, frozen=True, tag="aiote-endpoint"):
    """Where a transport is: its engine's address, and which of that engine's transports."""

    endpoint: str
    address: str


class AioteRemoteBuffer(_Wire, frozen=True, tag="aiote-memory"):
    """What a peer needs to reach registered memory; an engine's descriptor, and whose transport's it is."""

    endpoint: str
    descriptor: bytes

    def __post_init__(self) -> None:
        RegionDescriptor.from_bytes(self.descriptor)


class _Registration:
    """A tensor's registration with a transport, which all who register that tensor share."""

    def __init__(self, tensor: torch.Tensor, held: bridges.Registration, endpoint: str) -> None:
        self.tensor, self.held, self.active = tensor, held, True
        self.address, self.length = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        self.key = self.address, self.length
        self.bytes = bytes_at(tensor)
        self._name = endpoint, held.descriptor
        self._copying = threading.Lock()
        _here[self._name] = self

    def require_active(self) -> None:
        """Raise RuntimeError where the memory is unregistered, or is no longer the tensor's."""
        if not self.active:
            raise RuntimeError("memory has been unregistered")
        if (self.tensor.data_ptr(), self.tensor.numel() * self.tensor.element_size()) != self.key:
            raise RuntimeError("registered tensor was resized or its storage was replaced")

    def exchange(self, local: np.ndarray[Any, np.dtype[np.uint8]], *, read: bool) -> None:
        """Copy the first bytes to or from a transport of this process, in a thread; `end` waits for that."""
        with self._copying:
            self.require_active()
            ends = local, self.bytes[: local.size]
            np.copyto(*(ends if read else reversed(ends)))

    def end(self) -> None:
        """Let no peer of this process find it any more; return when none copies from or to it."""
        _here.pop(self._name, None)
        with self._copying:
            self.active = False


class AioteMemoryView:
    """A range of bytes of registered memory."""

    def __init__(self, memory: AioteMemory, offset: int, length: int) -> None:
        self.memory, self.range = memory, slice(offset, offset + length)

    def size(self) -> int:
        """Return its length in bytes."""
        return self.range.stop - self.range.start


class AioteMutableMemoryView(AioteMemoryView):
    """A range of bytes of registered memory that may be read into."""

    writable: Literal[True] = True


class AioteMemory:
    """A tensor registered with a transport; made by `AioteTransport.register_memory`."""

    def __init__(self, transport: AioteTransport, registration: _Registration) -> None:
        self.transport, self.registration = transport, registration

    def _range(self, offset: int | None, length: int | None) -> tuple[int, int]:
        self.registration.require_active()
        whole = self.registration.length
        start = 0 if offset is None else operator.index(offset)
        if not 0 <= start <= whole:
            raise ValueError("offset is outside the registered memory")
        count = whole - start if length is None else operator.index(length)
        if not 0 <= count <= whole - start:
            raise ValueError("view exceeds the registered memory")
        return start, count

    def to_view(self, offset: int | None = None, length: int | None = None) -> AioteMemoryView:
        """Return a range of bytes that may be written from. Raises ValueError for one outside of the memory."""
        return AioteMemoryView(self, *self._range(offset, length))

    def to_mutable_view(self, offset: int | None = None, length: int | None = None) -> AioteMutableMemoryView:
        """Return a range of bytes that may be read into. Raises ValueError for one outside of the memory."""
        return AioteMutableMemoryView(self, *self._range(offset, length))

    def to_remote_buffer(self, *, timeout: float | None = None) -> AioteRemoteBuffer:
        """Return what the peer needs to reach the memory; transfers begin at its first byte."""
        _seconds(timeout)
        self.registration.require_active()
        return AioteRemoteBuffer(self.transport.endpoint, self.registration.held.descriptor)


class AioteWork(Work):  # type: ignore[misc]
    """A transfer under way. Callbacks of `get_future()` run on the bridge's thread and must not wait there."""

    def __init__(self, call: bridges.Call[None], timeout: float | None) -> None:
        super().__init__()
        self._call, self._timeout = call, timeout
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        call.add_done_callback(self._settle)

    def _settle(self, _: object) -> None:
        error = self.exception()
        if error is None:
            self._future.set_result([])
        else:
            self._future.set_exception(error)

    def is_completed(self) -> bool:
        """Tell whether the transfer has ended, well or not."""
        return self._call.done()

    def is_success(self) -> bool:
        """Tell whether it has ended well."""
        return self._call.done() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return what it failed with, None while it has not."""
        if not self._call.done():
            return None
        try:
            return self._call.exception()
        except futures.CancelledError as error:
            return error

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until it has ended. Raises its error, and TimeoutError where it is still under way: wait again then.

        timeout: zero for the transfer's own, without one for ever.
        """
        seconds: float | None = timeout.total_seconds()
        _seconds(seconds)
        with suppress(Exception):
            self._call.result(seconds or self._timeout)
        if not self._call.done():
            raise TimeoutError("transport wait timed out; operation remains pending")
        if (error := self.exception()) is not None:
            raise error
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future that ends with the transfer, whether or not a loop runs; its result is an empty list."""
        return self._future

    def result(self) -> list[torch.Tensor]:
        """Wait for it and return no tensors."""
        self.wait()
        return []

    def synchronize(self) -> None:
        """Wait for it."""
        self.wait()


class AioteTransport(Transport):  # type: ignore[misc]
    """One end of a pair; made by `new_transport("aiote", "cpu", **settings)`.

    timeout: seconds, the default of all operations; None has none, because a lost peer ends what waits for it. settings
    are those of `aiote.bridge.acquire`, for all of the process.
    """

    def __init__(
        self, device: torch.device | str | None = None, *, timeout: float | None = None, **settings: Any
    ) -> None:
        super().__init__(device)
        if self.device is not None and self.device.type != "cpu":
            raise ValueError("the aiote transport moves tensors on the CPU")
        _seconds(timeout)
        self._default_timeout = timeout
        self._bridge = bridges.acquire(**settings)
        self._address = self._bridge.engine.address
        self.endpoint = secrets.token_hex(8)
        self._peer: tuple[_Url, Address, Any] | None = None
        self._registrations: dict[tuple[int, int], _Registration] = {}
        self._pending: dict[bridges.Call[None], _Registration] = {}
        self._lock = threading.RLock()
        self._closing = False

    @staticmethod
    def supported() -> bool:
        """Tell whether it can be used here, which it always can."""
        return True

    def _require_open(self) -> None:
        if self._closing:
            raise RuntimeError("transport is closed")

    # The peer.

    def bind(self, *, timeout: float | None = None) -> bytes:
        """Return where this transport is, for the peer's `connect`. Raises UsageError in a forked child."""
        _seconds(timeout)
        self._require_open()
        return _Url(self.endpoint, str(self._bridge.engine.address)).serialize()

    def connect(self, peer_url: bytes, *, timeout: float | None = None) -> int:
        """Connect to a bound peer; 0. Raises ValueError for bytes that are no peer's, PeerError, TimeoutError."""
        timeout = self._limit(timeout)
        self._require_open()
        if self._peer is not None:
            raise RuntimeError("transport is already connected")
        url = _Url.deserialize(peer_url)
        address = Address.parse(url.address)
        peer = None
        if address.identity != self._address.identity:
            peer = self._bridge.call(self._bridge.engine.connect(address), timeout)
        self._peer = url, address, peer
        return 0

    def connected(self) -> bool:
        """Tell whether there is a peer, and it is not lost."""
        if self._peer is None or self._closing:
            return False
        return self._peer[2] is None or bool(self._peer[2].connected)

    # Memory.

    def register_memory(self, tensor: torch.Tensor, *, timeout: float | None = None) -> AioteMemory:
        """Register a contiguous tensor. Raises TypeError and ValueError for what is none, or is empty."""
        _seconds(timeout)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError("tensor must be a torch.Tensor")
        if not tensor.is_contiguous():
            raise ValueError("the aiote transport requires a contiguous tensor")
        if tensor.numel() == 0:
            raise ValueError("cannot register an empty tensor")
        self._check_device(tensor.device)
        with self._lock:
            self._require_open()
            registration = self._registrations.get((tensor.data_ptr(), tensor.numel() * tensor.element_size()))
            if registration is None:
                registration = _Registration(tensor, self._bridge.register(tensor, "read-write"), self.endpoint)
                self._registrations[registration.key] = registration
        return AioteMemory(self, registration)

    def unregister_memory(self, memory: Any, *, timeout: float | None = None) -> None:
        """End a registration for all who share it; peers can use it no longer. Once more does nothing.

        Raises RuntimeError while transfers of this transport use it.
        """
        _seconds(timeout)
        if not isinstance(memory, AioteMemory) or memory.transport is not self:
            raise TypeError("memory was not registered by this transport")
        with self._lock:
            self._require_open()
            registration = memory.registration
            if not registration.active:
                return
            if any(used is registration and not call.done() for call, used in tuple(self._pending.items())):
                raise RuntimeError("memory has pending transfers; wait before unregistering")
            registration.end()
            del self._registrations[registration.key]
        registration.held.close()

    # Transfers.

    def _limit(self, timeout: float | None) -> float | None:
        _seconds(timeout)
        return self._default_timeout if timeout is None else timeout

    def _check_transfer(self, local_buffer: Any, remote_buffer: Any, *, mutable: bool) -> None:
        """Raise TypeError, ValueError or RuntimeError where a transfer between the two cannot be."""
        wanted = AioteMutableMemoryView if mutable else AioteMemoryView
        if not isinstance(local_buffer, wanted) or local_buffer.memory.transport is not self:
            raise TypeError("local_buffer was not registered by this transport, or may not be written to")
        if not isinstance(remote_buffer, AioteRemoteBuffer):
            raise TypeError("remote_buffer is not of an aiote transport")
        described = RegionDescriptor.from_bytes(remote_buffer.descriptor)
        peer = self._peer
        if peer is None or (peer[0].endpoint, peer[1]) != (remote_buffer.endpoint, described.owner):
            raise ValueError("remote buffer does not belong to the connected peer")
        if local_buffer.size() > described.length:
            raise ValueError("local view does not fit in the remote buffer")
        local_buffer.memory.registration.require_active()

    def _start(
        self, local: AioteMemoryView, remote: AioteRemoteBuffer, *, mutable: bool, limit: float | None = None
    ) -> bridges.Call[None]:
        """Start a transfer, which ends itself after `limit` seconds."""
        with self._lock:
            self._require_open()
            self._check_transfer(local, remote, mutable=mutable)
            call = self._bridge.submit(self._move_within(limit, local, remote, mutable))
            self._pending[call] = local.memory.registration
        call.add_done_callback(lambda _: self._pending.pop(call, None))
        return call

    async def _move_within(
        self, limit: float | None, local: AioteMemoryView, remote: AioteRemoteBuffer, mutable: bool
    ) -> None:
        with anyio.fail_after(limit):
            await self._move(local, remote, mutable)

    async def _move(self, local: AioteMemoryView, remote: AioteRemoteBuffer, mutable: bool) -> None:
        registration, count = local.memory.registration, local.size()
        if not count:
            return
        assert self._peer is not None
        if self._peer[2] is None:
            theirs = _here.get((remote.endpoint, remote.descriptor))
            if theirs is None:
                raise RuntimeError("the peer has unregistered this memory")
            # A thread cannot be interrupted: a cancellation is raised when the copy is made.
            await anyio.to_thread.run_sync(partial(theirs.exchange, registration.bytes[local.range], read=mutable))
            return
        engine = self._bridge.engine
        here, there = registration.held.region[local.range], engine.attach(remote.descriptor)[:count]
        await (engine.read(there, here) if mutable else engine.write(here, there))

    def _run(self, local: Any, remote: Any, *, mutable: bool, async_op: bool, timeout: float | None) -> int | AioteWork:
        timeout = self._limit(timeout)
        if async_op:
            return AioteWork(self._start(local, remote, mutable=mutable), timeout)
        self._start(local, remote, mutable=mutable, limit=timeout).wait()
        return 0

    def write(
        self, local_buffer: Any, remote_buffer: Any, *, async_op: bool = False, timeout: float | None = None
    ) -> int | AioteWork:
        """Write a local view to the first bytes of the remote memory; 0, or with `async_op` a Work.

        Without `async_op` a time-out cancels the transfer, and TimeoutError is raised once the buffer is the caller's
        again. Raises TransferError and PeerError where the peer is lost.
        """
        return self._run(local_buffer, remote_buffer, mutable=False, async_op=async_op, timeout=timeout)

    def read(
        self, local_buffer: Any, remote_buffer: Any, *, async_op: bool = False, timeout: float | None = None
    ) -> int | AioteWork:
        """Read the first bytes of the remote memory into a local view; otherwise as `write`."""
        return self._run(local_buffer, remote_buffer, mutable=True, async_op=async_op, timeout=timeout)

    async def write_async(
        self,
        local_buffer: Any,
        remote_buffer: Any,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> None:
        """Write a local view as `write` does. A cancelled one, or one that timed out, has drained when it raises."""
        await self._start(local_buffer, remote_buffer, mutable=False, limit=self._limit(timeout)).join()

    async def read_async(
        self,
        local_buffer: Any,
        remote_buffer: Any,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> None:
        """Read into a local view as `read` does. A cancelled one, or one that timed out, has drained when it raises."""
        await self._start(local_buffer, remote_buffer, mutable=True, limit=self._limit(timeout)).join()

    # The end.

    def _begin_close(self) -> list[AioteWork]:
        with self._lock:
            self._closing = True
            return [AioteWork(call, None) for call in tuple(self._pending)]

    def _forget(self) -> list[bridges.Registration]:
        with self._lock:
            ended = list(self._registrations.values())
            self._registrations.clear()
            self._peer = None
        for registration in ended:
            registration.end()
        return [registration.held for registration in ended]

    def close(self, *, timeout: float | None = None) -> None:
        """Wait for the transfers under way and let go of everything; idempotent.

        Raises TimeoutError where they last longer, and may be called again then; raises what one of them failed with
        once everything is let go of.
        """
        timeout = self._limit(timeout)
        works = self._begin_close()
        if futures.wait([work._call for work in works], timeout).not_done:
            raise TimeoutError("transport close timed out; operations remain pending")
        for held in self._forget():
            held.close()
        self._bridge.close()
        for work in works:
            work.wait()

    async def close_async(self, *, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Close as `close` does, without holding the loop. A cancelled one may be called again."""
        timeout = self._limit(timeout)
        works, error = self._begin_close(), None
        try:
            await wait_all(works, timeout=timeout)
        except Exception as failure:
            if not all(work.is_completed() for work in works):
                raise
            error = failure
        # In a thread: another transport of this process may be copying.
        for held in await anyio.to_thread.run_sync(self._forget):
            await held.aclose()
        await self._bridge.aclose()
        if error is not None:
            raise error
