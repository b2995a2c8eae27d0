"""tools/constraints.txt pins all that the Makefile's targets install, on every Python; tools/pins.py writes it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

sys.path.append(str(Path(__file__).parents[2] / "tools"))

import environment
import pins
import pythons
from pins import canonical


def pinned_on(python: str) -> dict[str, list[str]]:
    """Return what the constraints say on a Python: the versions of each package."""
    found: dict[str, list[str]] = {}
    lines = [Requirement(line) for line in environment.PINS.read_text().splitlines() if not line.startswith("#")]
    for line in lines:
        if line.marker is None or line.marker.evaluate({"python_version": python}):
            (version,) = line.specifier
            assert version.operator == "=="
            found.setdefault(line.name, []).append(version.version)
    return found


@pytest.mark.parametrize("python", pythons.named())
def test_what_targets_ask_for_has_one_version_on_every_python(python):
    found = pinned_on(python)
    assert {name: versions for name, versions in found.items() if len(versions) != 1} == {}
    for group in environment.EXTRAS:
        for line in environment.requirements(group):
            need = Requirement(line)
            assert need.specifier.contains(found[canonical(need.name)][0]), line


def test_dependencies_are_pinned_too():
    """What is installed here for `make test`, as far as requirements lead, has its line."""
    known = pinned_on("{}.{}".format(*sys.version_info))
    waiting = [Requirement(line) for line in environment.requirements("dev")]
    seen: set[str] = set()
    while waiting:
        need = waiting.pop()
        name = canonical(need.name)
        if name in seen or (need.marker is not None and not need.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        try:
            waiting += [Requirement(line) for line in distribution(name).requires or []]
        except PackageNotFoundError:
            continue
    assert seen - known.keys() == set()
    assert len(seen) > 40


def test_the_readme_names_the_pythons_that_are_pinned():
    readme = (environment.ROOT / "README.md").read_text()
    assert f"Python {pythons.named()[0]} to {pythons.named()[-1]}" in readme


ONE = {"3.11": {"a": "1"}, "3.12": {"a": "1"}, "3.13": {"a": "1"}}
NEWER = {"3.11": {"a": "1"}, "3.12": {"a": "2"}, "3.13": {"a": "2"}}
ALL = {"3.11": {"a": "1"}, "3.12": {"a": "2"}, "3.13": {"a": "3"}}
BACK = {"3.11": {"a": "1"}, "3.12": {"a": "2"}, "3.13": {"a": "1"}}
SOME = {"3.11": {"a": "1", "b": "5"}, "3.12": {"a": "1"}, "3.13": {"a": "2"}}


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        (ONE, ["a==1"]),
        (NEWER, ["a==1; python_version < '3.12'", "a==2; python_version >= '3.12'"]),
        (
            ALL,
            [
                "a==1; python_version < '3.12'",
                "a==2; python_version >= '3.12' and python_version < '3.13'",
                "a==3; python_version >= '3.13'",
            ],
        ),
        (
            BACK,
            [
                "a==1; python_version < '3.12'",
                "a==2; python_version >= '3.12' and python_version < '3.13'",
                "a==1; python_version >= '3.13'",
            ],
        ),
        (SOME, ["a==1; python_version < '3.13'", "a==2; python_version >= '3.13'", "b==5"]),
    ],
    ids=["one", "newer", "all", "back", "some"],
)
def test_pins_of_several_pythons_become_one_file(found, lines):
    assert pins.merged(found) == lines


def test_pip_resolves_without_the_machines_constraints(monkeypatch):
    """And what it reports is taken by canonical names, without local versions."""
    packages = [{"metadata": {"name": "Some_Thing", "version": "2.13.0+cpu"}}]

    def run(command: list[str], env: dict[str, str], **_: object) -> subprocess.CompletedProcess[bytes]:
        assert env["PIP_CONSTRAINT"] == "/dev/null"
        limits = command[command.index("--constraint") + 1]
        assert Path(limits).read_text() == "other==3\n"
        Path(command[command.index("--report") + 1]).write_text(json.dumps({"install": packages}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert pins.resolved(Path("python"), {"some-thing"}, {"other": "3"}) == {"some-thing": "2.13.0"}


def resolving(monkeypatch: pytest.MonkeyPatch, impossible: set[str]) -> None:
    """Have a Python that cannot have some requirements, and resolves others to version 1."""

    def resolved(_python: Path, needs: set[str], *_other: object) -> dict[str, str] | None:
        return None if needs & impossible else dict.fromkeys(needs, "1")

    monkeypatch.setattr(subprocess, "run", lambda *_arguments, **_settings: None)
    monkeypatch.setattr(pins, "resolved", resolved)


def test_a_group_that_a_python_cannot_have_is_left_out_and_said(monkeypatch, capsys):
    resolving(monkeypatch, {"atheris>=3.0"})
    found = pins.resolve("3.14", "python3.14")
    assert "NOT RESOLVED, why is said above: fuzz on Python 3.14" in capsys.readouterr().out
    assert {*environment.requirements("docs"), *environment.requirements("dev")} <= found.keys()
    assert "atheris>=3.0" not in found


def test_torch_is_held_where_it_cannot_be_resolved(monkeypatch, capsys):
    resolving(monkeypatch, {f"torch=={pins.HELD['torch']}+cpu"})
    assert pins.resolve("3.14", "python3.14")["torch"] == pins.HELD["torch"]
    said = capsys.readouterr().out
    assert said.count("NOT RESOLVED") == 1
    assert "NOT RESOLVED, why is said above: torch on Python 3.14" in said


def test_nothing_is_written_where_the_tests_needs_cannot_be_resolved(monkeypatch, tmp_path):
    resolving(monkeypatch, set(environment.requirements("dev")))
    monkeypatch.setattr(pins, "PINS", tmp_path / "constraints.txt")
    monkeypatch.setattr(pythons, "found", lambda: {"3.11": "python3.11"})
    with pytest.raises(SystemExit, match="dev cannot be resolved on Python 3.11; nothing was written"):
        pins.main()
    assert not (tmp_path / "constraints.txt").exists()
