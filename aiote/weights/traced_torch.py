"""A tensor without values, for loaders whose parameters are torch tensors.

Its class is a subclass of `torch.Tensor`, so torch passes all calls with it to this module (`__torch_function__`).
Functions that return views run on a stand-in on the device "meta", and the module reads the strides of the result. This
module lists the calls that it knows, and refuses any other call, keyword or kind of argument.

This module never imports torch: a program with torch parameters has loaded torch already.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from .dtypes import LONG_NAMES, dtype_name
from .traced import Elements, Log, RecordError, flat, put_together, whole_numbers

__all__ = ["is_traced", "traced_tensor"]

VIEWS = "view view_as reshape reshape_as flatten unflatten ravel T mT squeeze unsqueeze permute transpose t swapaxes"
VIEWS += (
    " swapdims movedim moveaxis adjoint narrow select expand expand_as broadcast_to chunk split tensor_split hsplit"
)
VIEWS += " vsplit dsplit split_with_sizes unbind diagonal atleast_1d atleast_2d atleast_3d __iter__"
SAME_ORDER = ("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel")
"""The functions among VIEWS that copy if a view is impossible; the copy has the same elements in the same order."""
ASKS = "shape ndim dtype itemsize nbytes layout requires_grad is_quantized is_sparse size dim ndimension numel nelement"
ASKS += " __len__ element_size is_floating_point is_complex is_signed"
SAME = "data detach cpu cuda pin_memory requires_grad_ __deepcopy__"
CASTS = "float half bfloat16 double int long short char byte bool"
HARMLESS = {"memory_format", "device", "non_blocking", "copy", "requires_grad", "memo"}
"""Keywords that change no element, such as a tensor's device or its order in memory."""


def traced_tensor(log: Log, elements: Elements) -> Any:
    """Return these elements as a torch tensor. The program must have loaded torch."""
    return _made(log, elements)


def is_traced(tensor: Any) -> bool:
    """Return whether a tensor is a traced tensor."""
    return isinstance(tensor, _tensor_class())


def _made(log: Log, elements: Elements, twin: Any = None) -> Any:
    torch = sys.modules["torch"]
    if twin is None:
        try:
            dtype = getattr(torch, LONG_NAMES[elements.dtype])
        except AttributeError:
            raise log.refused(RecordError(f"{elements.name}: torch has no type {elements.dtype}")) from None
        twin = torch.empty(elements.shape, dtype=dtype, device="meta")
        elements = elements.copied()
    return _tensor_class()._make(log, elements, twin)


@functools.cache
def _tensor_class() -> Any:
    torch: Any = sys.modules["torch"]

    class TracedTensor(torch.Tensor):  # type: ignore[misc]
        """A tensor without values, see the module."""

        @classmethod
        def _make(cls, log: Log, elements: Elements, twin: Any) -> Any:
            made = torch.Tensor._make_wrapper_subclass(cls, twin.shape, dtype=twin.dtype, device="meta")
            made._traced = _Traced(log, elements, twin)
            return made

        def __repr__(self) -> str:
            elements = self._traced.elements
            return f"<traced {elements.name} {elements.dtype} {elements.shape}>"

        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return _called(function, args, kwargs or {})

        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            _first(args, kwargs or {}).refuse(str(function))

        def __array__(self, *args: Any, **kwargs: Any) -> Any:
            self._traced.refuse("numpy's functions", "but the parameters are torch tensors")

        def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
            self._traced.refuse(f"numpy's {function.__name__}", "but the parameters are torch tensors")

        def __array_ufunc__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
            self._traced.refuse(f"numpy's {function.__name__}", "but the parameters are torch tensors")

    return TracedTensor


class _Traced:
    """The contents of a traced tensor: its elements, and its stand-in `twin`, which has the elements' strides."""

    __slots__ = ("elements", "log", "twin")

    def __init__(self, log: Log, elements: Elements, twin: Any) -> None:
        self.log, self.elements, self.twin = log, elements, twin

    def refuse(self, call: str, why: str = "which moves no elements that a recipe could name") -> NoReturn:
        raise self.log.refused(RecordError(f"{self.elements.name}: the loader calls {call}, {why}"))

    def made(self, elements: Elements) -> Any:
        return _made(self.log, elements)

    def viewed(self, view: Any) -> Any:
        """Return a view of the stand-in as a view of this tensor."""
        offset = self.elements.offset + view.storage_offset() - self.twin.storage_offset()
        return _made(self.log, self.elements.view(tuple(view.shape), offset, view.stride()), view)


def _first(*values: Any) -> _Traced:
    kind = _tensor_class()
    found: _Traced = next(one for one in flat(*values) if isinstance(one, kind))._traced
    return found


def _holds_traced(*values: Any) -> bool:
    kind = _tensor_class()
    return any(isinstance(one, kind) for one in flat(*values))


def _called(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Carry out a call of a torch function. Raises RecordError if the function is not known, or fails."""
    torch: Any = sys.modules["torch"]
    name = str(getattr(function, "__name__", function))
    if name in ("__get__", "__set__"):
        name = function.__self__.__name__ + ("" if name == "__get__" else " = ")
    mine = _first(args, kwargs)
    kwargs = {"dim" if key == "axis" else key: value for key, value in kwargs.items()}
    call = _known().get(function)
    if call is None or kwargs.get("out") is not None:
        mine.refuse(name if call is None else f"{name} with out")
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return call(function, mine, args, {key: value for key, value in kwargs.items() if key != "out"})
    except RecordError as error:
        raise mine.log.refused(error) from None
    except (TypeError, ValueError, LookupError, RuntimeError, NotImplementedError) as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        mine.refuse(name, f"which fails, or is not recorded with these arguments: {line}")


@functools.cache
def _known() -> dict[Any, Callable[..., Any]]:
    """Return the implementations by torch function. A function of the module and the tensors' method share a name."""
    torch: Any = sys.modules["torch"]
    calls: dict[str, Callable[..., Any]] = {name: functools.partial(_view, name) for name in VIEWS.split()}
    calls |= dict.fromkeys(ASKS.split(), _ask)
    calls |= {**dict.fromkeys(SAME.split(), _same), "clone": _copied, "contiguous": _copied}
    calls |= {name: functools.partial(_cast, name) for name in CASTS.split()}
    calls |= {name: functools.partial(_others, call) for name, call in OTHERS.items()}
    # `is_meta` is False, because a trainer's tensor has values.
    calls |= {
        "is_meta": lambda function, mine, args, kwargs: False,
        "__getitem__": _item,
        "copy_": _copy,
        "__setitem__": _set_item,
    }
    found: dict[Any, Callable[..., Any]] = {}
    for home in (torch, torch.Tensor):
        for name, call in calls.items():
            function = getattr(home, name, None)
            if function is not None and (name not in PROPERTIES or home is torch.Tensor):
                found[function.__get__ if name in PROPERTIES else function] = call
    return found


PROPERTIES = {"T", "mT", "data", "shape", "ndim", "dtype", "itemsize", "nbytes", "layout", "requires_grad"}
PROPERTIES |= {"is_quantized", "is_sparse", "is_meta"}


def _twins(mine: _Traced, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments with the stand-in in place of the traced tensor. Refuse a second traced tensor."""
    kind = _tensor_class()
    if sum(isinstance(one, kind) for one in flat(args, kwargs)) != 1:
        mine.refuse("a function of several tensors")
    swapped = [one._traced.twin if isinstance(one, kind) else one for one in args]
    named = {key: one._traced.twin if isinstance(one, kind) else one for key, one in kwargs.items()}
    if _holds_traced(swapped, named):
        mine.refuse("a function of a list of tensors")
    return swapped, named


def _view(name: str, function: Any, mine: _Traced, args: Any, kwargs: dict[str, Any]) -> Any:
    swapped, named = _twins(mine, args, kwargs)
    found = function(*swapped, **named)
    if not isinstance(next(iter((*args, *kwargs.values()))), _tensor_class()):
        return found  # a view of another tensor: the call uses only the shape of the traced one
    if name == "__iter__":
        return iter([_of(mine, name, one) for one in found])
    if isinstance(found, (list, tuple)):
        return type(found)(_of(mine, name, one) for one in found)
    return _of(mine, name, found)


def _of(mine: _Traced, name: str, found: Any) -> Any:
    if found.dtype != mine.twin.dtype:
        mine.refuse(name, "and a recipe converts values only, not bytes")
    if found.untyped_storage()._cdata == mine.twin.untyped_storage()._cdata:
        return mine.viewed(found)
    if name not in SAME_ORDER:
        mine.refuse(name)
    return mine.made(mine.elements.reshaped(tuple(found.shape)))


def _ask(function: Any, mine: _Traced, args: Any, kwargs: dict[str, Any]) -> Any:
    swapped, named = _twins(mine, args, kwargs)
    return function(*swapped, **named)


def _same(function: Any, mine: _Traced, args: Any, kwargs: dict[str, Any]) -> Any:
    if not kwargs.keys() <= HARMLESS or _holds_traced(args[1:], kwargs):
        mine.refuse(f"{function.__name__} with {', '.join(kwargs.keys() - HARMLESS)}")
    return _made(mine.log, mine.elements, mine.twin)


def _copied(function: Any, mine: _Traced, args: Any, kwargs: dict[str, Any]) -> Any:
    _same(function, mine, args, kwargs)
    return mine.made(mine.elements)


def _cast(name: str, function: Any, mine: _Traced, args: Any, kwargs: dict[str, Any]) -> Any:
    if len(args) > 1 or not kwargs.keys() <= HARMLESS:
        mine.refuse(f"{name} with arguments")
    return mine.made(mine.elements.cast(dtype_name(function(mine.twin).dtype)))


def _item(function: Any, mine: _Traced, args: Any, kwargs: dict[str, Any]) -> Any:
    torch: Any = sys.modules["torch"]
    tensor, index = args
    several = list(index) if isinstance(index, tuple) else [index]
    if _holds_traced(several) or not isinstance(tensor, _tensor_class()):
        mine.refuse("an index out of its values")
    if any(isinstance(one, bool) for one in flat(several)):
        mine.refuse("an index of bool", "and a mask names no elements before it has values")
    lists = [
        one for one in several if isinstance(one, (list, tuple, range)) or (isinstance(one, torch.Tensor) and one.ndim)
    ]
    if not lists:
        return _of(mine, f"an index of {index!r}", mine.twin[index])
    if len(several) > 1:
        mine.refuse("several indices with a list", "which torch combines; use index_select")
    return _gathered(mine, 0, lists[0])


def _gathered(mine: _Traced, dim: int, indices: Any) -> Any:
    torch: Any = sys.modules["torch"]
    if isinstance(indices, torch.Tensor) and (indices.dtype not in (torch.int64, torch.int32) or indices.is_meta):
        mine.refuse(f"an index of {indices.dtype} on {indices.device}")
    if mine.log.loaded_in(indices) is not None:
        mine.refuse("an index out of a parameter", "which has other values once it is loaded")
    chosen, at = whole_numbers(indices), _dim(mine, dim)
    extent = mine.elements.shape[at]
    if chosen is None or any(not -extent <= one < extent for one in chosen):
        mine.refuse(f"an index of {type(indices).__name__}", f"expected integers within {extent}")
    return mine.made(mine.elements.gathered(at, [one % extent for one in chosen]))


def _dim(mine: _Traced, dim: Any) -> int:
    ndim = len(mine.elements.shape)
    if type(dim) is not int or not -ndim <= dim < ndim:
        mine.refuse(f"a function with dim={dim!r}", f"expected one of {ndim} dimensions")
    return dim % ndim


# Copies to the parameters.


def _copy(function: Any, mine: _Traced, args: Any, kwargs: dict[str, Any]) -> Any:
    return _copy_known(mine, *args, **kwargs)


def _copy_known(mine: _Traced, target: Any, src: Any, non_blocking: Any = False) -> Any:
    if isinstance(target, _tensor_class()) or not isinstance(src, _tensor_class()):
        mine.refuse("copy_ to a tensor that has no values")
    mine.log.copied(target, mine.viewed(mine.twin.expand(target.shape))._traced.elements)
    return target


def _set_item(function: Any, mine: _Traced, args: Any, kwargs: dict[str, Any]) -> None:
    target, index, _ = args
    if isinstance(target, _tensor_class()) or _holds_traced(index):
        mine.refuse("an assignment to a tensor that has no values, or by an index out of them")
    view, found = target.detach()[index], mine
    while found.twin.ndim > view.ndim and found.twin.shape[0] == 1:
        found = found.viewed(found.twin[0])._traced
    mine.log.copied(view, found.viewed(found.twin.expand(view.shape))._traced.elements)


# Functions that make new tensors.


def _others(call: Callable[..., Any], function: Any, mine: _Traced, args: Any, kwargs: dict[str, Any]) -> Any:
    if not _holds_traced(next(iter((*args, *kwargs.values())))):
        mine.refuse(function.__name__, "of a tensor that is none of the checkpoint's")
    return call(*args, **kwargs)


def _one(tensor: Any, *others: Any) -> _Traced:
    """Return the contents of the tensor that a function works on. Refuse traced tensors among its other arguments."""
    if not isinstance(tensor, _tensor_class()) or _holds_traced(others):
        _first(tensor, others).refuse("a function of several tensors")
    found: _Traced = tensor._traced
    return found


def _all(tensors: Any) -> list[Any]:
    kind = _tensor_class()
    if not isinstance(tensors, (list, tuple)) or not all(isinstance(one, kind) for one in tensors):
        _first(tensors).refuse(
            "a function that puts tensors together", "with tensors that are none of the checkpoint's"
        )
    return list(tensors)


def _cat(tensors: Any, dim: Any = 0) -> Any:
    several = [one._traced for one in _all(tensors)]
    return several[0].made(put_together([one.elements for one in several], _dim(several[0], dim)))


def _stack(tensors: Any, dim: Any = 0) -> Any:
    return _cat([one.unsqueeze(dim) for one in _known_views(tensors)], dim % (len(_first(tensors).elements.shape) + 1))


def _known_views(tensors: Any) -> Sequence[Any]:
    """Return traced tensors as objects whose methods work within a call of torch's."""
    return [_Methods(one) for one in _all(tensors)]


class _Methods:
    """The methods of a traced tensor, for use while torch does not pass calls to this module."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        torch: Any = sys.modules["torch"]
        function = getattr(torch.Tensor, name, None) or getattr(torch, name)
        return lambda *args: _called(function, (self._tensor, *args), {})


def _beside(prepare: str, dim: Callable[[int], int]) -> Callable[..., Any]:
    def stack(tensors: Any) -> Any:
        several = [getattr(one, prepare)() for one in _known_views(tensors)]
        return _cat(several, dim(len(several[0]._traced.elements.shape)))

    return stack


def _column_stack(tensors: Any) -> Any:
    several = [one if one._traced.twin.ndim > 1 else _Methods(one).reshape(-1, 1) for one in _all(tensors)]
    return _cat(several, 1)


def _flip(input: Any, *several: Any, dims: Any = None) -> Any:
    found = _one(input, several, dims)
    chosen = dims if not several else several[0] if isinstance(several[0], (list, tuple)) else several
    for dim in (chosen,) if isinstance(chosen, int) else chosen:
        found = _gathered(found, dim, list(range(found.elements.shape[_dim(found, dim)]))[::-1])._traced
    return found.made(found.elements)


def _roll(input: Any, shifts: Any, dims: Any = None) -> Any:
    found = _one(input, shifts, dims)
    shape = found.elements.shape
    if dims is None or dims == ():
        flattened = found.made(found.elements.reshaped((found.twin.numel(),)))
        return found.made(_roll(flattened, shifts, 0)._traced.elements.reshaped(shape))
    both = [list(one) if isinstance(one, (list, tuple)) else [one] for one in (shifts, dims)]
    for by, dim in zip(*both, strict=True):
        extent = shape[_dim(found, dim)]
        found = _gathered(found, dim, [(i - operator.index(by)) % extent for i in range(extent)])._traced
    return found.made(found.elements)


def _index_select(input: Any, dim: Any, index: Any) -> Any:
    return _gathered(_one(input, index), dim, index)


def _repeat(input: Any, *repeats: Any) -> Any:
    found = _one(input, repeats)
    times = list(repeats[0] if len(repeats) == 1 and isinstance(repeats[0], (list, tuple)) else repeats)
    if len(times) < len(found.elements.shape) or not all(type(one) is int and one >= 0 for one in times):
        found.refuse(f"repeat{tuple(times)}")
    shape = (1,) * (len(times) - len(found.elements.shape)) + found.elements.shape
    made = found.made(found.elements.reshaped(shape))._traced
    for at, count in enumerate(times):
        if count != 1:
            made = _gathered(made, at, list(range(shape[at])) * count)._traced
    return made.made(made.elements)


def _repeat_interleave(input: Any, repeats: Any, dim: Any = None) -> Any:
    found = _one(input, repeats)
    if type(repeats) is not int or repeats < 0:
        found.refuse(f"repeat_interleave with {repeats!r}")
    if dim is None:
        found, dim = found.made(found.elements.reshaped((found.twin.numel(),)))._traced, 0
    extent = found.elements.shape[_dim(found, dim)]
    return _gathered(found, dim, [i for i in range(extent) for _ in range(repeats)])


def _to(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Convert to the type among the arguments, if there is one. The device does not matter."""
    torch: Any = sys.modules["torch"]
    found = _one(self)
    dtype = kwargs.pop("dtype", None)
    other = kwargs.pop("other", None)
    for one in (*args, *([other] if other is not None else [])):
        if isinstance(one, torch.dtype):
            dtype = one
        elif isinstance(one, _tensor_class()):
            dtype = one._traced.twin.dtype
        elif isinstance(one, torch.Tensor):
            dtype = one.dtype
        elif one is not None and not isinstance(one, (bool, int, str, torch.device)):
            found.refuse(f"to({one!r})")
    if not kwargs.keys() <= HARMLESS or not isinstance(dtype, torch.dtype | None):
        found.refuse(f"to with {dtype!r}, {', '.join(kwargs)}")
    return found.made(found.elements if dtype is None else found.elements.cast(dtype_name(dtype)))


def _type(self: Any, dtype: Any, non_blocking: Any = False) -> Any:
    torch: Any = sys.modules["torch"]
    if not isinstance(dtype, torch.dtype):
        _one(self).refuse(f"type({dtype!r})", "expected a torch.dtype")
    return _to(self, dtype)


OTHERS: dict[str, Callable[..., Any]] = {
    "cat": _cat,
    "concat": _cat,
    "concatenate": _cat,
    "stack": _stack,
    "vstack": _beside("atleast_2d", lambda ndim: 0),
    "hstack": _beside("atleast_1d", lambda ndim: 0 if ndim == 1 else 1),
    "dstack": _beside("atleast_3d", lambda ndim: 2),
    "column_stack": _column_stack,
    "flip": _flip,
    "roll": _roll,
    "index_select": _index_select,
    "repeat": _repeat,
    "repeat_interleave": _repeat_interleave,
    "to": _to,
    "type": _type,
    "type_as": lambda self, other: _to(self, other),
    "__hash__": id,
    "__format__": lambda self, spec: repr(self),
}
