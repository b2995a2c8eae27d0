from aiote_native.engine.provider import NativeEndpoint
from aiote_native.verbs.nic import VerbsDevice

class PeerAddress:
    mtu: int
    reads: int
    ethernet: bool
    lid: int
    gid: bytes
    numbers: tuple[int, int]
    psns: tuple[int, int]
    def __init__(self, address: bytes) -> None: ...

class VerbsEndpoint(NativeEndpoint):
    numbers: tuple[int, int]
    psns: tuple[int, int]
    def __init__(self, device: VerbsDevice) -> None: ...
    def owns(self, queue: int) -> bool: ...
    def connect(self, address: bytes) -> None: ...
    def close(self) -> None: ...
