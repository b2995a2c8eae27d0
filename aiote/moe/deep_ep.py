"""DeepEP's low-latency `Buffer` over `aiote.moe`, on torch CPU tensors: `from aiote.moe import deep_ep`.

The names, arguments and returned tuples are those of DeepEP's `Buffer` (1.2), which UCCL, NIXL and Mooncake copied.
docs/moe.md lists the differences. Every rank makes the same calls in the same order, as with DeepEP.

A dispatch is a round of a group; the first dispatch of a shape opens the group for that shape. Each group has two
lanes, so two dispatches may wait for their combine. DeepEP lets a program dispatch without a combine, and combine twice
with one handle, but a round of `aiote.moe` has exactly one of each. Therefore a round without a combine is ended when
its lane is needed, and a combine with a handle whose round is over dispatches anew. The order of rows is always the
same, so each row then has its earlier place.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import aiote

from .. import bridge
from .blocking import HeldGroup, PendingStep
from .config import MoeConfig
from .dispatched import Dispatched, Handle, Shape, registered_bytes

__all__ = ["Buffer", "EventOverlap", "topk_idx_t"]

topk_idx_t = torch.int64
LANES = 2
BLOCK = 4
"""How many of an engine's 32 groups a buffer may have: enough for two shapes, with and without fp8."""

OPEN_TIMEOUT = 100.0
"""Seconds after which DeepEP's own kernels give up on a rank."""

_blocks: set[int] = set()
_lock = threading.Lock()


class EventOverlap:
    """The replacement of a CUDA event: `current_stream_wait()` waits for a call that was made with `async_finish`."""

    def __init__(self, event: Callable[[], None] | None = None) -> None:
        self.event = event

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Wait until the results of the call are there. Return at once if the call has waited, or returned a hook."""
        if self.event is not None:
            self.event()
        if release_handle:
            self.event = None

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        self.current_stream_wait()


class Buffer:
    """One rank's part in low-latency dispatches and combines. Any thread may call it; calls run one at a time.

    Ranks find each other by `group`, of torch.distributed, or `comm`, of mpi4py, which gather their engines' addresses.
    Without either, `members` has the addresses of all ranks in order, and `rank` is this rank's number. The address of
    this process is `aiote.bridge.acquire(**settings).engine.address`, where `settings` are the engine's.
    """

    num_sms = 20

    def __init__(
        self,
        group: Any = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        members: Sequence[aiote.Address | str] | None = None,
        rank: int | None = None,
        block: int | None = None,
        settings: Mapping[str, Any] | None = None,
        open_timeout: float | None = OPEN_TIMEOUT,
    ) -> None:
        """Find the other ranks. The first dispatch of each shape registers memory, at most `num_rdma_bytes` in all.

        With `enable_shrink` a lost rank is masked; without, it makes every rank's calls raise PeerLostError.
        num_nvl_bytes, num_qps_per_rank and allow_* are accepted and have no effect. block: each of several buffers in a
        process needs a number of its own, from 0 to 7, the same on all ranks; `group` or `comm` agree on it if there is
        one. open_timeout: seconds that the first dispatch of a shape waits for the same dispatch of the other ranks;
        then it raises ConnectTimeoutError, which names the ranks that have not come. With None it waits without a
        limit. Raises UsageError without `low_latency_mode`, because only the low-latency calls exist.
        """
        if not low_latency_mode:
            raise aiote.UsageError("Buffer: aiote has the low-latency calls only: pass low_latency_mode=True")
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self.enable_shrink = enable_shrink
        self._open_timeout = math.inf if open_timeout is None else open_timeout
        self.group = group if group is not None else comm
        self._lock = threading.RLock()
        self._shapes: dict[tuple[int, ...], Shape] = {}
        self._masked: set[int] = set()
        self._bridge = bridge.acquire(**(settings or {}))
        try:
            self._learn_members(group, comm, members, rank, block)
        except BaseException:
            self._bridge.close()
            raise

    def _learn_members(self, group: Any, comm: Any, members: Any, rank: int | None, block: int | None) -> None:
        """Learn every rank's address, and agree on the numbers of this buffer's groups."""
        with _lock:
            free = 1 + max(_blocks, default=-1) if block is None else block
            mine = str(self._bridge.engine.address), free
            if group is not None:
                self.rank = group.rank()
                found: list[Any] = [None] * group.size()
                torch.distributed.all_gather_object(found, mine, group)
            elif comm is not None:
                self.rank, found = comm.Get_rank(), comm.allgather(mine)
            elif members is not None and rank is not None:
                self.rank, found = rank, [(str(one), free) for one in members]
            else:
                raise aiote.UsageError("Buffer: expected `group`, or `comm`, or `members` and `rank`")
            self.members = [address for address, _ in found]
            self.group_size = len(self.members)
            self._block = max(number for _, number in found)
            if self._block in _blocks or not 0 <= self._block < 8:
                raise aiote.UsageError(
                    f"block={self._block}: expected a number from 0 to 7 that no other buffer of this process uses"
                )
            _blocks.add(self._block)

    # Calls that need no other rank.

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return the most bytes that are registered for dispatches of this shape, with fp8 and without together.

        It is enough for any top-k and for either value of `enable_shrink`; a usual top-k needs about half of it.
        """
        shape = num_max_dispatch_tokens_per_rank, hidden, num_experts, min(num_experts, 1024)
        return max(
            sum(registered_bytes(_config(*shape, fp8, shrink), num_ranks) for fp8 in (False, True))
            for shrink in (False, True)
        )

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Store a number that has no effect here. Raises UsageError for an odd one."""
        if new_num_sms % 2:
            raise aiote.UsageError(f"set_num_sms: expected an even number, got {new_num_sms}")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event that has occurred already, because the calling thread has done all its earlier work."""
        return EventOverlap()

    # Groups.

    def _shape(self, tokens: int, hidden: int, experts: int, top_k: int, fp8: bool) -> Shape:
        """Return the group for dispatches of a shape; the first call for a shape opens it, on all ranks.

        Raises UsageError if `num_rdma_bytes` or the number of shapes is exceeded, or if the experts cannot be divided
        by the ranks; ConnectTimeoutError and others as `open_group`.
        """
        key = tokens, hidden, experts, top_k, int(fp8)
        if key not in self._shapes:
            self._require_open()
            if experts % self.group_size:
                raise aiote.UsageError(f"num_experts={experts}: expected a multiple of the {self.group_size} ranks")
            config = _config(tokens, hidden, experts, top_k, fp8, self.enable_shrink)
            nbytes = registered_bytes(config, self.group_size) + sum(one.nbytes for one in self._shapes.values())
            if nbytes > self.num_rdma_bytes:
                raise aiote.UsageError(
                    f"num_rdma_bytes={self.num_rdma_bytes}: expected at least {nbytes} for the shapes in use"
                )
            used = {one.number for one in self._shapes.values()}
            numbers = [number for number in range(BLOCK) if number not in used]
            if not numbers:
                raise aiote.UsageError(
                    f"the buffer has {BLOCK} shapes, which is the limit: drop old ones with clean_low_latency_buffer"
                )
            number, masked = BLOCK * self._block + numbers[0], self._masked_ranks()
            how: dict[str, Any] = {"group": number, "masked": masked, "open_timeout": self._open_timeout}
            held = HeldGroup(self._bridge, self.members, self.rank, config, **how)
            self._shapes[key] = Shape(held, numbers[0], registered_bytes(config, self.group_size))
        return self._shapes[key]

    def _require_open(self) -> None:
        if self._bridge.closed:
            raise aiote.ClosedError("the buffer was destroyed")

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Close the groups of all other shapes; every rank calls it. The groups of this shape need no cleaning."""
        with self._lock:
            for key, shape in tuple(self._shapes.items()):
                if key[:3] != (num_max_dispatch_tokens_per_rank, hidden, num_experts):
                    del self._shapes[key]
                    shape.close()

    def destroy(self) -> None:
        """Leave all groups and release the memory. Handles, and results that were not waited for, become unusable.

        A buffer that is not destroyed lives until the process ends. Idempotent.
        """
        with self._lock:
            for shape in self._shapes.values():
                shape.close()
            self._shapes.clear()
            if not self._bridge.closed:
                self._bridge.close()
                with _lock:
                    _blocks.discard(self._block)

    # Rounds.

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, torch.Tensor, Handle, EventOverlap, Callable[[], None] | None]:
        """Send tokens to the ranks of their experts; return the rows of this rank's experts, and a handle to combine.

        x (tokens, hidden) bfloat16, topk_idx (tokens, k) int64, -1 for no expert; the caller may change `x` at once.
        Returns recv_x, recv_count, handle, event, hook. recv_x (experts of the rank, ranks * num_max, hidden) is
        bfloat16. With `use_fp8` it is a pair: these rows as float8_e4m3fn, and scales (..., hidden / 128) float32 or,
        with `use_ue8m0`, (..., hidden / 512) int32, with their last two dimensions in column-major order. recv_count
        (experts of the rank,) int32; rows beyond it are undefined. Rows are in the order of source rank and token.

        The results are complete when this returns; with `async_finish`, once a thread has waited for the event; with
        `return_recv_hook`, once any thread has called the hook. Rows travel meanwhile, whatever this thread does.
        Raises UsageError, PeerLostError, GroupBrokenError. An interruption breaks the group for all ranks.
        """
        _refuse(dispatch_wait_recv_cost_stats is not None, "dispatch_wait_recv_cost_stats: waits are not told by rank")
        _refuse(async_finish and return_recv_hook, "async_finish and return_recv_hook exclude each other")
        _refuse(use_ue8m0 and not (use_fp8 and round_scale), "use_ue8m0 needs use_fp8 and round_scale")
        _refuse(x.dim() != 2 or x.dtype != torch.bfloat16, f"x: (tokens, hidden) bfloat16 is expected, got {x.dtype}")
        unit = 512 if use_ue8m0 else 128 if use_fp8 else 1
        _refuse(x.size(1) % unit != 0, f"hidden={x.size(1)} is no multiple of {unit}")
        with self._lock:
            key = num_max_dispatch_tokens_per_rank, x.size(1), num_experts, topk_idx.size(1)
            shape = self._shape(*key, use_fp8)
            made = Dispatched(shape, topk_idx, key[:3], use_ue8m0, cumulative_local_expert_recv_stats)
            finish = made.send(x, round_scale)
        event, hook = _make_completion(finish, async_finish, return_recv_hook)
        return made.received, made.count, made.handle, event, hook

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
        """Send the experts' results back; return for each token their weighted sum.

        x (experts of the rank, ranks * num_max, hidden) bfloat16; the caller may change it once this returns. With
        `zero_copy` the content of `get_next_low_latency_combine_buffer(handle)` is sent instead. topk_idx holds the
        dispatched ids; some may be -1 now, and add nothing. topk_weights (tokens, k) float32. The sum is computed in
        float32 in the order of k, and rounded once, into `out` if given. Returns the sums, and event and hook as
        `low_latency_dispatch`; raises the same errors.
        """
        _refuse(use_logfmt, "use_logfmt: answers travel as bfloat16, in which nothing is lost")
        _refuse(combine_wait_recv_cost_stats is not None, "combine_wait_recv_cost_stats: waits are not told by rank")
        _refuse(async_finish and return_recv_hook, "async_finish and return_recv_hook exclude each other")
        made = _dispatched_of(handle)
        if out is None:
            out = torch.empty(len(topk_idx), handle[3], dtype=torch.bfloat16)
        _refuse(tuple(out.shape) != (made.tokens, handle[3]), f"out: {made.tokens} tokens, got {tuple(out.shape)}")
        skipped = made.find_skipped(topk_idx)
        made.finish()
        with self._lock:
            self._require_open()
            finish = made.combine(None if zero_copy else x, topk_weights, skipped, out)
        event, hook = _make_completion(finish, async_finish, return_recv_hook)
        return out, event, hook

    def get_next_low_latency_combine_buffer(self, handle: tuple[Any, ...]) -> torch.Tensor:
        """Return the memory (experts of the rank, ranks * num_max, hidden) that the next combine sends from.

        The caller fills it, and must call combine with `zero_copy` and this handle before any other call.
        """
        made = _dispatched_of(handle)
        made.finish()
        with self._lock:
            return made.answers()

    # Masks.

    def _masked_ranks(self) -> set[int]:
        """Return the ranks that are masked in any group of this buffer."""
        for shape in self._shapes.values():
            self._masked |= {rank for rank, active in enumerate(shape.group.moe.active.tolist()) if not active}
        return self._masked

    def _require_shrink(self) -> None:
        _refuse(not self.enable_shrink, "masks need a buffer with enable_shrink=True")

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Set `mask_status` (ranks,) int32 to 1 for each masked rank, 0 for the others.

        Raises UsageError without `enable_shrink`, and for another size or type.
        """
        self._require_shrink()
        fits = mask_status.numel() == self.group_size and mask_status.dtype == torch.int32
        _refuse(not fits, f"mask_status: int32 of {self.group_size} is expected")
        with self._lock:
            lost = self._masked_ranks()
        mask_status.view(-1).copy_(torch.tensor([int(rank in lost) for rank in range(self.group_size)]))

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """With `mask`, go on without a rank; without, check that the rank is not masked.

        Raises UsageError for a masked rank without `mask`: its connection is closed, so unmasking it needs a new
        buffer. Also raises UsageError without `enable_shrink`, and for this rank.
        """
        self._require_shrink()
        _refuse(not 0 <= rank_to_mask < self.group_size or rank_to_mask == self.rank, f"no other rank: {rank_to_mask}")
        with self._lock:
            if mask:
                self._masked.add(rank_to_mask)
                for shape in self._shapes.values():
                    shape.group.run(shape.group.moe.mask, rank_to_mask)
            else:
                _refuse(
                    rank_to_mask in self._masked_ranks(),
                    f"rank {rank_to_mask} is masked for as long as this buffer lives",
                )

    def low_latency_clean_mask_buffer(self) -> None:
        """Check that no rank is masked. Raises UsageError if one is, as `low_latency_update_mask_buffer`."""
        self._require_shrink()
        with self._lock:
            lost = sorted(self._masked_ranks())
        _refuse(bool(lost), f"ranks {lost} are masked for as long as this buffer lives")


def _config(tokens: int, hidden: int, experts: int, top_k: int, fp8: bool, shrink: bool) -> MoeConfig:
    return MoeConfig(
        experts=experts,
        top_k=top_k,
        hidden=hidden,
        tokens=tokens,
        dtype="float8_e4m3fn" if fp8 else "bfloat16",
        scales=-(-hidden // 128) if fp8 else 0,
        lanes=LANES,
        on_loss="mask" if shrink else "raise",
    )


def _refuse(wrong: bool, why: str) -> None:
    if wrong:
        raise aiote.UsageError(why)


def _dispatched_of(handle: tuple[Any, ...]) -> Dispatched:
    if not isinstance(handle, Handle):
        raise aiote.UsageError("handle: expected the handle that low_latency_dispatch of this Buffer returned")
    return handle.made


def _make_completion(
    finish: PendingStep[Any], event: bool, hook: bool
) -> tuple[EventOverlap, Callable[[], None] | None]:
    """Return an event and a hook for a caller that asked for one of them; for any other, wait now."""
    if hook:
        return EventOverlap(), finish
    if event:
        return EventOverlap(finish), None
    finish()
    return EventOverlap(), None
