"""torch's `torch.distributed._transport.Transport`: one-sided reads and writes between tensors on the CPU, over aiote.

torch finds this module by its entry point: `new_transport("aiote", "cpu")`. All transports of a process share the
bridge's engine. A transport moves no data unless asked; it has one peer, and refuses descriptors of any other. An
engine has no connection to itself, so a thread copies between two transports of one process. See docs/connectors.md.

A transfer with `async_op`, and an awaited one, is a call on the bridge; the call is done when the NIC no longer uses
the tensors. torch represents it by a `Work`, whose timeout ends only the wait, as torch defines it. Without `async_op`
the calling thread posts the transfer and waits for it (`Bridge.write`), without the bridge's loop. The timeout of such
a wait, and of an awaited transfer, cancels the transfer. (Timeouts are parameters here because torch has them; our own
API has none.)
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable
from concurrent import futures
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import anyio
import torch
from torch.distributed import Work
from torch.distributed._transport import Transport, wait_all

from .. import bridge as bridges
from ..aio import in_thread
from ..core.address import Address
from ..core.descriptor import RegionDescriptor
from .torch_memory import (
    AioteMemory,
    AioteMemoryView,
    AioteMutableMemoryView,
    AioteRemoteBuffer,
    TensorRegistration,
    TransportEndpoint,
    Use,
    check_seconds,
    registered_here,
)

if TYPE_CHECKING:
    from ..transfers import RemoteRegion

__all__ = ["AioteMemory", "AioteMemoryView", "AioteMutableMemoryView", "AioteRemoteBuffer", "AioteTransport"]

LOOK_S = 0.001
"""Seconds between two checks of `close_async` whether other threads have ended their transfers."""
MOST_REACHED = 256
"""How many attached regions of the peer a transport caches; a region that is both written and read counts twice."""


class _Future(torch.futures.Future):  # type: ignore[misc]
    """The future of a `Work`."""

    def __init__(self, call: bridges.Call[None]) -> None:
        super().__init__()
        self._call = call

    def wait(self) -> list[torch.Tensor]:
        """Wait as torch does; a signal does not interrupt it. Raises UsageError on the bridge's own thread."""
        self._call.require_elsewhere()
        ended: list[torch.Tensor] = super().wait()
        return ended


class AioteWork(Work):  # type: ignore[misc]
    """A transfer in flight.

    Callbacks of `get_future()` run on the bridge's thread, where every call that would wait raises UsageError; they may
    begin transfers with `async_op`.
    """

    def __init__(self, call: bridges.Call[None], timeout: float | None) -> None:
        super().__init__()
        self._call, self._timeout = call, timeout
        self._future = _Future(call)
        call.add_done_callback(self._settle)

    def _settle(self, _: object) -> None:
        error = self.exception()
        if error is None:
            self._future.set_result([])
        else:
            self._future.set_exception(error)

    def is_completed(self) -> bool:
        """Return whether the transfer has ended, successfully or not."""
        return self._call.done()

    def is_success(self) -> bool:
        """Return whether the transfer has succeeded."""
        return self._call.done() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of the transfer, None if it has not failed."""
        if not self._call.done():
            return None
        try:
            return self._call.exception()
        except futures.CancelledError as error:
            return error

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the transfer has ended. Raises its error, and TimeoutError if it is still in flight: wait again.

        timeout: zero means the transfer's own timeout, or no limit if it has none. An interruption of the wait (Ctrl-C)
        cancels the transfer, and is raised once that has ended. Raises UsageError on the bridge's own thread.
        """
        seconds: float | None = timeout.total_seconds()
        check_seconds(seconds)
        if not self._call.wait_ended(seconds or self._timeout):
            raise TimeoutError("transport wait timed out; operation remains pending")
        if (error := self.exception()) is not None:
            raise error
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future that ends with the transfer, even if no loop runs; its result is an empty list."""
        return self._future

    def result(self) -> list[torch.Tensor]:
        """Wait for the transfer; return an empty list of tensors."""
        self.wait()
        return []

    def synchronize(self) -> None:
        """Wait for the transfer."""
        self.wait()


class AioteTransport(Transport):  # type: ignore[misc]
    """One end of a pair of transports; made by `new_transport("aiote", "cpu", **settings)`.

    timeout: seconds, the default for all operations. It may be None, without a limit, because a lost peer ends the
    transfers to it. settings are those of `aiote.bridge.acquire`; they apply to the whole process.
    """

    def __init__(
        self, device: torch.device | str | None = None, *, timeout: float | None = None, **settings: Any
    ) -> None:
        super().__init__(device)
        if self.device is not None and self.device.type != "cpu":
            raise ValueError("the aiote transport moves tensors on the CPU")
        check_seconds(timeout)
        self._default_timeout = timeout
        self._bridge = bridges.acquire(**settings)
        self._address = self._bridge.engine.address
        self.endpoint = secrets.token_hex(8)
        self._peer: tuple[TransportEndpoint, Address, Any] | None = None
        self._registrations: dict[tuple[int, int], TensorRegistration] = {}
        self._pending: dict[bridges.Call[None], TensorRegistration] = {}
        self._uses: dict[Use, TensorRegistration] = {}
        self._reached: dict[tuple[bytes, bool], RemoteRegion] = {}
        self._lock = threading.RLock()
        self._closing = False

    @staticmethod
    def supported() -> bool:
        """Return True: the transport can be used everywhere."""
        return True

    def _require_open(self) -> None:
        if self._closing:
            raise RuntimeError("transport is closed")

    # The peer.

    def bind(self, *, timeout: float | None = None) -> bytes:
        """Return this transport's address, which the peer's `connect` takes. Raises UsageError in a forked child."""
        check_seconds(timeout)
        self._require_open()
        return TransportEndpoint(self.endpoint, str(self._bridge.engine.address)).serialize()

    def connect(self, peer_url: bytes, *, timeout: float | None = None) -> int:
        """Connect to a bound peer; return 0. Raises ValueError for bytes not from `bind`, PeerError, TimeoutError."""
        timeout = self._limit(timeout)
        self._require_open()
        if self._peer is not None:
            raise RuntimeError("transport is already connected")
        url = TransportEndpoint.deserialize(peer_url)
        address = Address.parse(url.address)
        peer = None
        if address.identity != self._address.identity:
            peer = self._bridge.call(self._bridge.engine.connect(address), timeout)
        self._peer = url, address, peer
        return 0

    def connected(self) -> bool:
        """Return whether the transport has a peer that is not lost."""
        if self._peer is None or self._closing:
            return False
        return self._peer[2] is None or bool(self._peer[2].connected)

    # Memory.

    def register_memory(self, tensor: torch.Tensor, *, timeout: float | None = None) -> AioteMemory:
        """Register a contiguous tensor. Raises TypeError if it is no tensor, ValueError if not contiguous, or empty."""
        check_seconds(timeout)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError("tensor must be a torch.Tensor")
        if not tensor.is_contiguous():
            raise ValueError("the aiote transport requires a contiguous tensor")
        if tensor.numel() == 0:
            raise ValueError("cannot register an empty tensor")
        self._check_device(tensor.device)
        registration = self._shared_registration(tensor)
        while registration is None:
            # Register without our lock, because callbacks on the bridge's thread may wait for it.
            held = self._bridge.register(tensor, "read-write")
            with self._lock:
                self._require_open()
                if (registration := self._shared_registration(tensor)) is None:
                    registration = TensorRegistration(tensor, held, self.endpoint)
                    self._registrations[registration.key] = registration
            if registration.held is not held:
                held.close()
        return AioteMemory(self, registration)

    def _shared_registration(self, tensor: torch.Tensor) -> TensorRegistration | None:
        """Return the registration of a tensor's memory, if there is one; drop it if its own tensor has moved."""
        with self._lock:
            self._require_open()
            registration = self._registrations.get((tensor.data_ptr(), tensor.numel() * tensor.element_size()))
            if registration is None or registration.in_place:
                return registration
            self._bridge.require_elsewhere()
            del self._registrations[registration.key]
        registration.end()
        registration.held.close()
        return None

    def unregister_memory(self, memory: Any, *, timeout: float | None = None) -> None:
        """End a registration for all that share it; peers can use it no longer. Idempotent.

        Raises RuntimeError while transfers of this transport use it, UsageError on the bridge's own thread.
        """
        check_seconds(timeout)
        if not isinstance(memory, AioteMemory) or memory.transport is not self:
            raise TypeError("memory was not registered by this transport")
        self._bridge.require_elsewhere()
        with self._lock:
            self._require_open()
            registration = memory.registration
            if any(used is registration and not one.done() for one, used in self._under_way()):
                raise RuntimeError("memory has pending transfers; wait before unregistering")
            if self._registrations.get(registration.key) is registration:
                del self._registrations[registration.key]
        registration.end()
        registration.held.close()

    # Transfers.

    def _under_way(self) -> list[tuple[bridges.Call[None] | Use, TensorRegistration]]:
        """Return the transfers that may still be in flight, and the memory that each uses."""
        return [*self._pending.items(), *self._uses.items()]

    def _limit(self, timeout: float | None) -> float | None:
        check_seconds(timeout)
        return self._default_timeout if timeout is None else timeout

    def _check_transfer(self, local_buffer: Any, remote_buffer: Any, *, mutable: bool) -> None:
        """Raise TypeError, ValueError or RuntimeError if no transfer between the two is possible."""
        wanted = AioteMutableMemoryView if mutable else AioteMemoryView
        if not isinstance(local_buffer, wanted) or local_buffer.memory.transport is not self:
            raise TypeError(
                "local_buffer was not registered by this transport, or is read-only; register a writable one"
            )
        if not isinstance(remote_buffer, AioteRemoteBuffer):
            raise TypeError("remote_buffer does not come from an aiote transport; expected one that the peer exported")
        described = RegionDescriptor.from_bytes(remote_buffer.descriptor)
        peer = self._peer
        if peer is None or (peer[0].endpoint, peer[1]) != (remote_buffer.endpoint, described.owner):
            raise ValueError("remote buffer does not belong to the connected peer")
        if local_buffer.size() > described.length:
            raise ValueError("local view does not fit in the remote buffer")
        local_buffer.memory.registration.require_active()

    def _prepare(
        self, local: AioteMemoryView, remote: AioteRemoteBuffer, *, mutable: bool, limit: float | None = None
    ) -> tuple[bridges.Call[None], Callable[[], None]]:
        """Return a transfer, which cancels itself after `limit` seconds, and a function that begins it."""
        with self._lock:
            self._require_open()
            self._check_transfer(local, remote, mutable=mutable)
        call = self._bridge.prepare(self._move_within(limit, local, remote, mutable))
        call.add_done_callback(lambda _: self._pending.pop(call, None))

        def begin() -> None:
            with self._lock:
                self._require_open()
                local.memory.registration.require_active()
                self._pending[call] = local.memory.registration
            call.start()

        return call, begin

    async def _move_within(
        self, limit: float | None, local: AioteMemoryView, remote: AioteRemoteBuffer, mutable: bool
    ) -> None:
        with anyio.move_on_after(limit):
            await self._move(local, remote, mutable)
            return
        raise _late(limit, local, mutable)

    async def _move(self, local: AioteMemoryView, remote: AioteRemoteBuffer, mutable: bool) -> None:
        registration, count = local.memory.registration, local.size()
        if not count:
            return
        assert self._peer is not None
        if self._peer[2] is None:
            theirs = registered_here.get((remote.endpoint, remote.descriptor))
            if theirs is None:
                raise RuntimeError("the peer has unregistered this memory")
            # A thread cannot be interrupted, so a cancellation is raised when the copy has ended.
            await in_thread(partial(theirs.exchange, registration.bytes[local.range], read=mutable))
            return
        engine = self._bridge.engine
        lent = engine.attach(remote.descriptor, owner=self._peer[2], access="read" if mutable else "write")
        here, there = registration.held.region[local.range], lent[:count]
        await (engine.read(there, here) if mutable else engine.write(here, there))

    def _run(self, local: Any, remote: Any, *, mutable: bool, async_op: bool, timeout: float | None) -> int | AioteWork:
        timeout = self._limit(timeout)
        if async_op:
            call, begin = self._prepare(local, remote, mutable=mutable)
            try:
                begin()
            except BaseException:
                call.cancel()
                raise
            return AioteWork(call, timeout)
        self._bridge.require_elsewhere()
        if self._peer is not None and self._peer[2] is not None:
            self._transfer(local, remote, mutable, timeout)
        else:
            call, begin = self._prepare(local, remote, mutable=mutable, limit=timeout)
            call.wait(begin)
        return 0

    def _transfer(
        self, local: AioteMemoryView, remote: AioteRemoteBuffer, mutable: bool, timeout: float | None
    ) -> None:
        """Post a transfer to another process from the calling thread, and wait for it there."""
        with self._lock:
            self._require_open()
            self._check_transfer(local, remote, mutable=mutable)
            assert self._peer is not None
            peer = self._peer[2]
        if not local.size():
            return
        registration, use = local.memory.registration, Use()
        here, there = registration.held.region[local.range], self._attach_remote(peer, remote, mutable)[: local.size()]
        try:
            with use.under_way:
                with self._lock:
                    self._require_open()
                    registration.require_active()
                    self._uses[use] = registration
                if mutable:
                    self._bridge.read(there, here, timeout)
                else:
                    self._bridge.write(here, there, timeout)
        except TimeoutError:
            raise _late(timeout, local, mutable) from None
        finally:
            self._uses.pop(use, None)

    def _attach_remote(self, peer: Any, remote: AioteRemoteBuffer, mutable: bool) -> RemoteRegion:
        """Return the peer's memory as a region that the engine has attached; regions are cached."""
        key = remote.descriptor, mutable
        if (known := self._reached.get(key)) is None:
            access: Literal["read", "write"] = "read" if mutable else "write"
            known = self._bridge.attach(remote.descriptor, owner=peer, access=access)
            if len(self._reached) >= MOST_REACHED:
                self._reached.clear()
            self._reached[key] = known
        return known

    def write(
        self, local_buffer: Any, remote_buffer: Any, *, async_op: bool = False, timeout: float | None = None
    ) -> int | AioteWork:
        """Write a local view to the first bytes of the remote memory; return 0, or with `async_op` a Work.

        Without `async_op` a timeout cancels the transfer, and TimeoutError is raised once the buffer is the caller's
        again; the same holds for an interruption (Ctrl-C). Raises TransferError and PeerError if the peer is lost, and
        UsageError on the bridge's own thread.
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
        """Write a local view as `write` does. After a cancellation or a timeout, raise once the write has drained."""
        call, begin = self._prepare(local_buffer, remote_buffer, mutable=False, limit=self._limit(timeout))
        await call.join(begin)

    async def read_async(
        self,
        local_buffer: Any,
        remote_buffer: Any,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> None:
        """Read into a local view as `read` does. After a cancellation or a timeout, raise once the read has drained."""
        call, begin = self._prepare(local_buffer, remote_buffer, mutable=True, limit=self._limit(timeout))
        await call.join(begin)

    # Closing.

    def _begin_close(self) -> tuple[list[AioteWork], list[Use]]:
        with self._lock:
            self._closing = True
            works = [AioteWork(call, None) for call in tuple(self._pending) if not call.done()]
            return works, list(self._uses)

    def _forget(self) -> list[bridges.Registration]:
        with self._lock:
            ended = list(self._registrations.values())
            self._registrations.clear()
            self._peer = None
        for registration in ended:
            registration.end()
        return [registration.held for registration in ended]

    async def _others_end(self, uses: list[Use], timeout: float | None) -> None:  # noqa: ASYNC109
        """Wait until the transfers that other threads wait for have ended. Raises TimeoutError."""
        with anyio.fail_after(timeout):
            while not all(one.done() for one in uses):  # noqa: ASYNC110 - threads end them
                await anyio.sleep(LOOK_S)

    def close(self, *, timeout: float | None = None) -> None:
        """Wait for the transfers in flight, then release all memory, the peer and the bridge. Idempotent.

        Raises TimeoutError if they last longer; it may then be called again, as after an interruption. After releasing
        everything it raises the error of a failed transfer that no thread was waiting for. Raises UsageError on the
        bridge's own thread.
        """
        timeout = self._limit(timeout)
        self._bridge.require_elsewhere()
        works, uses = self._begin_close()
        end = math.inf if timeout is None else time.monotonic() + timeout
        ending: list[bridges.Call[None] | Use] = [*uses, *(work._call for work in works)]
        for one in ending:
            if not one.wait_within(_seconds_left(end)):
                raise TimeoutError("transport close timed out; operations remain pending")
        for held in self._forget():
            held.close()
        self._bridge.close()
        for work in works:
            work.wait()

    async def close_async(self, *, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Close as `close` does, without blocking the event loop. After a cancellation it may be called again."""
        timeout = self._limit(timeout)
        self._bridge.require_elsewhere()
        (works, uses), error = self._begin_close(), None
        end = math.inf if timeout is None else time.monotonic() + timeout
        await self._others_end(uses, timeout)
        try:
            await wait_all(works, timeout=_seconds_left(end))
        except Exception as failure:
            if not all(work.is_completed() for work in works):
                raise
            error = failure
        # Do this in a thread, because it waits while another transport of this process copies.
        for held in await in_thread(self._forget):
            await held.aclose()
        await self._bridge.aclose()
        if error is not None:
            raise error


def _late(limit: float | None, local: AioteMemoryView, mutable: bool) -> TimeoutError:
    """Return the error of a transfer that its own timeout has cancelled."""
    return TimeoutError(
        f"the {'read' if mutable else 'write'} of {local.size()} bytes did not end within {limit} s and was "
        "cancelled; the transport no longer uses the tensor"
    )


def _seconds_left(end: float) -> float | None:
    """Return the seconds until a moment of `time.monotonic`, None without an end."""
    return None if end == math.inf else max(end - time.monotonic(), 0)
