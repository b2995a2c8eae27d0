"""How a rail reaches a region's memory, and why so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiote_native.cuda.driver import error_of, load
from aiote_native.status import error_text

if TYPE_CHECKING:
    from aiote_native.provider import Registration
    from aiote_native.workrequests import LocalMemory

    from .contract import Rail

__all__ = ["HOST", "HOST_REACH", "Reach", "device_name", "open_driver", "reach_of", "sharing_error", "stages"]

HOST = ("cpu", "cuda_host")
DRIVER = "libcuda.so.1"


@dataclass(frozen=True, slots=True)
class Reach:
    """A rail's way to a region: "direct" (memory of the host), "dmabuf" or "peermem" (the NIC reads and writes the
    GPU's memory), "shared" (GPUs copy between processes of this host), "staged" (each byte goes through pinned memory
    of the host), or "none" (other rails carry it); and the reason, a sentence.
    """

    way: str
    reason: str

    def __str__(self) -> str:
        return self.way


HOST_REACH = Reach("direct", "the memory is the host's")


def stages(rail: Rail, device: str) -> bool:
    """Whether a rail reaches memory of that kind of device through pinned memory of the host."""
    return device == "cuda" and rail.device.stages


def reach_of(rail: Rail, device: str, registration: Registration) -> Reach:
    """Say how a rail that stages reaches memory of a GPU."""
    if registration.unshared == "":
        return Reach(
            "shared",
            "processes of this host open the allocation that it lies in, and their GPUs copy; what goes to or comes "
            "from memory of the host goes through pinned memory",
        )
    why = f", and processes of this host cannot open it: {registration.unshared}" if rail.device.shares else ""
    return Reach(
        "staged",
        f"{rail.provider} copies bytes with the processor, which cannot reach GPU memory{why}: they go through pinned "
        "memory of the host",
    )


def sharing_error(code: int) -> str:
    """Describe why a peer could not open memory: a code of the driver's, or -errno."""
    return error_of(code) if code > 0 else error_text(-code)


def open_driver(path: str) -> None:
    """Open the CUDA driver, once for the process. Raises StatusError."""
    load(path or DRIVER)


def device_name(memory: LocalMemory) -> str:
    """Name the device that memory is on: "cpu", "cuda:0"; with the driver's number where the lender has given none."""
    device, number = memory.buffer.device, memory.buffer.device_id
    if device == "cpu":
        return device
    if number < 0 and memory.events is not None:
        number = memory.events.device
    return f"{device}:{number}" if number >= 0 else device
