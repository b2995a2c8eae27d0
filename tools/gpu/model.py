"""Send a KV cache while a captured model computes it: `python tools/gpu/model.py [--standin]`.

The same graph runs alone and with a `Producer` that follows the value it changes, in turns; the time of a step is the
GPU's own, by events around the graph. A consumer in a second process takes each layer, into memory of the host or of
the GPU, and notes when it had arrived. Before each step all bytes of the source are wrong, and each step's bytes are
its own; those at the consumer, at the producer and of the same step alone are compared by their hashes. One step more
has all layers sent before it begins: there the comparison has to fail, which shows that it can.

What the figure asks for is the arm whose target is the host. Where the target is the same GPU's, two processes take
turns at that GPU, which those of a service, with GPUs of their own, do not: its bytes have to be equal, its slowdown is
told.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median
from typing import Any

import anyio
import numpy as np
from device import Gpu, Report, die_with_parent, opened, parser, say, us
from models import FIELDS, ITEM, PAGE_TOKENS, PAGES, CapturedModel, StandinModel, model_on

import aiote
from aiote.gpu import WatchedValue
from aiote.kvcache import Cache, Consumer, PageRow, Producer

AXES = "layer page field token item"
TOKENS = PAGES * PAGE_TOKENS
ROWS = {0: PageRow(range(PAGES))}
SECONDS = 25.0
MOST_PERCENT = 2.0
KEPT = 8
Model = CapturedModel | StandinModel


def cache(name: str, array: Any) -> Cache:
    described = Cache(name)
    described.add(array, AXES, fields=["k", "v"])
    return described


def digest(data: Any) -> str:
    return hashlib.blake2b(np.ascontiguousarray(data).tobytes(), digest_size=16).hexdigest()


# -- the consumer's process


async def received(consumer: Consumer, address: str, request: str, layers: int) -> list[int]:
    """Receive a request; return when each layer had arrived."""
    arrived = []
    async with consumer.receive([address], request, tokens=TOKENS, rows=ROWS) as reception:
        print(json.dumps({"asked": request}), flush=True)
        for layer in range(layers):
            await reception.arrived(layer + 1)
            arrived.append(time.monotonic_ns())
    return arrived


async def consume(address: str, target: str, layers: int, gpu: Gpu | None) -> None:
    """Receive each request that standard input names, until it ends."""
    shape = (layers, PAGES, FIELDS, PAGE_TOKENS, ITEM)
    array: Any = gpu.array(*shape) if gpu is not None else np.zeros(shape, np.uint8)
    async with aiote.open_engine("local") as engine, Consumer(engine, cache("decode", array)) as consumer:
        await consumer.connect([address])
        print(json.dumps({"connected": target}), flush=True)
        while request := (await asyncio.to_thread(sys.stdin.readline)).strip():
            with anyio.fail_after(15):
                arrived = await received(consumer, address, request, layers)
            # The next request is awaited before: nothing writes here meanwhile.
            found = digest(array if gpu is None else gpu.read(array))
            print(json.dumps({"arrived": arrived, "digest": found}), flush=True)


class Child:
    """The consumer as the producer's process sees it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def ask(self, request: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{request}\n".encode())
        await self.process.stdin.drain()

    async def hear(self, key: str, seconds: float = 15) -> dict[str, Any]:
        """Return the next line that has a key. Raises RuntimeError where the process ends before."""
        assert self.process.stdout is not None
        with anyio.fail_after(seconds):
            while line := await self.process.stdout.readline():
                try:
                    found = json.loads(line)
                except ValueError:
                    say("   consumer: " + line.decode().rstrip())
                    continue
                if isinstance(found, dict) and key in found:
                    return found
        raise RuntimeError("the consumer's process has ended")


@asynccontextmanager
async def consumer_process(address: str, target: str, arguments: Any) -> AsyncIterator[Child]:
    """Have the consumer in a process of its own, which is killed in the end."""
    command = [sys.executable, __file__, "--become", address, target, "--layers", str(arguments.layers)]
    command += ["--standin"] * arguments.standin
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 20)
    try:
        child = Child(process)
        await child.hear("connected", 20)
        yield child
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


# -- the producer's


class Arm:
    """Steps alone and steps that are sent, to one consumer."""

    def __init__(self, model: Model, word: WatchedValue, producer: Producer, child: Child) -> None:
        self.model, self.word, self.producer, self.child = model, word, producer, child
        self.alone: list[float] = []
        self.sent: list[float] = []
        self.early: list[int] = []
        self.first: list[float] = []
        self.last: list[float] = []
        self.unequal = 0

    async def run_alone(self, number: int, keep: bool) -> str:
        took = await asyncio.to_thread(self.model.step(number).seconds)
        if keep:
            self.alone.append(took)
        return digest(self.model.gpu.read(self.model.cache))

    async def run_sent(self, number: int, keep: bool) -> tuple[str, str]:
        """Run a step whose layers are sent as they are computed; return the digests of both caches."""
        request = f"step {number}"
        async with self.producer.offer(request, tokens=TOKENS, rows=ROWS) as offer:
            await self.child.ask(request)
            await self.child.hear("asked")
            with anyio.fail_after(10):
                # Once the reader has been matched, what is computed is sent at once. That has no event.
                while not offer.pushes:  # noqa: ASYNC110
                    await asyncio.sleep(0.0005)
            base = self.word.value if self.model.gpu.real else 0
            self.word.value = base
            mark = self.model.step(number)
            with anyio.fail_after(10):
                await offer.follow(self.word, base=base)
        heard = await self.child.hear("arrived")
        took = await asyncio.to_thread(mark.seconds)
        if keep:
            behind = [(at - mark.ended_ns) / 1e9 for at in heard["arrived"]]
            self.sent.append(took)
            self.early.append(sum(one < 0 for one in behind))
            self.first.append(behind[0])
            self.last.append(behind[-1])
        return digest(self.model.gpu.read(self.model.cache)), heard["digest"]

    async def is_seen_too_early(self, number: int) -> bool:
        """Send all layers before a step computes them; return whether the digests show that."""
        async with self.producer.offer(f"step {number}", tokens=TOKENS, rows=ROWS) as offer:
            await self.child.ask(f"step {number}")
            for layer in range(self.model.layers):
                offer.computed(layer, stream=-1)
        heard = await self.child.hear("arrived")
        await asyncio.to_thread(self.model.step(number).seconds)
        return digest(self.model.gpu.read(self.model.cache)) != str(heard["digest"])

    async def step(self, number: int, keep: bool) -> None:
        """Run a step both ways, each first every other time."""
        if number % 2:
            alone = await self.run_alone(number, keep)
            here, there = await self.run_sent(number, keep)
        else:
            here, there = await self.run_sent(number, keep)
            alone = await self.run_alone(number, keep)
        self.unequal += not alone == here == there

    def found(self) -> dict[str, Any]:
        alone, sent = median(self.alone), median(self.sent)
        return {
            "steps": len(self.sent),
            "alone us": us(alone),
            "sent us": us(sent),
            "percent": round(100 * (sent / alone - 1), 2),
            "steps with other bytes": self.unequal,
            "layers before the end": median(self.early),
            "first layer, us after the end": us(median(self.first)),
            "last layer, us after the end": us(median(self.last)),
        }


async def one_arm(target: str, model: Model, word: WatchedValue, arguments: Any, seconds: float) -> dict[str, Any]:
    """Measure with one kind of target, for so many seconds."""
    config = aiote.EngineConfig(spin_us=arguments.spin_us)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(aiote.open_engine("local", config=config))
        producer = await stack.enter_async_context(Producer(engine, cache("prefill", model.cache)))
        child = await stack.enter_async_context(consumer_process(str(engine.address), target, arguments))
        arm, number, begin = Arm(model, word, producer, child), 0, time.monotonic()
        while number < KEPT + arguments.steps and (number < 2 * KEPT or time.monotonic() - begin < seconds):
            number += 1
            await arm.step(number, number > KEPT)
        found = arm.found() | {"sent too early, it is seen": await arm.is_seen_too_early(number + 1)}
    for name, value in found.items():
        say(f"   {name}: {value}")
    return found


async def measured(gpu: Gpu, report: Report, arguments: Any) -> int:
    with WatchedValue() as word:
        model = model_on(gpu, arguments.layers, word)
        for left, target in ((2, "host"), (1, "gpu")):
            seconds = max(report.left / left - 3, 2)
            with report.arm(f"target: {target}"), anyio.fail_after(seconds + 20):
                report.detail[target] = await one_arm(target, model, word, arguments, seconds)
        gpu.synchronize(model.stream)
        del model
    arms = report.detail.values()
    host = report.detail.get("host")
    if host is None:
        return report.end("failed", False)
    equal = len(report.detail) == 2 and not any(arm["steps with other bytes"] for arm in arms)
    equal = equal and all(arm["sent too early, it is seen"] for arm in arms)
    kept = host["percent"] <= MOST_PERCENT and host["layers before the end"] >= arguments.layers / 2
    ok = equal and (kept or not gpu.real)
    beside = f"; to the same GPU {report.detail['gpu']['percent']:+.1f} %" if "gpu" in report.detail else ""
    text = f"{host['percent']:+.1f} % of {host['alone us'] / 1000:.2f} ms{beside}; bits {'' if equal else 'not '}equal"
    early = f"{host['layers before the end']:g} of {arguments.layers} layers there before the step's end"
    return report.end(f"{text}; {early}", ok)


def main() -> int:
    options = parser("Send a KV cache while a captured model computes it.", SECONDS)
    options.add_argument("--layers", type=int, default=32)
    options.add_argument("--steps", type=int, help="of each arm, both ways (default: 150; 12 on the stand-in)")
    options.add_argument("--spin-us", type=int, default=50, help="of the producer's engine (default: aiote's, 50)")
    options.add_argument("--become", nargs=2, help="for its own consumer")
    arguments = options.parse_args()
    if arguments.become:
        die_with_parent()
        address, target = arguments.become
        # Without a GPU's memory on that side it needs no cupy. Standard output is for what is told.
        gpu = opened(arguments.standin) if target == "gpu" else None
        asyncio.run(consume(address, target, arguments.layers, gpu))
        return 0
    arguments.steps = arguments.steps or (12 if arguments.standin else 150)
    claim = "a captured decode step with KV writes of all layers: at most 2 % longer, bits equal, layers arrive before"
    report = Report(claim, arguments.seconds)
    return report.run(arguments.standin, measured, arguments)


if __name__ == "__main__":
    sys.exit(main())
