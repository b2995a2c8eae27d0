"""Find out whether the tiles of AMX work here, and keep vLLM from them where they do not.

    python tools/amx_tiles.py          # exit status 0: a tile was configured and cleared; else it died or was refused

A processor may list AMX where the kernel, or a machine monitor below it, does not grant the tiles. vLLM looks at the
list alone and dies of an illegal instruction as soon as it batches. Only using a tile shows whether they work, and a
process that uses one in vain gets SIGILL, so a child does.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

WITHOUT = Path(__file__).resolve().parents[1] / "programs" / "hosts" / "without_tiles"
CPUINFO = Path("/proc/cpuinfo")
# ldtilecfg (%rdi); tilezero %tmm0; tilerelease; ret
CODE = bytes.fromhex("c4e2784907 c4e27b49c0 c4e27849c0 c3")
# Palette 1; tile 0 has 16 rows (byte 48) of 64 bytes (bytes 16 and 17). Intel SDM, volume 1, 18.3.
CONFIGURATION = bytes([1, *[0] * 15, 64, *[0] * 31, 16, *[0] * 15])
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA = 158, 0x1023, 18  # Documentation/arch/x86/xstate.rst of Linux


def listed(cpuinfo: Path = CPUINFO) -> bool:
    """Return whether the processor's list of features has AMX."""
    try:
        return " amx_tile " in cpuinfo.read_text().replace("\n", " ")
    except OSError:
        return False


def use_one() -> int:
    """Use a tile in this process, which may die of it; return 0 if it worked."""
    if platform.machine() != "x86_64":
        return 1
    if ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA):
        return 1
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(CODE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    ctypes.CFUNCTYPE(None, ctypes.c_char_p)(address)(CONFIGURATION)
    return 0


def work() -> bool:
    """Return whether a tile works, in a child."""
    return not subprocess.run([sys.executable, "-P", __file__], capture_output=True, timeout=60).returncode


def environment(given: Mapping[str, str] = os.environ, *, works: bool | None = None) -> tuple[dict[str, str], str]:
    """Return the environment for programs with vLLM, and what the summary is to say of it: "" where nothing is to do.

    works: whether tiles work, if it is known.
    """
    if not listed() or (work() if works is None else works):
        return dict(given), ""
    path = os.pathsep.join([str(WITHOUT), *filter(None, [given.get("PYTHONPATH")])])
    return {**given, "PYTHONPATH": path}, "AMX is listed but its tiles do not work here: vLLM took its vector kernel"


if __name__ == "__main__":
    sys.exit(use_one())
