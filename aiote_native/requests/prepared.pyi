from collections.abc import Sequence
from typing import Any, TypeVar

from aiote_native.channels.peers import PeerLink
from aiote_native.engine.core import Core
from aiote_native.requests.operations import Flight, LocalMemory, Order, PageIndex, RemoteMemory
from aiote_native.requests.request import Request, TargetOps

_R = TypeVar("_R", bound=Request)

class Writes:
    def __init__(
        self,
        targets: int,
        lengths: object,
        local_offsets: object,
        remote_offsets: object,
        to: object,
        immediates: object,
    ) -> None: ...

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

class OfferedLayers:
    layers: list[int]
    tokens: int
    told: bool
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def open_layers(self, layers: Sequence[int], tokens: int, computed: bool = False) -> None: ...
    def computed(self, layer: int, tokens: int | None = None, *, stream: Any = None) -> None: ...
    def hear(self) -> None: ...
    def take_back(self) -> None: ...
    @property
    def complete(self) -> bool: ...
    @property
    def computed_to(self) -> dict[int, int]: ...

class PushedLayers:
    left: int
    def __init__(
        self,
        offered: OfferedLayers,
        layers: list[int],
        groups: list[list[int]],
        spans: list[range],
        units: list[int],
        tokens: int,
    ) -> None: ...
    def take(self) -> list[tuple[list[range], list[int], Any]]: ...

class LayerMoves(PreparedTargets):
    def __init__(self, core: Core, capacity: int, page_bytes: int = 0) -> None: ...
    def place(self, pattern: int, page_bytes: int) -> None: ...
    def end_layer(self, immediate: int) -> None: ...
    def run(
        self, layers: list[int], offsets: list[tuple[PageIndex, PageIndex] | None], imm: int, most: int
    ) -> LayerRun | None: ...

class LayerRun(TargetRun):
    layers: int
    pieces: int
    @property
    def owner(self) -> Any: ...
