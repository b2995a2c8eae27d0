"""The model as trainers have it: Qwen3-MoE's parameter names, FSDP2 over all ranks, experts over expert-parallel ones.

Every rank reads other text. Within an expert-parallel group tokens are gathered, each rank computes what its experts
make of all of them, and the sums go back to where the tokens came from.
"""

from __future__ import annotations

from typing import Any

import layers
import task
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

REPLICAS = task.TRAINERS // task.EXPERT_RANKS


class _Gather(torch.autograd.Function):
    """The tokens of all ranks of a group; backward, the sum of all ranks' gradients of one's own."""

    @staticmethod
    def forward(context: Any, x: Tensor, group: Any) -> Tensor:
        context.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        distributed.all_gather(parts, x.contiguous(), group)
        return torch.cat(parts)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _own_sum(grad, context.group), None


class _Scatter(torch.autograd.Function):
    """The sum of what all ranks of a group made of one's own tokens; backward, the gradients of all ranks' tokens."""

    @staticmethod
    def forward(context: Any, x: Tensor, group: Any) -> Tensor:
        context.group = group
        return _own_sum(x, group)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Gather.forward(context, grad, context.group), None


def _own_sum(x: Tensor, group: Any) -> Tensor:
    total = x.contiguous().clone()
    distributed.all_reduce(total, group=group)
    return total.chunk(group.size())[group.rank()].clone()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rows = {"q": task.HEADS, "k": task.KV_HEADS, "v": task.KV_HEADS}
        for name, heads in rows.items():
            setattr(self, f"{name}_proj", nn.Linear(task.HIDDEN, heads * task.HEAD, bias=False))
        self.o_proj = nn.Linear(task.HEADS * task.HEAD, task.HIDDEN, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(task.HEAD), nn.RMSNorm(task.HEAD)

    def forward(self, x: Tensor) -> Tensor:
        found = layers.attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), self.q_norm.weight, self.k_norm.weight)
        return self.o_proj(found)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(task.HIDDEN, task.INNER, bias=False)
        self.up_proj = nn.Linear(task.HIDDEN, task.INNER, bias=False)
        self.down_proj = nn.Linear(task.INNER, task.HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.ModuleDict):
    """Experts by their numbers; each sees all tokens, for so few are they here."""

    def forward(self, x: Tensor, shares: Tensor) -> Tensor:
        return sum(expert(x) * shares[:, int(number), None] for number, expert in self.items())


class SparseMlp(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(task.HIDDEN, task.EXPERTS, bias=False)
        self.experts = Experts({str(number): Expert() for number in range(task.EXPERTS)})
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        shares = layers.routed(tokens, self.gate.weight)
        everyone = _Gather.apply(torch.cat([tokens, shares], -1), self._group)
        made = self.experts(everyone[:, : task.HIDDEN], everyone[:, task.HIDDEN :])
        return _Scatter.apply(made, self._group).view_as(x)


class Layer(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(task.HIDDEN), nn.RMSNorm(task.HIDDEN)
        self.self_attn, self.mlp = Attention(), SparseMlp(group)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(layers.norm(x, self.input_layernorm.weight))
        return x + self.mlp(layers.norm(x, self.post_attention_layernorm.weight))


class Inner(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(task.LETTERS, task.HIDDEN)
        self.layers = nn.ModuleList(Layer(group) for _ in range(task.LAYERS))
        self.norm = nn.RMSNorm(task.HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return layers.norm(x, self.norm.weight)


class Qwen3Moe(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.model = Inner(group)
        self.lm_head = nn.Linear(task.HIDDEN, task.LETTERS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.model(tokens))


def sharded() -> Qwen3Moe:
    """Return this rank's part of the model: a fourth of what is dense, half of half the experts."""
    everyone = init_device_mesh("cpu", (task.TRAINERS,))
    by_expert = init_device_mesh(
        "cpu", (task.EXPERT_RANKS, task.TRAINERS // task.EXPERT_RANKS), mesh_dim_names=("ep", "fsdp")
    )
    torch.manual_seed(1)
    model = Qwen3Moe(by_expert["ep"].get_group())
    each = task.EXPERTS // task.EXPERT_RANKS
    first = by_expert["ep"].get_local_rank() * each
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for number in set(range(task.EXPERTS)) - set(range(first, first + each)):
            del experts[str(number)]
        fully_shard(experts, mesh=by_expert["fsdp"])
        fully_shard(layer, mesh=everyone)
    fully_shard(model, mesh=everyone)
    return model


class Training:
    """A rank's model and optimizer."""

    def __init__(self, rank: int) -> None:
        self.rank, self.model = rank, sharded()
        self._draw = torch.Generator().manual_seed(rank)
        # One parameter at a time: they are of two meshes.
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=4e-3, weight_decay=0.0, foreach=False)
        self._text = torch.tensor(task.encode(task.TEXT * 2))

    def train(self, steps: int) -> float:
        """Take steps of the optimizer; return the last loss, of all ranks."""
        for _ in range(steps):
            starts = torch.randint(len(task.TEXT), (8, 1), generator=self._draw)
            windows = self._text[starts + torch.arange(task.WINDOW + 1)]
            logits = self.model(windows[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        total = loss.detach().clone()
        distributed.all_reduce(total)
        return float(total) / task.TRAINERS

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        """Return the logits of a prompt, one row for each token."""
        return self.model(torch.tensor([tokens]))[0]

    def whole(self) -> dict[str, Tensor]:
        """Return whole tensors: all that are dense, and this rank's experts. A collective, for the check alone."""
        return {name: tensor.full_tensor() for name, tensor in self.model.state_dict().items()}
