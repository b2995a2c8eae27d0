"""Checking and starting requests: what every verb of the engine does before the native core takes over.

With `waits` a transfer beyond the limit of unfinished ones waits in line, without it QueueFull is raised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .core.address import Address
from .core.striping import check_immediate
from .errors import UsageError
from .peer import Peer
from .region import Pages, Region, RemoteRegion
from .transfer import Transfer

if TYPE_CHECKING:
    from .engine import Engine
    from .rails import PeerLink

__all__ = ["submit_pages", "submit_read", "submit_send", "submit_write"]

NO_IMMEDIATE = -1


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


def _own(engine: Engine, region: Region, verb: str) -> Region:
    if region.memory.owner is not engine.core:
        raise UsageError(f"{verb}: the local region belongs to another engine; register the memory with this one too")
    return region


def _peer_of(engine: Engine, remote: RemoteRegion) -> Peer:
    """Return the peer that owns remote memory, and note its link there: the next transfer starts without a search."""
    peer = engine.peer_of(remote.owner)
    if peer.connected:
        # What goes through a lease has to be known when that is revoked; a void one has no flight, and stays as it is.
        if remote.lease:
            remote.memory.held = peer.leases.flight(remote.lease)
        remote.memory.link = peer.link
    return peer


def submit_write(
    engine: Engine,
    src: Region | None,
    dst: RemoteRegion | Peer | Address,
    imm: int | None,
    *,
    waits: bool = False,
    rail: str | int | None = None,
) -> Transfer:
    """Start one write, with or without an immediate, or an immediate alone."""
    engine.require_open()
    verb = "write" if imm is None else "write_imm"
    value = NO_IMMEDIATE if imm is None else check_immediate(imm)
    if src is None:
        return _submit_alone(engine, dst, value, waits, rail)
    source = _own(engine, _local(src, verb, "src"), verb)
    target = _remote(dst, verb, "dst")
    if source.nbytes != target.nbytes:
        raise UsageError(
            f"{verb}: src has {source.nbytes} bytes, dst {target.nbytes}; slice the larger one to the same length"
        )
    if not target.writable:
        raise UsageError(f"{verb}: the remote memory is read-only, its owner registered a read-only buffer")
    peer = _peer_of(engine, target)

    def launch(transfer: Transfer, link: PeerLink) -> None:
        engine.core.submit_single(
            link, transfer, False, source.memory, source.start, target.memory, target.start, source.nbytes, value
        )

    return engine.submit(peer, f"{verb} of {source.nbytes} bytes", launch, waits=waits, lease=target.lease, rail=rail)


def _submit_alone(
    engine: Engine, dst: RemoteRegion | Peer | Address, value: int, waits: bool, rail: str | int | None
) -> Transfer:
    if value == NO_IMMEDIATE:
        raise UsageError("write: src is None; only write_imm may go without a source (an immediate alone)")
    if isinstance(dst, RemoteRegion):
        dst = dst.owner
    elif not isinstance(dst, (Peer, Address)):
        raise UsageError(f"write_imm: dst must be a RemoteRegion, a Peer or an Address, got {type(dst).__name__}")
    what = f"write_imm of immediate {value:#x} alone"
    peer = engine.peer_of(dst, what)

    def launch(transfer: Transfer, link: PeerLink) -> None:
        engine.core.submit_single(link, transfer, False, None, 0, None, 0, 0, value)

    return engine.submit(peer, what, launch, waits=waits, rail=rail)


def submit_read(
    engine: Engine, src: RemoteRegion, dst: Region, *, waits: bool = False, rail: str | int | None = None
) -> Transfer:
    """Start one read."""
    engine.require_open()
    source = _remote(src, "read", "src_remote")
    target = _own(engine, _local(dst, "read", "dst_local"), "read")
    if source.nbytes != target.nbytes:
        raise UsageError(
            f"read: src_remote has {source.nbytes} bytes, dst_local {target.nbytes}; "
            "slice the larger one to the same length"
        )
    if not target.writable:
        raise UsageError(
            "read: the local memory is read-only, so it cannot be a destination; register a writable buffer"
        )
    peer = _peer_of(engine, source)

    def launch(transfer: Transfer, link: PeerLink) -> None:
        engine.core.submit_single(
            link,
            transfer,
            True,
            target.memory,
            target.start,
            source.memory,
            source.start,
            source.nbytes,
            NO_IMMEDIATE,
        )

    return engine.submit(peer, f"read of {source.nbytes} bytes", launch, waits=waits, lease=source.lease, rail=rail)


def _check_pages(src: object, dst: object) -> None:
    if not isinstance(src, Pages) or not isinstance(dst, Pages):
        raise UsageError("write_pages: src and dst must be Pages(region, indices, page_bytes)")
    if len(src) != len(dst):
        raise UsageError(f"write_pages: {len(src)} source pages, but {len(dst)} target pages; page i goes to page i")
    if src.page_bytes != dst.page_bytes:
        raise UsageError(
            f"write_pages: source pages of {src.page_bytes} bytes, target pages of {dst.page_bytes}; they must agree"
        )


def submit_pages(
    engine: Engine, src: Pages, dst: Pages, imm: int | None, *, waits: bool = False, rail: str | int | None = None
) -> Transfer:
    """Start paged writes."""
    engine.require_open()
    _check_pages(src, dst)
    source = _own(engine, _local(src.region, "write_pages", "src.region"), "write_pages")
    target = _remote(dst.region, "write_pages", "dst.region")
    if not target.writable:
        raise UsageError("write_pages: the remote memory is read-only, its owner registered a read-only buffer")
    value = NO_IMMEDIATE if imm is None else check_immediate(imm)
    peer = _peer_of(engine, target)

    def launch(transfer: Transfer, link: PeerLink) -> None:
        engine.core.submit_pages(
            link,
            transfer,
            source.memory,
            source.start + src.offset,
            src.index,
            src.stride,
            target.memory,
            target.start + dst.offset,
            dst.index,
            dst.stride,
            src.page_bytes,
            value,
        )

    return engine.submit(
        peer,
        f"write_pages of {len(src)} pages of {src.page_bytes} bytes",
        launch,
        waits=waits,
        lease=target.lease,
        rail=rail,
    )


def submit_send(engine: Engine, to: Peer | Address, payload: object, *, waits: bool = False) -> Transfer:
    """Start one message; the payload is copied."""
    engine.require_open()
    try:
        data = payload if type(payload) is bytes else bytes(memoryview(payload))  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"send: the payload must be bytes or a buffer, got {type(payload).__name__}") from None
    what = f"send of {len(data)} bytes"
    peer = engine.peer_of(to, what)
    if peer.link is not None and peer.connected and len(data) > peer.link.message_limit:
        raise _too_long(len(data), peer.link.message_limit)

    def launch(transfer: Transfer, link: PeerLink) -> None:
        if len(data) > link.message_limit:
            raise _too_long(len(data), link.message_limit)
        engine.core.submit_send(link, transfer, data)

    return engine.submit(peer, what, launch, waits=waits)


def _too_long(length: int, limit: int) -> UsageError:
    return UsageError(
        f"send: a message of {length} bytes, but the peer takes at most {limit} (its config.message_bytes); "
        "write larger data with engine.write into a region of the peer"
    )
