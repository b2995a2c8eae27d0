"""A simulated network for tests: `Fabric`, and `run`, which runs a coroutine on it in virtual time.

`contract` has the checks that every kind of rail must pass. See docs/testing.md. It must not need libfabric or a NIC,
nor know the services.
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
