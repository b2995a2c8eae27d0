"""Examples that run as people run them: as processes of their own, whose output is read while they run."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from support import ROOT

EXAMPLES = ROOT / "examples"
PATIENCE_S = 60.0  # a guard against hangs only
# A shell's background job ignores SIGINT, and its children would inherit that.
RUN = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.executable, sys.argv[1:])"


def alive(pid: int) -> bool:
    """Tell whether a process runs: a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Program:
    """An example that runs. Its output goes to files, so that it never waits for its reader."""

    def __init__(self, folder: Path, environment: dict[str, str], name: str, *arguments: str) -> None:
        self._paths = folder / "out", folder / "err"
        with open(self._paths[0], "wb") as out, open(self._paths[1], "wb") as err:
            python = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments]
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", RUN, *python],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=folder,
                env=environment,
            )

    @property
    def out(self) -> str:
        return self._paths[0].read_text()

    @property
    def err(self) -> str:
        return self._paths[1].read_text()

    def until(self, true: Callable[[], object], what: str) -> None:
        """Wait for something that this program is to bring about."""
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {what}: {self.err}"
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} within {PATIENCE_S} s: {self.out}{self.err}")
            time.sleep(0.002)

    def address(self) -> str:
        """Wait for the first line and return it."""
        self.until(lambda: "\n" in self.out, "address")
        return self.out.splitlines()[0]

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Wait for the end and return the exit status; whatever else happened, no traceback was shown to a person."""
        status = self.process.wait(PATIENCE_S)
        assert "Traceback" not in self.err, self.err
        assert "Warning" not in self.err, self.err
        return status
