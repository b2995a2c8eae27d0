"""Memory of the host program, registered once for all who hold it.

Tensors of one storage share its registration. A registration keeps what it was made from alive, held or kept, so no
other memory can lie at its address. (A finalizer of the memory's owner instead would come too late: the NIC may write
there until the registration has ended, which takes a turn of another thread.) What does move without dying is a
storage that is resized, as FSDP does; so a storage is asked again where it lies before its registration is shared.
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

    from ..rails import Buffer
    from ..transfers import Access
    from .bridge import Bridge

__all__ = ["Memory", "MemorySource", "Registration"]

Key = tuple[int, int, bool, str]
MAX_KEPT = 4096
"""Registrations that nobody holds: as many as a large model has parameters."""


class Storage:
    """What a tensor is a view of, as an array of bytes: dtypes that no protocol has a name for are bytes, too."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if not address:
            raise UsageError("register: the tensor has no memory; of a DTensor register what .to_local() returns")
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, False)}

    def lies_at(self, address: int, nbytes: int) -> bool:
        """Tell whether it was not resized since."""
        return (self._storage.data_ptr(), self._storage.nbytes()) == (address, nbytes)


class MemorySource:
    """What is to be registered for some memory, and which bytes of it are meant."""

    def __init__(self, memory: Any, access: Access) -> None:
        """Find out. Raises UsageError for what is no memory in one piece."""
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
        """Take the storage of a tensor (torch's, which is not imported here) for what is to be registered."""
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise UsageError("register: the tensor is not its bytes in a row: register what .contiguous() returns")
        self.storage = Storage(tensor.untyped_storage())
        self.whole = numpy.asarray(self.storage)
        # Not by the tensor's own address: an empty one has none.
        return tensor.storage_offset() * tensor.element_size(), tensor.numel() * tensor.element_size()

    def _borrow(self) -> Buffer:
        try:
            return borrow(self.whole)
        except TypeError:
            if not hasattr(self.whole, "__array_interface__"):
                raise
            self.whole = numpy.asarray(self.whole)
            return borrow(self.whole)


class Memory:
    """The registrations of one engine, on its loop's thread."""

    def __init__(self, engine: aiote.Engine, kept_bytes: int) -> None:
        self._engine = engine
        self._table = Registrations(kept_bytes, MAX_KEPT)
        self._making: dict[Key, asyncio.Event] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def hold(self, source: MemorySource) -> SharedRegistration:
        """Register some memory, or share its registration. Raises as `Engine.register_async`."""
        while True:
            while (making := self._making.get(source.key)) is not None:
                await making.wait()
            held = self._table.hold(source.key)
            if held is None:
                return await self._make(source)
            if in_place(held):
                return held
            self._table.forget(held)
            await self.let_go(held)

    async def _make(self, source: MemorySource) -> SharedRegistration:
        made = self._making[source.key] = asyncio.Event()
        try:
            region = await self._engine.register_async(source.whole, source.access)
        finally:
            del self._making[source.key]
            made.set()
        return self._table.add(source.key, region, source.storage)

    async def let_go(self, held: SharedRegistration) -> None:
        """Take a holder off; where it was the last, and peers may have its keys, the registration ends."""
        await self._close(self._table.let_go(held, keep=held.key[3] == "local" and in_place(held)))

    async def trim(self, nbytes: int) -> None:
        """End registrations that nobody holds until they are of at most so many bytes."""
        await self._close(self._table.trim(nbytes))

    async def _close(self, regions: Iterable[aiote.Region]) -> None:
        """Close regions; where we are cancelled it goes on."""
        tasks = [asyncio.ensure_future(region.aclose()) for region in regions]
        for task in tasks:
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for task in tasks:
            await asyncio.shield(task)

    async def aclose(self) -> None:
        """Wait for what is being closed; the engine's end closes the others."""
        await asyncio.gather(*self._closing)


def in_place(held: SharedRegistration) -> bool:
    """Tell whether a registration's memory lies where it did."""
    return held.lender is None or held.lender.lies_at(*held.key[:2])


class Registration:
    """Memory that stays registered while this is held; a context manager, and an asynchronous one, that closes it.

    Made by `Bridge.register`. `region` are its bytes, for coroutines on the bridge; `descriptor` is what a peer
    attaches. The memory must not be resized, moved or unmapped meanwhile. One that is dropped is closed, and warned of.
    """

    def __init__(self, bridge: Bridge, number: int, held: SharedRegistration, region: aiote.Region) -> None:
        self._bridge, self.number, self.held = bridge, number, held
        self._region = region
        self._descriptor = region.descriptor if held.key[3] != "local" else b""

    @property
    def region(self) -> aiote.Region:
        """The bytes of the memory, for transfers on the bridge's engine. Raises ClosedError."""
        self._bridge.require_held(self.number)
        return self._region

    @property
    def descriptor(self) -> bytes:
        """What a peer gives to `Engine.attach`; bytes. Raises ClosedError, and UsageError where access is "local"."""
        return self._descriptor or self.region.descriptor

    def close(self) -> None:
        """Let go of it. Where nobody else holds it, transfers that use it are waited for and it ends.

        One with access "local", which no peer has keys of, may be kept for the next who registers that memory. From any
        thread but the bridge's. Idempotent.
        """
        self._bridge.close_registration(self.number)

    async def aclose(self) -> None:
        """Let go of it as `close` does, on any event loop. A cancelled close goes on by itself."""
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
        # One whose making was interrupted has nothing.
        if "number" in vars(self):
            self._bridge.drop_registration(self.number)
