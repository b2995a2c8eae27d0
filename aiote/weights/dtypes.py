"""Element types by the names that safetensors writes: "BF16", "F8_E4M3", "F32"."""

from __future__ import annotations

from typing import Any

from ..errors import UsageError

__all__ = ["ITEMSIZE", "LONG_NAMES", "dtype_name"]

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
"""What torch, numpy and ml_dtypes name a type; where there are two names, that with the number of bits."""


def dtype_name(dtype: Any) -> str:
    """Return safetensors' name of an element type, given as that, or as torch, numpy or ml_dtypes name it.

    Raises UsageError for what has no such name, packed types of less than a byte among them.
    """
    text = dtype.__name__ if isinstance(dtype, type) else str(dtype)
    text = text.removeprefix("torch.")
    name = text if text in ITEMSIZE else OTHER_NAMES.get(text)
    if name is None:
        raise UsageError(f'dtype is {dtype!r}, expected one of {", ".join(ITEMSIZE)}; give packed elements as "U8"')
    return name
