"""A simulated network for tests: `Fabric`, and `run`, which runs a coroutine on it in virtual time.

See docs/testing.md. Nothing here needs libfabric or a NIC.
"""

from .fabric import Fabric, Happened
from .nics import CONNECTX7_400G, EFA_100G, EFA_200G, EFA_400G, MODELS, NULL_NIC, UNRULY, NicModel
from .virtual import StandstillError, VirtualLoop
from .virtual_run import run

__all__ = [
    "CONNECTX7_400G",
    "EFA_100G",
    "EFA_200G",
    "EFA_400G",
    "MODELS",
    "NULL_NIC",
    "UNRULY",
    "Fabric",
    "Happened",
    "NicModel",
    "StandstillError",
    "VirtualLoop",
    "run",
]
