from aiote_native.kinds import NativeEndpoint
from aiote_native.streams.memory import StreamDevice

SCHEME: bytes
DIRECTORY: bytes

class RingEndpoint(NativeEndpoint):
    def __init__(self, device: StreamDevice, mark: str) -> None: ...
