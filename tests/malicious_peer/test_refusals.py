"""One peer's answer is that peer's: a refusal, a lie or silence ends what was asked of it, and nothing of others."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial

import anyio
import numpy as np
import pytest

import aiote
import aiote.testing
from aiote import service
from aiote.connectors.bucket_broadcast import PROGRESS_S, Begun, BroadcastError, Feed, ReceiverSlots
from aiote.connectors.buckets import Bucket, UpdateEnd
from aiote.kvcache import Cache, Consumer, Group, PageRow, Producer
from aiote.kvcache.group import Receive
from aiote.kvcache.protocol import Descriptor, Number, Opened
from aiote.kvcache.tensors import CacheSpec
from aiote.moe import GroupBrokenError, MoeConfig, open_group
from aiote.moe.joining import Digest, Epoch, Meeting, Rank
from aiote.moe.states import MOST_FOLLOWED, Membership
from aiote.service.exchange import REFUSALS
from aiote.service.frames import CallStatus
from aiote.testing import Fabric
from aiote.weights import Controller, Layout, Replicate, serve_source, serve_target
from aiote.weights.protocol import Descriptors, SourceService, SourceState, TargetState, packed_layout
from support.connectors.broadcasts import Rollout, Trainer, assert_same, tensors_of
from support.engines.opening import PATIENCE_S, opened

ROWS = {0: PageRow([1, 2])}


def cache(name: str) -> Cache:
    out = Cache(name)
    out.add(np.zeros((2, 2, 16, 4, 2, 8), np.float16), "layer field page token head item", fields=("k", "v"))
    return out


def test_each_refusal_is_a_call_error_that_says_that_nothing_ran():
    wanted = {CallStatus.BUSY, CallStatus.DRAINING, CallStatus.NOT_SERVED, CallStatus.INVALID}
    assert REFUSALS.keys() == wanted
    assert {kind.ran for kind, _ in REFUSALS.values()} == {"no"}


class Refusing(service.Service):
    """A prefill rank to whom arguments do not fit."""

    name = "kvcache.Transfers"

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec

    @service.method
    async def describe(self) -> CacheSpec:
        return self.spec

    @service.method
    async def open(self, part: CacheSpec, immediates: list[Number], memories: list[Descriptor]) -> Opened:
        return Opened(1, [])

    @service.method
    async def push(self, session: str) -> AsyncIterator[None]:
        yield None

    @service.method
    async def moving(self, session: str, interval: str) -> AsyncIterator[list[str]]:
        yield []


async def test_a_prefill_rank_that_refuses_ends_no_other_request():
    async with opened("sim") as decode, opened("sim") as prefill, opened("sim") as liar:
        async with (
            Producer(prefill, cache("prefill")) as producer,
            service.serve(liar, Refusing(cache("liar").spec)),
            Consumer(decode, cache("decode"), stall_timeout=600.0) as consumer,
        ):
            with pytest.raises(aiote.AioteError, match="Expected `str`"):
                async with consumer.receive([liar.address], "other", tokens=8, rows=ROWS) as reception:
                    await reception.arrived()
            async with producer.offer("mine", tokens=8, rows=ROWS, computed=True):
                async with consumer.receive([prefill.address], "mine", tokens=8, rows=ROWS) as reception:
                    await reception.arrived()


class RefusingSource(SourceService):
    name = SourceService.name

    def __init__(self, engine: aiote.Engine, layout: Layout) -> None:
        self.state = SourceState(
            1, packed_layout(layout), np.zeros((1, 2), np.uint64), Descriptors.of([]), str(engine.address)
        )

    @service.method(idempotent=True)
    async def describe(self) -> SourceState:
        return self.state

    @service.method(idempotent=True, raises=[aiote.UsageError])
    async def prepare(self, sources: list[SourceState], targets: list[TargetState], gather: str) -> bytes:
        raise aiote.UsageError("nothing suits me")


async def test_a_source_that_refuses_to_plan_is_left_out_alone():
    layout, theirs = (Layout.over([rank], {"a": ((64,), "F32", Replicate())}) for rank in (0, 1))
    values, memory = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    async with opened("sim") as one, opened("sim") as liar, opened("sim") as there, opened("sim") as mine:
        async with (
            serve_source(one, layout, 0, {"a": values}),
            service.serve(liar, RefusingSource(liar, theirs)),
            serve_target(there, layout, 0, {"a": memory}),
        ):
            controller = Controller(mine, [one.address, liar.address], [there.address])
            assert (await controller.update(1)).committed == [""]
            assert "nothing suits me" in controller.absent[str(liar.address)]
            np.testing.assert_array_equal(memory, values)


class RefusingRank(service.Service):
    name = "MoeService.0"

    @service.method(idempotent=True, raises=[aiote.UsageError])
    async def meet(self, rank: Rank, epoch: Epoch, digest: Digest) -> Meeting:
        raise aiote.UsageError("nothing suits me")


class LyingRank(RefusingRank):
    @service.method(idempotent=True, raises=[aiote.UsageError])
    async def meet(self, rank: Rank, epoch: Epoch, digest: Digest) -> Meeting:
        return Meeting(epoch, b"no descriptor", 1 << 27)


class BeyondAll(RefusingRank):
    """Its immediates would pass 28 bits."""

    @service.method(idempotent=True, raises=[aiote.UsageError])
    async def meet(self, rank: Rank, epoch: Epoch, digest: Digest) -> Meeting:
        return Meeting(epoch, b"", (1 << 28) - 1)


class AlwaysAhead(RefusingRank):
    """It is in a later epoch than whoever asks."""

    @service.method(idempotent=True, raises=[aiote.UsageError])
    async def meet(self, rank: Rank, epoch: Epoch, digest: Digest) -> Meeting:
        return Meeting(epoch + 1, [], 1 << 27)


@pytest.mark.parametrize("on_loss", ["raise", "mask"])
async def test_a_rank_that_is_always_ahead_is_followed_some_times(on_loss):
    """It would keep the other from ever beginning a round."""
    config = MoeConfig(experts=2, top_k=1, hidden=64, tokens=4, dtype="float32", out_dtype="float32", on_loss=on_loss)
    async with opened("sim") as engine, opened("sim") as liar, service.serve(liar, AlwaysAhead()):
        with anyio.fail_after(PATIENCE_S), pytest.raises(GroupBrokenError, match=f"rank 1 {MOST_FOLLOWED + 1} times"):
            async with open_group(engine, [engine.address, liar.address], 0, config, open_timeout=math.inf):
                pass


def test_a_reset_counts_anew_whom_it_follows():
    membership = Membership(3, 0, masks=True)
    membership.reset(1)
    for turn in range(MOST_FOLLOWED):
        membership.follow(2 + turn, [1])
    with pytest.raises(GroupBrokenError, match="rank 1 257 times, rank 2 1 times"):
        membership.follow(membership.epoch + 1, [1, 2])
    membership.reset(membership.epoch + 1)
    membership.follow(membership.epoch + 1, [2])


@pytest.mark.parametrize("kind", [RefusingRank, LyingRank, BeyondAll])
async def test_a_rank_that_refuses_is_masked_and_the_others_open_their_group(kind):
    config = MoeConfig(experts=3, top_k=1, hidden=64, tokens=4, dtype="float32", out_dtype="float32", on_loss="mask")
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(opened("sim")) for _ in range(3)]
        await stack.enter_async_context(service.serve(engines[2], kind()))
        members = [engine.address for engine in engines]
        active = []

        async def live(rank: int) -> None:
            async with open_group(engines[rank], members, rank, config) as group:
                active.append(group.active.tolist())

        async with anyio.create_task_group() as tasks:
            for rank in (0, 1):
                tasks.start_soon(live, rank)
        assert active == [[True, True, False]] * 2


class Stubborn(service.Service):
    """A decode rank, or a sender of weights, that does not end what its caller has left."""

    def __init__(self) -> None:
        self.begun, self.gate = anyio.Event(), anyio.Event()

    async def stay(self) -> None:
        self.begun.set()
        while not self.gate.is_set():
            try:
                with anyio.CancelScope(shield=True):
                    await self.gate.wait()
            except anyio.get_cancelled_exc_class():
                continue


class StubbornRank(Stubborn):
    name = "kvcache.Worker"

    @service.method
    async def receive(self, order: Receive) -> AsyncIterator[None]:
        yield None
        await self.stay()


class StubbornSender(Stubborn):
    name = Feed.name

    @service.method
    async def take(self, update: str, offer: ReceiverSlots) -> AsyncIterator[Begun | Bucket | UpdateEnd]:
        yield Begun(1)
        await self.stay()

    @service.method(idempotent=True)
    async def decline(self, update: str, reason: str) -> None:
        pass


async def test_a_rank_that_does_not_end_a_request_is_disconnected():
    rank = StubbornRank()
    async with opened("sim") as leader, opened("sim") as there, service.serve(there, rank):
        ranks = Group(leader, [there.address], confirm_timeout=0.1)
        async with anyio.create_task_group() as group:
            group.start_soon(partial(ranks.receive, [there.address], "request", tokens=8, rows=ROWS))
            await rank.begun.wait()
            group.cancel_scope.cancel()
        rank.gate.set()
        assert leader.find_peer(there.address) is None


async def test_a_sender_that_does_not_end_its_call_is_disconnected():
    sender = StubbornSender()
    async with opened("sim", drain_timeout=0.1) as engine, opened("sim") as liar, service.serve(liar, sender):
        rollout, lost = Rollout(engine, 2, 4096), []
        engine.listen_events(lambda event: lost.append(str(event.details.get("reason"))))
        async with anyio.create_task_group() as group:
            group.start_soon(rollout.receive, "update", [str(liar.address)])
            await sender.begun.wait()
            group.cancel_scope.cancel()
        sender.gate.set()
        assert any("did not end its part of an update" in one for one in lost), lost


def test_a_receiver_that_takes_nothing_is_given_up():
    """After ten minutes, which are virtual."""

    async def main(fabric: Fabric) -> None:
        tensors = tensors_of(1, [(4096,)])
        begun, refused = fabric.now, anyio.Event()
        async with fabric.open_engine() as engine, fabric.open_engine() as other, anyio.create_task_group() as group:
            trainer = Trainer(engine, 4096)
            group.start_soon(trainer.serve)
            await trainer.served.wait()
            outgoing = trainer.announce("update", 1)
            slots = other.register(np.zeros(8192, np.uint8), "write")

            async def take() -> None:
                offer = ReceiverSlots(slots.descriptor, 4096, [1, 2])
                with pytest.raises(BroadcastError, match="it made no progress for"):
                    async for _ in service.client(other, engine.address, Feed).take("update", offer):
                        pass
                refused.set()

            group.start_soon(take)
            with pytest.raises(BroadcastError, match="it made no progress for"):
                await trainer.send(outgoing, tensors)
            await refused.wait()
            assert fabric.now - begun >= PROGRESS_S
            group.cancel_scope.cancel()

    aiote.testing.run(main)


async def test_whoever_knows_an_update_s_name_neither_takes_nor_ends_it():
    tensors = tensors_of(1, [(100,), (3000,)])
    async with opened("sim") as engine, opened("sim") as other, opened("sim") as liar:
        async with anyio.create_task_group() as group:
            trainer, rollout = Trainer(engine, 4096), Rollout(other, 2, 4096)
            group.start_soon(trainer.serve)
            await trainer.served.wait()
            outgoing = trainer.announce("update", 1, addresses=[str(other.address)])
            feed = service.client(liar, engine.address, Feed)
            await feed.decline("update")
            with pytest.raises(BroadcastError, match="is not meant for you"):
                await anext(feed.take("update", ReceiverSlots(b"", 4096, [1, 2])))
            assert outgoing.error is None
            group.start_soon(trainer.send, outgoing, tensors)
            assert_same(await rollout.receive("update", [str(engine.address)]), tensors)
            group.cancel_scope.cancel()
