"""Install a wheel where nothing else is, and use it: a root folder with Python alone, no compiler, no RDMA library.

The root is Debian's packages of `python3.N`, its venv and what they depend on, unpacked and entered by chroot in
namespaces of its own, without a network. pip installs the wheel there from a folder of wheels. Then run `aiote info`,
`aiote doctor`, `aiote demo kvcache` and the README's first program, the last two over `local` and over `socket`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import debian_root

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("dash", "coreutils", "libstdc++6")  # the last one for NumPy
ABSENT = ("*/libfabric.so*", "*/libibverbs.so*", "usr/bin/cc", "usr/bin/gcc", "usr/bin/*-gcc*", "*/Python.h")
PROVIDERS = ("local", "socket")
SAID = ["straight into the other side's memory", "thanks"]
ENTER = """\
mount --rbind /dev {root}/dev && mount --rbind /sys {root}/sys && mount -t proc proc {root}/proc &&
mount -t tmpfs tmpfs {root}/tmp && ip link set lo up &&
exec chroot {root} /usr/bin/env -i PATH=/env/bin:/usr/bin:/bin "$@"
"""


def say(text: str) -> None:
    print(f"--- {text}", flush=True)


class CleanRoot:
    """A root folder that Python runs in, and nothing else of the host's."""

    def __init__(self, folder: Path, version: str, suite: str | None) -> None:
        self.folder, self.version = folder, version
        say(f"a root folder with Debian's Python {version}{f' of {suite}' if suite else ''}")
        packages = (f"python{version}", f"python{version}-venv", *TOOLS)
        debian_root.unpack(folder, packages, os.uname().machine, suite)
        for name in ("dev", "sys", "proc", "tmp", "wheels"):
            (folder / name).mkdir(exist_ok=True)
        if found := [str(path) for pattern in ABSENT for path in folder.glob(f"**/{pattern}")]:
            raise SystemExit(f"error: the root folder has files that it must not have: {found}")

    def run(self, *command: str, text: str | None = None, status: int = 0) -> str:
        """Run a command in it, with no network but loopback; return what it says. Another status ends all."""
        say(" ".join(command))
        enter = ["unshare", "--map-root-user", "--mount", "--net", "--pid", "--fork", "sh", "-c"]
        done = subprocess.run(
            [*enter, ENTER.format(root=self.folder), "sh", *command],
            input=text or "",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        print(done.stdout, end="", flush=True)
        if done.returncode != status:
            raise SystemExit(f"error: {' '.join(command)} ended with status {done.returncode}")
        return done.stdout

    def install(self, wheel: Path) -> None:
        """Have pip in the root install the wheel with its command line, from wheels that are fetched here."""
        house = self.folder / "wheels"
        shutil.copy(wheel, house)
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--dest", house)
        number = self.version.replace(".", "")
        platforms = [f"--platform=manylinux_2_{each}_{os.uname().machine}" for each in (28, 27, 17)]
        options = ["--only-binary=:all:", f"--python-version={number}", *platforms, f"--platform={_platform(wheel)}"]
        fetch = [*pip, *options, "--find-links", house, f"aiote[cli] @ {wheel.absolute().as_uri()}"]
        if subprocess.run([str(word) for word in fetch]).returncode:
            raise SystemExit("error: the wheel's dependencies cannot be downloaded")
        self.run(f"/usr/bin/python{self.version}", "-m", "venv", "/env")
        self.run("/env/bin/pip", "install", "--no-index", "--find-links=/wheels", "aiote[cli]")


def _platform(wheel: Path) -> str:
    return wheel.stem.rpartition("-")[2].split(".")[0]


def first_program(provider: str) -> str:
    """Return the README's first program over a provider."""
    (program,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return str(program).replace("aiote.open_engine()", f'aiote.open_engine("{provider}")')


def prove(clean: CleanRoot) -> None:
    """Use what was installed."""
    clean.run("/env/bin/python", "-W", "error", "-c", "import sys, aiote; print(sys.version, aiote.__version__)")
    said = clean.run("/env/bin/aiote", "info")
    if "libfabric" not in said:
        raise SystemExit("error: aiote info does not say that there is no libfabric")
    # What lacks libfabric is told so, with the command that brings it; the rails of our own need none.
    said = clean.run("/env/bin/aiote", "doctor", status=1)
    if "no libfabric was found" not in said or "libibverbs.so.1: cannot be opened" not in said:
        raise SystemExit("error: aiote doctor does not say which libraries are missing")
    for provider in PROVIDERS:
        said = clean.run("/env/bin/python", "-W", "error", "-", text=first_program(provider))
        if said.splitlines() != SAID:
            raise SystemExit(f"error: the README's program said {said!r} over {provider}")
        clean.run("/env/bin/aiote", "demo", "kvcache", "--provider", provider)


def check(wheel: Path, version: str, suite: str | None = None) -> None:
    """Install a wheel in a clean root with that Python, and use it."""
    with tempfile.TemporaryDirectory(prefix="aiote-clean-") as folder:
        clean = CleanRoot(Path(folder), version, suite)
        clean.install(wheel)
        prove(clean)
    say(f"{wheel.name} works on Debian's Python {version}, without compiler, libfabric and libibverbs")


def main() -> None:
    parser = argparse.ArgumentParser(description="Install a wheel in a clean root and use it.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", default="3.11", help="which Python (3.11)")
    parser.add_argument("--suite", help="the release of Debian that has it (this host's)")
    arguments = parser.parse_args()
    check(arguments.wheel, arguments.python, arguments.suite)


if __name__ == "__main__":
    main()
