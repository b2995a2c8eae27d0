"""Show what an engine does: events for listeners and for `logging`, counts, latencies, and a page for `aiote top`.

It must not know the parts that it observes. `prometheus` and `tracing` are not imported here, because they need
libraries of their own.
"""

from .calls import CallTimes
from .events import Event, Events
from .latency import Histogram, Latencies, WaitTimes
from .statistics import EngineStatistics
from .status_page import StatusPage

__all__ = ["CallTimes", "EngineStatistics", "Event", "Events", "Histogram", "Latencies", "StatusPage", "WaitTimes"]
