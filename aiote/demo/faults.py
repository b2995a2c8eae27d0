"""The demo's own error, and a function that looks through exception groups."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["DemoError", "leaves"]


class DemoError(Exception):
    """The demo cannot continue; the message is for the user and names a remedy if there is one."""


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions inside nested groups, in the order in which they were raised."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error
