"""The ways in which a rail reaches a region's memory, and the reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiote_native.cuda.driver import error_of, load
from aiote_native.system.base import error_text

if TYPE_CHECKING:
    from aiote_native.engine.provider import NicRegistration
    from aiote_native.requests.operations import LocalMemory

    from .contract import Rail

__all__ = ["HOST", "HOST_REACH", "Reach", "device_name", "open_driver", "reach_of", "sharing_error", "stages"]

HOST = ("cpu", "cuda_host")
DRIVER = "libcuda.so.1"


@dataclass(frozen=True, slots=True)
class Reach:
    """Describe a rail's way to a region: "direct" (host memory), "dmabuf" or "peermem" (the NIC reads and writes the
    GPU's memory), "shared" (GPUs copy between processes of this host), "staged" (each byte goes through pinned host
    memory), or "none" (other rails carry it); `reason` is a sentence.
    """

    way: str
    reason: str

    def __str__(self) -> str:
        return self.way


HOST_REACH = Reach("direct", "the memory is the host's")


def stages(rail: Rail, device: str) -> bool:
    """Tell whether a rail reaches memory of that kind of device through pinned host memory."""
    return device == "cuda" and rail.device.stages


def reach_of(rail: Rail, device: str, registration: NicRegistration) -> Reach:
    """Return how a rail that stages reaches memory of a GPU."""
    if registration.unshared == "":
        return Reach(
            "shared",
            "processes of this host open its allocation, and their GPUs copy; transfers to or from host memory go "
            "through pinned memory",
        )
    why = f", and processes of this host cannot open it: {registration.unshared}" if rail.device.shares else ""
    return Reach(
        "staged",
        f"{rail.provider} copies with the processor, which cannot reach GPU memory{why}: the bytes go through pinned "
        "host memory",
    )


def sharing_error(code: int) -> str:
    """Describe why a peer could not open memory, from the driver's error code or a negative errno."""
    return error_of(code) if code > 0 else error_text(-code)


def open_driver(path: str) -> None:
    """Open the CUDA driver, once for the process. Raises StatusError."""
    load(path or DRIVER)


def device_name(memory: LocalMemory) -> str:
    """Return the device that memory is on: "cpu", "cuda:0". The driver's number is used if the buffer gave none."""
    device, number = memory.buffer.device, memory.buffer.device_id
    if device == "cpu":
        return device
    if number < 0 and memory.events is not None:
        number = memory.events.device
    return f"{device}:{number}" if number >= 0 else device
