"""What ranks of `aiote.connectors.vllm_moe` do in tests, each in a process of its own: see `torch_ranks`.

Every rank knows all experts and all ranks' tokens by their seeds, so each computes what the layer gives where one
process has all experts.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, distributed
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG as QUANT,
)
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.layers.fused_moe.experts import fused_batched_moe
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.experts.fused_batched_moe import NaiveBatchedExperts
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import MoEPrepareAndFinalizeNoDPEPModular

from aiote.connectors import vllm_moe
from aiote.moe import deep_ep

EXPERTS, TOP_K, INNER, TOKENS = 12, 3, 64, 10


def config(rank: int, ranks: int, hidden: int) -> FusedMoEConfig:
    parallel = FusedMoEParallelConfig.make_no_parallel()
    parallel.ep_size, parallel.ep_rank, parallel.use_ep = ranks, rank, ranks > 1
    return FusedMoEConfig(
        num_experts=EXPERTS,
        experts_per_token=TOP_K,
        hidden_dim=hidden,
        intermediate_size=INNER,
        num_local_experts=EXPERTS // ranks,
        num_logical_experts=EXPERTS,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
        max_num_tokens=TOKENS,
    )


class Layer:
    """The weights of all experts, and the tokens of all ranks; rank 1 has none."""

    def __init__(self, ranks: int, hidden: int) -> None:
        dice = torch.Generator().manual_seed(5)
        self.hidden, self.ranks = hidden, ranks
        self.w1 = (torch.randn(EXPERTS, 2 * INNER, hidden, generator=dice) / 8).bfloat16()
        self.w2 = (torch.randn(EXPERTS, hidden, INNER, generator=dice) / 8).bfloat16()
        counts = [0 if rank == 1 else TOKENS - rank for rank in range(ranks)]
        self.x = [torch.randn(count, hidden, generator=dice).bfloat16() for count in counts]
        scores = [torch.randn(count, EXPERTS, generator=dice).softmax(1) for count in counts]
        self.weights = [one.topk(TOP_K, 1)[0] for one in scores]
        self.ids = [one.topk(TOP_K, 1)[1].int() for one in scores]

    def own(self, rank: int) -> slice:
        here = EXPERTS // self.ranks
        return slice(rank * here, (rank + 1) * here)


def packed(layer: Layer, part: slice, moe: FusedMoEConfig) -> tuple[CPUUnquantizedExperts, Tensor, Tensor]:
    """Return vLLM's experts for a CPU, and the weights as they want them."""
    experts, weights = CPUUnquantizedExperts(moe, QUANT), torch.nn.Module()
    weights.w13_weight = torch.nn.Parameter(layer.w1[part].clone(), requires_grad=False)
    weights.w2_weight = torch.nn.Parameter(layer.w2[part].clone(), requires_grad=False)
    experts.process_weights_after_loading(weights)
    return experts, weights.w13_weight, weights.w2_weight


def apply(kernel: mk.FusedMoEKernel, x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    made: Tensor = kernel.apply(x, w1, w2, weights, ids, MoEActivation.SILU, EXPERTS, None, False)
    return made


def row_by_row(layer: Layer, rank: int) -> Tensor:
    """Return what vLLM's experts give in one process, one expert a row, summed in float32 in the order of k."""
    experts, w1, w2 = packed(layer, slice(0, EXPERTS), config(0, 1, layer.hidden))
    alone = mk.FusedMoEKernel(MoEPrepareAndFinalizeNoDPEPModular(), experts)
    total = torch.zeros(layer.x[rank].shape)
    for slot in range(TOP_K):
        ids = layer.ids[rank][:, slot : slot + 1].contiguous()
        rows = apply(alone, layer.x[rank], w1, w2, torch.ones(ids.shape), ids)
        total += layer.weights[rank][:, slot, None] * rows.float()
    return total.bfloat16()


def standard(rank: int, ranks: int) -> float:
    """vLLM's experts for a CPU on several ranks: the bits of one process, expert by expert; close to its fused sum."""
    layer, moe = Layer(ranks, 96), config(rank, ranks, 96)
    with vllm_moe.open_ranks(moe, distributed.group.WORLD) as opened:
        experts, w1, w2 = packed(layer, layer.own(rank), moe)
        kernel = mk.FusedMoEKernel(vllm_moe.AiotePrepareAndFinalize(opened), experts)
        # A second layer has the same ranks.
        again = mk.FusedMoEKernel(vllm_moe.AiotePrepareAndFinalize(opened), experts)
        x, weights, ids = layer.x[rank], layer.weights[rank], layer.ids[rank]
        found = [apply(one, x, w1, w2, weights, ids) for one in (kernel, again, kernel)]
    alone, all1, all2 = packed(layer, slice(0, EXPERTS), config(0, 1, 96))
    if not len(x):
        assert [tuple(one.shape) for one in found] == [(0, 96)] * 3
        return 0.0
    wanted = row_by_row(layer, rank)
    assert all(torch.equal(one, wanted) for one in found)
    whole = apply(mk.FusedMoEKernel(MoEPrepareAndFinalizeNoDPEPModular(), alone), x, all1, all2, weights, ids)
    torch.testing.assert_close(found[0], whole, rtol=0.02, atol=0.02)
    return float((found[0].float() - whole.float()).abs().max() / whole.float().abs().max())


def naive(moe: FusedMoEConfig, ranks: int) -> NaiveBatchedExperts:
    """Return vLLM's reference experts, which ask a GPU whether it records a graph, and fail without one."""
    fused_batched_moe._is_capturing_or_compiling = lambda: False
    return NaiveBatchedExperts(moe, QUANT, max_num_tokens=TOKENS, num_dispatchers=ranks)


def by_expert(layer: Layer, rank: int) -> Tensor:
    """Return the layer's output in one process whose experts each multiply the rows of all ranks at once."""
    rows: dict[tuple[int, int, int], Tensor] = {}
    for expert in range(EXPERTS):
        named = [(r, t, k) for r in range(layer.ranks) for t, k in (layer.ids[r] == expert).nonzero().tolist()]
        if named:
            x = torch.stack([layer.x[r][t] for r, t, _ in named])
            tmp = torch.empty(len(x), INNER, dtype=torch.bfloat16)
            torch.ops._C.silu_and_mul(tmp, x @ layer.w1[expert].T)
            rows.update(zip(named, tmp @ layer.w2[expert].T, strict=True))
    total = torch.zeros(layer.x[rank].shape)
    for token in range(len(total)):
        for slot in range(TOP_K):
            total[token] += layer.weights[rank][token, slot] * rows[rank, token, slot].float()
    return total.bfloat16()


def batched(rank: int, ranks: int) -> None:
    """vLLM's reference experts of the batched format, and two micro-batches begun before either is finished."""
    layer, moe = Layer(ranks, 80), config(rank, ranks, 80)
    x, weights, ids, own = layer.x[rank], layer.weights[rank], layer.ids[rank], layer.own(rank)
    w1, w2 = layer.w1[own], layer.w2[own]
    wanted = by_expert(layer, rank)
    with vllm_moe.open_ranks(moe, distributed.group.WORLD, batched=True) as opened:
        both = vllm_moe.AiotePrepareAndFinalize(opened)
        experts = naive(moe, ranks)
        assert torch.equal(apply(mk.FusedMoEKernel(both, experts), x, w1, w2, weights, ids), wanted)
        micro: list[Any] = []
        for number in range(2):
            vllm_moe.dbo_current_ubatch_id = lambda number=number: number
            micro.append(both.prepare_async(x, weights, ids, EXPERTS, None, False, QUANT, False))
        ends, outs = [], [torch.full(x.shape, 7.0, dtype=x.dtype) for _ in range(2)]
        for number, (hook, receive) in enumerate(micro):
            vllm_moe.dbo_current_ubatch_id = lambda number=number: number
            hook()
            given, _, meta, _, _ = receive()
            y = torch.empty(given.shape, dtype=torch.bfloat16)
            work = torch.empty(2, len(given[0]), 2 * INNER, dtype=torch.bfloat16)
            plain = (MoEActivation.SILU, EXPERTS, None, None, None, work[0], work[1], meta, False)
            experts.apply(y, given, w1, w2, weights, ids, *plain)
            ends.append(
                both.finalize_async(outs[number], y, weights, ids, False, experts.finalize_weight_and_reduce_impl())
            )
        for hook, receive in ends:
            hook()
            receive()
        assert all(torch.equal(out, wanted) for out in outs)


def drop_in(rank: int, ranks: int) -> None:
    """vLLM's own code for DeepEP, with `aiote.moe.deep_ep` as the module deep_ep."""
    sys.modules["deep_ep"] = deep_ep
    from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ll import DeepEPLLPrepareAndFinalize

    layer, moe = Layer(ranks, 2048), config(rank, ranks, 2048)
    own = layer.own(rank)
    nbytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(TOKENS, 2048, ranks, EXPERTS)
    buffer = deep_ep.Buffer(
        distributed.group.WORLD, 0, nbytes, low_latency_mode=True, num_qps_per_rank=EXPERTS // ranks
    )
    for fp8 in (False, True):
        both = DeepEPLLPrepareAndFinalize(buffer, TOKENS, ranks, use_fp8_dispatch=fp8)
        kernel = mk.FusedMoEKernel(both, naive(moe, ranks))
        given = layer.x[rank], layer.w1[own], layer.w2[own], layer.weights[rank], layer.ids[rank].long()
        found, wanted = apply(kernel, *given), by_expert(layer, rank)
        if fp8:
            torch.testing.assert_close(
                found, wanted, rtol=0.1, atol=0.1 * float(wanted.abs().max() if len(wanted) else 1)
            )
        else:
            assert torch.equal(found, wanted)
    buffer.destroy()


def refusals(rank: int, ranks: int) -> None:
    """What cannot be had says so, and harms nothing."""
    layer, moe = Layer(ranks, 96), config(rank, ranks, 96)
    x, weights, ids = layer.x[rank], layer.weights[rank], layer.ids[rank]
    with vllm_moe.open_ranks(moe, distributed.group.WORLD) as opened:
        both = vllm_moe.AiotePrepareAndFinalize(opened)
        experts, w1, w2 = packed(layer, layer.own(rank), moe)
        quantized = type(QUANT).make(torch.float8_e4m3fn)
        for wrong in (
            lambda: both.prepare(x, weights, ids, EXPERTS, None, False, quantized, False),
            lambda: both.prepare(x, weights, ids, EXPERTS + 1, None, False, QUANT, True),
            lambda: both.prepare(x, weights, ids, EXPERTS, None, True, QUANT, True),
            lambda: both.prepare(x.float(), weights, ids, EXPERTS, None, False, QUANT, True),
            lambda: both.finalize(x, x, weights, ids, False, experts.finalize_weight_and_reduce_impl()),
        ):
            try:
                wrong()
            except (vllm_moe.UsageError, NotImplementedError):
                continue
            raise AssertionError("nothing was refused")
        found = apply(mk.FusedMoEKernel(both, experts), x, w1, w2, weights, ids)
        if len(x):
            assert torch.equal(found, row_by_row(layer, rank))
