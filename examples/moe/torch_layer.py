"""A torch layer of a mixture of experts with expert parallelism, for inference: each of four ranks has four experts.

    python examples/moe/torch_layer.py        # needs torch: pip install torch

One rank would normally run in each process, and load its experts from a checkpoint. Routing is that of Qwen3-MoE: the
softmax over all experts, then the weights of the top ones, normed.
"""

from __future__ import annotations

import asyncio
import sys

try:
    import torch
    from torch import Tensor, nn
    from torch.nn import functional
except ImportError:
    sys.exit("torch_layer.py: this needs torch: pip install torch")

import aiote
from aiote.moe import MoeConfig, MoeGroup, open_group

RANKS, TOKENS, INNER = 4, 16, 96
CONFIG = MoeConfig(experts=16, top_k=4, hidden=128, tokens=TOKENS)  # bfloat16 there and back


class Expert(nn.Module):
    """A gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(CONFIG.hidden, 2 * INNER, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(INNER, CONFIG.hidden, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        made: Tensor = self.down(functional.silu(gate) * up)
        return made


class Experts(nn.Module):
    """The layer as one rank has it: the router, and its own experts. Every rank calls `await layer(x)`, as often."""

    def __init__(self, moe: MoeGroup, router: nn.Linear, own: list[Expert]) -> None:
        super().__init__()
        self.moe, self.router, self.own = moe, router, nn.ModuleList(own)

    async def forward(self, x: Tensor) -> Tensor:
        ids, weights = routed(self.router, x)
        batch = await self.moe.dispatch(x, ids, weights)
        for expert, rows, y, count in zip(self.own, batch.x, batch.y, batch.expert_num_tokens, strict=True):
            y[:count] = expert(rows[:count])
        out: Tensor = await self.moe.combine(batch)
        return out


def routed(router: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, and their weights."""
    weights, ids = router(x).softmax(-1, torch.float32).topk(CONFIG.top_k)
    return ids, weights / weights.sum(-1, keepdim=True)


def alone(router: nn.Linear, experts: list[Expert], x: Tensor) -> Tensor:
    """Return what the layer makes of tokens where all experts are here."""
    ids, weights = routed(router, x)
    out = torch.zeros(x.shape)
    for slot in range(CONFIG.top_k):
        made = torch.stack([experts[number](one) for number, one in zip(ids[:, slot].tolist(), x, strict=True)])
        out += weights[:, slot, None] * made
    return out.bfloat16()


async def live(rank: int, engine: aiote.Engine, members: list[aiote.Address]) -> None:
    torch.manual_seed(0)  # the same weights on every rank
    router = nn.Linear(CONFIG.hidden, CONFIG.experts, bias=False, dtype=torch.bfloat16)
    experts = [Expert() for _ in range(CONFIG.experts)]
    x = torch.randn(TOKENS, CONFIG.hidden, generator=torch.Generator().manual_seed(rank + 1)).bfloat16()

    async with open_group(engine, members, rank, CONFIG) as moe:
        here = len(experts) // RANKS
        layer = Experts(moe, router, experts[rank * here : (rank + 1) * here])
        out = await layer(x)

    torch.testing.assert_close(out, alone(router, experts, x))
    print(f"rank {rank}: {TOKENS} tokens, and the same sums as one process with all {CONFIG.experts} experts")


async def main() -> None:
    torch.set_grad_enabled(False)  # a round is no operation of autograd's
    engines = [await aiote.open_engine() for _ in range(RANKS)]
    await asyncio.gather(*(live(rank, engine, [e.address for e in engines]) for rank, engine in enumerate(engines)))
    await asyncio.gather(*(engine.aclose() for engine in engines))


if __name__ == "__main__":
    asyncio.run(main())
