"""Recipes recorded from loaders of torch models: on the device "meta", by torch's own operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiote.errors import UsageError
from aiote.weights import Layout, Recording, Shard, plan_update, record
from support.weights import plans as weight_plans

pytestmark = pytest.mark.needs_torch

HIDDEN, SIZE, EXPERTS, RANKS = 8, 4, 2, 2
NAMES = ["q", "k", "v", "o", "embed", *(f"{e}.{kind}" for e in range(EXPERTS) for kind in ("w1", "w2", "w3"))]
SOURCES = dict.fromkeys(NAMES, ((HIDDEN, HIDDEN), "F64")) | {"embed": ((10, HIDDEN), "F64")}


def model(rank: int, device: str) -> Any:
    """Return one rank of a model with the parameters and the loader that vLLM's have."""
    import torch

    share = HIDDEN // RANKS
    shapes = {
        "qkv": (3 * share, HIDDEN),
        "o": (HIDDEN, share),
        "embed": (6, HIDDEN),
        "w13": (EXPERTS, 2 * share, HIDDEN),
        "w2": (EXPERTS, share, HIDDEN),
    }

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, shape in shapes.items():
                fresh = torch.full(shape, weight_plans.UNTOUCHED, dtype=torch.float64, device=device)
                self.register_parameter(name, torch.nn.Parameter(fresh, requires_grad=False))

        def load_weights(self, weights: Any) -> None:
            for name, loaded in weights:
                assert loaded.dtype == self.qkv.dtype
                if name in ("q", "k", "v"):
                    part = self.qkv.data.narrow(0, "qkv".index(name) * share, share)
                    mine = loaded.narrow(0, rank * share, share)
                    assert part.shape == mine.shape
                    part.copy_(mine)
                elif name == "o":
                    self.o.data.copy_(torch.cat(loaded.chunk(HIDDEN, 1)[rank * share : (rank + 1) * share], 1))
                elif name == "embed":
                    mine = loaded[rank * 6 : (rank + 1) * 6]
                    self.embed.data[: mine.shape[0]].copy_(mine)
                    # Padding in the middle of what ranks have, as a table of LoRA's has it, would be the same.
                else:
                    self.load_expert(int(name[0]), name[2:], loaded)

        def load_expert(self, number: int, kind: str, loaded: Any) -> None:
            rows = loaded.view(RANKS, share, HIDDEN)[rank]
            if kind == "w2":
                self.w2.data[number] = loaded.t()[rank * share : (rank + 1) * share]
            else:
                self.w13.data[number].chunk(2)[0 if kind == "w1" else 1].copy_(torch.squeeze(rows.unsqueeze(0), 0))

    return Model()


def test_a_plan_brings_what_a_torch_loader_loads():
    import torch

    meta = [model(rank, "meta") for rank in range(RANKS)]
    recordings = {r: record(one.load_weights, dict(one.named_parameters()), SOURCES) for r, one in enumerate(meta)}
    targets, recipe = Recording.merge(recordings)
    sources = Layout.over(range(3), {name: (*entry, Shard(0)) for name, entry in SOURCES.items()})
    values = {
        name: np.arange(1000 * n, 1000 * n + np.prod(shape), dtype=np.float64).reshape(shape)
        for n, (name, (shape, _)) in enumerate(SOURCES.items())
    }
    memory, _ = weight_plans.carry_out(plan_update(sources, targets, recipe), weight_plans.hold(sources, values))
    for rank in range(RANKS):
        real = model(rank, "cpu")
        real.load_weights((name, torch.from_numpy(value)) for name, value in values.items())
        for name, parameter in real.named_parameters():
            assert np.array_equal(memory[rank][name].reshape(parameter.shape), parameter.numpy()), name


def test_a_conversion_is_a_cast_of_the_recipe():
    import torch

    parameters = {"w": torch.empty(4, 4, dtype=torch.bfloat16, device="meta")}
    made = record(lambda pairs: [parameters["w"].copy_(x) for _, x in pairs], parameters, {"x": ((4, 4), "F32")})
    targets, recipe = Recording.merge({0: made})
    plan = plan_update(Layout.over([0], {"x": ((4, 4), "F32", Shard(0))}), targets, recipe)
    assert [(task.kind, task.dtype) for task in plan.tasks(0)] == [("make", "F32")]
    assert targets.tensors["w"].dtype == "BF16"


def test_parameters_that_are_one_memory_are_loaded_once():
    import torch

    embed = torch.nn.Parameter(torch.zeros(4, 4))
    made = record(
        lambda pairs: [embed.data.copy_(x) for _, x in pairs], {"a": embed, "b": embed}, {"x": ((4, 4), "F32")}
    )
    assert list(made.parameters) == ["a"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x + 1, "x: the loader calls add"),
        (lambda x: x.softmax(-1), "x: the loader calls softmax"),
        (lambda x: __import__("torch").relu(x), "x: the loader calls relu"),
        (lambda x: x.item(), "x: the loader calls item"),
        (lambda x: x.to("cpu").cumsum(0), "x: the loader calls cumsum"),
        (lambda x: x.view(__import__("torch").int32), "x: the loader calls view, and a recipe converts values only"),
        (lambda x: x.tolist(), "x: the loader calls tolist"),
        (lambda x: __import__("torch").from_numpy(x.numpy()), "x: the loader calls numpy"),
        (lambda x: __import__("torch").from_numpy(np.flip(x)), "x: the loader calls numpy's flip, but the parameters"),
        (lambda x: x.chunk(2, 0)[2], "x: the loader, or a call that it makes .* IndexError"),
        (lambda x: x.narrow(0, 2, 3), "x: the loader calls narrow, which fails"),
        (
            lambda x: __import__("torch").cat([x], out=__import__("torch").zeros(4, 4)),
            "x: the loader calls cat with out",
        ),
    ],
)
def test_what_no_recipe_can_say_is_refused_by_name(change, words):
    import torch

    parameters = {"w": torch.zeros(4, 4)}
    with pytest.raises(UsageError, match=words):
        record(lambda pairs: [parameters["w"].copy_(change(x)) for _, x in pairs], parameters, {"x": ((4, 4), "F32")})


def test_a_tensor_beside_the_parameters_is_refused():
    import torch

    with pytest.raises(UsageError, match="x: the loader copies it to a tensor that is not a parameter"):
        record(lambda pairs: [torch.zeros(4, 4).copy_(x) for _, x in pairs], {}, {"x": ((4, 4), "F32")})
