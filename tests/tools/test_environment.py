"""What targets put into the environment: the pinned versions, whatever pip is set to, and nothing that changes lint."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parents[2] / folder) for folder in ("tools", "bench")]

import environment
import install_peers
import torch_transports
from environment import ROOT, exact

import connectors


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What pip is asked to install."""
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(environment, "pip_install", lambda _venv, *arguments: asked.append(arguments))
    return asked


def test_changed_pins_are_installed(installs, tmp_path):
    """Every group that is asked for then, and each once."""
    pins = tmp_path / "constraints.txt"
    for text in ("numpy==2.0\n", "numpy==2.1\n"):
        pins.write_text(text)
        for group in ("dev", "docs", "dev", "docs"):
            environment.install_requirements(tmp_path, group, pins)
        first, second = installs
        assert ("--constraint", str(pins)) == first[1:3] == second[1:3]
        assert any(line.startswith("pytest>=") for line in first)
        assert any(line.startswith("sphinx>=") for line in second)
        installs.clear()


def test_torch_lies_beside_the_environment(installs, tmp_path):
    """In the pinned version, and once; a group that has it brings no other than `run` into the environment itself."""
    pins = tmp_path / "constraints.txt"
    pins.write_text("torch==2.9\n")
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "old").touch()
    with pytest.raises(FileNotFoundError):  # pip, which makes the folder, is not real here
        environment.install_torch(tmp_path, pins)
    (asked,) = installs
    assert asked[:4] == ("--target", str(folder), "--constraint", str(pins))
    assert asked[-1] == "torch==2.9+cpu"
    assert not folder.exists()
    folder.mkdir()
    (folder / ".installed").write_text(environment.digest(pins))
    environment.install_torch(tmp_path, pins)
    assert len(installs) == 1
    assert environment.requirements("torch") == environment.requirements("run")


@pytest.mark.parametrize(("target", "sees"), [("demo-weights", True), ("bench-weights", True), ("lint", False)])
def test_only_what_needs_torch_sees_it(target, sees):
    said = subprocess.run(["make", "-n", target, "VENV=some"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (f'PYTHONPATH="{ROOT}/some/torch' in said.stdout) is sees


def test_what_mypy_says_does_not_depend_on_hosts_that_are_installed(tmp_path):
    """Here torch is, with types by which the program is wrong."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("def zeros(count: int) -> int: ...\n")
    program = tmp_path / "program.py"
    program.write_text('import torch\n\nname: str = torch.zeros("many")\n')
    mypy = (sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", "--cache-dir", tmp_path / "cache")
    settings = {"cwd": tmp_path, "env": {**os.environ, "MYPYPATH": str(tmp_path)}}
    done = subprocess.run([*mypy, program], capture_output=True, text=True, **settings)
    assert done.returncode == 0, done.stdout


def wheel(folder: Path, version: str) -> None:
    """Write a wheel of nothing."""
    about = f"thing-{version}.dist-info"
    with zipfile.ZipFile(folder / f"thing-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: thing\nVersion: {version}\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")


def test_an_exact_version_comes_although_the_machine_has_a_constraint(tmp_path, monkeypatch):
    """pip itself, with a setting that excludes the version; without `exact` it refuses."""
    wheel(tmp_path, "2.0")
    (tmp_path / "machine.txt").write_text("thing<2\n")
    (tmp_path / "pip.conf").write_text(f"[global]\nconstraint = {tmp_path / 'machine.txt'}\n")
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--dry-run", "--no-index"]
    pip += ["--find-links", str(tmp_path), "thing==2.0"]
    done = [subprocess.run(pip, env=env, capture_output=True).returncode for env in (exact(), None)]
    assert done == [0, 1]


def fetch_with_environment(folder: Path) -> None:
    environment.pip_install(folder, "torch==2.13.0+cpu")


def fetch_for_a_host(folder: Path) -> None:
    connectors.installed("torch", folder / "python")


def fetch_transports(folder: Path) -> None:
    torch_transports.fetched(folder / "python")


def fetch_peer(folder: Path) -> None:
    install_peers.install("collectives", folder)


@pytest.mark.parametrize(
    "fetch", [fetch_with_environment, fetch_for_a_host, fetch_transports, fetch_peer], ids=lambda fetch: fetch.__name__
)
def test_each_place_that_fetches_exact_versions_drops_the_machines_constraints(fetch, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_CONSTRAINT", "the machine's")
    monkeypatch.setattr(connectors, "FOLDER", tmp_path)
    monkeypatch.setattr(connectors.venv, "create", lambda *_arguments, **_settings: None)
    monkeypatch.setattr(torch_transports, "ROOT", tmp_path)
    monkeypatch.setattr(torch_transports, "KEPT", tmp_path / "kept")
    ran: list[str] = []

    def run(command: list[object], env: dict[str, str] | None = None, **_: object) -> subprocess.CompletedProcess[str]:
        words = list(map(str, command))
        if "pip" in words:
            ran.append((env or os.environ)["PIP_CONSTRAINT"])
        return subprocess.CompletedProcess(words, int("pip" in words), stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    try:
        fetch(tmp_path)
    except (SystemExit, install_peers.InstallError):
        pass
    assert ran == [os.devnull]
