"""Check what is in dist/ before it is published: names, sums, links, an offline build, a clean install, `make check`.

`make check` runs against the wheel that pip takes for this Python, installed into an environment of its own. What takes
long may be left out by name. Each step says what it found; the first that fails ends the program.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import version
import wheels

ROOT = Path(__file__).resolve().parents[1]
STEPS = ("changelog", "sums", "links", "sdist", "clean", "check")
NO_NETWORK = ("unshare", "--map-root-user", "--net")


def say(text: str) -> None:
    print(f"--- {text}", flush=True)


def run(*command: str | Path, **environment: str) -> None:
    say(" ".join(map(str, command)))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    if status := subprocess.run([*map(str, command)], env={**os.environ, "PATH": path, **environment}).returncode:
        raise SystemExit(f"error: {command[0]} ended with status {status}")


def released(dist: Path) -> str:
    """Return the version that is in dist/, of which there must be one."""
    found = {path.name.split("-")[1].removesuffix(".tar.gz") for path in dist.glob("aiote-*")}
    if len(found) != 1:
        raise SystemExit(f"error: {dist} has versions {sorted(found)}; there must be one: run make wheels")
    return found.pop()


def changelog_complaint(found: str, text: str) -> str:
    """Say what the changelog lacks: a final version has a dated section, one between tags is of the topmost."""
    headings = version.headings(text)
    final = re.fullmatch(r"\d+\.\d+\.\d+", found)
    base = found if final else re.split(r"\.dev|a|b|rc", found)[0]
    if headings[0][0] != base:
        return f"the changelog's topmost version is {headings[0][0]}, not {base}"
    if final and not re.fullmatch(r"\d{4}-\d{2}-\d{2}", headings[0][1]):
        return f"the changelog says {headings[0][1]!r} where the date of {found} belongs"
    return ""


def changelog(dist: Path) -> None:
    """The changelog has this version, with a date if it is final, and dist/ is of this commit."""
    found = released(dist)
    if wrong := changelog_complaint(found, (ROOT / "CHANGELOG.md").read_text()):
        raise SystemExit(f"error: {wrong}")
    if found != version.version():
        raise SystemExit(f"error: dist/ is {found}, this checkout {version.version()}; run make wheels")
    say(f"version {found}")


def sums(dist: Path) -> None:
    """The sums fit, and leave out no file."""
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=dist, check=True)
    listed = {line.split()[1] for line in (dist / "SHA256SUMS").read_text().splitlines()}
    if forgotten := {path.name for path in dist.glob("aiote-*")} - listed:
        raise SystemExit(f"error: SHA256SUMS lacks {sorted(forgotten)}")


def links(dist: Path) -> None:
    """Each wheel's tags are true, and it links the C library alone."""
    found = sorted(dist.glob("*.whl"))
    for path in found:
        if wrong := wheels.complaints(path, wheels.target_of(path), wheels.GLIBC):
            raise SystemExit("error: " + "\n  ".join(wrong))
        say(f"{path.name}: tags and links are right")
    if not found:
        raise SystemExit("error: there is no wheel; run make wheels")


def sdist(dist: Path) -> None:
    """The sdist builds where no network is, with what pyproject.toml names installed."""
    (source,) = dist.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as folder:
        options = ("--no-index", "--no-deps", "--no-build-isolation", "--target", folder)
        run(
            *NO_NETWORK,
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "--quiet",
            *options,
            source,
        )
        # Without `site`, whose .pth files would put an editable install before it; what it imports is there by a path.
        paths = f"import sys; sys.path[:0] = [{folder!r}, {sysconfig.get_path('purelib')!r}]"
        say_version = "import aiote, aiote_native.engine.core as core; print(aiote.__version__, core.__file__)"
        run(*NO_NETWORK, sys.executable, "-P", "-S", "-c", f"{paths}; {say_version}")


def clean(dist: Path) -> None:
    """Every wheel for this processor works in a root folder that has Python alone, on each Python that it is for."""
    for path in sorted(dist.glob(f"*{os.uname().machine}.whl")):
        run(sys.executable, ROOT / "tools" / "clean_install.py", path)


def check(dist: Path) -> None:
    """`make check` passes with the wheel installed."""
    venv = ROOT / "build" / "release-venv"
    shutil.rmtree(venv, ignore_errors=True)
    run(sys.executable, ROOT / "tools" / "environment.py", venv, "dev")
    python = venv / "bin" / "python"
    taken = wheels.taken(dist, "{}.{}".format(*sys.version_info), os.uname().machine)
    run(
        python,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        taken,
    )
    run(python, ROOT / "tools" / "run_tests.py", "--check")


def main() -> None:
    parser = argparse.ArgumentParser(description="Check dist/ before it is published.")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where the files are (dist)")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=STEPS, help="some of the steps (all)")
    arguments = parser.parse_args()
    for step in STEPS:
        if step in arguments.only:
            say(f"== {step}")
            globals()[step](arguments.dist.absolute())
    say(f"passed: {', '.join(arguments.only)}")


if __name__ == "__main__":
    main()
