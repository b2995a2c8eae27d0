"""One leader for the ranks of a tensor-parallel group that run in processes of their own.

The leader, rank 0 or the program's scheduler, has a request received by all ranks, and alone decides: the ranks neither
retry nor know of each other. Each serves a `Worker`, which does what it is told.

| what happens                                  | what becomes of the request                                       |
|-----------------------------------------------|-------------------------------------------------------------------|
| all ranks have everything                     | `Group.receive` returns                                           |
| a rank fails, refuses, or is lost             | it ends on the others, and then raises the first error            |
| the leader cancels                            | it ends on all                                                    |
| the leader is lost                            | its calls are cancelled, so it ends on all                        |

However it ends, `Group.receive` is left when no rank's pages are written to for it any more: a rank's stream ends only
when its `Consumer.receive` has been left; a rank that is lost has nobody else to say so.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, cast

import anyio
import msgspec

import aiote

from .. import service
from ..service.background import to_the_end
from .consumer import Consumer
from .mapping import MappingError
from .moving import Rows, token_count
from .producers import Place
from .protocol import Group as GroupNumber
from .protocol import Name, Number, Row, TransferRefused, rows_of, rows_to

__all__ = ["Group", "Worker"]


class Receive(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """A request for one rank: the addresses of its prefill ranks, and its pages."""

    producers: Annotated[list[str], msgspec.Meta(max_length=1024)]
    request: Name
    tokens: Number
    rows: dict[GroupNumber, Row]
    reads: bool


class Worker(service.Service):
    """What a rank of a decode group serves to its leader: `service.serve(engine, Worker(consumer, leaders=[address]))`.

    `leaders` are the engines that may have it receive: their addresses, a predicate of the peer, or "first", the first
    that calls, as long as it is connected. Raises UsageError for an engine with a cluster key without leaders.
    """

    name = "kvcache.Worker"

    def __init__(self, consumer: Consumer, leaders: service.CallersLike = None) -> None:
        self._consumer = consumer
        self._leaders = service.Callers(consumer.engine, leaders, "leader")

    @service.method(raises=[aiote.UsageError, MappingError, TransferRefused])
    async def receive(self, order: Receive) -> AsyncIterator[None]:
        """Receive a request; the stream ends when all has arrived, or when nothing is written for it any more."""
        self._leaders.require()
        try:
            async with self._consumer.receive(
                order.producers, order.request, tokens=order.tokens, rows=rows_of(order.rows), reads=order.reads
            ) as reception:
                yield None
                await reception.arrived()
        except (aiote.PeerError, service.CallError) as error:
            raise TransferRefused(f"{self._consumer.spec.name}: {error}") from None


class Group:
    """The ranks of a decode group, by their addresses, as their leader has them. Its engine may be a rank's own."""

    def __init__(self, engine: aiote.Engine, ranks: Sequence[Place]) -> None:
        self._engine = engine
        self._ranks = ranks

    async def receive(
        self, producers: Sequence[Place], request: str, *, tokens: int, rows: Sequence[Rows] | Rows, reads: bool = False
    ) -> None:
        """Have a request received by all ranks, as `Consumer.receive` does; rows: of each rank, or the same of all.

        Raises what the first rank that failed has failed with, when it has ended on all: TransferRefused, MappingError,
        CallError, PeerError, UsageError. A second try takes another name. Cancelling ends it on all ranks first.
        """
        tokens = token_count(tokens)
        each = [rows] * len(self._ranks) if isinstance(rows, dict) else list(rows)
        if len(each) != len(self._ranks):
            raise aiote.UsageError(f"rows of each of {len(self._ranks)} ranks are expected, got those of {len(each)}")
        places = [str(place.address if isinstance(place, aiote.Peer) else place) for place in producers]
        orders = [Receive(places, request, tokens, rows_to(one), reads) for one in each]
        failures: list[Exception] = []
        async with anyio.create_task_group() as group:

            async def ask(place: Place, order: Receive) -> None:
                try:
                    await self._ask(place, order)
                except aiote.AioteError as error:
                    failures.append(error)
                    group.cancel_scope.cancel()

            for place, order in zip(self._ranks, orders, strict=True):
                group.start_soon(ask, place, order)
        if failures:
            raise failures[0]

    async def _ask(self, place: Place, order: Receive) -> None:
        peer = place if isinstance(place, aiote.Peer) else await self._engine.connect(place)
        stream = cast("service.Stream", service.client(self._engine, peer, Worker).receive(order))
        try:
            async for _ in stream:
                pass
        finally:
            # To close it is to cancel, and returns when the rank has left the request.
            await to_the_end(stream.aclose)
