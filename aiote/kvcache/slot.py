"""A request, as the program sees it that decodes: its pages, and what has arrived of its cache."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import anyio
import numpy as np
from numpy.typing import NDArray

import aiote

from ..service.background import Bell
from .attempt import Attempt, DecoderContext
from .fill import Numbers
from .pool import Holding, PagePool
from .transfer_plan import PageTable

__all__ = ["PrefillError", "Slot"]

Group = Sequence[aiote.Peer | aiote.Address]


class PrefillError(aiote.AioteError):
    """No prefiller delivered a request's cache: `reasons` has one text for each group that was tried."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("; ".join(f"try {number}: {reason}" for number, reason in enumerate(reasons, 1)))
        self.reasons = tuple(reasons)


class Layers(AsyncIterator[int]):
    """The layers of a slot, as they come. Made by `Slot.layers`."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._round, self._following = slot.round, 0

    async def __anext__(self) -> int:
        self._round, layer = await self._slot.next_layer(self._round, self._following)
        if layer == self._slot.layer_count:
            raise StopAsyncIteration
        self._following = layer + 1
        return layer


class Slot:
    """One request's place in a decoder. Made by `Decoder.request`, and of no use after its `async with`."""

    def __init__(
        self,
        context: DecoderContext,
        pool: PagePool,
        holding: Holding,
        tails: NDArray[np.uint8],
        request: bytes,
        tokens: Numbers,
    ) -> None:
        self.over = anyio.Event()
        self.left = anyio.Event()
        self.request_id = request
        self.tokens = tokens
        self._context = context
        self._pool = pool
        self._holding = holding
        self._tails = tails
        self._room = len(tokens)
        self._round = 0
        self._done = 0
        self._complete = False
        self.ran = False
        self._failure: aiote.AioteError | None = None
        self._attempt: Attempt | None = None
        self._bell = Bell()

    @property
    def pages(self) -> tuple[int, ...]:
        """The numbers of its pages, in the order of its tokens; those of `extend` follow."""
        return tuple(self._holding.pages)

    @property
    def table(self) -> PageTable:
        """Its pages as a page table."""
        return PageTable(self._holding.pages, self._pool.pages)

    @property
    def capacity(self) -> int:
        """How many tokens its pages have room for."""
        return len(self._holding.pages) * self._context.layout.page_tokens

    @property
    def layer_count(self) -> int:
        """How many layers there are to come."""
        return self._context.layout.layers

    @property
    def round(self) -> int:
        """Which group of prefillers is being tried, or has delivered: from 1."""
        return self._round

    @property
    def complete(self) -> bool:
        """Whether everything has arrived."""
        return self._complete

    @property
    def tail(self) -> bytes:
        """A copy of the tail's bytes. Raises UsageError before all has arrived."""
        if not self._complete:
            raise aiote.UsageError("slot.tail: await slot.arrived() first")
        return bytes(self._tails[self._holding.place])

    async def arrived(self) -> None:
        """Wait until all layers and the tail are in this memory. Raises PrefillError, ClosedError.

        Cancelling the wait ends nothing; leaving the `async with` does.
        """
        while not self._complete:
            if self._failure is not None:
                raise self._failure
            await self._bell.wait()

    def layers(self) -> Layers:
        """Iterate over the layers in order, each when all its pages are here; it ends when the tail is here, too.

        Where a prefiller fails and the next one begins anew, so does this: after any layer, layer 0 may follow, and
        what was read before is void, for it is written once more. Raises PrefillError, ClosedError. A loop over it may
        be left at any time.
        """
        return Layers(self)

    async def next_layer(self, round_: int, layer: int) -> tuple[int, int]:
        """Wait until a layer is here, and return its round and number: those of layer 0 where a new round has begun.

        The number is that of all layers where everything is here. Raises as `layers`.
        """
        while True:
            if round_ != self._round:
                round_, layer = self._round, 0
            if layer < self._done or self._complete:
                return round_, layer
            if self._failure is not None:
                raise self._failure
            await self._bell.wait()

    async def extend(self, tokens: int) -> None:
        """Have room for so many tokens more than the prompt and what was asked for before; pages are added for that.

        It waits for pages before all requests that wait for their first ones. Raises PagesExhausted where all who
        could give some back wait for more themselves, UsageError, ClosedError. Cancelling loses nothing.
        """
        if not isinstance(tokens, int) or tokens < 0:
            raise aiote.UsageError(f"extend: tokens={tokens!r}: expected an integer from 0 on")
        if self.left.is_set():
            raise aiote.UsageError("extend: the request is over")
        missing = self._context.layout.pages_for(self._room + tokens) - len(self._holding.pages)
        if missing > 0:
            await self._pool.extend(self._holding, missing)
        self._room += tokens

    # For the decoder.

    async def run(self, groups: Sequence[Group]) -> None:
        """Try one group after another, until all has arrived or the request was left; then nobody writes to it."""
        reasons: list[str] = []
        prompt = self._holding.pages[: self._context.layout.pages_for(len(self.tokens))]
        for number, group in enumerate(groups, 1):
            if self.left.is_set() or self._failure is not None:
                break
            self._attempt = Attempt(
                self._context, self.request_id, number, group, self.tokens, prompt, self._holding.place
            )
            self._round, self._done = number, 0
            reason = await self._attempt.run(self._progress)
            self._attempt = None
            if not reason:
                self._complete = True
                break
            reasons.append(reason)
        if not self._complete:
            left = self.left.is_set()
            self.fail(
                aiote.ClosedError("the request was left before all had arrived") if left else PrefillError(reasons)
            )
        self.ran = True
        self._bell.ring()

    def leave(self) -> None:
        """Take note that the program has left the request."""
        self.left.set()
        if self._attempt is not None:
            self._attempt.fail("the decoder does not want it any more")

    def fail(self, error: aiote.AioteError) -> None:
        """End it with an error."""
        self._failure = self._failure or error
        if self._attempt is not None:
            self._attempt.fail(str(error))
        self._bell.ring()

    def _progress(self, layers: int) -> None:
        self._done = layers
        self._bell.ring()
