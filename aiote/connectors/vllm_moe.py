"""Experts of vLLM's layers on several ranks: its `FusedMoEPrepareAndFinalizeModular` over `aiote.moe`.

`open_ranks` opens a group for all layers of one shape, and each layer has an `AiotePrepareAndFinalize` of its own. A
row goes to each expert of a token, unweighted, and the token's rank sums what they return: vLLM's experts see one
expert a row. See docs/connectors.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
)
from vllm.platforms import current_platform
from vllm.v1.worker.ubatching import dbo_current_ubatch_id

from .. import bridge
from ..errors import UsageError
from ..moe import Batch, MoeConfig, Round
from ..moe.held import HeldGroup, Pending

__all__ = ["AiotePrepareAndFinalize", "open_ranks"]

LANES = 2
"""vLLM has two micro-batches under way with dual-batch overlap."""


def open_ranks(
    moe: FusedMoEConfig,
    group: Any = None,
    *,
    members: Sequence[str] | None = None,
    batched: bool = False,
    number: int = 31,
    **settings: Any,
) -> HeldGroup:
    """Open this process's part in the rounds of all layers of a shape; every rank does, and nothing else waits for it.

    moe: vLLM's configuration of the layers, which says experts, top-k, hidden size, type, rank and the most tokens of a
    rank. group: a process group of torch.distributed, by which ranks gather their addresses, vLLM's
    `get_ep_group().cpu_group`; or `members` has them, in the order of ranks. batched: for experts of the format
    BatchedExperts. number: another one for each group of a process. settings: of the engine, as `bridge.acquire`. To be
    closed when no layer is used any more. Raises UsageError for experts that the ranks cannot share evenly.
    """
    parallel = moe.moe_parallel_config
    if moe.num_experts % parallel.ep_size:
        raise UsageError(f"{moe.num_experts} experts cannot be shared evenly by {parallel.ep_size} ranks")
    shared = bridge.acquire(**settings)
    try:
        found: list[Any] = list(members or [])
        if not found:
            found = [None] * parallel.ep_size
            torch.distributed.all_gather_object(found, str(shared.engine.address), group)
        kind = str(moe.in_dtype).removeprefix("torch.")
        config = MoeConfig(
            experts=moe.num_experts,
            top_k=moe.experts_per_token,
            hidden=moe.hidden_dim,
            tokens=moe.max_num_tokens,
            dtype=kind,
            out_dtype=kind,
            layout="grouped" if batched else "contiguous",
            lanes=LANES,
        )
        held = HeldGroup(shared, found, parallel.ep_rank, config, group=number)
    except BaseException:
        shared.close()
        raise
    held.then(shared.close)
    return held


class AiotePrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):  # type: ignore[misc]
    """What one layer does before and after its experts. Calls come from one thread at a time, on every rank alike."""

    def __init__(self, ranks: HeldGroup, local_ids: bool | None = None) -> None:
        """Take a group of `open_ranks`. local_ids: experts are told the rank's own numbers of experts, not all ranks'.

        By default they are on a CPU, where vLLM's experts take no expert_map.
        """
        super().__init__()
        self._ranks = ranks
        self._local_ids = current_platform.is_cpu() if local_ids is None else local_ids
        self._batched = ranks.config.layout == "grouped"
        self._rounds: list[tuple[Round, Batch] | None] = [None] * LANES

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        """Say how rows lie: one after the other, or (experts of the rank, rows, hidden)."""
        formats = mk.FusedMoEActivationFormat
        return formats.BatchedExperts if self._batched else formats.Standard

    def topk_indices_dtype(self) -> torch.dtype | None:
        """Say the type of ids, which vLLM's experts on a CPU want as well."""
        return torch.int32

    def max_num_tokens_per_rank(self) -> int | None:
        """Say how many tokens a rank may have in a round."""
        return self._ranks.config.tokens

    def num_dispatchers(self) -> int:
        """Say how many ranks there are."""
        return self._ranks.moe.sizes.ranks

    def output_is_reduced(self) -> bool:
        """Say that the output needs no sum over ranks."""
        return True

    def supports_async(self) -> bool:
        """Say that both steps may be begun, and waited for later."""
        return True

    # Before the experts.

    def prepare_async(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool,
    ) -> tuple[Callable[[], None], Callable[[], mk.PrepareResultType]]:
        """Send tokens to the ranks of their experts; return what waits for those of others, and what returns them.

        The arrays may be used again at once. Raises UsageError for another shape than the group's, NotImplementedError
        for inputs that would have to be quantized here, and what `MoeGroup.dispatch` raises.
        """
        if quant_config.quant_dtype is not None and not defer_input_quant:
            raise NotImplementedError("aiote dispatches tokens as they are: experts that quantize them are needed")
        if num_experts != self._ranks.config.experts:
            raise UsageError(f"num_experts={num_experts}: the group was opened for {self._ranks.config.experts}")
        weights = topk_weights.float()
        if apply_router_weight_on_input:
            if topk_ids.size(1) != 1:
                raise NotImplementedError("apply_router_weight_on_input is for top-1 alone")
            a1, weights = a1 * topk_weights.to(a1.dtype), torch.ones_like(weights)
        lane = dbo_current_ubatch_id()

        def send() -> Round:
            return self._ranks.moe.dispatch_send(a1, topk_ids, weights, lane=lane)

        round = self._ranks.run(send)
        came: list[Batch] = []
        hook = Pending(self._ranks.start(round.dispatch_recv()), came.append)

        def receive() -> mk.PrepareResultType:
            hook()
            self._rounds[lane] = round, came[0]
            return self._given(came[0])

        return hook, receive

    def _given(self, batch: Batch) -> mk.PrepareResultType:
        counts = torch.from_numpy(batch.expert_num_tokens)
        meta = mk.ExpertTokensMetadata(expert_num_tokens=counts, expert_num_tokens_cpu=counts)
        if self._batched:
            return batch.x, None, meta, None, None
        rows = int(batch.offsets[-1])
        first = 0 if self._local_ids else self._ranks.moe.sizes.first(self._ranks.moe.rank)
        ids = torch.repeat_interleave(torch.arange(first, first + len(counts), dtype=torch.int32), counts)
        # Experts want rows without gaps; in the group's memory each has its token's number behind it.
        return batch.x[:rows].contiguous(), None, meta, ids.view(-1, 1), torch.ones(rows, 1)

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool,
    ) -> mk.PrepareResultType:
        """Send tokens, and return what this rank's experts got; as `prepare_async`."""
        return self.prepare_async(
            a1,
            topk_weights,
            topk_ids,
            num_experts,
            expert_map,
            apply_router_weight_on_input,
            quant_config,
            defer_input_quant,
        )[1]()

    # After them.

    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Send back what the experts returned; return what waits until `output` has the weighted sums.

        The weights are those that were dispatched. Raises UsageError without a `prepare` before, and what
        `MoeGroup.combine` raises.
        """
        lane = dbo_current_ubatch_id()
        prepared, self._rounds[lane] = self._rounds[lane], None
        if prepared is None:
            raise UsageError("finalize: nothing was prepared")
        round, batch = prepared
        y: torch.Tensor | None = fused_expert_output
        if not self._batched:
            if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
                weight_and_reduce_impl = TopKWeightAndReduceContiguous()
            rows = batch.y[: int(batch.offsets[-1])]
            if len(rows):
                # Of one expert a row, with weight 1.
                rows.copy_(weight_and_reduce_impl.apply(None, fused_expert_output, topk_weights, topk_ids, False))
            y = None
        self._ranks.run(round.combine_send, y)
        return Pending(self._ranks.start(round.combine_recv(output))), lambda: None

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> None:
        """Put the weighted sums of what the experts returned into `output`; as `finalize_async`."""
        self.finalize_async(
            output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl
        )[0]()
