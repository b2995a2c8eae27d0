"""An engine in a process of its own, to be stopped and killed: one JSON command a line in, one JSON answer a line out.

`children.Child` is the other end. A command names one of the methods below; an error of aiote's is an answer, too. The
process ends when its input does, so it does not outlive the tests.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import sys
import time
from typing import Any

import aiote
from aiote import service
from support.engines.every_verb import Mix
from support.service import arrays as arrays_service
from support.weights import ranks as weight_ranks


class Commands:
    """What a child can be told to do."""

    def __init__(self) -> None:
        self.engine: aiote.Engine | None = None
        self.memory = bytearray()
        self.events: list[aiote.Event] = []
        self.failed: list[str] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.mix: Mix | None = None
        self.ranks: weight_ranks.Ranks | None = None

    async def open(
        self, provider: str, config: dict[str, Any], size: int, rails: list[str] | None = None
    ) -> dict[str, Any]:
        """Open the engine and register `size` bytes of zeros; one that was open is dropped."""
        if self.engine is not None:
            self.engine.abort()
        for name in ("cluster_key", "identity"):
            if name in config:
                config[name] = bytes.fromhex(config[name])
        self.engine = await aiote.open_engine(provider, rails, aiote.EngineConfig(**config))
        self.events = []
        self.engine.listen_events(self.events.append)
        self.memory = bytearray(size)
        return {"address": str(self.engine.address), "descriptor": self.engine.register(self.memory).descriptor.hex()}

    async def abort(self, value: int) -> dict[str, Any]:
        """Close the engine at once, and use the memory for something else: fill it with a byte."""
        self.engine.abort()
        self.memory[:] = bytes([value]) * len(self.memory)
        return {}

    async def connect(self, address: str) -> dict[str, Any]:
        """Connect to an engine."""
        return {"peer": str((await self.engine.connect(address)).address)}

    async def peers(self) -> dict[str, Any]:
        """Tell who is connected."""
        return {"peers": [str(peer.address) for peer in self.engine.peers]}

    async def contents(self) -> dict[str, Any]:
        """Tell which bytes the memory has."""
        found, rest = [], bytes(self.memory)
        while rest:
            found.append(rest[0])
            rest = rest.translate(None, rest[:1])
        return {"bytes": sorted(found)}

    async def happened(self) -> dict[str, Any]:
        """Tell the events so far, with their reasons."""
        return {"events": [[event.name, str(event.details.get("reason", ""))] for event in self.events]}

    async def flood(self, descriptor: str, imm: int) -> dict[str, Any]:
        """Begin to write zeros to a remote region, counted, again and again until its owner is lost."""
        self._start(self._flood(bytes.fromhex(descriptor), imm))
        return {}

    async def hammer(self, descriptor: str, value: int) -> dict[str, Any]:
        """Begin to fill a remote region with a byte, four writes at a time, until one fails."""
        for _ in range(4):
            self._start(self._hammer(bytes.fromhex(descriptor), value))
        return {}

    async def failures(self) -> dict[str, Any]:
        """Tell how the hammering ended so far."""
        return {"failures": self.failed}

    async def wait(self, imm: int, n: int) -> dict[str, Any]:
        """Wait for counts."""
        await self.engine.counter(imm).wait(n)
        return {}

    async def receive(self) -> dict[str, Any]:
        """Take one message."""
        return {"data": (await self.engine.recv()).data.hex()}

    async def take(self, n: int | None = None) -> dict[str, Any]:
        """Take so many messages, or begin to take every one."""
        if n is None:
            self._start(self._take())
        else:
            for _ in range(n):
                await self.engine.recv()
        return {}

    async def mixing(self, descriptor: str) -> dict[str, Any]:
        """Begin every verb toward the owner of some memory, and wait until each has been done once."""
        peer = await self.engine.connect(self.engine.attach(bytes.fromhex(descriptor)).owner)
        self.mix = Mix(self.engine, peer, bytes.fromhex(descriptor))
        while not all(self.mix.done.values()):
            await asyncio.sleep(0.001)
        return {}

    async def mixed(self) -> dict[str, Any]:
        """Wait until each verb has failed, and tell with what."""
        return {"ended": await self.mix.over(), "done": self.mix.done}

    async def pour(self, descriptor: str, imm: int, size: int, count: int, window: int) -> dict[str, Any]:
        """Write random bytes over a remote region, in `count` counted writes of `size` bytes, `window` at a time; tell
        how long that took, and what is there now.
        """
        remote = self.engine.attach(bytes.fromhex(descriptor))
        data = random.Random(imm).randbytes(len(remote))
        source = self.engine.register(data)
        places = iter([i * size % (len(data) - size + 1) for i in range(count)])
        began = time.monotonic()

        async def stream() -> None:
            for at in places:
                await self.engine.write_imm(source[at : at + size], remote[at : at + size], imm)

        streams = [asyncio.create_task(stream()) for _ in range(window)]
        try:
            await asyncio.gather(*streams)
        finally:
            # Where one fails for a lost peer, another's next write would dial it anew, and go on later.
            for task in streams:
                task.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        seconds = time.monotonic() - began
        await source.aclose()
        return {"seconds": seconds, "digest": hashlib.sha256(data).hexdigest()}

    async def poured(self, imm: int, count: int) -> dict[str, Any]:
        """Wait for the counts of a pour, and tell what is here and what else was counted."""
        counter = self.engine.counter(imm)
        await counter.wait(count)
        digest = hashlib.sha256(self.memory).hexdigest()
        await asyncio.sleep(0.2)
        return {"digest": digest, "left": counter.value}

    async def serve(self, journal: str = os.devnull) -> dict[str, Any]:
        """Begin to serve arrays, until the engine is closed; which calls have begun is noted in a file."""
        ready = asyncio.Event()
        self._start(self._serve(ready, journal))
        await ready.wait()
        return {}

    async def use(self, address: str, calls: int) -> dict[str, Any]:
        """Call the service of arrays of another engine, and tell what went which way."""
        return await arrays_service.use(self.engine, address, calls)

    async def hold(self, seconds: float) -> dict[str, Any]:
        """Hold up the loop."""
        time.sleep(seconds)
        return {}

    async def last(self, address: str) -> dict[str, Any]:
        """Connect, and write nothing again and again until that fails; tell what both ended with."""
        try:
            peer = await self.engine.connect(address)
            while True:
                await self.engine.write_imm(None, peer, 7)
        except aiote.AioteError as error:
            return {"said": str(error)}

    async def check(self, descriptor: str) -> dict[str, Any]:
        """Write to a remote region, read it back, and send its owner a message."""
        remote = self.engine.attach(bytes.fromhex(descriptor))
        pattern, back = self.engine.register(b"c" * remote.nbytes), bytearray(remote.nbytes)
        await self.engine.write(pattern, remote)
        await self.engine.read(remote, self.engine.register(back))
        await self.engine.send(remote.owner, b"checked")
        return {"same": back == b"c" * remote.nbytes}

    async def close(self) -> dict[str, Any]:
        """Close the engine."""
        await self.engine.aclose()
        return {}

    async def serving(self) -> dict[str, Any]:
        """Tell what calls hold here."""
        return arrays_service.held(self.engine)

    async def source(self, rank: int) -> dict[str, Any]:
        """Begin to be a source of weights."""
        self.ranks = weight_ranks.Ranks(self.engine)
        ready = asyncio.Event()
        self._start(self.ranks.source(rank, ready))
        await ready.wait()
        return {}

    async def train(self, version: int) -> dict[str, Any]:
        """Bring a source's weights to a version."""
        self.ranks.train(version)
        return {}

    async def target(self, rank: int, versions: str) -> dict[str, Any]:
        """Begin to be a target of weights."""
        self.ranks = weight_ranks.Ranks(self.engine)
        ready = asyncio.Event()
        self._start(self.ranks.serve(rank, versions, ready))
        await ready.wait()
        return {}

    async def look(self) -> dict[str, Any]:
        """Tell what a target has."""
        return self.ranks.look()

    async def update(self, sources: list[str], targets: list[str], version: int) -> dict[str, Any]:
        """Bring a version of weights from sources to targets, as their controller."""
        return await weight_ranks.Ranks(self.engine).update(sources, targets, version)

    async def _serve(self, ready: asyncio.Event, journal: str) -> None:
        noted = arrays_service.Noted(journal)
        async with service.serve(self.engine, arrays_service.Served(self.engine), noted):
            ready.set()
            await asyncio.Event().wait()

    async def _flood(self, descriptor: bytes, imm: int) -> None:
        remote = self.engine.attach(descriptor)
        source = self.engine.register(bytes(remote.nbytes))
        try:
            # A write to a lost peer would connect anew.
            peer = await self.engine.connect(remote.owner)
            while not peer.lost:
                await self.engine.write_imm(source, remote, imm)
        except aiote.AioteError:
            return

    async def _take(self) -> None:
        async for _ in self.engine.messages():
            pass

    async def _hammer(self, descriptor: bytes, value: int) -> None:
        remote = self.engine.attach(descriptor)
        source = self.engine.register(bytes([value]) * remote.nbytes)
        try:
            while True:
                await self.engine.write(source, remote)
        except aiote.AioteError as error:
            self.failed.append(f"{type(error).__name__}: {error}")

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


async def main(commands: Commands) -> None:
    """Answer until the input ends."""
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    print("{}", flush=True)
    while line := await lines.readline():
        command = json.loads(line)
        try:
            answer = await getattr(commands, command.pop("do"))(**command)
        except aiote.AioteError as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)
    if commands.engine is not None:
        commands.engine.abort()


if __name__ == "__main__":
    asyncio.run(main(Commands()))
