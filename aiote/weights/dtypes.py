"""Element types, named as in safetensors files: "BF16", "F8_E4M3", "F32"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import UsageError

__all__ = ["ITEMSIZE", "LONG_NAMES", "ML_DTYPES", "NUMPY", "dtype_name", "dtype_of", "single_cast"]

ITEMSIZE = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
"""Bytes of one element, by name."""

OTHER_NAMES = {
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "bfloat16": "BF16",
    "half": "F16",
    "float": "F32",
    "double": "F64",
}
OTHER_NAMES |= {
    f"{kind}{8 * size}": f"{kind[0].upper()}{8 * size}" for kind in ("int", "uint") for size in (1, 2, 4, 8)
}
OTHER_NAMES |= {f"float{8 * size}": f"F{8 * size}" for size in (2, 4, 8)}
LONG_NAMES = {name: long for long, name in OTHER_NAMES.items()}
"""The name of each type in torch, numpy and ml_dtypes; of two names, the name that contains the number of bits."""

NUMPY = {
    "BOOL": "bool",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    **{f"{kind}{bits}": f"{name}{bits}" for kind, name in (("U", "uint"), ("I", "int")) for bits in (8, 16, 32, 64)},
}
ML_DTYPES = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}

# For each type, the types that can represent all of its values.
EMBEDDED = {
    "BOOL": "U8 I8 U16 I16 U32 I32 U64 I64 F16 BF16 F32 F64",
    "U8": "U16 I16 U32 I32 U64 I64 F16 BF16 F32 F64",
    "I8": "I16 I32 I64 F16 BF16 F32 F64",
    "U16": "U32 I32 U64 I64 F32 F64",
    "I16": "I32 I64 F32 F64",
    "U32": "U64 I64 F64",
    "I32": "I64 F64",
    "F8_E4M3": "F16 BF16 F32 F64",
    "F8_E5M2": "F16 BF16 F32 F64",
    "F8_E8M0": "BF16 F32 F64",
    "F16": "F32 F64",
    "BF16": "F32 F64",
    "F32": "F64",
}


def dtype_name(dtype: Any) -> str:
    """Return safetensors' name of an element type, given by that name, or as in torch, numpy or ml_dtypes.

    Raises UsageError for a type without such a name, for example a packed type of less than a byte.
    """
    text = dtype.__name__ if isinstance(dtype, type) else str(dtype)
    text = text.removeprefix("torch.")
    name = text if text in ITEMSIZE else OTHER_NAMES.get(text)
    if name is None:
        raise UsageError(f'dtype is {dtype!r}, expected one of {", ".join(ITEMSIZE)}; give packed elements as "U8"')
    return name


def dtype_of(name: str) -> np.dtype[Any]:
    """Return numpy's type for a name. Raises UsageError if the type needs the package `ml_dtypes` and it is missing."""
    if name in NUMPY:
        return np.dtype(NUMPY[name])
    try:
        import ml_dtypes
    except ImportError:
        raise UsageError(
            f"elements of type {name} are converted with the package ml_dtypes: pip install 'aiote[weights]'"
        ) from None
    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, ML_DTYPES[name]))
    return found


def single_cast(casts: Sequence[str]) -> tuple[str, ...]:
    """Return a chain of conversions without the steps that do not change the result.

    A step can be left out if its type has all values of the type before it. The conversion from a floating-point type
    to an integer type remains a step of its own, because libraries convert numbers that are too large differently.
    """
    kept: list[str] = []
    for dtype in casts:
        while len(kept) > 1 and _is_idle(kept[-2], kept[-1], dtype):
            kept.pop()
        if kept[-1:] != [dtype]:
            kept.append(dtype)
    return tuple(kept)


def _is_idle(first: str, between: str, last: str) -> bool:
    """Return whether converting from `first` to `last` gives the same result with the type `between` as without it."""
    if between not in EMBEDDED.get(first, "").split():
        return False
    if last in (first, "BOOL"):
        return True
    # Libraries convert integers to short floating-point types by way of F32, which rounds large integers a second time.
    rounded_twice = first in ("U32", "I32") and last not in ("F32", "F64")
    return (between[0] in "UI") == (last[0] in "UI") and (between[0] in "UI" or not rounded_twice)
