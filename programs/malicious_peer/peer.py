"""A hostile peer: it has the key, and says what no engine would, in every order, over every connection there is."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Awaitable, Callable
from typing import Protocol

import anyio

from aiote import AioteError
from aiote.core.address import Address
from aiote.core.control import Authenticated
from aiote.core.control_frames import Channel, EngineOffer, Failed, Heartbeat, Mapped, Ready, encode, frame
from aiote.core.descriptor import RegionDescriptor
from drawn_values import DrawnValues
from raw_connections import ENDS, RingEnd, SocketEnd
from support.engines.raw_clients import Insider, offer
from support.rails.raw_ring import DATA, HEADER, READ, RING_BYTES, SEND, WRITE, Frame
from victim import KEY

STAGES = ("raw", "greeted", "authenticated", "offered", "joining", "joined", "joined", "joined")
BEFORE_DATA = STAGES[: STAGES.index("joining")]
STEPS = 24


class Gone(Exception):
    """The engine has hung up."""


class Target(Protocol):
    """Who is attacked, and what of its memory was granted."""

    granted: RegionDescriptor

    @property
    def address(self) -> Address: ...

    def known(self) -> list[int]: ...


class HostilePeer:
    """One connection, from its beginning to whatever end it takes. `log` says what was done, for who repeats it;
    `let_in`, whether the engine took its key.

    Over a provider that is not in `ENDS` it comes as far as to its offer.

    A `sober` one does nothing that a peer has a right to: it counts no immediate and sends no message, for the engine's
    own peers may have use for that number, or expect no strange message.
    """

    def __init__(
        self, rng: random.Random, provider: str, victim: Target, *, key: bytes | None = KEY, sober: bool = False
    ) -> None:
        self.rng = rng
        self.any = DrawnValues(rng)
        self.any.known = victim.known()
        self.victim = victim
        self.log: list[str] = []
        self.let_in = False
        self._provider = provider
        self._sober = sober
        self._insider = Insider(rng.randbytes(16), key)
        self._end: SocketEnd | RingEnd | None = None
        self._channel: Channel | None = None

    async def attack(self) -> None:
        """Come as far as a stage that is drawn, then do anything; a hang-up ends it."""
        stage = self.rng.choice(STAGES if self._provider in ENDS else BEFORE_DATA)
        self.log.append(stage)
        try:
            await self._come(stage)
            for _ in range(self.rng.randint(1, STEPS)):
                await self._step(stage)
            await self._leave(stage)
        except (Gone, AioteError, OSError, AssertionError):
            self.log.append("it hung up")

    def close(self) -> None:
        """Hang up, on every connection. Idempotent."""
        self._insider.socket.close()
        end, self._end = self._end, None
        if end is not None:
            end.close()

    async def _come(self, stage: str) -> None:
        insider, address = self._insider, self.victim.address
        await insider.dial(address)
        if stage == "raw":
            return
        if stage == "greeted":
            await insider.say(insider.protocol.data_to_send())
            return
        await self._next(Authenticated)
        self.let_in = True
        if stage == "authenticated":
            return
        seen = await self._next(EngineOffer)
        await insider.tell(dataclasses.replace(offer(), rails=seen.rails, heartbeat_ms=200))
        self._channel = await self._next(Channel)
        self.any.known += [self._channel.imm_key, self._channel.imm_base]
        if stage == "offered":
            return
        self._end = ENDS[self._provider](insider.socket.getsockname()[0])
        await insider.tell(Channel(0, 0, 0, self._end.address, self.any.number(), self.any.number(), self._end.wakeup))
        await self._end.join(self._channel)
        if stage == "joining":
            return
        await insider.tell(Mapped())
        await self._next(Mapped)
        await insider.tell(Ready())
        await self._next(Ready)

    async def _next(self, kind: type) -> object:
        with anyio.move_on_after(10) as scope:
            return await self._insider.next(kind)
        assert scope.cancelled_caught
        raise Gone

    async def _step(self, stage: str) -> None:
        steps: list[Callable[[], Awaitable[None]]] = [self._wait]
        if stage in ("raw", "greeted"):
            steps += [self._raw]
        else:
            steps += [self._message, self._message, self._malformed, self._raw, self._heartbeat]
        if stage in ("joining", "joined"):
            steps += [self._frame] * 6 + [self._hear]
            steps += [] if self._sober else [self._damaged_frame, self._damaged_frame, self._bytes, self._flood]
            if isinstance(self._end, RingEnd):
                steps += [self._lie, self._scribble, self._wake]
        step = self.rng.choice(steps)
        # What ends the connection at once comes rarely, or nothing else would.
        if step in (self._raw, self._malformed, self._bytes, self._lie) and self.rng.random() < 0.7:
            return
        self.log.append(step.__name__.strip("_"))
        await step()

    # Over the control connection.

    async def _wait(self) -> None:
        await anyio.sleep(self.rng.choice((0, 0, 0.001, 0.02)))

    async def _raw(self) -> None:
        await self._insider.say(self.rng.choice((self.any.bytes(4096), frame(encode(Heartbeat())), b"\xff" * 8)))

    async def _heartbeat(self) -> None:
        await self._insider.tell(Heartbeat())

    async def _message(self) -> None:
        """Say any message with any fields, whether or not it is its turn."""
        await self._sealed(encode(self.any.session_message()))

    async def _malformed(self) -> None:
        await self._sealed(self.any.damaged(encode(self.any.session_message())))

    async def _sealed(self, body: bytes) -> None:
        seal = self._insider.protocol._seal_out
        if seal is not None:
            await self._insider.say(frame(body, seal))

    # Over the data connection.

    def _drawn(self) -> Frame:
        rng, granted = self.rng, self.victim.granted
        kind = rng.choice((0, WRITE, WRITE, WRITE, READ, READ, 4, 5, 6, 7, 65535, READ if self._sober else SEND))
        key = rng.choice((granted.keys[0].key,) * 4 + (self.any.number(),))
        base = granted.keys[0].base
        places = []
        for _ in range(rng.randint(0, 4)):
            size = rng.choice((0, 1, 100, 4096, granted.length, self.any.number()))
            at = rng.choice((base, base + granted.length - size, base + granted.length, base - 1, self.any.number()))
            places.append((at % 2**64, size % 2**64))
        total = sum(size for _, size in places)
        data = rng.randbytes(total if total < 1 << 17 else 100) if kind in (WRITE, SEND, 4) else b""
        return Frame(
            kind=kind,
            places=places,
            key=key,
            imm=self.any.number(2**32 - 1),
            times=0 if self._sober else rng.choice((0, 1, 1, self.any.number(2**32 - 1))),
            status=rng.choice((0, 0, -13, 2**31 - 1, -(2**31))),
            done=rng.choice((0, 1, self.any.number())),
            length=rng.choice((None, None, None, self.any.number())),
            count=rng.choice((None, None, None, self.any.number(2**16 - 1))),
            data=data,
        )

    def _encoded(self) -> bytes:
        drawn = self._drawn()
        if drawn.length is None and sum(size for _, size in drawn.places) >= 2**64:
            drawn = dataclasses.replace(drawn, length=2**64 - 1)
        return drawn.encode()

    async def _frame(self) -> None:
        """Say frames, of which most are of a form that is taken."""
        assert self._end is not None
        for _ in range(self.rng.choice((1, 1, 3, 30))):
            self._end.say(self._encoded())

    async def _damaged_frame(self) -> None:
        assert self._end is not None
        data = self._encoded()
        self._end.say(self.any.damaged(data[: HEADER.size]) + data[HEADER.size :])

    async def _bytes(self) -> None:
        assert self._end is not None
        self._end.say(self.any.bytes(1 << 16))

    async def _flood(self) -> None:
        """Ask for what was granted again and again, or be refused as often, and read none of it."""
        assert self._end is not None
        granted = self.victim.granted
        place = [(granted.keys[0].base, granted.length)]
        key = self.rng.choice((granted.keys[0].key, 1))
        kind = self.rng.choice((READ, SEND))
        self._end.say(Frame(kind, place if kind == READ else (), key).encode() * self.rng.choice((10, 1000)))

    async def _hear(self) -> None:
        assert self._end is not None
        self._end.hear()

    async def _lie(self) -> None:
        """Write into the heads of the rings, or anywhere."""
        assert isinstance(self._end, RingEnd)
        place = self.rng.choice((64, 128, 0, 8, 16, 72, self.rng.randrange(DATA + RING_BYTES - 8)))
        self._end.lie(place << 1 | self.rng.randrange(2), self.any.number())

    async def _scribble(self) -> None:
        """Make our own page say anything: that we sleep, wait, are within a call, have shut our gate."""
        assert isinstance(self._end, RingEnd)
        at = self.rng.choice((0, 64, 64 + 4000, 64 + 8000, 4 * self.rng.randrange(3000)))
        self._end.scribble(at, self.any.number(2**32 - 1))

    async def _wake(self) -> None:
        assert isinstance(self._end, RingEnd)
        self._end.wake(self.rng.choice((1, 100)))

    async def _leave(self, stage: str) -> None:
        """Go: with a word, without, or not at all, so that it has to be found out."""
        way = self.rng.choice(("bye", "failed", "silently", "stays"))
        self.log.append(way)
        if stage != "raw" and way == "failed":
            await self._sealed(encode(Failed(self.any.number(2**16 - 1), "no")))
        elif stage != "raw" and way == "bye":
            await self._message()
        elif way == "stays":
            await anyio.sleep(0.05)
        if way != "stays":
            self.close()
