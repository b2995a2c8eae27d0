"""Unpack Debian packages and all that they depend on into a folder: for any processor, installing and running nothing.

apt resolves, downloads and verifies, with a state of its own; the host's packages are neither asked nor changed. The
archive is the one that the host itself uses, of the host's release or of another that is named.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
SUITES = ("stable", "testing", "unstable")
MERGED = ("bin", "lib", "lib64", "sbin")  # links into /usr, made by what is not run here


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "aiote-debian"


def output(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)} ended with status {done.returncode}")
    return done.stdout


def archive() -> tuple[str, str]:
    """Return where the host's Debian packages come from, and the name of its release."""
    form = "$(CREATED_BY)|$(ORIGIN)|$(COMPONENT)|$(CODENAME)|$(REPO_URI)"
    for line in output("apt-get", "indextargets", "--format", form).splitlines():
        made_by, origin, component, codename, uri = line.split("|")
        if (made_by, origin, component) == ("Packages", "Debian", "main") and "-" not in codename:
            return uri, codename
    raise SystemExit("error: apt knows no archive of Debian; run apt-get update on a machine with Debian")


_updated = set[Path]()


class Apt:
    """apt for one release and processor."""

    def __init__(self, cache: Path, suite: str | None, machine: str) -> None:
        uri, own = archive()
        architecture = ARCHITECTURES[machine]
        self.folder = (cache / f"{suite or own}-{architecture}").absolute()
        for name in ("state/lists/partial", "cache/archives/partial"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "status").touch()
        (self.folder / "sources.list").write_text(f"deb {uri} {suite or own} main\n")
        settings = {
            "Dir::State": self.folder / "state",
            "Dir::State::status": self.folder / "status",
            "Dir::Cache": self.folder / "cache",
            "Dir::Etc::sourcelist": self.folder / "sources.list",
            "Dir::Etc::sourceparts": "/dev/null",
            "APT::Architecture": architecture,
            "APT::Architectures": architecture,
            "APT::Install-Recommends": "false",
            "APT::Sandbox::User": "root",
            "Debug::NoLocking": "true",
        }
        self.options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]

    def get(self, *words: str) -> str:
        return output("apt-get", "-qq", "-y", *self.options, *words)

    def update(self) -> None:
        """Read the lists of packages, once in each process."""
        if self.folder not in _updated:
            self.get("update")
            _updated.add(self.folder)

    def has(self, names: Sequence[str]) -> bool:
        """Tell whether this release has all these packages."""
        self.update()
        done = subprocess.run(["apt-cache", *self.options, "show", *names], capture_output=True, text=True)
        return set(re.findall(r"^Package: (\S+)$", done.stdout, re.MULTILINE)) >= set(names)

    def packages(self, names: Iterable[str]) -> list[Path]:
        """Download packages with all that they depend on; return their files."""
        archives = self.folder / "cache" / "archives"
        for file in archives.glob("*.deb"):
            file.unlink()  # of another version, or for somebody else
        self.update()
        self.get("install", "--download-only", *names)
        return sorted(archives.glob("*.deb"))


def suite_with(names: Sequence[str], machine: str) -> str | None:
    """Return the first release that has all these packages, of the host's own and later ones; None if none has."""
    for suite in (archive()[1], *SUITES):
        if Apt(default_cache(), suite, machine).has(names):
            return suite
    return None


def unpack(folder: Path, names: Iterable[str], machine: str, suite: str | None = None) -> None:
    """Make a folder that looks like the root of a system in which these packages were unpacked and never configured."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in Apt(default_cache(), suite, machine).packages(names):
        output("dpkg-deb", "-x", str(file), str(folder))
    for name in MERGED:
        if not (folder / name).exists() and not (folder / name).is_symlink():
            (folder / name).symlink_to(f"usr/{name}")
