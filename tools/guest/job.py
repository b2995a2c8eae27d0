"""What the guest is told to do: a folder with its start script and the batches of commands for `ip` and `rdma`."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import network
from .host import SYSTEM_PATH, Problem
from .options import Options
from .ways import Way

# Process 1 in the guest's final root, whichever way it came to be; what stands between @ is filled in.
SETUP = r"""#!/bin/sh
export PATH=@PATH@
@CHANNELS@
exec 3>$ctl </dev/null >/dev/console 2>&1
give_up() { echo "problem $*" >&3; sleep 60; exit 1; }
echo "stage root" >&3
mkdir -p /dev/pts /dev/shm
mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t tmpfs -o mode=755 run /run
[ -e /dev/fd ] || ln -s /proc/self/fd /dev/fd
echo rdma-vm >/proc/sys/kernel/hostname
# perftest measures by the processor's cycle counter, and user-mode Linux does not say how fast that is.
if [ -n "@MHZ@" ] && ! grep -q MHz /proc/cpuinfo; then
    sed "/^bogomips/a cpu MHz\t\t: @MHZ@" /proc/cpuinfo >/run/cpuinfo && mount --bind /run/cpuinfo /proc/cpuinfo
fi
@MOUNTS@
for k in all default; do
    echo 1 >/proc/sys/net/ipv4/conf/$k/accept_local
    echo 0 >/proc/sys/net/ipv4/conf/$k/rp_filter
    echo 0 >/proc/sys/net/ipv6/conf/$k/accept_dad
done
ip -b @JOB@/ip || give_up "cannot set up the network"
rdma -b @JOB@/rdma || give_up "cannot make the RDMA devices"
cd @CWD@ || give_up "cannot enter the current directory"
ulimit -c 0; ulimit -l unlimited
echo "stage command" >&3
# In a child: this process lives on to report how the command ended.
env -i @ENV@ @COMMAND@ >$out 2>$err 3>&- 4>&- 5>&- &
wait $!
status=$?
cd /; sync
# Tell the host where the output ends; what comes after is not from the command.
printf %s @END@ >$out
printf %s @END@ >$err
echo "exit $status" >&3
sleep 60
"""


@dataclass(frozen=True)
class Place:
    """Where the command runs: a directory, the variables, and {tag: folder} of what is written through to the host."""

    cwd: str
    environment: Mapping[str, str]
    shares: Mapping[str, str]


def shared_folders(cwd: str, more: Sequence[str], discard: bool) -> dict[str, str]:
    """Return {tag: folder} of the current directory, unless it is to be discarded, and the others asked for."""
    folders = [] if discard else [cwd]
    for folder in more:
        path = os.path.abspath(folder)
        if not os.path.isdir(path):
            raise Problem(f"--rw {folder}: there is no such folder")
        if path not in folders:
            folders.append(path)
    if "/" in folders:
        raise Problem("the guest would write through to all of /: change to another folder, or use --discard")
    return {f"rw{number}": folder for number, folder in enumerate(folders)}


def write(options: Options, way: Way, job: Path, place: Place, end: str) -> None:
    """Write everything into the folder `job`."""
    (job / "setup").write_text(script(options, way, job, place, end))
    (job / "ip").write_text("".join(f"{line}\n" for line in network.cables(options.nics, options.mtu)))
    (job / "rdma").write_text("".join(f"{line}\n" for line in network.devices(options.nics, options.driver)))
    job.chmod(0o755)


def megahertz(cpuinfo: Path) -> str:
    """Return the speed of the host's first processor as it says it, or an empty string."""
    found = re.search(r"^cpu MHz\s*: ([\d.]+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return found[1] if found else ""


def script(options: Options, way: Way, job: Path, place: Place, end: str) -> str:
    """Return the start script; `end` is what the command's output is followed by."""
    mounts = [
        f"{way.mount(tag, folder)} || give_up cannot share {shlex.quote(folder)}"
        for tag, folder in place.shares.items()
    ]
    names = {name: value for name, value in place.environment.items() if name.isidentifier()}
    values = {
        "PATH": SYSTEM_PATH,
        "JOB": str(job),
        "MHZ": megahertz(Path("/proc/cpuinfo")),
        "CHANNELS": way.channels,
        "MOUNTS": "\n".join(mounts),
        "CWD": shlex.quote(place.cwd),
        "ENV": shlex.join(f"{name}={value}" for name, value in {**names, "RDMA_VM": way.name}.items()),
        "COMMAND": shlex.join(options.command),
        "END": end,
    }
    return re.sub("@([A-Z]+)@", lambda match: values[match.group(1)], SETUP)
