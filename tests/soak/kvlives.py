"""What the processes of a KV cache's soak are: a registry, prefillers whose jobs go wrong, decoders with few pages.

A request's bytes follow from its tokens, drawn anew for each, so a page that another request wrote is seen: layer by
layer as it comes, when all is there, and after it was held for a while. The decoders' engines are closed under them,
like all others.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import numpy as np

import aiote
from aiote.discovery import EmbeddedRegistry, Member, RegistryError, RegistryServer
from aiote.kvcache import (
    CacheLayout,
    Choice,
    Decoder,
    Job,
    JobEnded,
    NoMember,
    PagesExhausted,
    Prefiller,
    PrefillError,
    Router,
    Slot,
)
from findings import Findings, leaves
from kvcaches import DecodeRank, PrefillRank, pool_of, tail_of
from life import kind_of
from tasks import Task
from watchdog import Watchdog

LAYOUT = CacheLayout(layers=4, kv_heads=2, head_size=64, page_tokens=8, dtype="uint8")
DECODE_PAGES, PREFILL_PAGES, TAIL = 40, 400, 64
CLIENTS = 8
LEASE_S = 2.0
LIMITS = {"stall_limit": 1.0, "confirm_limit": 0.3}
POISON = 7
QUIET_S = 1.0
SHORT_S, LONG_S = (0.002, 0.01, 0.05), 10.0
"""How long clients have patience: some very little; the others more than three tries take, but not the whole line."""


class KvLife:
    """An engine with a role, until it is closed under that or has finished."""

    def __init__(
        self, number: int, engine: aiote.Engine, seed: int, dog: Watchdog, tally: Counter[str], findings: Findings
    ) -> None:
        self.number, self.engine, self.dog, self.tally = number, engine, dog, tally
        self.tasks = dog.tasks
        self.rng = random.Random(f"{seed}/{number}/kvcache")
        self.registries: list[aiote.Address] = []
        self.registry: EmbeddedRegistry | None = None
        self.closing = False
        self.known, self.finishing, self.done = anyio.Event(), anyio.Event(), anyio.Event()
        self._findings = findings
        self._task = self.tasks.start(self._guarded(self._whole_life))
        self._task.add_done_callback(lambda _task: self.done.set())

    def violation(self, text: str) -> None:
        self._findings.violation(f"life {self.number}: {text}")

    def failed(self, error: BaseException) -> None:
        """Count an error that may happen."""
        self.tally[f"error {kind_of(error)}"] += 1

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run something that may end with an error of aiote's once the engine is being closed, and with no other."""
        try:
            await work()
        except* aiote.AioteError as group:
            for error in leaves(group):
                if not self.closing or isinstance(error, aiote.UsageError):
                    self.violation(f"an error that nobody expects: {error!r}")
                self.failed(error)
        except* Exception as group:
            for error in leaves(group):
                self._findings.unexpected(error, f"life {self.number}")

    async def _whole_life(self) -> None:
        await self.known.wait()
        await self.live()

    async def live(self) -> None:
        """Be what the role says until `finishing` is set; set `done`; stay until the engine is closed."""
        raise NotImplementedError

    @contextlib.asynccontextmanager
    async def member_of(self) -> Any:
        async with EmbeddedRegistry(self.engine, self.registries, lease_s=LEASE_S) as self.registry:
            yield self.registry

    # What the parent says.

    def meet(self, registries: dict[int, str]) -> None:
        """Have these registries from now on."""
        self.registries = [aiote.Address.parse(address) for address in registries.values()] or self.registries
        if self.registries:
            self.known.set()
            if self.registry is not None and not self._task.done():
                self.registry.redirect(self.registries)

    def stall(self, seconds: float) -> None:
        """For prefillers: let all jobs stand still."""

    def cancel_some(self) -> int:
        """For decoders: cancel about half of the requests."""
        return 0

    async def finish(self) -> None:
        """Start nothing new, and see through what there is."""
        self.finishing.set()
        self._wait_no_more()
        await self.dog.over("finish", self.done.wait())

    def _wait_no_more(self) -> None:
        """End a life that knows no registry, for none has come up since it began."""
        if not self.known.is_set():
            self._task.cancel()

    async def close(self, how: str) -> None:
        """Close the engine under all that is going on; it all ends with that."""
        self.closing = True
        self._wait_no_more()
        if how == "aclose":
            await self.dog.over("close the engine", self.engine.aclose())
        else:
            self.engine.abort()
        self.finishing.set()
        await self.dog.over("the end of its work after the close", self.tasks.wait({self._task}))


class RegistryLife(KvLife):
    """The server of the registry."""

    async def live(self) -> None:
        async with RegistryServer(self.engine):
            await self.finishing.wait()
            self.done.set()


class Model(PrefillRank):
    """A prefiller's model, which may stand still."""

    moving_at = 0.0

    async def rest(self, pause: float) -> None:
        await super().rest(max(pause, self.moving_at - anyio.current_time()))


class PrefillLife(KvLife):
    """A prefiller."""

    model: Model | None = None

    def stall(self, seconds: float) -> None:
        if self.model is not None:
            self.model.moving_at = anyio.current_time() + seconds

    async def live(self) -> None:
        memory = pool_of(LAYOUT, PREFILL_PAGES, 1)
        async with self.member_of() as registry, Prefiller(self.engine, LAYOUT, memory) as prefiller:
            self.model = Model(self.engine, memory, prefiller, 0, 1, list(range(PREFILL_PAGES)), TAIL)
            async with self.tasks.group() as group:
                sitting = group.create_task(self._sit(registry))
                serving = group.create_task(self._serve(prefiller, self.model))
                await self.finishing.wait()
                await prefiller.drain()
                sitting.cancel()
                await self.tasks.wait({serving})
            self.done.set()

    async def _sit(self, registry: EmbeddedRegistry) -> None:
        """Be a member; whoever takes the name away, for the registry was out of touch, does not keep it."""
        member = Member(f"prefill-{self.number}", "prefill", bytes(self.engine.address), self.number, {})
        while not self.finishing.is_set():
            try:
                async with registry.join(member) as registration:
                    self.tally["members that joined"] += 1
                    await self.finishing.wait()
                    with anyio.move_on_after(1.0):
                        await registration.update({"draining": True})
            except RegistryError as error:
                self.failed(error)
                await anyio.sleep(0.1)

    async def _serve(self, prefiller: Prefiller, model: Model) -> None:
        async with self.tasks.group() as group:
            async for job in prefiller.jobs():
                group.create_task(self._compute(model, job))

    async def _compute(self, model: Model, job: Job) -> None:
        kind = self.rng.choice("c" * 20 + "srdx")
        if kind == "r":
            job.refuse("it does not feel like it")
        elif kind != "d":  # that one nobody enters
            limit = self.rng.choice([0.003, 0.03]) if kind == "s" else None
            try:
                async with self.tasks.timeout(limit):
                    await model.compute(job, self.rng.choice([8, 24, 400]), self.rng.choice([0, 0.001, 0.01]))
                    if kind == "x":
                        raise ZeroDivisionError
            except (ZeroDivisionError, TimeoutError):
                self.tally["jobs that went wrong"] += 1
            except JobEnded as error:
                self.failed(error)
            else:
                self.tally["jobs done or cancelled"] += 1


class DecodeLife(KvLife):
    """A decoder and those who want something of it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._asking: set[Task] = set()
        self._router = Router(LAYOUT.page_tokens, alternatives=2, pause=0.3)

    def cancel_some(self) -> int:
        chosen = [task for task in self._asking if self.rng.random() < 0.5]
        for task in chosen:
            task.cancel()
        return len(chosen)

    async def live(self) -> None:
        memory = pool_of(LAYOUT, DECODE_PAGES, 1)
        slots = self.rng.choice([4, 64])
        decoder = Decoder(self.engine, LAYOUT, memory, tail_bytes=TAIL, slots=slots, **LIMITS)
        async with self.member_of() as registry, decoder:
            rank = DecodeRank(self.engine, memory, decoder)
            async with self.tasks.group() as group:
                seeing = group.create_task(self._see(registry))
                clients = [group.create_task(self._client(rank)) for _ in range(CLIENTS)]
                await self.tasks.wait(clients)
                seeing.cancel()
            if not self.closing:
                await self._nothing_is_left(rank)
            self.done.set()

    async def _see(self, registry: EmbeddedRegistry) -> None:
        async for _event in registry.watch():
            self._router.see(registry.members())

    async def _client(self, rank: DecodeRank) -> None:
        """Ask for one thing after another; what is cancelled from outside is one request, not the client."""
        while not self.finishing.is_set():
            task = self.tasks.start(self._guarded(partial(self._ask, rank)))
            self._asking.add(task)
            await self.tasks.wait({task})
            self._asking.discard(task)
            if task.cancelled():
                self.tally["requests cancelled from outside"] += 1
            await anyio.sleep(self.rng.choice([0, 0.001, 0.05]))

    async def _ask(self, rank: DecodeRank) -> None:
        tokens = [self.rng.randrange(1 << 20) for _ in range(self.rng.randint(1, 90))]
        now = anyio.current_time
        try:
            choice = self._router.choose(tokens, now())
        except NoMember:
            self.tally["moments without a prefiller"] += 1
            await anyio.sleep(0.05)
            return
        patience = self.rng.choice([*SHORT_S, LONG_S, LONG_S, LONG_S, LONG_S])
        try:
            async with self.tasks.timeout(patience):
                await self.dog.over("a request", self._request(rank, tokens, choice))
        except TimeoutError:
            self.tally[f"requests cancelled by a {'long' if patience == LONG_S else 'short'} deadline"] += 1
        except (PrefillError, PagesExhausted) as error:
            self.tally["requests that failed"] += 1
            self.failed(error)
            self._router.delivered(choice, None, now())
        finally:
            self._router.cancelled(choice)

    async def _request(self, rank: DecodeRank, tokens: list[int], choice: Choice) -> None:
        first, *others = [[aiote.Address.from_bytes(member.address)] for member in choice.members]
        left = self.dog.lived
        try:
            async with rank.decoder.request(tokens, first, alternatives=others) as slot:
                rank.memory[:, slot.pages] = 0
                try:
                    await self._use(rank, slot)
                finally:
                    left = self.dog.lived
                by = choice.members[slot.round - 1]
                self._router.delivered(choice, by, anyio.current_time())
                self.tally["requests that arrived"] += 1
                self.tally["pages checked"] += len(slot.pages) * LAYOUT.layers
        finally:
            limits = self.engine.config
            most = LIMITS["confirm_limit"] + limits.drain_timeout + 2 * limits.heartbeat_timeout
            # Beside the limits: a busy machine, and the time for which the watchdog does not see that it was stopped.
            if self.dog.lived - left > most + 5:
                self.violation(f"the pages came back {self.dog.lived - left:.1f} s after they were left")

    async def _use(self, rank: DecodeRank, slot: Slot) -> None:
        following = 0
        async for layer in slot.layers():
            self._expect(layer in (following, 0), f"layer {layer} came instead of {following}")
            self._check(rank, slot, range(layer + 1))
            following = layer + 1
        own = len(slot.pages)
        await slot.extend(self.rng.randint(0, 16))
        added, mark = list(slot.pages[own:]), self.rng.randrange(256)
        rank.memory[:, added] = mark
        await anyio.sleep(self.rng.choice([0, 0.001, 0.1]))
        self._check(rank, slot, range(LAYOUT.layers))
        self._expect(slot.tail == tail_of(slot.tokens, TAIL), "the tail is another request's")
        self._expect(bool(np.all(rank.memory[:, added] == mark)), "what nobody was lent was written to")

    def _check(self, rank: DecodeRank, slot: Slot, layers: range) -> None:
        try:
            rank.check(slot, layers=layers)
        except AssertionError as error:
            self.violation(f"a page has another request's bytes: {error}")

    def _expect(self, holds: bool, text: str) -> None:
        if not holds:
            self.violation(text)

    async def _nothing_is_left(self, rank: DecodeRank) -> None:
        decoder = rank.decoder
        state = decoder.requests, decoder.waiting, decoder.free_pages
        self._expect(state == (0, 0, DECODE_PAGES), f"requests, waiting, free pages at the end: {state}")
        rank.memory[:] = POISON
        await anyio.sleep(QUIET_S)
        self._expect(bool(np.all(rank.memory == POISON)), "a write landed after all requests were over")
