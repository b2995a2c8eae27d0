"""Links: how peers are found, connected, watched and lost, and what each may use of the other's memory.

Other packages enter through `ConnectionTable`. It must not know the engine: the `Runtime` has the shared objects.
"""

from .nic_events import NicEvents
from .peer_table import ConnectionTable

__all__ = ["ConnectionTable", "NicEvents"]
