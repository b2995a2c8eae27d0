"""The engine that users hold, and how it is opened and closed."""

from .engine import Engine
from .opening import open_engine

__all__ = ["Engine", "open_engine"]
