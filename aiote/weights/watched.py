"""What a loader does with parameters while it is recorded, besides copying tensors to them.

The copies are not made, so an element that was copied has no value yet: whatever changes or reads it is refused. torch
hands over all that it does (`TorchDispatchMode`). NumPy does not: there parameters are read-only for that time.
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

__all__ = ["read_only", "watched"]

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
"""Operators that look at a tensor's shape and type alone."""


@contextmanager
def watched(log: CopyLog) -> Iterator[None]:
    """Refuse what is done with elements of parameters that were copied there, for the length of a `with`."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            _check_use(log, function, args, kwargs or {})
            return function(*args, **(kwargs or {}))

    with Watch():
        yield


def _check_use(log: CopyLog, function: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise RecordError where a call reads or changes elements of a parameter that were copied there before."""
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
    """Have NumPy refuse to change parameters: those are what only it sees."""
    several = {id(array): array for parameter in parameters.values() for array in _with_bases(parameter)}
    # What others are views of comes first: a view of an array that is read-only cannot be made writable again.
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
