"""Measure several rails, each a cable between two network namespaces with a rate limit of its own.

    python bench/run.py rails [--mbit 400] [--seconds 3]

Prints what one rail carries, then two and four, equal and unequal, as a ratio to the sum of the limits; and, of four of
which one is pulled in mid-transfer, what the rest carries while it is gone, as a ratio to three. A limit counts what is
on the wire: TCP and Ethernet take 52 bytes of headers for 1448 of data, so 0.965 is all there is.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import anyio

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.network.namespaces import Network, end_of
from support.process.children import Child

SIZE = 32 << 20
PIECE = 1 << 20
CONFIG = {"cluster_key": b"a secret of sixteen", "heartbeat_interval": 0.2, "heartbeat_timeout": 0.8}


async def open_both(network: Network, ends: tuple[Child, Child], limits: list[int]) -> None:
    """Open an engine on each side, with a rail for each limit."""
    await network.heal()
    for cable in network.cables[1:]:
        await network.limit(cable, 0)
    for number, mbit in enumerate(limits):
        await network.limit(network.cables[1 + number], mbit)
    for side, child in enumerate(ends):
        names = [end_of(1 + number, side) for number in range(len(limits))]
        await child.open("tcp", SIZE, rails=names, host=end_of(0, side), **CONFIG)
    await ends[0].ask("connect", address=str(ends[1].address))


async def pour(ends: tuple[Child, Child], imm: int, count: int) -> float:
    """Write so many pieces, check them, and return Mbit/s."""
    near, far = ends
    near.tell("pour", descriptor=far.descriptor.hex(), imm=imm, size=PIECE, count=count, window=16)
    far.tell("poured", imm=imm, count=count)
    there, sent = await far.answer(), await near.answer()
    if there["left"] or (count * PIECE >= SIZE and there["digest"] != sent["digest"]):
        raise SystemExit(f"the data or the counts are wrong: {there}, {sent}")
    return count * PIECE * 8 / sent["seconds"] / 1e6


async def measure(network: Network, ends: tuple[Child, Child], limits: list[int], seconds: float) -> float:
    await open_both(network, ends, limits)
    await pour(ends, 1, 16)
    count = max(SIZE // PIECE, int(sum(limits) * seconds * 1e6 / 8 / PIECE))
    rate = await pour(ends, 2, count)
    print(f"{'+'.join(map(str, limits)):>24} Mbit/s: {rate:7.0f}, {rate / sum(limits):.3f} of the sum", flush=True)
    return rate


async def measure_loss(network: Network, ends: tuple[Child, Child], mbit: int, seconds: float) -> None:
    """Pull one of four, wait until it is found, and measure the rest while it is gone."""
    await open_both(network, ends, [mbit] * 4)
    near, far = ends
    near.tell("pour", descriptor=far.descriptor.hex(), imm=1, size=PIECE, count=int(mbit * 6 * 0.125), window=16)
    far.tell("poured", imm=1, count=int(mbit * 6 * 0.125))
    await anyio.sleep(0.5)
    await network.pull(network.cables[2])
    await far.answer()
    await near.answer()
    rate = await pour(ends, 2, int(mbit * 3 * seconds * 1e6 / 8 / PIECE))
    print(f"{'one of four is pulled':>24}       : {rate:7.0f}, {rate / mbit / 3:.3f} of three", flush=True)


async def main(mbit: int, seconds: float, network: Network, ends: tuple[Child, Child]) -> None:
    for limits in ([mbit], [mbit] * 2, [mbit, mbit // 4], [mbit] * 4, [mbit, mbit // 2, mbit // 4, mbit // 8]):
        await measure(network, ends, limits, seconds)
    await measure_loss(network, ends, mbit, seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mbit", type=int, default=400, help="the limit of a rail")
    parser.add_argument("--seconds", type=float, default=3.0, help="about how long each measurement is")
    arguments = parser.parse_args()
    with Network(cables=5) as made:
        children = Child(*made.enter(0)), Child(*made.enter(1))
        try:
            anyio.run(main, arguments.mbit, arguments.seconds, made, children)
        finally:
            for child in children:
                child.end()
