"""Checking and starting requests to one peer: everything that a verb does before the native core takes over.

With `waits`, a transfer beyond the limit of unfinished transfers waits for room; without it, QueueFull is raised. This
module must not know how peers are found or connected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.address import Address
from ..core.striping import NO_IMMEDIATE, native_immediate
from ..errors import UsageError
from ..rails import READ, WRITE, RequestStarter, check_elements
from .pages import Pages
from .peer import Peer
from .regions import Region, RemoteRegion
from .streams import order_behind, pools_of
from .transfer import Launch, Transfer

if TYPE_CHECKING:
    from ..rails import Order, PeerLink
    from ..runtime import Runtime
    from .owner import Destination, PeerFinder

__all__ = ["Requests"]


def _local(value: object, verb: str, what: str) -> Region:
    if not isinstance(value, Region):
        raise UsageError(
            f"{verb}: {what} must be a Region of this engine (engine.register(array)), got {type(value).__name__}"
        )
    value.require_open()
    return value


def _remote(value: object, verb: str, what: str) -> RemoteRegion:
    if not isinstance(value, RemoteRegion):
        hint = "; a Region is local: send its descriptor over and attach it there" if isinstance(value, Region) else ""
        raise UsageError(
            f"{verb}: {what} must be a RemoteRegion (engine.attach(descriptor)), got {type(value).__name__}{hint}"
        )
    return value


def _check_pages(verb: str, src: object, dst: object) -> None:
    if not isinstance(src, Pages) or not isinstance(dst, Pages):
        raise UsageError(f"{verb}: src and dst must be Pages(region, indices, page_bytes)")
    if len(src) != len(dst):
        raise UsageError(
            f"{verb}: {len(src)} source pages, but {len(dst)} target pages: expected as many, because "
            "page i goes to page i"
        )
    if src.page_bytes != dst.page_bytes:
        raise UsageError(
            f"{verb}: source pages of {src.page_bytes} bytes, target pages of {dst.page_bytes}: expected one length"
        )


def _check_writable(verb: str, target: RemoteRegion) -> None:
    if not target.writable:
        raise UsageError(
            f"{verb}: the remote memory is read-only: its owner must register a writable buffer with access='write'"
        )


def _check_readable(source: RemoteRegion, target: Region) -> None:
    if not source.readable:
        raise UsageError(
            "read: the remote memory cannot be read: its owner registered it with access='write', not 'read-write'"
        )
    if not target.writable:
        raise UsageError(
            "read: the local memory is read-only, so it cannot be a destination; register a writable buffer"
        )


def _bytes_of(payload: object) -> bytes:
    """Return a copy of a payload. Raises UsageError unless it is a buffer, neither masked nor made of pointers."""
    try:
        with memoryview(payload) as view:  # type: ignore[arg-type]
            check_elements(payload, view.format)
            return bytes(view)
    except (TypeError, ValueError, BufferError) as error:
        raise UsageError(
            f"send: the payload must be bytes or a buffer, got {type(payload).__name__}: {error}"
        ) from None


def _too_long(length: int, limit: int) -> UsageError:
    return UsageError(
        f"send: a message of {length} bytes, but the peer accepts at most {limit} (its config.message_bytes); "
        "write larger data with engine.write into a region of the peer"
    )


class Requests(RequestStarter[Transfer]):
    """The verbs toward one peer.

    `write`, `read`, `write_pages`, `read_pages` and `send` are native: they start what needs no closer look. They leave
    all else to the methods here, which say what is wrong, find or connect the peer, and wait.
    """

    def __init__(self, runtime: Runtime, finder: PeerFinder) -> None:
        super().__init__(runtime.core, Transfer)
        self._runtime = runtime
        self._finder = finder

    def _submit(
        self,
        peer: Destination,
        description: str,
        launch: Launch,
        *,
        waits: bool = False,
        lease: int = 0,
        rail: str | int | None = None,
        order: Order | None = None,
    ) -> Transfer:
        """Make a transfer and start it as soon as its peer is connected and has room, and `order` allows it."""
        transfer = Transfer(peer, description, launch, lease)
        transfer.order = order
        if rail is not None:
            transfer.prefer(self._runtime.rail_index(rail))
        peer.submit(transfer, waits=waits)
        return transfer

    def _require_own(self, region: Region, verb: str) -> Region:
        if region.memory.owner is not self._runtime.core:
            raise UsageError(
                f"{verb}: the local region belongs to another engine; register the memory with this one too"
            )
        return region

    def _owner_of(self, remote: RemoteRegion) -> Destination:
        """Return the owner of remote memory, and cache its link there so that the next transfer needs no search."""
        peer = self._finder.find_or_connect(remote.owner)
        if peer.connected:
            # A revocation must know the transfers that use its lease, so keep the lease's flight (None if void).
            if remote.lease:
                remote.memory.lease_flight = peer.lease_flight(remote.lease)
            remote.memory.link = peer.link
        return peer

    def check_and_write(
        self,
        src: Region | None,
        dst: RemoteRegion | Peer | Address | str,
        imm: int | None,
        rail: str | int | None,
        stream: Any,
        waits: bool,
    ) -> Transfer:
        """Check and start one write, with or without an immediate, or an immediate alone."""
        self._runtime.require_open()
        verb = "write" if imm is None else "write_imm"
        value = native_immediate(imm)
        if src is None:
            order_behind((), stream, verb)
            return self._write_alone(dst, imm, waits, rail)
        source = self._require_own(_local(src, verb, "src"), verb)
        target = _remote(dst, verb, "dst")
        if source.nbytes != target.nbytes:
            raise UsageError(
                f"{verb}: src has {source.nbytes} bytes, dst {target.nbytes}; slice the larger one to the same length"
            )
        _check_writable(verb, target)
        order = order_behind(pools_of([source.memory]), stream, verb)
        peer = self._owner_of(target)

        def launch(transfer: Transfer, link: PeerLink) -> None:
            self._runtime.core.submit_single(
                link, transfer, WRITE, source.memory, source.start, target.memory, target.start, source.nbytes, value
            )

        return self._submit(
            peer,
            f"{verb} of {source.nbytes} bytes",
            launch,
            waits=waits,
            lease=target.lease,
            rail=rail,
            order=order,
        )

    def _write_alone(
        self, dst: RemoteRegion | Peer | Address | str, imm: int | None, waits: bool, rail: str | int | None
    ) -> Transfer:
        if imm is None:
            raise UsageError("write: src is None; only write_imm may go without a source (an immediate alone)")
        value = native_immediate(imm)
        if isinstance(dst, RemoteRegion):
            dst = dst.owner
        elif not isinstance(dst, (Peer, Address, str)):
            raise UsageError(f"write_imm: dst must be a RemoteRegion, a Peer or an Address, got {type(dst).__name__}")
        what = f"write_imm of immediate {value:#x} alone"
        peer = self._finder.find_or_connect(dst, what)

        def launch(transfer: Transfer, link: PeerLink) -> None:
            self._runtime.core.submit_single(link, transfer, WRITE, None, 0, None, 0, 0, value)

        return self._submit(peer, what, launch, waits=waits, rail=rail)

    def check_and_read(
        self, src: RemoteRegion, dst: Region, rail: str | int | None, stream: Any, waits: bool
    ) -> Transfer:
        """Check and start one read."""
        self._runtime.require_open()
        source = _remote(src, "read", "src_remote")
        target = self._require_own(_local(dst, "read", "dst_local"), "read")
        if source.nbytes != target.nbytes:
            raise UsageError(
                f"read: src_remote has {source.nbytes} bytes, dst_local {target.nbytes}; "
                "slice the larger one to the same length"
            )
        _check_readable(source, target)
        order = order_behind(pools_of([target.memory]), stream, "read")
        peer = self._owner_of(source)

        def launch(transfer: Transfer, link: PeerLink) -> None:
            self._runtime.core.submit_single(
                link,
                transfer,
                READ,
                target.memory,
                target.start,
                source.memory,
                source.start,
                source.nbytes,
                NO_IMMEDIATE,
            )

        what = f"read of {source.nbytes} bytes"
        return self._submit(peer, what, launch, waits=waits, lease=source.lease, rail=rail, order=order)

    def check_and_write_pages(
        self, src: Pages, dst: Pages, imm: int | None, rail: str | int | None, stream: Any, waits: bool
    ) -> Transfer:
        """Check and start paged writes."""
        self._runtime.require_open()
        _check_pages("write_pages", src, dst)
        source = self._require_own(_local(src.region, "write_pages", "src.region"), "write_pages")
        target = _remote(dst.region, "write_pages", "dst.region")
        _check_writable("write_pages", target)
        value = native_immediate(imm)
        return self._start_pages("write_pages", src, source, dst, target, value, waits=waits, rail=rail, stream=stream)

    def check_and_read_pages(
        self, src: Pages, dst: Pages, rail: str | int | None, stream: Any, waits: bool
    ) -> Transfer:
        """Check and start paged reads."""
        self._runtime.require_open()
        _check_pages("read_pages", src, dst)
        source = _remote(src.region, "read_pages", "src.region")
        target = self._require_own(_local(dst.region, "read_pages", "dst.region"), "read_pages")
        _check_readable(source, target)
        return self._start_pages(
            "read_pages", dst, target, src, source, NO_IMMEDIATE, waits=waits, rail=rail, stream=stream
        )

    def _start_pages(
        self,
        verb: str,
        ours: Pages,
        local: Region,
        theirs: Pages,
        remote: RemoteRegion,
        imm: int,
        *,
        waits: bool,
        rail: str | int | None,
        stream: Any,
    ) -> Transfer:
        """Start a transfer between our pages and the peer's."""
        order = order_behind(pools_of([local.memory]), stream, verb)

        def launch(transfer: Transfer, link: PeerLink) -> None:
            self._runtime.core.submit_pages(
                link,
                transfer,
                local.memory,
                local.start + ours.offset,
                ours.index,
                ours.stride,
                remote.memory,
                remote.start + theirs.offset,
                theirs.index,
                theirs.stride,
                ours.page_bytes,
                imm,
                verb == "read_pages",
            )

        what = f"{verb} of {len(ours)} pages of {ours.page_bytes} bytes"
        return self._submit(
            self._owner_of(remote), what, launch, waits=waits, lease=remote.lease, rail=rail, order=order
        )

    def check_and_send(self, to: Peer | Address | str, payload: object, waits: bool) -> Transfer:
        """Check and start one message; the payload is copied."""
        self._runtime.require_open()
        data = payload if type(payload) is bytes else _bytes_of(payload)
        what = f"send of {len(data)} bytes"
        peer = self._finder.find_or_connect(to, what)
        if peer.link is not None and peer.connected and len(data) > peer.link.message_limit:
            raise _too_long(len(data), peer.link.message_limit)

        def launch(transfer: Transfer, link: PeerLink) -> None:
            if len(data) > link.message_limit:
                raise _too_long(len(data), link.message_limit)
            self._runtime.core.submit_send(link, transfer, data)

        return self._submit(peer, what, launch, waits=waits)

    def link_to(self, to: Peer | Address | str) -> PeerLink | None:
        """Return the link to a peer that is connected; None for any other, and for text."""
        if type(to) is Peer:
            return to._connection.link
        connection = self._finder.look_up(to) if type(to) is Address else None
        return None if connection is None else connection.link
