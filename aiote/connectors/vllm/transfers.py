"""A worker's side of KV transfers: the caches that its rank offers and receives. Knows nothing of vLLM.

A worker starts the new transfers at the beginning of a step, and polls at its end which have ended. `close` waits for
all transfers. Within a step only `begin` waits, for preempted requests, and with `loads` also `wait` and `end`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import aiote

from ... import bridge as bridges
from ...kvcache import Cache
from ...kvcache.blocking import BlockingConsumer, BlockingProducer
from .layers import LayerOffers, rows_of_blocks
from .loads import LayerLoads
from .requests import Steps, Wanted

__all__ = ["EndedRequests", "RankTransfers"]


class EndedRequests(NamedTuple):
    """Requests whose transfers have ended, so that the engine may use their pages again. `failed` are the requests in
    `received` whose cache has not come, and why, without the cancelled ones.
    """

    sent: set[str]
    received: set[str]
    failed: dict[str, str]


class RankTransfers:
    """The transfers of one rank.

    reads: this rank reads the caches that it receives; otherwise the other side writes them. lease: seconds that an
    offer waits for its receiver, or for its next renewal; lease_limit: the most seconds that renewals can keep it.
    turn: the number of this rank; rank 0 renews for all ranks. layers: the number of each layer by its name, to offer
    prompts while they are computed; block_tokens: how many tokens a block of each group has, if it holds nothing but
    its tokens. loads: the same for the caches that it receives, to name a request as received when its first layer has
    arrived, and to wait for the others while it is computed. settings: those of `aiote.open_engine`. Raises the errors
    of opening an engine and of registering memory.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        produces: bool,
        consumes: bool,
        turn: int = 0,
        reads: bool = False,
        lease: float = 30.0,
        lease_limit: float = 600.0,
        layers: Mapping[str, int] | None = None,
        block_tokens: Mapping[int, int] | None = None,
        loads: Mapping[str, int] | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.reads, self._renews = reads, turn == 0
        self.bridge = bridges.acquire(**(settings or {}))
        self._producer: BlockingProducer | None = None
        self._consumer: BlockingConsumer | None = None
        self._offers: LayerOffers | None = None
        self._loads: LayerLoads | None = None
        self._named: dict[str, str] = {}
        self._receiving: dict[str, Wanted] = {}
        self._cancelled: set[str] = set()
        self._refused = EndedRequests(set(), set(), {})
        try:
            if produces:
                self._producer = BlockingProducer(
                    self.bridge, cache, match_timeout=lease, renewal_limit=lease_limit, page_tokens=block_tokens
                )
                self._offers = LayerOffers(self._producer, layers or {})
            if consumes:
                self._consumer = BlockingConsumer(self.bridge, cache, turn=turn)
                if loads:
                    self._loads = LayerLoads(self._consumer, loads)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """The address at which receivers reach this rank."""
        return str(self.bridge.engine.address)

    def begin(self, steps: Steps) -> None:
        """Begin a step, before its computation: offer what it will compute. Waits only for the writes of preempted
        requests, until no transfer reads their blocks.
        """
        if steps.layers is not None and self._offers is not None:
            self._offers.begin(steps.layers)
        if self._loads is not None:
            self._loads.begin(steps)

    def wait(self, layer: str) -> None:
        """Wait until a layer of the requests that were named as received early has arrived, or they have failed."""
        if self._loads is not None:
            self._loads.wait(layer)

    def saved(self, layer: str) -> None:
        """Record that a step has computed a layer."""
        if self._offers is not None:
            self._offers.saved(layer)

    def end(self) -> None:
        """Record that a step has computed all layers; wait for those that are still to arrive, as `wait` does."""
        if self._offers is not None:
            self._offers.end()
        if self._loads is not None:
            self._loads.end()

    @property
    def invalid(self) -> set[int]:
        """The blocks of the last `take_ended` whose contents did not come, of requests named as received before."""
        return self._loads.invalid if self._loads is not None else set()

    def start(self, steps: Steps) -> None:
        """Begin the new transfers of a step. `take_ended` reports a transfer that cannot begin."""
        for request in steps.offered:
            name = request.name or request.request
            try:
                assert self._producer is not None
                rows = rows_of_blocks(request.rows)
                self._producer.offer(name, tokens=request.tokens, rows=rows, readers=None, computed=True)
                self._named[name] = request.request
            except aiote.AioteError:
                # The producer refuses a receiver that asks for this request, after a wait of `lease` seconds.
                self._refused.sent.add(request.request)
        for wanted in steps.wanted:
            self._receive(wanted)
        for name in steps.cancelled:
            if self._consumer is not None and name in self._receiving:
                self._cancelled.add(name)
                self._consumer.cancel(name)
            elif self._loads is not None:
                self._loads.cancel(name)
        if steps.renewed and self._renews and self._consumer is not None:
            self._consumer.renew(steps.renewed)

    def _receive(self, wanted: Wanted) -> None:
        if wanted.rows:
            self._receiving[wanted.request] = wanted
        try:
            if self._consumer is None:
                raise aiote.UsageError("this engine is not a kv_consumer; set kv_role to kv_consumer or kv_both")
            self._consumer.submit(
                wanted.addresses,
                wanted.remote_request,
                tokens=wanted.tokens,
                rows=rows_of_blocks(wanted.rows),
                reads=self.reads,
                name=wanted.request,
                begins=self._loads is not None,
            )
        except aiote.AioteError as error:
            self._refused.failed[wanted.request] = str(error)

    def take_ended(self) -> EndedRequests:
        """Return the transfers that have ended since the last call."""
        ended, self._refused = self._refused, EndedRequests(set(), set(), {})
        if self._producer is not None and self._offers is not None:
            over = self._producer.poll()
            # The pages are free however the transfer ended; the receiver learns the outcome by itself.
            free = self._offers.record_over({*over.moved, *over.failed})
            ended.sent.update(self._named.pop(name, name) for name in free)
        begun, free, broken = set[str](), set[str](), dict[str, str]()
        if self._consumer is not None:
            over = self._consumer.poll()
            ended.received.update(over.moved)
            ended.failed.update(over.failed)
            if self._loads is not None:
                free, broken = self._loads.take(over)
        ended.received.update(ended.failed)
        # Leave out requests without rows, which were not wanted: vLLM does not wait for them.
        ended.received.intersection_update(self._receiving)
        for name in ended.received:
            wanted = self._receiving.pop(name)
            if name in self._cancelled:
                # The transfer may have ended before the other side was asked for it. Tell that side, which would wait.
                self._cancelled.discard(name)
                ended.failed.pop(name, None)
                self._receive(wanted._replace(rows={}))
        failed = {name: why for name, why in ended.failed.items() if name in ended.received}
        if self._loads is not None:
            begun = self._loads.take_begun(self._receiving, self._cancelled)
        return EndedRequests(ended.sent, ended.received | begun | free, failed | broken)

    def close(self) -> None:
        """End all transfers, wait until they no longer touch any page, and release the engine. Idempotent.

        An interruption (Ctrl-C) is raised once that is done.
        """
        with ExitStack() as all_of_it:
            all_of_it.callback(self.bridge.close)
            for side in (self._consumer, self._producer):
                if side is not None:
                    all_of_it.callback(side.close)
