"""Write a status page for each engine, and read the pages of the user's engines for `aiote top`.

A page is a file in a folder that only the user can access: `$XDG_RUNTIME_DIR/aiote`, else `/run/user/UID/aiote`, else
`/tmp/aiote-UID` (modes 0700 and 0600). Each write replaces the file, so that a reader never sees half a page. The file
holds a magic number, a version, a length and the checksum of the rest, then an `EngineStatus` in MessagePack. Every
version begins with the magic number and the version, so that a reader can name a page that it cannot parse. A reader
trusts neither the content nor the owner of a page and checks both. The name of the file says which process wrote it, so
that a reader can remove the pages of dead processes whatever they contain.

The engine writes the page when a peer connects, when the last peer is lost, and with its heartbeats, at most once a
second; without peers it has no heartbeats, and does not wake up for the page.
"""

from __future__ import annotations

import os
import stat
import struct
import sys
import time
import weakref
import zlib
from collections.abc import Iterator
from contextlib import suppress
from heapq import nsmallest
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec

from .events import Event, Events
from .processes import ProcessId, this_process

__all__ = [
    "LONGEST_TEXT",
    "EngineStatus",
    "OtherVersion",
    "PeerStatus",
    "RailStatus",
    "ServiceStatus",
    "StatusPage",
    "folders",
    "other_versions",
    "pages",
    "read_page",
    "report_services",
]

MAGIC = b"aiotetop"
VERSION = 1
HEADER = struct.Struct("<8sIII")
VERSIONED = struct.Struct("<8sI")
"""The part of the header that every version has."""
LARGEST = 1 << 18
PERIOD_S = 1.0
SHOWN_PEERS = 256
"""A page lists at most this many peers, the busiest; its counts hold the number of all peers."""
SHOWN_SERVICES = 64
"""A page lists at most this many `serve` calls of the engine, the first ones."""
SUFFIX = ".page"
UNFINISHED = ".new"
FRESH_S = 60.0
"""The greatest age in seconds of a page of another PID namespace: whether its process is alive cannot be seen."""

LONGEST_TEXT = 512
Text = Annotated[str, msgspec.Meta(max_length=LONGEST_TEXT)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class RailStatus(msgspec.Struct, frozen=True):
    """A rail; `served` is None if the NIC does not report it."""

    name: Text
    provider: Text
    state: Text
    carried: Count
    served: Count | None
    operations: Count
    depth: Count


class PeerStatus(msgspec.Struct, frozen=True):
    """A connected peer, and the number of unfinished transfers toward it."""

    address: Text
    unfinished: Count


class ServiceStatus(msgspec.Struct, frozen=True):
    """The services of one `serve` call: whether they take new calls, how many run and how many wait in the queue."""

    names: Text
    serving: bool
    running: Count
    queued: Count


class EngineStatus(msgspec.Struct, frozen=True):
    """The state of an engine at one moment; times are in nanoseconds since 1970."""

    pid: Count
    program: Text
    address: Text
    opened_ns: Count
    written_ns: Count
    rails: Annotated[list[RailStatus], msgspec.Meta(max_length=16)]
    peers: Annotated[list[PeerStatus], msgspec.Meta(max_length=SHOWN_PEERS)]
    counts: dict[Text, Count]
    events: dict[Text, Count]
    services: Annotated[list[ServiceStatus], msgspec.Meta(max_length=SHOWN_SERVICES)] = []


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(EngineStatus).decode


def folders() -> tuple[Path, ...]:
    """Return the folders in which pages of this user may lie, the preferred one first."""
    user = os.getuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    places = [Path(runtime) / "aiote"] if os.path.isabs(runtime) else []
    return (*places, Path(f"/run/user/{user}/aiote"), Path(f"/tmp/aiote-{user}"))


def _is_own(path: Path) -> bool:
    """Return whether a folder belongs to this user, is not a link, and is closed to others."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _made() -> Path | None:
    """Return the first folder that exists or can be made, and that only this user can access."""
    for folder in folders():
        with suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
        if _is_own(folder):
            return folder
    return None


class ServiceReporter(Protocol):
    """An object that knows the services of an engine."""

    def service_states(self) -> list[ServiceStatus]: ...


# Weak on both sides: who reports usually holds the engine.
_reporters = weakref.WeakKeyDictionary[Any, weakref.ref[ServiceReporter]]()


def report_services(engine: Any, reporter: ServiceReporter) -> None:
    """Have the engine's page list the services that `reporter` returns when the page is written; no reference stays."""
    _reporters[engine] = weakref.ref(reporter)


class StatusPage:
    """The page of one engine. If it cannot be written, it is removed and not tried again; the engine does not fail."""

    def __init__(self, engine: Any) -> None:
        # A weak reference: an engine without other references must be collected and closed.
        self._engine = weakref.ref(engine)
        self._opened_ns = time.time_ns()
        self._next = 0.0
        self._path: Path | None = None
        self._given_up = False

    def follow(self, events: Events) -> None:
        """Write the page now, and whenever the last peer is lost; between these `beat` must be called."""
        events.listen(self._heard)
        self.write()

    def _heard(self, event: Event) -> None:
        engine = self._engine()
        if event.name == "peer.lost" and engine is not None and not engine.peers:
            self.write()
        elif event.name == "peer.connected":
            self._next = 0.0  # write at the next heartbeat: the engine sends a new peer one at once

    def beat(self, now: float) -> None:
        """Write the page if the last write was long enough ago; `now` is in seconds of the engine's clock."""
        if now >= self._next:
            self._next = now + PERIOD_S
            self.write()

    def write(self) -> None:
        """Write the page now."""
        engine = self._engine()
        if self._given_up or engine is None:
            return
        try:
            if self._path is None:
                self._path = _named(engine.address.incarnation)
            _replace(self._path, packed(status_of(engine, self._opened_ns)))
        except (OSError, ValueError):
            self._given_up = True
            self.remove()

    def remove(self) -> None:
        """Remove the page for good, because the engine is closed or the page cannot be written. Idempotent."""
        self._given_up = True
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._path = None


def _named(incarnation: int) -> Path:
    folder = _made()
    if folder is None:
        raise FileNotFoundError("this user has no private folder for status pages")
    return folder / f"{this_process()}-{incarnation}{SUFFIX}"


def status_of(engine: Any, opened_ns: int) -> EngineStatus:
    """Return the status of an engine."""
    counts = engine.statistics()
    each = zip(engine.rails, counts.carried, counts.served, counts.operations, counts.depth, strict=True)
    busiest = nsmallest(SHOWN_PEERS, engine.peers, key=lambda peer: -peer.unfinished)
    reporter = known() if (known := _reporters.get(engine)) else None
    plain = {name: value for name in counts.__slots__ if isinstance(value := getattr(counts, name), int)}
    return EngineStatus(
        pid=os.getpid(),
        program=" ".join(sys.orig_argv)[:LONGEST_TEXT].encode(errors="replace").decode(),
        address=str(engine.address),
        opened_ns=opened_ns,
        written_ns=time.time_ns(),
        rails=[RailStatus(rail.name, rail.provider, rail.state, *numbers) for rail, *numbers in each],
        peers=[PeerStatus(str(peer.address), peer.unfinished) for peer in busiest],
        counts=plain,
        events=dict(counts.events),
        services=reporter.service_states()[:SHOWN_SERVICES] if reporter else [],
    )


def packed(status: EngineStatus) -> bytes:
    """Return the bytes of a page."""
    body = _encode(status)
    return HEADER.pack(MAGIC, VERSION, len(body), zlib.crc32(body)) + body


def _replace(path: Path, data: bytes) -> None:
    new = path.with_suffix(UNFINISHED)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(new, flags, 0o600)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)
    new.replace(path)


# The reader's side.


class OtherVersion(NamedTuple):
    """A page in another version of the format, which is named and not parsed: its process and its version."""

    pid: int
    version: int


def read_page(path: Path) -> EngineStatus | None:
    """Return the status on a page, or None if the file is another user's, of another version, cut off or invalid."""
    data = _own_bytes(path)
    if data is None or len(data) < HEADER.size:
        return None
    magic, version, length, checksum = HEADER.unpack_from(data)
    body = data[HEADER.size :]
    if (magic, version, length, checksum) != (MAGIC, VERSION, len(body), zlib.crc32(body)):
        return None
    try:
        return _decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None


def pages() -> Iterator[EngineStatus]:
    """Yield the status of each live engine of this user; remove the pages of dead processes."""
    for path, writer in _live():
        if (status := read_page(path)) is not None and _is_of(status, writer):
            yield status


def other_versions() -> Iterator[OtherVersion]:
    """Yield the pages of live processes of this user that another version of aiote wrote."""
    for path, writer in _live():
        data = _own_bytes(path)
        if data is None or len(data) < VERSIONED.size:
            continue
        magic, version = VERSIONED.unpack_from(data)
        if magic == MAGIC and version != VERSION and (writer.local or _is_fresh(path)):
            yield OtherVersion(writer.pid, version)


def _own_bytes(path: Path) -> bytes | None:
    """Return the content of a file that belongs to this user and is closed to others, at most `LARGEST` bytes."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(descriptor)
        own = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
        return os.read(descriptor, LARGEST) if own and found.st_size <= LARGEST else None
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _live() -> Iterator[tuple[Path, ProcessId]]:
    """Yield each page with its writer, unless the writer is known to be dead: then remove its files."""
    for folder in dict.fromkeys(folders()):
        if not _is_own(folder):
            continue
        for path in sorted(folder.iterdir()):
            writer = ProcessId.parse(path.name) if path.suffix in (SUFFIX, UNFINISHED) else None
            if writer is None:
                continue
            if writer.local and not writer.alive:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            elif path.suffix == SUFFIX:
                yield path, writer


def _is_of(status: EngineStatus, writer: ProcessId) -> bool:
    age_s = (time.time_ns() - status.written_ns) * 1e-9
    return status.pid == writer.pid and (writer.local or abs(age_s) < FRESH_S)


def _is_fresh(path: Path) -> bool:
    try:
        return abs(time.time() - path.lstat().st_mtime) < FRESH_S
    except OSError:
        return False
