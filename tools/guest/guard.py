"""A process beside this one that clears up after it, however it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path


class Guard:
    """Kills the guest's processes and removes its folder when told to, or when this process is gone.

    It waits on a pipe whose other end only this process has. So it must be made before any descriptor that it should
    not hold, and before the guest.
    """

    def __init__(self, job: Path, keep: bool) -> None:
        told, self._tell = os.pipe()
        self._guest: subprocess.Popen[bytes] | None = None
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._tell)
                _stand_by(told, job, keep)
            finally:
                os._exit(0)
        os.close(told)

    def watch(self, guest: subprocess.Popen[bytes]) -> None:
        """Name the guest, which leads a process group."""
        self._guest = guest
        os.write(self._tell, b"%d" % guest.pid)

    def end(self) -> None:
        """Have it done now, and wait for that."""
        os.close(self._tell)
        os.waitpid(self._pid, 0)
        if self._guest is not None:
            self._guest.wait()


def _stand_by(told: int, job: Path, keep: bool) -> None:
    os.setsid()  # away from the terminal's signals
    group = b""
    while data := os.read(told, 64):
        group += data
    try:
        if group:
            os.killpg(int(group), signal.SIGKILL)
    except ProcessLookupError:
        pass
    if not keep:
        shutil.rmtree(job, ignore_errors=True)
