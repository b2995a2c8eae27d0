"""Experts of vLLM's layers on several ranks: its `FusedMoEPrepareAndFinalizeModular` over `aiote.moe`.

`open_ranks` opens a group for all layers of one shape, and each layer has an `AiotePrepareAndFinalize` of its own. Each
expert of a token gets a row, unweighted, and the token's rank computes the weighted sum of the results; vLLM's experts
see one expert for each row. See docs/connectors.md.
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
from ..moe.blocking import HeldGroup, PendingStep

__all__ = ["AiotePrepareAndFinalize", "open_ranks"]

LANES = 2
"""With dual-batch overlap vLLM has two micro-batches in progress."""


def open_ranks(
    moe: FusedMoEConfig,
    group: Any = None,
    *,
    members: Sequence[str] | None = None,
    batched: bool = False,
    number: int = 31,
    **settings: Any,
) -> HeldGroup:
    """Open this process's part in the rounds of all layers of a shape. Every rank calls it, and it waits for all ranks.

    moe: vLLM's configuration of the layers, with the experts, top-k, hidden size, type, rank and the most tokens of a
    rank. group: a process group of torch.distributed that gathers the ranks' addresses, such as vLLM's
    `get_ep_group().cpu_group`; or `members` has the addresses, in the order of ranks. batched: for experts with the
    format BatchedExperts. number: a different one for each group of a process. settings: those of the engine, as in
    `bridge.acquire`. The caller closes the result when it uses no layer any more. Raises UsageError if the ranks cannot
    share the experts evenly, and the errors of `open_group`.
    """
    parallel = moe.moe_parallel_config
    if moe.num_experts % parallel.ep_size:
        raise UsageError(f"{moe.num_experts} experts cannot be divided evenly among {parallel.ep_size} ranks")
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
    held.call_at_close(shared.close)
    return held


class AiotePrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):  # type: ignore[misc]
    """The steps of one layer before and after its experts. Every rank makes the same calls, in one thread at a time."""

    def __init__(self, ranks: HeldGroup, local_ids: bool | None = None) -> None:
        """Use a group from `open_ranks`. local_ids: experts get expert numbers that count this rank's experts from 0.

        Otherwise the numbers count the experts of all ranks. The default is True on a CPU, because vLLM's experts there
        take no expert_map.
        """
        super().__init__()
        self._ranks = ranks
        self._local_ids = current_platform.is_cpu() if local_ids is None else local_ids
        self._batched = ranks.config.layout == "grouped"
        self._rounds: list[tuple[Round, Batch] | None] = [None] * LANES

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        """The layout of rows: one after the other, or (experts of the rank, rows, hidden)."""
        formats = mk.FusedMoEActivationFormat
        return formats.BatchedExperts if self._batched else formats.Standard

    def topk_indices_dtype(self) -> torch.dtype | None:
        """Return the type of ids, which vLLM's experts on a CPU need as well."""
        return torch.int32

    def max_num_tokens_per_rank(self) -> int | None:
        """Return how many tokens a rank may have in a round."""
        return self._ranks.config.tokens

    def num_dispatchers(self) -> int:
        """Return the number of ranks."""
        return self._ranks.moe.sizes.ranks

    def output_is_reduced(self) -> bool:
        """Return True: the output needs no sum over ranks."""
        return True

    def supports_async(self) -> bool:
        """Return True: the caller may begin both steps, and wait for them later."""
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
        """Send tokens to the ranks of their experts; return a hook that waits for the rows of all ranks, and a function
        that returns them.

        The caller may reuse the arrays at once. Raises UsageError for another shape than the group's,
        NotImplementedError for inputs that would have to be quantized here and for `apply_router_weight_on_input` with
        more than top-1, and the errors of `MoeGroup.dispatch`.
        """
        if quant_config.quant_dtype is not None and not defer_input_quant:
            raise NotImplementedError("aiote dispatches tokens unquantized: use experts that quantize them")
        if num_experts != self._ranks.config.experts:
            raise UsageError(f"num_experts={num_experts}: the group was opened for {self._ranks.config.experts}")
        weights = topk_weights.float()
        if apply_router_weight_on_input:
            if topk_ids.size(1) != 1:
                raise NotImplementedError("apply_router_weight_on_input works with top-1 only")
            a1, weights = a1 * topk_weights.to(a1.dtype), torch.ones_like(weights)
        lane = dbo_current_ubatch_id()

        def send() -> Round:
            return self._ranks.moe.dispatch_send(a1, topk_ids, weights, lane=lane)

        round = self._ranks.run(send)
        came: list[Batch] = []
        hook = PendingStep(self._ranks.start(round.dispatch_recv()), came.append)

        def receive() -> mk.PrepareResultType:
            hook()
            self._rounds[lane] = round, came[0]
            return self._prepare_result(came[0])

        return hook, receive

    def _prepare_result(self, batch: Batch) -> mk.PrepareResultType:
        counts = torch.from_numpy(batch.expert_num_tokens)
        meta = mk.ExpertTokensMetadata(expert_num_tokens=counts, expert_num_tokens_cpu=counts)
        if self._batched:
            return batch.x, None, meta, None, None
        rows = int(batch.offsets[-1])
        first = 0 if self._local_ids else self._ranks.moe.sizes.first_expert_of(self._ranks.moe.rank)
        ids = torch.repeat_interleave(torch.arange(first, first + len(counts), dtype=torch.int32), counts)
        # Experts need rows without gaps; in the group's memory each row is followed by its tail.
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
        """Send tokens, wait, and return the rows of this rank's experts; otherwise as `prepare_async`."""
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
        """Send the experts' results back; return a hook that waits until `output` has the weighted sums, and a function
        that does nothing.

        The weights are the dispatched ones. Raises UsageError without a preceding `prepare`, and the errors of
        `MoeGroup.combine`.
        """
        lane = dbo_current_ubatch_id()
        prepared, self._rounds[lane] = self._rounds[lane], None
        if prepared is None:
            raise UsageError("finalize: call prepare first")
        round, batch = prepared
        y: torch.Tensor | None = fused_expert_output
        if not self._batched:
            if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
                weight_and_reduce_impl = TopKWeightAndReduceContiguous()
            rows = batch.y[: int(batch.offsets[-1])]
            if len(rows):
                # Each row has one expert, with weight 1.
                rows.copy_(weight_and_reduce_impl.apply(None, fused_expert_output, topk_weights, topk_ids, False))
            y = None
        self._ranks.run(round.combine_send, y)
        return PendingStep(self._ranks.start(round.combine_recv(output))), lambda: None

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> None:
        """Send the experts' results back, and wait for the weighted sums in `output`; otherwise as `finalize_async`."""
        self.finalize_async(
            output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl
        )[0]()
