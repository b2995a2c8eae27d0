"""Register memory of the host program, once for all holders of the same memory.

Tensors of one storage share its registration. While a registration is held or kept, it keeps the memory's owner alive,
so no other memory can lie at its address. (A finalizer of the owner would come too late: the NIC may write to the
memory until the registration has ended, which takes a turn of another thread.) A storage can move while it lives,
because it can be resized, as FSDP does. So the address of a storage is checked again before its registration is shared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

import numpy

from ..errors import UsageError
from ..rails import acquire as borrow
from ..transfers import Registrations, SharedRegistration

if TYPE_CHECKING:
    from types import TracebackType

    import aiote

    from ..rails import AcquiredBuffer
    from ..transfers import Access
    from .bridge import Bridge

__all__ = ["EngineRegistrations", "MemorySource", "Registration"]

Key = tuple[int, int, bool, str]
MAX_KEPT = 4096
"""The most registrations that are kept without a holder: as many as a large model has parameters."""


class Storage:
    """The storage of a tensor as an array of bytes, because no protocol has names for all of torch's dtypes."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if not address:
            raise UsageError(
                "register: the tensor has no memory of its own; for a DTensor, register what .to_local() returns"
            )
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, False)}

    def lies_at(self, address: int, nbytes: int) -> bool:
        """Tell whether the storage still has this address and size, so was not resized."""
        return (self._storage.data_ptr(), self._storage.nbytes()) == (address, nbytes)


class MemorySource:
    """The object to register for some memory, and the bytes of it that the caller means."""

    def __init__(self, memory: Any, access: Access) -> None:
        """Determine the object and the bytes. Raises UsageError if `memory` is not contiguous memory."""
        self.storage: Storage | None = None
        self.access: Access = access
        self.whole, start, length = memory, 0, None
        if hasattr(memory, "untyped_storage") and memory.device.type == "cpu":
            start, length = self._take_storage(memory)
        try:
            buffer = self._borrow()
        except (TypeError, ValueError, BufferError) as error:
            raise UsageError(f"register: {error}") from error
        self.key: Key = (buffer.address, buffer.nbytes, not buffer.readonly, access)
        self.bytes = slice(start, start + (buffer.nbytes if length is None else length))
        buffer.release()

    def _take_storage(self, tensor: Any) -> tuple[int, int]:
        """Choose the storage of a tensor for the registration; return the tensor's offset and length in bytes.

        This module does not import torch.
        """
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise UsageError("register: the tensor is not contiguous: register what .contiguous() returns")
        self.storage = Storage(tensor.untyped_storage())
        self.whole = numpy.asarray(self.storage)
        # Do not compute the offset from the tensor's own address: an empty tensor has none.
        return tensor.storage_offset() * tensor.element_size(), tensor.numel() * tensor.element_size()

    def _borrow(self) -> AcquiredBuffer:
        try:
            return borrow(self.whole)
        except TypeError:
            if not hasattr(self.whole, "__array_interface__"):
                raise
            self.whole = numpy.asarray(self.whole)
            return borrow(self.whole)


class EngineRegistrations:
    """The registrations of one engine; used only on its loop's thread."""

    def __init__(self, engine: aiote.Engine, kept_bytes: int) -> None:
        self._engine = engine
        self._table = Registrations(kept_bytes, MAX_KEPT)
        self._registering: dict[Key, asyncio.Event] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def hold(self, source: MemorySource) -> SharedRegistration:
        """Register some memory, or share its registration. Raises what `Engine.register_async` raises."""
        while True:
            while (making := self._registering.get(source.key)) is not None:
                await making.wait()
            held = self._table.hold(source.key)
            if held is None:
                return await self._make(source)
            if in_place(held):
                return held
            self._table.forget(held)
            await self.let_go(held)

    async def _make(self, source: MemorySource) -> SharedRegistration:
        made = self._registering[source.key] = asyncio.Event()
        try:
            region = await self._engine.register_async(source.whole, source.access)
        finally:
            del self._registering[source.key]
            made.set()
        return self._table.add(source.key, region, source.storage)

    async def let_go(self, held: SharedRegistration) -> None:
        """Remove a holder. If it was the last, keep the registration if no peer may have its keys; otherwise end it."""
        await self._close(self._table.let_go(held, keep=held.key[3] == "local" and in_place(held)))

    async def trim(self, nbytes: int) -> None:
        """End registrations without holders until the others without holders have at most `nbytes` bytes."""
        await self._close(self._table.trim(nbytes))

    async def _close(self, regions: Iterable[aiote.Region]) -> None:
        """Close regions and wait for that; if the wait is cancelled, the closing continues."""
        tasks = [asyncio.ensure_future(region.aclose()) for region in regions]
        for task in tasks:
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for task in tasks:
            await asyncio.shield(task)

    async def aclose(self) -> None:
        """Wait until the regions that are being closed are closed; the end of the engine closes the others."""
        await asyncio.gather(*self._closing)


def in_place(held: SharedRegistration) -> bool:
    """Tell whether a registration's memory still has the same address and size."""
    return held.lender is None or held.lender.lies_at(*held.key[:2])


class Registration:
    """Memory that stays registered until this is closed; a context manager, and an asynchronous one, that closes it.

    Made by `Bridge.register`. `region` is the memory for coroutines on the bridge; a peer attaches `descriptor`. The
    memory must not be resized, moved or unmapped while it is registered. If a Registration is dropped without `close`,
    it is closed, with a ResourceWarning.
    """

    def __init__(self, bridge: Bridge, number: int, shared: SharedRegistration, region: aiote.Region) -> None:
        self._bridge, self.number, self.shared = bridge, number, shared
        self._region = region
        self._descriptor = region.descriptor if shared.key[3] != "local" else b""

    @property
    def region(self) -> aiote.Region:
        """The bytes of the memory, for transfers on the bridge's engine. Raises ClosedError."""
        self._bridge.require_held(self.number)
        return self._region

    @property
    def descriptor(self) -> bytes:
        """The bytes that a peer passes to `Engine.attach`. Raises ClosedError, and UsageError if access is "local"."""
        return self._descriptor or self.region.descriptor

    def close(self) -> None:
        """Stop holding the memory. If this was its last holder, wait for the transfers that use it and end its
        registration.

        A registration with access "local", whose keys no peer has, may be kept for the next caller that registers that
        memory. Call this from any thread but the bridge's. Idempotent.
        """
        self._bridge.close_registration(self.number)

    async def aclose(self) -> None:
        """Stop holding the memory as `close` does, on any event loop. If this is cancelled, the closing continues."""
        await self._bridge.aclose_registration(self.number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # If `__init__` was interrupted, there is nothing to close.
        if "number" in vars(self):
            self._bridge.drop_registration(self.number)
