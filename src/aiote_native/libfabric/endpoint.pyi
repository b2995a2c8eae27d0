from aiote_native.libfabric.device import Device

class Endpoint:
    wait_fd: int
    address: bytes
    largest: int
    depth: int
    def __init__(self, device: Device, waits: bool = True, queue: int = 4096) -> None: ...
    def connect(self, address: bytes) -> None: ...
    def close(self) -> None: ...
