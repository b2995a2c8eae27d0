"""What is fuzzed of `aiote.service`: an endpoint that serves and calls, beside a peer that says what it likes.

The target `service` takes a program of that peer: steps of a `Say`, a 16-bit length and that many bytes, on a simulated
network. `Say.CALL` and others fill in slots and generations that fit, and `Say.OUTSIDE` writes into memory that was
lent to it, so a fuzzer that cannot guess those gets behind them nevertheless. What must hold: nothing of ours fails but
that peer's connection, another peer is served meanwhile, and nothing is held for it when it is gone.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import IntEnum
from typing import Any

import anyio
import msgspec
import numpy
from numpy.typing import NDArray

import aiote
from aiote import service as calls
from aiote.aio import TaskScope, run_background_tasks
from aiote.service.endpoint import CallEndpoint
from aiote.service.frames import (
    MAGIC,
    Ask,
    CallFrame,
    Cancel,
    Credit,
    End,
    Frame,
    Free,
    Grant,
    HelloFrame,
    Items,
    OutSpec,
    Piece,
    Return,
    pack,
    unpack,
)
from aiote.testing import Fabric, run

LIMITS = calls.Limits(
    slots=8,
    calls=4,
    queue=2,
    message_bytes=64 << 10,
    peer_bytes=512 << 10,
    total_bytes=2 << 20,
    stream_items=8,
    stream_bytes=4096,
)
CONFIG = aiote.EngineConfig(message_pool=64, max_transfers=256)
GREETING = HelloFrame(1, True, 16384, 8, 8, 4096)
TURN_S = 0.002
"""Of virtual time: what a step makes happen has happened by then, mostly."""
SOON_S = 100.0
LENT_BYTES = 32 << 10
FILLED_BYTES = 256 << 10
MOST_STEPS = 64


class Say(IntEnum):
    """What the peer does next; a number beyond these is taken modulo their count."""

    FRAMES = 0  # a message of calls with these bytes behind the first
    MESSAGE = 1  # a message of these bytes
    GREET = 2  # a well-formed HelloFrame
    CALL = 3  # a call in slot and of method as the first bytes say, with the rest as its body
    OUTSIDE = 4  # the same, with its body and piece in memory that was lent
    BEGIN = 5  # the tested side calls a method of the peer's, which one the first byte says
    END = 6  # the end of its oldest call, with the status of the first byte and the rest as its body
    ITEMS = 7  # an item of its oldest call
    LEND = 8  # what it has asked for is lent to it
    CANCEL = 9  # the call in this slot
    FREE = 10  # what it has been sent in its memory was read
    GO = 11  # the peer goes, and connects again


class Fuzzed(calls.Service):
    """One method of each kind."""

    @calls.method
    async def add(self, left: NDArray[numpy.int32], right: list[list[int]]) -> NDArray[numpy.int32]:
        return left + len(right)

    @calls.method
    async def fill(self, out: calls.Out[numpy.uint8], value: dict[str, float]) -> None:
        out[...] = len(value)

    @calls.method
    async def wait(self) -> None:
        await anyio.sleep_forever()

    @calls.method
    async def items(self, count: int) -> AsyncIterator[NDArray[numpy.uint8]]:
        for number in range(min(count, 30)):
            yield numpy.full(number * 1000, number, numpy.uint8)


METHODS = ("Fuzzed/1.add", "Fuzzed/1.fill", "Fuzzed/1.wait", "Fuzzed/1.items", "Health/1.check", "Fuzzed/1.nothing")


class Liar:
    """The peer: it knows what was said to it, and says what a program tells."""

    def __init__(self, engine: aiote.Engine, tested: aiote.Engine, client: Fuzzed, scope: TaskScope) -> None:
        self.engine, self.tested, self.client, self.scope = engine, tested, client, scope
        self.forget()

    def forget(self) -> None:
        """Begin a new conversation."""
        self.generations = [0] * 8
        self.lent: tuple[int, aiote.RemoteRegion] | None = None
        self.heard: list[CallFrame] = []
        self.asked: list[int] = []
        self.told: dict[int, int] = {}
        self.pieces: list[Piece] = []

    async def listen(self) -> None:
        """Take what the tested side says: frames, within its own limits."""
        async for message in self.engine.messages():
            assert message.data[:1] == MAGIC
            for frame in unpack(message.data):
                match frame:
                    case Grant() if frame.descriptor:
                        assert frame.nbytes <= LIMITS.peer_bytes
                        self.lent = (frame.number, self.engine.attach(frame.descriptor))
                    case CallFrame():
                        self.heard.append(frame)
                    case End() | Items():
                        self.pieces += frame.pieces
                    case Ask():
                        self.asked.append(frame.nbytes)

    async def say(self, *frames: Frame) -> None:
        await self.send(pack(list(frames)))

    async def send(self, data: bytes) -> None:
        try:
            await self.engine.send(self.tested.address, data)
        except aiote.AioteError:
            self.forget()

    def call(self, data: bytes, body: bytes, pieces: list[Piece], *, outside: bool = False) -> CallFrame:
        slot = (data[0] if data else 0) % 8
        self.generations[slot] += 1
        method = METHODS[(data[0] >> 3 if data else 0) % len(METHODS)]
        return CallFrame(slot, self.generations[slot], method, 0.0, body, pieces, outside)

    async def outside(self, data: bytes) -> None:
        if self.lent is None:
            await self.say(GREETING, Ask(LENT_BYTES))
            await anyio.sleep(TURN_S)
        if self.lent is not None and data[1:]:
            number, remote = self.lent
            body = data[1 : 1 + remote.nbytes]
            try:
                async with self.engine.register(bytes(body)) as region:
                    await self.engine.write(region, remote[: len(body)])
            except aiote.AioteError:
                self.forget()
                return
            await self.say(self.call(data, b"", [(number, 0, len(body))], outside=True))

    async def end(self, data: bytes, *, item: bool) -> None:
        if not self.heard:
            return
        call = self.heard[0]
        if item:
            first = self.told[call.slot] = self.told.get(call.slot, -1) + 1
            await self.say(Items(call.slot, call.generation, first, [data], []))
        else:
            self.heard.pop(0)
            count = self.told.pop(call.slot, -1) + 1
            await self.say(End(call.slot, call.generation, data[0] % 9 if data else 0, data[1:], [], False, count))

    async def lend(self) -> None:
        if self.asked:
            nbytes = self.asked.pop(0)
            peer = self.engine.find_peer(self.tested.address)
            if peer is not None and nbytes <= LIMITS.peer_bytes:
                lease = self.engine.register(numpy.zeros(nbytes, numpy.uint8)).lease(slice(0, nbytes), peer)
                await self.say(Grant(nbytes, nbytes, lease.descriptor))

    async def go(self) -> None:
        peer = self.engine.find_peer(self.tested.address)
        if peer is not None:
            peer.disconnect("it goes")
            await peer.wait_closed()
        self.forget()

    async def begin(self, data: bytes) -> None:
        """Have the tested side call; however that ends, it is by an error of ours."""

        async def call() -> None:
            try:
                match (data[0] if data else 0) % 4:
                    case 0:
                        assert (await self.client.add(numpy.zeros(9, "i4"), [])).dtype == numpy.int32
                    case 1:
                        await self.client.add(numpy.zeros(5000, "i4"), [[1]])
                    case 2:
                        await self.client.fill(numpy.zeros(FILLED_BYTES, "u1"), {})
                    case 3:
                        async for one in self.client.items(3):
                            assert one.dtype == numpy.uint8
            except (aiote.AioteError, TimeoutError):
                pass

        self.scope.start(call)

    async def do(self, step: Say, data: bytes) -> None:
        match step:
            case Say.FRAMES:
                await self.send(MAGIC + data)
            case Say.MESSAGE:
                await self.send(data)
            case Say.GREET:
                await self.say(GREETING)
            case Say.CALL:
                await self.say(self.call(data, data[1:], []))
            case Say.OUTSIDE:
                await self.outside(data)
            case Say.BEGIN:
                await self.begin(data)
            case Say.END | Say.ITEMS:
                await self.end(data, item=step is Say.ITEMS)
            case Say.LEND:
                await self.lend()
            case Say.CANCEL:
                slot = (data[0] if data else 0) % 8
                await self.say(Cancel(slot, max(1, self.generations[slot])))
            case Say.FREE:
                pieces, self.pieces = self.pieces, []
                await self.say(Free(pieces))
            case Say.GO:
                await self.go()
        await anyio.sleep(TURN_S)


def steps(data: bytes) -> list[tuple[Say, bytes]]:
    """Return the steps of a program."""
    found, at = [], 0
    while at < len(data) and len(found) < MOST_STEPS:
        stop = at + 3 + int.from_bytes(data[at + 1 : at + 3], "big")
        found.append((Say(data[at] % len(Say)), data[at + 3 : stop]))
        at = stop
    return found


@asynccontextmanager
async def no_error() -> AsyncIterator[None]:
    """See that nothing is reported: what a peer says is no reason."""
    found: list[BaseException] = []
    before, sys.excepthook = sys.excepthook, lambda _kind, error, _traceback: found.append(error)
    try:
        yield
    finally:
        sys.excepthook = before
    if found:
        raise found[0]


async def until(condition: Callable[[], object]) -> None:
    with anyio.fail_after(SOON_S):
        while not condition():
            await anyio.sleep(TURN_S)


async def play(fabric: Fabric, program: list[tuple[Say, bytes]]) -> None:
    """Let the liar say what it is told beside an honest peer, and see what is left of it."""
    async with (
        no_error(),
        fabric.open_engine(config=CONFIG) as tested,
        fabric.open_engine(config=CONFIG) as honest,
        fabric.open_engine(config=CONFIG) as lying,
        calls.serve(tested, Fuzzed(), limits=LIMITS) as server,
        run_background_tasks() as scope,
    ):
        endpoint = CallEndpoint.of(tested)
        served = calls.client(honest, tested.address, Fuzzed)
        await served.add(numpy.arange(3, dtype="i4"), [])
        tasks = len(asyncio.all_tasks())
        liar = Liar(lying, tested, calls.client(tested, lying.address, Fuzzed), scope)
        scope.start(liar.listen)
        for step, data in program:
            await liar.do(step, data)
        with anyio.fail_after(SOON_S):
            assert (await served.add(numpy.arange(3, dtype="i4"), [[]])).tolist() == [1, 2, 3]
        await lying.aclose()
        await until(lambda: not server.running and not server.queued and len(endpoint._links) == 1)
        await until(lambda: not endpoint.budget.used and not tested._links.leases._live)
        assert not endpoint.registrations.in_use
        await until(lambda: len(asyncio.all_tasks()) <= tasks)


def service(data: bytes) -> None:
    """Run one program against an endpoint."""
    program = steps(data)
    run(lambda fabric: play(fabric, program), limit=math.inf)


# Seeds.


def step(say: Say, data: bytes = b"") -> bytes:
    return bytes((say,)) + len(data).to_bytes(2, "big") + data


def arguments(*values: Any) -> bytes:
    return msgspec.msgpack.encode(values)


def service_seeds() -> dict[str, bytes]:
    """Return the seeds: every frame, every step, and what a conversation is like."""
    array = ("<i4", (2,), b"12345678")
    frames: dict[str, list[Frame]] = {
        "hello": [GREETING],
        "call": [GREETING, CallFrame(1, 2, METHODS[0], 0.5, arguments(array, [[1]]), [])],
        "pieces": [GREETING, CallFrame(1, 2, METHODS[0], 0.0, arguments(("<i4", (2,), 0), []), [(0, 0, 8)])],
        "end": [GREETING, End(0, 1, 0, b"\x01", [], False, 1)],
        "items": [GREETING, Items(0, 1, 0, [b"\x01", b"\x02"], [])],
        "credit": [GREETING, CallFrame(1, 1, METHODS[3], 0.0, arguments(20), []), Credit(1, 1, 3)],
        "cancel": [GREETING, Cancel(1, 1), CallFrame(1, 1, METHODS[2], 0.0, arguments(), [])],
        "ask": [GREETING, Ask(1000)],
        "grant": [GREETING, Grant(0, 8, b"descriptor"), Grant(0, 0, b"", "no")],
        "free": [GREETING, Free([(0, 0, 8)])],
        "return": [GREETING, Ask(1000), Return(0)],
    }
    found = {name: step(Say.FRAMES, pack(said)[1:]) for name, said in frames.items()}
    greet = step(Say.GREET)
    out = OutSpec("|u1", [300], b"")
    asked = b"".join(step(Say.BEGIN, bytes((kind,))) for kind in range(4))
    return found | {
        "message": step(Say.MESSAGE, b"hello"),
        "add": greet + step(Say.CALL, b"\x00" + arguments(array, [[]])),
        "fill": greet + step(Say.CALL, b"\x09" + arguments(out, {"a": 1.5})),
        "wait": greet + step(Say.CALL, b"\x12\x90") + step(Say.CALL, b"\x13\x90") + step(Say.CANCEL, b"\x02"),
        "stream": greet + step(Say.CALL, b"\x1a" + arguments(30)) + step(Say.FRAMES, pack([Credit(2, 1, 8)])[1:]),
        "invalid": greet + step(Say.CALL, b"\x00" + arguments(array, 3)),
        "unfolding": greet + step(Say.CALL, b"\x00" + arguments(array, [[]] * 1000)) * 2,
        "short": greet + step(Say.CALL, b"\x1a" + arguments(3)),
        "large": greet + step(Say.CALL, b"\x1a" + arguments(12)) + step(Say.LEND) * 2 + step(Say.FREE),
        "outside": step(Say.OUTSIDE, b"\x00" + arguments(array, [[]] * 20)),
        "given-back": step(Say.OUTSIDE, b"\x20\x90") + step(Say.FRAMES, pack([Return(0), Ask(9)])[1:]),
        "asked": greet + asked + step(Say.END, b"\x00" + msgspec.msgpack.encode(array)),
        "lent": greet + step(Say.BEGIN, b"\x01") + step(Say.LEND) + step(Say.END, b"\x01" + arguments(["A"], "no")),
        "refused": greet + step(Say.BEGIN, b"\x01") + step(Say.FRAMES, pack([Grant(0, 0, b"", "no")])[1:]),
        "read": greet + step(Say.BEGIN, b"\x03") + step(Say.ITEMS, msgspec.msgpack.encode(array)) + step(Say.END),
        "gone": greet + asked + step(Say.GO) + step(Say.GREET) + step(Say.CALL, b"\x20\x90"),
    }
