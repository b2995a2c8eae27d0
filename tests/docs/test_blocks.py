"""The blocks of code in the pages run, in the situations that the pages describe, and bring about what they promise.

The README, the tutorial and the how-to pages show whole programs, which other files run. The blocks here are pieces of
programs: a test gives each piece the names that its page explains.
"""

from __future__ import annotations

import ast
import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

import aiote
import aiote.gpu
from aiote import ScatterTarget, service, weights
from aiote import bridge as bridges
from aiote.cli.layoutfile import read_layout, read_recipe
from aiote.discovery import EmbeddedRegistry, Member, Members, RegistryServer
from aiote.discovery.wire import decode_member
from aiote.kvcache import BlockingConsumer, Cache, Consumer, Group, PageRow, Producer, Worker
from aiote.moe import MoeConfig
from aiote.weights import Layout, Recipe, Replicate, Shard, cat
from support import TESTS
from support.checkout.page_blocks import DOCS, block, blocks, parts, replaced, run
from support.engines.fan_out import star
from support.engines.opening import PATIENCE_S, across, linked, opened, until
from support.gpu.standin_cuda import GpuArray, driver, gpu_copy, standin_path
from support.kv.caches import Model, Side, built, expected, fill, same
from support.kv.worlds import BEFORE, compute, world
from support.moe.ranks import Tokens, all_of, expert, reference
from support.moe.ranks import compute as moe_compute
from support.moe.ranks import ranks as moe_ranks

OF_THEIR_PAGES = {
    "bridge": "bridge/test_page.py",
    "connectors": "../programs/hosts/vllm_serve_host.py",
    "security": "links/test_tls.py",
    "testing": "testing/test_page.py",
    "tutorial": "docs/test_tutorial.py",
}
"""Pages whose blocks a test finds by itself."""
MODEL = Model(layers=3, item=64)

pytestmark = [pytest.mark.libfabric, pytest.mark.one_library]


def test_every_block_is_run():
    """A block that nobody runs is shown for as long as it is wrong."""
    asked = set()
    for path in TESTS.rglob("*.py"):
        if "page_blocks" in (text := path.read_text()):
            calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
            asked |= {tuple(map(ast.literal_eval, one.args)) for one in calls if getattr(one.func, "id", "") == "block"}
    shown = {path.stem: blocks(path.stem) for path in DOCS.glob("*.md")}
    assert asked == {(page, n) for page in shown if page not in OF_THEIR_PAGES for n in range(len(shown[page]))}
    for page, place in OF_THEIR_PAGES.items():
        assert shown[page]
        assert f"{page}.md" in (TESTS / place).read_text()


# Engines.


async def test_the_page_of_streams_shares_memory():
    sharing, mapping = parts(block("streams", 0), "mapped = ")
    async with linked("local") as (owner, user):
        peer = await owner.connect(user.address)
        there = await run(sharing, engine=owner, peer=peer)
        descriptor = (await user.recv()).data
        here = await run(mapping, engine=user, numpy=np, descriptor=descriptor, peer=user.peers[0])
        assert there["memory"].view[0] == 1
        here["mapped"].close()
        there["memory"].close()


async def test_the_two_sides_of_the_first_page():
    sending, receiving = parts(block("index", 0), "# The receiver")
    async with linked("local") as (left, right):
        memory = bytearray(3)
        await run(sending, engine=left, source=left.register(b"abc"), target=across(left, right, memory))
        await run(receiving, engine=right)
        assert memory == b"abc"


async def test_prepared_requests():
    async with star("local", 6) as here:
        names = {
            "engine": here.hub,
            "addresses": [other.address for other in here.others],
            "region": here.region,
            "remotes": [target.dst for target in here.targets],
            "lengths": np.arange(6) + 1,
            "local_offsets": np.arange(6) * 100,
            "remote_offsets": np.arange(6) * 10,
            "imm": 7,
            "page_bytes": 512,
            "local_pages": np.arange(12),
            "remote_pages": np.arange(13, 1, -1),
            "counts": np.full(6, 2),
        }
        await run(block("api", 0), np=np, ScatterTarget=ScatterTarget, **names)
        for n, (other, memory) in enumerate(zip(here.others, here.memories, strict=True)):
            await other.counter(7).wait(3 + (n in (3, 5)))
            for page in (2 * n, 2 * n + 1):
                assert np.array_equal(memory[512 * (13 - page) :][:512], here.source[512 * page :][:512])
            assert np.array_equal(memory[10 * n :][: n + 1], here.source[100 * n :][: n + 1])


async def test_a_block_of_immediates():
    async with linked("local") as (left, right):
        source, target = left.register(bytearray(1)), across(left, right, bytearray(1))

        def tell(first: int) -> None:
            for n, count in enumerate([1, 4, 1]):
                for _ in range(count):
                    left.submit_write_imm(source, target, first + n)

        await run(replaced(block("immediates", 0), "...", "tell(block.first)"), engine=right, tell=tell)


@pytest.fixture
def cuda(monkeypatch):
    """The stand-in for the driver, on which the tests below have two GPUs."""
    driver()
    monkeypatch.setenv("AIOTE_LIBCUDA", standin_path())


async def test_a_tensor_goes_from_one_gpu_to_another(cuda):
    said: list[Any] = []
    function = (await run(block("gpu", 0), print=lambda *words: said.append(words)))["from_one_gpu_to_another"]
    async with linked("local") as (left, right):
        target = GpuArray(4096, 1)
        with right.counter(7) as arrivals:
            await function(left, gpu_copy(np.full(4096, 9, np.uint8)), right.register(target).descriptor)
            await arrivals.wait(1)
        assert (target.seen == 9).all()
        assert said == [("cuda:0", {"local": "shared"})]


async def test_layers_are_written_behind_a_stream(cuda):
    function = (await run(block("gpu", 1)))["layer_by_layer"]
    async with linked("local") as (left, right):
        targets = [GpuArray(4096, 1) for _ in range(3)]
        layers = [left.register(gpu_copy(np.full(4096, n + 1, np.uint8))) for n in range(3)]
        remotes = [left.attach(right.register(target).descriptor) for target in targets]
        with right.counter(7) as arrivals:
            await function(left, layers, remotes, None)
            await arrivals.wait(3)
        assert [int(target.seen[-1]) for target in targets] == [1, 2, 3]


async def test_layers_are_written_as_a_watched_value_grows(cuda, monkeypatch):
    made, real = list[Any](), aiote.gpu.WatchedValue
    monkeypatch.setattr(aiote.gpu, "WatchedValue", lambda **given: made.append(real(**given)) or made[0])
    function = (await run(block("gpu", 2)))["as_layers_end"]
    async with linked("local") as (left, right), anyio.create_task_group() as group:
        targets = [GpuArray(4096, 1) for _ in range(3)]
        layers = [left.register(gpu_copy(np.full(4096, n + 1, np.uint8))) for n in range(3)]
        remotes = [left.attach(right.register(target).descriptor) for target in targets]
        group.start_soon(function, left, layers, remotes)
        await until(lambda: bool(made))
        with right.counter(7) as arrivals:
            made[0].value = 1
            await arrivals.wait(1)
            assert not any(target.seen.any() for target in targets[1:])
            made[0].value = 3
            await arrivals.wait(2)
        assert [int(target.seen[-1]) for target in targets] == [1, 2, 3]


# Services, and how they are found.


async def embed() -> Any:
    """Return the service of the page on services."""
    return (await run(block("services", 0)))["Embed"]


async def test_a_service_is_served_and_called():
    said: list[Any] = []
    names = {"aiote": aiote, "service": service, "anyio": anyio, "asyncio": asyncio, "numpy": np}
    names |= {"Embed": await embed(), "print": said.append}
    serve = (await run(block("services", 1), **names))["serve"]
    call = (await run(block("services", 2), **names))["call"]
    async with anyio.create_task_group() as group:
        group.start_soon(serve)
        await until(lambda: bool(said))
        await call(str(said[0]))
        group.cancel_scope.cancel()


async def test_a_stream_and_an_interceptor():
    names = {"service": service, "AsyncIterator": AsyncIterator, "time": time}
    said: list[Any] = []
    generate = (await run(block("services", 3), **names))["Generate"]
    log = (await run(block("services", 5), print=lambda *words: said.append(words), **names))["log"]
    async with linked("local") as (left, right), service.serve(right, generate(), interceptors=[log]):
        client = service.client(left, right.address, generate)
        assert [length async for length in client.tokens("one three")] == [3, 5]
        await until(lambda: bool(said))
    ((_, address, took),) = said
    assert str(address) == str(left.address)
    assert took >= 0


async def test_a_service_with_several_servers():
    said: list[Any] = []
    names: dict[str, Any] = {"aiote": aiote, "service": service, "anyio": anyio, "RegistryServer": RegistryServer}
    names |= {"EmbeddedRegistry": EmbeddedRegistry, "Member": Member, "Members": Members, "Embed": await embed()}
    vectors = np.zeros((2, 256), np.float32)
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: run(block("discovery", 0), print=said.append, **names))
        await until(lambda: bool(said))
        names["registry_address"] = said[0]
        group.start_soon(lambda: run(block("discovery", 1), **names))
        await run(block("discovery", 2), vectors=vectors, **names)
        assert (vectors == 2).all()
        async with opened("auto") as engine, EmbeddedRegistry(engine, said[0]) as registry:
            client = (await run(block("services", 4), engine=engine, registry=registry, **names))["client"]
            assert await client.embed(["some", "other", "words"], out=vectors) == 3
        group.cancel_scope.cancel()


def test_a_member_in_json_is_one():
    member = decode_member(replaced(block("discovery", 3), "YWlvdEEB...", "YWlvdEEB").encode())
    assert (member.name, member.role, member.incarnation, member.attributes) == ("embed-1", "embed", 7, {"load": 3})


# KV caches.


async def test_a_cache_of_an_array():
    array = np.zeros((9, 2, 4, 16, 64), np.float16)
    cache = (await run(block("kvcache", 0), Cache=Cache, array=array))["cache"]
    assert {tensor.layer for tensor in cache.tensors} == {3}


async def test_a_request():
    offering, receiving = parts(block("kvcache", 1), "async with consumer")
    offering = replaced(offering, "offer.computed(layer) ", "[offer.computed(layer) for layer in range(3)] ")
    here, there = {0: PageRow([9, 3, 7])}, {0: PageRow([5, 2], start=1)}
    async with world("local", Side(tokens=40), Side(tokens=40), MODEL) as w, anyio.create_task_group() as group:
        fill(w.left, here, 120)
        group.start_soon(lambda: run(offering, producer=w.producers[0], PageRow=PageRow))
        await run(receiving, consumer=w.consumers[0], addresses=w.places, PageRow=PageRow)
        assert same(w.right.caches[0], expected(w.right.caches[0], there, 120, BEFORE))


async def test_a_group_of_decode_ranks():
    rank, leading = parts(block("kvcache", 2), "group = Group")
    rank = replaced(rank, "    ...", "    ready.append(consumer); await over.wait()")
    rows, names = {0: PageRow([5, 2])}, {"PageRow": PageRow, "service": service}
    async with (
        world("local", Side(tokens=50), Side(tokens=50), MODEL) as w,
        opened("local") as leader,
        opened("local") as engine,
        anyio.create_task_group() as tasks,
    ):
        cache, over, ready = w.right.caches[0], anyio.Event(), list[Any]()
        fill(w.left, rows, 100)
        names |= {"Consumer": Consumer, "Worker": Worker, "cache": cache, "ready": ready, "over": over}
        tasks.start_soon(lambda: run(rank, engine=engine, leader=leader.address, **names))
        await until(lambda: bool(ready))
        tasks.start_soon(compute, w.producers[0], "7f3a", 100, rows)
        await run(leading, Group=Group, engine=leader, ranks=[engine.address], prefillers=w.places, **names)
        assert same(cache, expected(cache, rows, 100, BEFORE))
        over.set()


async def test_a_request_of_a_program_that_calls_synchronously():
    text = replaced(block("kvcache", 3), "consumer.poll()", "polled(consumer)")
    left, right, rows = Side(tokens=50), Side(tokens=50), {0: PageRow([5, 2])}
    built(MODEL, left, "prefill"), built(MODEL, right, "decode")
    fill(left, rows, 100)

    def polled(consumer: BlockingConsumer) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if (found := consumer.poll()) != ([], {}, {}):
                return found
        raise AssertionError("nothing has ended")

    names = {"bridge": bridges, "BlockingConsumer": BlockingConsumer, "cache": right.caches[0], "rows": rows}
    async with (
        opened("auto") as engine,
        Producer(engine, left.caches[0]) as producer,
        anyio.create_task_group() as tasks,
    ):
        names |= {"addresses": [engine.address], "polled": polled}
        tasks.start_soon(compute, producer, "7f3a", 100, rows)
        await anyio.to_thread.run_sync(exec, text, names)
    assert names["finished"] == (["7f3a"], {}, {})
    assert same(right.caches[0], expected(right.caches[0], rows, 100))


# Mixture of experts.


async def test_a_layer_of_experts():
    names = await run(block("moe", 0))
    config = MoeConfig(experts=8, top_k=3, hidden=48, tokens=9, dtype="float8_e4m3fn", scales=4)
    names["config"] = config  # the page's has gigabytes of buffers for two ranks
    given = [Tokens(np.random.default_rng(n), config, 5 + n, wild=False) for n in range(2)]
    async with linked("local") as engines:
        members = [engine.address for engine in engines]

        async def of(rank: int) -> Any:
            experts = [lambda x, scales, n=n: expert(config, n, x) for n in range(4 * rank, 4 * rank + 4)]
            one = given[rank]
            return await names["layer"](engines[rank], members, rank, one.x, one.scales, one.ids, one.weights, experts)

        sums = await all_of(lambda: of(0), lambda: of(1))
    for one, found in zip(given, sums, strict=True):
        assert np.array_equal(found, reference(config, one))


async def test_two_halves_of_a_batch_overlap():
    two_halves = (await run(block("moe", 1)))["two_halves"]
    config = MoeConfig(experts=6, top_k=2, hidden=16, tokens=8, lanes=2, dtype="float32", out_dtype="float32")
    rng = np.random.default_rng(1)
    async with moe_ranks(lambda: opened("local"), 2, config) as groups:
        given = [[Tokens(rng, config, 4 + n, wild=False) for n in range(2)] for _ in groups]

        async def of(rank: int) -> Any:
            halves = [(one.x, one.ids, one.weights) for one in given[rank]]
            return await two_halves(groups[rank], *halves, lambda batch: moe_compute(groups[rank], batch))

        found = await all_of(lambda: of(0), lambda: of(1))
    for halves, sums in zip(given, found, strict=True):
        for one, total in zip(halves, sums, strict=True):
            assert np.array_equal(total, reference(config, one))


# Updates of weights.


async def test_a_plan_of_two_layouts_and_a_recipe():
    names = await run(block("weights", 0))
    said: list[Any] = []
    names = await run(block("weights", 1), **{**names, "print": lambda *words: said.append(words)})
    assert names["plan"].targets == names["inference"]
    ((sent, received),) = said
    assert sum(sent.values()) == sum(received.values()) > 0


class TinyModel:
    """A rank's model, with a loader as inference engines have it."""

    def __init__(self, rank: int) -> None:
        self.rank, self.parameters = rank, {"w": np.zeros((2, 3))}

    def named_parameters(self) -> Any:
        return self.parameters.items()

    def load_weights(self, pairs: Any) -> None:
        for name, tensor in pairs:
            if name == "weight":
                np.copyto(self.parameters["w"], tensor[2 * self.rank : 2 * self.rank + 2])


async def test_a_recipe_of_a_loader():
    trained = {"weight": ((4, 3), "F64"), "rotary.inv_freq": ((2,), "F64")}
    first, second = parts(block("weights", 2), "targets, recipe")
    names = await run(first, model=TinyModel(1), trained=trained)
    names = await run(first, model=TinyModel(0), trained=trained, other=names["recording"])
    names = await run(second, **names)
    assert names["targets"].tensors["w"].shape == (4, 3)


def test_files_of_a_layout_and_a_recipe(tmp_path):
    for name, text in (("layout", block("weights", 3)), ("recipe", block("weights", 4))):
        (tmp_path / f"{name}.toml").write_text(text)
    layout, recipe = read_layout(tmp_path / "layout.toml"), read_recipe(tmp_path / "recipe.toml")
    assert set(layout.tensors) == {f"layers.{n}.{name}" for n in range(4) for name in ("q", "qkv")}
    assert set(recipe.targets) == {*(f"layers.{n}.qkv" for n in range(4)), "head", "w13"}


async def test_an_update_of_weights():
    text, update = block("weights", 5), "await controller.update(version)"
    train = "        ...\n\n\nasync def infer"
    text = replaced(replaced(text, train, train.replace("...", "await forever()")), update, f"{update}; heard(report)")
    names = await run(text, weights=weights, itertools=itertools, forever=anyio.sleep_forever)
    reports: list[Any] = []
    names["heard"] = reports.append
    training = Layout.over([0], {name: ((4, 3), "F32", Replicate()) for name in "ab"})
    inference = Layout.over([0], {"ab": ((8, 3), "F32", Shard(0))})
    recipe = Recipe({"ab": cat("a", "b")})
    source = {name: np.full((4, 3), value, np.float32) for name, value in (("a", 1), ("b", 2))}
    target = {"ab": np.zeros((8, 3), np.float32)}
    async with opened("local") as one, opened("local") as other, opened("local") as chief:
        async with anyio.create_task_group() as group:
            group.start_soon(names["train"], one, training, 0, source, recipe, chief.address)
            group.start_soon(names["control"], chief, [one.address], [other.address], recipe)
            await names["infer"](other, inference, 0, target, chief.address)
            await until(lambda: bool(reports))
            group.cancel_scope.cancel()
    assert np.array_equal(target["ab"], np.concatenate([source["a"], source["b"]]))
