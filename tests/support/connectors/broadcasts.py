"""Senders and receivers of updates with NumPy arrays, on whatever engines a test has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import anyio
import numpy as np

import aiote
from aiote import service
from aiote.connectors.bucket_broadcast import STAGED, Exchange, IncomingUpdate, Outgoing
from aiote.connectors.buckets import Bucket, Joiner, Splitter

Tensors = dict[str, Any]


class Trainer:
    """A sender: an engine that serves updates, and memory for two buckets."""

    def __init__(self, engine: aiote.Engine, bucket_bytes: int) -> None:
        self.engine, self.exchange = engine, Exchange()
        self.staging = np.zeros(STAGED * bucket_bytes, np.uint8)
        self.region = engine.register(self.staging, "local")
        self.served = anyio.Event()

    async def serve(self) -> None:
        async with service.serve(self.engine, self.exchange):
            self.served.set()
            await anyio.sleep_forever()

    def announce(self, update: str, receivers: int, **part: Any) -> Outgoing:
        return Outgoing(self.engine, self.exchange, update, self.region, receivers, **part)

    async def send(self, outgoing: Outgoing, tensors: Tensors) -> None:
        """Send this sender's part."""
        async with AsyncExitStack() as stack:
            run = _Run(outgoing)
            group = await stack.enter_async_context(anyio.create_task_group())
            group.start_soon(run)
            splitter, number, pieces = Splitter(outgoing.bucket_bytes), -1, []

            async def put() -> None:
                if pieces:
                    await outgoing.put(Bucket(number, pieces[-1].offset + pieces[-1].length, list(pieces)))
                    pieces.clear()

            try:
                for name, tensor in tensors.items():
                    content = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
                    for at, piece in splitter.split(name, str(tensor.dtype), tensor.shape, tensor.nbytes):
                        if at % outgoing.senders != outgoing.index:
                            continue
                        if at != number:
                            await put()
                            await outgoing.room(at)
                            number = at
                        pieces.append(piece)
                        start = outgoing.place(at) + piece.offset
                        self.staging[start : start + piece.length] = content[piece.start : piece.start + piece.length]
                await put()
                await outgoing.finish(splitter.describe_end())
            except aiote.AioteError:
                pass
            await run.over.wait()
        if run.error is not None:
            raise run.error


class _Run:
    """`Outgoing.run`, with its error kept out of a task group's."""

    def __init__(self, outgoing: Outgoing) -> None:
        self.outgoing, self.over = outgoing, anyio.Event()
        self.error: aiote.AioteError | None = None

    async def __call__(self) -> None:
        try:
            await self.outgoing.run()
        except aiote.AioteError as error:
            self.error = error
        finally:
            self.over.set()


class Rollout:
    """A receiver: an engine, and memory for its slots."""

    def __init__(self, engine: aiote.Engine, slots: int, bucket_bytes: int) -> None:
        self.engine, self.bucket_bytes = engine, bucket_bytes
        self.memory = np.zeros(slots * bucket_bytes, np.uint8)
        self.region = engine.register(self.memory, "write")
        self.got: Tensors = {}

    async def receive(
        self, update: str, senders: Sequence[str], consume: Callable[[str], object] = lambda _: None
    ) -> Tensors:
        """Take an update; what has come is in `got`, also where that is not all. `consume` hears of each tensor."""
        self.got = {}
        incoming = IncomingUpdate(self.engine, update, senders, self.region, self.bucket_bytes)
        joiner = Joiner()
        try:
            while (bucket := await incoming.next()) is not None:
                start = incoming.place(bucket.number)
                for piece in bucket.pieces:
                    whole, copy = joiner.add(piece, self.memory[start : start + bucket.nbytes])
                    if copy is not None:
                        copy[0][:] = copy[1]
                    if whole is not None:
                        consume(piece.name)
                        self.got[piece.name] = whole.copy().view(piece.dtype).reshape(piece.shape)
        finally:
            await incoming.aclose()
        return self.got


def tensors_of(version: int, shapes: Sequence[tuple[int, ...]]) -> Tensors:
    """Return tensors whose every element says the version and where it is."""
    return {
        f"layer.{number}": (np.arange(np.prod(shape, dtype=int)) * 7 + version * 1000 + number)
        .astype(np.int32)
        .reshape(shape)
        for number, shape in enumerate(shapes)
    }


def assert_same(got: Tensors, wanted: Tensors) -> None:
    assert list(got) == list(wanted)
    for name, tensor in wanted.items():
        assert got[name].shape == tensor.shape
        assert np.array_equal(got[name], tensor), name
