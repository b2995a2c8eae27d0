"""The model as inference ranks have it: tensor parallel, with fused projections and stacked experts, as in vLLM.

`load_weights` is such a loader as every model of vLLM has, for a checkpoint with Qwen3-MoE's names. It is all that
says what goes where: the recipe is recorded from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import layers
import task
import torch
from torch import Tensor, distributed
from torch.nn import functional

RANKS = task.SERVERS
Q, KV, INNER, ROWS = (
    task.HEADS * task.HEAD // RANKS,
    task.KV_HEADS * task.HEAD,  # fewer heads than ranks: each has the one there is
    task.INNER // RANKS,
    task.PADDED // RANKS,
)


class Served:
    """One rank's part of the model. Its parameters begin as zeros, and stay where they are."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        shapes = {"model.embed_tokens.weight": (ROWS, task.HIDDEN), "model.norm.weight": (task.HIDDEN,)}
        for number in range(task.LAYERS):
            layer = f"model.layers.{number}"
            shapes |= {
                f"{layer}.input_layernorm.weight": (task.HIDDEN,),
                f"{layer}.self_attn.qkv_proj.weight": (Q + 2 * KV, task.HIDDEN),
                f"{layer}.self_attn.q_norm.weight": (task.HEAD,),
                f"{layer}.self_attn.k_norm.weight": (task.HEAD,),
                f"{layer}.self_attn.o_proj.weight": (task.HIDDEN, Q),
                f"{layer}.post_attention_layernorm.weight": (task.HIDDEN,),
                f"{layer}.mlp.gate.weight": (task.EXPERTS, task.HIDDEN),
                f"{layer}.mlp.experts.w13_weight": (task.EXPERTS, 2 * INNER, task.HIDDEN),
                f"{layer}.mlp.experts.w2_weight": (task.EXPERTS, task.HIDDEN, INNER),
            }
        shapes["lm_head.weight"] = (ROWS, task.HIDDEN)
        self.parameters = {name: torch.zeros(shape) for name, shape in shapes.items()}

    # The loader.

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Copy this rank's part of every tensor of a checkpoint to where it belongs."""
        for name, loaded in weights:
            prefix, _, rest = name.partition(".experts.")
            kind = name.split(".")[-2]
            if rest:
                self._load_expert(f"{prefix}.experts", *rest.split(".")[:2], loaded)
            elif kind in ("q_proj", "k_proj", "v_proj"):
                self._load_heads(self.parameters[name.replace(kind, "qkv_proj")], kind[0], loaded)
            elif kind in ("embed_tokens", "lm_head"):
                mine = loaded[self.rank * ROWS : (self.rank + 1) * ROWS]
                self.parameters[name][: mine.shape[0]].copy_(mine)
            else:
                self.parameters[name].copy_(self._share(loaded, 1, Q) if kind == "o_proj" else loaded)

    def _load_heads(self, parameter: Tensor, shard: str, loaded: Any) -> None:
        start, rows = {"q": (0, Q), "k": (Q, KV), "v": (Q + KV, KV)}[shard]
        parameter.narrow(0, start, rows).copy_(self._share(loaded, 0, Q) if shard == "q" else loaded)

    def _load_expert(self, name: str, number: str, kind: str, loaded: Any) -> None:
        if kind == "down_proj":
            self.parameters[f"{name}.w2_weight"][int(number)].copy_(self._share(loaded, 1, INNER))
            return
        w1, w3 = self.parameters[f"{name}.w13_weight"][int(number)].chunk(2)
        (w1 if kind == "gate_proj" else w3).copy_(self._share(loaded, 0, INNER))

    def _share(self, loaded: Any, dim: int, size: int) -> Any:
        return loaded.narrow(dim, self.rank * size, size)

    # What it computes.

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        """Return the logits of a prompt, one row for each token. Both ranks call it with the same."""
        mine = torch.tensor([tokens]) - self.rank * ROWS
        here = (mine >= 0) & (mine < ROWS)
        x = _sum(self._get("model.embed_tokens")[mine.clamp(0, ROWS - 1)] * here[..., None])
        for number in range(task.LAYERS):
            x = self._layer(x, f"model.layers.{number}")
        part = functional.linear(layers.norm(x, self._get("model.norm")), self._get("lm_head"))[0]
        parts = [torch.empty_like(part) for _ in range(RANKS)]
        distributed.all_gather(parts, part)
        return torch.cat(parts, -1)[:, : task.LETTERS]

    def _layer(self, x: Tensor, name: str) -> Tensor:
        qkv = functional.linear(
            layers.norm(x, self._get(f"{name}.input_layernorm")), self._get(f"{name}.self_attn.qkv_proj")
        )
        norms = (self._get(f"{name}.self_attn.{one}") for one in ("q_norm", "k_norm"))
        found = layers.attend(*qkv.split([Q, KV, KV], -1), *norms)
        x = x + _sum(functional.linear(found, self._get(f"{name}.self_attn.o_proj")))
        tokens = layers.norm(x, self._get(f"{name}.post_attention_layernorm"))
        shares = layers.routed(tokens, self._get(f"{name}.mlp.gate"))
        w13, w2 = (self.parameters[f"{name}.mlp.experts.{one}_weight"] for one in ("w13", "w2"))
        gate, up = torch.einsum("bth,eih->beti", tokens, w13).chunk(2, -1)
        made = torch.einsum("beti,ehi->bteh", functional.silu(gate) * up, w2)
        return x + _sum((made * shares[..., None]).sum(2))

    def _get(self, name: str) -> Tensor:
        return self.parameters[f"{name}.weight"]

    def generate(self, prompt: str, letters: int) -> str:
        """Return what follows a prompt, greedily."""
        tokens = task.encode(prompt)
        for _ in range(letters):
            tokens.append(int(self.logits(tokens[-task.WINDOW :])[-1].argmax()))
        return task.decode(tokens[len(prompt) :])


def _sum(x: Tensor) -> Tensor:
    distributed.all_reduce(x)
    return x
