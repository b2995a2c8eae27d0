"""Test on every Python that the README names and this machine has, and with other versions of packages than the pins.

usage: test_versions.py [PYTHON...] [pinned|lowest|newest...], for example: test_versions.py 3.13 lowest

pinned   `make check`: lint, types and the quick tests, with the versions of tools/constraints.txt
lowest   every test with the lower bounds that pyproject.toml gives users; everything else is as pinned
newest   every test with the newest NumPy and anyio; everything else is as pinned

The guest is left out: what needs RDMA devices is told as not run. A Python that is not here is named at the end, and
fails where it was asked for, or where no other was run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import tomllib
import venv
from pathlib import Path

import pythons
from environment import PINS, ROOT, install_requirements, pip_install, usual_environment
from pins import canonical
from run_tests import REPORTS, newest_library
from test_reports import Outcome, banner, concluded, read

from connectors import wheel

FOLDER = ROOT / "build" / "versions"
KINDS = ("pinned", "lowest", "newest")
RUNNING = "{}.{}".format(*sys.version_info)
NEWEST = ("anyio", "numpy")
# What users install. Not torch, whose tests `make test-connectors` runs, and not what needs a GPU.
EXTRAS = (
    "cli",
    "libfabric",
    "trio",
    "uvloop",
    "plot",
    "safetensors",
    "weights",
    "etcd",
    "serve",
    "prometheus",
    "opentelemetry",
)
# Where the lower bound has no wheel for a Python: the first release that has one.
FIRST_WHEELS: dict[str, dict[str, str]] = {}
# What a lower bound was released beside: typer 0.19 uses names of click that later ones warn of.
# contourpy 1.4, which matplotlib needs, takes no NumPy before 2.
# matplotlib 3.8 calls names that pyparsing 3.3 warns of.
OF_THE_TIME = {"click": "8.1.7", "contourpy": "1.2.0", "pyparsing": "3.1.1"}
# What tests have beside a user's package, and only fits the same version of it.
COMPANIONS = {"opentelemetry-sdk": "opentelemetry-api", "opentelemetry-semantic-conventions": "opentelemetry-api"}
# Lint and the tests of pages are about this checkout and its tools, which stay as pinned.
LEFT_OUT = ("docs", "lint", "plugins", "tools")


def bounds(python: str) -> dict[str, str]:
    """Return the lowest version of each of the users' packages on a Python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for e in EXTRAS for line in project["optional-dependencies"][e])]
    pairs = (re.match(r"([\w.-]+)>=([\d.]+)", line) for line in lines)
    return {canonical(pair[1]): pair[2] for pair in pairs if pair} | OF_THE_TIME | FIRST_WHEELS.get(python, {})


def constraints(kind: str, python: str) -> str:
    """Return the pins with other versions of some packages, or with none."""
    other = bounds(python) if kind == "lowest" else dict.fromkeys(NEWEST)
    pairs = [(line.partition("==")[0], line) for line in PINS.read_text().splitlines()]
    kept = [line for name, line in pairs if COMPANIONS.get(name, name) not in other]
    return "\n".join([*kept, *(f"{name}=={version}" for name, version in other.items() if version)]) + "\n"


def prepared(kind: str) -> Path | None:
    """Make an environment with other versions, always anew; return its interpreter."""
    place = FOLDER / f"{RUNNING}-{kind}"
    pins = place.with_suffix(f"{place.suffix}.txt")
    FOLDER.mkdir(parents=True, exist_ok=True)
    pins.write_text(constraints(kind, RUNNING))
    venv.create(place, clear=True, with_pip=True)
    try:
        install_requirements(place, "dev", pins)
        if (built := wheel()) is None:
            return None
        pip_install(place, "--no-index", "--no-deps", str(built))
    except SystemExit as error:
        print(error)
        return None
    return place / "bin" / "python"


def suite(kind: str) -> Outcome:
    """Run every test once with other versions, on this Python."""
    name, started = f"Python {RUNNING}, {kind}", time.monotonic()
    banner(f"every test on {name}")
    if (python := prepared(kind)) is None:
        return Outcome(name, False, "NOT INSTALLED: the error is above", time.monotonic() - started)
    report = REPORTS / f"{RUNNING}-{kind}.xml"
    report.unlink(missing_ok=True)
    chosen = ["--combinations", "tests", *(f"--ignore=tests/{folder}" for folder in LEFT_OUT)]
    environment = usual_environment()
    environment["AIOTE_LIBFABRIC"] = str(newest_library() or "")
    pytest = [str(python), "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", *chosen]
    status = subprocess.run(pytest, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL).returncode
    found = read(report)
    return Outcome(name, status == 0, versions(python), time.monotonic() - started, found)


def versions(python: Path) -> str:
    asked = "from importlib.metadata import version as v; print(', '.join(f'{n} {v(n)}' for n in %r))"
    names = ("numpy", "anyio", "msgspec")
    return subprocess.run([python, "-c", asked % (names,)], capture_output=True, text=True).stdout.strip()


def tested(python: str, path: str, kinds: list[str]) -> dict[str, str]:
    """Run `make check` on a Python, and have its environment run the other kinds; return what became of each."""
    place = Path(sys.prefix) if python == RUNNING else ROOT / f".venv-{python}"
    make = [os.environ.get("MAKE", "make"), "--no-print-directory", f"PYTHON={path}", f"VENV={place}", "ARGS="]
    target = "check" if "pinned" in kinds else "venv"
    banner(f"Python {python}: make {target} in {place.name}")
    steps: dict[str, list[str]] = {f"make {target}": [*make, target]}
    others = [kind for kind in kinds if kind != "pinned"]
    steps |= {kind: [str(place / "bin" / "python"), __file__, "--here", kind] for kind in others}
    became = {}
    for name, command in steps.items():
        done = subprocess.run(command, cwd=ROOT, env=usual_environment(), stdin=subprocess.DEVNULL)
        became[f"Python {python}, {name}"] = "FAILED" if done.returncode else "passed"
        if not (place / "bin" / "python").exists():
            break
    return became


def main() -> int:
    given = sys.argv[1:]
    if given[:1] == ["--here"]:
        outcome = suite(given[1])
        return concluded([outcome], on=f"Python {RUNNING}, {given[1]}: {outcome.detail}")
    if unknown := set(given) - {*KINDS, *pythons.named()}:
        print(f"no such version or kind: {', '.join(sorted(unknown))}; see {__file__}", file=sys.stderr)
        return 2
    kinds = [kind for kind in KINDS if kind in given] or list(KINDS)
    wanted = [python for python in pythons.named() if python in given] or pythons.named()
    here, became = pythons.found(), dict[str, str]()
    for python in wanted:
        if python in here:
            became |= tested(python, here[python], kinds)
        else:
            became[f"Python {python}"] = f"NOT RUN: THERE IS NO python{python} HERE"
    asked = any(python in given for python in wanted if python not in here)
    failed = "FAILED" in became.values() or asked or "passed" not in became.values()
    banner("FAILED" if failed else "passed")
    print(*(f"  {name:28} {what}" for name, what in became.items()), sep="\n", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
