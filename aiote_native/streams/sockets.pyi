from aiote_native.streams.memory import StreamDevice, StreamEndpoint

SCHEME: bytes

def parse(address: bytes) -> tuple[str, int, bytes]: ...

class SocketEndpoint(StreamEndpoint):
    def __init__(self, device: StreamDevice, host: str) -> None: ...
