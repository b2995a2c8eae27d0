"""How a rail reaches a region's memory, and why so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiote_native.cuda.driver import load

if TYPE_CHECKING:
    from aiote_native.workrequests import LocalMemory

    from .contract import Rail

__all__ = ["HOST", "Reach", "device_name", "open_driver", "reach_of", "stages"]

HOST = ("cpu", "cuda_host")
DRIVER = "libcuda.so.1"


@dataclass(frozen=True, slots=True)
class Reach:
    """A rail's way to a region: "direct" (memory of the host), "dmabuf" (the NIC reads and writes the GPU's memory), or
    "staged" (each byte goes through pinned memory of the host); and the reason, a sentence.
    """

    way: str
    reason: str

    def __str__(self) -> str:
        return self.way


def stages(rail: Rail, device: str) -> bool:
    """Whether a rail reaches memory of that kind of device through pinned memory of the host."""
    return device == "cuda" and rail.device.stages


def reach_of(rail: Rail, device: str) -> Reach:
    """Say how a rail reaches memory of a kind of device."""
    if device in HOST:
        return Reach("direct", "the memory is the host's")
    if stages(rail, device):
        return Reach(
            "staged",
            f"{rail.provider} copies bytes with the processor, which cannot reach GPU memory: they go through pinned "
            "memory of the host",
        )
    return Reach("dmabuf", f"{rail.provider} has registered a DMA-BUF of the memory")


def open_driver(path: str) -> None:
    """Open the CUDA driver, once for the process. Raises StatusError."""
    load(path or DRIVER)


def device_name(memory: LocalMemory) -> str:
    """Name the device that memory is on: "cpu", "cuda:0"; with the driver's number where the lender has given none."""
    device, number = memory.buffer.device, memory.buffer.device_id
    if device == "cpu":
        return device
    if number < 0:
        number = max(registration.ordinal for registration in memory.registrations)
    return f"{device}:{number}" if number >= 0 else device
