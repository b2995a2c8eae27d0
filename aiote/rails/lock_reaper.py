"""Release the locks that a killed or stopped process held, for `shm` of libfabric before 2.0.

Each endpoint has a spin lock in shared memory, and both sides of a pair take it. A process that is killed with -9
while it holds a lock never releases it. A process that is stopped (SIGSTOP, a frozen container) does not release it
before it continues. Meanwhile the other side spins inside the library and blocks its event loop. This happened in 28 of
1000 stops under load.

So a thread waits for the death of each peer's process (a pidfd), and then releases the two locks of this pair of
endpoints. From then on only this process takes them. If this process itself holds one at that moment, releasing it
twice does no harm. A write is two commands. If the peer has posted only the first, the thread removes it before it
releases the locks (`SpinLock.drop_half`).

The kernel does not report a stop. So the thread polls the locks. If for `limit` seconds every look finds the same locks
held, the peer's process uses no processor time and the engine does no round, the thread releases both locks and fails
the peer.
"""

from __future__ import annotations

import errno
import os
import select
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from aiote_native.channels.peers import PeerLink
from aiote_native.libfabric.device import SpinLock

from .stale_files import SHARED_MEMORY, owner, processor_ticks

__all__ = ["LockReaper"]

SCHEME = "fi_shm://"
LOOKS = 8
"""How many looks within the limit must find a lock held. A running process takes locks often and holds them briefly."""
STUCK_S = 0.01
"""How many seconds our lock must stay held, with no command read, before the dead peer counts as its holder."""


@dataclass(eq=False)
class WatchedPeer:
    """A link over shm: the process at its other end, and the locks of both endpoints' memory."""

    link: PeerLink
    process: int
    pidfd: int
    locks: tuple[SpinLock, SpinLock]
    seen: tuple[bool, bool, int | None, int] = (False, False, None, 0)
    """What the last look found: which locks were held, the processor time of the peer, the engine's rounds."""
    since: float = 0.0
    looks: int = 0

    def is_stuck(self, now: float, rounds: int, limit: float) -> bool:
        """Look at the locks; return whether one was held for `limit` seconds without progress of peer or engine."""
        held = self.locks[0].held, self.locks[1].held
        seen = (*held, processor_ticks(self.process) if any(held) else None, rounds)
        if not any(held) or seen != self.seen:
            self.seen, self.since, self.looks = seen, now, 0
            return False
        self.looks += 1
        return self.looks >= LOOKS and now - self.since >= limit

    def release(self) -> None:
        """Remove a write that the peer has only half posted to this process, and release both locks."""
        own = self.locks[0]
        read, end = own.commands_read, time.monotonic() + STUCK_S
        # If this process holds the lock, it soon releases it, and the peer has half posted no write.
        while own.held and own.commands_read == read:
            if time.monotonic() > end:
                own.drop_half()
                break
            time.sleep(STUCK_S / LOOKS)
        for lock in self.locks:
            lock.release()

    def close(self) -> None:
        os.close(self.pidfd)


class LockReaper:
    """The shm peers of one engine, and the thread that watches their processes. The first peer starts the thread.

    `rounds` returns how many rounds of progress the engine has done. After `limit` seconds in which a lock is held
    without progress, the peer is failed.
    """

    def __init__(self, rounds: Callable[[], int], limit: float) -> None:
        self._rounds = rounds
        self._limit = limit
        self._lock = threading.Lock()
        self._watched: list[WatchedPeer] = []
        self._wake = -1
        self._thread: threading.Thread | None = None

    def add(self, link: PeerLink, own: bytes, peer: bytes) -> None:
        """Watch a link between two endpoints, given by their addresses. Ignore a link within this process."""
        names = [address.decode().rstrip("\0").removeprefix(SCHEME) for address in (own, peer)]
        processes = [owner(name) for name in names]
        if None in processes or processes[0] == processes[1]:
            return
        process = int(processes[1] or 0)
        try:
            locks = [
                SpinLock(f"{SHARED_MEMORY}/{name}", int(pid or 0)) for name, pid in zip(names, processes, strict=True)
            ]
            pidfd = os.pidfd_open(process)
        except (OSError, ValueError):
            # The file has another layout, the peer's process is in another namespace, the kernel has no pidfds, or the
            # peer is dead, which its control connection reports.
            return
        with self._lock:
            for watched in [watched for watched in self._watched if watched.link.closed]:
                self._watched.remove(watched)
                watched.close()
            self._watched.append(WatchedPeer(link, process, pidfd, (locks[0], locks[1])))
            if self._thread is None:
                self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                self._thread = threading.Thread(target=self._watch, name="aiote lock reaper", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:
                    # The system has no thread left. Adding the next peer tries again, and the thread then watches this
                    # peer, too.
                    self._thread = None
                    os.close(self._wake)
                    return
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
        pause = self._limit / LOOKS
        while True:
            with self._lock:
                if self._thread is None:
                    return
                by_fd = {watched.pidfd: watched for watched in self._watched}
            poll = select.poll()
            for fd in (self._wake, *by_fd):
                poll.register(fd, select.POLLIN)
            for fd, _event in poll.poll(pause * 1000 if by_fd else None):
                if fd == self._wake:
                    self._drain()
                else:
                    self._free(by_fd[fd])
            self._look(by_fd.values())

    def _drain(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass

    def _free(self, watched: WatchedPeer) -> None:
        watched.release()
        with self._lock:
            if watched in self._watched:
                self._watched.remove(watched)
                watched.close()

    def _look(self, peers: Iterable[WatchedPeer]) -> None:
        now, rounds = time.monotonic(), self._rounds()
        stuck = [one for one in peers if not one.link.closed and one.is_stuck(now, rounds, self._limit)]
        for watched in stuck:
            watched.release()
        for watched in stuck:
            # Fail each peer on a thread of its own: `fail` waits for the engine's lock, and a call that spins on
            # another of these peers may hold that lock.
            try:
                threading.Thread(target=watched.link.fail, args=(errno.ETIMEDOUT,), daemon=True).start()
            except RuntimeError:
                # The system has no thread left. The locks are free, and the heartbeat timeout ends the link.
                continue
