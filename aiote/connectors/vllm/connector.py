"""vLLM's KV connector: one engine computes prompts, another decodes them; see docs/connectors.md.

One class has both roles. In the scheduler it holds a `RequestTable`, in each worker `RankTransfers`; this module
translates vLLM's objects into theirs. vLLM calls synchronously, and only `shutdown` waits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import AttentionSpec, CrossAttentionSpec, FullAttentionSpec, MLAAttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from ...errors import UsageError
from .layout import Layer, cache_of, layer_number
from .requests import RequestTable, Steps
from .transfers import RankTransfers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["AioteConnector"]

logger = init_logger(f"vllm.{__name__}")
LEASE_S, LEASE_LIMIT_S = 30, 600
RENEWALS = 6
"""Renewals within the duration of a lease, so that some may be late."""
ENDED_WELL = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass
class AioteConnectorMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The scheduler's message to the workers in a step."""

    steps: Steps


@dataclass
class AioteHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A worker's message to the scheduler at the start."""

    address: str


class AioteConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Moves KV caches from prefill to decode engines, between vLLM's own tensors.

    `kv_connector_extra_config` may have "aiote", settings of `aiote.open_engine`; "kv_lease_duration", seconds that
    a computed prompt waits for its decode engine (30); "kv_lease_limit", the most seconds for which a decode engine
    can renew that time while the request is queued there (600); "reads": if true, decode workers read, if false
    (the default), prefill workers write; "layers": if true, a prefill worker offers each layer when it is computed,
    if false (the default), a prompt when all of it is; "layer_loads": if true, a decode engine computes a request
    once its first layer has arrived, and waits for each other layer in that step, if false (the default), once all
    have. vLLM's `kv_load_failure_policy` decides what happens to a request whose cache does not come.
    """

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        if parallel.prefill_context_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
            raise UsageError("the KV connector does not support context parallelism; set its sizes to 1")
        self._groups = _groups(kv_cache_config)
        self._layered = self._is_layered()
        self._early = self._loads_layers(len(kv_cache_config.kv_cache_groups))
        self._loading: dict[str, Request] = {}
        self._table = RequestTable(
            self._kv_transfer_config.engine_id,
            {group: spec.block_size for group, (spec, _) in self._groups.items()},
            produces=self._kv_transfer_config.is_kv_producer,
            settings={"tp_size": parallel.tensor_parallel_size, "pp_size": parallel.pipeline_parallel_size},
            interval=self._seconds("kv_lease_duration", LEASE_S) / RENEWALS,
            layered=self._layered,
            early=self._early,
        )
        self._transfers: RankTransfers | None = None

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the layout with pages of whole heads, layer by layer, if vLLM has a choice; None if it has not."""
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return whether vLLM has to call the connector at each layer, which a graph of the whole model does not."""
        return bool(extra_config.get("layers", False) or extra_config.get("layer_loads", False))

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Return False: sleep mode unmaps the tensors, but they stay registered."""
        return False

    def _seconds(self, name: str, default: float) -> float:
        seconds = float(self._kv_transfer_config.kv_connector_extra_config.get(name, default))
        if not seconds > 0:
            raise UsageError(f"{name}={seconds}: expected a number of seconds above 0")
        return seconds

    def _is_layered(self) -> bool:
        """Return whether prompts are offered layer by layer: if that is wished, and no block is freed in a prompt."""
        if not self._kv_transfer_config.kv_connector_extra_config.get("layers", False):
            return False
        for spec, names in self._groups.values():
            specs = getattr(spec, "kv_cache_specs", {"": spec}).values()
            if any(type(one) not in (FullAttentionSpec, MLAAttentionSpec) for one in specs):
                logger.warning(
                    "%s: a cache of %s is offered as a whole, because vLLM frees blocks of it within a prompt",
                    names[0],
                    type(spec).__name__,
                )
                return False
        return True

    def _loads_layers(self, groups: int) -> bool:
        """Return whether requests are computed before all their layers are here: if that is wished, and vLLM can be
        told afterwards that the layers have not come.
        """
        config, parallel = self._kv_transfer_config, self._vllm_config.parallel_config
        if not config.is_kv_consumer or not config.kv_connector_extra_config.get("layer_loads", False):
            return False
        obstacles = {
            "several ranks": parallel.world_size > 1,
            "several groups of blocks": groups > 1,
            "asynchronous scheduling": bool(self._vllm_config.scheduler_config.async_scheduling),
            "layers in an engine that is also a producer": self._layered and config.is_kv_producer,
        }
        found = [name for name, present in obstacles.items() if present]
        if found:
            logger.warning("layer_loads has no effect with %s: a request waits for all its layers", " or ".join(found))
        return not found

    # In the scheduler.

    def on_new_request(self, request: Request) -> None:
        """Record that a request is queued, so that the other side keeps its cache."""
        self._table.record_arrived(request.request_id, request.kv_transfer_params, time.monotonic())
        if self._kv_transfer_config.is_kv_producer:
            params, tokens = request.kv_transfer_params, request.num_prompt_tokens
            self._table.prompts.record_arrived(request.request_id, params, tokens)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Store the addresses of the workers. Metadata of other connectors, from a `MultiConnector`, is ignored."""
        said = [metadata[rank] for rank in sorted(metadata)]
        self._table.addresses = [one.address for one in said if isinstance(one, AioteHandshake)]

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Return all groups that are transferred, because a transfer fills the request's own blocks of each."""
        return tuple(self._groups)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens of a prompt come from another engine, and whether they come between steps."""
        found = self._table.external(request.kv_transfer_params, request.num_prompt_tokens, num_computed_tokens)
        return found, found > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Request that the workers receive a request's cache into its blocks."""
        params, prompt = request.kv_transfer_params, request.num_prompt_tokens
        self._table.record_allocated(request.request_id, params, prompt, blocks.get_block_ids(), num_external_tokens)
        if self._early and num_external_tokens:
            self._loading[request.request_id] = request

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> AioteConnectorMetadata:
        """Return the news for the workers since the last step."""
        if self._layered:
            self._record_step(scheduler_output)
        if self._table.uncomputed:
            self._record_loads(scheduler_output)
        return AioteConnectorMetadata(self._table.take_steps(time.monotonic()))

    def _record_step(self, scheduled: SchedulerOutput) -> None:
        """Record which prompts a step computes, and how far."""
        prompts, manager = self._table.prompts, self._kv_cache_manager
        for request in scheduled.preempted_req_ids or ():
            prompts.record_preempted(request)
        cached = scheduled.scheduled_cached_reqs
        before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        before |= {one.req_id: one.num_computed_tokens for one in scheduled.scheduled_new_reqs}
        for request, computed in before.items():
            if manager is not None and prompts.is_computing(request):
                computed += scheduled.num_scheduled_tokens[request]
                prompts.record_step(request, computed, manager.get_block_ids(request))

    def _record_loads(self, scheduled: SchedulerOutput) -> None:
        """Record which of the requests that were received early a step computes, and which have their blocks only."""
        loads = {name: self._loading[name] for name in self._table.uncomputed}
        computed = [name for name in loads if name in scheduled.num_scheduled_tokens]
        waiting = RequestStatus.WAITING_FOR_REMOTE_KVS
        held = [name for name, request in loads.items() if name not in computed and request.status is not waiting]
        self._table.record_computation(computed, held)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Record the requests that the workers have received. Forget the contents of blocks that have not come."""
        for request in connector_output.finished_recving or ():
            self._table.record_received(request)
        if self._early and connector_output.invalid_block_ids and self._kv_cache_manager is not None:
            # Otherwise a request with the same prefix may take them before they are computed here.
            self._kv_cache_manager.evict_blocks(connector_output.invalid_block_ids)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Do as `request_finished_all_groups`, for an engine with a single group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Offer a prompt that was computed for another engine.

        Returns whether vLLM has to keep its blocks, and the parameters for its receiver.
        """
        # The last sampled token has no cache yet.
        tokens = min(request.num_computed_tokens, request.num_tokens - 1) if request.status in ENDED_WELL else 0
        held = self._table.prompts.holds(request.request_id)
        held |= self._table.record_left(request.request_id, has_output=request.num_output_tokens > 0)
        self._loading.pop(request.request_id, None)
        params = self._table.record_finished(request.request_id, request.kv_transfer_params, tokens, block_ids)
        return held or params is not None, params

    # In a worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open the engine and register the tensors. Raises UsageError for tensors that cannot be transferred."""
        # vLLM does not tell a worker its rank earlier than this.
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        config, parallel = self._kv_transfer_config, self._vllm_config.parallel_config
        rank = get_tp_group().rank_in_group
        extra = config.kv_connector_extra_config
        layers, sizes = {}, None
        numbers = {name: layer_number(name) for _, names in self._groups.values() for name in names}
        numbers = {name: number for name, number in numbers.items() if name in kv_caches}
        if self._layered:
            layers = numbers
            sizes = {group: spec.block_size for group, (spec, _) in self._groups.items()}
        self._transfers = RankTransfers(
            cache_of(
                f"{config.engine_id} rank {get_pp_group().rank_in_group}.{rank}",
                self._layers(kv_caches, rank),
                parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
            ),
            produces=config.is_kv_producer,
            consumes=config.is_kv_consumer,
            turn=rank,
            reads=bool(extra.get("reads", False)),
            lease=self._seconds("kv_lease_duration", LEASE_S),
            lease_limit=self._seconds("kv_lease_limit", LEASE_LIMIT_S),
            layers=layers,
            block_tokens=sizes,
            loads=numbers if self._early else None,
            settings=extra.get("aiote", {}),
        )

    def _layers(self, kv_caches: dict[str, torch.Tensor], rank: int) -> Iterator[Layer]:
        ranks = self._vllm_config.parallel_config.tensor_parallel_size
        heads = self._vllm_config.model_config.get_total_num_kv_heads()
        context = self._vllm_config.compilation_config.static_forward_context
        for group, (spec, names) in self._groups.items():
            for name in names:
                if name not in kv_caches:
                    continue  # of another stage of the pipeline
                tensor = kv_caches[name]
                # With fewer heads than ranks, several ranks have the same head.
                first = rank * tensor.shape[1] if heads >= ranks else rank * heads // ranks
                first = 0 if isinstance(spec, MLAAttentionSpec) else first
                yield Layer(name, tensor, group, first, self._kernels(context.get(name), tensor))

    def _kernels(self, layer: Any, tensor: torch.Tensor) -> str:
        """Return what determines a block's bytes besides their type: the kernels, and the real type behind uint8."""
        kernels = getattr(layer, "isa", type(getattr(layer, "impl", None)).__name__)
        kind = str(self._vllm_config.cache_config.cache_dtype).replace("fp8_e4m3", "fp8")
        return f"{kernels} {kind}" if tensor.dtype is torch.uint8 else str(kernels)

    def get_handshake_metadata(self) -> AioteHandshake | None:
        """Return the address of this worker, once it has an engine."""
        return None if self._transfers is None else AioteHandshake(self._transfers.address)

    def handle_preemptions(self, kv_connector_metadata: AioteConnectorMetadata) -> None:
        """Begin a step before its blocks are written: wait until no transfer reads those of preempted requests."""
        if self._transfers is not None:
            self._transfers.begin(kv_connector_metadata.steps)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin the transfers that are new in a step."""
        if self._transfers is not None:
            self._transfers.start(self._get_connector_metadata().steps)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose transfers have ended, and whose blocks vLLM may use again."""
        if self._transfers is None:
            return KVConnectorTransferResults()
        ended = self._transfers.take_ended()
        for request, why in ended.failed.items():
            logger.warning("The KV cache of request %s did not arrive: %s", request, why)
        return KVConnectorTransferResults(ended.sent, ended.received, set(ended.failed))

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks of requests whose layers have not all come, although vLLM was told that it may begin."""
        return self._transfers.invalid if self._transfers is not None else set()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for a layer of the requests that have begun, with "layer_loads"; otherwise do nothing, because a request
        is computed only once all its layers are here.
        """
        if self._transfers is not None:
            self._transfers.wait(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Offer a layer of the prompts that the step computes, with "layers"; otherwise do nothing."""
        if self._transfers is not None:
            self._transfers.saved(layer_name)

    def wait_for_save(self) -> None:
        """Offer the layers that were not saved one by one, with "layers". Does not wait for transfers from this rank:
        vLLM keeps the blocks until `get_transfer_results` reports them. Wait for the layers that are still to arrive,
        with "layer_loads".
        """
        if self._transfers is not None:
            self._transfers.end()

    def shutdown(self) -> None:
        """End all transfers, and wait until no transfer touches a block any more."""
        if self._transfers is not None:
            self._transfers.close()


def _groups(kv_cache_config: KVCacheConfig) -> dict[int, tuple[Any, list[str]]]:
    """Return the groups of blocks that are transferred. Raises UsageError for caches that do not hold prompt tokens."""
    groups = {number: kv_cache_config.kv_cache_groups[number] for number in kv_cache_config.transfer_group_ids}
    for group in groups.values():
        spec = group.kv_cache_spec
        specs = getattr(spec, "kv_cache_specs", {"": spec}).values()
        if not all(isinstance(one, AttentionSpec) and not isinstance(one, CrossAttentionSpec) for one in specs):
            raise UsageError(
                f"{group.layer_names[0]}: the KV connector does not support a cache of {type(spec).__name__}"
            )
    return {number: (group.kv_cache_spec, group.layer_names) for number, group in groups.items()}
