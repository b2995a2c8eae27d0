"""Where finished kernels are kept: `<cache>/<package>-<hash of the recipe>/`, one folder each.

A folder is filled under another name, then renamed: it is whole whenever it is there. Who makes one holds a lock, so
that a second run waits for it instead of doing the same work. What is there is used as it is; a newer version of the
package is taken after the folder was removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .host import Problem, log

Fill = Callable[[str, Path, Path], None]
"""Makes what is kept, from a package, in the first folder; the second is for its working files."""


def home(cache: Path, package: str, recipe: object) -> Path:
    """Return the folder for what `recipe` makes of the package: any change to the recipe is another folder."""
    digest = hashlib.sha256(repr(recipe).encode()).hexdigest()[:10]
    return cache / f"{os.path.basename(package)}-{digest}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file for as long as the block runs."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another run, which is making %s", path.with_suffix(""))
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: two runs do the same work, and one result is kept
            pass
        yield


def make(folder: Path, package: str, fill: Fill, announce: str = "") -> None:
    """Make a folder of the cache with `fill`, unless it is there; `announce` is said before."""
    if folder.is_dir():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Problem(f"cannot make the cache {folder.parent} ({error.strerror}); --cache names another") from None
    lock = folder.with_name(f"{folder.name}.lock")
    with _locked(lock):
        if folder.is_dir():
            lock.unlink(missing_ok=True)  # made anew, if who was first had removed it already
            return
        if announce:
            log.info("%s", announce)
        log.debug("making %s", folder)
        _fill(folder, package, fill)
        lock.unlink(missing_ok=True)  # nobody asks for it any more
    log.debug("made %s", folder)


def _fill(folder: Path, package: str, fill: Fill) -> None:
    scratch = Path(tempfile.mkdtemp(prefix="new.", dir=folder.parent))
    try:
        result = scratch / "result"
        result.mkdir()
        fill(package, result, scratch)
        try:
            result.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another run, which no lock kept out, has been faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
