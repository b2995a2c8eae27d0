"""A worker's side of prompts that are offered while they are computed. Knows nothing of vLLM.

The engine's blocks change hands at the beginning of a step, so `begin` comes before the computation. It is the only
call that waits: until the writes from blocks of preempted requests are over. `saved` comes after each layer, and `end`
after the last; `end` offers the layers for which `saved` was not called.
"""

from __future__ import annotations

from collections.abc import Mapping

import aiote

from ...kvcache import PageRow
from ...kvcache.blocking import BlockingProducer
from .prompts import BlockRow, LayerSteps

__all__ = ["LayerOffers", "rows_of_blocks"]

SUSPEND_S = 2.0
"""How long the writes from blocks of a preempted request may go on; then its readers fail. As `confirm_timeout`."""


class LayerOffers:
    """The prompts of one rank that are offered while they are computed.

    layers: the number of each layer by its name; several names may have one number.
    """

    def __init__(self, producer: BlockingProducer, layers: Mapping[str, int]) -> None:
        self._producer = producer
        self._layers = layers
        self._names: dict[str, str] = {}
        self._requests: dict[str, str] = {}
        self._over: set[str] = set()
        self._ended: set[str] = set()
        self._computed: dict[str, int] = {}
        self._left: dict[int, set[str]] = {}

    def begin(self, steps: LayerSteps) -> None:
        """Begin a step. Returns when no transfer reads the blocks of the preempted requests."""
        names = [self._names[request] for request in steps.suspended if request in self._names]
        self._producer.suspend(names, SUSPEND_S)
        self._ended.update(steps.ended)
        for name, request in steps.withdrawn.items():
            if request:
                self._ended.add(request)
            if not request or name == self._names.get(request):
                self._producer.cancel(name)
        if steps.queued:
            self._producer.queued(steps.queued)
        for prompt in steps.computing:
            self._offer(prompt.request, prompt.name, prompt.tokens, rows_of_blocks(prompt.rows))
            if prompt.request in self._names:
                self._computed[prompt.name] = prompt.computed
        self._left = {}
        if self._computed:
            for name, number in self._layers.items():
                self._left.setdefault(number, set()).add(name)

    def _offer(self, request: str, name: str, tokens: int, rows: dict[int, PageRow]) -> None:
        """Offer a prompt, or the blocks that it has by now."""
        if request in self._names:
            self._producer.extend(name, rows)
            return
        if request in self._over:
            return
        try:
            self._producer.offer(name, tokens=tokens, rows=rows, readers=None)
        except aiote.AioteError:
            # The name is taken, for example: the producer refuses a reader that asks for it, after a wait.
            self._over.add(request)
            return
        self._names[request], self._requests[name] = name, request

    def saved(self, layer: str) -> None:
        """Offer a layer of the step's prompts, once all tensors of its number are computed."""
        if not self._computed or (number := self._layers.get(layer)) is None:
            return
        left = self._left.get(number, set())
        left.discard(layer)
        if not left and self._left.pop(number, None) is not None:
            self._producer.computed_layer(number, self._computed)

    def end(self) -> None:
        """Offer the layers of the step's prompts that are left."""
        for number in self._left:
            self._producer.computed_layer(number, self._computed)
        self._left, self._computed = {}, {}

    def record_over(self, names: set[str]) -> set[str]:
        """Record which offers are over, and return the requests whose blocks are free: these have also ended.

        A name that this did not offer is returned as it is.
        """
        known = {name for name in names if name in self._requests}
        for name in known:
            request = self._requests.pop(name)
            del self._names[request]
            self._over.add(request)
        free = self._over & self._ended
        self._over -= free
        self._ended -= free
        return free | (names - known)


def rows_of_blocks(rows: dict[int, BlockRow]) -> dict[int, PageRow]:
    """Return rows of blocks as the KV cache protocol takes them."""
    return {group: PageRow(row.blocks, row.start) for group, row in rows.items()}
