"""A recorded call means what it means in NumPy, where the parameters are NumPy's; what is not known is refused."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import numpy as np
import pytest

from aiote.errors import UsageError
from aiote.weights import Layout, Recording, Replicate, plan_update, record
from aiote.weights.dtypes import ITEMSIZE, dtype_of, single_cast
from aiote.weights.traced import RecordError
from support.weights.recorded_updates import by_loader, by_update, untouched

SQUARE = np.arange(16, dtype=np.float32).reshape(4, 4)
OBLONG = np.arange(1, 13, dtype=np.float32).reshape(4, 3)


def check(change: Any, value: Any = SQUARE, dtype: Any = np.float32) -> None:
    """Check that an update brings what a loader brings that copies a changed array."""
    values = {"w": value}

    def load(pairs: Any, parameters: Any) -> None:
        for _, w in pairs:
            np.copyto(parameters["p"], change(w))

    shape = change(value).shape
    expected = by_loader(load, {"p": untouched(shape, dtype)}, values)["p"]
    found = by_update(load, {"p": untouched(shape, dtype)}, values)["p"]
    assert np.array_equal(found, expected)
    assert found.shape == shape


def refuse(load: Any, words: str, *parameters: Any, dtype: str = "F32") -> None:
    """Check that a loader of a tensor w and these parameters is refused."""
    own = {f"p{i}": parameter for i, parameter in enumerate(parameters)}
    with pytest.raises(RecordError, match=words):
        record(lambda pairs: load(dict(pairs)["w"], *parameters), own, {"w": ((4, 4), dtype)})


@pytest.mark.parametrize(
    "change",
    [
        lambda w: np.concatenate(np.split(w, 2)[::-1]),
        lambda w: np.split(w, [3])[0],
        lambda w: np.split(w, [1, 3], axis=1)[1],
        lambda w: np.array_split(w, 3)[0],
        lambda w: w.transpose(0, 1),
        lambda w: w.transpose(1, 0),
        lambda w: w.transpose(),
        lambda w: np.transpose(w),
        lambda w: np.transpose(w, axes=(-1, 0)),
        lambda w: w.swapaxes(0, 1),
        lambda w: w.reshape(2, 8, order="F"),
        lambda w: np.reshape(w, (8, -1), "F"),
        lambda w: w.ravel("F"),
        lambda w: w.T.flatten("F"),
        lambda w: w.T.reshape(16),
        lambda w: np.concatenate([w, w.T], axis=None),
        lambda w: np.concatenate([w.T, w], axis=-1).reshape(2, 16),
        lambda w: w[::-1, ::-2],
        lambda w: np.flip(w, (0, 1)),
        lambda w: np.roll(w, 3),
        lambda w: np.roll(w, (1, -1), (0, 1)),
        lambda w: w[[3, 0, -1]],
        lambda w: w[..., [3, 0]],
        lambda w: w.take([5, 2]),
        lambda w: np.repeat(w, 2),
        lambda w: w[1, None, 1:3],
        lambda w: w.T if isinstance(w, np.ndarray) else w,
        lambda w: w.T if w.dtype == np.float32 else w,
        lambda w: w.T if np.issubdtype(w.dtype, np.floating) else w,
        lambda w: copy.deepcopy(w)[1:],
        lambda w: w.astype(np.float64).astype("f4"),
        lambda w: np.stack([*w], 1),
        lambda w: np.column_stack([w[0], w]),
        lambda w: np.broadcast_to(w[0], (3, 4)),
        lambda w: np.copy(w, order="F").T,
    ],
)
def test_a_call_means_what_it_means_in_numpy(change):
    check(change)


@pytest.mark.parametrize("dtype", [np.float16, "e", "<f2", np.dtype("float16"), "float16"])
def test_a_conversion_is_seen_however_its_type_is_written(dtype):
    check(lambda w: w.astype(dtype), SQUARE + np.float32(0.1234567), np.float16)
    refuse(lambda w, p: np.copyto(p, w.astype(dtype)), "p0: .* from F32 to F16 to F32; a recipe converts once", SQUARE)


@pytest.mark.parametrize("dtype", [int, "i8", np.int64, "l"])
def test_a_conversion_to_whole_numbers_is_seen(dtype):
    check(lambda w: w.astype(dtype), SQUARE * np.float32(0.3), np.int64)
    refuse(
        lambda w, p: np.copyto(p, w.astype(dtype), "unsafe"), "from F32 to I64 to F32; a recipe converts once", SQUARE
    )


@pytest.mark.parametrize("dtype", [complex, "S4", object, ">f4", "nothing", np.dtype([("a", "f4")]), "M8[s]"])
def test_a_type_that_no_recipe_has_is_refused(dtype):
    refuse(lambda w, p: np.copyto(p, w.astype(dtype)), "w: the loader calls a conversion to", SQUARE.copy())


def test_a_chain_of_conversions_counts_where_a_step_changes_something():
    assert single_cast(["F16", "F32", "F16"]) == ("F16",)
    assert single_cast(["BF16", "F32", "F16"]) == ("BF16", "F16")
    assert single_cast(["F32", "F64", "F32", "F32"]) == ("F32",)
    assert single_cast(["F64", "F32", "F64"]) == ("F64", "F32", "F64")
    assert single_cast(["F64", "F32", "F16"]) == ("F64", "F32", "F16")
    assert single_cast(["F32", "I32", "F32"]) == ("F32", "I32", "F32")
    assert single_cast(["I32", "F32", "I32"]) == ("I32", "F32", "I32")
    assert single_cast(["F16", "F32", "I8"]) == ("F16", "F32", "I8")
    assert single_cast(["I32", "F64", "F16"]) == ("I32", "F64", "F16")
    assert single_cast(["I8", "I32", "U16"]) == ("I8", "U16")
    assert single_cast(["F16", "F64", "BOOL"]) == ("F16", "BOOL")


def test_a_type_that_is_left_out_has_all_values_of_the_one_before():
    for first, between in itertools.permutations(ITEMSIZE, 2):
        if single_cast([first, between, first]) == (first,):
            values = some_of(first)
            assert np.array_equal(values.astype(dtype_of(between)).astype(dtype_of(first)), values), (first, between)


def some_of(dtype: str) -> Any:
    """Return all values of a type, or of a large one 65536 all over it; none that is no number."""
    if dtype == "BOOL":
        return np.array([False, True])
    bits = 8 * ITEMSIZE[dtype]
    raw = np.arange(1 << min(bits, 16), dtype=f"u{ITEMSIZE[dtype]}")
    values = (raw * np.array(max(1, (1 << bits) >> 16), raw.dtype)).view(dtype_of(dtype))
    with np.errstate(all="ignore"):
        return values[~np.isnan(values.astype(np.float64))]


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda w, p: np.copyto(p, w, where=np.eye(4) > 0), "w: the loader calls copyto with where"),
        (lambda w, p: np.copyto(p, w, where=np.True_), "w: the loader calls copyto with where"),
        (lambda w, p: np.copyto(p, w, where=w), "w: the loader calls copyto with where"),
        (lambda w, p: np.copyto(w, p), "w: the loader calls copyto"),
        (lambda w, p: np.copyto(p, w.astype("f8"), casting="no"), "copyto with casting='no', which does not allow"),
        (lambda w, p: np.copyto(p, w, casting="any"), "w: the loader calls copyto, which fails"),
        (lambda w, p: np.copyto(p, w, subok=True), "unexpected keyword argument 'subok'"),
        (lambda w, p: p.__setitem__((), w), "w: .*read-only"),
        (lambda w, p: p.__setitem__(slice(0, 8), w), r"w: .* numpy.copyto\(parameter\[index\], tensor\)"),
        (lambda w, p: p.__iadd__(w), "w: the loader calls add"),
        (lambda w, p: np.add(w, 0, out=p), "w: the loader calls add"),
        (lambda w, p: np.concatenate([w], out=p), "w: the loader calls concatenate with out"),
        (lambda w, p: np.stack([w[0], w[1]], out=p[:2]), "w: the loader calls stack with out"),
        (lambda w, p: w.take([0], out=p), "w: the loader calls take, with out="),
        (lambda w, p: np.put(p, [0], w), "w: "),
        (lambda w, p: np.place(p, p > 0, w), "w: "),
        (lambda w, p: np.copyto(p, np.where(p > 0, w, 0)), "w: the loader calls where"),
        (lambda w, p: np.copyto(p, np.einsum("ij->ji", w)), "w: the loader calls einsum"),
        (lambda w, p: np.copyto(p, w.reshape(4, 4, order="A")), "reshape with order='A', which depends on how"),
        (lambda w, p: np.copyto(p, w.ravel("K").reshape(4, 4)), "reshape with order='K', which depends on how"),
        (lambda w, p: np.copyto(p, w.view(np.int32)), "w: the loader calls view"),
        (lambda w, p: np.copyto(p, np.concatenate([w[:2], p[:2]])), "concatenate, with arrays that are none of"),
        (lambda w, p: np.copyto(p, np.atleast_1d(w, p)[0]), "atleast_1d, with arrays that are none of"),
        (lambda w, p: np.copyto(p, w[0, :, [1, 0]]), "several indices with a list"),
        (lambda w, p: np.copyto(p, w.narrow(0, 0, 4)), "w: the loader uses narrow, which numpy arrays do not have"),
        (lambda w, p: np.copyto(p, w if w.flags.c_contiguous else w.T), "w: the loader calls flags"),
        (lambda w, p: np.copyto(p, w if w.strides[0] == 16 else w.T), "w: the loader calls strides"),
        (lambda w, p: setattr(w, "shape", (2, 8)), "w: the loader calls setting shape"),
        (lambda w, p: w.sort(), "w: the loader calls sort"),
        (lambda w, p: w.__setitem__(0, 1), "w: the loader calls an assignment to its elements"),
        (lambda w, p: np.frombuffer(w), "w: the loader, or a call that it makes .* TypeError"),
        (lambda w, p: pickle.dumps(w), "w: the loader reads its values"),
        (lambda w, p: np.copyto(p, list(w)), "w: the loader reads its values"),
        (lambda w, p: np.copyto(p, np.broadcast_to(np.asarray(w), (4, 4))), "w: the loader reads its values"),
    ],
)
def test_what_is_not_known_is_refused(write, words):
    parameter = SQUARE.copy()
    refuse(write, words, parameter)
    assert np.array_equal(parameter, SQUARE)
    assert parameter.flags.writeable


def swallow(call: Any) -> None:
    try:
        call()
    except Exception:
        return


def test_a_refusal_that_the_loader_catches_is_told():
    def load(w: Any, p: Any) -> None:
        np.copyto(p, w)
        swallow(lambda: np.negative(w))

    refuse(load, "w: the loader calls negative", SQUARE.copy())
    refuse(lambda w, p: swallow(lambda: np.copyto(p[:, ::-1], w, where=False)), "copyto with where", SQUARE.copy())
    refuse(lambda w, p: getattr(w, "sum", None), "w: the loader calls sum", SQUARE.copy())


@pytest.mark.parametrize(
    "spoil", [lambda p: p.__imul__(2), lambda p: p.fill(0), lambda p: np.copyto(p, p.T), lambda p: p.sort()]
)
def test_a_parameter_that_is_changed_by_something_else_is_refused(spoil):
    memory = np.zeros((8, 4), np.float32)

    def load(w: Any, p: Any) -> None:
        np.copyto(p, w)
        spoil(p)

    refuse(load, "w: the loader changes a parameter by another call", SQUARE.copy())
    # The same through the array that the parameter is a view of.
    refuse(lambda w, p: memory.fill(1), "w: the loader changes a parameter by another call", memory[:4])
    assert memory.flags.writeable


def test_a_copy_beyond_a_parameter_is_refused():
    memory = np.zeros((4, 8), np.float32)
    words = "p0: the loader's copy from w cannot be described as boxes: it goes beyond the array"
    refuse(lambda w, p: np.copyto(memory[:, 2:6], w), words, memory[:, :4])
    refuse(lambda w, p: np.copyto(memory.reshape(-1)[:16].reshape(4, 4), w), words, memory[:, :4])
    refuse(lambda w, p: np.copyto(memory[:2].reshape(4, 4), w), words, memory[:, ::2])


def test_a_copy_of_several_elements_to_one_is_refused():
    memory = np.zeros(16, np.float32)
    windows = np.lib.stride_tricks.as_strided(memory, (4, 4), (0, 4), writeable=True)
    refuse(lambda w, p: np.copyto(windows, w), "p0: the loader copies several elements of w to one place", memory)


def test_parameters_of_an_unknown_kind_are_refused():
    for wrong in ([1.0], np.zeros(2, complex), np.broadcast_to(np.float32(1), (4,)), np.zeros(4, np.float32)[::-1]):
        with pytest.raises(UsageError, match="parameter p: "):
            record(lambda pairs: None, {"p": wrong}, {})
    refuse(lambda w, p: np.copyto(p, w), "w: .*copyto to MaskedArray", np.ma.masked_array(SQUARE.copy()))


def test_an_empty_parameter_is_recorded():
    values = {"w": SQUARE}
    empty = {
        "none": untouched((0, 4), np.float32),
        "flat": untouched((3, 0, 2), np.float16),
        "p": untouched((4, 4), np.float32),
    }

    def load(pairs: Any, parameters: Any) -> None:
        for _, w in pairs:
            np.copyto(parameters["none"], w[4:])
            np.copyto(parameters["none"][:, 1:3], w[2:2, :2])
            np.copyto(parameters["p"], w)

    found = by_update(load, empty, values)
    assert found["none"].shape == (0, 4)
    assert np.array_equal(found["p"], SQUARE)
    with pytest.raises(UsageError, match="wrote nothing to 1 parameters: p"):
        Recording.merge({0: record(lambda pairs: load([], empty), empty, {"w": ((4, 4), "F32")})})


def test_ranks_of_which_one_has_an_empty_parameter_are_merged():
    def recording(rows: slice) -> Recording:
        parameter = np.zeros((4, 4), np.float32)[rows]
        return record(
            lambda pairs: [np.copyto(parameter, w[rows]) for _, w in pairs], {"p": parameter}, {"w": ((4, 4), "F32")}
        )

    targets, recipe = Recording.merge({0: recording(slice(4)), 1: recording(slice(4, 4))})
    assert targets.tensors["p"].shape == (4, 4)
    assert targets.tensors["p"].ranks == ((0,),)
    assert Layout.from_description(targets.describe()).tensors == targets.tensors
    plan = plan_update(Layout.over([0], {"w": ((4, 4), "F32", Replicate())}), targets, recipe)
    assert plan.traffic.sent == {0: 64}
