"""The rails of one engine, with the native core that drives them."""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from aiote_native.channels.messages import CREDIT_MESSAGES
from aiote_native.channels.peers import PeerLink, pool_bytes
from aiote_native.cuda.driver import EventPool
from aiote_native.cuda.driver import device_of as device_at
from aiote_native.engine.core import Core, nudge
from aiote_native.engine.provider import NativeEndpoint
from aiote_native.requests.operations import LocalMemory
from aiote_native.system.base import StatusError
from aiote_native.system.buffers import AcquiredBuffer, acquire
from aiote_native.system.wakeups import PeerWakeup, WakeupEvent

from ..errors import FabricError
from .contract import Rail, RailInfo
from .libfabric import fabric_error
from .lock_reaper import LockReaper
from .reach import HOST, HOST_REACH, Reach, open_driver, stages
from .selection import RailRequest, open_rails
from .shortage import locked_limit
from .stale_files import remove_stale_files

__all__ = ["PendingChannel", "RailSet"]

MAY_READ, MAY_WRITE, MAY_ALL = 1, 2, 3  # the access that a registration grants to peers
SCRATCH_BYTES = 64
"""Bytes of the scratch memory: the target of immediates without data, and the source of operations without local
memory. Its contents are never read.
"""


class PendingChannel:
    """Hold an endpoint that was opened for one peer, until the other side's address arrives."""

    def __init__(
        self, rail: Rail, remote_rail: int, slot: int, generation: int, reserved: NativeEndpoint | None = None
    ) -> None:
        self.rail = rail
        self.remote_rail = remote_rail
        self.slot = slot
        self.generation = generation
        self.endpoint: NativeEndpoint = reserved or rail.open_endpoint()
        self.wakeup: PeerWakeup | None = None
        self.refused = ""

    @property
    def address(self) -> bytes:
        """The endpoint's own address, which the peer needs to connect to it."""
        return self.endpoint.address

    def shared(self, own: WakeupEvent) -> list[int]:
        """Return the descriptors of the memory that the peer has to map: the wake-up page, and the ring if there is
        one.
        """
        return [fd for fd in (own.memory_fd, self.endpoint.memory_fd) if fd >= 0]

    def map_memory(self, descriptors: Sequence[int], wakeup: bytes, error: OSError | None = None) -> None:
        """Map the memory that the peer has shared, and close the descriptors; on failure `refused` says why."""
        left = list(descriptors)
        expected = 1 if self.endpoint.memory_fd < 0 else 2
        try:
            if error is not None:
                raise error
            if len(left) != expected:
                raise ValueError(f"the peer shared {len(left)} descriptors, expected {expected}")
            self.wakeup = PeerWakeup(left.pop(0), wakeup)
            if left:
                self.endpoint.take(left.pop(0))
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            self.refused = f"what it shared for wake-ups is refused: {str(error) or type(error).__name__}"
        finally:
            for fd in left:
                os.close(fd)

    def close(self) -> None:
        """Close everything that no link has taken over. Idempotent."""
        self.endpoint.close()
        if self.wakeup is not None:
            self.wakeup.close()


POOL_BYTES = 128 << 20
"""The bytes of message pools that a peer's offer may request here, unless the engine's own config requests more."""


def pools_fit(slots: int, message_bytes: int, peer_slots: int, peer_bytes: int) -> bool:
    """Tell whether the pools for one peer are within the limit; `slots` and `message_bytes` are our own numbers."""
    limit = max(POOL_BYTES, pool_bytes(slots, message_bytes, slots, message_bytes))
    return pool_bytes(slots, message_bytes, peer_slots, peer_bytes) <= limit


def _is_raw(error: BaseException) -> TypeGuard[OSError]:
    """Tell whether this is an error of the system or the native layer, which is not yet a FabricError with context."""
    return isinstance(error, OSError) and not isinstance(error, FabricError)


class RailSet:
    """Own the opened rails and the native core that drives them.

    `host` chooses the rail of an IP provider when `rails` does not name any. `largest` bounds a single message below
    the provider's own bound (0: no bound). `verbs` are settings of verbs devices; `messages` is the number of a peer's
    messages that are buffered. `ring_bytes` is the length of `local` rings; `gpu_sharing` tells whether `local` shares
    GPU memory, and `gpu_staging_bytes` how much pinned memory a rail has for each GPU and direction. With `fallback`, a
    socket rail is added to scarce rails. A peer that makes no progress in `shm` of libfabric 1 is failed after
    `silence` seconds. `cuda` is the path of the driver of CUDA devices.
    """

    _lock_reaper: LockReaper | None = None
    _reach: weakref.WeakKeyDictionary[LocalMemory, dict[str, Reach]]
    _scratch: LocalMemory | None = None

    def __init__(
        self,
        provider: str,
        rails: tuple[str, ...] | None,
        *,
        host: str,
        library: str,
        largest: int = 0,
        verbs: Mapping[str, int] | None = None,
        messages: int = 16,
        ring_bytes: int = 2 << 20,
        gpu_sharing: bool = True,
        gpu_staging_bytes: int = 8 << 20,
        fallback: bool = False,
        silence: float = 3.0,
        cuda: str = "",
        **core: Any,
    ) -> None:
        """Open all rails and the core, or nothing. Raises FabricError and UsageError."""
        self.largest, self._cuda = largest, cuda
        self.rails: list[Rail] = []
        self.core: Core | None = None
        self._memories: weakref.WeakSet[LocalMemory] = weakref.WeakSet()
        self._reach = weakref.WeakKeyDictionary()
        self._event_pools: dict[int, EventPool] = {}
        settings = {**(verbs or {}), "messages": messages + CREDIT_MESSAGES}
        local = bool(core.get("threaded")), ring_bytes, gpu_sharing, gpu_staging_bytes, fallback
        try:
            found, clock = open_rails(RailRequest(provider, rails, host, library, settings, *local), self.rails)
            if clock is not None:
                core["clock"] = clock
            opened = self.core = Core(wakeup_event=any(not rail.traits.waits for rail in self.rails), **core)
            if found is not None and found.version < (2, 0) and any(rail.provider == "shm" for rail in self.rails):
                self._lock_reaper = LockReaper(lambda: opened.rounds, silence)
            self.tidy()
            self._scratch = self.register(acquire(bytearray(SCRATCH_BYTES)))
        except BaseException as error:
            self.close()
            if _is_raw(error):
                raise fabric_error(error, "open engine", "") from error
            raise

    def tidy(self) -> bool:
        """Remove the files of killed processes from shared memory; return False if no rail here uses shared memory."""
        if all(rail.traits.waits for rail in self.rails):
            return False
        remove_stale_files()
        return True

    @property
    def scratch(self) -> LocalMemory:
        """The memory that immediates without data are written to."""
        assert self._scratch is not None
        return self._scratch

    @property
    def info(self) -> tuple[RailInfo, ...]:
        """The descriptions of the rails."""
        return tuple(rail.info for rail in self.rails)

    def register(self, buffer: AcquiredBuffer, access: int = MAY_ALL) -> LocalMemory:
        """Register memory with every rail; `access` is what peers may do. On failure the buffer is released. Raises
        FabricError and UsageError.
        """
        return self.keep_memory(self.pin(buffer, access))

    def pins(self, buffer: AcquiredBuffer) -> bool:
        """Tell whether registering the buffer pins pages, which takes the kernel time: host memory, and a NIC among the
        rails.
        """
        return buffer.device in HOST and any(rail.device.pins for rail in self.rails)

    def pin(self, buffer: AcquiredBuffer, access: int = MAY_ALL) -> LocalMemory:
        """Do the slow part of `register`, in any thread. The caller then calls `keep_memory` in the engine's thread."""
        try:
            memory = self._register_buffer(buffer, access)
        except BaseException as error:
            advice = locked_limit() if getattr(error, "errno", 0) == errno.ENOMEM and self.pins(buffer) else ""
            buffer.release()
            if _is_raw(error):
                names = ", ".join(rail.name for rail in self.rails)
                raise fabric_error(error, "register memory", names, advice) from error
            raise
        if len(self.rails) > 1 and access and buffer.device in HOST:
            self._rank(memory)
        return memory

    def keep_memory(self, memory: LocalMemory) -> LocalMemory:
        """Record that memory was registered, and return it."""
        self._memories.add(memory)
        return memory

    def _register_buffer(self, buffer: AcquiredBuffer, access: int) -> LocalMemory:
        if buffer.device in HOST:
            return LocalMemory(buffer, [rail.device for rail in self.rails], access)
        from .gpu_memory import register_gpu

        if buffer.device == "cuda" and any(stages(rail, "cuda") or rail.traits.dmabuf for rail in self.rails):
            open_driver(self._cuda)
        memory, reach = register_gpu(self.rails, buffer, access)
        self._reach[memory] = reach
        return self._order_gpu_memory(memory)

    def _order_gpu_memory(self, memory: LocalMemory) -> LocalMemory:
        """Give CUDA memory the event pool of its device, and return the memory."""
        if memory.buffer.device != "cuda":
            return memory
        try:
            open_driver(self._cuda)
            number = device_at(memory.address)
            if number not in self._event_pools:
                self._event_pools[number] = EventPool(number, memory.address)
        except BaseException:
            memory.close()
            raise
        memory.events = self._event_pools[number]
        return memory

    def reach(self, memory: LocalMemory) -> dict[str, Reach]:
        """Return how each rail reaches registered memory, by the rails' names."""
        return self._reach.get(memory) or {rail.name: HOST_REACH for rail in self.rails}

    def nudge(self) -> None:
        """Deliver the rails' own pending messages, and wake the peers, which sleep while no transfer is in flight."""
        if self.core is not None:
            nudge(self.core)

    def _rank(self, memory: LocalMemory) -> None:
        """Rank the rails by their distance to the memory, as far as the places of both are known."""
        places = [rail.place for rail in self.rails]
        if len({place.numa_node for place in places}) > 1:
            # Only if the rails are on different nodes, because asking for the memory's node takes a system call.
            from ..machine.numa import memory_node
            from ..machine.topology import Place, preference

            memory.rank(preference(Place(memory_node(memory.address, memory.length)), places))

    def keys_of(self, rail: int) -> set[int]:
        """Return one rail's keys of all memory that is registered now."""
        return {memory.keys[rail][0] for memory in self._memories if memory.registrations}

    @property
    def spares(self) -> set[str]:
        """The wire protocols of spare rails, which serve peers that find no endpoint left on the scarce rails."""
        scarce = any(rail.traits.scarce for rail in self.rails)
        return {rail.wire for rail in self.rails if scarce and not rail.traits.scarce and not rail.traits.host_only}

    def reserve(self, rail: int) -> NativeEndpoint | None:
        """Open an endpoint of a scarce rail; return None if its NIC has none left and there is a spare rail. Raises
        FabricError.
        """
        try:
            return self.rails[rail].open_endpoint()
        except FabricError as error:
            if error.errno != errno.ENOMEM or not self.spares:
                raise
            return None

    def open_channel(self, rail: int, remote_rail: int, reserved: NativeEndpoint | None = None) -> PendingChannel:
        """Open an endpoint for one peer, or take the reserved one. Raises FabricError."""
        chosen = self.rails[rail]
        assert self.core is not None
        slot, generation = -1, 0
        if not chosen.traits.waits and self.core.wakeup_event is not None:
            slot, generation = self.core.wakeup_event.take_slot()
        try:
            return PendingChannel(chosen, remote_rail, slot, generation, reserved)
        except BaseException as error:
            self.free_slot(slot)
            if _is_raw(error):
                raise fabric_error(error, "open endpoint", chosen.name) from error
            raise

    def free_slot(self, slot: int) -> None:
        """Give back the wake-up slot of a channel that was never established."""
        if slot >= 0 and self.core is not None and self.core.wakeup_event is not None and not self.core.closed:
            self.core.wakeup_event.free_slot(slot)

    def join(
        self,
        link: PeerLink,
        pending: PendingChannel,
        address: bytes,
        imm_key: int,
        imm_base: int,
        *,
        peer_slot: tuple[int, int] = (-1, 0),
        number: int = -1,
        name: bytes = b"",
    ) -> None:
        """Connect a pending channel to the peer's endpoint and hand it to the link. `peer_slot` is the slot in the
        peer's wake-up page with its generation, `number` the closed channel that this one replaces, `name` the peer's
        name, which memory can be bound to. Raises FabricError.
        """
        try:
            if name:
                pending.endpoint.name(name)
            pending.endpoint.connect(address)
            link.add_channel(
                pending.endpoint,
                pending.rail.index,
                pending.remote_rail,
                imm_key=imm_key,
                imm_address=imm_base,
                scratch=self.scratch,
                largest=self.largest,
                least=pending.rail.traits.least,
                wakeup=pending.wakeup,
                slot=pending.slot,
                peer_slot=peer_slot[0],
                peer_generation=peer_slot[1],
                number=number,
                speed_mbps=pending.rail.info.speed_mbps,
            )
            pending.wakeup = None
            if self._lock_reaper is not None and not pending.rail.traits.waits:
                self._lock_reaper.add(link, pending.address, address)
        except (OSError, ValueError, RuntimeError) as error:
            raise fabric_error(error, "connect channel", pending.rail.name) from error

    def open_mailbox(self, link: PeerLink, slots: int, message_bytes: int, peer_slots: int, peer_bytes: int) -> None:
        """Give a link its message pools. Raises FabricError."""
        # Mapped, not allocated: if no NIC pins it, a pool for many messages takes no memory before they arrive.
        size = pool_bytes(slots, message_bytes, peer_slots, peer_bytes)
        try:
            pool = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise fabric_error(error, "map message pools", "") from error
        memory = self.register(acquire(pool), 0)
        try:
            link.open_mailbox(memory, slots, message_bytes, peer_slots, peer_bytes)
        except BaseException:
            memory.close()
            raise

    def close(self) -> None:
        """Close core, memory and rails; the caller has closed links and regions before. Idempotent."""
        if self._lock_reaper is not None:
            self._lock_reaper.close()
        if self.core is not None:
            self.core.close()
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None
        while self._event_pools:
            self._event_pools.popitem()[1].close()
        while self.rails:
            try:
                self.rails.pop().close()
            except StatusError as error:
                raise fabric_error(error, "close rail", "") from error
