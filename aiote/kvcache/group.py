"""Lead the ranks of a tensor-parallel group that run in separate processes.

The leader (rank 0 or the program's scheduler) makes all ranks receive a request, and decides alone: the ranks do not
retry and do not know each other. Each rank serves a `Worker`, which follows the leader's calls.

| event                                         | effect on the request                                             |
|-----------------------------------------------|-------------------------------------------------------------------|
| all ranks have everything                     | `Group.receive` returns                                           |
| a rank fails, refuses, or is lost             | it ends on the other ranks; then `receive` raises the first error |
| the leader cancels                            | it ends on all ranks                                              |
| the leader is lost                            | its calls are cancelled, so it ends on all ranks                  |

In each case `Group.receive` ends only when the prefill ranks have stopped writing to the pages of every rank, because
the stream of a rank ends only when its `Consumer.receive` has been left. A lost rank's stream ends without this
confirmation, as does the stream of a rank that the leader disconnects because it does not end the request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Annotated, cast

import anyio
import msgspec

import aiote

from .. import service
from ..aio import run_shielded
from .consumer import Consumer
from .mapping import MappingError
from .moving import Rows, token_count
from .producers import Place
from .protocol import Name, Number, SentRows, TransferRefused, rows_of, rows_to

__all__ = ["Group", "Worker"]


class Receive(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """A request for one rank: the addresses of its prefill ranks, and its pages."""

    producers: Annotated[list[str], msgspec.Meta(max_length=1024)]
    request: Name
    tokens: Number
    rows: SentRows
    reads: bool


class Worker(service.Service):
    """The service of a decode rank for its leader: `service.serve(engine, Worker(consumer, leaders=[address]))`.

    `leaders` are the engines that may make this rank receive: their addresses, a predicate of the peer, or "first": the
    first caller, as long as it is connected. Raises UsageError for an engine with a cluster key and no leaders.
    """

    name = "kvcache.Worker"

    def __init__(self, consumer: Consumer, leaders: service.CallersLike = None) -> None:
        self._consumer = consumer
        self._leaders = service.Callers(consumer.engine, leaders, "leader")

    @service.method(raises=[aiote.UsageError, MappingError, TransferRefused])
    async def receive(self, order: Receive) -> AsyncIterator[None]:
        """Receive a request; the stream ends when all has arrived, or after a failure when all writes are over."""
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
    """The leader's view of a decode group: the addresses of its ranks. `engine` may be the engine of one of them.

    A rank that has not ended a request within `confirm_timeout` seconds after it was told to is disconnected. Give a
    longer time than the `confirm_timeout` of the ranks' consumers.
    """

    def __init__(self, engine: aiote.Engine, ranks: Sequence[Place], *, confirm_timeout: float = 30.0) -> None:
        self._engine = engine
        self._ranks = ranks
        self._confirm_timeout = confirm_timeout

    async def receive(
        self, producers: Sequence[Place], request: str, *, tokens: int, rows: Sequence[Rows] | Rows, reads: bool = False
    ) -> None:
        """Make all ranks receive a request as `Consumer.receive` does; rows: one dict for each rank, or one for all.

        Raises the first rank's error once the request has ended on all ranks: TransferRefused, MappingError, CallError,
        PeerError, UsageError. A retry needs another `request`. Cancelling first ends the request on all ranks.
        """
        tokens = token_count(tokens)
        each = [rows] * len(self._ranks) if isinstance(rows, dict) else list(rows)
        if len(each) != len(self._ranks):
            raise aiote.UsageError(f"rows: expected one dict for each of {len(self._ranks)} ranks, got {len(each)}")
        places = [str(place.address if isinstance(place, aiote.Peer) else place) for place in producers]
        orders = [Receive(places, request, tokens, rows_to(one), reads) for one in each]
        failures: list[Exception] = []
        async with anyio.create_task_group() as group:

            async def ask_one(place: Place, order: Receive) -> None:
                try:
                    await self._ask_rank(place, order)
                except aiote.AioteError as error:
                    failures.append(error)
                    group.cancel_scope.cancel()

            for place, order in zip(self._ranks, orders, strict=True):
                group.start_soon(ask_one, place, order)
        if failures:
            raise failures[0]

    async def _ask_rank(self, place: Place, order: Receive) -> None:
        peer = place if isinstance(place, aiote.Peer) else await self._engine.connect(place)
        stream = cast("service.Stream", service.client(self._engine, peer, Worker).receive(order))
        try:
            async for _ in stream:
                pass
        finally:
            await run_shielded(partial(self._end_call, peer, stream))

    async def _end_call(self, peer: aiote.Peer, stream: service.Stream) -> None:
        # Closing the stream cancels the call; `aclose` returns when the rank has left the request.
        with anyio.move_on_after(self._confirm_timeout) as late:
            await stream.aclose()
        if late.cancelled_caught:
            peer.disconnect(f"it has not ended a request within {self._confirm_timeout} s")
            await stream.aclose()
