"""The published transfer of KV caches (Qwen3-235B, 4K to 128K tokens), simulated with `aiote.kvcache`.

`aiote.plan.kvcache` runs a `Producer` and a `Consumer` on the simulated network in virtual time: a request asks for the
prompt, which is computed in chunks, layer by layer, and pushed. Both plan, post, count and answer as they always do,
but their Python code takes no time.

    transfer of a layer = from its computation until the decode rank knows that all of it has arrived
    added = from the request until the last layer has arrived, less the computation

**Computation.** A layer of the last chunk takes the published time. A layer of a first chunk of 16K tokens takes the
time of the prompt of 16K, and the chunks between are linear. The sum over 94 layers is within 2 % of the published time
on one node.

**Pages.** The table counts 1,024 pages of 32 KiB in a layer of a chunk of 16K tokens, on all four ranks together. It
does not say over how many NICs these pages go, so one NIC and two NICs are simulated. A page here has 16 tokens with
all heads.

**Host.** The time between a computed layer and its first write was not published. One number stands for it in all four
cells, which have two different numbers of pages. It was fitted to them, for each number of NICs, so that the largest
error is as small as possible (`HOST_US`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from aiote.plan import KV_SHAPES, nics_of
from aiote.plan.kvcache import Computation, KvScenario, plan_kvcache

SHAPE = KV_SHAPES["qwen3-235b"]
LAYERS = SHAPE.layers
PAGE_BYTES = 32 << 10
TOKENS = 16
"""Of a page: 2 KiB for each."""
HOST_US = {1: 222.0, 2: 567.0}
"""By the number of NICs."""


class Published(NamedTuple):
    """A row of the table (arXiv 2510.27656): milliseconds, and how many chunks of how many pages."""

    tokens: int
    alone: float
    apart: float
    compute: float
    transfer: float
    chunks: int
    pages: int


PUBLISHED = (
    Published(4096, 214, 260, 2.267, 0.661, 1, 256),
    Published(16384, 929, 1042, 9.860, 1.610, 1, 1024),
    Published(65536, 5681, 5852, 20.344, 1.611, 4, 1024),
    Published(131072, 16735, 17056, 34.895, 1.609, 8, 1024),
)


class Cell(NamedTuple):
    """What is simulated of a row: milliseconds of a layer's transfer, and what is added to the computation."""

    published: Published
    nics: int
    transfer: float
    added: float

    @property
    def error(self) -> float:
        """How far the transfer is from the published one: 0.1 is ten percent slower."""
        return self.transfer / self.published.transfer - 1

    @property
    def first_token_error(self) -> float:
        """How far the time to the first token is, on the published one of one node."""
        return (self.published.alone + self.added) / self.published.apart - 1


def computations(row: Published) -> list[float]:
    """Return how many milliseconds a layer of each chunk takes."""
    return Computation.published(row.tokens).chunks(row.tokens, KvScenario.chunk)


def simulate(row: Published, nics: int, host_us: float) -> Cell:
    """Simulate one row."""
    # A page of four heads and both fields, 16 tokens, is of 32 KiB; so many are published.
    plan = plan_kvcache(
        KvScenario(
            shape=SHAPE, nics=nics_of("efa-200g", nics), tokens=row.tokens, page_tokens=TOKENS,
            computation=Computation.published(row.tokens), host_us=host_us,
        )
    )  # fmt: skip
    assert plan.pieces == row.chunks * row.pages
    return Cell(row, nics, plan.layer_ms, plan.added_ms)


def cells(nics: int, rows: tuple[Published, ...] = PUBLISHED) -> Iterator[Cell]:
    """Simulate rows of the table."""
    for row in rows:
        yield simulate(row, nics, HOST_US[nics])


def line(cell: Cell) -> str:
    """Return a row of the table of docs/kvcache.md."""
    row = cell.published
    size = f"{row.tokens // 1024}K | {row.chunks} x {row.pages} | {cell.nics}"
    transfer = f"{row.transfer:.3f} | {cell.transfer:.3f} | {cell.error:+.1%}"
    return f"| {size} | {transfer} | {row.apart - row.alone:.0f} | {cell.added:.2f} | {cell.first_token_error:+.1%} |"


def print_table() -> None:
    """Print the table of docs/kvcache.md."""
    layer = "A layer, published, ms | Simulated | Off"
    print(f"| Tokens | Chunks x pages | NICs | {layer} | Added, published, ms | Added, simulated | First token off |")
    print("|---|---|---|---|---|---|---|---|---|")
    for nics in HOST_US:
        for cell in cells(nics):
            print(line(cell), flush=True)
