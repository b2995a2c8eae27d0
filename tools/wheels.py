"""Build the sdist, and from it wheels for each processor, into dist/: with an old glibc, and checked by auditwheel.

There are two kinds. One uses CPython's limited API and serves 3.11 and every later version. The other is for one
version of Python, and takes up to 13 % less CPU for small requests (docs/releasing.md); pip prefers it. One is built
for each version that the README names and whose headers this machine has, or Debian; the others are named at the end.

zig is the compiler: it brings the C library's symbols of any release, for other processors too. Headers of libfabric
and libibverbs are this machine's. Those of a Python are the same on every 64-bit Linux processor. The libraries
themselves are opened at run time, so none may be linked: that is checked.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pythons

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "wheels"  # always the same, so that zig knows again what it has compiled
MACHINES = ("x86_64", "aarch64")
GLIBC = "2.28"
KINDS = ("limited", "own")
OLDEST = "3.11"  # its limited API serves all later versions
TAGS = re.compile(r"-cp3(\d+)-(abi3|cp3\1)-.*(x86_64|aarch64)\.whl$")
OLDER = re.compile(r"manylinux_(\d+)_(\d+)_")
# Releases of the C library that wheels of ours and of what aiote needs are tagged with.
TAGGED = ("manylinux_2_28", "manylinux_2_27", "manylinux2014", "manylinux_2_17")
NEEDED = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
# Headers that are the same on every processor; a folder of their own keeps this machine's C library out.
HEADERS = {"rdma": "fabric.h", "infiniband": "verbs.h"}
# What a Python says of itself where it is asked about another processor.
SYSCONFIG = """\
import importlib
import os
import sysconfig

this = os.environ.pop("_PYTHON_SYSCONFIGDATA_NAME")
own = importlib.import_module(sysconfig._get_sysconfigdata_name()).build_time_vars
os.environ["_PYTHON_SYSCONFIGDATA_NAME"] = this
build_time_vars = {{
    key: value.replace("{here}-linux-gnu", "{there}-linux-gnu") if key in ("EXT_SUFFIX", "SOABI") else value
    for key, value in own.items()
}}
"""
CROSS = """\
[binaries]
c = ['{zig}', 'cc', '-target', '{machine}-linux-gnu.{glibc}']
ar = ['{zig}', 'ar']
strip = ['{zig}', 'objcopy', '--strip-all']
cython = '{cython}'
python = '{python}'

[built-in options]
c_args = ['-I{headers}', '-g0', '-fno-sanitize=undefined']
c_link_args = ['-s']

[host_machine]
system = 'linux'
cpu_family = '{machine}'
cpu = '{machine}'
endian = 'little'
"""


@dataclass(frozen=True)
class Target:
    """What a wheel is for. `version`: whose headers it is compiled with, as "3.11"."""

    kind: str
    version: str
    machine: str

    @property
    def number(self) -> str:
        return self.version.replace(".", "")

    @property
    def tag(self) -> str:
        return f"cp{self.number}-abi3" if self.kind == "limited" else f"cp{self.number}-cp{self.number}"

    @property
    def suffix(self) -> str:
        """How the names of its extensions end."""
        return ".abi3.so" if self.kind == "limited" else f".cpython-{self.number}-{self.machine}-linux-gnu.so"


def target_of(path: Path) -> Target:
    """Return what a wheel's name says that it is for."""
    if (match := TAGS.search(path.name)) is None:
        raise SystemExit(f"error: {path.name} has other tags than make wheels gives")
    minor, abi, machine = match.groups()
    return Target("limited" if abi == "abi3" else "own", f"3.{minor}", machine)


def tags_of(version: str, machine: str) -> list[str]:
    """Return the options that make pip choose as it does on this Python and processor."""
    platforms = [f"--platform={each}_{machine}" for each in TAGGED]
    return ["--only-binary=:all:", "--implementation=cp", f"--python-version={version}", *platforms]


def taken(folder: Path, version: str, machine: str) -> Path:
    """Return the wheel that pip takes from a folder on this Python and processor."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-index", "--pre")
    with tempfile.TemporaryDirectory() as there:
        run(*pip, *tags_of(version, machine), "--no-deps", "--find-links", folder, "--dest", there, "aiote")
        (found,) = Path(there).glob("*.whl")
        return folder / found.name


def targets(kinds: Collection[str], versions: Collection[str], machines: Collection[str]) -> Iterator[Target]:
    """List what to build: for all Pythons first, then for each of these versions."""
    pairs = [("limited", OLDEST), *(("own", version) for version in versions)]
    return (Target(kind, version, machine) for kind, version in pairs if kind in kinds for machine in machines)


def run(*command: str | Path, **environment: str) -> str:
    print("--- " + " ".join(map(str, command)), flush=True)
    # Tools that others start by name are the environment's.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    done = subprocess.run(
        [*map(str, command)], env={**os.environ, "PATH": path, **environment}, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}\nerror: {command[0]} ended with status {done.returncode}")
    return done.stdout


def committed_at() -> str:
    """Return when the commit was made: what is built of it says that, and so it is the same whenever it is built."""
    done = subprocess.run(["git", "-C", str(ROOT), "log", "-1", "--format=%ct"], capture_output=True, text=True)
    return done.stdout.strip() or "315532800"


def headers_into(folder: Path, python: str, machine: str) -> Path:
    for name, file in HEADERS.items():
        where = next(
            (each for each in (Path("/usr/include"), Path("/usr/local/include")) if (each / name / file).exists()), None
        )
        if where is None:
            raise SystemExit(f"error: {name}/{file} not found; run: make system")
        (folder / name).symlink_to(where / name)
    # Debian's pyconfig.h includes that of the processor, by a path with its name.
    include = Path(pythons.said(python, pythons.INCLUDE))
    configured = include.parent / f"{platform.machine()}-linux-gnu" / include.name
    if configured.exists():
        (folder / f"{machine}-linux-gnu").mkdir()
        (folder / f"{machine}-linux-gnu" / include.name).symlink_to(configured)
    return folder


def cross_file(folder: Path, machine: str, glibc: str, headers: Path, python: str) -> Path:
    """Write what meson has to know to build for a machine and a Python."""
    import ziglang

    path = folder / f"{machine}.ini"
    binaries = Path(sys.executable).parent
    zig = Path(ziglang.__file__).parent / "zig"
    path.write_text(
        CROSS.format(zig=zig, machine=machine, glibc=glibc, headers=headers, cython=binaries / "cython", python=python)
    )
    return path


def sdist(into: Path) -> Path:
    """Pack what is committed; meson-python leaves out what is not."""
    run(
        sys.executable,
        "-m",
        "build",
        "--sdist",
        "--no-isolation",
        "--outdir",
        into,
        ROOT,
        SOURCE_DATE_EPOCH=committed_at(),
    )
    (path,) = into.glob("aiote-*.tar.gz")
    return path


def introspection(folder: Path, machine: str) -> dict[str, str]:
    """Return the environment in which a Python names what it builds as the other processor's Python does.

    Whichever Python it is, pip and what else is written in Python are those of this environment.
    """
    (folder / "_sysconfigdata_there.py").write_text(SYSCONFIG.format(here=platform.machine(), there=machine))
    return {
        "_PYTHON_SYSCONFIGDATA_NAME": "_sysconfigdata_there",
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        "PYTHONPATH": f"{folder}{os.pathsep}{sysconfig.get_path('purelib')}",
        "SOURCE_DATE_EPOCH": committed_at(),
    }


def wheel(source: Path, target: Target, python: str, glibc: str, folder: Path) -> Path:
    """Build one wheel from the sdist; its tag is that of what auditwheel has found."""
    place = folder / f"{target.tag}-{target.machine}"
    shutil.rmtree(place, ignore_errors=True)
    (headers := place / "include").mkdir(parents=True)
    headers_into(headers, python, target.machine)
    cross = cross_file(place, target.machine, glibc, headers, python)
    pip = (python, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet")
    options = ("--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", place)
    limited = ["-Dpython.allow_limited_api=true"] if target.kind == "limited" else []
    settings = [f"--config-settings=setup-args={argument}" for argument in (f"--cross-file={cross}", *limited)]
    run(*pip, *options, *settings, source, **introspection(place, target.machine))
    (built,) = place.glob("aiote-*.whl")
    # "auto" is the oldest that the symbols allow; of another processor's nothing else can be named.
    run(sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "--wheel-dir", place / "out", built)
    (repaired,) = (place / "out").glob("aiote-*.whl")
    return repaired


def complaints(path: Path, target: Target, glibc: str) -> list[str]:
    """Say what is wrong with a wheel: its tag, a name of an extension, a library that is linked."""
    from auditwheel.elfutils import elf_file_filter, elf_read_dt_needed

    wrong = tag_complaints(path, target, glibc)
    extensions = [name for name in zipfile.ZipFile(path).namelist() if name.endswith(".so")]
    wrong += [f"{name} does not end in {target.suffix}" for name in extensions if not name.endswith(target.suffix)]
    modules = len(list((ROOT / "aiote_native").rglob("*.pyx")))
    wrong += [] if len(extensions) == modules else [f"{len(extensions)} extensions, expected {modules}"]
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(path).extractall(folder)
        for file, elf in elf_file_filter(path for path in Path(folder).rglob("*") if path.is_file()):
            if linked := set(elf_read_dt_needed(file)) - NEEDED:
                wrong.append(f"{Path(file).name} needs {', '.join(sorted(linked))}")
            if elf.header["e_machine"] != {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}[target.machine]:
                wrong.append(f"{Path(file).name} is for another processor")
    return wrong


def tag_complaints(path: Path, target: Target, glibc: str) -> list[str]:
    """Say whether a wheel's tags are of another Python or processor, or of a later C library."""
    tags = path.stem.split("-", 2)[2]
    releases = [tuple(map(int, match.groups())) for match in OLDER.finditer(tags)]
    old_enough = releases and min(releases) <= tuple(map(int, glibc.split(".")))
    fits = tags.startswith(f"{target.tag}-") and target.machine in tags
    return [] if old_enough and fits else [f"{path.name}: its tags are {tags}"]


def sums(folder: Path) -> None:
    """Write SHA256SUMS of all that is to be published, as sha256sum reads it."""
    files = sorted(path for path in folder.iterdir() if path.name.startswith("aiote-"))
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(lines))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Build the sdist and the wheels into dist/.")
    known = pythons.named()
    parser.add_argument("--machine", nargs="+", choices=MACHINES, default=MACHINES, help="for which processors (both)")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=KINDS, help="for all Pythons, for one (both)")
    parser.add_argument("--python", nargs="+", choices=known, default=known, help="wheels of their own for which (all)")
    parser.add_argument("--glibc", default=GLIBC, help=f"the oldest C library that they run on ({GLIBC})")
    parser.add_argument("--into", type=Path, default=ROOT / "dist", help="where to put them; emptied first (dist)")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    into: Path = given.into
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    source = sdist(into)
    wanted = list(targets(given.kind, given.python, given.machine))
    versions = sorted({target.version for target in wanted})
    interpreters = pythons.with_headers(versions)
    if OLDEST not in interpreters and "limited" in given.kind:
        raise SystemExit(f"error: the wheel for all Pythons needs the headers of Python {OLDEST}")
    wrong = []
    for target in (target for target in wanted if target.version in interpreters):
        built = wheel(source, target, interpreters[target.version], given.glibc, BUILD)
        wrong += complaints(built, target, given.glibc)
        print(run(sys.executable, "-m", "auditwheel", "show", built))
        shutil.move(built, into / built.name)
    sums(into)
    print((into / "SHA256SUMS").read_text(), end="")
    for version in versions:
        if version not in interpreters:
            print(
                f"*** NOT BUILT: a wheel of its own for Python {version}, whose headers are neither here nor in Debian"
            )
    if wrong:
        raise SystemExit("error: " + "\n  ".join(wrong))


if __name__ == "__main__":
    main()
