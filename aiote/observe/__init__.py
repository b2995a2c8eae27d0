"""Seeing what an engine does: events for listeners, free when nobody listens, and counts."""

from .events import Event, Events
from .statistics import EngineStatistics

__all__ = ["EngineStatistics", "Event", "Events"]
