"""Build the native code with a sanitizer, and run the tests of it and of the rails' contract.

    python tools/sanitize.py [--only address|thread] [pytest's arguments]

`address` is AddressSanitizer with UndefinedBehaviorSanitizer: memory that is used after it was freed, beyond its end,
or as what it is not. `thread` is ThreadSanitizer: memory that two threads use and no lock or atomic orders, which is
what the native thread could do. Each build is of its own, in build/sanitize; nothing that is installed changes. The
first report ends the process that it is of, and with it the test. The interpreter and libfabric are not instrumented.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from run_tests import newest_library

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "sanitize"
TESTS = [
    "tests/native",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/rails").glob("test_contract*.py")),
]
# It switches stacks by jumps, which the runtimes take for one stack that overflows.
LEFT_OUT = ["tests/native/test_interleavings.py"]
BUILD_S = 1800


@dataclass(frozen=True)
class Sanitizer:
    """How one is built in and run; `more` are pytest's arguments."""

    name: str
    flags: str
    library: str
    options: dict[str, str]
    more: tuple[str, ...] = ()


SANITIZERS = [
    Sanitizer(
        "address",
        "address,undefined",
        "libasan.so",
        # The interpreter leaves memory behind on purpose; what aiote does is counted by
        # tests/engine/test_bounded_resources.py.
        {
            "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:verify_asan_link_order=0",
            "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        },
    ),
    Sanitizer(
        "thread",
        "thread",
        "libtsan.so",
        {"TSAN_OPTIONS": f"halt_on_error=1:second_deadlock_stack=1:suppressions={ROOT / 'tools' / 'tsan.supp'}"},
    ),
]


def runtime(library: str) -> str:
    """Return the compiler's own file of a sanitizer's runtime."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    found = subprocess.run([*compiler, f"-print-file-name={library}"], capture_output=True, text=True, check=True)
    path = Path(found.stdout.strip())
    if not path.is_absolute():
        raise SystemExit(f"{' '.join(compiler)} has no {library}; gcc brings it (Debian: apt install gcc)")
    return str(path.resolve())


def build(sanitizer: Sanitizer) -> Path:
    """Build with it, and return where the package is."""
    folder = WORK / sanitizer.name
    setup = [f"-Db_sanitize={sanitizer.flags}", "-Dbuildtype=debugoptimized", "-Db_lundef=false"]
    setup.append("-Dc_args=-fno-sanitize-recover=all -fno-omit-frame-pointer")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    command += ["--no-build-isolation", "--no-deps", "--upgrade", "--target", str(folder / "site")]
    command += [f"-Cbuild-dir={folder / 'build'}", *(f"-Csetup-args={option}" for option in setup), str(ROOT)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    subprocess.run(command, env={**os.environ, "PATH": path}, check=True, timeout=BUILD_S)
    return folder / "site"


def run(sanitizer: Sanitizer, given: list[str]) -> int:
    """Run the tests under it; return pytest's status."""
    site = build(sanitizer)
    environment = {**os.environ, **sanitizer.options, "PYTHONPATH": str(site), "PYTHONMALLOC": "malloc"}
    environment["LD_PRELOAD"] = runtime(sanitizer.library)
    # Not to where pytest keeps what a test says, which goes with the process.
    reports = WORK / sanitizer.name / "report"
    for old in reports.parent.glob("report.*"):
        old.unlink()
    for name in sanitizer.options:
        environment[name] += f":log_path={reports}"
    library = newest_library()
    if library is not None:
        environment["AIOTE_LIBFABRIC"] = str(library)
    print(f"== {sanitizer.name}: {sanitizer.flags}", flush=True)
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--timeout=600",
        "--combinations",
        "pairs",
    ]
    command += [*(f"--ignore={path}" for path in LEFT_OUT), *sanitizer.more, *(given or TESTS)]
    status = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL).returncode
    found = sorted(reports.parent.glob("report.*"))
    for report in found:
        print(report.read_text(errors="replace"), flush=True)
    return status or len(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=[one.name for one in SANITIZERS], default=None)
    chosen, given = parser.parse_known_args()
    statuses = {one.name: run(one, given) for one in SANITIZERS if chosen.only in (None, one.name)}
    failed = [name for name, status in statuses.items() if status]
    print(f"sanitizers: {', '.join(failed)} FAILED" if failed else f"sanitizers: {', '.join(statuses)} found nothing")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
