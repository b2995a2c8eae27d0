from aiote_native.core import Core
from aiote_native.prepared import PreparedTargets, TargetRun

class FlagWord:
    def __init__(self, word: object) -> None: ...

class ArmedRun(TargetRun): ...

class Proxy:
    def __init__(self, core: Core) -> None: ...
    @property
    def looks(self) -> int: ...
    @property
    def armed(self) -> int: ...
    def close(self) -> None: ...

def arm(
    prepared: PreparedTargets,
    flag: object,
    value: int,
    lengths: object,
    local_offsets: object,
    remote_offsets: object,
    to: object,
    skips: bool,
    immediates: object = None,
) -> ArmedRun: ...
