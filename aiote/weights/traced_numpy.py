"""An array without values, for loaders whose parameters are NumPy arrays.

NumPy passes calls of its functions to the array (`__array_function__`, `__array_ufunc__`). Functions that return views
run on a stand-in, an array of bytes without memory, because only its shape and strides are used. This module lists the
calls that it knows, and refuses any other call, keyword or kind of argument. It also refuses calls whose result depends
on how an array lies in memory (`order="K"`, strides, flags), because a trainer's arrays may lie differently.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

from ..errors import UsageError
from .dtypes import dtype_name, dtype_of
from .stand_in import offset_of, owner, stand_in
from .traced import Elements, Log, RecordError, flat, put_together, whole_numbers

__all__ = ["TracedArray"]

VIEWS = "transpose permute_dims matrix_transpose swapaxes moveaxis rollaxis squeeze expand_dims broadcast_to split"
VIEWS += " array_split hsplit vsplit dsplit flip fliplr flipud rot90 atleast_1d atleast_2d atleast_3d diagonal"
"""Functions that return only views of their first argument, whatever their other arguments are."""
PLAIN = (np.ndarray, np.memmap)
"""Arrays that NumPy itself copies to. Other classes, such as masked arrays, copy in their own ways."""

PLAIN_INDEX = (slice, int, np.integer)


class TracedArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array without values, see the module. It counts as an instance of `numpy.ndarray`, since a loader may ask."""

    __slots__ = ("_elements", "_log", "_scalar")
    _elements: Elements
    _log: Log
    _scalar: bool

    def __init__(self, log: Log, elements: Elements, scalar: bool = False) -> None:
        for name, value in (("_log", log), ("_elements", elements), ("_scalar", scalar)):
            object.__setattr__(self, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self.dtype.type if self._scalar else np.ndarray

    def __repr__(self) -> str:
        return f"<traced {self._elements.name} {self._elements.dtype} {self.shape}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__array_") and name.endswith("__"):
            self._read()
        if hasattr(np.ndarray, name):
            self._refuse(name)
        raise RecordError(f"{self._elements.name}: the loader uses {name}, which numpy arrays do not have")

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse(f"setting {name}")

    def _refuse(self, call: str, why: str = "which moves no elements that a recipe could name") -> NoReturn:
        raise self._log.refused(RecordError(f"{self._elements.name}: the loader calls {call}, {why}"))

    def _read(self) -> NoReturn:
        raise self._log.refused(
            RecordError(
                f"{self._elements.name}: the loader reads its values; a recorded loader copies with "
                "numpy.copyto(parameter[index], tensor), in place of parameter[index] = tensor"
            )
        )

    def _with(self, elements: Elements, scalar: bool = False) -> TracedArray:
        return TracedArray(self._log, elements, scalar)

    def _viewed(self, call: str, view: Callable[[Any], Any]) -> Any:
        """Apply `view` to the stand-in, and return the resulting views as views of this array."""
        mine = self._elements
        alone = stand_in(mine.shape, mine.strides)
        try:
            found = view(alone)
        except RecordError:
            raise
        except (TypeError, ValueError, LookupError) as error:
            self._refuse(call, f"which fails: {error}")
        several = [found] if isinstance(found, np.ndarray) else list(found)
        if any(owner(one) is not owner(alone) for one in several):
            self._refuse(call, "with arrays that are none of the checkpoint's")
        return self._of(found) if isinstance(found, np.ndarray) else type(found)(map(self._of, found))

    def _of(self, view: Any) -> TracedArray:
        return self._with(self._elements.view(view.shape, self._elements.offset + offset_of(view), view.strides))

    # Properties.

    @property
    def shape(self) -> tuple[int, ...]:
        """The extent of each dimension."""
        return self._elements.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy's type of the elements."""
        try:
            return dtype_of(self._elements.dtype)
        except UsageError as error:
            raise self._log.refused(RecordError(f"{self._elements.name}: {error}")) from None

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many elements it has."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.itemsize

    def __len__(self) -> int:
        if not self.shape:
            self._refuse("len()", "but it has no dimensions")
        return self.shape[0]

    # Calls that move elements.

    @property
    def T(self) -> TracedArray:
        """The array with its dimensions reversed."""
        return self.transpose()

    @property
    def mT(self) -> TracedArray:
        """The array with its last two dimensions exchanged."""
        return self.swapaxes(-1, -2)

    def transpose(self, *axes: Any) -> TracedArray:
        """Reorder the dimensions, as NumPy does: `transpose(0, 1)` leaves a matrix as it is."""
        return _one(self, "transpose", lambda array: array.transpose(*axes), axes)

    def swapaxes(self, *axes: Any) -> TracedArray:
        """Exchange two dimensions."""
        return _one(self, "swapaxes", lambda array: array.swapaxes(*axes), axes)

    def squeeze(self, axis: Any = None) -> TracedArray:
        """Drop dimensions of one index."""
        return _one(self, "squeeze", lambda array: array.squeeze(axis), axis)

    def diagonal(self, *args: Any, **kwargs: Any) -> TracedArray:
        """Take a diagonal."""
        return _one(self, "diagonal", lambda array: array.diagonal(*args, **kwargs), args, kwargs)

    def view(self, dtype: Any = None) -> TracedArray:
        """Return this array. A view of the same bytes as another type is refused."""
        if dtype is not None and _named(self, dtype) != self._elements.dtype:
            self._refuse(f"view({dtype!r})", "and a recipe converts values only")
        return self

    def reshape(self, *shape: Any, order: Any = "C", copy: Any = None) -> TracedArray:
        """Return the same elements with another shape, in C order or Fortran order."""
        several = shape[0] if len(shape) == 1 and isinstance(shape[0], (list, tuple)) else shape
        if _holds_traced(several) or copy not in (None, True):
            self._refuse("reshape", f"with copy={copy!r} or a shape out of values")
        try:
            wanted = list(map(operator.index, several))
        except TypeError as error:
            self._refuse("reshape", f"which fails: {error}")
        known = int(np.prod([extent for extent in wanted if extent != -1], dtype=np.int64))
        if wanted.count(-1) == 1 and known:
            wanted[wanted.index(-1)] = self.size // known
        if min(wanted, default=0) < 0 or int(np.prod(wanted, dtype=np.int64)) != self.size:
            self._refuse("reshape", f"but {self.shape} cannot have the shape {tuple(several)}")
        if _order(self, "reshape", order) == "C":
            return self._with(self._elements.reshaped(wanted))
        return self.T._with(self.T._elements.reshaped(wanted[::-1])).T

    def ravel(self, order: Any = "C") -> TracedArray:
        """Return all elements in one dimension."""
        return self.reshape(-1, order=order)

    def flatten(self, order: Any = "C") -> TracedArray:
        """Return all elements in one dimension, like `ravel`."""
        return self.reshape(-1, order=order)

    def copy(self, order: Any = "C") -> TracedArray:
        """Return this array, because a copy has the same elements."""
        return _laid(self, "copy", order)

    def __copy__(self) -> TracedArray:
        return self

    def __deepcopy__(self, memo: Any) -> TracedArray:
        return self

    def astype(
        self, dtype: Any, order: Any = "K", casting: Any = "unsafe", subok: Any = True, copy: Any = True
    ) -> TracedArray:
        """Convert to a type that NumPy knows, if `casting` allows it."""
        name = _named(self, dtype)
        _check_cast(self, "astype", dtype_of(name), casting)
        return _laid(self, "astype", order)._with(self._elements.cast(name), self._scalar)

    def take(self, indices: Any, axis: Any = None, out: Any = None, mode: Any = "raise") -> TracedArray:
        """Take these indices of a dimension, or without an axis of all elements."""
        if out is not None or mode != "raise":
            self._refuse("take", f"with out={out!r}, mode={mode!r}")
        whole = self.ravel() if axis is None else self
        at = 0 if axis is None else _axis(self, "take", axis, self.ndim)
        if isinstance(indices, (int, np.integer)) and not isinstance(indices, bool):
            return whole[(slice(None),) * at + (indices,)]  # type: ignore[no-any-return]
        return _gathered(whole, "take", at, indices)

    def repeat(self, repeats: Any, axis: Any = None) -> TracedArray:
        """Repeat every index of a dimension, or without an axis every element, `repeats` times."""
        whole = self.ravel() if axis is None else self
        at = 0 if axis is None else _axis(self, "repeat", axis, self.ndim)
        if type(repeats) is not int or repeats < 0:
            self._refuse(f"repeat({repeats!r})", "where a number of times is known alone")
        return _gathered(whole, "repeat", at, [i for i in range(whole.shape[at]) for _ in range(repeats)])

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(len(self))])

    def __getitem__(self, index: Any) -> Any:
        several = list(index) if isinstance(index, tuple) else [index]
        for one in flat(several):
            if isinstance(one, TracedArray):
                self._read()
            if isinstance(one, (bool, np.bool_)):
                self._refuse("an index of bool", "and a mask names no elements before it has values")
        # NumPy would treat any other index as a list of indices, and read bytes beyond the stand-in.
        lists = [one for one in several if not (one is None or one is Ellipsis or isinstance(one, PLAIN_INDEX))]
        if not lists:
            whole = any(one is Ellipsis for one in several)
            found = self._viewed(
                f"an index of {index!r}", lambda array: array[tuple(several if whole else [*several, ...])]
            )
            ints = sum(hasattr(one, "__index__") for one in several)
            return found._with(found._elements, scalar=not whole and ints == len(several) == self.ndim)
        if len(lists) > 1 or any(hasattr(one, "__index__") for one in several if one is not lists[0]):
            self._refuse("several indices with a list", "which numpy combines; take one after the other")
        return self._with_list(several, lists[0])

    def _with_list(self, several: list[Any], chosen: Any) -> TracedArray:
        place = next(i for i, one in enumerate(several) if one is chosen)
        several[place] = slice(None)
        found = self[tuple(several)]
        behind = any(one is Ellipsis for one in several[:place])
        return _gathered(found, "an index of list", found.ndim - len(several) + place if behind else place, chosen)

    # Calls that need values, or change them.

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        self._read()

    __bool__ = __int__ = __float__ = __complex__ = __index__ = __array__
    __dlpack__ = __dlpack_device__ = __array__  # NumPy before 2 looks these up in the class

    def __setitem__(self, index: Any, value: Any) -> None:
        self._refuse("an assignment to its elements")

    __delitem__ = __array__

    def __contains__(self, value: Any) -> bool:
        self._read()

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._read()

    def __array_ufunc__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse arithmetic."""
        self._refuse(function.__name__)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Carry out a call of a NumPy function with an array of this class. Refuse functions that are not known."""
        name = str(getattr(function, "__name__", function))
        mine, others = _first(args, kwargs)
        if function in VIEWED and mine is not None:
            return _plain(mine, name, lambda array: function(*_put_in(args, array), **_put_in(kwargs, array)), others)
        alone = mine is not None and mine is next(iter(args), None) and not _holds_traced(others)
        if function not in COMBINING and (function not in KNOWN or not alone):
            self._refuse(name)
        try:
            return (COMBINING.get(function) or KNOWN[function])(*args, **kwargs)
        except RecordError as error:
            raise self._log.refused(error) from None
        except (TypeError, ValueError, LookupError) as error:
            self._refuse(name, f"which fails, or is not recorded with these arguments: {error}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse torch functions, because the parameters are NumPy arrays."""
        mine = next(one for one in flat(args, kwargs) if isinstance(one, TracedArray))
        mine._refuse(f"torch's {function.__name__}", "but the parameters are numpy arrays")


def _first(args: Any, kwargs: Any) -> tuple[TracedArray | None, list[Any]]:
    """Return the traced array that a call works on (its first argument, or a keyword's; or None), and all others."""
    several = [*args, *kwargs.values()]
    mine = next((one for one in (args[:1] or several) if isinstance(one, TracedArray)), None)
    return mine, [one for one in several if one is not mine]


def _holds_traced(values: Any) -> bool:
    return any(isinstance(one, TracedArray) for one in flat(values))


def _put_in(values: Any, array: Any) -> Any:
    if isinstance(values, dict):
        return {name: array if isinstance(one, TracedArray) else one for name, one in values.items()}
    return tuple(array if isinstance(one, TracedArray) else one for one in values)


def _plain(mine: TracedArray, call: str, view: Callable[[Any], Any], *others: Any) -> Any:
    """Return a view. Refuse other arguments with traced arrays, because NumPy would read their stand-ins' bytes."""
    if _holds_traced(others):
        mine._refuse(call, "with several arrays or an argument out of values")
    return mine._viewed(call, view)


def _one(mine: TracedArray, call: str, view: Callable[[Any], Any], *others: Any) -> TracedArray:
    found: TracedArray = _plain(mine, call, view, *others)
    return found


def _order(mine: TracedArray, call: str, order: Any) -> str:
    if order not in ("C", "F"):
        mine._refuse(f"{call} with order={order!r}", "which depends on how the trainer's array lies in memory")
    return str(order)


def _laid(mine: TracedArray, call: str, order: Any) -> TracedArray:
    """Return the array itself as its copy in another order of memory, because the order changes no element."""
    if order not in ("K", "A", "C", "F"):
        mine._refuse(f"{call} with order={order!r}")
    return mine


def _axis(mine: TracedArray, call: str, axis: Any, ndim: int) -> int:
    if isinstance(axis, (int, np.integer)) and not isinstance(axis, bool) and -ndim <= axis < ndim:
        return int(axis) % ndim
    mine._refuse(f"{call} with axis={axis!r}", f"expected one of {ndim} dimensions")


def _named(mine: TracedArray, dtype: Any) -> str:
    """Return the name of a type that is given in any form that NumPy accepts."""
    try:
        return dtype_name(np.dtype(dtype))
    except (TypeError, ValueError, UsageError) as error:
        mine._refuse(f"a conversion to {dtype!r}", f"which is none of a recipe's types: {error}")


def _check_cast(mine: TracedArray, call: str, to: Any, casting: Any) -> None:
    try:
        fits = np.can_cast(mine.dtype, to, casting)
    except (TypeError, ValueError) as error:
        mine._refuse(call, f"which fails: {error}")
    if not fits:
        mine._refuse(f"{call} with casting={casting!r}", f"which does not allow {mine.dtype} to {to}")


def _gathered(mine: TracedArray, call: str, at: int, indices: Any) -> TracedArray:
    if isinstance(indices, np.ndarray) and mine._log.loaded_in(indices) is not None:
        mine._refuse(call, "with indices out of a parameter, which has other values once it is loaded")
    chosen = whole_numbers(indices)
    extent = mine.shape[at]
    if chosen is None or any(not -extent <= one < extent for one in chosen):
        mine._refuse(call, f"with {indices!r}, expected a list of integers within {extent}")
    return mine._with(mine._elements.gathered(at, [one % extent for one in chosen]))


# Functions that do not return views, with the arguments that are known.


def _copyto(dst: Any, src: Any, casting: Any = "same_kind", where: Any = True) -> None:
    mine = src if isinstance(src, TracedArray) else next(one for one in (dst, where) if isinstance(one, TracedArray))
    if where is not True or mine is not src:
        mine._refuse("copyto with where, or to a tensor that has no values")
    if type(dst) not in PLAIN:
        mine._refuse(f"copyto to {type(dst).__name__}", "expected a numpy array")
    _check_cast(mine, "copyto", dst.dtype, casting)
    while mine.ndim > dst.ndim and mine.shape[0] == 1:
        mine = mine[0, ...]
    mine._log.copied(dst, _plain(mine, "copyto", lambda array: np.broadcast_to(array, dst.shape))._elements)


def _join(name: str, several: Any, at: Callable[[int], int], dtype: Any = None, casting: Any = "same_kind") -> Any:
    mine = next(one for one in flat(several) if isinstance(one, TracedArray))
    if not isinstance(several, (list, tuple)) or not all(isinstance(one, TracedArray) for one in several):
        mine._refuse(name, "with arrays that are none of the checkpoint's")
    found = mine._with(put_together([one._elements for one in several], at(several[0].ndim)))
    return found if dtype is None else found.astype(dtype, casting=casting)


def _concatenate(arrays: Any, axis: Any = 0, out: Any = None, *, dtype: Any = None, casting: Any = "same_kind") -> Any:
    mine = next(one for one in flat(arrays, out) if isinstance(one, TracedArray))
    if out is not None:
        mine._refuse("concatenate with out")
    if axis is None and isinstance(arrays, (list, tuple)):
        arrays, axis = [one.ravel() if isinstance(one, TracedArray) else one for one in arrays], 0
    return _join("concatenate", arrays, lambda ndim: _axis(mine, "concatenate", axis, ndim), dtype, casting)


def _stack(arrays: Any, axis: Any = 0, out: Any = None, *, dtype: Any = None, casting: Any = "same_kind") -> Any:
    mine = next(one for one in flat(arrays, out) if isinstance(one, TracedArray))
    if out is not None or not isinstance(arrays, (list, tuple)):
        mine._refuse("stack with out, or of one array")
    at = _axis(mine, "stack", axis, mine.ndim + 1)
    return _concatenate([_expanded(one, at) for one in arrays], at, dtype=dtype, casting=casting)


def _expanded(one: Any, at: int) -> Any:
    return np.expand_dims(one, at) if isinstance(one, TracedArray) else one


def _stacked(prepare: Callable[[Any], Any], axis: Callable[[int], int]) -> Callable[..., Any]:
    def stack(tup: Any, *, dtype: Any = None, casting: Any = "same_kind") -> Any:
        several = [prepare(one) if isinstance(one, TracedArray) else one for one in tup]
        return _concatenate(several, axis(np.ndim(several[0])), dtype=dtype, casting=casting)

    return stack


def _roll(a: Any, shift: Any, axis: Any = None) -> Any:
    if axis is None:
        return _roll(a.ravel(), shift, 0).reshape(a.shape)
    both = [one if isinstance(one, (list, tuple)) else [one] for one in (shift, axis)]
    if len(both[0]) != len(both[1]):
        both = [one * max(map(len, both)) if len(one) == 1 else one for one in both]
    for by, dim in zip(*both, strict=True):
        at, by = _axis(a, "roll", dim, a.ndim), operator.index(by)
        extent = a.shape[at]
        a = _gathered(a, "roll", at, [(i - by) % extent for i in range(extent)])
    return a


def _unstack(x: Any, /, *, axis: Any = 0) -> Any:
    return tuple(np.moveaxis(x, axis, 0)[i, ...] for i in range(x.shape[_axis(x, "unstack", axis, x.ndim)]))


def _column(one: TracedArray) -> TracedArray:
    return one.reshape(-1, 1) if one.ndim < 2 else one


def _column_stack(tup: Any) -> Any:
    return _concatenate([_column(one) if isinstance(one, TracedArray) else one for one in tup], 1)


def _known(functions: dict[str, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return the implementations by NumPy function, without functions that an older NumPy lacks."""
    return {getattr(np, name): call for name, call in functions.items() if hasattr(np, name)}


COMBINING = _known(
    {
        "copyto": _copyto,
        "concatenate": _concatenate,
        "stack": _stack,
        "vstack": _stacked(np.atleast_2d, lambda ndim: 0),
        "hstack": _stacked(np.atleast_1d, lambda ndim: 0 if ndim == 1 else 1),
        "dstack": _stacked(np.atleast_3d, lambda ndim: 2),
        "column_stack": _column_stack,
    }
)
KNOWN = _known(
    {
        "roll": _roll,
        "unstack": _unstack,
        "reshape": lambda a, /, shape, order="C", *, copy=None: TracedArray.reshape(a, shape, order=order, copy=copy),
        "ravel": lambda a, order="C": TracedArray.ravel(a, order),
        "copy": lambda a, order="K", subok=False: TracedArray.copy(a, order),
        "astype": lambda x, dtype, /, *, copy=True: TracedArray.astype(x, dtype),
        "take": lambda a, indices, axis=None: TracedArray.take(a, indices, axis),
        "repeat": lambda a, repeats, axis=None: TracedArray.repeat(a, repeats, axis),
        "shape": lambda a: a.shape,
        "ndim": lambda a: a.ndim,
        "size": lambda a, axis=None: a.size if axis is None else a.shape[axis],
    }
)
VIEWED = {getattr(np, name) for name in VIEWS.split() if hasattr(np, name)}
