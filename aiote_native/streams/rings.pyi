from aiote_native.streams.memory import StreamDevice, StreamEndpoint

SCHEME: bytes

class RingEndpoint(StreamEndpoint):
    def __init__(self, device: StreamDevice, ring_bytes: int = 524288) -> None: ...
