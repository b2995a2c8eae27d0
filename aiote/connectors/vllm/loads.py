"""A worker's side of requests that are computed before all their layers have arrived. Knows nothing of vLLM.

| a request | is that from                                  | until                                                   |
|-----------|-----------------------------------------------|---------------------------------------------------------|
| loading   | the arrival of its first layer, when the      | its transfer has ended: at the latest at the end of the |
|           | engine is told that it may compute it         | next computation, which waits for each layer            |
| broken    | the failure of its transfer, if the engine    | the engine computes it, and drops the result            |
|           | holds its blocks and has not computed it yet  |                                                         |
| dropped   | the end of the request in the engine          | no NIC can touch its blocks                             |

The engine shares the blocks of a request with others from the moment when it is told of the first layer. Therefore each
computation waits for all requests that are loading, including those that it does not compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...kvcache.blocking import BlockingConsumer, Finished
from .requests import Steps, Wanted

__all__ = ["LayerLoads"]

LOAD_S = 10.0
"""How long a computation waits for a layer. Its prefill engine is in the last chunk of the prompt by then."""


class LayerLoads:
    """The requests of one rank that are loading; layers: the number of each layer by its name.

    `invalid` are the blocks whose contents did not come; the engine reports them in this step.
    """

    def __init__(self, consumer: BlockingConsumer, layers: Mapping[str, int]) -> None:
        self._consumer = consumer
        self._counts = {name: consumer.layers.index(number) + 1 for name, number in layers.items()}
        self._all = len(consumer.layers)
        self._loading: dict[str, Wanted] = {}
        self._broken: dict[str, Wanted] = {}
        self._dropped: set[str] = set()
        self._free: set[str] = set()
        self._steps = Steps([], [], [])
        self._waited = False
        self.invalid: set[int] = set()

    def begin(self, steps: Steps) -> None:
        """Record which requests the engine computes in this step, and which it holds without computing them."""
        self._steps = steps

    def wait(self, layer: str) -> None:
        """Wait until a layer of all loading requests has arrived. If it does not come, its request is broken."""
        count = self._counts.get(layer)
        if self._loading and count is not None:
            self._waited = True
            self._consumer.await_layers(self._loading, count, LOAD_S)

    def end(self) -> None:
        """After a computation, wait until all layers of all loading requests have arrived."""
        if self._waited:
            self._waited = False
            self._consumer.await_layers(self._loading, self._all, LOAD_S)

    def cancel(self, request: str) -> None:
        """Cancel a request that the engine has been told of; `take` returns it when no NIC can touch its blocks."""
        self._broken.pop(request, None)
        if request in self._loading:
            self._dropped.add(request)
            self._consumer.cancel(request)
        else:
            self._free.add(request)

    def take_begun(self, receiving: dict[str, Wanted], cancelled: set[str]) -> set[str]:
        """Move the requests whose first layer has arrived out of `receiving`, and return them."""
        begun = {name for name in self._consumer.take_begun() if name in receiving and name not in cancelled}
        for name in begun:
            self._loading[name] = receiving.pop(name)
        return begun

    def take(self, over: Finished) -> tuple[set[str], dict[str, str]]:
        """Record which transfers have ended, and set `invalid`. Return the requests that have ended in the engine whose
        blocks are free, and the reasons why others have failed.
        """
        self.invalid, failed = set(), dict[str, str]()
        for name in self._steps.computed:
            self._report(self._broken.pop(name, None))
        for name in self._ended(over):
            wanted = self._loading.pop(name)
            if name in self._dropped:
                self._dropped.discard(name)
                self._free.add(name)
            elif name in over.failed:
                failed[name] = over.failed[name]
                self._report(wanted)
                if name in self._steps.held:
                    self._broken[name] = wanted
        self._steps = Steps([], [], [])
        free, self._free = self._free, set()
        return free, failed

    def _ended(self, over: Finished) -> Iterable[str]:
        return [name for name in (*over.moved, *over.failed) if name in self._loading]

    def _report(self, wanted: Wanted | None) -> None:
        if wanted is not None:
            self.invalid.update(*(row.blocks for row in wanted.rows.values()))
