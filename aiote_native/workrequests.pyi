from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from aiote_native.buffers import AcquiredBuffer
from aiote_native.cuda.events import EventPool
from aiote_native.provider import NativeDevice, NicRegistration
from aiote_native.stream_orders import Order

class Waitable:
    is_over: bool
    on_over: Callable[[Any], object] | None
    waiter: Any

class Unreached(NicRegistration): ...

class LocalMemory:
    def bind(self, holder: bytes) -> None: ...
    def rank(self, ranks: Sequence[int]) -> None: ...
    address: int
    length: int
    writable: bool
    access: int
    buffer: AcquiredBuffer
    registrations: tuple[NicRegistration, ...]
    in_flight: int
    on_idle: Callable[[], object] | None
    owner: object
    events: EventPool | None
    closing: bool
    def __init__(
        self,
        buffer: AcquiredBuffer,
        devices: Sequence[NativeDevice],
        access: int = 3,
        fd: int = -1,
        offset: int = 0,
        staged: bool = False,
        registrations: Sequence[NicRegistration | None] | None = None,
    ) -> None: ...
    @property
    def keys(self) -> tuple[tuple[int, int], ...]: ...
    def retire(self) -> bool: ...
    def close(self) -> None: ...

class RemoteMemory:
    link: Any
    lease: int
    lease_flight: Any
    rails: int
    length: int
    writable: bool
    readable: bool
    def __init__(
        self,
        length: int,
        writable: bool,
        keys: Iterable[tuple[int, int]],
        lease: int = 0,
        readable: bool = True,
    ) -> None: ...

class PageIndex:
    count: int
    def __init__(self, indices: object) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, key: int, /) -> int: ...
    def first_outside(self, page_bytes: int, stride: int, offset: int, length: int) -> int: ...

class Operation(Waitable):
    order: Order | None
    broken: str | None
    def __new__(cls, *args: object, **kwargs: object) -> Self: ...
    @property
    def errno(self) -> int: ...
    @property
    def provider_errno(self) -> int: ...
    @property
    def rail(self) -> int: ...
    def prefer(self, rail: int) -> None: ...
    @property
    def was_cancelled(self) -> bool: ...
    @property
    def confirmed_bytes(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...
