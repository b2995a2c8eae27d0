"""Links: how peers are found, connected, watched and lost, and what each may use of the other's memory.

`ConnectionTable` is the door. Nothing here knows the engine: what is shared comes from the `Runtime`.
"""

from .nic_events import NicEvents
from .peer_table import ConnectionTable

__all__ = ["ConnectionTable", "NicEvents"]
