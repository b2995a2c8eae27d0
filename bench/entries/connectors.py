"""Install torch, Ray and NIXL in environments of their own, compare aiote's connectors with theirs, keep the records.

usage: run.py connectors [--install] [torch ray idle]

Each contestant is measured alone: its processes, and the threads in them that poll, have ended before those of the next
begin. They take turns. The environments lie in .venv-compared, apart from those of the tests. The records go to
docs/measured, and from there into docs/connectors.md (bench/measured.py). `--install` installs and measures nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import measured
from environment import ROOT, exact, say

import connectors

FOLDER = ROOT / ".venv-compared"
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")


class Comparison(NamedTuple):
    """A benchmark, the environment that it runs in, and whose versions its record names."""

    host: str
    entry: str
    packages: tuple[str, ...]


COMPARISONS = {
    "torch": Comparison("torch", "torch-transports", ("torch", "nixl")),
    "ray": Comparison("ray", "ray-transports", ("ray", "torch", "nixl")),
    "idle": Comparison("torch", "idle-transports", ("torch", "nixl")),
}


def python_of(host: str) -> Path:
    return FOLDER / host / "bin" / "python"


def installed(host: str) -> str:
    """Make a host's environment what its file says, with NIXL; return why it is not."""
    python, stamp = python_of(host), FOLDER / host / ".installed-nixl"
    if why := connectors.installed(host, python):
        return why
    # `connectors.installed` has emptied the environment, and with it this stamp, where it had to begin anew.
    if not stamp.exists() or stamp.read_text() != " ".join(NIXL):
        if connectors.run(python, *connectors.PIP, "install", "--no-deps", *NIXL, env=exact()):
            return "NOT INSTALLED: NIXL could not be installed; pip's error is above"
        stamp.write_text(" ".join(NIXL))
    return ""


def versions(host: str, packages: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of aiote and of packages in a host's environment."""
    asked = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    names = ("aiote", *packages)
    done = subprocess.run([python_of(host), "-c", asked, *names], capture_output=True, text=True, check=True)
    return dict(zip(names, done.stdout.split(), strict=True))


def compared(name: str) -> int:
    """Run a comparison and keep its record; return the status."""
    one = COMPARISONS[name]
    with tempfile.TemporaryDirectory() as folder:
        # Not in the checkout: Ray's workers would import what is not compiled there.
        found = Path(folder) / "found.json"
        if status := connectors.run(python_of(one.host), "-P", ROOT / "bench" / "run.py", one.entry, found, cwd=folder):
            return status
        command = f"bench/run.py connectors {name}"
        say(f"added {measured.add(name, found, command, versions(one.host, one.packages)).relative_to(ROOT)}")
    return measured.main(["write"])


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare aiote's connectors with NIXL's and Ray's own.")
    parser.add_argument("--install", action="store_true", help="install the environments, and measure nothing")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(COMPARISONS)}; or all")
    given = parser.parse_args()
    if unknown := set(given.names) - set(COMPARISONS):
        parser.error(f"no such comparison: {', '.join(sorted(unknown))}; there are {', '.join(COMPARISONS)}")
    names = given.names or list(COMPARISONS)
    for host in sorted({COMPARISONS[name].host for name in names}):
        if why := installed(host):
            print(f"{host}: {why}", file=sys.stderr)
            return 1
    return 0 if given.install else max(compared(name) for name in names)


if __name__ == "__main__":
    sys.exit(main())
