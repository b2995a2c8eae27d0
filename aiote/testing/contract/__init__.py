"""The contract between two engines as checks that need no pytest. `aiote prove` runs them, and other programs can:

    async with aiote.open_engine() as left, aiote.open_engine() as right:
        async with joined(left, right) as pair:
            for check in CHECKS:
                print(check.name, await check.run(pair))

A check raises `Broken` if a promise is broken, and `NotHere` if it cannot be run on this pair. Checks that lose a
process or a rail need `child` or `pull` of `joined`. After a check that raised, open new engines.
"""

from .checks import CHECKS
from .far import Broken, FarSide, NotHere, child_command
from .memory import ArrayMemory, CupyMemory, HostMemory, TorchMemory, gpu_memory
from .pair import Check, EnginePair, RailPull, joined
from .pulling import pulled_by_engine, pulled_in_fabric

__all__ = [
    "CHECKS",
    "ArrayMemory",
    "Broken",
    "Check",
    "CupyMemory",
    "EnginePair",
    "FarSide",
    "HostMemory",
    "NotHere",
    "RailPull",
    "TorchMemory",
    "child_command",
    "gpu_memory",
    "joined",
    "pulled_by_engine",
    "pulled_in_fabric",
]
