"""Patterns of the loaders that inference engines have, in words of our own: each is recorded, and brings the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiote.weights.traced import RecordError
from support.weights.recorded_updates import by_loader, by_update, differing

pytestmark = pytest.mark.needs_torch

HIDDEN, HEAD, INNER, EXPERTS, WORDS = 8, 2, 4, 3, 10
Pattern = tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]], Callable[[Any, Any], None]]
"""Shapes of the checkpoint's tensors and of the parameters, and what copies one into the other."""


def same_shape(w: Any, p: Any) -> None:
    for name, parameter in p.items():
        assert parameter.size() == w[name].size()
        parameter.data.copy_(w[name])


def columns(w: Any, p: Any) -> None:
    """Column parallel: this rank's rows."""
    part = p["up"].data
    part.copy_(w["up"].narrow(0, part.shape[0], part.shape[0]))


def rows(w: Any, p: Any) -> None:
    """Row parallel: this rank's columns, of a tensor that may be one value."""
    size = p["down"].shape[1]
    p["down"].data.copy_(w["down"].narrow(1, size, size))
    loaded = w["scale"]
    p["scale"].data.copy_(loaded.reshape(1) if len(loaded.shape) == 0 else loaded)


def gate_and_up(w: Any, p: Any) -> None:
    """Merged columns: gate and up one after the other, both cut for this rank."""
    for number, name in enumerate(("gate", "up")):
        size = p["gate_up"].shape[0] // 2
        part = p["gate_up"].data.narrow(0, number * size, size)
        mine = w[name].chunk(2, dim=0)[1]
        assert part.shape == mine.shape
        part.copy_(mine)


def grouped_heads(w: Any, p: Any) -> None:
    """Query heads of this rank, and the one head of keys and values that all ranks have."""
    offsets = {"q": (0, 2 * HEAD), "k": (2 * HEAD, HEAD), "v": (3 * HEAD, HEAD)}
    for name, (offset, size) in offsets.items():
        rank = 1 if name == "q" else 1 // 2
        p["qkv"].data.narrow(0, offset, size).copy_(w[name].narrow(0, rank * size, size))


def fused_on_disk(w: Any, p: Any) -> None:
    """A fused tensor in the checkpoint, split into shards that are loaded by name."""
    import torch

    q, k, v = w["qkv"].split([4 * HEAD, HEAD, HEAD], dim=0)
    p["qkv"].data[: 2 * HEAD] = q.narrow(0, 2 * HEAD, 2 * HEAD)
    p["qkv"].data[2 * HEAD :] = torch.cat([k, v])


def padded_words(w: Any, p: Any) -> None:
    """A table of words, of which this rank's part ends with padding."""
    part = w["embed"].narrow(0, 6, WORDS - 6)
    p["embed"][: part.shape[0]].data.copy_(part)
    p["embed"][part.shape[0] :].data.fill_(0)


def experts_by_name(w: Any, p: Any) -> None:
    """Experts one by one: w1 and w3 into halves of one parameter, w2 cut along its last dimension."""
    size = INNER // 2
    for expert in range(EXPERTS):
        for name, half in (("w1", 0), ("w3", size)):
            p["w13"].data[expert].narrow(0, half, size).copy_(w[f"{expert}.{name}"].narrow(0, size, size))
        p["w2"].data[expert].copy_(w[f"{expert}.w2"].narrow(1, size, size))


def experts_stacked(w: Any, p: Any) -> None:
    """Experts in one tensor, input first: transposed, cut for this rank, gate and up apart."""
    gate, up = w["gate_up"].chunk(2, dim=-1)
    for number, loaded in enumerate((gate, up)):
        part = loaded.transpose(-1, -2)[:, INNER // 2 :]
        p["w13"].data[:, number * INNER // 2 : (number + 1) * INNER // 2].copy_(part)
    for expert, loaded in enumerate(w["down"].unbind(0)):
        p["w2"].data[expert] = loaded.t()[:, INNER // 2 :]


def experts_in_slots(w: Any, p: Any) -> None:
    """A table that says in which slots an expert lies; one lies in two."""
    for slot, expert in enumerate((2, 0, 1, 2)):
        p["w2"].data[slot].copy_(w[f"{expert}.w2"].to(p["w2"].dtype))


def latent_attention(w: Any, p: Any) -> None:
    """Two projections fused, and one that is split into keys and values, which are kept transposed."""
    import torch

    p["a"].data.copy_(torch.cat([w["q_a"], w["kv_a"]], dim=0))
    keys, values = w["kv_b"].unflatten(0, (-1, 2 * HEAD)).split([HEAD, HEAD], dim=1)
    p["w_kc"].data.copy_(keys.contiguous())
    p["w_vc"].data.copy_(values.transpose(1, 2).contiguous())


def interleaved(w: Any, p: Any) -> None:
    """Gate and up row by row in turns, into halves."""
    both = w["gate_up"].view(INNER, 2, HIDDEN)
    p["gate_up"].data.copy_(torch_stack(both.unbind(1)).flatten(0, 1))


def torch_stack(tensors: Any) -> Any:
    import torch

    return torch.stack(tuple(tensors))


def rotary_order(w: Any, p: Any) -> None:
    """Rows of heads from interleaved pairs into halves, as converters of checkpoints reorder them."""
    heads = w["q"].reshape(4, HEAD // 2, 2, HIDDEN).transpose(1, 2).reshape(4 * HEAD, HIDDEN)
    p["q"].data.copy_(heads)


def into_a_state_dict(w: Any, p: Any) -> None:
    """torch's own loader of a module."""
    import torch

    module = torch.nn.Linear(HIDDEN, INNER, bias=False)
    module.weight = p["weight"]
    module.load_state_dict({"weight": w["weight"]})


def full_tensors(w: Any, p: Any) -> None:
    """Full tensors under the trainer's names, on any device, in another order and type."""
    for name, loaded in {key.removeprefix("module."): value for key, value in w.items()}.items():
        p[name].data.copy_(loaded.detach().to("cpu", non_blocking=True).bfloat16().view(-1).view(p[name].shape))


EVERY: dict[str, Pattern] = {
    "same_shape": ({"norm": (HIDDEN,), "one": ()}, {"norm": (HIDDEN,), "one": ()}, same_shape),
    "columns": ({"up": (INNER, HIDDEN)}, {"up": (INNER // 2, HIDDEN)}, columns),
    "rows": ({"down": (HIDDEN, INNER), "scale": ()}, {"down": (HIDDEN, INNER // 2), "scale": (1,)}, rows),
    "gate_and_up": (
        {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN)},
        {"gate_up": (INNER, HIDDEN)},
        gate_and_up,
    ),
    "grouped_heads": (
        {"q": (4 * HEAD, HIDDEN), "k": (HEAD, HIDDEN), "v": (HEAD, HIDDEN)},
        {"qkv": (4 * HEAD, HIDDEN)},
        grouped_heads,
    ),
    "fused_on_disk": ({"qkv": (6 * HEAD, HIDDEN)}, {"qkv": (4 * HEAD, HIDDEN)}, fused_on_disk),
    "padded_words": ({"embed": (WORDS, HIDDEN)}, {"embed": (6, HIDDEN)}, padded_words),
    "experts_by_name": (
        {
            f"{e}.{n}": (HIDDEN, INNER) if n == "w2" else (INNER, HIDDEN)
            for e in range(EXPERTS)
            for n in ("w1", "w2", "w3")
        },
        {"w13": (EXPERTS, INNER, HIDDEN), "w2": (EXPERTS, HIDDEN, INNER // 2)},
        experts_by_name,
    ),
    "experts_stacked": (
        {"gate_up": (EXPERTS, HIDDEN, 2 * INNER), "down": (EXPERTS, INNER, HIDDEN)},
        {"w13": (EXPERTS, INNER, HIDDEN), "w2": (EXPERTS, HIDDEN, INNER // 2)},
        experts_stacked,
    ),
    "experts_in_slots": (
        {f"{e}.w2": (HIDDEN, INNER) for e in range(EXPERTS)},
        {"w2": (EXPERTS + 1, HIDDEN, INNER)},
        experts_in_slots,
    ),
    "latent_attention": (
        {"q_a": (3, HIDDEN), "kv_a": (2, HIDDEN), "kv_b": (4 * HEAD, HIDDEN)},
        {"a": (5, HIDDEN), "w_kc": (2, HEAD, HIDDEN), "w_vc": (2, HIDDEN, HEAD)},
        latent_attention,
    ),
    "interleaved": ({"gate_up": (2 * INNER, HIDDEN)}, {"gate_up": (2 * INNER, HIDDEN)}, interleaved),
    "rotary_order": ({"q": (4 * HEAD, HIDDEN)}, {"q": (4 * HEAD, HIDDEN)}, rotary_order),
    "into_a_state_dict": ({"weight": (INNER, HIDDEN)}, {"weight": (INNER, HIDDEN)}, into_a_state_dict),
    "full_tensors": ({"module.a": (4, 6), "module.b": (3,)}, {"a": (4, 6), "b": (3,)}, full_tensors),
}


# torch says that a copy to a device without memory does nothing; to record it is what the loader is run for.
@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter:UserWarning")
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_loader_of_an_engine_is_recorded(name, device):
    import torch

    sources, targets, copy = EVERY[name]
    values = {
        n: torch.arange(1, 1 + int(np.prod(shape, dtype=int)), dtype=torch.float32).reshape(shape) * (i + 1)
        for i, (n, shape) in enumerate(sources.items())
    }

    def parameters(where: str) -> dict[str, Any]:
        kind = torch.bfloat16 if name == "full_tensors" else torch.float32
        return {
            n: torch.nn.Parameter(torch.full(shape, -1.0, dtype=kind, device=where), requires_grad=False)
            for n, shape in targets.items()
        }

    def load(pairs: Any, own: Any) -> None:
        copy(dict(pairs), own)

    expected = by_loader(load, parameters("cpu"), values)
    own = parameters(device)
    if device == "meta":
        # Padding that a loader clears on a device without memory stays what it is.
        expected = {n: np.where(one == 0, -1.0, one) for n, one in expected.items()}
    assert not differing(expected, by_update(load, own, values))


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (lambda w, p: p.copy_(w).mul_(2), r"p: the loader calls aten.mul_.Tensor on what it has copied there"),
        (lambda w, p: [p.copy_(w), p.data.__imul__(2)], r"p: the loader calls aten.mul_"),
        (lambda w, p: [p[:2].copy_(w[:2]), p[2:].copy_(p[:2])], r"p: the loader calls aten.copy_"),
        (lambda w, p: [p.copy_(w), p.zero_()], r"p: the loader calls aten.zero_"),
        (lambda w, p: [p.copy_(w), p.add_(p.sum())], r"p: the loader calls aten.sum"),
        (lambda w, p: setattr(p, "data", w), "w: "),
        (lambda w, p: setattr(p, "data", p.data.clone()), "p: the loader replaces this parameter.s memory"),
        (lambda w, p: p.add_(w), "w: the loader calls add_"),
        (lambda w, p: p.data.__iadd__(w), "w: the loader calls add_|w: the loader calls __iadd__"),
        (lambda w, p: p.set_(w), "w: the loader calls set_"),
        (lambda w, p: p.index_copy_(0, __import__("torch").arange(4), w), "w: the loader calls index_copy_"),
        (lambda w, p: p.masked_scatter_(p > 0, w), "w: the loader calls masked_scatter_"),
        (
            lambda w, p: p.__setitem__(p > -2, w.flatten()),
            "w: .*not a parameter|w: the loader calls __setitem__",
        ),
        (lambda w, p: np.copyto(p.numpy(), w), "w: the loader calls numpy's copyto, but the parameters are torch"),
        (lambda w, p: p.copy_(w.double().half()), "p: the loader converts w from F32 to F64 to F16 to F32"),
        (lambda w, p: p.copy_(w.expand(2, 4, 4)), "w: the loader calls copy_, which fails"),
        (lambda w, p: p.copy_(w if w.is_contiguous() else w.t()), "w: the loader calls is_contiguous"),
        (lambda w, p: p.copy_(w if w.device.type == "cpu" else w.t()), "w: the loader calls device"),
        (lambda w, p: setattr(w, "requires_grad", True), "w: the loader calls requires_grad = "),
    ],
)
def test_what_no_recipe_can_say_is_refused(load, words):
    import torch

    from aiote.weights import record

    parameter = torch.full((4, 4), -1.0)
    with pytest.raises(RecordError, match=words):
        record(lambda pairs: load(dict(pairs)["w"], parameter), {"p": parameter}, {"w": ((4, 4), "F32")})


def test_types_that_torch_rounds_otherwise_than_numpy_are_refused():
    import torch

    from aiote.weights import record

    parameter = torch.zeros(4, 4, dtype=torch.float16)
    with pytest.raises(RecordError, match="p: the loader converts w from F64 to F16, which torch and"):
        record(lambda pairs: [parameter.copy_(w) for _, w in pairs], {"p": parameter}, {"w": ((4, 4), "F64")})


def test_parameters_of_two_libraries_are_refused():
    import torch

    from aiote.errors import UsageError
    from aiote.weights import record

    with pytest.raises(UsageError, match="some parameters are torch tensors and some are numpy arrays"):
        record(lambda pairs: None, {"a": torch.zeros(2), "b": np.zeros(2)}, {})
