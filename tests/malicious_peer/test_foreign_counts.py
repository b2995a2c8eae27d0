"""Counts that only their owners make: whoever else writes with a service's immediates ends no wait of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import anyio
import numpy as np
import pytest

import aiote
from aiote import service
from aiote.kvcache import Cache, Consumer, PageRow, Producer
from aiote.kvcache.protocol import TransferRefused
from aiote.moe import GroupBrokenError, MoeConfig, MoeGroup
from aiote.moe.wire import ANSWER, PAYLOAD, ROUTE, SLOTS, slot_of
from aiote.weights import Layout, Replicate, serve_target
from aiote.weights.protocol import TargetService, Update, UpdateOrder
from support.engines.opening import opened, until
from support.kv.caches import Side, expected, fill, same
from support.kv.worlds import BEFORE, compute, world
from support.moe.ranks import Tokens, all_of, ranks, whole_round
from support.moe.ranks import compute as expert

CONFIG = {"experts": 6, "top_k": 2, "hidden": 8, "tokens": 6, "dtype": "float32", "out_dtype": "float32"}
ROWS = {0: PageRow([1, 2])}


def open_sim() -> Any:
    return opened("sim")


async def write(engine: aiote.Engine, to: aiote.Engine, imms: Iterable[int]) -> None:
    for imm in imms:
        await engine.write_imm(None, to.address, imm)


@pytest.mark.parametrize("on_loss", ["raise", "mask"])
async def test_rounds_wait_for_their_ranks_whoever_counts(on_loss):
    """Neither a stranger nor, where each rank has immediates of its own, one rank in another's place."""
    config = MoeConfig(**CONFIG, on_loss=on_loss)
    async with ranks(open_sim, 3, config) as groups, opened("sim") as stranger:
        victim = groups[0]
        for turn in range(3):
            before = victim.engine.statistics().uninvited
            for rank, first in victim._epochs._immediates.first_immediates.items():
                await write(stranger, victim.engine, range(first, first + SLOTS))
                if on_loss == "mask" and rank != 1:
                    await write(groups[1].engine, victim.engine, range(first, first + SLOTS))
            sent = SLOTS * (1 if on_loss == "raise" else 3 + 2)
            await until(lambda before=before, sent=sent: victim.engine.statistics().uninvited == before + sent)
            await whole_round(groups, [Tokens(np.random.default_rng(turn), config, 5) for _ in groups])


@pytest.mark.parametrize("kind", [ROUTE, PAYLOAD, ANSWER])
@pytest.mark.parametrize(("on_loss", "placement"), [("raise", "packed"), ("raise", "direct"), ("mask", "packed")])
async def test_a_member_that_counts_too_often_breaks_its_round(on_loss, kind, placement):
    """What it has counted is taken for another's write, or for its own next one: rounds may be wrong, and say so."""
    config = MoeConfig(**CONFIG, on_loss=on_loss, placement=placement)
    async with ranks(open_sim, 3, config) as groups:
        await whole_round(groups, [Tokens(np.random.default_rng(0), config, 5) for _ in groups])
        victim, member = groups[0], groups[1].engine
        before = victim.engine.statistics().uninvited
        imm = victim._epochs._immediates.first_of(1) + slot_of(0, kind, 1)
        await write(member, victim.engine, range(imm, imm + 1))
        failed: list[aiote.AioteError] = []

        async def rounds(group: MoeGroup) -> None:
            rng = np.random.default_rng(group.rank)
            try:
                for _ in range(3):
                    one = Tokens(rng, config, 5)
                    batch = await group.dispatch(one.x, one.ids, one.weights)
                    await group.combine(batch, expert(group, batch))
            except aiote.AioteError as error:
                failed.append(error)

        await all_of(*[lambda group=group: rounds(group) for group in groups])
        assert victim.engine.statistics().uninvited == before, "it is invited, and counts"
        if on_loss == "raise":
            assert len(failed) == len(groups), failed
        else:
            assert "sent more writes than it owes" in victim.membership.masked[1]
            assert victim.membership.takes_part(2)


async def test_a_write_that_comes_after_its_round_is_noticed_in_the_next():
    """A member has counted in its place, so the round ended without it: no answers are due that would wait for it."""
    config = MoeConfig(**CONFIG, placement="direct")
    async with ranks(open_sim, 3, config) as groups:
        victim, member, late = groups
        given = [Tokens(np.random.default_rng(0), config, count) for count in (0, 1, 1)]
        for tokens in given[1:]:
            tokens.ids[...] = [0, -1]  # one row, for an expert of the victim
        begun = [group.dispatch_send(one.x, one.ids, one.weights) for group, one in zip(groups, given, strict=True)]
        await write(member.engine, victim.engine, [victim._epochs._immediates.first_of(1) + slot_of(0, PAYLOAD, 0)])

        async def end_round(group: MoeGroup) -> None:
            batch = await begun[group.rank].dispatch_recv()
            await group.combine(batch, expert(group, batch))

        await all_of(lambda: end_round(victim), lambda: end_round(member))
        await end_round(late)
        begun = [group.dispatch_send(given[0].x, given[0].ids, given[0].weights) for group in groups]
        with pytest.raises(GroupBrokenError, match="more writes of round 0 came"):
            await begun[0].dispatch_recv()


def cache(name: str, value: int) -> tuple[Cache, np.ndarray]:
    array, out = np.full((2, 2, 16, 4, 2, 8), value, np.float16), Cache(name)
    out.add(array, "layer field page token head item", fields=("k", "v"))
    return out, array


async def test_a_request_arrives_when_its_producer_wrote_it():
    async with opened("sim") as decode, opened("sim") as prefill, opened("sim") as stranger:
        (here, written), (there, _) = cache("decode", -1), cache("prefill", 7)
        async with Producer(prefill, there) as producer, Consumer(decode, here) as consumer:
            computed = anyio.Event()

            async def produce() -> None:
                async with producer.offer("request", tokens=8, rows=ROWS) as offer:
                    await computed.wait()
                    for layer in (0, 1):
                        offer.computed(layer)

            async with anyio.create_task_group() as group:
                group.start_soon(produce)
                async with consumer.receive([prefill.address], "request", tokens=8, rows=ROWS) as reception:
                    await until(lambda: reception._block is not None)
                    first = reception._block.first
                    for _ in range(4):
                        await write(stranger, decode, range(first, first + 2))
                    await until(lambda: decode.statistics().uninvited == 8)
                    assert not reception.complete
                    assert (written == -1).all()
                    computed.set()
                    await reception.arrived()
                    assert (written[:, :, 1:3] == 7).all()


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_request_arrives_when_each_of_its_producers_says_so(stopped):
    """Of two that write, one may count in the other's place: it ends nothing."""
    async with world("sim", Side(ranks=2), Side()) as w:
        (consumer,), (first, second), tokens = w.consumers, w.producers, 8
        here, there = w.rows(tokens)
        fill(w.left, here, tokens)
        late = anyio.Event()

        async def compute_late() -> None:
            async with second.offer("r", tokens=tokens, rows=here) as offer:
                await late.wait()
                if stopped:
                    offer.stop("out of memory")
                for layer in second.spec.layers:
                    offer.computed(layer)

        async with anyio.create_task_group() as group:
            group.start_soon(compute, first, "r", tokens, here)
            group.start_soon(compute_late)
            async with consumer.receive(w.places, "r", tokens=tokens, rows=there) as reception:
                await until(lambda: len(reception._unconfirmed) == 1)
                imm, layers = reception._block.first, len(consumer.layers)
                while reception._block.row.progress[0] < layers:
                    for _ in range(16):
                        await write(first.engine, consumer.engine, range(imm, imm + layers))
                await reception.arrived(layers - 1)
                assert not reception.complete
                late.set()
                if stopped:
                    with pytest.raises(TransferRefused, match="out of memory"):
                        await reception.arrived()
                else:
                    await reception.arrived()
                    assert same(w.right.caches[0], expected(w.right.caches[0], there, tokens, BEFORE))


async def test_a_rank_that_writes_nothing_for_a_request_does_not_count_for_it():
    """Both have the one layer, and the decode rank takes it from the first."""
    layer = "layer field page token head item"
    caches = []
    for name, value in (("decode", -1), ("first", 7), ("second", 9)):
        array, one = np.full((1, 2, 16, 4, 2, 8), value, np.float16), Cache(name)
        one.add(array, layer, fields=("k", "v"))
        caches.append((one, array))
    (here, written), (there, _), (other, _) = caches
    async with opened("sim") as decode, opened("sim") as prefill, opened("sim") as liar:
        async with (
            Producer(prefill, there) as producer,
            Producer(liar, other) as second,
            Consumer(decode, here) as consumer,
            anyio.create_task_group() as group,
        ):
            computed = anyio.Event()

            async def produce() -> None:
                async with producer.offer("request", tokens=8, rows=ROWS) as offer:
                    await computed.wait()
                    offer.computed(0)

            async def pretend() -> None:
                async with second.offer("request", tokens=8, rows=ROWS, computed=True):
                    pass

            group.start_soon(produce)
            group.start_soon(pretend)
            places = [prefill.address, liar.address]
            async with consumer.receive(places, "request", tokens=8, rows=ROWS) as reception:
                await write(liar, decode, [reception._block.first] * 64)
                await until(lambda: decode.statistics().uninvited == 64)
                assert not reception.complete
                computed.set()
                await reception.arrived()
                assert (written[:, :, 1:3] == 7).all()


async def test_an_update_is_written_when_its_sources_wrote_it():
    layout, array = Layout.over([0], {"a": ((64,), "F32", Replicate())}), np.ones(64, np.float32)
    async with opened("sim") as hub, opened("sim") as source, opened("sim") as stranger:
        async with serve_target(hub, layout, 0, {"a": array}) as target:
            client = service.client(source, hub.address, TargetService)
            steps = client.update(UpdateOrder(Update(1, 1), [str(source.address)], [np.zeros(1, np.uint64)]))
            lent = await anext(steps)
            await write(stranger, hub, lent.imms)
            await until(lambda: hub.statistics().uninvited == 1)
            counted = []

            async def count() -> None:
                counted.append(await anext(steps))

            async with anyio.create_task_group() as group:
                group.start_soon(count)
                await client.describe()
                assert not counted
                await write(source, hub, lent.imms)
                await until(lambda: counted)
            assert counted[0].kind == "counted"
            assert target.version is None


async def test_a_source_that_commits_twice_does_not_count_for_another():
    layout, array = Layout.over([0], {"a": ((64,), "F32", Replicate())}), np.ones(64, np.float32)
    async with opened("sim") as hub, opened("sim") as honest, opened("sim") as liar:
        async with serve_target(hub, layout, 0, {"a": array}):
            client = service.client(honest, hub.address, TargetService)
            sources, numbers = [str(honest.address), str(liar.address)], np.zeros(1, np.uint64)
            steps = client.update(UpdateOrder(Update(1, 1), sources, [numbers, numbers]))
            lent, counted = await anext(steps), anyio.Event()

            async def count() -> None:
                assert (await anext(steps)).kind == "counted"
                counted.set()

            async with anyio.create_task_group() as group:
                group.start_soon(count)
                await write(liar, hub, [lent.imms[1]] * 3)
                await write(liar, hub, [lent.imms[0]] * 3)
                await until(lambda: hub.statistics().uninvited == 3)
                await client.describe()
                assert not counted.is_set()
                await write(honest, hub, lent.imms[:1])
