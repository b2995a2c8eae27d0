"""Install a wheel where nothing else is, and use it: a root folder with Python alone, no compiler, no RDMA library.

The root is Debian's packages of `python3.N`, its venv and what they depend on, unpacked and entered by chroot in
namespaces of its own, without a network. A Python that the host's release lacks is a copy of this machine's, or else
comes from a later release. pip installs the wheel there from a folder of wheels. Then run `aiote info`, `aiote doctor`,
`aiote demo kvcache` and the README's first program, the last two over `local` and over `socket`.

A wheel for one Python runs there on this one; a wheel for all Pythons runs on each that can be had. Of a folder of
wheels, each Python gets the one that pip takes.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import debian_root
import pythons
import wheels

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("dash", "coreutils", "libstdc++6")  # the last one for NumPy
LIBRARIES = ("libpython3-stdlib", "libexpat1")  # for a copied Python: the libraries that Debian's own one needs
NOT_COPIED = ("include", "site-packages", "test", "tests", "__pycache__", "*.a", "share")
ABSENT = ("*/libfabric.so*", "*/libibverbs.so*", "usr/bin/cc", "usr/bin/gcc", "usr/bin/*-gcc*", "*/Python.h")
NOT_RUN = "*** NOT RUN on Python {}, which neither this machine nor Debian has"
PROVIDERS = ("local", "socket")
SAID = ["straight into the other side's memory", "thanks"]
ENTER = """\
mount --rbind /dev {root}/dev && mount --rbind /sys {root}/sys && mount -t proc proc {root}/proc &&
mount -t tmpfs tmpfs {root}/tmp && ip link set lo up &&
exec chroot {root} /usr/bin/env -i PATH=/env/bin:/usr/bin:/bin "$@"
"""


def say(text: str) -> None:
    print(f"--- {text}", flush=True)


@dataclass(frozen=True)
class Origin:
    """Where the Python of a root folder comes from: a release of Debian, or a folder of this machine."""

    version: str
    suite: str | None = None
    copied: Path | None = None

    @property
    def packages(self) -> tuple[str, ...]:
        own = (f"python{self.version}", f"python{self.version}-venv")
        return (*(LIBRARIES if self.copied else own), *TOOLS)

    @property
    def python(self) -> Path:
        return (self.copied or Path("/usr")) / "bin" / f"python{self.version}"

    def __str__(self) -> str:
        of = (
            "a copy of this machine's" if self.copied else f"Debian's, of {self.suite or 'the release of this machine'}"
        )
        return f"Python {self.version}, {of}"


def origin(version: str) -> Origin | None:
    """Return where a Python can be had: in the host's release, on this machine, or in a later release."""
    machine, packages = os.uname().machine, (f"python{version}", f"python{version}-venv")
    if debian_root.Apt(debian_root.default_cache(), None, machine).has(packages):
        return Origin(version)
    if path := pythons.found().get(version):
        prefix = Path(pythons.said(path, "import sys; print(sys.base_prefix)"))
        if prefix != Path("/usr"):
            return Origin(version, copied=prefix)
    suite = debian_root.suite_with(packages, machine)
    return Origin(version, suite) if suite else None


class CleanRoot:
    """A root folder that Python runs in, and nothing else of the host's."""

    def __init__(self, folder: Path, source: Origin) -> None:
        self.folder, self.source = folder, source
        say(f"a root folder with {source}")
        debian_root.unpack(folder, source.packages, os.uname().machine, source.suite)
        if source.copied:
            there = folder / source.copied.relative_to("/")
            shutil.copytree(source.copied, there, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
        for name in ("dev", "sys", "proc", "tmp", "wheels"):
            (folder / name).mkdir(exist_ok=True)
        # pip opens this file, with a network or without; the package that writes it was never configured.
        authorities = sorted((folder / "usr" / "share" / "ca-certificates").glob("**/*.crt"))
        (bundle := folder / "etc" / "ssl" / "certs" / "ca-certificates.crt").parent.mkdir(parents=True, exist_ok=True)
        bundle.write_text("".join(path.read_text() for path in authorities))
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
        number = self.source.version.replace(".", "")
        platforms = [f"--platform=manylinux_2_{each}_{os.uname().machine}" for each in (28, 27, 17)]
        options = ["--only-binary=:all:", f"--python-version={number}", *platforms, f"--platform={_platform(wheel)}"]
        fetch = [*pip, *options, "--find-links", house, f"aiote[cli] @ {wheel.absolute().as_uri()}"]
        if subprocess.run([str(word) for word in fetch]).returncode:
            raise SystemExit("error: the wheel's dependencies cannot be downloaded")
        self.run(str(self.source.python), "-m", "venv", "/env")
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


def check(wheel: Path, source: Origin) -> None:
    """Install a wheel in a clean root with that Python, and use it."""
    with tempfile.TemporaryDirectory(prefix="aiote-clean-") as folder:
        clean = CleanRoot(Path(folder), source)
        clean.install(wheel)
        prove(clean)


def versions_of(wheel: Path) -> list[str]:
    """Return the Pythons that a wheel is for, of those that the README names."""
    minor, abi = re.findall(r"-cp3(\d+)-(\w+)-", wheel.name)[0]
    known = pythons.named()
    return known[known.index(f"3.{minor}") :] if abi == "abi3" else [f"3.{minor}"]


def pairs(path: Path, versions: list[str] | None) -> list[tuple[Path, str]]:
    """Return which wheel is to run on which Python."""
    if path.is_dir():
        return [(wheels.taken(path, version, os.uname().machine), version) for version in versions or pythons.named()]
    return [(path, version) for version in versions or versions_of(path)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Install a wheel in a clean root and use it.")
    parser.add_argument("wheel", type=Path, help="the wheel, or a folder with some")
    parser.add_argument("--python", nargs="+", help="on which Pythons (each that the wheel is for)")
    parser.add_argument("--suite", help="the release of Debian that has them (found out)")
    arguments = parser.parse_args()
    became: dict[tuple[Path, str], str] = {}
    for wheel, version in pairs(arguments.wheel, arguments.python):
        source = Origin(version, arguments.suite) if arguments.suite else origin(version)
        if source:
            check(wheel, source)
        became[wheel, version] = f"works without compiler, libfabric and libibverbs on {source}" if source else NOT_RUN
    for (wheel, version), said in became.items():
        print(f"--- {wheel.name}: {said.format(version)}", flush=True)
    if all(said == NOT_RUN for said in became.values()):
        raise SystemExit("error: it was run on no Python")


if __name__ == "__main__":
    main()
