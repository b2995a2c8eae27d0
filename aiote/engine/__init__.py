"""Own the public `Engine` object and the code that opens and closes it.

It hands every verb to `aiote.transfers` and `aiote.links`. It must not know providers, nor the services above it.
"""

from .engine import Engine
from .opening import Opening, open_engine

__all__ = ["Engine", "Opening", "open_engine"]
