"""The pages of a prefill server: lent to prompts, and kept afterwards for prompts with the same beginning.

A page without users is either free or *kept*. A kept page is found by the hash of the tokens up to its end. It is
reused for other tokens only when no free page is left, the least recently used page first. A found prefix is truncated
to whole chunks. So a prompt is always computed in the same pieces, and gives the same bits, whether or not its
beginning was kept.

Pages are given out in random order, as from a pool long in use. So a page's number here is unrelated to its number at a
decoder, which gives out its first pages in order.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio

from aiote.aio import Condition
from aiote.kvcache import block_hashes

__all__ = ["PrefixPages"]

_ORDER = 20  # an arbitrary seed


class PrefixPages:
    """A pool of `pages` pages; `chunk_tokens` is a multiple of `page_tokens`."""

    def __init__(self, pages: int, page_tokens: int, chunk_tokens: int) -> None:
        self.pages = pages
        self._page_tokens = page_tokens
        self._chunk_pages = chunk_tokens // page_tokens
        self._free = random.Random(_ORDER).sample(range(pages), pages)
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        self._hashes: dict[int, bytes] = {}
        self._users: Counter[int] = Counter()
        self._turn = anyio.Lock()
        self._returned = Condition()

    @property
    def used(self) -> int:
        """The number of pages that are lent to prompts."""
        return len(self._users)

    @property
    def kept(self) -> int:
        """The number of pages that are kept, including those that are lent to prompts."""
        return len(self._kept)

    @asynccontextmanager
    async def borrow(self, tokens: Sequence[int], *, fresh: bool = False) -> AsyncIterator[tuple[list[int], int]]:
        """Lend the pages of a prompt, first come, first served, with the number of tokens that need not be computed.

        fresh: use no kept page, so that all tokens are computed. Raises ValueError for a prompt that never fits.
        """
        if self._count(tokens) > self.pages:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens needs {self._count(tokens)} pages, and the cache has {self.pages}"
            )
        async with self._turn:
            while (lent := self._take(tokens, fresh)) is None:
                await self._returned.wait()
        table, found = lent
        try:
            yield table, found * self._page_tokens
        finally:
            self._give_back(table)

    def keep(self, tokens: Sequence[int], table: Sequence[int]) -> None:
        """Keep the pages of a computed prompt, as far as it has whole chunks."""
        hashes = block_hashes(tokens, self._page_tokens)
        whole = len(hashes) // self._chunk_pages * self._chunk_pages
        # Backwards, so that the end of a prompt is evicted before its beginning.
        for block, page in reversed(list(zip(hashes[:whole], table, strict=False))):
            if block not in self._kept and page not in self._hashes:
                self._kept[block] = page
                self._hashes[page] = block
            if block in self._kept:
                self._kept.move_to_end(block)

    def _count(self, tokens: Sequence[int]) -> int:
        return -(-len(tokens) // self._page_tokens)

    def _take(self, tokens: Sequence[int], fresh: bool) -> tuple[list[int], int] | None:
        """Return the pages of a prompt, and how many of them are already computed; None if there are too few pages."""
        table = [] if fresh else self._find(tokens)
        found, wanted = len(table), self._count(tokens) - len(table)
        self._users.update(table)
        idle = [block for block, page in self._kept.items() if not self._users[page]]
        if wanted > len(self._free) + len(idle):
            self._give_back(table)
            return None
        for block in idle[: max(wanted - len(self._free), 0)]:
            page = self._kept.pop(block)
            del self._hashes[page]
            self._free.append(page)
        taken = [self._free.pop() for _ in range(wanted)]
        self._users.update(taken)
        return table + taken, found

    def _find(self, tokens: Sequence[int]) -> list[int]:
        """Return the kept pages of a prompt's beginning: whole chunks, but not the last, whose logits are needed."""
        most = (len(tokens) - 1) // (self._chunk_pages * self._page_tokens) * self._chunk_pages
        table: list[int] = []
        for block in block_hashes(tokens, self._page_tokens)[:most]:
            if block not in self._kept:
                break
            table.append(self._kept[block])
        return table[: len(table) // self._chunk_pages * self._chunk_pages]

    def _give_back(self, table: Sequence[int]) -> None:
        for page in table:
            self._users[page] -= 1
            if not self._users[page]:
                del self._users[page]
                if page not in self._hashes:
                    self._free.append(page)
        self._returned.wake_all()
