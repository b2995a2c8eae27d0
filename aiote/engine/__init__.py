"""The engine that users hold, and how it is opened and closed."""

from .engine import Engine
from .opening import Opening, open_engine

__all__ = ["Engine", "Opening", "open_engine"]
