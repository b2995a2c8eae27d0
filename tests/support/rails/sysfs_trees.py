"""Recorded sysfs trees: a text file for each host, from which a test builds the folders, files and links.

    [devices/pci0000:15/0000:15:01.0]     what follows is in this folder
    numa_node = 0                         a file and what is in it
    driver -> ../../../bus/pci/drivers/x  a symbolic link and its target
    speed ! EINVAL                        a file that cannot be read: a folder, for root may read every file

A path to the left of the sign may have folders in it. What begins with # is a comment.

The trees are written after real hosts (DGX H100, EC2 p5, Grace with ConnectX-7, small virtual machines), from what is
known of their `lspci -tv` and of the kernel's files, not copied from one: serial numbers and the many files that
aiote does not read are not there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from support import TESTS

TREES = TESTS / "rails" / "trees"
NAMES = tuple(sorted(path.stem for path in TREES.glob("*.txt")))

LINE = re.compile(r"(\S+) (=|->|!) ?(.*)")


class Entry(NamedTuple):
    """A file (`=`), a link (`->`) or a file that cannot be read (`!`)."""

    path: str
    sign: str
    value: str


def entries(name: str) -> list[Entry]:
    """Return what is in the recorded tree of that name."""
    found, folder = [], ""
    for line in (TREES / f"{name}.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            folder = line.strip("[]")
            continue
        match = LINE.fullmatch(line)
        assert match, f"{name}: {line!r}"
        found.append(Entry(f"{folder}/{match[1]}", match[2], match[3]))
    return found


def build(root: Path, tree: list[Entry]) -> str:
    """Make a tree; return its root as `read_topology` takes it."""
    for path, sign, value in tree:
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if sign == "->":
            place.symlink_to(value)
        elif sign == "!":
            place.mkdir()
        else:
            place.write_bytes(value.encode("utf-8", "surrogateescape") + b"\n")
    return str(root)


def recorded(root: Path, name: str) -> str:
    """Make the recorded tree of that name; return its root."""
    return build(root, entries(name))
