"""Who reads an engine's messages: one at a time, for each takes them all."""

from __future__ import annotations

import weakref

import aiote

__all__ = ["claim", "release"]

_readers: weakref.WeakKeyDictionary[aiote.Engine, weakref.ref[object]] = weakref.WeakKeyDictionary()


def claim(engine: aiote.Engine, reader: object) -> None:
    """Become the one reader of an engine's messages. Raises UsageError while there is another."""
    found = _readers.get(engine)
    other = found() if found is not None else None
    if other is not None and other is not reader:
        raise aiote.UsageError(
            f"the engine's messages are read by a {type(other).__name__} already; give what is new an engine of its own"
        )
    _readers[engine] = weakref.ref(reader)


def release(engine: aiote.Engine, reader: object) -> None:
    """Read no more, so that another may."""
    found = _readers.get(engine)
    if found is not None and found() is reader:
        del _readers[engine]
