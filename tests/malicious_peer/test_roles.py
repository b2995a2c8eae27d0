"""The key says that an engine belongs to the cluster, and not what it is for: orders come from who has the role."""

from __future__ import annotations

import time

import numpy as np
import pytest

import aiote
from aiote import service
from aiote.discovery import EmbeddedRegistry, RegistryServer
from aiote.kvcache import Cache, Consumer, Group, PageRow, Producer, Worker
from aiote.weights import Controller, Layout, Replicate, UpdateError, serve_source, serve_target
from aiote.weights.protocol import EPOCHS_AHEAD, SourceService, StaleUpdateError, TargetService, Update, UpdateOrder
from support.engines.opening import opened, until

LAYOUT = Layout.over([0], {"a": ((64,), "F32", Replicate())})
FOREIGN = "ForeignCallerError: .*is not the (leader|controller) of this engine"


class Ordered(service.Service):
    def __init__(self, engine: aiote.Engine, allowed: service.CallersLike) -> None:
        self.callers = service.Callers(engine, allowed, "leader")
        self.orders = 0

    @service.method
    async def order(self) -> int:
        self.callers.require()
        self.orders += 1
        return self.orders


@pytest.mark.parametrize("allowed", [None, "first"])
async def test_the_first_that_calls_has_the_role_as_long_as_it_is_connected(allowed):
    async with opened("sim") as there, opened("sim") as other, service.serve(there, Ordered(there, allowed)):
        async with opened("sim") as first:
            assert await service.client(first, there.address, Ordered).order() == 1
            with pytest.raises(service.RemoteError, match=FOREIGN):
                await service.client(other, there.address, Ordered).order()
            assert await service.client(first, there.address, Ordered).order() == 2
        await until(lambda: [peer.address for peer in there.peers] == [other.address])
        assert await service.client(other, there.address, Ordered).order() == 3


async def test_named_engines_and_predicates():
    async with opened("sim") as there, opened("sim") as leader, opened("sim") as other:
        named = Ordered(there, [str(leader.address)])
        async with service.serve(there, named):
            with pytest.raises(service.RemoteError, match=FOREIGN):
                await service.client(other, there.address, Ordered).order()
            assert await service.client(leader, there.address, Ordered).order() == 1
        async with service.serve(there, Ordered(there, lambda peer: peer.address.identity == other.address.identity)):
            with pytest.raises(service.RemoteError, match=FOREIGN):
                await service.client(leader, there.address, Ordered).order()
            assert await service.client(other, there.address, Ordered).order() == 1
        for nobody in ([], ["aiote://127.0.0.1:1"]):
            with pytest.raises(aiote.UsageError, match="expected addresses with an identity"):
                service.Callers(there, nobody, "leader")


async def test_where_others_than_the_own_host_call_nobody_has_a_role_by_default():
    here, _ = cache("decode", -1)
    arrays = {"a": np.zeros(64, np.float32)}
    async with opened("sim", cluster_key=bytes(16), host="127.0.0.1") as engine, Consumer(engine, here) as consumer:
        with pytest.raises(aiote.UsageError, match="leaders: the engine has a cluster key"):
            Worker(consumer)
        for serving in (serve_source(engine, LAYOUT, 0, arrays), serve_target(engine, LAYOUT, 0, arrays)):
            with pytest.raises(aiote.UsageError, match='controllers: .*give their addresses, .*"first"'):
                async with serving:
                    pass
        Worker(consumer, "first")
        async with serve_source(engine, LAYOUT, 0, arrays, controllers="first"):
            pass


def cache(name: str, value: int) -> tuple[Cache, np.ndarray]:
    array = np.full((2, 2, 16, 4, 2, 8), value, np.float16)
    out = Cache(name)
    out.add(array, "layer field page token head item", fields=("k", "v"))
    return out, array


async def test_a_worker_takes_orders_of_its_leader_alone():
    async with opened("sim") as decode, opened("sim") as prefill, opened("sim") as leader, opened("sim") as liar:
        (there, _), (here, array) = cache("prefill", 7), cache("decode", -1)
        async with Producer(prefill, there) as producer, Consumer(decode, here) as consumer:
            async with service.serve(decode, Worker(consumer, leaders=[leader.address])):
                with pytest.raises(service.RemoteError, match=FOREIGN):
                    rows = {0: PageRow(range(16))}
                    await Group(liar, [decode.address]).receive([prefill.address], "x", tokens=64, rows=rows)
                assert (array == -1).all()
                mine = {0: PageRow([3, 4])}
                async with producer.offer("mine", tokens=8, rows=mine, computed=True):
                    await Group(leader, [decode.address]).receive([prefill.address], "mine", tokens=8, rows=mine)
                assert (array[:, :, 3:5] == 7).all()
                assert (np.delete(array, (3, 4), 2) == -1).all()


async def test_foreign_controllers_overwrite_nothing_and_read_nothing():
    values, memory, foreign = (np.full(64, value, np.float32) for value in (1, 0, 666))
    async with opened("sim") as one, opened("sim") as there, opened("sim") as mine, opened("sim") as liar:
        async with (
            opened("sim") as theirs,
            serve_source(one, LAYOUT, 0, {"a": values}),
            serve_target(there, LAYOUT, 0, {"a": memory}),
            serve_source(theirs, LAYOUT, 0, {"a": foreign}),
        ):
            controller = Controller(mine, [one.address], [there.address])
            await controller.update(1)
            with pytest.raises(UpdateError, match=FOREIGN):
                await Controller(liar, [theirs.address], [there.address]).update(2)
            with pytest.raises(service.RemoteError, match=FOREIGN):
                await service.client(liar, one.address, SourceService).describe()
            assert (memory == 1).all()
            values[...] = 3
            await controller.update(3)
            assert (memory == 3).all()


async def test_an_epoch_is_taken_at_a_commit_and_is_not_far_ahead():
    values, memory = np.ones(64, np.float32), np.zeros(64, np.float32)
    async with opened("sim") as one, opened("sim") as there, opened("sim") as mine, opened("sim") as other:
        named = [mine.address, other.address]
        async with (
            serve_source(one, LAYOUT, 0, {"a": values}),
            serve_target(there, LAYOUT, 0, {"a": memory}, controllers=named) as target,
        ):
            client = service.client(other, there.address, TargetService)
            with pytest.raises(StaleUpdateError, match="a day ahead of this rank's clock"):
                await anext(client.update(UpdateOrder(Update((1 << 63) - 1, 1), [], [])))
            stream = client.update(UpdateOrder(Update(time.time_ns() + EPOCHS_AHEAD // 2, 1), [], []))
            assert (await anext(stream)).kind == "lent"
            await stream.aclose()
            assert target.epoch == 0
            assert (await Controller(mine, [one.address], [there.address]).update(1)).committed == [""]
            assert 0 < target.epoch <= time.time_ns()


async def test_a_registry_admits_whom_its_deployment_names():
    async with opened("sim") as there, opened("sim") as honest, opened("sim") as liar:
        identity = honest.address.identity
        async with (
            RegistryServer(there, admits=lambda peer: peer.address.identity == identity) as server,
            EmbeddedRegistry(honest, server.address) as registry,
            EmbeddedRegistry(liar, server.address) as refused,
        ):
            await registry.ready()
            await until(lambda: "is not the registry's client of this engine" in refused.failure)
            assert not refused.in_touch
