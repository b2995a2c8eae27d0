"""Shapes of published models, as far as plans need them: the cache of a token, and the dispatch of a token.

The numbers come from the models' own configurations (each publisher's `config.json`): layers, key-value heads and their
size, the compressed row of multi-head latent attention (kv_lora_rank + qk_rope_head_dim), experts, experts of a token,
hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import UsageError
from .nics import in_range

__all__ = ["KV_SHAPES", "MOE_SHAPES", "KvShape", "MoeShape", "kv_shape", "moe_shape"]


class KvShape(NamedTuple):
    """A cache: for each token and layer a row for each of `fields`, of `heads` heads of `head_bytes` bytes each.

    With 0 heads there is one row of `head_bytes` bytes, which all ranks have.
    """

    name: str
    layers: int
    heads: int
    head_bytes: int
    fields: tuple[str, ...]
    source: str

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in one layer, for all heads."""
        return len(self.fields) * max(1, self.heads) * self.head_bytes


class MoeShape(NamedTuple):
    """A layer of experts: how many there are, how many each token goes to, and the elements of a token."""

    name: str
    experts: int
    top_k: int
    hidden: int
    source: str


def _gqa(name: str, layers: int, heads: int, repository: str) -> KvShape:
    return KvShape(name, layers, heads, 2 * 128, ("k", "v"), f"config.json of {repository}, bf16")


def _mla(name: str, layers: int, repository: str) -> KvShape:
    return KvShape(name, layers, 0, 2 * (512 + 64), ("kv",), f"config.json of {repository}, bf16")


KV_SHAPES = {
    shape.name: shape
    for shape in (
        _gqa("qwen3-235b", 94, 4, "Qwen/Qwen3-235B-A22B"),
        _gqa("qwen3-30b", 48, 4, "Qwen/Qwen3-30B-A3B"),
        _gqa("llama-3.1-70b", 80, 8, "meta-llama/Llama-3.1-70B"),
        _mla("deepseek-v3", 61, "deepseek-ai/DeepSeek-V3"),
        _mla("kimi-k2", 61, "moonshotai/Kimi-K2-Instruct"),
    )
}
MOE_SHAPES = {
    shape.name: shape
    for shape in (
        MoeShape("deepseek-v3", 256, 8, 7168, "config.json of deepseek-ai/DeepSeek-V3"),
        MoeShape("kimi-k2", 384, 8, 7168, "config.json of moonshotai/Kimi-K2-Instruct"),
        MoeShape("qwen3-235b", 128, 8, 4096, "config.json of Qwen/Qwen3-235B-A22B"),
        MoeShape("qwen3-30b", 128, 8, 2048, "config.json of Qwen/Qwen3-30B-A3B"),
    )
}
GIVEN = "the command line"


def kv_shape(model: str, *, layers: int = 0, heads: int = -1, head_bytes: int = 0) -> KvShape:
    """Return a published shape. Numbers that are given replace its own; without a model (""), all must be given.

    Raises UsageError for a name that is not known, and for numbers that are missing or out of range.
    """
    if model and model not in KV_SHAPES:
        raise UsageError(f"model={model!r}: expected one of {', '.join(KV_SHAPES)}, or numbers instead")
    if not model and (not layers or heads < 0 or not head_bytes):
        raise UsageError("give a model, or all of layers, kv-heads (0 for one row that all ranks have) and head-bytes")
    shape = KV_SHAPES[model] if model else KvShape("", layers, heads, head_bytes, ("k", "v"), GIVEN)
    made = shape._replace(
        layers=layers or shape.layers,
        heads=shape.heads if heads < 0 else heads,
        head_bytes=head_bytes or shape.head_bytes,
    )
    in_range("layers", made.layers, 1, 1024)
    in_range("kv-heads", made.heads, 0, 1024)
    in_range("head-bytes", made.head_bytes, 1, 1 << 16)
    if made.heads == 0:
        made = made._replace(fields=("kv",))
    elif shape.heads == 0:
        made = made._replace(fields=("k", "v"))
    if model and made != shape:
        made = made._replace(source=f"{shape.source}, changed by {GIVEN}")
    return made


def moe_shape(model: str, *, experts: int = 0, top_k: int = 0, hidden: int = 0) -> MoeShape:
    """Return a published shape. Numbers that are given replace its own. Raises UsageError like `kv_shape`."""
    if model and model not in MOE_SHAPES:
        raise UsageError(f"model={model!r}: expected one of {', '.join(MOE_SHAPES)}, or numbers instead")
    if not model and not (experts and top_k and hidden):
        raise UsageError("give a model, or all of experts, top-k and hidden")
    shape = MOE_SHAPES[model] if model else MoeShape("", experts, top_k, hidden, GIVEN)
    made = shape._replace(experts=experts or shape.experts, top_k=top_k or shape.top_k, hidden=hidden or shape.hidden)
    in_range("experts", made.experts, 1, 1 << 16)
    in_range("top-k", made.top_k, 1, made.experts)
    in_range("hidden", made.hidden, 1, 1 << 24)
    if model and made != shape:
        made = made._replace(source=f"{shape.source}, changed by {GIVEN}")
    return made
