#!/usr/bin/env python3
"""Print the version of this checkout: of the tag on this commit, else of what comes next.

A tag `v1.2.3` on the commit is version 1.2.3. Between tags it is `1.2.3.dev45+g6789abc`: the topmost version of
CHANGELOG.md, the number of commits since the last tag, the commit. In an sdist the file VERSION says it, which `--dist`
writes when meson makes one. A folder with neither is `1.2.3.dev0`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TAG = re.compile(r"v(\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)")
HEADING = re.compile(r"^## (\d+\.\d+\.\d+) - (\S+)$", re.MULTILINE)


def git(*arguments: str) -> str | None:
    """Return what git says; None where it cannot, or would speak of a repository around this folder."""
    if not (ROOT / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def headings(changelog: str) -> list[tuple[str, str]]:
    """Return each version of a changelog with its date, newest first; "unreleased" is one."""
    return HEADING.findall(changelog)


def described(next_version: str, tags: list[str], since: int, commit: str) -> str:
    """Return the version of a commit that bears these tags, so many commits after the last tag."""
    for tag in tags:
        if match := TAG.fullmatch(tag):
            return match[1]
    return f"{next_version}.dev{since}+g{commit}"


def version() -> str:
    """Return this checkout's version."""
    written = ROOT / "VERSION"
    if written.exists():
        return written.read_text().strip()
    next_version = headings((ROOT / "CHANGELOG.md").read_text())[0][0]
    commit = git("rev-parse", "--short=9", "HEAD")
    if commit is None:
        return f"{next_version}.dev0"
    last = git("describe", "--tags", "--abbrev=0", "--match", "v[0-9]*")
    since = git("rev-list", "--count", f"{last}..HEAD" if last else "HEAD") or "0"
    return described(next_version, (git("tag", "--points-at", "HEAD") or "").split(), int(since), commit)


def main() -> None:
    if sys.argv[1:] == ["--dist"]:
        (Path(os.environ["MESON_DIST_ROOT"]) / "VERSION").write_text(f"{version()}\n")
    else:
        print(version())


if __name__ == "__main__":
    main()
