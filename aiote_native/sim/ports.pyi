from struct import Struct

from aiote_native.provider import NativeEndpoint
from aiote_native.sim.nics import SimDevice

ADDRESS: Struct
MARK: bytes

class SimEndpoint(NativeEndpoint):
    def __init__(self, device: SimDevice) -> None: ...
