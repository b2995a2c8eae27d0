"""Arrays with a mask, which lies beside their elements: they would travel without it, in silence."""

from __future__ import annotations

import sys

from ..errors import UsageError

__all__ = ["require_unmasked"]


def require_unmasked(what: str, array: object) -> None:
    """Raise UsageError for an array with a mask."""
    masked = sys.modules.get("numpy.ma")  # what is not imported has made no array
    if masked is not None and isinstance(array, masked.MaskedArray):
        raise UsageError(
            f"{what}: it has a mask, which lies beside its elements; give what array.filled(value) returns, or "
            "array.data"
        )
