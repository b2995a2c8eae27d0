"""The host's programs: which are missing, what brings them, and how one is run that is heard only if it fails."""

from __future__ import annotations

import logging
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LAST_LINES = 6

log = logging.getLogger("guest")


class Problem(Exception):
    """Something that the user can put right: shown without a traceback, exit status 125."""


def lacking(programs: Mapping[str, str], path: str | None = None) -> dict[str, str]:
    """Return those of `programs`, each with its Debian package, that are not along `path`, or $PATH."""
    return {program: package for program, package in programs.items() if shutil.which(program, path=path) is None}


def require(missing: Mapping[str, str], purpose: str) -> None:
    """Raise a `Problem` where anything is missing: it names all of that, and one command that installs it."""
    if missing:
        names, packages = ", ".join(missing), " ".join(dict.fromkeys(missing.values()))
        command = f"apt-get install --no-install-recommends {packages}"
        raise Problem(f"this machine lacks {names}, needed to {purpose}; as root: {command}")


def run_quiet(command: Sequence[str], purpose: str, cwd: Path | None = None, limit_s: float = 600) -> str:
    """Run a program and return what it printed; where it fails, a `Problem` has the end of that."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit_s,
        )
    except FileNotFoundError:
        raise Problem(f"`{command[0]}` is not on this machine; it is needed to {purpose}") from None
    except subprocess.TimeoutExpired:
        raise Problem(f"`{shlex.join(command)}` exceeded its limit of {limit_s:g} s; cannot {purpose}") from None
    if done.returncode:
        said = "".join(f"\n    {line}" for line in done.stdout.strip().splitlines()[-LAST_LINES:])
        raise Problem(f"`{shlex.join(command)}` failed; cannot {purpose}:{said}")
    return done.stdout
