"""What an update brings that was recorded from a loader, and what the loader itself makes of the same values."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiote.weights import Layout, Recording, Replicate, Shard, convert, plan_update, record
from aiote.weights.dtypes import dtype_name, dtype_of
from support.weights import plans as weight_plans

Values = Mapping[str, Any]
Loader = Callable[[Any, Any], object]
"""It takes pairs of a name and a tensor, and the parameters."""


def converted(staged: weight_plans.Array, dtype: str, to: str) -> weight_plans.Array:
    """Convert elements as an update does; all types here have their values in 64 bits."""
    if dtype == to:
        return staged
    values = np.ascontiguousarray(staged).astype(dtype_of(dtype)).reshape(-1)
    made = np.empty(values.size * dtype_of(to).itemsize, np.uint8)
    convert.cast(values.view(np.uint8), dtype, made, to)
    return made.view(dtype_of(to)).astype(np.float64).reshape(staged.shape)


def as_numbers(array: Any) -> NDArray[np.float64]:
    """Return a numpy array or a torch tensor as 64-bit numbers."""
    if hasattr(array, "untyped_storage"):
        if array.is_meta:
            return np.full(tuple(array.shape), weight_plans.UNTOUCHED)
        array = array.detach().cpu().double().numpy()
    return np.array(array, np.float64, order="C")


def by_update(load: Loader, parameters: Values, values: Values, ranks: int = 2) -> dict[str, NDArray[np.float64]]:
    """Record a loader, and return what an update makes of the parameters. Raises RecordError."""
    kinds = {name: (tuple(value.shape), dtype_name(value.dtype)) for name, value in values.items()}
    made = record(lambda pairs: load(pairs, parameters), parameters, kinds)
    made = Recording.from_description(json.loads(json.dumps(made.describe())))
    silent = [name for name, one in made.parameters.items() if not one.parts and all(one.shape)]
    targets, recipe = Recording.merge({0: made}, unused=["*"], untouched=silent)
    sources = Layout.over(
        range(ranks), {name: (*kind, Shard(0) if kind[0] else Replicate()) for name, kind in kinds.items()}
    )
    store = weight_plans.hold(sources, {name: as_numbers(value) for name, value in values.items()})
    memory, count = weight_plans.carry_out(plan_update(sources, targets, recipe), store, cast=converted)
    assert all(times.max() <= 1 for times in count.get(0, {}).values())
    found = {}
    for name, one in made.parameters.items():
        # What no copy fills stays what it is: the loader may have set it itself, as padding.
        found[name] = as_numbers(parameters[name])
        if all(one.shape):
            # A dimension of one index has any stride; the layout gives it the usual one.
            strides = [8 * stride for stride in targets.tensors[name].held_by()[0].strides]
            arrays = (memory[0][name], count[0][name])
            brought, times = (np.lib.stride_tricks.as_strided(flat, one.shape, strides) for flat in arrays)
            np.copyto(found[name], brought, where=times > 0)
    return found


def by_loader(load: Loader, parameters: Values, values: Values) -> dict[str, NDArray[np.float64]]:
    """Run a loader on values, and return the parameters."""
    load(((name, copy.deepcopy(value)) for name, value in values.items()), parameters)
    return {name: as_numbers(parameter) for name, parameter in parameters.items()}


def differing(one: Mapping[str, NDArray[np.float64]], other: Mapping[str, NDArray[np.float64]]) -> list[str]:
    """Return the names of the tensors that are not the same, bit for bit, of those that both have."""
    return [
        name for name in one if one[name].tobytes() != other[name].tobytes() or one[name].shape != other[name].shape
    ]


def untouched(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a parameter before the update."""
    return np.full(shape, weight_plans.UNTOUCHED, dtype)
