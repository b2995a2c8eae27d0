"""A page for each engine that the user's own programs may read: what `aiote top` shows.

A page is a file in a folder that is the user's alone: `$XDG_RUNTIME_DIR/aiote`, else `/run/user/UID/aiote`, else
`/tmp/aiote-UID` (modes 0700 and 0600). Each writing replaces the file, so that nobody reads half of one. It is a magic
number, a version, a length and the checksum of what follows, then MessagePack of a `Status`; a reader takes nothing
for granted that is in it, nor whose it is. Its name says which process wrote it, so that a reader removes what the
dead have left, whatever is in it.

The file is written when a peer comes or goes and with the engine's heartbeats, a second apart at most: an engine
without peers has nothing to wake up for.
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
from typing import Annotated, Any

import msgspec

from .events import Event, Events
from .processes import ProcessId, this_process

__all__ = ["PeerStatus", "RailStatus", "Status", "StatusPage", "folders", "pages", "read_page"]

MAGIC = b"aiotetop"
VERSION = 1
HEADER = struct.Struct("<8sIII")
LARGEST = 1 << 18
PERIOD_S = 1.0
SHOWN_PEERS = 256
"""Of more the page has the busiest, and how many there are."""
SUFFIX = ".page"
UNFINISHED = ".new"
FRESH_S = 60.0
"""Of a process in another container, whose life cannot be seen, a page is shown that is not older than this."""

Text = Annotated[str, msgspec.Meta(max_length=512)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class RailStatus(msgspec.Struct, frozen=True):
    """A rail; `served` is None where nobody can tell."""

    name: Text
    provider: Text
    state: Text
    carried: Count
    served: Count | None
    operations: Count
    depth: Count


class PeerStatus(msgspec.Struct, frozen=True):
    """A connected peer, and how many transfers toward it are unfinished."""

    address: Text
    unfinished: Count


class Status(msgspec.Struct, frozen=True):
    """An engine at a moment; times in nanoseconds since 1970."""

    pid: Count
    program: Text
    address: Text
    opened_ns: Count
    written_ns: Count
    rails: Annotated[list[RailStatus], msgspec.Meta(max_length=16)]
    peers: Annotated[list[PeerStatus], msgspec.Meta(max_length=SHOWN_PEERS)]
    counts: dict[Text, Count]
    events: dict[Text, Count]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Status).decode


def folders() -> tuple[Path, ...]:
    """Return where pages of this user may lie, the preferred place first."""
    user = os.getuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    places = [Path(runtime) / "aiote"] if os.path.isabs(runtime) else []
    return (*places, Path(f"/run/user/{user}/aiote"), Path(f"/tmp/aiote-{user}"))


def _is_own(path: Path) -> bool:
    """Whether a folder is this user's, is no link, and is closed to others."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _made() -> Path | None:
    """Return the first folder that is there or can be made, and is this user's alone."""
    for folder in folders():
        with suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
        if _is_own(folder):
            return folder
    return None


class StatusPage:
    """The page of one engine. What cannot be written is left out: no engine fails for want of it."""

    def __init__(self, engine: Any) -> None:
        # Not the engine itself: one that nobody else has is to be found and closed.
        self._engine = weakref.ref(engine)
        self._opened_ns = time.time_ns()
        self._next = 0.0
        self._path: Path | None = None
        self._given_up = False

    def follow(self, events: Events) -> None:
        """Write it now, and from now on when the last peer has gone; in between `beat` has to be called."""
        events.listen(self._heard)
        self.write()

    def _heard(self, event: Event) -> None:
        engine = self._engine()
        if event.name == "peer.lost" and engine is not None and not engine.peers:
            self.write()
        elif event.name == "peer.connected":
            self._next = 0.0  # at the next heartbeat, which a new peer is sent at once

    def beat(self, now: float) -> None:
        """Write it if the last writing is long enough ago; `now` in seconds of the engine's clock."""
        if now >= self._next:
            self._next = now + PERIOD_S
            self.write()

    def write(self) -> None:
        """Write it now."""
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
        """Take it away: the engine is closed. Idempotent."""
        self._given_up = True
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._path = None


def _named(incarnation: int) -> Path:
    folder = _made()
    if folder is None:
        raise FileNotFoundError("no folder of this user's own")
    return folder / f"{this_process()}-{incarnation}{SUFFIX}"


def status_of(engine: Any, opened_ns: int) -> Status:
    """Take an engine's status."""
    counts = engine.statistics()
    each = zip(engine.rails, counts.carried, counts.served, counts.operations, counts.depth, strict=True)
    busiest = nsmallest(SHOWN_PEERS, engine.peers, key=lambda peer: -peer.unfinished)
    plain = {name: value for name in counts.__slots__ if isinstance(value := getattr(counts, name), int)}
    return Status(
        pid=os.getpid(),
        program=" ".join(sys.orig_argv)[:512].encode(errors="replace").decode(),
        address=str(engine.address),
        opened_ns=opened_ns,
        written_ns=time.time_ns(),
        rails=[RailStatus(rail.name, rail.provider, rail.state, *numbers) for rail, *numbers in each],
        peers=[PeerStatus(str(peer.address), peer.unfinished) for peer in busiest],
        counts=plain,
        events=dict(counts.events),
    )


def packed(status: Status) -> bytes:
    """Return a page's bytes."""
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


def read_page(path: Path) -> Status | None:
    """Return what a page says; None where it is none: another user's, another version's, cut off, or a lie."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(descriptor)
        own = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
        if not own or found.st_size > LARGEST:
            return None
        data = os.read(descriptor, LARGEST)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    if len(data) < HEADER.size:
        return None
    magic, version, length, checksum = HEADER.unpack_from(data)
    body = data[HEADER.size :]
    if (magic, version, length, checksum) != (MAGIC, VERSION, len(body), zlib.crc32(body)):
        return None
    try:
        return _decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None


def pages() -> Iterator[Status]:
    """Yield the status of each engine of this user that lives; what dead processes have left is removed."""
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
            elif path.suffix == SUFFIX and (status := read_page(path)) is not None and _is_of(status, writer):
                yield status


def _is_of(status: Status, writer: ProcessId) -> bool:
    age_s = (time.time_ns() - status.written_ns) * 1e-9
    return status.pid == writer.pid and (writer.local or abs(age_s) < FRESH_S)
