"""Refuse arrays with a mask: the mask lies beside the elements, so the elements would travel without it, unnoticed."""

from __future__ import annotations

import sys

from ..errors import UsageError

__all__ = ["require_unmasked"]


def require_unmasked(what: str, array: object) -> None:
    """Raise UsageError for an array with a mask."""
    # If numpy.ma is not imported, or another thread is just importing it, there is no masked array yet.
    masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
    if masked is not None and isinstance(array, masked):
        raise UsageError(
            f"{what}: it has a mask, which lies outside its elements; use array.filled(value), or array.data"
        )
