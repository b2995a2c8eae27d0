"""The Pythons that pyproject.toml and the README name, and which of them this machine has."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from environment import ROOT


def named() -> list[str]:
    """Return the versions that pyproject.toml's classifiers name, as "3.11", the oldest first."""
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())


def found() -> dict[str, str]:
    """Return the interpreters that are here, by version: of the running one itself, of the others by their command."""
    running = {"{}.{}".format(*sys.version_info): os.path.realpath(sys.executable)}
    return {version: path for version in named() if (path := running.get(version) or interpreter(version))}


def interpreter(version: str) -> str:
    """Return the path of `pythonVERSION`, or an empty string if there is none that runs."""
    # The command may be pyenv's shim, which starts only the version that this variable chooses.
    chosen = {**os.environ, "PYENV_VERSION": version}
    asked = "import sys; print(sys.executable)"
    try:
        done = subprocess.run([f"python{version}", "-c", asked], env=chosen, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
