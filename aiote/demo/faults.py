"""What can go wrong in the demo apart from the engine's own errors, and a way to see through exception groups."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["DemoError", "leaves"]


class DemoError(Exception):
    """The demo cannot go on; the message is for the user and says what to do where something can be done."""


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions inside nested groups, in the order in which they were raised."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error
