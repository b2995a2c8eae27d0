"""The memory of torch's transports: registered tensors, ranges of their bytes, and descriptors for peers.

This module does not import torch.
"""

from __future__ import annotations

import math
import operator
import threading
import weakref
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec
import numpy as np

from ..core.descriptor import RegionDescriptor
from .views import bytes_at

if TYPE_CHECKING:
    import torch

    from .. import bridge as bridges
    from .torch import AioteTransport

__all__ = [
    "AioteMemory",
    "AioteMemoryView",
    "AioteMutableMemoryView",
    "AioteRemoteBuffer",
    "TensorRegistration",
    "TransportEndpoint",
    "Use",
    "check_seconds",
    "registered_here",
]

registered_here: weakref.WeakValueDictionary[tuple[str, bytes], TensorRegistration] = weakref.WeakValueDictionary()
"""This process's registrations by transport and descriptor, for peers in the same process. They are held weakly, so a
transport that is dropped takes its registrations with it."""


def check_seconds(timeout: float | None) -> None:
    """Raise ValueError for an invalid timeout: a negative one, an infinite one, or NaN."""
    if timeout is not None and not (0 <= timeout < math.inf):
        raise ValueError("timeout must be finite and nonnegative")


class Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The base of the messages that peers exchange: JSON with a tag for each kind, bytes in base64."""

    version: Literal[1] = 1

    def serialize(self) -> bytes:
        """Return the bytes that `deserialize` reads."""
        return msgspec.json.encode(self)

    @classmethod
    def deserialize(cls, data: bytes) -> Self:
        """Return the serialized object. Raises TypeError if `data` is not bytes, ValueError for malformed bytes."""
        if type(data) is not bytes:
            raise TypeError("a serialized descriptor is bytes")
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise ValueError(f"malformed descriptor: {error}") from error


class TransportEndpoint(Wire, frozen=True, tag="aiote-endpoint"):
    """The location of a transport: its engine's address, and the transport's name within that engine."""

    endpoint: str
    address: str


class AioteRemoteBuffer(Wire, frozen=True, tag="aiote-memory"):
    """The data that a peer needs to access registered memory: an engine's descriptor, and the name of its transport."""

    endpoint: str
    descriptor: bytes

    def __post_init__(self) -> None:
        RegionDescriptor.from_bytes(self.descriptor)


class TensorRegistration:
    """A tensor's registration with a transport. All callers that register that tensor share it."""

    def __init__(self, tensor: torch.Tensor, held: bridges.Registration, endpoint: str) -> None:
        self.tensor, self.held, self.active = tensor, held, True
        self.address, self.length = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        self.key = self.address, self.length
        self.bytes = bytes_at(tensor)
        self._name = endpoint, held.descriptor
        self._copying = threading.Lock()
        registered_here[self._name] = self

    @property
    def in_place(self) -> bool:
        """Whether the tensor still has the address and the length that it was registered with."""
        return (self.tensor.data_ptr(), self.tensor.numel() * self.tensor.element_size()) == self.key

    def require_active(self) -> None:
        """Raise RuntimeError if the memory is unregistered, or is no longer the tensor's."""
        if not self.active:
            raise RuntimeError("memory has been unregistered")
        if not self.in_place:
            raise RuntimeError("registered tensor was resized or its storage was replaced")

    def exchange(self, local: np.ndarray[Any, np.dtype[np.uint8]], *, read: bool) -> None:
        """Copy this memory's first bytes to `local` (with `read`), or from it.

        A transport of the same process calls it in a thread. `end` waits for the copy. Raises as `require_active`.
        """
        with self._copying:
            self.require_active()
            ends = local, self.bytes[: local.size]
            np.copyto(*(ends if read else reversed(ends)))

    def end(self) -> None:
        """Hide the registration from peers in this process; return when none of them copies from or to it."""
        registered_here.pop(self._name, None)
        with self._copying:
            self.active = False


class Use:
    """A thread's use of registered memory while the thread waits for its own transfer.

    The thread holds `under_way` in a `with`, which releases the lock wherever an interruption comes.
    """

    def __init__(self) -> None:
        self.under_way = threading.Lock()

    def done(self) -> bool:
        """Return whether the use has ended, or has not begun."""
        return not self.under_way.locked()

    def wait_within(self, timeout: float | None) -> bool:
        """Wait until the use has ended; return False if it has not within `timeout` seconds (None: without limit)."""
        ended = self.under_way.acquire(timeout=-1 if timeout is None else timeout)
        if ended:
            self.under_way.release()
        return ended


class AioteMemoryView:
    """A range of bytes of registered memory."""

    def __init__(self, memory: AioteMemory, offset: int, length: int) -> None:
        self.memory, self.range = memory, slice(offset, offset + length)

    def size(self) -> int:
        """Return the length in bytes."""
        return self.range.stop - self.range.start


class AioteMutableMemoryView(AioteMemoryView):
    """A range of bytes of registered memory that a transfer may write into."""

    writable: Literal[True] = True


class AioteMemory:
    """A tensor that is registered with a transport; made by `AioteTransport.register_memory`."""

    def __init__(self, transport: AioteTransport, registration: TensorRegistration) -> None:
        self.transport, self.registration = transport, registration

    def _range(self, offset: int | None, length: int | None) -> tuple[int, int]:
        self.registration.require_active()
        whole = self.registration.length
        start = 0 if offset is None else operator.index(offset)
        if not 0 <= start <= whole:
            raise ValueError("offset is outside the registered memory")
        count = whole - start if length is None else operator.index(length)
        if not 0 <= count <= whole - start:
            raise ValueError("view exceeds the registered memory")
        return start, count

    def to_view(self, offset: int | None = None, length: int | None = None) -> AioteMemoryView:
        """Return a range of bytes as the source of writes. Raises ValueError for a range outside of the memory."""
        return AioteMemoryView(self, *self._range(offset, length))

    def to_mutable_view(self, offset: int | None = None, length: int | None = None) -> AioteMutableMemoryView:
        """Return a range of bytes as the target of reads. Raises ValueError for a range outside of the memory."""
        return AioteMutableMemoryView(self, *self._range(offset, length))

    def to_remote_buffer(self, *, timeout: float | None = None) -> AioteRemoteBuffer:
        """Return the data that the peer needs to access the memory; transfers begin at its first byte."""
        check_seconds(timeout)
        self.registration.require_active()
        return AioteRemoteBuffer(self.transport.endpoint, self.registration.held.descriptor)
