"""Recipes recorded from loaders: on values, plan and loader bring the same to every element of every parameter."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote.errors import UsageError
from aiote.weights import Layout, Recipe, Recording, Replicate, Shard, plan_update, quantized, record
from aiote.weights.traced import Elements, RecordError
from aiote.weights.traced_numpy import TracedArray
from support.weights import plans as weight_plans

HIDDEN, HEADS, KV_HEADS, SIZE, INNER, EXPERTS, WORDS, PADDED = 16, 4, 1, 4, 8, 4, 10, 16
SHAPES = {
    "embed": (WORDS, HIDDEN),
    "norm": (HIDDEN,),
    "scalar": (),
    "q": (HEADS * SIZE, HIDDEN),
    "k": (KV_HEADS * SIZE, HIDDEN),
    "v": (KV_HEADS * SIZE, HIDDEN),
    "o": (HIDDEN, HEADS * SIZE),
    "mlp.gate_up": (2 * INNER, HIDDEN),
    "inv_freq": (SIZE // 2,),
    **{f"experts.{e}.{kind}": (INNER, HIDDEN) for e in range(EXPERTS) for kind in ("gate", "up")},
    **{f"experts.{e}.down": (HIDDEN, INNER) for e in range(EXPERTS)},
}
SOURCES = {name: (shape, "F64") for name, shape in SHAPES.items()}
RANKS = 2


class Engine:
    """One tensor-parallel rank of an inference engine, with its parameters and a loader such as vLLM's models have."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        heads, inner, words = HEADS // RANKS, INNER // RANKS, PADDED // RANKS
        shapes = {
            "embed": (words, HIDDEN),
            "norm": (HIDDEN,),
            "scalar": (),
            "qkv": ((heads + 2 * KV_HEADS) * SIZE, HIDDEN),
            "o": (HIDDEN, heads * SIZE),
            "gate_up": (HIDDEN, 2 * inner),
            "w13": (EXPERTS, 2 * inner, HIDDEN),
            "w2": (EXPERTS, inner, HIDDEN),
            "rotary": (SIZE // 2,),
        }
        self.parameters = {name: np.full(shape, weight_plans.UNTOUCHED) for name, shape in shapes.items()}

    def share(self, tensor: Any, dim: int) -> Any:
        """Return this rank's part of a tensor."""
        size = tensor.shape[dim] // RANKS
        return np.swapaxes(np.swapaxes(tensor, 0, dim)[self.rank * size : (self.rank + 1) * size], 0, dim)

    def load_weights(self, weights: Any) -> None:
        for name, loaded in weights:
            if name == "inv_freq":
                continue
            if name.startswith("experts."):
                self.load_expert(int(name.split(".")[1]), name.split(".")[2], loaded)
            elif name in ("q", "k", "v"):
                self.load_heads(name, loaded)
            elif name == "mlp.gate_up":
                # Kept transposed, gate and up interleaved on every rank.
                both = loaded.reshape(2, INNER, HIDDEN)
                for i in range(2):
                    np.copyto(self.parameters["gate_up"][:, i::2], self.share(both[i], 0).T)
            elif name == "embed":
                rows = PADDED // RANKS
                mine = loaded[self.rank * rows : (self.rank + 1) * rows]
                np.copyto(self.parameters["embed"][: mine.shape[0]], mine)
            else:
                np.copyto(self.parameters[name], self.share(loaded, 1) if name == "o" else loaded)

    def load_heads(self, name: str, loaded: Any) -> None:
        # There are fewer heads of k and v than ranks: each rank has all of them.
        q = HEADS // RANKS * SIZE
        start = {"q": 0, "k": q, "v": q + KV_HEADS * SIZE}[name]
        mine = self.share(loaded, 0) if name == "q" else loaded
        np.copyto(self.parameters["qkv"][start : start + mine.shape[0]], mine)

    def load_expert(self, expert: int, kind: str, loaded: Any) -> None:
        if kind == "down":
            np.copyto(self.parameters["w2"][expert], np.transpose(self.share(loaded, 1)))
            return
        inner = INNER // RANKS
        begin = 0 if kind == "gate" else inner
        np.copyto(self.parameters["w13"][expert, begin : begin + inner], self.share(loaded, 0))


def recorded(engines: list[Engine]) -> dict[int, Recording]:
    found = {engine.rank: record(engine.load_weights, engine.parameters, SOURCES) for engine in engines}
    # They travel from rank to rank.
    return {r: Recording.from_description(json.loads(json.dumps(one.describe()))) for r, one in found.items()}


def values() -> dict[str, Any]:
    made, first = {}, 0
    for name, shape in SHAPES.items():
        made[name] = np.arange(first, first + np.prod(shape), dtype=np.float64).reshape(shape)
        first += made[name].size
    return made


def test_a_plan_brings_what_the_loader_loads():
    engines = [Engine(rank) for rank in range(RANKS)]
    targets, recipe = Recording.merge(recorded(engines), unused=["inv_freq"], untouched=["rotary"])
    assert all((array == weight_plans.UNTOUCHED).all() for engine in engines for array in engine.parameters.values())
    sources = Layout.over(
        range(3), {n: (*SOURCES[n], Shard(0) if shape else Replicate()) for n, shape in SHAPES.items()}
    )
    everything = values()
    plan = plan_update(sources, targets, recipe)
    memory, count = weight_plans.carry_out(plan, weight_plans.hold(sources, everything))
    for engine in engines:
        engine.load_weights(everything.items())
        for name, array in engine.parameters.items():
            assert np.array_equal(memory[engine.rank][name].reshape(array.shape), array), name
            assert count[engine.rank][name].max() <= 1


def test_what_ranks_have_alike_is_one_tensor():
    targets, recipe = Recording.merge(recorded([Engine(0), Engine(1)]), unused=["inv_freq"], untouched=["rotary"])
    assert targets.tensors["norm"].shape == (HIDDEN,)
    assert targets.tensors["norm"].ranks == ((0, 1),)
    assert targets.tensors["qkv"].shape == (2 * (HEADS // RANKS + 2 * KV_HEADS) * SIZE, HIDDEN)
    assert recipe.is_unused("inv_freq")
    assert set(recipe.targets) == set(targets.tensors) - {"rotary"}


def test_parameters_that_nothing_was_loaded_to_are_named():
    with pytest.raises(UsageError, match="wrote nothing to 1 parameters: rotary; list them as untouched"):
        Recording.merge(recorded([Engine(0)]))


def test_a_recorded_target_can_be_quantized():
    parameters = {"w": np.zeros((4, 4), np.int8)}
    sources = {"x": ((4, 4), "F32")}
    targets, recipe = Recording.merge({0: record(lambda pairs: copy_all(pairs, parameters["w"]), parameters, sources)})
    layout = Layout({**targets.tensors, **Layout.over([0], {"s": ((2, 2), "F32", Replicate())}).tensors})
    rule = Recipe({"w": quantized(recipe.targets["w"], scale="s", block=(2, 2))})
    sources = Layout.over(range(2), {"x": ((4, 4), "F32", Shard(0))})
    assert sum(plan_update(sources, layout, rule).traffic.sent.values()) == 16 + 16


def copy_all(pairs: Any, parameter: Any) -> None:
    for _, loaded in pairs:
        np.copyto(parameter, loaded, casting="unsafe")


def copy_changed(change: Any) -> Any:
    def load(pairs: Any, parameters: dict[str, Any]) -> None:
        for _, loaded in pairs:
            np.copyto(parameters["w"], change(loaded))

    return load


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (copy_changed(lambda x: x * 2), "x: the loader calls multiply"),
        (copy_changed(lambda x: np.tanh(x)), "x: the loader calls tanh"),
        (copy_changed(lambda x: x.sum()), "x: the loader calls sum"),
        (
            copy_changed(lambda x: x.repeat_interleave(2)),
            "x: the loader uses repeat_interleave, which numpy arrays",
        ),
        (copy_changed(lambda x: x[x > 0]), "x: the loader calls greater"),
        (copy_changed(lambda x: x[np.eye(4) > 0]), "x: the loader calls an index of list, with array"),
        (copy_changed(lambda x: x if x else x.T), "x: the loader reads its values"),
        (copy_changed(lambda x: x if float(x[0, 0]) else x.T), "x: the loader reads its values"),
        (copy_changed(lambda x: x.reshape(4, 5)), r"x: the loader calls reshape, but \(4, 4\) cannot have the shape"),
        (copy_changed(lambda x: x[:3]), "x: the loader calls copyto, which fails: .* broadcast"),
        (copy_changed(lambda x: x[5]), "x: the loader calls an index of 5, which fails"),
        (copy_changed(lambda x: np.split(x, 3)[0]), "x: the loader calls split, which fails"),
        (copy_changed(lambda x: x.astype("e").astype("f4")), "w: the loader converts x from F32 to F16 to F32 to F32"),
        (lambda pairs, p: [p["w"].__setitem__(0, x) for _, x in pairs], r"x: .* numpy.copyto\(parameter\[index\], "),
        (lambda pairs, p: [np.copyto(np.zeros((4, 4)), x) for _, x in pairs], "x: .* not a parameter"),
        (lambda pairs, p: [np.copyto(p["w"].view(np.int32), x, "unsafe") for _, x in pairs], "w: .* as I32"),
        (lambda pairs, p: [np.copyto(p["w"][a : a + 2], x[:2]) for _, x in pairs for a in (0, 1)], "w: .* overlap"),
    ],
)
def test_what_no_recipe_can_say_is_refused_by_name(load, words):
    parameters = {"w": np.zeros((4, 4), np.float32)}
    with pytest.raises(UsageError, match=words):
        record(lambda pairs: load(pairs, parameters), parameters, {"x": ((4, 4), "F32")})


def test_a_loader_may_ask_what_a_tensor_has():
    def load(pairs: Any) -> None:
        for name, x in pairs:
            assert (name, x.shape, x.ndim, x.size, len(x), x.itemsize, x.nbytes) == ("x", (4, 4), 2, 16, 4, 4, 64)
            assert (x.dtype, isinstance(x, np.ndarray)) == (np.dtype(np.float32), True)
            assert not hasattr(x, "is_quantized")
            assert getattr(x, "block", None) is None

    record(load, {"w": np.zeros(1)}, {"x": ((4, 4), "F32")})


def test_parameters_that_lie_in_each_other_s_gaps_are_told_apart():
    memory = np.zeros((4, 8))
    parameters = {"q": memory[:, :4], "k": memory[:, 4:]}

    def load(pairs: Any) -> None:
        for name, loaded in pairs:
            np.copyto(parameters[name][1:], loaded[1:])

    made = record(load, parameters, dict.fromkeys(parameters, ((4, 4), "F64")))
    for name, parameter in made.parameters.items():
        (part,) = parameter.parts
        assert part == (name, (1, 0), (1, 0), (3, 4), (0, 1))


def test_a_description_of_something_else_is_refused():
    for wrong in ({}, {"parameters": 1, "sources": {}}, {"parameters": {"w": ["F32", [1]]}, "sources": {}}):
        with pytest.raises(UsageError, match="not the description of a recording"):
            Recording.from_description(wrong)


def test_sources_that_changed_since_are_refused():
    parameters = {"w": np.zeros((4, 4), np.float32)}
    made = {0: record(lambda pairs: copy_all(pairs, parameters["w"]), parameters, {"x": ((4, 4), "F32")})}
    targets, recipe = Recording.merge(made)
    with pytest.raises(UsageError, match=r"w: x is F32 \(5, 4\), but was F32 \(4, 4\)"):
        plan_update(Layout.over([0], {"x": ((5, 4), "F32", Shard(0))}), targets, recipe)


class Nowhere:
    def copied(self, target: Any, elements: Any) -> None:
        raise AssertionError("nothing is copied here")

    def refused(self, error: RecordError) -> RecordError:
        return error


def elements(traced: Any, iota: Any) -> Any:
    """Return the elements that a traced array stands for."""
    found = np.full(traced.shape, -1)
    for piece in traced._elements.pieces():
        strides = [8 * stride for stride in piece.strides]
        box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.extent, strict=True))
        found[box] = np.lib.stride_tricks.as_strided(iota[piece.offset :], piece.extent, strides)
    return found


@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_a_traced_array_does_what_an_array_does(data, shape):
    iota = np.arange(np.prod(shape))
    array, traced = iota.reshape(shape), TracedArray(Nowhere(), Elements.of("x", tuple(shape), "I64"))
    for _ in range(data.draw(st.integers(0, 5))):
        change = data.draw(st.sampled_from(CHANGES))(data, array.shape)
        array, traced = change(array), change(traced)
        assert traced.shape == array.shape
    assert np.array_equal(elements(traced, iota), array)


def a_slice(data: Any, shape: tuple[int, ...]) -> Any:
    several = []
    for extent in shape:
        first = data.draw(st.integers(0, extent - 1))
        several.append(data.draw(st.sampled_from([slice(first, extent), slice(None, None, 2), first, slice(None)])))
    return lambda x: x[tuple(several)] if any(not isinstance(one, int) for one in several) else x


def an_order(data: Any, shape: tuple[int, ...]) -> Any:
    order = data.draw(st.permutations(range(len(shape))))
    return lambda x: np.transpose(x, order)


def another_shape(data: Any, shape: tuple[int, ...]) -> Any:
    size = int(np.prod(shape))
    first = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    return lambda x: x.reshape(first, -1)


def twice(data: Any, shape: tuple[int, ...]) -> Any:
    dim = data.draw(st.integers(0, len(shape) - 1))
    return lambda x: np.concatenate([x, x], axis=dim)


def stacked(data: Any, shape: tuple[int, ...]) -> Any:
    dim = data.draw(st.integers(0, len(shape)))
    return lambda x: np.stack([x, x], axis=dim)


CHANGES = [a_slice, an_order, another_shape, twice, stacked]


@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_every_copy_of_a_view_into_a_view_is_said_by_boxes(data, shape):
    """A view of a source goes into a view of a parameter of the same shape; the plan writes just that."""
    iota = np.arange(np.prod(shape), dtype=np.float64)
    change = data.draw(st.sampled_from([a_slice, an_order, another_shape]))(data, tuple(shape))
    taken = change(iota.reshape(shape))
    order = data.draw(st.permutations(range(taken.ndim)))
    step = data.draw(st.sampled_from([1, 2]))
    big = tuple(taken.shape[d] * step for d in order)
    parameter = np.full(big, weight_plans.UNTOUCHED)
    view = parameter[tuple(slice(None, None, step) for _ in big)].transpose(np.argsort(order))

    def load(pairs: Any) -> None:
        for _, loaded in pairs:
            np.copyto(view, change(loaded))

    made = record(load, {"w": parameter}, {"x": (tuple(shape), "F64")})
    targets, recipe = Recording.merge({0: made})
    sources = Layout.over(range(2), {"x": (tuple(shape), "F64", Shard(0))})
    store = weight_plans.hold(sources, {"x": iota.reshape(shape)})
    memory, _ = weight_plans.carry_out(plan_update(sources, targets, recipe), store)
    np.copyto(view, taken)
    assert np.array_equal(memory[0]["w"].reshape(big), parameter)
