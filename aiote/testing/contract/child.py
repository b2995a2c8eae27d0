"""The process that checks kill and stop: an engine with registered memory, whose descriptor it prints."""

from __future__ import annotations

import json
import sys

import anyio
import anyio.to_thread
import numpy as np

import aiote

SIZE = 8 << 20


async def main(provider: str, rails: list[str] | None, host: str | None) -> None:
    """Serve until standard input ends, as it does when the parent dies."""
    async with aiote.open_engine(provider, rails, host=host) as engine:
        region = engine.register(np.zeros(SIZE, np.uint8))
        sys.stdout.write(f"{bytes(region.descriptor).hex()}\n")
        sys.stdout.flush()
        await anyio.to_thread.run_sync(sys.stdin.buffer.read, abandon_on_cancel=True)


if __name__ == "__main__":
    anyio.run(main, *json.loads(sys.argv[1]))
