"""The processes of a comparison, as the driver sees them: workers that receive lines and answer in JSON."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

__all__ = ["BenchError", "BenchSide", "JsonLines", "LocalSide", "Pair", "Unsupported", "eventfds"]

PATIENCE_S = 120.0
SHARED_MEMORY = Path("/dev/shm")


class BenchError(Exception):
    """A worker failed; the text says which and why."""


class Unsupported(BenchError):
    """A worker does not support the requested work."""


class BenchSide(Protocol):
    """One worker."""

    name: str

    def send(self, line: str) -> None: ...
    def receive(self, patience: float = PATIENCE_S) -> dict[str, Any]: ...
    def close(self) -> None: ...


class JsonLines:
    """Lines of JSON from a descriptor; the wait for each is limited."""

    def __init__(self, name: str, stream: IO[bytes] | socket.socket) -> None:
        self.name = name
        self._fd = stream.fileno()
        self._unread = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._fd, selectors.EVENT_READ)

    def next(self, patience: float) -> dict[str, Any]:
        """Return the next answer. Raises BenchError for an error, a timeout, and the end of the stream."""
        deadline = time.monotonic() + patience
        while b"\n" not in self._unread:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise BenchError(f"{self.name}: no answer within {patience:.0f} s")
            data = os.read(self._fd, 65536)
            if not data:
                raise BenchError(f"{self.name}: ended without an answer")
            self._unread += data
        line, self._unread = self._unread.split(b"\n", 1)
        try:
            answer = json.loads(line)
        except ValueError:
            raise BenchError(f"{self.name}: not an answer: {line[:200]!r}") from None
        if not isinstance(answer, dict) or "error" in answer:
            raise BenchError(f"{self.name}: {answer['error'] if isinstance(answer, dict) else repr(answer)}")
        if "unsupported" in answer:
            raise Unsupported(f"{self.name}: {answer['unsupported']}")
        return answer

    def close(self) -> None:
        self._selector.close()


class LocalSide:
    """A worker on this machine. `close` ends it in any case."""

    def __init__(
        self, name: str, command: Sequence[str], environment: dict[str, str] | None = None, fds: Sequence[int] = ()
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
            pass_fds=fds,
            process_group=0,  # Ctrl-C goes only to the process that started it, which ends it
        )
        assert self._process.stdout is not None
        self._lines = JsonLines(name, self._process.stdout)

    def send(self, line: str) -> None:
        """Send a line. Raises BenchError when the worker is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        except OSError:
            # The worker's last answer tells more than the broken pipe.
            self._lines.next(1.0)
            raise BenchError(f"{self.name}: ended") from None

    def receive(self, patience: float = PATIENCE_S) -> dict[str, Any]:
        """Return the worker's next answer."""
        return self._lines.next(patience)

    @property
    def pid(self) -> int:
        """The number of its process, which leads a group of its own."""
        return self._process.pid

    @property
    def output(self) -> IO[bytes]:
        """The stream of the worker's answers. A relay reads it."""
        assert self._process.stdout is not None
        return self._process.stdout

    def feed(self, data: bytes) -> None:
        """Pass on data from a relay to the worker."""
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def stop(self) -> None:
        """Stop its processes until `go_on`; if this program ends before, they are killed (bench/peers/common.py)."""
        self._signal(signal.SIGSTOP)
        with contextlib.suppress(ChildProcessError):
            # Until it has stopped or ended; WNOWAIT leaves its end for `close`.
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def go_on(self) -> None:
        """Let its processes run again. Idempotent."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """End the worker: close its input first, kill it after two seconds."""
        process = self._process
        self.go_on()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._lines.close()
        process.stdout.close()
        # libfabric's shm names its endpoints' files so. A killed process has left its own behind, 13 MB each.
        for left in SHARED_MEMORY.glob(f"{process.pid}:*"):
            left.unlink(missing_ok=True)


@contextlib.contextmanager
def eventfds() -> Iterator[tuple[int, int]]:
    """Make the two descriptors through which a pair of raw workers wakes each other over shm."""
    fds = os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


class Pair:
    """The two workers of one contestant, connected.

    stops: workers of this machine that are stopped between their runs, because their threads may poll.
    """

    def __init__(self, name: str, target: BenchSide, initiator: BenchSide, stops: Sequence[LocalSide] = ()) -> None:
        self.name = name
        self.target = target
        self.initiator = initiator
        self._stops = stops
        self.library = ""
        self.broken = ""

    def meet(self) -> None:
        """Connect the two workers."""
        cards = {side: side.receive() for side in (self.target, self.initiator)}
        self.library = str(cards[self.initiator].get("library", ""))
        self.target.send(f"peer {cards[self.initiator]['address']}")
        self.initiator.send(f"peer {cards[self.target]['address']}")
        for side in (self.target, self.initiator):
            side.receive()
        self._stop()

    def _stop(self) -> None:
        for side in self._stops:
            side.stop()

    def go_on(self) -> None:
        """Let both workers run: one that ends may wait for the other."""
        for side in self._stops:
            side.go_on()

    def run(self, line: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Do one run and return the results of initiator and target. Raises BenchError, Unsupported."""
        self.go_on()
        try:
            return self._run(line)
        finally:
            self._stop()

    def _run(self, line: str) -> tuple[dict[str, Any], dict[str, Any]]:
        sides = self.target, self.initiator
        for side in sides:
            side.send(line)
        refusals: list[Unsupported] = []
        for side in sides:
            # Receive both answers, so that the second one is not taken for the answer to the next line.
            try:
                side.receive()
            except Unsupported as refusal:
                refusals.append(refusal)
        if refusals:
            raise refusals[0]
        for side in sides:
            side.send("go")
        result = self.initiator.receive()
        return result, self.target.receive()

    def close(self) -> None:
        """End both workers."""
        self.go_on()
        for side in (self.initiator, self.target):
            side.close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
