from aiote_native.core import Core
from aiote_native.peers import PeerLink
from aiote_native.requests import Request
from aiote_native.workrequests import LocalMemory, RemoteMemory

class TargetOps:
    count: int
    def __len__(self) -> int: ...
    def failures(self) -> list[tuple[int, int, int]]: ...
    def unfinished(self) -> list[int]: ...

class ScatterTargets(TargetOps):
    def __init__(self, capacity: int) -> None: ...
    def add(
        self,
        link: PeerLink,
        local: LocalMemory | None,
        local_offset: int,
        remote: RemoteMemory | None,
        remote_offset: int,
        length: int,
    ) -> None: ...
    def leave(self, request: object) -> None: ...

def scatter(core: Core, request: Request, targets: ScatterTargets, imm: int) -> None: ...
