"""Watch parameters while a loader is recorded, and refuse uses of elements that the loader has copied to them.

Recorded copies are not carried out, so a copied element has no value yet; calls that change or read it are refused.
torch passes on all of its operations (`TorchDispatchMode`). NumPy does not, so NumPy parameters are read-only while the
loader runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from .copy_log import CopyLog
from .traced import RecordError, flat
from .traced_torch import is_traced

__all__ = ["read_only", "refuse_later_changes"]

LIKE = {
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
}
"""Operators that use only a tensor's shape and type."""


@contextmanager
def refuse_later_changes(log: CopyLog) -> Iterator[None]:
    """Until the end of a `with`, refuse torch operations on elements of parameters that the loader has copied there."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class CopyGuard(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            _check_use(log, function, args, kwargs or {})
            return function(*args, **(kwargs or {}))

    with CopyGuard():
        yield


def _check_use(log: CopyLog, function: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise RecordError if a call reads or changes elements of a parameter that the loader has copied there."""
    torch: Any = sys.modules["torch"]
    aliases = [one.alias_info for one in function._schema.arguments]
    if function._schema.name.split("::")[-1] in LIKE:
        return
    if any(one is not None for one in aliases) and not any(one is not None and one.is_write for one in aliases):
        return  # a view
    for one in flat(*args, kwargs):
        if not isinstance(one, torch.Tensor) or is_traced(one):
            continue
        if (name := log.loaded_in(one)) is not None:
            raise log.refused(
                RecordError(
                    f"{name}: the loader calls {function} on what it has copied there before; a recorded loader copies "
                    "each element once, and does nothing else with it"
                )
            )


@contextmanager
def read_only(parameters: Mapping[str, Any]) -> Iterator[None]:
    """Until the end of a `with`, make NumPy parameters read-only, because only NumPy sees changes of their elements."""
    several = {id(array): array for parameter in parameters.values() for array in _with_bases(parameter)}
    # An array comes before its views, because a view of a read-only array cannot be made writable again.
    changed = sorted(several.values(), key=lambda array: len(list(_with_bases(array))))
    changed = [array for array in changed if array.flags.writeable]
    for array in changed:
        array.flags.writeable = False
    try:
        yield
    finally:
        for array in changed:
            array.flags.writeable = True


def _with_bases(array: Any) -> Iterator[Any]:
    while isinstance(array, np.ndarray):
        yield array
        array = array.base
