"""Prepare the virtual environment: make it, install what pyproject.toml asks for, build and install this checkout.

Each of the three steps leaves a stamp of what it was done for and is skipped while that is unchanged; so a second run
starts neither pip nor a compiler. Only the second step uses the network, and takes exactly the versions that
tools/constraints.txt pins (`make pins` writes it). The project is installed, not linked: what runs is what a user gets.
Its build folder stays, so a changed file costs its own compilation alone.

torch lies beside the environment, in its folder `torch`. Only commands that have this folder in PYTHONPATH see it, so
lint and tests say the same whether or not `make demo-weights` has run.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = Path("build") / str(sys.implementation.cache_tag)
RUN = ["cli", "libfabric", "safetensors"]
EXTRAS = {"run": RUN, "dev": [*RUN, "trio", "uvloop", "dev"], "fuzz": [*RUN, "fuzz"], "bench": [*RUN, "uvloop", "plot"]}
EXTRAS["torch"] = RUN
EXTRAS["release"] = [*RUN, "dev", "release"]
EXTRAS["docs"] = [*RUN, "docs"]
EXTRAS["weights"] = [*RUN, "weights"]
WITH_TORCH = ("torch", "weights")
PINS = ROOT / "tools" / "constraints.txt"
EDITABLE = "editable\n"
NEVER_BUILT = "atheris"  # its source wants a clang of its own making
# torch for the CPU alone is a tenth of what PyPI has for Linux, which brings CUDA along.
TORCH_CPU = ("--extra-index-url=https://download.pytorch.org/whl/cpu", "--retries=0")


def usual_environment() -> dict[str, str]:
    """Return the environment without the variables that `make test-all` sets for its own tests."""
    return {name: value for name, value in os.environ.items() if name not in ("AIOTE_TEST_LONG", "PYTEST_ADDOPTS")}


def say(text: str) -> None:
    print(f"--- {text}", flush=True)


def exact() -> dict[str, str]:
    """Return the environment in which pip fetches exact versions: without the machine's own constraints.

    They may exclude these versions. `--isolated` would drop them, too, but with them certificates and indexes.
    """
    return {**os.environ, "PIP_CONSTRAINT": os.devnull}


def run(venv: Path, *command: str) -> None:
    """Run a command with the environment's own tools first on the path; end with its status if it fails."""
    path = f"{venv / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    # Meson keeps this name of Cython: an editable install compiles in processes that have another path.
    environment = {**exact(), "PATH": path, "CYTHON": str((venv / "bin" / "cython").absolute())}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)} ended with status {done.returncode}")


def pip_install(venv: Path, *arguments: str) -> None:
    python = str(venv / "bin" / "python")
    run(venv, python, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", "install", *arguments)


def usable(venv: Path) -> bool:
    """Tell whether the environment is complete and still where it was made: its scripts name it by its full path."""
    python = venv / "bin" / "python"
    if not python.exists() or subprocess.run([python, "-c", "import pip"], capture_output=True).returncode:
        return False
    made_at = venv / ".made-at"
    return not made_at.exists() or made_at.read_text() == str(venv)


def interpreter(venv: Path) -> str:
    """Return the environment's Python version as "3.11"."""
    lines = (venv / "pyvenv.cfg").read_text().splitlines()
    settings = dict(line.split(" = ", 1) for line in lines if " = " in line)
    return ".".join(settings["version"].split(".")[:2])


def make(venv: Path) -> None:
    """Make the environment unless it is usable."""
    if usable(venv):
        theirs, ours = interpreter(venv), "{}.{}".format(*sys.version_info)
        if theirs != ours:
            raise SystemExit(
                f"error: {venv} holds Python {theirs}, PYTHON={sys.executable} is {ours}: "
                f"name another environment, for example VENV=.venv-{ours}"
            )
        return
    say(f"making {venv}")
    shutil.rmtree(ROOT / BUILD, ignore_errors=True)  # it names the environment's tools by their full paths
    run(venv, sys.executable, "-m", "venv", "--clear", str(venv))
    (venv / ".made-at").write_text(str(venv))


def requirements(group: str) -> list[str]:
    """Return what the build and the group's extras need: the build has no environment of its own."""
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = tables["project"]["optional-dependencies"]
    wanted = [*tables["build-system"]["requires"], *tables["project"]["dependencies"]]
    return sorted({*wanted, *(line for extra in EXTRAS[group] for line in extras[extra])})


def without_atheris() -> str:
    """Say what to do where the fuzzer has no wheel."""
    here = f"Python {sys.version_info[0]}.{sys.version_info[1]} on {sysconfig.get_platform()}"
    return (
        f"Fuzzing needs a wheel of {NEVER_BUILT}. If the output above says that there is none for {here}, name another "
        f"interpreter, for example: make fuzz PYTHON=python3.11 VENV=.venv-fuzz. Only make fuzz needs it; "
        "make test runs the fuzz targets over their corpus without it."
    )


def pinned(name: str, pins: Path = PINS) -> str:
    """Return the version of a package that the constraints pin on every Python."""
    found = re.search(rf"^{re.escape(name)}==(\S+)$", pins.read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit(f"error: {pins} has no line {name}==VERSION without a marker: run make pins")
    return found[1]


def install_torch(venv: Path, pins: Path) -> None:
    """Install torch beside the environment, without CUDA where there is such a wheel."""
    folder = venv / "torch"
    stamp, wanted = folder / ".installed", digest(pins)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    say(f"installing torch into {folder}, once")
    options = ("--target", str(folder), "--constraint", str(pins), *TORCH_CPU)
    shutil.rmtree(folder, ignore_errors=True)
    version = pinned("torch", pins)
    try:
        pip_install(venv, *options, f"torch=={version}+cpu")
    except SystemExit:
        say("there is no torch for the CPU only, so torch with CUDA is installed")
        pip_install(venv, *options, f"torch=={version}")
    stamp.write_text(wanted)


def digest(pins: Path) -> str:
    return f"constraints {hashlib.sha256(pins.read_bytes()).hexdigest()}"


def install_requirements(venv: Path, group: str, pins: Path) -> None:
    """Install what a group needs, unless the stamp says that it is there in the versions that are pinned now."""
    stamp = venv / ".installed-requirements"
    have = set(stamp.read_text().splitlines()) if stamp.exists() else set()
    if digest(pins) not in have:
        have = {digest(pins)}  # after a change of the pins, each group is installed again when it is next asked for
    wanted = requirements(group)
    if have.issuperset(wanted):
        return
    say(f"installing {len(wanted)} requirements into {venv}, once")
    try:
        pip_install(venv, f"--only-binary={NEVER_BUILT}", "--constraint", str(pins), *wanted)
    except SystemExit as error:
        if group == "fuzz":
            error.code = f"{error.code}\n{without_atheris()}"
        raise
    stamp.write_text("\n".join(sorted(have.union(wanted))))


def fingerprint() -> str:
    """Return a digest of every file that the installed package is made of."""
    taken = hashlib.sha256()
    folders = (ROOT / "aiote", ROOT / "aiote_native", ROOT / "bench" / "raw")
    found = (path for folder in folders for path in folder.rglob("*"))
    files = (path for path in found if path.is_file() and path.suffix not in (".pyc", ".so"))
    for path in sorted([*files, ROOT / "meson.build", ROOT / "pyproject.toml"]):
        content = path.read_bytes()
        taken.update(f"{path.relative_to(ROOT)}\n{len(content)}\n".encode() + content)
    return taken.hexdigest()


def install_project(venv: Path, editable: bool) -> None:
    """Build and install this checkout; once it is editable, the environment follows the sources by itself."""
    stamp = venv / ".installed-sources"
    wanted = EDITABLE if editable else fingerprint()
    if stamp.exists() and stamp.read_text() in (wanted, EDITABLE):
        return
    say(f"building and installing aiote into {venv}{', editable' if editable else ''}")
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--force-reinstall"]
    # A folder of its own: what the editable package imports must not be built again by an install into another place.
    build = f"--config-settings=build-dir={BUILD}{'-editable' if editable else ''}"
    pip_install(venv, *options, build, *(["--editable"] if editable else []), ".")
    stamp.write_text(wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepare a virtual environment for this checkout.")
    parser.add_argument("venv", type=Path, help="the environment's folder")
    parser.add_argument("group", choices=EXTRAS, help="what to install: enough to run aiote, or to work on it")
    parser.add_argument("--install", action="store_true", help="build and install aiote itself as well")
    parser.add_argument("--editable", action="store_true", help="the same, so that a changed source needs no install")
    parser.add_argument("--constraints", type=Path, default=PINS, help="the versions (tools/constraints.txt)")
    arguments = parser.parse_args()
    venv, pins = arguments.venv.absolute(), arguments.constraints.absolute()
    make(venv)
    install_requirements(venv, arguments.group, pins)
    if arguments.group in WITH_TORCH:
        install_torch(venv, pins)
    if arguments.install or arguments.editable:
        install_project(venv, arguments.editable)


if __name__ == "__main__":
    main()
