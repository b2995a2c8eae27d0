"""A worker's side of KV transfers: what its rank offers and receives. Knows nothing of vLLM.

Nothing here waits, except `close`. A worker starts what is new in a step and asks at its end what has ended.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import aiote

from ... import bridge as bridges
from ...kvcache import Cache, PageRow
from ...kvcache.blocking import BlockingConsumer, BlockingProducer
from .requests import Row, Steps, Wanted

__all__ = ["Ended", "Transfers"]


class Ended(NamedTuple):
    """Requests whose pages are the engine's again. `failed` are those of `received` that have not come, and why, and
    were not cancelled.
    """

    sent: set[str]
    received: set[str]
    failed: dict[str, str]


class Transfers:
    """The transfers of one rank.

    reads: it reads what it receives; else it is written to it. lease: seconds that an offer waits for who receives it,
    or for the next time that this is renewed; lease_limit: seconds for which it can be. turn: its rank, of which the
    first renews for all.
    settings: those of `aiote.open_engine`. Raises what opening an engine and registering memory do.
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
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.reads, self._renews = reads, turn == 0
        self.bridge = bridges.acquire(**(settings or {}))
        self._producer: BlockingProducer | None = None
        self._consumer: BlockingConsumer | None = None
        self._receiving: dict[str, Wanted] = {}
        self._cancelled: set[str] = set()
        self._refused = Ended(set(), set(), {})
        try:
            if produces:
                self._producer = BlockingProducer(self.bridge, cache, match_timeout=lease, renewal_limit=lease_limit)
            if consumes:
                self._consumer = BlockingConsumer(self.bridge, cache, turn=turn)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """Where those who receive reach this rank."""
        return str(self.bridge.engine.address)

    def start(self, steps: Steps) -> None:
        """Begin what is new. What cannot begin has ended."""
        for request in steps.offered:
            try:
                assert self._producer is not None
                rows = _rows(request.rows)
                self._producer.offer(request.request, tokens=request.tokens, rows=rows, readers=None, computed=True)
            except aiote.AioteError:
                # Who asks for it is refused after a while.
                self._refused.sent.add(request.request)
        for wanted in steps.wanted:
            self._receive(wanted)
        for name in steps.cancelled:
            if self._consumer is not None and name in self._receiving:
                self._cancelled.add(name)
                self._consumer.cancel(name)
        if steps.renewed and self._renews and self._consumer is not None:
            self._consumer.renew(steps.renewed)

    def _receive(self, wanted: Wanted) -> None:
        if wanted.rows:
            self._receiving[wanted.request] = wanted
        try:
            if self._consumer is None:
                raise aiote.UsageError("this engine is no kv_consumer")
            self._consumer.submit(
                wanted.addresses,
                wanted.remote_request,
                tokens=wanted.tokens,
                rows=_rows(wanted.rows),
                reads=self.reads,
                name=wanted.request,
            )
        except aiote.AioteError as error:
            self._refused.failed[wanted.request] = str(error)

    def ended(self) -> Ended:
        """Return what has ended since the last time."""
        ended, self._refused = self._refused, Ended(set(), set(), {})
        if self._producer is not None:
            over = self._producer.poll()
            # However it ended, who has received it knows: its pages are free.
            ended.sent.update(over.moved, over.failed)
        if self._consumer is not None:
            over = self._consumer.poll()
            ended.received.update(over.moved)
            ended.failed.update(over.failed)
        ended.received.update(ended.failed)
        # Nobody waits for those that are not wanted.
        ended.received.intersection_update(self._receiving)
        for name in ended.received:
            wanted = self._receiving.pop(name)
            if name in self._cancelled:
                # It may have ended before it was asked for, and would then be waited for.
                self._cancelled.discard(name)
                ended.failed.pop(name, None)
                self._receive(wanted._replace(rows={}))
        return ended._replace(failed={name: why for name, why in ended.failed.items() if name in ended.received})

    def close(self) -> None:
        """End all, wait until no page is touched any more, and give the engine back. Idempotent.

        What interrupts it (Ctrl-C) is raised then.
        """
        with ExitStack() as all_of_it:
            all_of_it.callback(self.bridge.close)
            for side in (self._consumer, self._producer):
                if side is not None:
                    all_of_it.callback(side.close)


def _rows(rows: dict[int, Row]) -> dict[int, PageRow]:
    return {group: PageRow(row.blocks, row.start) for group, row in rows.items()}
