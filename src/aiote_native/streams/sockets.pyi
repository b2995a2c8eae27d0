from aiote_native.kinds import NativeEndpoint
from aiote_native.streams.memory import StreamDevice

SCHEME: bytes

def parse(address: bytes) -> tuple[str, int, bytes]: ...

class SocketEndpoint(NativeEndpoint):
    def __init__(self, device: StreamDevice, host: str) -> None: ...
