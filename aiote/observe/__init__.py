"""Seeing what an engine does: events for listeners and for `logging`, counts, latencies, and a page for `aiote top`.

`prometheus` and `tracing` need their own libraries, so nothing here imports them.
"""

from .events import Event, Events
from .latency import Histogram, Latencies
from .statistics import EngineStatistics
from .status_page import StatusPage

__all__ = ["EngineStatistics", "Event", "Events", "Histogram", "Latencies", "StatusPage"]
