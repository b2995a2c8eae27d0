"""What comes out of the guest: lines that say how far it is, and the command's two streams of output.

A stream is a serial line, which knows no end: the start script writes a mark after the command's last byte. What is
written behind it is not from the command.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Mapping

from .host import Problem, log

NAMES = ("ctl", "out", "err")
END_MARK_S = 10
"""How long the marks may come after the command's status."""
TIMED_OUT = 124
NEVER_S = 1e9


class Output:
    """One stream: all before the end mark is handed to `write` as it comes, cut anywhere."""

    def __init__(self, write: Callable[[bytes], object], end: bytes) -> None:
        self._write, self._end = write, end
        self._held = b""
        self.ended = False

    def feed(self, data: bytes) -> None:
        if self.ended:
            return
        data = self._held + data
        found = data.find(self._end)
        if found >= 0:
            self.ended, keep = True, len(data) - found
        else:  # what may be the beginning of the mark waits for more
            longest = min(len(self._end) - 1, len(data))
            keep = next((n for n in range(longest, 0, -1) if data.endswith(self._end[:n])), 0)
        whole = len(data) - keep
        self._held = b"" if self.ended else data[whole:]
        self._write(data[:whole])

    def flush(self) -> None:
        """Hand over what was held back: no more comes."""
        self._write(self._held)
        self._held = b""


def to_descriptor(descriptor: int) -> Callable[[bytes], None]:
    """Return a function that writes all of its argument there."""

    def write(data: bytes) -> None:
        while data:
            data = data[os.write(descriptor, data) :]

    return write


class Conversation:
    """One run of the guest, as seen from the host's ends of the channels."""

    def __init__(self, channels: Mapping[str, socket.socket], end: bytes, boot_timeout: float, timeout: float) -> None:
        self._names = {channel: name for name, channel in channels.items()}
        self._outputs = {"out": Output(to_descriptor(1), end), "err": Output(to_descriptor(2), end)}
        self._boot_timeout, self._timeout = boot_timeout, timeout
        self._deadline = time.monotonic() + boot_timeout
        self._running = False
        self._said = b""
        self._status: int | None = None

    def follow(self) -> int | None:
        """Hand on the output until the guest has said how the command ended; return that, or None if it never did."""
        while self._names and not self._finished():
            left = self._deadline - time.monotonic()
            if left <= 0:
                self._too_late()
                break
            for channel in select.select(list(self._names), [], [], min(left, 3600))[0]:
                self._receive(channel)
        for output in self._outputs.values():
            output.flush()
        return self._status

    def _finished(self) -> bool:
        return self._status is not None and all(output.ended for output in self._outputs.values())

    def _too_late(self) -> None:
        if self._status is not None:
            return  # a mark never came, because something else still holds the output
        if not self._running:
            raise Problem(f"the guest did not boot within {self._boot_timeout:g} s")
        log.info("the command exceeded its limit of %g s", self._timeout)
        self._status = TIMED_OUT

    def _receive(self, channel: socket.socket) -> None:
        data = channel.recv(1 << 16)
        name = self._names[channel]
        if not data:
            del self._names[channel]
        elif name in self._outputs:
            self._outputs[name].feed(data)
        else:
            *lines, self._said = (self._said + data).split(b"\n")
            for line in lines:
                self._hear(line.decode(errors="replace"))

    def _hear(self, line: str) -> None:
        log.debug("it says: %s", line)
        word, _, rest = line.partition(" ")
        if word == "problem":
            raise Problem(rest)
        if line == "stage command":
            self._running = True
            self._deadline = time.monotonic() + (self._timeout or NEVER_S)
        elif word == "exit":
            self._status = int(rest)
            self._deadline = time.monotonic() + END_MARK_S
