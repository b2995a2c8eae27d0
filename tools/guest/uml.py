"""A guest that is user-mode Linux: one program, its memory a file, its files the host's through hostfs."""

from __future__ import annotations

import mmap
import os
import secrets
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path

from . import kernel
from .host import SYSTEM_PATH, Problem
from .options import PROGRAM, Options

# The guest's first program, straight from the host's files.
INIT = """#!/bin/sh
export PATH=@PATH@
mount -t tmpfs -o mode=755 ram /tmp || exit 1
mkdir /tmp/upper /tmp/work /tmp/root
mount -t overlay -o lowerdir=/,upperdir=/tmp/upper,workdir=/tmp/work root /tmp/root || exit 1
cd /tmp/root
mount -t proc proc proc
mount -t sysfs sys sys
mount -t devtmpfs dev dev
mkdir host.before
pivot_root . host.before && exec chroot . /bin/sh -c 'umount -l /host.before; rmdir /host.before
    exec /bin/sh @JOB@/setup'
"""

# The ways out are serial lines. The command is given pipes to them, so that it sees no terminal; the start script keeps
# these open, so that they last as long as it does.
CHANNELS = """\
for t in 0 1 2; do stty -F /dev/ttyS$t raw -echo; done
mkfifo /dev/out /dev/err
cat /dev/out >/dev/ttyS1 &
cat /dev/err >/dev/ttyS2 &
exec 4>/dev/out 5>/dev/err
ctl=/dev/ttyS0 out=/dev/out err=/dev/err
"""


class Uml:
    """How to prepare, start and talk to such a guest; see `ways.Way`."""

    name = "uml"
    channels = CHANNELS

    def __init__(self, options: Options) -> None:
        self._options = options
        self.home = kernel.home(options.cache, options.source)

    def missing(self) -> dict[str, str]:
        return {}

    def ready(self) -> None:
        if not self.home.is_dir():
            raise Problem(f"there is no user-mode kernel in {self._options.cache}; to build it: {PROGRAM} --build-uml")

    def mount(self, tag: str, folder: str) -> str:
        return f"mount -t hostfs -o {shlex.quote(folder)} {tag} {shlex.quote(folder)}"

    def command(
        self, job: Path, shares: Mapping[str, str], channels: Mapping[str, int]
    ) -> tuple[list[str], dict[str, str]]:
        init = job / "init"
        init.write_text(INIT.replace("@JOB@", str(job)).replace("@PATH@", SYSTEM_PATH))
        init.chmod(0o755)
        command = [
            str(self.home / "linux"),
            f"mem={self._options.memory}M",
            *("rootfstype=hostfs", "rootflags=/", "ro", "panic=-1", "quiet", "con=null"),
            *(f"init={init}", f"uml_dir={job}/", "umid=uml"),
            "random.trust_cpu=on",  # else whoever first asks for random numbers waits for seconds
            *self._options.append,
        ]
        for line, name in enumerate(("ctl", "out", "err")):
            command.append(f"ssl{line}=fd:{channels[name]},fd:{channels[name]}")
        memory = place_for_memory(self._options.memory << 20, os.environ)
        return command, {"HOME": str(job), "PATH": SYSTEM_PATH, "TMPDIR": memory}

    def place(self) -> None:
        """Keep to one processor: the kernel and its processes take turns, which is four times faster there."""
        os.sched_setaffinity(0, {secrets.choice(list(os.sched_getaffinity(0)))})


def place_for_memory(size: int, environment: Mapping[str, str]) -> str:
    """Return a folder for the file that is the guest's memory: with room for it, and not mounted noexec."""
    candidates = ("/dev/shm", environment.get("TMPDIR", "/tmp"), "/tmp", "/var/tmp")
    for folder in candidates:
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.truncate(mmap.PAGESIZE)
                mmap.mmap(file.fileno(), mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_EXEC).close()
                room = os.fstatvfs(file.fileno())
        except OSError:
            continue
        if room.f_bavail * room.f_frsize >= size:
            return folder
    raise Problem(
        f"no folder for temporary files has {size >> 20} MiB free and allows execution; set TMPDIR to one that does"
    )
