"""What ranks hold, by placements, buffers and modules."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote.errors import UsageError
from aiote.weights import Layout, Mesh, Replicate, Runs, Shard, StridedShard, Tensor, TensorBuffer, packed, slots
from aiote.weights.dtypes import ITEMSIZE, dtype_name
from support.weights.plans import hold
from support.weights.random_layouts import tensors


def rows(extent: int, mesh: Any, *placements: Any) -> dict[int, list[int]]:
    """Return the indices of a vector that each rank holds, in the order of its memory."""
    layout = Layout.over(Mesh.of(mesh), {"x": ((extent,), "F32", placements)})
    store = hold(layout, {"x": np.arange(extent, dtype=float)})
    return {rank: held["x"].astype(int).tolist() for rank, held in store.items() if held}


def test_shards_are_those_of_torch_chunk():
    assert rows(10, range(4), Shard(0)) == {0: [0, 1, 2], 1: [3, 4, 5], 2: [6, 7, 8], 3: [9]}
    assert rows(5, range(4), Shard(0)) == {0: [0, 1], 1: [2, 3], 2: [4]}  # rank 3 has nothing


def test_axes_of_a_mesh_split_a_dimension_in_order():
    assert rows(8, [[0, 1], [2, 3]], Shard(0), Shard(0)) == {0: [0, 1], 1: [2, 3], 2: [4, 5], 3: [6, 7]}
    assert rows(4, [[0, 1], [2, 3]], Replicate(), Shard(-1)) == {0: [0, 1], 1: [2, 3], 2: [0, 1], 3: [2, 3]}


def test_strided_shards_are_where_fsdp2_has_them():
    # Seen with torch 2.13 on gloo: 7 rows, tensor parallel over 2, then fully_shard over 3.
    mesh = [[0, 1], [2, 3], [4, 5]]
    assert rows(7, mesh, StridedShard(0, 2), Shard(0)) == {0: [0, 1], 1: [4], 2: [2, 3], 3: [5], 5: [6]}


def test_packed_parts_are_split_each_by_itself():
    assert rows(12, range(2), packed(0, 2, 4, 8)) == {0: [0, 1, 4, 5, 6, 7], 1: [2, 3, 8, 9, 10, 11]}
    # Four ranks, four query heads of one row each, two heads of keys: neighbours have the same one.
    assert rows(6, range(4), packed(0, 4, (4, 4), (2, 2))) == {0: [0, 4], 1: [1, 4], 2: [2, 5], 3: [3, 5]}
    with pytest.raises(UsageError, match="cannot be divided"):
        packed(0, 4, (6, 3))


def test_experts_are_placed_by_their_table():
    assert rows(4, range(2), slots(0, [[3, 0, 0], [1, 2]])) == {0: [3, 0, 0], 1: [1, 2]}


def test_a_shard_that_is_split_again_keeps_its_order():
    # Runs that two more ranks share: each takes a half of what lies in memory.
    assert rows(4, [[0, 1], [2, 3]], slots(0, [[3, 0], [1, 2]]), Shard(0)) == {0: [3], 1: [0], 2: [1], 3: [2]}


@pytest.mark.parametrize(
    ("extent", "mesh", "placements", "words"),
    [
        (4, (2,), (Shard(1),), "dimension 1"),
        (4, (2, 2), (Shard(0),), "one for each"),
        (4, (2, 2), (StridedShard(0, 2), Replicate()), "needs a later mesh axis"),
        (4, (2, 2), (StridedShard(0, 3), Shard(0)), "into 2 places"),
        (4, (2,), (Runs(0, (((0, 4),),)),), "1 places on an axis of 2"),
        (4, (2,), (Runs(0, (((0, 5),), ())),), "within 0 to 4"),
        (4, (2, 2), (Shard(0), Runs(0, ((), ()))), "first that splits"),
        (4, (2,), ("S(0)",), "expected Replicate"),
    ],
)
def test_placements_that_do_not_fit_are_refused(extent, mesh, placements, words):
    with pytest.raises(UsageError, match=words):
        Layout.over(Mesh(tuple(range(math.prod(mesh))), mesh), {"x": ((extent,), "F32", placements)})


def test_a_mesh_has_every_rank_once():
    assert Mesh.of(np.arange(6).reshape(2, 3)) == Mesh(tuple(range(6)), (2, 3))
    for ranks, shape in [((0, 0), (2,)), ((0,), (2,)), ((), (0,)), ((-1,), (1,))]:
        with pytest.raises(UsageError):
            Mesh(ranks, shape)


@pytest.mark.parametrize(
    ("given_name", "name"),
    [
        ("BF16", "BF16"),
        ("torch.bfloat16", "BF16"),
        ("torch.float8_e4m3fn", "F8_E4M3"),
        (np.dtype("float32"), "F32"),
        (np.float16, "F16"),
        ("int64", "I64"),
        ("bool", "BOOL"),
    ],
)
def test_types_have_the_names_of_safetensors(given_name, name):
    assert dtype_name(given_name) == name


def test_unknown_types_are_refused():
    with pytest.raises(UsageError, match="expected one of"):
        dtype_name("float4_e2m1")
    assert set(ITEMSIZE.values()) == {1, 2, 4, 8}


# --- buffers ---


def test_buffers_of_several_ranks_make_one_tensor():
    parts = [
        Layout.of_buffers(r, {"x": TensorBuffer((4, 6), "F32", (2 * r, 0), (2 * r + 2, 6), (8, 1))}) for r in range(2)
    ]
    both = Layout.merge(parts)
    assert both.ranks == (0, 1)
    assert [held.strides for held in both.tensors["x"].sharding.held] == [(8, 1)] * 2
    assert both.tensors["x"].nbytes == 96


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        (TensorBuffer((4,), "F32", (2,), (5,)), "leaves the tensor's shape"),
        (TensorBuffer((4,), "F32", (0, 0)), "differ in length"),
        (TensorBuffer((4,), "F32", strides=(-1,)), "from 0"),
        (TensorBuffer((4, 4), "F32", strides=(2, 1)), "share one place"),
        (TensorBuffer((4, 4), "F32", strides=(0, 1)), "share one place"),
        (TensorBuffer((4,), "F5"), "dtype"),
    ],
)
def test_impossible_buffers_are_refused_by_name(buffer, words):
    with pytest.raises(UsageError, match=rf"x: .*{words}"):
        Layout.of_buffers(0, {"x": buffer})


def test_ranks_with_a_mask_are_refused():
    with pytest.raises(UsageError, match="the ranks of a mesh: it has a mask"):
        Mesh.of(np.ma.arange(4))


def test_descriptions_that_disagree_are_refused():
    one = Layout.of_buffers(0, {"x": TensorBuffer((4,), "F32")})
    for other in (TensorBuffer((5,), "F32"), TensorBuffer((4,), "F16")):
        with pytest.raises(UsageError, match="x: it is"):
            Layout.merge([one, Layout.of_buffers(1, {"x": other})])
    with pytest.raises(UsageError, match="in two ways"):
        Layout.merge([one, Layout.of_buffers(0, {"x": TensorBuffer((4,), "F32", (0,), (2,))})])


@given(st.data(), st.lists(st.integers(1, 9), max_size=3))
def test_a_layout_travels_as_json(data, shape):
    layout = Layout({name: data.draw(tensors(tuple(shape), "BF16", 6)) for name in "abc"})
    again = Layout.from_description(json.loads(json.dumps(layout.describe())))
    assert again.tensors == layout.tensors
    assert again.digest() == layout.digest()


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("shardings"),
        lambda d: d["tensors"].update(x=["F32", 9, 0]),
        lambda d: d["tensors"].update(x=["F99", 0, 0]),
        lambda d: d["tensors"].update(x=7),
        lambda d: d["ranks"][0].append([5]),
        lambda d: d["shardings"][0][1][0][0][0].__setitem__(1, [9]),
        lambda d: d["shardings"][0][1][0][0][0].__setitem__(2, [1]),
        lambda d: d["shardings"][0].__setitem__(0, None),
    ],
)
def test_a_description_that_was_changed_is_refused(change):
    layout = Layout.over(range(2), {"x": ((4,), "F32", Shard(0))})
    description = json.loads(json.dumps(layout.describe()))
    change(description)
    with pytest.raises(UsageError):
        Layout.from_description(description)


# --- modules, by stand-ins that have what torch's have ---


@dataclass
class FakeMesh:
    mesh: np.ndarray


class FakeTensor:
    """What `of_module` asks of a torch tensor, and of a DTensor if it has placements."""

    def __init__(self, shape: tuple[int, ...], mesh: Any = None, placements: Any = None, local: Any = None) -> None:
        self.shape, self.dtype, self._local = shape, "torch.bfloat16", local
        if mesh is not None:
            self.device_mesh, self.placements = FakeMesh(np.asarray(mesh)), placements

    def to_local(self) -> FakeTensor:
        return FakeTensor(self._local)

    def stride(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[d + 1 :]) for d in range(len(self.shape)))

    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass
class FakePlacement:
    kind: str
    dim: int = 0

    def is_shard(self) -> bool:
        return self.kind == "shard"

    def is_replicate(self) -> bool:
        return self.kind == "replicate"

    def is_partial(self) -> bool:
        return self.kind == "partial"


@dataclass
class FakeStrided(FakePlacement):
    split_factor: int = 2


def module_of(rank: int) -> dict[str, FakeTensor]:
    mesh = [[0, 1], [2, 3]]
    sizes = {0: (3, 4), 1: (3, 4), 2: (2, 4), 3: (2, 4)}
    return {
        "w": FakeTensor((10, 4), mesh, (FakeStrided("shard"), FakePlacement("shard")), sizes[rank]),
        "r": FakeTensor((4,), mesh, (FakePlacement("replicate"),) * 2, (4,)),
        "plain": FakeTensor((2, 3)),
    }


def test_modules_of_all_ranks_make_one_layout():
    merged = Layout.merge(Layout.of_module(module_of(rank), rank) for rank in range(4))
    placements = (StridedShard(0, 2), Shard(0))
    whole = Layout.over([[0, 1], [2, 3]], {"w": ((10, 4), "BF16", placements)})
    assert merged.tensors["w"].held_by() == whole.tensors["w"].held_by()
    assert merged.tensors["r"].ranks == merged.tensors["plain"].ranks == ((0, 1, 2, 3),)
    assert merged.tensors["plain"].dtype == "BF16"


def test_the_layout_of_a_module_is_that_of_its_state():
    class Module:
        def state_dict(self) -> dict[str, FakeTensor]:
            return module_of(1)

    assert Layout.of_module(Module(), 1).tensors == Layout.of_module(module_of(1), 1).tensors


def test_a_rank_whose_shard_is_empty_holds_nothing():
    mesh, placements = [0, 1, 2], (FakePlacement("shard"),)
    layout = Layout.of_module({"w": FakeTensor((2, 4), mesh, placements, (0, 4))}, 2)
    assert layout.ranks == ()
    others = [Layout.of_module({"w": FakeTensor((2, 4), mesh, placements, (1, 4))}, r) for r in (0, 1)]
    assert Layout.merge([*others, layout]).ranks == (0, 1)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (FakeTensor((4,), [0, 1], (FakePlacement("partial"),), (4,)), "w: a Partial placement"),
        (FakeTensor((4,), [0, 1], (FakePlacement("other"),), (4,)), "w: placement .* expected Replicate"),
        (FakeTensor((4,), [0, 1], (FakePlacement("shard"),), (3,)), "w: the local tensor has shape"),
        (FakeTensor((4,), [1, 2], (FakePlacement("shard"),), (2,)), "w: rank is 0"),
    ],
)
def test_modules_that_cannot_be_sources_are_refused_by_name(tensor, words):
    with pytest.raises(UsageError, match=words):
        Layout.of_module({"w": tensor}, 0)


def test_a_transposed_part_has_the_strides_of_its_order():
    tensor = Tensor.over((4, 6), "F32", Mesh.of(range(2)), (Shard(0),), (1, 0))
    assert tensor.sharding.held[0].strides == (1, 2)
    with pytest.raises(UsageError, match="order"):
        Tensor.over((4, 6), "F32", Mesh.of(range(2)), (Shard(0),), (0, 0))
