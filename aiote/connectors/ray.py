"""Ray's `TensorTransportManager`: tensors on the CPU go from actor to actor over aiote, not through the object store.

A program calls `register()` before the actors' classes, then uses `@ray.method(tensor_transport="AIOTE")`; see
docs/connectors.md. The source registers the tensors of an object, and Ray carries their descriptors; the receiver reads
the tensors. A process opens its engine when it first sends or receives tensors. A fetch is one call on the bridge;
aborting or dropping the fetch cancels that call. Tensors are received into memory that the bridge lends: it comes back,
still mapped and registered, when no tensor, view or array uses it any more.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import torch
from ray.exceptions import RayDirectTransportError
from ray.experimental import register_tensor_transport
from ray.experimental.rdt.tensor_transport_manager import (
    CommunicatorMetadata,
    FetchRequest,
    TensorTransportManager,
    TensorTransportMetadata,
)
from ray.experimental.rdt.util import transport_manager_info

from .. import bridge as bridges
from ..bridge.receive_memory import MIN_BYTES, ReceiveBlock, ReceiveMemory
from .views import bytes_at

__all__ = ["NAME", "AioteFetch", "AioteTensorTransport", "AioteTransportMetadata", "register"]

NAME = "AIOTE"
MAX_ABORTED = 1024
"""How many aborted objects are remembered, so that a fetch that begins later fails. Older ones will not be fetched."""
Target = tuple[torch.Tensor, ReceiveBlock | None]
"""A tensor to read into, and the block of receive memory that it lies in."""
AT_ONCE = 16
"""How many tensors of an object are read at a time: enough to hide the round trip, yet a small part of the queue."""


def register() -> None:
    """Register the transport with Ray, before the classes of actors whose methods name it. Idempotent."""
    if NAME not in transport_manager_info:
        register_tensor_transport(NAME, ["cpu"], AioteTensorTransport, torch.Tensor)


@dataclass(eq=False)
class AioteTransportMetadata(TensorTransportMetadata):  # type: ignore[misc]
    """The metadata that an object's owner passes on: a descriptor for each tensor, an empty one for an empty tensor."""

    descriptors: list[bytes] = field(default_factory=list)


class AioteFetch(FetchRequest):  # type: ignore[misc]
    """A fetch in progress; dropping the request cancels it."""

    def __init__(self, obj_id: str, tensors: list[torch.Tensor], call: bridges.Call[None]) -> None:
        super().__init__(obj_id=obj_id, tensors=tensors)
        self.call = call

    def __del__(self) -> None:
        # The call keeps the tensors until it has drained. A request whose construction was interrupted has no call.
        if (call := vars(self).get("call")) is not None:
            call.cancel()


class AioteTensorTransport(TensorTransportManager):  # type: ignore[misc]
    """The transport of a process. Ray makes one in each process, and calls it from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bridge: bridges.Bridge | None = None
        self._memory: ReceiveMemory | None = None
        self._sources: dict[str, tuple[AioteTransportMetadata, list[bridges.Registration]]] = {}
        self._calls: dict[bridges.Call[None], str] = {}
        self._aborted: OrderedDict[str, None] = OrderedDict()

    @property
    def bridge(self) -> bridges.Bridge:
        """This process's bridge; the first access opens it, with the settings `AIOTE_*` of the environment."""
        with self._lock:
            return self._opened_bridge()

    @property
    def memory(self) -> ReceiveMemory:
        """The memory to receive into, of this process's bridge; `kept_receive_bytes` bounds its unused part."""
        with self._lock:
            bridge = self._opened_bridge()
            if self._memory is None or self._memory.bridge is not bridge:
                self._memory = ReceiveMemory(bridge, bridge.engine.config.kept_receive_bytes)
            return self._memory

    def _opened_bridge(self) -> bridges.Bridge:
        if self._bridge is None or self._bridge.closed:
            self._bridge = bridges.acquire()
        return self._bridge

    @property
    def registrations(self) -> int:
        """How many tensors are registered for other processes to read."""
        return sum(len(held) for _, held in tuple(self._sources.values()))

    # Properties of the transport, for Ray.

    def tensor_transport_backend(self) -> str:
        """Return the transport's name."""
        return NAME

    @staticmethod
    def is_one_sided() -> bool:
        """Return True: receivers read, and sources do nothing."""
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        """Return True: a fetch can be aborted, so Ray need not kill an actor to end it."""
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """Return True for every actor. If one lacks the transport, its first tensors fail with the reason."""
        return True

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> Any:
        """Return empty metadata, because descriptors contain the location of their tensors."""
        return CommunicatorMetadata()

    # The source.

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[torch.Tensor]) -> AioteTransportMetadata:
        """Register an object's tensors until `garbage_collect`; return their descriptors.

        Raises ValueError for a tensor that is not on the CPU, or not contiguous.
        """
        with self._lock:
            if obj_id in self._sources:
                # The task ran again because its answer was lost.
                return self._sources[obj_id][0]
        for number, tensor in enumerate(rdt_object):
            if tensor.device.type != "cpu":
                raise ValueError(
                    f"{NAME} takes tensors on the CPU; tensor {number} is on {tensor.device}: return .cpu()"
                )
            if not tensor.is_contiguous():
                raise ValueError(
                    f"{NAME} takes contiguous tensors; tensor {number}, of shape {tuple(tensor.shape)}, has strides "
                    f"{tuple(tensor.stride())}: return .contiguous()"
                )
        held: list[bridges.Registration] = []
        descriptors = []
        try:
            for tensor in rdt_object:
                descriptors.append(b"")
                if tensor.numel():
                    held.append(self.bridge.register(tensor, "read"))
                    descriptors[-1] = held[-1].descriptor
            meta = [(tensor.shape, tensor.dtype) for tensor in rdt_object]
            metadata = AioteTransportMetadata(meta, "cpu" if rdt_object else None, descriptors)
            with self._lock:
                self._sources[obj_id] = metadata, held
        except BaseException:
            with self._lock:
                # Do not remove the registrations of another thread.
                if obj_id in self._sources and self._sources[obj_id][1] is held:
                    del self._sources[obj_id]
            for registration in held:
                registration.close()
            raise
        return metadata

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: list[torch.Tensor]) -> None:
        """End the registrations of an object that has no more references."""
        with self._lock:
            _, held = self._sources.get(obj_id, (None, []))
        for registration in held:
            registration.close()
        # Not before the registrations are closed, because Ray calls this again after an interruption.
        with self._lock:
            self._sources.pop(obj_id, None)

    def send_multiple_tensors(self, tensors: Any, tensor_transport_metadata: Any, communicator_metadata: Any) -> None:
        """Raise NotImplementedError: Ray does not call this on a one-sided transport."""
        raise NotImplementedError(f"{NAME} is one-sided: receivers read, so send is not supported")

    # The receiver.

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: AioteTransportMetadata,
        communicator_metadata: Any,
        target_buffers: list[torch.Tensor] | None = None,
    ) -> AioteFetch:
        """Begin to read an object's tensors, into `target_buffers` if given, and return at once.

        Raises ValueError for buffers that are not on the CPU, RayDirectTransportError if the fetch was aborted already.
        """
        fetch = self._prepare(obj_id, tensor_transport_metadata, target_buffers)
        self._begin(fetch)
        return fetch

    def _prepare(
        self, obj_id: str, metadata: AioteTransportMetadata, target_buffers: list[torch.Tensor] | None
    ) -> AioteFetch:
        """Return a fetch that has not begun."""
        memory = self.memory
        bridge = memory.bridge
        if target_buffers is None:
            targets = [borrow(memory, shape, dtype) for shape, dtype in metadata.tensor_meta]
        elif any(tensor.device.type != "cpu" for tensor in target_buffers):
            raise ValueError(f"{NAME} fetches into tensors on the CPU only")
        else:
            targets = [(tensor, None) for tensor in target_buffers]
        call = bridge.prepare(self._read(bridge, targets, metadata.descriptors, again=target_buffers is not None))
        call.add_done_callback(lambda _: self._calls.pop(call, None))
        tensors = [tensor for tensor, _ in targets] if target_buffers is None else target_buffers
        return AioteFetch(obj_id, tensors, call)

    def _begin(self, fetch: AioteFetch) -> None:
        with self._lock:
            if fetch.obj_id in self._aborted:
                del self._aborted[fetch.obj_id]
                raise RayDirectTransportError(f"the fetch of {fetch.obj_id} was aborted before it began")
            self._calls[fetch.call] = fetch.obj_id
        fetch.call.start()

    async def _read(self, bridge: bridges.Bridge, targets: list[Target], descriptors: list[bytes], again: bool) -> None:
        room = anyio.CapacityLimiter(AT_ONCE)

        async def read(target: Target, descriptor: bytes) -> None:
            async with room:
                await self._read_one(bridge, target, descriptor, again)

        reads = [pair for pair in zip(targets, descriptors, strict=True) if pair[1]]
        if len(reads) == 1:
            await self._read_one(bridge, *reads[0], again)
            return
        try:
            async with anyio.create_task_group() as tasks:
                for pair in reads:
                    tasks.start_soon(read, *pair)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _read_one(self, bridge: bridges.Bridge, target: Target, descriptor: bytes, again: bool) -> None:
        (tensor, block), source = target, bridge.engine.attach(descriptor)
        if block is not None:
            await bridge.engine.read(source, await block.region(bridge, tensor.nbytes))
        elif again:
            # The caller's buffers stay registered, because they are used again.
            async with await bridge.register_async(tensor, "local") as held:
                await bridge.engine.read(source, held.region)
        else:
            async with await bridge.engine.register_async(bytes_at(tensor), "local") as region:
                await bridge.engine.read(source, region)

    def wait_fetch_complete(self, fetch_request: AioteFetch, timeout: float = -1) -> list[torch.Tensor]:
        """Wait for a fetch and return its tensors. Raises TimeoutError, and RayDirectTransportError if it failed.

        timeout: seconds; a negative one sets no limit. After TimeoutError the fetch goes on until its request is
        dropped. An interruption of the wait (Ctrl-C) cancels the fetch, and is raised once that has ended. Raises
        UsageError on the bridge's own thread.
        """
        return self._wait(fetch_request, timeout)

    def _wait(
        self, fetch_request: AioteFetch, timeout: float, begin: Callable[[], object] | None = None
    ) -> list[torch.Tensor]:
        if not fetch_request.call.wait_ended(None if timeout < 0 else timeout, begin):
            raise TimeoutError(f"{fetch_request.obj_id} was not fetched within {timeout} s")
        try:
            fetch_request.call.result()
        except futures.CancelledError:
            raise RayDirectTransportError(f"the fetch of {fetch_request.obj_id} was aborted") from None
        except Exception as error:
            raise RayDirectTransportError(
                f"the fetch of {fetch_request.obj_id} failed; its source may have died: {error!r}"
            ) from error
        tensors: list[torch.Tensor] = fetch_request.tensors
        return tensors

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: AioteTransportMetadata,
        communicator_metadata: Any,
        target_buffers: list[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Fetch an object's tensors and wait for them. Raises as `fetch_multiple_tensors` and `wait_fetch_complete`."""
        fetch = self._prepare(obj_id, tensor_transport_metadata, target_buffers)
        return self._wait(fetch, -1, partial(self._begin, fetch))

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        """Cancel the fetches of an object in this process; if there is none, make the next one fail."""
        with self._lock:
            calls = [call for call, fetched in tuple(self._calls.items()) if fetched == obj_id and not call.done()]
            if not calls:
                self._aborted[obj_id] = None
                if len(self._aborted) > MAX_ABORTED:
                    self._aborted.popitem(last=False)
        for call in calls:
            call.cancel()


def borrow(memory: ReceiveMemory, shape: Any, dtype: torch.dtype) -> Target:
    """Return a new tensor, and the block that it lies in if it is large enough for one."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < MIN_BYTES:
        return torch.empty(shape, dtype=dtype), None
    lent, block = memory.borrow(nbytes)
    # The tensor's storage holds the array, whose end gives the block back.
    return torch.from_numpy(lent).view(dtype).reshape(shape), block
