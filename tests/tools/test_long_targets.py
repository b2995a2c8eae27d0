"""What only `make test-all` runs of the Makefile itself: targets one after the other, other Pythons, other versions."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))

import pythons
import test_order
import test_versions
from environment import ROOT
from pins import canonical
from run_tests import LONG


class Ran:
    """What was run instead of being run, and the status that each target of make ends with."""

    def __init__(self, failing: str = "") -> None:
        self.targets: list[str] = []
        self.folders: set[str] = set()
        self._failing = failing

    def __call__(self, command: Sequence[object], **_: object) -> subprocess.CompletedProcess[str]:
        words = list(map(str, command))
        status = 0
        if "--no-print-directory" in words:
            target = next(word for word in ("demo-weights", "docs", "check", "venv") if word in words)
            self.targets.append(target)
            self.folders |= {words[place + 1] for place, word in enumerate(words) if word == "-C"}
            self.folders |= {word for word in words if word.startswith(("VENV=", "PYTHON="))}
            status = int(target == self._failing)
        return subprocess.CompletedProcess(words, status, stdout="")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ran:
    found = Ran()
    monkeypatch.setattr(subprocess, "run", found)
    monkeypatch.setattr(test_order, "ROOT", tmp_path)
    return found


def test_test_all_has_them():
    assert {"test-order", "test-versions"} <= LONG.keys()


def test_demo_weights_docs_and_check_run_in_one_clone_in_this_order(ran):
    assert test_order.main() == 0
    assert ran.targets == ["demo-weights", "docs", "check"]
    (clone,) = (folder for folder in ran.folders if "/order-" in folder)
    assert not Path(clone).exists()


@pytest.mark.parametrize("failing", test_order.STEPS)
def test_a_target_that_fails_in_the_clone_fails_them_all(failing, monkeypatch, tmp_path, capsys):
    ran = Ran(failing)
    monkeypatch.setattr(subprocess, "run", ran)
    monkeypatch.setattr(test_order, "ROOT", tmp_path)
    assert test_order.main() == 1
    assert ran.targets[-1] == failing
    assert f"FAILED: make {failing}" in capsys.readouterr().out


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have every Python that the README names but the last, each with an environment."""
    found = {python: f"/pythons/{python}" for python in pythons.named()[:-1]}
    monkeypatch.setattr(pythons, "found", lambda: found)
    monkeypatch.setattr(test_versions, "ROOT", tmp_path)
    for python in found:
        (tmp_path / f".venv-{python}" / "bin").mkdir(parents=True)
        (tmp_path / f".venv-{python}" / "bin" / "python").touch()


def test_check_runs_on_each_python_that_is_here_and_the_others_are_named(ran, here, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["test_versions.py", "pinned"])
    assert test_versions.main() == 0
    *others, missing = pythons.named()
    assert ran.targets == ["check"] * len(others)
    assert {f"PYTHON=/pythons/{python}" for python in others} <= ran.folders
    assert {"3.12", "3.13"} <= set(others)
    said = capsys.readouterr().out
    assert f"THERE IS NO python{missing} HERE" in said
    assert all(f"Python {python}, make check" in said for python in others)


def test_a_python_that_was_asked_for_and_is_not_here_fails(ran, here, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["test_versions.py", pythons.named()[-1], "pinned"])
    assert test_versions.main() == 1
    assert ran.targets == []


def test_a_check_that_fails_on_one_python_fails(here, monkeypatch):
    monkeypatch.setattr(subprocess, "run", Ran("check"))
    monkeypatch.setattr(sys, "argv", ["test_versions.py", "3.12", "pinned"])
    assert test_versions.main() == 1


def test_the_lowest_versions_are_those_that_users_may_have():
    """Each lower bound of a package that tests install is a pin there, and nothing is pinned twice."""
    pins = [line for line in test_versions.constraints("lowest", "3.11").splitlines() if not line.startswith("#")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in [*project["dependencies"], *project["optional-dependencies"]["cli"]]:
        name, _, version = line.partition(">=")
        assert [pin for pin in pins if pin.startswith(f"{canonical(name)}==")] == [f"{canonical(name)}=={version}"]


def test_the_newest_versions_of_some_packages_are_not_pinned():
    pins = test_versions.constraints("newest", "3.11")
    assert "\nnumpy==" not in pins
    assert "\nanyio==" not in pins
    assert "\nmsgspec==" in pins
