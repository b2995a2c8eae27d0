"""What a release is made of: its version is the tag's, the changelog fits it, extensions link the C library alone.

And for which Pythons wheels are built, and on which they are run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import aiote_native

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))
import clean_install  # noqa: E402
import debian_root  # noqa: E402
import pythons  # noqa: E402
import release_check  # noqa: E402
import version  # noqa: E402
import wheels  # noqa: E402

CHANGELOG = "# Changelog\n\n## 0.3.0 - unreleased\n\n### Added\n\n## 0.2.0 - 2026-11-25\n"


def git(folder: Path, *arguments: str) -> None:
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    quiet = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    subprocess.run(
        ["git", "-C", folder, *arguments], check=True, capture_output=True, env={**os.environ, **who, **quiet}
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A checkout with the tool, its changelog and one commit."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "version.py", tmp_path / "tools")
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def told(folder: Path, *arguments: str, **environment: str) -> str:
    command = [sys.executable, folder / "tools" / "version.py", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **environment}).stdout


def test_the_version_is_that_of_the_tag_and_else_of_what_comes_next(repository):
    assert re.fullmatch(r"0\.3\.0\.dev1\+g[0-9a-f]{9}\n", told(repository))
    git(repository, "tag", "v0.2.0")
    git(repository, "tag", "nightly")
    assert told(repository) == "0.2.0\n"
    git(repository, "commit", "-q", "--allow-empty", "-m", "second")
    git(repository, "commit", "-q", "--allow-empty", "-m", "third")
    assert re.fullmatch(r"0\.3\.0\.dev2\+g[0-9a-f]{9}\n", told(repository))


def test_an_sdist_keeps_the_version_that_it_was_made_with(repository, tmp_path_factory):
    git(repository, "tag", "v0.2.0")
    there = tmp_path_factory.mktemp("sdist")
    shutil.copytree(repository / "tools", there / "tools")
    shutil.copy(repository / "CHANGELOG.md", there)
    assert told(there) == "0.3.0.dev0\n"
    told(repository, "--dist", MESON_DIST_ROOT=str(there))
    assert told(there) == "0.2.0\n"


def test_this_checkout_has_a_version_of_its_changelog_s_topmost_section():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert version.version().startswith(version.headings(text)[0][0])


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        ("0.3.0.dev4+gabcdef012", ""),
        ("0.3.0", "'unreleased' where the date of 0.3.0 belongs"),
        ("0.2.0", "topmost version is 0.3.0, not 0.2.0"),
        ("0.2.0.dev4+gabcdef012", "topmost version is 0.3.0"),
    ],
)
def test_a_changelog_has_the_version_that_is_released(found, complaint):
    said = release_check.changelog_complaint(found, CHANGELOG)
    assert (complaint in said) if complaint else (said == "")
    dated = CHANGELOG.replace("unreleased", "2026-12-01")
    assert release_check.changelog_complaint("0.3.0", dated) == ""


def test_every_extension_links_the_c_library_alone():
    """libfabric and libibverbs are opened at run time: what is linked would be needed on every machine."""
    extensions = sorted(Path(aiote_native.__path__[0]).rglob("*.so")) or sorted((ROOT / "build").rglob("*.so"))
    assert extensions
    said = subprocess.run(["readelf", "-d", *extensions], check=True, capture_output=True, text=True).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", said))
    assert needed
    assert needed <= wheels.NEEDED


def test_each_python_gets_a_wheel_of_its_own_beside_the_one_for_all():
    every = list(wheels.targets(wheels.KINDS, ["3.11", "3.14"], wheels.MACHINES))
    assert [(target.tag, target.machine) for target in every] == [
        (tag, machine) for tag in ("cp311-abi3", "cp311-cp311", "cp314-cp314") for machine in ("x86_64", "aarch64")
    ]
    assert every[0].suffix == ".abi3.so"
    assert every[-1].suffix == ".cpython-314-aarch64-linux-gnu.so"
    (limited,) = wheels.targets(["limited"], ["3.13"], ["x86_64"])
    assert limited.tag == "cp311-abi3"


@pytest.mark.parametrize(
    ("tags", "complaint"),
    [
        ("cp313-cp313-manylinux_2_17_aarch64.manylinux2014_aarch64.manylinux_2_28_aarch64", False),
        ("cp313-cp313-manylinux_2_34_aarch64", True),
        ("cp313-cp313-manylinux_2_28_x86_64", True),
        ("cp312-cp312-manylinux_2_28_aarch64", True),
        ("cp313-cp313-linux_aarch64", True),
    ],
)
def test_the_tags_of_a_wheel_are_those_that_were_asked_for(tags, complaint):
    target = wheels.Target("own", "3.13", "aarch64")
    assert bool(wheels.tag_complaints(Path(f"aiote-0.3.0-{tags}.whl"), target, "2.28")) is complaint


def test_a_wheel_s_name_says_what_it_is_for():
    tags = "manylinux_2_17_x86_64.manylinux_2_28_x86_64.whl"
    assert wheels.target_of(Path(f"aiote-0.3.0-cp312-cp312-{tags}")) == wheels.Target("own", "3.12", "x86_64")
    assert wheels.target_of(Path(f"aiote-0.3.0-cp311-abi3-{tags}")) == wheels.Target("limited", "3.11", "x86_64")
    with pytest.raises(SystemExit, match="other tags"):
        wheels.target_of(Path(f"aiote-0.3.0-cp312-cp313-{tags}"))


def test_a_python_names_what_it_builds_as_the_other_processor_s_does(tmp_path):
    asked = "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'), sysconfig.get_platform())"
    environment = {**os.environ, **wheels.introspection(tmp_path, "aarch64")}
    done = subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=True)
    own = wheels.Target("own", "{}.{}".format(*sys.version_info), "aarch64")
    assert done.stdout.split() == [own.suffix, "linux-aarch64"]


def test_what_cannot_be_built_is_named(monkeypatch, tmp_path, capsys):
    built = tmp_path / "build" / "aiote-0.3.0-cp312-cp312-manylinux_2_28_x86_64.whl"
    built.parent.mkdir()
    built.touch()
    given = ["wheels.py", "--kind", "own", "--python", "3.12", "3.14", "--machine", "x86_64"]
    monkeypatch.setattr(sys, "argv", [*given, "--into", str(tmp_path / "dist")])
    monkeypatch.setattr(pythons, "with_headers", lambda _versions: {"3.12": "python3.12"})
    monkeypatch.setattr(wheels, "sdist", lambda _into: None)
    monkeypatch.setattr(wheels, "run", lambda *_command: "")
    monkeypatch.setattr(wheels, "wheel", lambda *_arguments: built)
    monkeypatch.setattr(wheels, "complaints", lambda *_arguments: [])
    wheels.main()
    said = capsys.readouterr().out
    assert f"  {built.name}" in said
    assert re.findall(r"NOT BUILT: a wheel of its own for Python (\S+),", said) == ["3.14"]


@pytest.fixture
def few_pythons(monkeypatch, tmp_path):
    """A machine with Python 3.12 and its headers, and 3.13 without; its Debian has 3.11, and a later one 3.14."""
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    includes = {"python3.12": tmp_path / "include", "python3.13": tmp_path / "nowhere"}
    monkeypatch.setattr(pythons, "found", lambda: {path.removeprefix("python"): path for path in includes})
    monkeypatch.setattr(
        pythons, "said", lambda path, asked: str(includes[path]) if "include" in asked else f"/opt/{path}"
    )
    monkeypatch.setattr(debian_root, "archive", lambda: ("somewhere", "bookworm"))
    monkeypatch.setattr(
        debian_root.Apt, "__init__", lambda self, _cache, suite, _machine: setattr(self, "suite", suite)
    )
    there = {"python3.11": {None, "bookworm"}, "python3.14": {"testing", "unstable"}}
    monkeypatch.setattr(debian_root.Apt, "has", lambda self, names: self.suite in there.get(names[0], ()))


@pytest.mark.usefixtures("few_pythons")
def test_headers_are_this_machine_s_or_debian_s(monkeypatch):
    asked = []
    monkeypatch.setattr(
        pythons, "unpacked", lambda version: asked.append(version) or {"3.14": "Debian's"}.get(version, "")
    )
    found = pythons.with_headers(["3.12", "3.13", "3.14"])
    assert found == {"3.12": "python3.12", "3.14": "Debian's"}
    assert asked == ["3.13", "3.14"]


@pytest.mark.usefixtures("few_pythons")
def test_a_python_comes_from_the_first_release_that_has_it(monkeypatch, tmp_path):
    unpacked = []
    monkeypatch.setattr(pythons, "FOLDER", tmp_path)
    monkeypatch.setattr(pythons, "_at_home", lambda *_arguments: None)
    monkeypatch.setattr(debian_root, "unpack", lambda _folder, names, _machine, suite: unpacked.append((*names, suite)))
    assert pythons.unpacked("3.14") == str(tmp_path / "3.14" / "usr" / "bin" / "python3.14")
    assert pythons.unpacked("3.12") == ""
    assert unpacked == [("python3.14", "libpython3.14-dev", "testing")]


@pytest.mark.usefixtures("few_pythons")
def test_the_python_of_a_clean_root_is_debian_s_or_a_copy():
    origins = {version: clean_install.origin(version) for version in ("3.11", "3.12", "3.14", "3.15")}
    assert origins["3.11"] == clean_install.Origin("3.11")
    assert origins["3.12"] == clean_install.Origin("3.12", copied=Path("/opt/python3.12"))
    assert origins["3.12"].python == Path("/opt/python3.12/bin/python3.12")
    assert origins["3.14"] == clean_install.Origin("3.14", "testing")
    assert origins["3.15"] is None


def test_a_wheel_is_run_on_each_python_that_it_is_for():
    tags = "manylinux_2_28_x86_64.whl"
    assert clean_install.versions_of(Path(f"aiote-0.3.0-cp311-abi3-{tags}")) == pythons.named()
    assert clean_install.versions_of(Path(f"aiote-0.3.0-cp313-cp313-{tags}")) == ["3.13"]


def test_each_python_gets_the_wheel_that_pip_takes(tmp_path):
    machine = os.uname().machine
    for tag in ("cp311-abi3", "cp313-cp313"):
        name = f"aiote-0.3.0.dev4-{tag}-manylinux_2_28"
        with zipfile.ZipFile(tmp_path / f"{name}_{machine}.whl", "w") as wheel:
            wheel.writestr(
                "aiote-0.3.0.dev4.dist-info/METADATA", "Metadata-Version: 2.1\nName: aiote\nVersion: 0.3.0.dev4\n"
            )
            wheel.writestr(
                "aiote-0.3.0.dev4.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}-manylinux_2_28_{machine}\n"
            )
    pairs = clean_install.pairs(tmp_path, ["3.11", "3.13", "3.14"])
    found = {version: wheels.target_of(path).tag for path, version in pairs}
    assert found == {"3.11": "cp311-abi3", "3.13": "cp313-cp313", "3.14": "cp311-abi3"}
    (one,) = tmp_path.glob("*cp313*")
    assert clean_install.pairs(one, None) == [(one, "3.13")]
    with pytest.raises(SystemExit):
        wheels.taken(tmp_path, "3.11", {"x86_64": "aarch64"}.get(machine, "x86_64"))
