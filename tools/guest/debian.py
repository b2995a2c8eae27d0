"""Debian's kernel for QEMU: taken out of its package, with just the modules that are needed in an initramfs of our own.

`RECIPE` names the folder of the cache that holds the result.
"""

from __future__ import annotations

import lzma
import re
import shutil
import stat
import struct
import subprocess
import zlib
from collections.abc import Iterable
from pathlib import Path

from . import cache, packages
from .host import Problem

# First what it takes to reach the host's files and this program, then RDMA and the network.
# fmt: off
MODULES = ["virtio_pci", "9pnet_virtio", "9p", "overlay", "virtio_console",
           "crc32_generic", "ib_uverbs", "rdma_ucm", "rdma_rxe", "veth", "bridge", "sch_netem"]
# fmt: on

# The guest's first program. If it ends early the kernel panics, QEMU ends, and the user is shown the console.
INIT = """#!/bin/busybox sh
bb=/bin/busybox
$bb mkdir -p /proc /sys /lower /ram /root
$bb mount -t proc proc /proc
$bb mount -t devtmpfs dev /dev
while read -r m; do $bb insmod /$m || echo "cannot load $m"; done </order
for word in $($bb cat /proc/cmdline); do
    case $word in job=*) job=${word#job=};; esac
done
$bb mount -t 9p -o ro,cache=loose,version=9p2000.L,msize=512000,trans=virtio root /lower || exit 1
$bb mount -t tmpfs -o mode=755 ram /ram || exit 1
$bb mkdir /ram/upper /ram/work
$bb mount -t overlay -o lowerdir=/lower,upperdir=/ram/upper,workdir=/ram/work root /root || exit 1
$bb mount --move /proc /root/proc
$bb mount --move /dev /root/dev
$bb mount -t sysfs sys /root/sys
exec $bb switch_root /root /bin/sh "$job/setup"
"""
RECIPE = (INIT, MODULES)

SIGNED = b"~Module signature appended~\n"
SIGNATURE_BYTES = 12  # what describes a signature, between it and the mark


def home(folder: Path, package: str) -> Path:
    return cache.home(folder, package, RECIPE)


def prepare(folder: Path, package: str) -> None:
    """Get the kernel unless the cache has it."""
    cache.make(home(folder, package), package, _fill)


def _fill(package: str, folder: Path, scratch: Path) -> None:
    package = packages.unpack(package, scratch)
    packages.unpack("busybox-static", scratch)
    kernel = next(scratch.glob("boot/vmlinuz-*"), None)
    if kernel is None:
        raise Problem(f"there is no kernel in {package}")
    modules = in_order(MODULES, scratch / "lib/modules")
    if "rdma_rxe" not in modules:
        raise Problem(f"the kernel in {package} has no module rdma_rxe")
    program, text = stat.S_IFREG | 0o755, stat.S_IFREG | 0o644
    entries = [
        ("bin", stat.S_IFDIR | 0o755, b""),
        ("dev", stat.S_IFDIR | 0o755, b""),
        ("bin/busybox", program, (scratch / "bin/busybox").read_bytes()),
        ("init", program, INIT.encode()),
        ("order", text, "".join(f"{name}\n" for name in modules).encode()),
        *((name, text, data) for name, data in modules.items()),
    ]
    (folder / "kernel").write_bytes(elf(kernel.read_bytes()))
    (folder / "initramfs").write_bytes(cpio(entries))


def elf(image: bytes) -> bytes:
    """Return the ELF kernel in a bzImage, or the bzImage where it cannot be taken out.

    QEMU starts an ELF kernel at its entry point. Unpacking one in the guest takes an emulated processor seconds.
    Offsets: Linux, Documentation/x86/boot.rst (setup_sects, payload_offset, payload_length).
    """
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = ((image[0x1F1] or 4) + 1) * 512 + offset
    packed = image[start : start + length]
    unpacked = b""
    try:
        if packed.startswith(b"\xfd7zXZ"):
            unpacked = lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(packed)
        elif packed.startswith(b"\x1f\x8b"):
            unpacked = zlib.decompressobj(31).decompress(packed)
        elif packed.startswith(b"\x28\xb5\x2f\xfd"):
            unpacked = _zstd(packed)
    except (lzma.LZMAError, zlib.error):
        pass
    return unpacked if unpacked.startswith(b"\x7fELF") else image


def _zstd(data: bytes) -> bytes:
    if not shutil.which("zstd"):
        return b""
    return subprocess.run(["zstd", "-dcq"], input=data, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout


def in_order(wanted: Iterable[str], tree: Path) -> dict[str, bytes]:
    """Return the modules and all that they depend on, each after what it needs; what `tree` lacks is left out."""
    paths = {
        path.name.partition(".")[0].replace("-", "_"): path
        for path in tree.rglob("*.ko*")
        if path.name.endswith((".ko", ".ko.xz", ".ko.zst"))
    }
    found: dict[str, bytes] = {}

    def add(name: str) -> None:
        name = name.replace("-", "_")
        if name in found or name not in paths:  # the latter: built in, or not in this kernel
            return
        data = _module(paths[name])
        depends = re.search(rb"\0depends=([^\0]+)\0", data)
        for other in depends.group(1).decode().split(",") if depends else []:
            add(other)
        found[name] = data

    for name in wanted:
        add(name)
    return found


def _module(path: Path) -> bytes:
    """Return a module unpacked and without its signature: it is taken without one, and need not be checked."""
    data = path.read_bytes()
    if path.suffix == ".xz":
        data = lzma.decompress(data)
    elif path.suffix == ".zst":
        data = _zstd(data)
    if data.endswith(SIGNED):
        (size,) = struct.unpack_from(">I", data, len(data) - len(SIGNED) - 4)
        data = data[: -len(SIGNED) - SIGNATURE_BYTES - size]
    return data


def cpio(entries: Iterable[tuple[str, int, bytes]]) -> bytes:
    """Return an archive in cpio's "newc" format of (name, mode, content); see the kernel's buffer-format.rst."""
    archive = bytearray()
    for inode, (name, mode, data) in enumerate([*entries, ("TRAILER!!!", 0, b"")], 1):
        raw = name.encode() + b"\0"
        fields = (inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(raw), 0)
        archive += b"070701" + b"".join(b"%08x" % field for field in fields) + raw
        archive += b"\0" * (-len(archive) % 4) + data
        archive += b"\0" * (-len(archive) % 4)
    return bytes(archive)
