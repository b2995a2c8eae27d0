"""The figures of the NIC models beside published figures of the NICs.

The published figures are those of TransferEngine (arXiv 2510.27656): one single write in flight, and paged writes, in
Gbit/s. EFA stands for two NICs of 200 Gbit/s for each GPU, ConnectX-7 for one of 400. Each cell is simulated: two
engines on the model's NICs, in virtual time, in which the program itself takes no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..transfers import Pages
from .fabric import Fabric
from .nics import CONNECTX7_400G, EFA_200G, NicModel
from .virtual_run import run

__all__ = ["PUBLISHED", "PublishedFigure", "cells", "paged_writes", "single_write"]

KIB = 1 << 10
MIB = 1 << 20
WRITES = 4
PAGES = 8192
REGION_BYTES = 32 * MIB

PUBLISHED: dict[tuple[str, NicModel, int], dict[int, float]] = {
    ("single write", EFA_200G, 2): {64 * KIB: 16, 256 * KIB: 54, MIB: 145, 32 * MIB: 336},
    ("single write", CONNECTX7_400G, 1): {64 * KIB: 44, 256 * KIB: 116, MIB: 245, 32 * MIB: 378},
    ("paged writes", EFA_200G, 2): {KIB: 17, 8 * KIB: 138, 16 * KIB: 274, 64 * KIB: 364},
    ("paged writes", CONNECTX7_400G, 1): {KIB: 91, 8 * KIB: 320, 16 * KIB: 367, 64 * KIB: 370},
}
"""(what, model, NICs) to Gbit/s by bytes of a write, or of a page."""


class PublishedFigure(NamedTuple):
    """One published figure and the model's, in Gbit/s."""

    what: str
    model: NicModel
    rails: int
    size: int
    published: float
    simulated: float

    @property
    def error(self) -> float:
        """The relative error of the model: 0.1 is ten percent too fast."""
        return self.simulated / self.published - 1


def single_write(model: NicModel, rails: int, size: int) -> float:
    """Return the Gbit/s of single writes, one in flight."""

    async def main(fabric: Fabric) -> float:
        async with fabric.open_engine() as left, fabric.open_engine() as right:
            source, target = left.register(bytes(size)), left.attach(right.register(bytearray(size)).descriptor)
            await left.write(source, target)
            before = fabric.now
            for _ in range(WRITES):
                await left.write(source, target)
            return WRITES * size * 8 / (fabric.now - before) / 1e9

    return run(main, rails=rails, model=model)


def paged_writes(model: NicModel, rails: int, page: int) -> float:
    """Return the Gbit/s of one request of many pages."""

    async def main(fabric: Fabric) -> float:
        async with fabric.open_engine() as left, fabric.open_engine() as right:
            source = left.register(bytes(REGION_BYTES))
            target = left.attach(right.register(bytearray(REGION_BYTES)).descriptor)
            indices = [number % (REGION_BYTES // page) for number in range(PAGES)]
            await left.write(source, target)
            before = fabric.now
            await left.write_pages(Pages(source, indices, page), Pages(target, indices, page))
            return PAGES * page * 8 / (fabric.now - before) / 1e9

    return run(main, rails=rails, model=model)


def cells() -> Iterator[PublishedFigure]:
    """Simulate every published figure."""
    for (what, model, rails), figures in PUBLISHED.items():
        simulate = single_write if what == "single write" else paged_writes
        for size, published in figures.items():
            yield PublishedFigure(what, model, rails, size, published, simulate(model, rails, size))
