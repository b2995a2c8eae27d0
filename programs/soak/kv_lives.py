"""What the processes of a KV cache's soak are: a registry, prefillers whose offers go wrong, decoders with few pages.

A request's bytes follow from its name, which is new for each, so a page that another request wrote is seen: layer by
layer as it comes, when all is there, and after it was held for a while. Free pages hold a pattern, which is looked for
when they are taken. The decoders' engines are closed under them, like all others. A decoder tells the prefiller of a
request by a call, as a proxy would.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import numpy as np

import aiote
from aiote import service
from aiote.discovery import EmbeddedRegistry, Member, RegistryError, RegistryServer
from aiote.kvcache import (
    Cache,
    Choice,
    Consumer,
    NoMember,
    Offer,
    PagePool,
    PageRow,
    Producer,
    Reception,
    Router,
    TransferRefused,
)
from findings import Findings, leaves
from life import kind_of
from tasks import Task
from watchdog import Watchdog

LAYERS, HEADS, SIZE = 4, 2, 64
PAGE_TOKENS = 8
DECODE_PAGES, PREFILL_PAGES = 40, 400
CLIENTS = 8
LEASE_S = 2.0
MATCH_S, CONFIRM_S = 1.0, 0.3
PATTERN = 7
QUIET_S = 1.0
SHORT_S, LONG_S = (0.002, 0.01, 0.05), 10.0
"""How long clients have patience: some very little; the others more than three tries take, but not the whole line."""
MISSED = (TransferRefused, service.CallError, aiote.PeerError, aiote.QueueFull)
"""What a request may end with while others are killed, stopped and closed."""


class Pages:
    """A cache, [layers, pages, ...], of pages that are HND, or NHD and of half the tokens."""

    def __init__(self, pages: int, hnd: bool) -> None:
        self.hnd, self.tokens = hnd, PAGE_TOKENS if hnd else PAGE_TOKENS // 2
        inner = (HEADS, self.tokens) if hnd else (self.tokens, HEADS)
        self.memory = np.full((LAYERS, pages, 2, *inner, SIZE), PATTERN, np.uint8)
        self.cache = Cache("prefill" if hnd else "decode")
        axes = "head token" if hnd else "token head"
        self.cache.add(self.memory, f"layer page field {axes} item", fields=["k", "v"])

    def request(self, name: str, tokens: int) -> np.ndarray:
        """Return the bytes of a request [layers, 2, heads, tokens, size]."""
        drawn = np.random.default_rng(zlib.crc32(name.encode()))
        return drawn.integers(0, 256, (LAYERS, 2, HEADS, tokens, SIZE), np.uint8)

    def fill(self, pages: list[int], name: str, tokens: int) -> None:
        """Compute a request."""
        found = self.request(name, tokens)
        padded = np.zeros((LAYERS, 2, HEADS, len(pages) * self.tokens, SIZE), np.uint8)
        padded[:, :, :, :tokens] = found
        split = padded.reshape(LAYERS, 2, HEADS, len(pages), self.tokens, SIZE)
        self.memory[:, pages] = split.transpose((0, 3, 1, 2, 4, 5) if self.hnd else (0, 3, 1, 4, 2, 5))

    def holds(self, pages: list[int], name: str, tokens: int, layers: int) -> bool:
        """Tell whether the first layers of a request are there."""
        split = self.memory[:layers, pages].transpose((0, 2, 3, 1, 4, 5) if self.hnd else (0, 2, 4, 1, 3, 5))
        flat = split.reshape(layers, 2, HEADS, len(pages) * self.tokens, SIZE)
        return np.array_equal(flat[:, :, :, :tokens], self.request(name, tokens)[:layers])


class Prompts(service.Service):
    """What decoders tell a prefiller."""

    name = "soak.Prompts"

    def __init__(self, compute: Callable[[str, int], None]) -> None:
        self._compute = compute

    @service.method
    async def compute(self, name: str, tokens: int) -> None:
        """Have a request computed."""
        self._compute(name, tokens)


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
        """For prefillers: let all computations stand still."""

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


class PrefillLife(KvLife):
    """A prefiller, whose model may stand still."""

    moving_at = 0.0

    def stall(self, seconds: float) -> None:
        self.moving_at = anyio.current_time() + seconds

    async def live(self) -> None:
        self._computing: set[Task] = set()
        self._pages, self._pool = Pages(PREFILL_PAGES, True), PagePool(PREFILL_PAGES, PREFILL_PAGES, 64)
        async with (
            self.member_of() as registry,
            Producer(self.engine, self._pages.cache, match_timeout=MATCH_S) as self._producer,
            self.tasks.group() as self._group,
            service.serve(self.engine, Prompts(self._take)),
        ):
            sitting = self._group.create_task(self._sit(registry))
            await self.finishing.wait()
            while self._computing:
                ended = set(self._computing)
                await self.tasks.wait(ended)
                self._computing -= ended
            sitting.cancel()
            self._expect_idle()
            self.done.set()

    def _expect_idle(self) -> None:
        if not self.closing and (self._producer.offers, self._pool.held) != (0, 0):
            self.violation(f"offers, requests with pages at the end: {self._producer.offers}, {self._pool.held}")

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

    def _take(self, name: str, tokens: int) -> None:
        """Compute a request, or refuse it, or never say anything of it."""
        kind = self.rng.choice("c" * 20 + "srdx")
        if kind == "r" or self.finishing.is_set():
            self._producer.refuse(name, "it does not feel like it")
        elif kind != "d":
            task = self.tasks.start(self._guarded(partial(self._compute, name, tokens, kind)))
            self._computing.add(task)
            task.add_done_callback(self._computing.discard)

    async def _compute(self, name: str, tokens: int, kind: str) -> None:
        try:
            async with (
                self.tasks.timeout(self.rng.choice([0.003, 0.03]) if kind == "s" else None),
                self._pool.lend(-(-tokens // PAGE_TOKENS)) as lent,
            ):
                async with self._producer.offer(name, tokens=tokens, rows={0: PageRow(lent.pages)}) as offer:
                    self._pages.fill(lent.pages, name, tokens)
                    await self._report(offer, self.rng.choice([8, 24, 400]), self.rng.choice([0, 0.001, 0.01]))
                    if kind == "x":
                        raise ZeroDivisionError
        except (ZeroDivisionError, TimeoutError):
            self.tally["offers that went wrong"] += 1
        except aiote.QueueFull as error:
            self._producer.refuse(name, str(error))
            self.failed(error)
        else:
            self.tally[f"offers that ended: {'moved' if offer.outcome == 'moved' else 'not moved'}"] += 1

    async def _report(self, offer: Offer, chunk: int, pause: float) -> None:
        for end in [*range(chunk, offer.tokens, chunk), offer.tokens]:
            for layer in range(LAYERS):
                await anyio.sleep(max(pause, self.moving_at - anyio.current_time()))
                offer.computed(layer, end)


class DecodeLife(KvLife):
    """A decoder and those who want something of it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._asking: set[Task] = set()
        self._router = Router(PAGE_TOKENS, alternatives=2, pause=0.3)
        self._numbers = itertools.count()

    def cancel_some(self) -> int:
        chosen = [task for task in self._asking if self.rng.random() < 0.5]
        for task in chosen:
            task.cancel()
        return len(chosen)

    async def live(self) -> None:
        self._pages = Pages(DECODE_PAGES, self.rng.random() < 0.5)
        self._pool = PagePool(DECODE_PAGES, self.rng.choice([4, 64]), 64)
        limits = {"confirm_timeout": CONFIRM_S, "quarantine_pages": self.rng.choice([8, 1000])}
        consumer = Consumer(self.engine, self._pages.cache, **limits)
        async with self.member_of() as registry, consumer as self._consumer:
            async with self.tasks.group() as group:
                seeing = group.create_task(self._see(registry))
                clients = [group.create_task(self._client()) for _ in range(CLIENTS)]
                await self.tasks.wait(clients)
                seeing.cancel()
            if not self.closing:
                await self._nothing_is_left()
            self.done.set()

    async def _see(self, registry: EmbeddedRegistry) -> None:
        async for _event in registry.watch():
            self._router.see(registry.members())

    async def _client(self) -> None:
        """Ask for one thing after another; what is cancelled from outside is one request, not the client."""
        while not self.finishing.is_set():
            task = self.tasks.start(self._guarded(self._ask))
            self._asking.add(task)
            await self.tasks.wait({task})
            self._asking.discard(task)
            if task.cancelled():
                self.tally["requests cancelled from outside"] += 1
            await anyio.sleep(self.rng.choice([0, 0.001, 0.05]))

    async def _ask(self) -> None:
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
                await self.dog.over("a request", self._request(len(tokens), choice))
        except TimeoutError:
            self.tally[f"requests cancelled by a {'long' if patience == LONG_S else 'short'} deadline"] += 1
        except MISSED as error:
            self.tally["requests that failed"] += 1
            self.failed(error)
            self._router.delivered(choice, None, now())
        finally:
            self._router.cancelled(choice)

    async def _request(self, tokens: int, choice: Choice) -> None:
        """Try the members of a choice, one after the other, in the same pages."""
        async with self._pool.lend(-(-tokens // self._pages.tokens)) as lent:
            for number, member in enumerate(choice.members, 1):
                name = f"{self.number}.{next(self._numbers)}"
                self._expect(self._patterned(lent.pages), "a page that was free was written to")
                try:
                    await self._receive(name, tokens, lent.pages, aiote.Address.from_bytes(member.address))
                except MISSED:
                    if number == len(choice.members):
                        raise
                    self.tally["tries that failed"] += 1
                else:
                    self._router.delivered(choice, member, anyio.current_time())
                    self.tally["requests that arrived"] += 1
                    self.tally["pages checked"] += len(lent.pages) * LAYERS
                    return

    async def _receive(self, name: str, tokens: int, pages: list[int], address: aiote.Address) -> None:
        left = self.dog.lived
        reads, rows = self.rng.random() < 0.3, {0: PageRow(pages)}
        peer = await self.engine.connect(address)
        try:
            async with self._consumer.receive([peer], name, tokens=tokens, rows=rows, reads=reads) as reception:
                try:
                    await service.client(self.engine, peer, Prompts).compute(name, tokens)
                    await self._use(reception, name, pages)
                finally:
                    left = self.dog.lived
        finally:
            self._pages.memory[:, pages] = PATTERN
            limits = self.engine.config
            most = CONFIRM_S + limits.drain_timeout + 2 * limits.heartbeat_timeout
            # Beside the limits: a busy machine, and the time for which the watchdog does not see that it was stopped.
            if self.dog.lived - left > most + 5:
                self.violation(f"the pages came back {self.dog.lived - left:.1f} s after they were left")

    async def _use(self, reception: Reception, name: str, pages: list[int]) -> None:
        for layer in range(LAYERS):
            await reception.arrived(layer + 1)
            self._check(pages, name, reception.tokens, layer + 1)
        await anyio.sleep(self.rng.choice([0, 0.001, 0.1]))
        self._check(pages, name, reception.tokens, LAYERS)

    def _check(self, pages: list[int], name: str, tokens: int, layers: int) -> None:
        self._expect(self._pages.holds(pages, name, tokens, layers), "a page has another request's bytes")

    def _patterned(self, pages: list[int]) -> bool:
        return bool(np.all(self._pages.memory[:, pages] == PATTERN))

    def _expect(self, holds: bool, text: str) -> None:
        if not holds:
            self.violation(text)

    async def _nothing_is_left(self) -> None:
        state = len(self._consumer.immediates), self._pool.held, self._pool.waiting, self._pool.free
        self._expect(state == (0, 0, 0, DECODE_PAGES), f"immediates, requests, waiting, free pages at the end: {state}")
        await anyio.sleep(QUIET_S)
        self._expect(self._patterned(list(range(DECODE_PAGES))), "a write landed after all requests were over")
