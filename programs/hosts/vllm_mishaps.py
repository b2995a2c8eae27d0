"""What tests of the KV connector have an engine of vLLM do to itself: wait in the middle, watch memory and blocks."""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import time
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio

import aiote
from aiote.kvcache.moving import TransferBatch

PATTERN = 0xA5


class HeldBatch(TransferBatch):
    """The transfers of a request, each of which waits for up to `seconds`; with infinity the second waits for ever."""

    seconds = 0.0
    moved: Counter[tuple[int, int]] = Counter()
    """How many bytes of pages have gone to or from each memory of this engine, by its address and length."""
    latest: HeldBatch | None = None
    begun = 0
    _waited = False

    @property
    def has_room(self) -> bool:
        return super().has_room and (self._waited or not HeldBatch.seconds)

    async def room(self) -> None:
        if HeldBatch.seconds < math.inf:
            await anyio.sleep(random.random() * HeldBatch.seconds)
        elif self.begun:
            await anyio.sleep_forever()
        self._waited = True
        await super().room()

    def submit(self, start: Callable[..., aiote.Transfer], *arguments: Any) -> None:
        self._waited = False
        super().submit(start, *arguments)
        self.begun += 1
        HeldBatch.latest = self
        for pages in arguments[:2]:
            if isinstance(pages.region, aiote.Region):
                memory = pages.region.memory
                HeldBatch.moved[memory.address, memory.length] += len(pages) * pages.page_bytes


class Mishaps:
    """That part of a process's side; it uses the rest."""

    core: Any
    scheduler: Any
    connector: Callable[[], Any]
    bytes: Callable[[], list[Any]]
    cancelled: int
    filled: set[int] | None = None
    changed: set[int]

    def hold_batches(self) -> None:
        """Have every transfer of pages be one that can be held up."""
        from aiote.kvcache import consumer, producer

        consumer.TransferBatch = producer.TransferBatch = HeldBatch  # type: ignore[misc]

    def slow(self, seconds: float) -> None:
        """Have the rank that moves pages wait for up to so long before each layer; for ever after the first one, with
        infinity; and with 0 never.
        """
        HeldBatch.seconds, HeldBatch.latest = seconds, None

    def moved(self) -> list[tuple[tuple[int, int], int]]:
        """Return and forget how many bytes of pages have gone to and from which memory."""
        found = sorted(HeldBatch.moved.items())
        HeldBatch.moved.clear()
        return found

    def layers_arrived(self) -> int:
        """Return how many layers of the request that is under way have come."""
        consumer = self.connector()._transfers._consumer._inner
        counts = [int(one._block.row.progress[0]) for one in consumer._receptions if one._block is not None]
        return max(counts, default=HeldBatch.latest._flight.landed if HeldBatch.latest is not None else 0)

    def guard(self) -> None:
        """From now on fill each block that is freed with a pattern, and take note of those that change before use."""
        if self.filled is not None:
            return
        pool = self.scheduler.kv_cache_manager.block_pool
        free, new = pool.free_blocks, pool.get_new_blocks
        filled = self.filled = set()
        self.changed = set()

        def freed(blocks: Any) -> None:
            blocks = list(blocks)
            free(blocks)
            for block in blocks:
                if not block.ref_cnt and not block.is_null:
                    pool._maybe_evict_cached_block(block)
                    filled.add(block.block_id)
                    for tensor in self.bytes():
                        tensor[block.block_id] = PATTERN

        def taken(count: int) -> Any:
            blocks = new(count)
            self.look([block.block_id for block in blocks])
            filled.difference_update(block.block_id for block in blocks)
            return blocks

        pool.free_blocks, pool.get_new_blocks = freed, taken

    def look(self, blocks: list[int]) -> None:
        for block in blocks:
            if block in (self.filled or ()) and any((tensor[block] != PATTERN).any() for tensor in self.bytes()):
                self.changed.add(block)

    def guarded(self) -> tuple[int, list[int], int]:
        """Return how many blocks are filled, which have changed, and how many requests were cancelled on their way."""
        filled = list(self.filled or ())
        self.look(filled)
        return len(filled), sorted(self.changed), self.cancelled

    # While a prompt is computed.

    def trace_saves(self, die_at: int = 0) -> None:
        """Take note of each layer that vLLM saves from now on, and of how many writes were over then. Die at the
        save with number `die_at`, counted from 1.
        """
        connector = self.connector()
        save, self.saves = type(connector).save_kv_layer.__get__(connector), list[tuple[float, str, int]]()

        def saved(layer: str, *arguments: Any, **more: Any) -> None:
            save(layer, *arguments, **more)
            landed = HeldBatch.latest.landed if HeldBatch.latest is not None else 0
            self.saves.append((time.monotonic(), layer, landed))
            if len(self.saves) == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

        HeldBatch.latest = None
        connector.save_kv_layer = saved

    def saved_layers(self) -> list[tuple[float, str, int]]:
        """Return and forget the layers that were saved."""
        found, self.saves[:] = list(self.saves), []
        HeldBatch.latest = None
        return found

    def trace_loads(self) -> None:
        """Take note of each layer that vLLM waits for while a request is loading, and of how many layers of it were
        here after the wait.
        """
        connector = self.connector()
        wait, self.loads = connector.wait_for_layer_load, list[tuple[float, int]]()
        consumer, loads = connector._transfers._consumer, connector._transfers._loads

        def waited(layer: str) -> None:
            is_loading = bool(loads._loading)
            wait(layer)
            if is_loading:
                blocks = [one._block for one in consumer._inner._receptions if one._block is not None]
                here = min((int(block.row.progress[0]) for block in blocks), default=len(consumer.layers))
                self.loads.append((time.monotonic(), here))

        connector.wait_for_layer_load = waited

    def loaded_layers(self) -> list[tuple[float, int]]:
        """Return and forget the layers that were waited for."""
        found, self.loads[:] = list(self.loads), []
        return found

    def addresses(self) -> list[str]:
        """Return the addresses of the engine's only worker, as a prefill engine's answers have them."""
        return [self.connector()._transfers.address]

    def is_asked(self, name: str) -> bool:
        """Return whether a decode rank has asked for a request."""
        sessions = self.connector()._transfers._producer._inner._sessions.values()
        return any(name in session.asked for session in sessions)

    def preempt_before(self, step: int) -> None:
        """Preempt all running requests before the step with this number in which there are some, counted from 1."""
        schedule, count = self.scheduler.schedule, itertools.count(1)

        def scheduled(*arguments: Any, **more: Any) -> Any:
            if self.scheduler.running and next(count) == step:
                self.scheduler.reset_prefix_cache(reset_running_requests=True)
            return schedule(*arguments, **more)

        self.scheduler.schedule = scheduled

    # What came to which block, of an engine whose workers are in processes of their own.

    def note_wanted(self) -> None:
        """Take note of the blocks of requests that are to be received."""
        table = self.scheduler.connector._table
        take, self.wanted = table.take_steps, dict[str, list[int]]()

        def taken(now: float) -> Any:
            steps = take(now)
            self.wanted.update({one.remote_request: one.rows[0].blocks for one in steps.wanted if one.rows})
            return steps

        table.take_steps = taken

    def heads_received(self, request: str, count: int) -> list[list[int]]:
        """Return the checksums of the heads of the first blocks of a request that has come."""
        return self.heads(self.wanted.pop(request)[:count])

    def heads(self, blocks: list[int]) -> list[list[int]]:
        """Return the checksums of the heads of blocks, of all ranks one after the other."""
        ranks = self.core.collective_rpc(head_sums, args=(blocks,))
        return [[value for rank in ranks for value in rank[place]] for place in range(len(blocks))]


def head_sums(worker: Any, blocks: list[int]) -> list[list[int]]:
    """Return the checksums of the heads of blocks over all layers, in a worker."""
    import torch

    context = worker.model_runner.vllm_config.compilation_config.static_forward_context
    layers = [one.kv_cache.view(torch.uint8).numpy() for one in context.values() if hasattr(one, "kv_cache")]
    return [
        [zlib.crc32(b"".join(layer[block, head].tobytes() for layer in layers)) for head in range(layers[0].shape[1])]
        for block in blocks
    ]
