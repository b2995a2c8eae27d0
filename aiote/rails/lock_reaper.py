"""Freeing what a killed process held: for `shm` of libfabric before 2.0.

Both sides of a pair take a spin lock that lies in shared memory, and a process that is killed with -9 while it holds
one never gives it back: the other side would spin within the library for ever, event loop and all. So a thread waits
for the death of each peer's process (a pidfd), and then unlocks the two locks that this pair of endpoints has. From
then on nobody but this process takes them; and where this process itself holds one just then, unlocking it twice does
no harm.
"""

from __future__ import annotations

import os
import select
import threading
from dataclasses import dataclass

from aiote_native.libfabric.spinlocks import SpinLock
from aiote_native.peers import PeerLink

from .stale_files import SHARED_MEMORY, owner

__all__ = ["DeadPeerLockReaper"]

SCHEME = "fi_shm://"


@dataclass(eq=False)
class WatchedPeer:
    """A link over shm: the process at its other end, and the locks of both endpoints' memory."""

    link: PeerLink
    pidfd: int
    locks: tuple[SpinLock, SpinLock]

    def close(self) -> None:
        os.close(self.pidfd)


class DeadPeerLockReaper:
    """The peers over shm of one engine, and the thread that waits for their ends; it begins with the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: list[WatchedPeer] = []
        self._wake = -1
        self._thread: threading.Thread | None = None

    def add(self, link: PeerLink, own: bytes, peer: bytes) -> None:
        """Watch over a link between two endpoints, by their addresses; nothing for one within this process."""
        names = [address.decode().rstrip("\0").removeprefix(SCHEME) for address in (own, peer)]
        processes = [owner(name) for name in names]
        if None in processes or processes[0] == processes[1]:
            return
        try:
            locks = [
                SpinLock(f"{SHARED_MEMORY}/{name}", int(pid or 0)) for name, pid in zip(names, processes, strict=True)
            ]
            pidfd = os.pidfd_open(int(processes[1] or 0))
        except (OSError, ValueError):
            # Another layout, another namespace, an old kernel, or dead already: the control connection tells of that.
            return
        with self._lock:
            for watched in [watched for watched in self._watched if watched.link.closed]:
                self._watched.remove(watched)
                watched.close()
            self._watched.append(WatchedPeer(link, pidfd, (locks[0], locks[1])))
            if self._thread is None:
                self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                self._thread = threading.Thread(target=self._watch, name="aiote lock reaper", daemon=True)
                self._thread.start()
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            os.eventfd_write(self._wake, 1)
            thread.join()
            os.close(self._wake)
        for watched in self._watched:
            watched.close()
        self._watched.clear()

    def _watch(self) -> None:
        while True:
            with self._lock:
                if self._thread is None:
                    return
                by_fd = {watched.pidfd: watched for watched in self._watched}
            poll = select.poll()
            for fd in (self._wake, *by_fd):
                poll.register(fd, select.POLLIN)
            for fd, _event in poll.poll():
                if fd == self._wake:
                    self._drain()
                else:
                    self._free(by_fd[fd])

    def _drain(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass

    def _free(self, watched: WatchedPeer) -> None:
        for lock in watched.locks:
            lock.release()
        with self._lock:
            if watched in self._watched:
                self._watched.remove(watched)
                watched.close()
