"""Raise the pins: resolve what the targets install, and write it into tools/constraints.txt.

Each Python that the README names and this machine has resolves in a fresh environment, from wheels alone, by
`pip install --dry-run`. A version that all agree on gets a line without a marker; other lines name their Pythons. A
Python that is not here, or cannot have a group, takes the versions of the one before it, or else of the one after it.
Nothing is installed. The machine's own constraints are not followed, because the pins hold on other machines, too.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pythons
from environment import EXTRAS, PINS, TORCH_CPU, exact, requirements

# The connectors are tested with this release, and its wheels without CUDA come from an index of their own. To raise it
# is a change of its own: here and in programs/hosts.
HELD = {"torch": "2.13.0"}
FIRST = "dev"
"""The group that must be resolved; what `make test` needs."""
HEADER = """\
# Written by `make pins`, never by hand: all that the Makefile's targets install, with dependencies.
# Resolved on {found}.{missing}
"""
NOT_RESOLVED = "*** NOT RESOLVED, why is said above: {} on Python {}"
Pins = dict[str, str]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def resolved(python: Path, needs: set[str], pins: Pins | None = None, *extra: str) -> Pins | None:
    """Return what pip would install for these requirements beside these pins, or None if it cannot, as it then says."""
    with tempfile.TemporaryDirectory() as folder:
        report, limits = Path(folder) / "report.json", Path(folder) / "constraints.txt"
        limits.write_text("".join(f"{name}=={version}\n" for name, version in (pins or {}).items()))
        pip = (python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet", "--dry-run")
        options = ("--ignore-installed", "--only-binary=:all:", "--report", report, "--constraint", limits, *extra)
        if subprocess.run([*pip, *options, *sorted(needs)], env=exact(), stdin=subprocess.DEVNULL).returncode:
            return None
        packages = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    return {canonical(each["name"]): each["version"].partition("+")[0] for each in packages}


def together(python: Path, version: str) -> Pins:
    """Resolve what goes into one environment: every group, or those that this Python can have."""
    print(f"--- resolving all groups on Python {version}", flush=True)
    if (pins := resolved(python, {line for group in EXTRAS for line in requirements(group)})) is not None:
        return pins
    needs: set[str] = set()
    for group in (FIRST, *sorted(EXTRAS.keys() - {FIRST})):
        if needs.issuperset(more := {*needs, *requirements(group)}):
            continue
        print(f"--- resolving {group} on Python {version}", flush=True)
        if (found := resolved(python, more)) is not None:
            needs, pins = more, found
        elif group == FIRST:
            break
        else:
            print(NOT_RESOLVED.format(group, version), flush=True)
    if pins is None:
        raise SystemExit(f"error: {FIRST} cannot be resolved on Python {version}; nothing was written")
    return pins


def resolve(version: str, interpreter: str) -> Pins:
    """Resolve everything on one Python; torch by itself, because it lies beside the environment."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([interpreter, "-m", "venv", folder], check=True)
        python = Path(folder) / "bin" / "python"
        pins = together(python, version)
        print(f"--- resolving torch on Python {version}", flush=True)
        held = {f"{name}=={release}+cpu" for name, release in HELD.items()}
        torch = resolved(python, held, pins, *TORCH_CPU)
        if torch is None:
            print(NOT_RESOLVED.format("torch", version), flush=True)
    return {**pins, **(torch or HELD)}


def spans(versions: dict[str, str]) -> list[tuple[str, str]]:
    """Return what a package is pinned to, each time with a marker: from the versions of some Pythons, oldest first."""
    runs: list[tuple[str, str]] = []  # version, and the first Python that has it
    for python, version in versions.items():
        if not runs or runs[-1][0] != version:
            runs.append((version, python))
    marked = []
    for number, (version, first) in enumerate(runs):
        below = runs[number + 1][1] if number + 1 < len(runs) else ""
        bounds = [f"python_version >= '{first}'"] * bool(number) + [f"python_version < '{below}'"] * bool(below)
        marked.append((version, " and ".join(bounds)))
    return marked


def merged(found: dict[str, Pins]) -> list[str]:
    """Return the lines of the constraints, from the pins of each Python, oldest first."""
    lines = []
    for name in sorted({name for pins in found.values() for name in pins}):
        versions = {python: pins[name] for python, pins in found.items() if name in pins}
        lines += [f"{name}=={version}{'; ' * bool(marker)}{marker}" for version, marker in spans(versions)]
    return lines


def main() -> int:
    here = pythons.found()
    if not here:
        raise SystemExit("error: this machine has none of the Pythons that the README names; nothing was written")
    missing = [version for version in pythons.named() if version not in here]
    found = {version: resolve(version, path) for version, path in here.items()}
    said = f" Not here, and so as on the one next to it: {', '.join(missing)}." if missing else ""
    header = HEADER.format(found="Python " + ", ".join(here), missing=said)
    PINS.write_text(header + "".join(f"{line}\n" for line in merged(found)))
    if missing:
        print(f"*** NOT FOUND HERE: Python {', '.join(missing)}, which gets the pins of the nearest version")
    print(f"wrote {PINS}; commit it by itself")
    return 0


if __name__ == "__main__":
    sys.exit(main())
