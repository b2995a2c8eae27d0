"""What a release is made of: its version is the tag's, the changelog fits it, extensions link the C library alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import aiote_native

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))
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
