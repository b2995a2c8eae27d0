"""Shared by the connectors: this process's role in a weight update, and the conversion between tensors and buckets.

Coroutines here run on the bridge. An asynchronous host passes them to `bridge.run`, a synchronous one to `bridge.call`.
The host's own code, which yields or loads tensors, stays in its own thread. This module never imports torch; it uses
the torch that the host has imported.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import anyio
import numpy as np

from .. import bridge as bridges
from .. import service
from ..aio import run_shielded
from ..errors import UsageError
from .bucket_broadcast import STAGED, BroadcastError, Exchange, IncomingUpdate, Outgoing
from .buckets import ALIGNMENT, Bucket, BucketPiece, Bytes, Joiner, Splitter

if TYPE_CHECKING:
    import torch

__all__ = ["HostCopy", "Party", "Receiving", "Sending", "Step", "party"]

LARGE = 1 << 20
"""From this many bytes on, asynchronous hosts copy in a thread: this size takes 50 us, a whole bucket takes 10 ms."""


class HostCopy:
    """A copy that the host has to make, by calling it in any thread."""

    def __init__(self, target: Bytes, source: Bytes) -> None:
        self._target, self._source = target, source
        self.large = target.nbytes >= LARGE

    def __call__(self) -> None:
        np.copyto(self._target, self._source)


Step: TypeAlias = Coroutine[Any, Any, None] | HostCopy
"""The next step for the host: a coroutine to run on the bridge, or a copy to make."""

_party: tuple[int, Party] | None = None
_lock = threading.Lock()


def party(**settings: Any) -> Party:
    """Return this process's `Party`; the first call makes it. settings are those of `bridge.acquire`.

    Raises UsageError if a later call gives other settings.
    """
    global _party
    with _lock:
        if _party is None or _party[0] != os.getpid() or _party[1].bridge.closed:
            _party = os.getpid(), Party(**settings)
        elif settings and settings != _party[1].settings:
            raise UsageError(
                f"this process's engine was opened with {_party[1].settings}, not with {settings}; give "
                "the same settings everywhere"
            )
        return _party[1]


class RegisteredMemory:
    """Memory and its registration."""

    def __init__(self, content: Bytes, registration: bridges.Registration) -> None:
        self.bytes, self.registration = content, registration


class Party:
    """A process's role in updates: the bridge, the service for receivers' requests, and memory for the next update."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.bridge = bridges.acquire(**settings)
        self.engine = self.bridge.engine
        self.address = str(self.engine.address)
        self.exchange = Exchange()
        self.registrations = 0
        self._free: dict[str, RegisteredMemory] = {}
        try:
            # It is served until the bridge is closed.
            self._served = self.bridge.hold(lambda: service.serve(self.engine, self.exchange))
        except BaseException:
            with suppress(UsageError):
                self.bridge.close()
            raise

    async def borrow(self, nbytes: int, access: Literal["local", "write"]) -> RegisteredMemory:
        """Return registered memory of this size; reuse the memory of an earlier update if it has this size."""
        memory = self._free.pop(access, None)
        if memory is not None:
            if len(memory.bytes) == nbytes:
                return memory
            await memory.registration.aclose()
        unaligned = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -unaligned.ctypes.data % ALIGNMENT
        content = unaligned[start : start + nbytes]
        self.registrations += 1
        return RegisteredMemory(content, await self.bridge.register_async(content, access))

    async def give_back(self, memory: RegisteredMemory, access: Literal["local", "write"]) -> None:
        """Keep unused memory for the next update, or close its registration if other memory is kept already."""
        if self._free.setdefault(access, memory) is not memory:
            await memory.registration.aclose()


class Sending:
    """One sender's part of an update. The host calls `add` for each tensor, then `end`, and `close` in any case."""

    def __init__(self, party: Party, memory: RegisteredMemory, outgoing: Outgoing) -> None:
        self._party, self._memory, self._outgoing = party, memory, outgoing
        self._splitter = Splitter(outgoing.bucket_bytes)
        self._number = -1
        self._pieces: list[BucketPiece] = []
        self._over = anyio.Event()
        self._closed = False
        self.in_use = False
        party.bridge.submit(self._run())

    @classmethod
    async def begin(cls, party: Party, update: str, bucket_bytes: int, receivers: int, **part: Any) -> Sending:
        """Announce an update; `part` are the other arguments of `Outgoing`."""
        memory = await party.borrow(STAGED * bucket_bytes, "local")
        region = memory.registration.region
        return cls(party, memory, Outgoing(party.engine, party.exchange, update, region, receivers, **part))

    async def _run(self) -> None:
        try:
            await self._outgoing.run()
        except BroadcastError:
            # Every step of the host raises this error.
            pass
        finally:
            self._over.set()

    def add(self, name: str, tensor: torch.Tensor) -> Iterator[Step]:
        """Yield the steps that send a tensor, in order; the host may change the tensor once it has done them.

        The calling thread copies a tensor from another device, in the order of the device's stream. Raises UsageError
        for a tensor that consists of more than its elements.
        """
        _check_plain(name, tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        content: Bytes | None = None
        for number, piece in self._splitter.split(name, dtype, tensor.shape, tensor.nbytes):
            if number % self._outgoing.senders != self._outgoing.index:
                continue
            if number != self._number:
                yield from self._put()
                yield self._outgoing.room(number)
                self._number = number
            self._pieces.append(piece)
            if content is None:
                content = bytes_of(tensor)
            start = self._outgoing.place(number) + piece.offset
            target = self._memory.bytes[start : start + piece.length]
            yield HostCopy(target, content[piece.start : piece.start + piece.length])

    def end(self) -> Iterator[Step]:
        """Yield the last steps, after which all receivers have all tensors."""
        yield from self._put()
        yield self._finish()

    def _put(self) -> Iterator[Step]:
        if self._pieces:
            last = self._pieces[-1]
            yield self._outgoing.put(Bucket(self._number, last.offset + last.length, self._pieces))
            self._pieces = []

    async def _finish(self) -> None:
        await self._outgoing.finish(self._splitter.describe_end())
        await self._over.wait()
        if self._outgoing.error is not None:
            raise BroadcastError(self._outgoing.error)

    async def fail(self, reason: str) -> None:
        """End the update for all ranks, if it has not ended: every further step raises BroadcastError."""
        self._outgoing.fail(f"sender {self._outgoing.index}: {reason}")

    async def close(self, reason: str) -> None:
        """End the update if it has not ended, wait for its writes, and give the memory back unless it is `in_use`.

        A host sets `in_use` while it may be copying into the memory; it then calls `close` itself. Idempotent.
        """
        await self.fail(reason)
        await run_shielded(self._over.wait)
        if not self._closed and not self.in_use:
            self._closed = True
            await self._party.give_back(self._memory, "local")


class Receiving:
    """A receiver's side of an update. The host calls `next`, `unpack` for each bucket, and `close` in any case."""

    def __init__(self, party: Party, memory: RegisteredMemory, incoming: IncomingUpdate) -> None:
        self._party, self._memory, self._incoming = party, memory, incoming
        self._joiner = Joiner()
        self._closed = False

    @classmethod
    async def begin(cls, party: Party, update: str, senders: Sequence[str], slots: int, bucket_bytes: int) -> Receiving:
        """Prepare to receive an update; the first `next` sends the requests to the senders."""
        memory = await party.borrow(slots * bucket_bytes, "write")
        return cls(
            party, memory, IncomingUpdate(party.engine, update, senders, memory.registration.region, bucket_bytes)
        )

    async def next(self) -> Bucket | None:
        """Wait for the next bucket; return None after the last. The host must no longer use the previous one's tensors.

        Raises BroadcastError.
        """
        bucket = await self._incoming.next()
        if bucket is None and self._joiner.unfinished_name:
            raise BroadcastError(f"the update ended in the middle of {self._joiner.unfinished_name}")
        return bucket

    def unpack(self, bucket: Bucket) -> Iterator[tuple[HostCopy | None, str, torch.Tensor | None]]:
        """Yield for each piece the copy to make first, if any, the tensor's name, and the tensor if this completes it.

        Raises BroadcastError for pieces that do not fit together.
        """
        start = self._incoming.place(bucket.number)
        content = self._memory.bytes[start : start + bucket.nbytes]
        for piece in bucket.pieces:
            try:
                whole, copy = self._joiner.add(piece, content)
            except ValueError as error:
                raise BroadcastError(str(error)) from error
            tensor = None if whole is None else tensor_of(piece, whole)
            yield None if copy is None else HostCopy(*copy), piece.name, tensor

    async def stop(self) -> None:
        """End the update, but keep its memory, as the host may still use a tensor; `next` raises BroadcastError."""
        await self._incoming.aclose()

    async def close(self, reason: str = "") -> None:
        """End the update, and give its memory back: the host uses no tensor of its buckets any more. Idempotent.

        reason: the failure of the host, if there is one; the senders are told of it.
        """
        await self._incoming.aclose(reason)
        if not self._closed:
            self._closed = True
            await self._party.give_back(self._memory, "write")


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    """Raise UsageError for a tensor with a scale, or other parts, that would not travel with its elements."""
    if getattr(tensor, "is_quantized", False):
        what = "is quantized, and its scale would not travel with its elements"
    elif hasattr(tensor, "__tensor_flatten__"):
        what = f"is a {type(tensor).__name__}, made of several tensors, of which one would travel"
    else:
        return
    raise UsageError(
        f"{name} {what}: send plain tensors, the elements and their scale by names of their own, or dequantize it"
    )


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return a tensor's bytes in order; copy them only if it is on another device or is not contiguous."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    content: Bytes = flat.view(sys.modules["torch"].uint8).numpy()
    return content


def tensor_of(piece: BucketPiece, content: Bytes) -> torch.Tensor:
    """Return these bytes as a tensor, without a copy. Raises BroadcastError for a dtype that this torch lacks."""
    module = sys.modules["torch"]
    dtype = getattr(module, piece.dtype, None)
    if not isinstance(dtype, module.dtype):
        raise BroadcastError(f"{piece.name} has dtype {piece.dtype}, which torch {module.__version__} does not have")
    tensor: torch.Tensor = module.from_numpy(content).view(dtype).view(piece.shape)
    return tensor
