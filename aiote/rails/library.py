"""Finding and opening libfabric.

The order: the path that the user gave (`AIOTE_LIBFABRIC`), EFA's own installation, then the newer of the system's and
a wheel's. The first two are used without a comparison. To choose between the last two, this module asks both for their
version.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from typing import NamedTuple

from aiote_native.libfabric import device as native

from ..errors import FabricError, UsageError

__all__ = ["EFA_PATHS", "OLDEST", "FoundLibrary", "find_libfabric", "library_summary", "load"]

OLDEST = (1, 17)
"""The oldest version that this package is built for and tested with (Debian 12's)."""

EFA_PATHS = ("/opt/amazon/efa/lib64/libfabric.so.1", "/opt/amazon/efa/lib/libfabric.so.1")
SONAME = "libfabric.so.1"
INSTALL = (
    'apt-get install libfabric1, or pip install "aiote[libfabric]", '
    "or set AIOTE_LIBFABRIC to the path of a libfabric.so.1"
)

# libfabric reads these once, when it is opened or initialises; a user's own setting takes precedence.
# rxm: without a shared receive context an endpoint takes 70 MiB less, and we have one endpoint a peer.
# infinipath, which Debian's libfabric links: by default it takes over SIGINT, SIGTERM and SIGSEGV as soon as it is
# opened and ends the process with exit(1) from the handler, so that neither Ctrl-C nor a core dump works.
# EFA: without this setting a fork in a process with an open domain aborts the process on kernels before 5.13.
DEFAULTS = {"FI_OFI_RXM_USE_SRX": "0", "IPATH_NO_BACKTRACE": "1", "FI_EFA_FORK_SAFE": "1"}


class FoundLibrary(NamedTuple):
    """A libfabric that could be opened: its file, its version and where it was found."""

    path: str
    version: tuple[int, int]
    origin: str


def find_libfabric(explicit: str = "") -> FoundLibrary:
    """Choose the libfabric to use; `explicit` is the user's own path.

    Raises FabricError that names everything that was tried and the command that installs one.
    """
    tried: list[str] = []
    if explicit:
        found = _probe(explicit, "AIOTE_LIBFABRIC", tried)
        return _check_version(found, tried)
    for path in EFA_PATHS:
        if os.path.exists(path) and (found := _probe(path, "EFA", tried)) is not None:
            return _check_version(found, tried)
    tried.extend(f"{path} (EFA): not there" for path in EFA_PATHS)
    candidates = [_probe(SONAME, "system", tried)]
    candidates.extend(_probe(path, "wheel", tried) for path in _wheel_paths(tried))
    best = max((found for found in candidates if found is not None), key=lambda found: found.version, default=None)
    return _check_version(best, tried)


def load(explicit: str = "") -> FoundLibrary:
    """Open libfabric for the life of the process; a second call returns the one that is open.

    Raises FabricError when there is none or it is too old, UsageError when another one is open already.
    """
    if native.path():
        opened = FoundLibrary(native.path(), native.version(), "open")
        if explicit and os.path.realpath(explicit) != os.path.realpath(opened.path):
            raise UsageError(
                f"libfabric is open from {opened.path} in this process, so {explicit} cannot be opened: "
                "a process can use one (set AIOTE_LIBFABRIC before you open the first engine)"
            )
        return opened
    found = find_libfabric(explicit)
    try:
        native.load(found.path, DEFAULTS)
    except ImportError as error:
        raise FabricError(2, f"{found.path}: {error}; {INSTALL}", operation="load libfabric") from error
    return found


def library_summary(explicit: str = "") -> str:
    """Return one line on the libfabric that is open or would be opened."""
    try:
        found = load() if native.path() else find_libfabric(explicit)
    except FabricError as error:
        return f"no libfabric: {error}"
    return f"libfabric {found.version[0]}.{found.version[1]} ({found.origin}: {found.path})"


def _wheel_paths(tried: list[str]) -> list[str]:
    prefixes = dict.fromkeys((sys.prefix, sysconfig.get_path("data"), sys.base_prefix))
    paths = [os.path.join(prefix, "lib", "mpich", SONAME) for prefix in prefixes]
    tried.extend(f"{path} (wheel): not there" for path in paths if not os.path.exists(path))
    return [path for path in paths if os.path.exists(path)]


def _probe(path: str, origin: str, tried: list[str]) -> FoundLibrary | None:
    try:
        resolved, major, minor = native.probe(path, DEFAULTS)
    except ImportError as error:
        tried.append(f"{path} ({origin}): {error}")
        return None
    tried.append(f"{resolved} ({origin}): version {major}.{minor}")
    return FoundLibrary(resolved, (major, minor), origin)


def _check_version(found: FoundLibrary | None, tried: list[str]) -> FoundLibrary:
    looked = "; ".join(tried)
    if found is None:
        raise FabricError(
            2, f"no libfabric was found. Looked for: {looked}. To install one: {INSTALL}", operation="load libfabric"
        )
    if found.version < OLDEST:
        raise FabricError(
            38,
            f"libfabric {found.version[0]}.{found.version[1]} at {found.path} is too old: "
            f"expected {OLDEST[0]}.{OLDEST[1]} or later. Looked for: {looked}. To install one: {INSTALL}",
            operation="load libfabric",
        )
    return found
