"""Shared memory between engines of one host: allocating it, giving peers its descriptor, mapping a peer's.

An engine that wants a peer's memory opens a socket of its own, and sends the socket's address with the number of the
memory in a `ShareRequest` over the authenticated control connection. The owner looks whether it named this peer, and
sends the memory's file descriptor to the socket, or `ShareRefused` with the reason. Neither side trusts the other: the
owner gives a descriptor only to peers that it named, and at most `MAX_GRANTS` times, so that descriptors which nobody
receives do not fill the kernel's table. The other side maps what its own caller asked for, of exactly the length that
the descriptor states, and at most `max_mapped_bytes` of one peer.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ..aio import Condition, Handover, close_aside, hand_over, in_thread, run_within
from ..core.address import Address
from ..core.control_frames import ShareMessage, ShareRefused, ShareRequest
from ..core.descriptor import SharedDescriptor
from ..errors import FabricError, PeerError, UsageError
from ..rails import SharedPages
from ..transfers import Peer, SharedMemory, as_integer, one_engine

if TYPE_CHECKING:
    from ..runtime import Runtime
    from .connection import Connection

__all__ = ["MAX_GRANTS", "Sharing"]

Key: TypeAlias = tuple[bytes, int]
"""An engine's identity and incarnation."""

MAX_GRANTS = 16
"""How often one peer gets the descriptor of one memory: a peer that restarts is another engine."""
MAX_MAPPINGS = 1024
"""Mappings of one peer's memory at once; the kernel allows 65530 in a process by default (vm.max_map_count)."""
MAX_BYTES = 1 << 46
IN_THREAD = 16 << 20
"""Allocating this many bytes takes the kernel some milliseconds."""
SHARE, MAP = "share memory", "map memory"


@dataclass(frozen=True, slots=True)
class _Own:
    """Memory of this engine, and how often each peer may still get its descriptor."""

    memory: SharedMemory
    pages: SharedPages
    grants: dict[Key, int]


class _Asked:
    """A request for a peer's memory, until it has been answered."""

    def __init__(self, connection: Connection, nbytes: int) -> None:
        self.connection, self.nbytes = connection, nbytes
        self.refused = ""
        self.descriptors: Sequence[int] = ()
        self.is_over = False

    def take(self, descriptors: Sequence[int], error: OSError | None) -> None:
        """Take what arrived at the socket: descriptors, or the error that kept them from arriving."""
        if error is not None:
            self.refused = error.strerror or str(error)
        elif len(descriptors) == 1 and not self.is_over:
            self.descriptors = descriptors
        else:
            self.refused = f"it handed over {len(descriptors)} descriptors, expected one"
            close_aside(descriptors)

    def end(self) -> None:
        """Close the descriptor, if it was not mapped; one that arrives from now on is closed, too."""
        self.is_over = True
        if self.descriptors:
            close_aside(self.descriptors)


class Sharing:
    """The shared memory of one engine: its own, and the mapped memory of its peers."""

    def __init__(self, runtime: Runtime, find_or_connect: Callable[[Peer | Address | str, str], Connection]) -> None:
        self._runtime = runtime
        self._find_or_connect = find_or_connect
        self._own: dict[int, _Own] = {}
        self._mapped: dict[SharedMemory, SharedPages] = {}
        self._asked: dict[int, _Asked] = {}
        self._requests = 0
        self._changed = Condition(runtime.loop)

    @property
    def inherited(self) -> bool:
        """Whether this process is a forked child, so that the memory belongs to its parent."""
        return self._runtime.inherited

    def require_here(self) -> None:
        """Raise UsageError if the caller runs in another event loop than the engine's."""
        self._runtime.require_here()

    async def share(self, nbytes: int, peers: Iterable[Peer | Address | str], *, reserve: bool) -> SharedMemory:
        """Allocate memory that peers may map; see `Engine.share_memory`."""
        self._runtime.require_open()
        nbytes = as_integer("share_memory: nbytes", nbytes)
        if not 0 < nbytes < MAX_BYTES:
            raise UsageError(f"share_memory: nbytes={nbytes}: expected a number of bytes from 1 to 2**46 - 1")
        if isinstance(peers, str | bytes | Peer | Address):
            raise UsageError("share_memory: expected a list of peers, got one")
        named = [one_engine(peer, "share_memory") for peer in peers]
        pages = await self._allocate(nbytes, reserve=reserve or commits_strictly())
        number = secrets.randbits(64)
        memory = SharedMemory(self, pages, SharedDescriptor(self._runtime.address, number, nbytes))
        self._own[number] = _Own(memory, pages, {_key(peer): MAX_GRANTS for peer in named})
        return memory

    async def _allocate(self, nbytes: int, *, reserve: bool) -> SharedPages:
        """Allocate memory; many pages that are reserved, in a thread. Raises FabricError, ClosedError."""
        if nbytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            # The kernel would take all memory of the host before it refuses.
            raise FabricError(errno.ENOMEM, f"{nbytes} bytes are more than this host has", operation=SHARE)
        made: list[SharedPages] = []
        try:
            if nbytes < IN_THREAD or not reserve:
                made.append(SharedPages(nbytes, reserve=reserve))
            else:
                await in_thread(lambda: made.append(SharedPages(nbytes)))
            self._runtime.require_open()
        except BaseException as error:
            for pages in made:
                pages.close()
            if isinstance(error, OSError):
                raise FabricError(error.errno or 0, error.strerror or str(error), operation=SHARE) from error
            raise
        return made[0]

    async def map(self, descriptor: bytes | bytearray | memoryview, owner: Peer | Address | None) -> SharedMemory:
        """Map a peer's shared memory; see `Engine.map_memory`."""
        self._runtime.require_open()
        wanted = SharedDescriptor.from_bytes(descriptor)
        if owner is not None:
            address = owner.address if isinstance(owner, Peer) else owner
            if _key(wanted.owner) != _key(address):
                raise UsageError(f"map_memory: the memory belongs to {wanted.owner}, expected {address}")
        connection = await self._find_or_connect(wanted.owner, MAP).wait_ready()
        self._runtime.require_open()
        if not connection.shares_memory:
            raise UsageError(
                f"map_memory: {wanted.owner} runs on another host, in another container, or an aiote "
                "that does not share memory"
            )
        self._check_room(connection, wanted.nbytes)
        pages = await self._fetch(connection, wanted)
        memory = SharedMemory(self, pages, wanted)
        self._mapped[memory] = pages
        return memory

    def _check_room(self, connection: Connection, nbytes: int) -> None:
        """Raise UsageError if this many bytes more of a peer's memory would exceed the limits.

        Requests under way count, and memory that was closed while a view kept it mapped.
        """
        for memory, pages in tuple(self._mapped.items()):
            if not pages.address:
                del self._mapped[memory]
        lengths = [one.nbytes for one in self._mapped if _key(one.owner) == connection.key]
        lengths += [one.nbytes for one in self._asked.values() if one.connection is connection]
        limit = self._runtime.config.max_mapped_bytes
        if sum(lengths) + nbytes > limit or len(lengths) >= MAX_MAPPINGS:
            raise UsageError(
                f"map_memory: {len(lengths)} mappings with {sum(lengths)} bytes of {connection.address} exist, so "
                f"{nbytes} bytes more exceed max_mapped_bytes ({limit}), or {MAX_MAPPINGS} mappings"
            )

    async def _fetch(self, connection: Connection, wanted: SharedDescriptor) -> SharedPages:
        """Ask the owner for a descriptor, and map it. Raises PeerError, FabricError, ClosedError."""
        asked = _Asked(connection, wanted.nbytes)

        def on_arrival(descriptors: Sequence[int], _data: bytes, error: OSError | None) -> None:
            asked.take(descriptors, error)
            self._changed.wake_all()

        handover = Handover(self._runtime.loop, on_arrival)
        self._requests = number = (self._requests + 1) & 0xFFFFFFFF
        self._asked[number] = asked
        try:
            assert connection.control is not None
            connection.control.send(ShareRequest(number, wanted.memory, handover.address))
            limit = self._runtime.config.connect_timeout
            if not await run_within(limit, lambda: self._answered(asked)):
                raise PeerError(connection.name, f"it gave no descriptor within {limit} s", operation=MAP)
            # The engine may have been closed after the descriptor had come.
            self._runtime.require_open()
            pages = _mapped(connection, asked.descriptors[0], wanted.nbytes)
            asked.descriptors = ()
            return pages
        finally:
            del self._asked[number]
            handover.close()
            asked.end()

    async def _answered(self, asked: _Asked) -> None:
        while not asked.descriptors:
            if asked.refused:
                raise PeerError(asked.connection.name, asked.refused, operation=MAP)
            if asked.connection.lost:
                raise asked.connection.error(MAP)
            await self._changed.wait()

    def receive(self, connection: Connection, message: ShareMessage, answer: Callable[[ShareRefused], object]) -> None:
        """Handle a peer's request, or its refusal of ours."""
        if isinstance(message, ShareRequest):
            refusal = self._give(connection, message)
            if refusal:
                answer(ShareRefused(message.request, refusal))
            return
        asked = self._asked.get(message.request)
        # A peer may only refuse what it was asked for itself.
        if asked is not None and asked.connection is connection:
            asked.refused = message.reason or "it refused"
            self._changed.wake_all()

    def _give(self, connection: Connection, request: ShareRequest) -> str:
        """Hand a descriptor over to a peer that was named; return why not, or an empty text."""
        own = self._own.get(request.memory)
        if own is None or not connection.shares_memory or connection.key not in own.grants:
            return "no such memory is shared with this engine"
        if not own.grants[connection.key]:
            return f"this engine has got the memory {MAX_GRANTS} times"
        try:
            hand_over(request.address, [own.pages.descriptor], b"")
        except (FabricError, ValueError) as error:
            return str(error)
        own.grants[connection.key] -= 1
        return ""

    def remove(self, memory: SharedMemory) -> None:
        """Forget memory that was closed, unless a view keeps a peer's memory mapped."""
        pages = self._mapped.get(memory)
        if pages is None:
            # Compare the objects, because a peer chooses the numbers of its memory.
            number = memory._described.memory
            if number in self._own and self._own[number].memory is memory:
                del self._own[number]
        elif not pages.address:
            del self._mapped[memory]

    def wake(self) -> None:
        """Let waits look again, because a peer was lost."""
        self._changed.wake_all()

    def close(self) -> None:
        """Close all memory of a closing engine, which may run in any thread."""
        for pages in (*(own.pages for own in self._own.values()), *self._mapped.values()):
            pages.close()
        self._own.clear()
        self._mapped.clear()
        self._changed.wake_all()


def _mapped(connection: Connection, descriptor: int, nbytes: int) -> SharedPages:
    try:
        return SharedPages.taken(descriptor, nbytes)
    except ValueError as error:
        raise PeerError(connection.name, str(error), operation=MAP) from error
    except OSError as error:
        raise FabricError(error.errno or 0, error.strerror or str(error), operation=MAP) from error


def commits_strictly(path: str = "/proc/sys/vm/overcommit_memory") -> bool:
    """Return whether the kernel may refuse a page of shared memory when it is first touched, with SIGBUS."""
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip() not in ("0", "1")
    except OSError:
        return True


def _key(address: Address) -> Key:
    return address.identity, address.incarnation
