"""vLLM's KV tensors as a `Cache`. Every tensor stays where it is; each storage is registered once, as a whole.

The CPU backend has a tensor [blocks, heads, tokens, 2 * head size] for each layer. Within a head of a block it keeps
all keys, then all values, in an order that its kernels choose. Therefore a page is opaque, and only whole heads of it
can move. Both sides need blocks of the same size and kernels of the same instruction set, so the instruction set is
part of the type's name. MLA has tensors [blocks, tokens, items], without heads: all ranks of a group have the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from ...errors import UsageError
from ...kvcache import Cache

if TYPE_CHECKING:
    import torch

__all__ = ["Layer", "cache_of", "layer_number"]

NUMBER = re.compile(r"\.(\d+)(?=\.|$)")
FIELD_LENGTH = 64
AXES = {3: "page item item", 4: "page head item item"}
"""The meaning of a tensor's axes, by its number of dimensions."""


class Layer(NamedTuple):
    """A layer's tensor, its group of blocks, the number of its first head in the model, and `kernels`: what determines
    its bytes besides their type.
    """

    name: str
    tensor: torch.Tensor
    group: int = 0
    first_head: int = 0
    kernels: str = ""


def cache_of(name: str, layers: Iterable[Layer], ranks: int = 1) -> Cache:
    """Return these layers as the cache of one rank, in a group of `ranks`. Raises UsageError for device memory, and for
    tensors with another number of dimensions.
    """
    import torch

    cache = Cache(name, ranks=ranks)
    held: set[int] = set()
    for layer in layers:
        tensor = layer.tensor
        if tensor.device.type != "cpu" or tensor.dim() not in AXES:
            raise UsageError(
                f"{layer.name}: expected a tensor [blocks, heads, tokens, items] in host memory, or one without heads, "
                f"got one of shape {list(tensor.shape)} on {tensor.device}"
            )
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            held.add(storage.data_ptr())
            cache.hold(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
        field = NUMBER.sub("", layer.name, count=1)
        cache.add(
            tensor.view(torch.uint8).numpy(),
            AXES[tensor.dim()],
            layer=layer_number(layer.name),
            group=layer.group,
            first_head=layer.first_head,
            fields=[field[-FIELD_LENGTH:]],
            dtype=f"{tensor.dtype} {layer.kernels}".removeprefix("torch.").strip(),
        )
    return cache


def layer_number(name: str) -> int:
    """Return the number of a layer by its name; 0 if that has none."""
    number = NUMBER.search(name)
    return int(number[1]) if number else 0
