"""Own the public `Engine` object and the code that opens and closes it."""

from .engine import Engine
from .opening import Opening, open_engine

__all__ = ["Engine", "Opening", "open_engine"]
