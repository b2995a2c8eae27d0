"""Arrays with a mask, which lies beside their elements: they would travel without it, in silence."""

from __future__ import annotations

import sys

from ..errors import UsageError

__all__ = ["require_unmasked"]


def require_unmasked(what: str, array: object) -> None:
    """Raise UsageError for an array with a mask."""
    # Without the class there is no such array. Another thread may be importing the module.
    masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
    if masked is not None and isinstance(array, masked):
        raise UsageError(
            f"{what}: it has a mask, which lies beside its elements; give what array.filled(value) returns, or "
            "array.data"
        )
