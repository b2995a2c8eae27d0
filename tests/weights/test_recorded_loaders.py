"""Loaders drawn out of all that NumPy and torch offer: an update brings what the loader makes, or it is refused.

A seed is a loader. What is printed for one that fails says every step of it.
"""

from __future__ import annotations

import importlib
import itertools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiote.weights.traced import RecordError
from support import machine
from support.weights.drawn_loaders import Drawn
from support.weights.recorded_updates import by_loader, by_update, differing, untouched

LOADERS = 10_000 if machine.LONG else 300
RECORDED = 0.7
"""So much of what works on arrays is recorded at least: to refuse everything would be right, and of no use."""
LIBRARIES = [pytest.param("numpy"), pytest.param("torch", marks=pytest.mark.needs_torch)]


def outcome(load: Callable[..., Any], parameters: Callable[[], Any], values: Any) -> str:
    """Return whether a loader's update is the same as the loader, is refused, or is something else."""
    try:
        with np.errstate(all="ignore"):
            expected = by_loader(load, parameters(), values)
    except Exception as error:
        expected = error
    try:
        found = by_update(load, parameters(), values)
    except RecordError as error:
        return "fails by itself" if isinstance(expected, Exception) else f"refused: {error}"
    except Exception as error:
        # The loader's own error comes out as it is.
        same = isinstance(expected, Exception) and type(error) is type(expected)
        return "fails by itself" if same else f"raises {error!r}"
    if isinstance(expected, Exception):
        return f"brings {found}, the loader raises {expected!r}"
    wrong = differing(expected, found)
    return f"brings {found}, the loader makes {expected}" if wrong else "the same"


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_update_brings_what_the_loader_makes_or_its_loader_is_refused(library):
    offered = importlib.import_module(f"support.weights.{library}_loaders")
    found: Counter[str] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(LOADERS):
            loader = Drawn(offered, seed)
            what = outcome(loader.load, loader.parameters, loader.values)
            kind = what.split(":")[0]
            assert kind in ("the same", "refused", "fails by itself"), f"seed {seed}: {loader.text} {what}"
            found[kind] += 1
    assert found["the same"] >= RECORDED * (found["the same"] + found["refused"]), found
    assert found["fails by itself"] < LOADERS // 3, found
    assert found["refused"], "some of what is drawn no recipe can say"


FILES = {"save", "savez", "savez_compressed", "savetxt", "tofile", "dump", "dumps", "load", "fromfile", "genfromtxt"}
FILES |= {"loadtxt", "fromregex", "memmap", "open_memmap", "test", "info", "show_config", "show_runtime", "setbufsize"}
FILES |= {"seterr", "seterrcall", "set_printoptions", "lookfor", "source", "who", "disp", "save_compiled", "getbuffer"}
ARGUMENTS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((1,), {}),
    ((-2,), {}),
    ((0, 1), {}),
    (((2, 2),), {}),
    (([1, 0],), {}),
    ((), {"axis": 0}),
    ((), {"axis": -1}),
    ((), {"dim": 0}),
    ((np.float16,), {}),
    ((2, -1), {}),
    ((1, 0, 1), {}),
    ((), {"order": "F"}),
    ((), {"copy": True}),
    ((), {"dtype": np.float64}),
]


def everything(library: str) -> list[tuple[str, Callable[..., Any]]]:
    """Return every function of a library, and every method and property of its arrays, called on one."""
    module: Any = importlib.import_module(library)
    kind = module.ndarray if library == "numpy" else module.Tensor
    names = [name for name in dir(kind) if name not in FILES and name not in UNSAFE]
    calls: list[tuple[str, Callable[..., Any]]] = []
    for name in names:
        calls.append((f"x.{name}", lambda x, *args, name=name, **kw: _method(x, name, args, kw)))
    # What torch offers as a function it offers as a method, but for these: others change the process.
    functions = dir(module) if library == "numpy" else [name for name in dir(module) if hasattr(kind, name)]
    for name in functions:
        function = getattr(module, name)
        if callable(function) and not isinstance(function, type) and name not in FILES | UNSAFE and name[0] != "_":
            calls.append((name, function))
            calls.append((f"{name} of a list", lambda x, *args, f=function, **kw: f([x, x], *args, **kw)))
    return calls


UNSAFE = {
    "__class__",
    "__init__",
    "__new__",
    "__init_subclass__",
    "__subclasshook__",
    "__del__",
    "__sizeof__",
    "__dir__",
}
UNSAFE |= {"share_memory_", "storage", "untyped_storage", "register_hook", "backward", "__setattr__", "__delattr__"}
UNSAFE |= {"__getattribute__", "__reduce__", "__reduce_ex__", "set_", "_typed_storage", "reinforce", "module_load"}


def _method(x: Any, name: str, args: Any, kwargs: Any) -> Any:
    found = getattr(x, name)
    return found(*args, **kwargs) if callable(found) else found


def writers(library: str) -> Callable[[Any, Any], Any]:
    if library == "numpy":
        return lambda p, x: np.copyto(p, x, casting="unsafe")
    return lambda p, x: p.copy_(x)


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_call_of_a_library_means_what_it_means_there_or_is_refused(library):
    module: Any = importlib.import_module(library)
    write = writers(library)
    values = {"w": np.arange(1, 5, dtype=np.float32).reshape(2, 2)}
    if library == "torch":
        values = {"w": module.from_numpy(values["w"])}
    recorded = set()
    for (name, call), (args, kwargs) in itertools.product(everything(library), ARGUMENTS):
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            made = shape_made(module, call, values["w"], args, kwargs)
            if made is None:
                continue

            def parameters(made: Any = made) -> dict[str, Any]:
                return {
                    "p": module.full(made, -1, dtype=module.float32)
                    if library == "torch"
                    else untouched(made, np.float32)
                }

            def load(pairs: Any, own: Any, call: Any = call, args: Any = args, kwargs: Any = kwargs) -> None:
                for _, x in pairs:
                    write(own["p"], one_of(module, call(x, *args, **kwargs)))

            what = outcome(load, parameters, values)
        kind = what.split(":")[0]
        assert kind in ("the same", "refused", "fails by itself"), f"{name} {args} {kwargs} {what}"
        if kind == "the same":
            recorded.add(name)
    assert {"x.reshape", "x.transpose", "x.swapaxes", "reshape", "transpose", "x.T"} <= recorded


def shape_made(module: Any, call: Any, x: Any, args: Any, kwargs: Any) -> tuple[int, ...] | None:
    """Return the shape of what a call makes of an array, None where that is no array."""
    x = x.copy() if module is np else x.clone()
    try:
        return tuple(one_of(module, call(x, *args, **kwargs)).shape)
    except Exception:
        return None


def one_of(module: Any, found: Any) -> Any:
    """Return the array that a call has made, the last of several."""
    if isinstance(found, (list, tuple)):
        return one_of(module, found[-1])
    if not isinstance(found, module.ndarray if module is np else module.Tensor) or not is_number(found):
        raise TypeError("no array of numbers")
    return found


def is_number(array: Any) -> bool:
    kind = getattr(array.dtype, "kind", "")
    return kind in "fiu" if kind else array.dtype.is_floating_point or not array.dtype.is_complex
