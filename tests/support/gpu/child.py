"""A child engine (`child_engine`) whose memory is a GPU's, on the stand-in for the driver."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import aiote
from support.gpu import standin_cuda
from support.gpu.standin_cuda import GpuArray, SegmentedArray, driver
from support.process.child_engine import Commands, main


class GpuCommands(Commands):
    """What such a child can be told to do beside the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.region: aiote.Region | None = None
        self.array: GpuArray | None = None

    async def open(
        self, provider: str, config: dict[str, Any], size: int, rails: list[str] | None = None
    ) -> dict[str, Any]:
        """Open the engine and register `size` bytes of a device's memory, all of them 1 at first."""
        path = config["libcuda"]
        standin_cuda.standin_path = lambda: path  # compiled once, by the tests
        answer = await super().open(provider, config, 1, rails)
        return answer | await self.allocate(size)

    async def allocate(self, size: int, device: int = 0, value: int = 1, segment: int = 0) -> dict[str, Any]:
        """Close the region, free its memory, and register memory anew, which may be at the same address; in segments of
        so many bytes, if that is said.
        """
        if self.region is not None:
            await self.region.aclose()
        self.region = self.array = None
        self.array = SegmentedArray(size, device, segment=segment) if segment else GpuArray(size, device)
        self.array.seen[:] = value
        self.region = self.engine.register(self.array)
        reach = {name: [found.way, found.reason] for name, found in self.region.reach.items()}
        return {"descriptor": self.region.descriptor.hex(), "at": self.array.address, "reach": reach}

    async def fill(self, value: int) -> dict[str, Any]:
        """Set all bytes."""
        self.array.seen[:] = value
        return {}

    async def contents(self) -> dict[str, Any]:
        """Tell which bytes the memory has, and their digest."""
        seen = self.array.seen.tobytes()
        return {"bytes": sorted(set(seen)), "digest": hashlib.sha256(seen).hexdigest()}

    async def write(self, descriptor: str, imm: int, times: int = 1) -> dict[str, Any]:
        """Write the memory to a remote region, counted, so often."""
        remote = self.engine.attach(bytes.fromhex(descriptor))
        for _ in range(times):
            await self.engine.write_imm(self.region, remote, imm)
        return {}

    async def read(self, descriptor: str) -> dict[str, Any]:
        """Read a remote region into the memory."""
        await self.engine.read(self.engine.attach(bytes.fromhex(descriptor)), self.region)
        return {}

    async def start_read(self, descriptor: str) -> dict[str, Any]:
        """Begin to read a remote region into the memory."""
        self._start(self._read(descriptor))
        return {}

    async def _read(self, descriptor: str) -> None:
        try:
            await self.read(descriptor)
        except aiote.AioteError as error:
            self.failed.append(f"{type(error).__name__}: {error}")

    async def standin(self, call: str, value: int | None = None) -> dict[str, Any]:
        """Call a function of the stand-in's own, with an integer where it takes one."""
        arguments = [] if value is None else [value]
        return {"value": int(getattr(driver(), f"standin_{call}")(*arguments) or 0)}


if __name__ == "__main__":
    asyncio.run(main(GpuCommands()))
