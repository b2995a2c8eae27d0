"""A tree of sysfs: small files and symbolic links. Any of them may be missing, unreadable or nonsense."""

from __future__ import annotations

import os
import re

from .topology import Place

__all__ = ["Tree"]

MAX_ENTRIES = 4096
"""How many entries of one folder are read at most, because a host of containers may have thousands of veth."""
MAX_BYTES = 4096
MAX_NODE = 65535

# The kernel bounds the length of a link's target, and so the numbers in it.
_COMPLEX = r"pci[0-9a-f]{4,8}:[0-9a-f]{2}"
_FUNCTION = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
_ELEMENT = re.compile(f"{_COMPLEX}|{_FUNCTION}", re.ASCII)
_ADDRESS = re.compile(_FUNCTION, re.ASCII)
_NUMBER = re.compile(r"\d{1,10}", re.ASCII)
_HEX = re.compile(r"0x[0-9a-f]{1,8}", re.ASCII | re.IGNORECASE)

# O_NONBLOCK, so that a pipe in a recorded tree does not block the reader.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


class Tree:
    """Read a sysfs tree. No method raises; each returns a value for a missing or invalid entry."""

    def __init__(self, root: str) -> None:
        self.root = root

    def text(self, path: str) -> str:
        """Return the contents of a file, or an empty string."""
        try:
            file = os.open(os.path.join(self.root, path), _FLAGS)
        except (OSError, ValueError):
            return ""
        try:
            return os.read(file, MAX_BYTES).decode("ascii", "replace").strip()
        except OSError:
            return ""
        finally:
            os.close(file)

    def number(self, path: str, most: int, unknown: int) -> int:
        """Return the decimal number in a file, or `unknown` if there is none or it exceeds `most`."""
        text = self.text(path)
        return int(text) if _NUMBER.fullmatch(text) and int(text) <= most else unknown

    def hexadecimal(self, path: str) -> int:
        """Return the number in a file that begins with 0x, or 0."""
        text = self.text(path)
        return int(text, 16) if _HEX.fullmatch(text) else 0

    def names(self, path: str) -> list[str]:
        """Return the names in a folder in natural order: mlx5_2 before mlx5_10."""
        try:
            with os.scandir(os.path.join(self.root, path)) as entries:
                found = [entry.name for entry, _ in zip(entries, range(MAX_ENTRIES), strict=False)]
        except (OSError, ValueError):
            return []
        return sorted(found, key=_numeric_key)

    def devices(self, path: str) -> list[str]:
        """Return the names of a class's devices. These are links; `bonding_masters`, a file, is left out."""
        return [name for name in self.names(path) if self.link(f"{path}/{name}")]

    def link(self, path: str) -> str:
        """Return where a symbolic link points to, or an empty string."""
        try:
            return os.readlink(os.path.join(self.root, path))
        except (OSError, ValueError):
            return ""

    def net(self, path: str) -> str:
        """Return the name of a net device in a file, or an empty string if the text cannot be a name."""
        name = self.text(path)
        return "" if "/" in name or name in (".", "..") else name

    def software(self, device: str) -> bool:
        """Tell whether an RDMA device is implemented in software. rxe has the file `parent`."""
        return bool(self.text(f"{device}/parent")) or "/devices/virtual/" in self.link(device)

    def driver(self, device: str) -> str:
        """Return the name of a device's driver, or an empty string."""
        return self.link(f"{device}/driver").rpartition("/")[2]

    def place(self, target: str) -> Place:
        """Return the place of a link's target: the PCI function in it that is farthest from the root."""
        path = tuple(part for part in target.split("/") if _ELEMENT.fullmatch(part))
        if not path or not _ADDRESS.fullmatch(path[-1]):
            return Place()
        return Place(self.number(f"bus/pci/devices/{path[-1]}/numa_node", MAX_NODE, -1), path)


def _numeric_key(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts the numbers in names as numbers."""
    if len(name) <= 9 and name.isascii() and name.isdigit():  # fast path: a port may have a thousand GIDs
        return [(-1, ""), (int(name), ""), (-1, "")]
    return [(int(part), "") if _NUMBER.fullmatch(part) else (-1, part) for part in re.split(r"(\d{1,9})", name)]
