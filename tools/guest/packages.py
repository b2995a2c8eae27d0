"""Debian packages, downloaded and unpacked but not installed: no root is needed."""

from __future__ import annotations

import re
from pathlib import Path

from .host import run_quiet


def unpack(package: str, into: Path) -> str:
    """Unpack a package, a .deb file or a name to download; return the name or file that it came to be.

    A kernel package without a version in its name stands for the one that it depends on.
    """
    if package.endswith(".deb"):
        file = Path(package).absolute()
    else:
        purpose = f"find the package {package} (`apt-get update` may help; or name another, or a .deb file)"
        known = run_quiet(["apt-cache", "depends", package], purpose)
        versioned = re.search(r"Depends: (linux-(?:image|source)-\d\S*)", known)
        package = versioned.group(1) if versioned else package
        run_quiet(["apt-get", "download", package], f"get {package}", cwd=into)
        file = next(into.glob(f"{package}_*.deb"))
    run_quiet(["dpkg-deb", "-x", str(file), str(into)], f"unpack {package}")
    return package
