"""Registering GPU memory with each rail in the best way that the rail has, and recording why other ways failed.

A libibverbs NIC reaches GPU memory by a DMA-BUF, or by the kernel module that gives NICs the pages of GPUs. Our own
rails share or stage it. A rail without a way is left out: transfers take the other rails, and the peers are told.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aiote_native.cuda.driver import needs_flush, synchronize_copies
from aiote_native.requests.operations import LocalMemory
from aiote_native.system.base import StatusError

from ..errors import FabricError, UsageError
from .dmabuf import EXPORTERS, DmaBuf, export_dmabuf
from .reach import Reach, reach_of, stages

if TYPE_CHECKING:
    from aiote_native.engine.provider import NicRegistration
    from aiote_native.system.buffers import AcquiredBuffer

    from .contract import Rail

__all__ = ["PEER_MODULES", "register_gpu"]

PEER_MODULES = (
    Path("/sys/module/nvidia_peermem/version"),
    Path("/sys/module/nv_peer_mem/version"),
    Path("/sys/kernel/mm/memory_peers/nv_mem/version"),
)
"""If one of these files exists, NICs may register addresses of a GPU as if they were the host's."""
SLOW = 7
"""The rank of a rail that stages GPU memory through host memory, if other rails need not stage it."""


class _Attempts:
    """Register one buffer with one rail after another. The DMA-BUF is exported once, for all rails."""

    def __init__(self, buffer: AcquiredBuffer, access: int, stack: contextlib.ExitStack) -> None:
        self.buffer = buffer
        self.access = access
        self.failed: list[FabricError] = []
        self._stack = stack
        self._exported: DmaBuf | FabricError | None = None

    def register(self, rail: Rail) -> tuple[NicRegistration | None, Reach]:
        """Register with a rail, if the rail has a way to the memory. Raises StatusError from the driver."""
        if stages(rail, self.buffer.device):
            made = rail.device.register_gpu(*self._arguments)
            return made, reach_of(rail, self.buffer.device, made)
        if not rail.traits.dmabuf:
            return None, Reach("none", f"{rail.provider} reaches host memory only; other rails carry GPU memory")
        ways: dict[str, Callable[[Rail], NicRegistration]] = {"dmabuf": self._by_dmabuf}
        if self.buffer.device == "cuda":
            ways["peermem"] = self._by_peermem
        reasons: list[str] = []
        for way, attempt in ways.items():
            try:
                made = attempt(rail)
                ordered = self._ordered(made)
                return made, Reach(way, "; ".join([f"{rail.provider} reads and writes it{ordered}", *reasons]))
            except (FabricError, StatusError) as error:
                reasons.append(f"{way}: {error}")
                self._note(rail, error)
        return None, Reach("none", "; ".join(reasons) + "; other rails carry it")

    def _ordered(self, made: NicRegistration) -> str:
        """Ensure that data the NIC wrote is visible before it is counted; return how, as text for the reach.

        Closes the registration and raises StatusError if that is impossible.
        """
        if self.buffer.device != "cuda":
            return ""
        try:
            synchronize_copies(self.buffer.address)
            if not needs_flush(self.buffer.address):
                return ""
            made.flush_behind(self.buffer.address)
        except BaseException:
            made.close()
            raise
        return "; what arrives is flushed to the GPU before it is counted"

    def _note(self, rail: Rail, error: OSError) -> None:
        if not isinstance(error, FabricError):
            error = FabricError(error.errno or errno.EIO, str(error), operation="register memory", rail=rail.name)
        self.failed.append(error)

    @property
    def _arguments(self) -> tuple[int, int, bool, int]:
        return self.buffer.address, self.buffer.nbytes, not self.buffer.readonly, self.access

    def _by_dmabuf(self, rail: Rail) -> NicRegistration:
        if self._exported is None:
            try:
                found = export_dmabuf(self.buffer.device, self.buffer.address, self.buffer.nbytes)
                self._exported = self._stack.enter_context(found)
            except FabricError as error:
                self._exported = error
        if isinstance(self._exported, FabricError):
            raise self._exported
        address, length, writable, access = self._arguments
        return rail.device.register_dmabuf(self._exported.fd, self._exported.offset, length, address, writable, access)

    def _by_peermem(self, rail: Rail) -> NicRegistration:
        if not any(path.exists() for path in PEER_MODULES):
            raise FabricError(errno.EOPNOTSUPP, "nvidia-peermem is not loaded", operation="register memory")
        return rail.device.register(*self._arguments)


def register_gpu(rails: Sequence[Rail], buffer: AcquiredBuffer, access: int) -> tuple[LocalMemory, dict[str, Reach]]:
    """Register a buffer with all rails that reach it; return the registered memory and each rail's way to it.

    The caller has opened the driver. Raises UsageError if no kind of rail here reaches such memory, and FabricError or
    StatusError if every rail that can reach it failed.
    """
    unable = [rail for rail in rails if not (stages(rail, buffer.device) or rail.traits.dmabuf)]
    if buffer.device not in EXPORTERS or len(unable) == len(rails):
        names = ", ".join(sorted({rail.provider for rail in unable})) or "any provider"
        raise UsageError(
            f"memory of device {buffer.device!r} cannot be registered with {names}, "
            "which reach host memory only: register a pinned host buffer and copy to it, or open the engine with "
            "provider='local' or 'socket', or 'verbs' and its rails by name"
        )
    made: list[NicRegistration | None] = []
    reach: dict[str, Reach] = {}
    with contextlib.ExitStack() as stack:
        attempts = _Attempts(buffer, access, stack)
        try:
            for rail in rails:
                registration, reach[rail.name] = attempts.register(rail)
                made.append(registration)
            if not any(made):
                raise attempts.failed[0]
        except BaseException:
            for registration in made:
                if registration is not None:
                    registration.close()
            raise
    memory = LocalMemory(buffer, [rail.device for rail in rails], access, registrations=made)
    slow = [SLOW if reach[rail.name].way == "staged" else 0 for rail in rails]
    if len(set(slow)) > 1:
        memory.rank(slow)
    return memory, reach
