from typing import Any, TypeVar

from aiote_native.core import Core
from aiote_native.flights import Flight
from aiote_native.peers import PeerLink
from aiote_native.requests import Request
from aiote_native.scatter import TargetOps
from aiote_native.stream_orders import Order
from aiote_native.workrequests import LocalMemory, RemoteMemory

_R = TypeVar("_R", bound=Request)

class Integers:
    def __init__(self, name: str, values: object) -> None: ...

class PreparedTargets:
    core: Core
    count: int
    page_bytes: int
    peers: Any
    def __init__(self, core: Core, capacity: int, page_bytes: int = 0) -> None: ...
    def add(
        self,
        link: PeerLink,
        local: LocalMemory | None,
        local_start: int,
        local_bytes: int,
        remote: RemoteMemory | None,
        remote_start: int,
        remote_bytes: int,
        local_stride: int = 0,
        remote_stride: int = 0,
        flight: Flight | None = None,
    ) -> None: ...
    def scatter(
        self,
        lengths: object,
        local_offsets: object,
        remote_offsets: object,
        to: object,
        immediates: object = None,
    ) -> TargetRun: ...
    def write_pages(self, local_pages: object, remote_pages: object, counts: object) -> TargetRun: ...

class TargetRun(TargetOps):
    prepared: PreparedTargets
    def rows(self) -> list[int]: ...
    def leave(self, request: object) -> None: ...
    def start(
        self, kind: type[_R], owner: object, imm: int, admitted: bool = False, order: Order | None = None
    ) -> _R | None: ...
