"""Build the sdist, and from it a wheel for each processor, into dist/: with an old glibc, and checked by auditwheel.

There are two kinds. One uses CPython's limited API and serves 3.11 and every later version. The other is for the Python
alone that runs this, and takes up to 13 % less CPU for small requests (docs/releasing.md); pip prefers it.

zig is the compiler: it brings the C library's symbols of any release, for other processors too. Headers of libfabric
and libibverbs are this machine's, and so are Python's, in which nothing differs between 64-bit Linux processors. The
libraries themselves are opened at run time, so none may be linked: that is checked.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "wheels"  # always the same, so that zig knows again what it has compiled
MACHINES = ("x86_64", "aarch64")
GLIBC = "2.28"
OWN = "cp{0}{1}-cp{0}{1}".format(*sys.version_info)
KINDS = {"limited": "cp311-abi3", "own": OWN}  # the tags of each kind
OLDER = re.compile(r"manylinux_(\d+)_(\d+)_\w+")
NEEDED = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
# Headers that are the same on every processor; a folder of their own keeps this machine's C library out.
HEADERS = {"rdma": "fabric.h", "infiniband": "verbs.h"}
# What a Python says of itself where it is asked about another processor.
SYSCONFIG = """\
import importlib

own = importlib.import_module("{name}").build_time_vars
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


def headers_into(folder: Path) -> Path:
    for name, file in HEADERS.items():
        where = next(
            (each for each in (Path("/usr/include"), Path("/usr/local/include")) if (each / name / file).exists()), None
        )
        if where is None:
            raise SystemExit(f"error: {name}/{file} not found; run: make system")
        (folder / name).symlink_to(where / name)
    return folder


def cross_file(folder: Path, machine: str, glibc: str, headers: Path) -> Path:
    """Write what meson has to know to build for a machine."""
    import ziglang

    path = folder / f"{machine}.ini"
    binaries = Path(sys.executable).parent
    zig = Path(ziglang.__file__).parent / "zig"
    path.write_text(
        CROSS.format(
            zig=zig, machine=machine, glibc=glibc, headers=headers, cython=binaries / "cython", python=sys.executable
        )
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
    """Return the environment in which Python names what it builds as the other processor's Python does."""
    name = sysconfig._get_sysconfigdata_name()  # type: ignore[attr-defined]
    text = SYSCONFIG.format(name=name, here=platform.machine(), there=machine)
    (folder / "_sysconfigdata_there.py").write_text(text)
    return {
        "_PYTHON_SYSCONFIGDATA_NAME": "_sysconfigdata_there",
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        "PYTHONPATH": str(folder),
        "SOURCE_DATE_EPOCH": committed_at(),
    }


def wheel(source: Path, machine: str, kind: str, glibc: str, folder: Path) -> Path:
    """Build one wheel from the sdist; its tag is that of what auditwheel has found."""
    place = folder / f"{machine}-{kind}"
    shutil.rmtree(place, ignore_errors=True)
    (headers := place / "include").mkdir(parents=True)
    cross = cross_file(place, machine, glibc, headers_into(headers))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet")
    options = ("--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", place)
    arguments = [f"--cross-file={cross}", *(["-Dpython.allow_limited_api=true"] if kind == "limited" else [])]
    settings = [f"--config-settings=setup-args={argument}" for argument in arguments]
    run(*pip, *options, *settings, source, **introspection(place, machine))
    (built,) = place.glob("aiote-*.whl")
    # "auto" is the oldest that the symbols allow; of another processor's nothing else can be named.
    run(sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "--wheel-dir", place / "out", built)
    (repaired,) = (place / "out").glob("aiote-*.whl")
    return repaired


def complaints(path: Path, machine: str, kind: str, glibc: str) -> list[str]:
    """Say what is wrong with a wheel: its tag, a name of an extension, a library that is linked."""
    from auditwheel.elfutils import elf_file_filter, elf_read_dt_needed

    major, minor = glibc.split(".")
    tags = path.stem.split("-", 2)[2]
    suffix = ".abi3.so" if kind == "limited" else f".cpython-{OWN.split('-')[0][2:]}-{machine}-linux-gnu.so"
    wrong = []
    platforms = [tag for tag in tags.rpartition("-")[2].split(".") if OLDER.fullmatch(tag)]
    oldest = min((tuple(map(int, OLDER.fullmatch(tag).groups()[:2])) for tag in platforms), default=(99, 0))
    if (
        not tags.startswith(f"{KINDS[kind]}-")
        or not platforms
        or oldest > (int(major), int(minor))
        or machine not in tags
    ):
        wrong.append(f"{path.name}: its tags are {tags}")
    names = zipfile.ZipFile(path).namelist()
    extensions = [name for name in names if name.endswith(".so")]
    wrong += [f"{name} does not end in {suffix}" for name in extensions if not name.endswith(suffix)]
    wrong += [] if len(extensions) > 40 else [f"{len(extensions)} extensions are fewer than there must be"]
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(path).extractall(folder)
        for file, elf in elf_file_filter(path for path in Path(folder).rglob("*") if path.is_file()):
            if linked := set(elf_read_dt_needed(file)) - NEEDED:
                wrong.append(f"{Path(file).name} needs {', '.join(sorted(linked))}")
            if elf.header["e_machine"] != {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}[machine]:
                wrong.append(f"{Path(file).name} is for another processor")
    return wrong


def sums(folder: Path) -> None:
    """Write SHA256SUMS of all that is to be published, as sha256sum reads it."""
    files = sorted(path for path in folder.iterdir() if path.name.startswith("aiote-"))
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the sdist and the wheels into dist/.")
    parser.add_argument("--machine", nargs="+", choices=MACHINES, default=MACHINES, help="for which processors (both)")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=KINDS, help="for all Pythons, for this one (both)")
    parser.add_argument("--glibc", default=GLIBC, help=f"the oldest C library that they run on ({GLIBC})")
    parser.add_argument("--into", type=Path, default=ROOT / "dist", help="where to put them; emptied first (dist)")
    arguments = parser.parse_args()
    into: Path = arguments.into
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    source = sdist(into)
    wrong = []
    for kind, machine in itertools.product(arguments.kind, arguments.machine):
        built = wheel(source, machine, kind, arguments.glibc, BUILD)
        wrong += complaints(built, machine, kind, arguments.glibc)
        print(run(sys.executable, "-m", "auditwheel", "show", built))
        shutil.move(built, into / built.name)
    sums(into)
    print((into / "SHA256SUMS").read_text(), end="")
    if wrong:
        raise SystemExit("error: " + "\n  ".join(wrong))


if __name__ == "__main__":
    main()
