"""verl's `CheckpointEngine`: weights from verl's trainer ranks to all its rollout ranks, over aiote.

verl's configuration names it: `checkpoint_engine.custom_backend_module=aiote.connectors.verl` and `backend=aiote`; see
docs/connectors.md. The calling thread runs the actor's event loop, so this module never blocks it for long: it awaits
everything that depends on a peer, and makes copies of 1 MiB and more in a thread.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from ..aio import in_thread
from ..errors import UsageError
from .buckets import slots_of
from .host import HostCopy, Party, Receiving, Sending, Step, party

__all__ = ["AioteCheckpointEngine"]


@CheckpointEngineRegistry.register("aiote")
class AioteCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """The engine that verl makes in each trainer and rollout process; `engine_kwargs.aiote` are its keyword arguments.

    bucket_size: bytes; a rollout rank holds twice as many, but at most 128 MiB for each sender. senders: the most
    trainer ranks that send; each of them iterates over the same full tensors, and sends its part. settings: those of
    `aiote.open_engine`. Raises UsageError for a value that is no whole number from 1.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, senders: int | None = None, **settings: Any) -> None:
        _check_count("bucket_size", bucket_size, "a number of bytes")
        if senders is not None:
            _check_count("senders", senders, "how many trainer ranks send, or none for as many as there are")
        self._bucket_size, self._senders, self._settings = bucket_size, senders, settings
        self._sending: Sending | None = None
        self._receiving: Receiving | None = None
        self._plan: dict[str, Any] = {}
        self.party: Party

    def prepare(self) -> dict[str, Any]:
        """Return this process's address and settings, for `build_topology`; end the rest of a failed update."""
        self.party = party(**self._settings)
        self._abandon("the next update has begun")
        return {
            "address": self.party.address,
            "update": secrets.token_hex(8),
            "bucket_size": self._bucket_size,
            "senders": self._senders,
        }

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the plan for every rank: as many trainer ranks send as there are rollout ranks, at most `senders`.

        Every sender writes to every rollout rank; no rollout rank forwards data. Raises UsageError if there are no
        trainer ranks or no rollout ranks.
        """
        _check_count("actor_wg_world_size", actor_wg_world_size, "how many trainer ranks there are")
        _check_count("rollout_world_size", rollout_world_size, "how many rollout ranks there are")
        trainers, rollouts = metadata[:actor_wg_world_size], metadata[actor_wg_world_size:]
        senders = min(actor_wg_world_size, rollout_world_size, metadata[0]["senders"] or actor_wg_world_size)
        slots, bucket_bytes = slots_of(metadata[0]["bucket_size"], senders)
        plan = {
            "update": metadata[0]["update"],
            "senders": [one["address"] for one in trainers[:senders]],
            "receivers": [one["address"] for one in rollouts],
            "slots": slots,
            "bucket_bytes": bucket_bytes,
        }
        return (
            {"index": list(range(actor_wg_world_size)), "plan": [plan] * actor_wg_world_size},
            {"index": [None] * rollout_world_size, "plan": [plan] * rollout_world_size},
        )

    def init_process_group(self, index: int | None, plan: dict[str, Any]) -> None:
        """Store the plan; a trainer rank that sends is ready for its receivers when this returns."""
        self._plan = plan
        if index is not None and index < len(plan["senders"]):
            begin = Sending.begin(
                self.party,
                plan["update"],
                plan["bucket_bytes"],
                len(plan["receivers"]),
                index=index,
                senders=len(plan["senders"]),
                addresses=plan["receivers"],
            )
            self._sending = self.party.bridge.call(begin)

    def finalize(self) -> None:
        """End this process's part in the update; buckets stay registered for the next update."""
        self._abandon("it was finalized")

    def _abandon(self, reason: str) -> None:
        # Do not wait, because this runs on the actor's event loop. Memory still in use is not lent to the next update.
        if self._sending is not None:
            self.party.bridge.submit(self._sending.close(reason))
        if self._receiving is not None:
            self.party.bridge.submit(self._receiving.stop())
        self._sending = self._receiving = None

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, Any]:
        """Send this rank's part of the weights; return when every rollout rank has all of it. Raises BroadcastError."""
        sending = self._sending
        if sending is None:
            async for _ in each(weights):
                pass
            return {}
        sending.in_use, reason = True, ""
        try:
            async for name, tensor in each(weights):
                await self._do(sending.add(name, tensor))
            await self._do(sending.end())
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            sending.in_use = False
            await self.party.bridge.run(sending.close(reason))
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield every tensor with its name; a tensor is valid until the next is requested. Raises BroadcastError."""
        plan, bridge = self._plan, self.party.bridge
        begin = Receiving.begin(self.party, plan["update"], plan["senders"], plan["slots"], plan["bucket_bytes"])
        receiving, reason = await bridge.run(begin), ""
        self._receiving = receiving
        try:
            while (bucket := await bridge.run(receiving.next())) is not None:
                for copy, name, tensor in receiving.unpack(bucket):
                    if copy is not None:
                        await made(copy)
                    if tensor is not None:
                        yield name, tensor
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            await bridge.run(receiving.close(reason))

    async def _do(self, steps: Iterator[Step]) -> None:
        for step in steps:
            if isinstance(step, HostCopy):
                await made(step)
            else:
                await self.party.bridge.run(step)


def _check_count(name: str, value: Any, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} is {value!r}, expected a whole number from 1: {meaning}")


async def each(weights: Any) -> AsyncIterator[tuple[str, torch.Tensor]]:
    """Iterate over a synchronous or asynchronous iterable, and let other tasks of the loop run between tensors."""
    if hasattr(weights, "__aiter__"):
        async for pair in weights:
            yield pair
    else:
        for pair in weights:
            yield pair
            await asyncio.sleep(0)


async def made(copy: HostCopy) -> None:
    """Make a copy, in a thread if it takes long; a cancellation is raised once the copy has been made."""
    if copy.large:
        await in_thread(copy)
    else:
        copy()
