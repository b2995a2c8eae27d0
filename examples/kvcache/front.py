"""Who is there, and how requests get to them: what the router does behind its API.

A request whose prefill or decode server fails goes to others, also in the middle of an answer: they are given the
prompt and what was generated already, and go on from there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import anyio
import httpx
import msgspec
from msgspec import Meta

import aiote
import serving
import web
from aiote.demo import tokens as vocabulary
from aiote.discovery import Member, RegistryServer
from aiote.kvcache import NoMember, Router
from metrics import Latencies
from sampling import Sampling, Token
from web import Refused

TRIES = 6  # at least, before a request is given up that gets no further
PATIENCE_S = 15.0  # and how long it waits at least for a member that could take it
FIRST_TOKENS = 512  # how many of them are remembered for the page

LINE_BYTES = 4 << 20  # of an answer's line: a whole prompt with its log-probabilities is one
ANSWER_BYTES = 256 << 20
REFUSAL_BYTES = 64 << 10

Take = Callable[[Token], Awaitable[bool]]
"""Takes a token, and says whether that is enough."""
TakeOf = Callable[[int, Token], Awaitable[bool]]
"""The same of one answer of several."""
EchoOf = Callable[[int, list[Token]], None]
"""Takes the tokens of an answer's prompt with their log-probabilities, before its first token."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer that is wanted: to a prompt, in tokens, whose log-probabilities are wanted as well with `echo`."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    echo: bool = False


class Said(msgspec.Struct):
    """A line of a decode server's answer."""

    token: Token | None = None
    prompt: list[Token] | None = None
    round: Annotated[int, Meta(ge=1, lt=1 << 20)] | None = None
    finish: Annotated[str, Meta(max_length=64)] | None = None


class Reason(msgspec.Struct):
    """Why a decode server refuses."""

    message: Annotated[str, Meta(max_length=4096)]
    param: Annotated[str, Meta(max_length=256)] | None = None
    code: Annotated[str, Meta(max_length=256)] | None = None


class Refusal(msgspec.Struct):
    """A decode server's refusal, in OpenAI's form."""

    error: Reason


async def bounded(response: httpx.Response, most: int) -> bytes:
    """Return an answer as a whole. Raises ValueError for one of more bytes."""
    data = bytearray()
    async for part in response.aiter_raw():
        data += part
        if len(data) > most:
            raise ValueError(f"an answer of more than {most} bytes")
    return bytes(data)


async def lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield an answer's lines. Raises ValueError for one, or an answer, of more bytes than there may be."""
    data, total = bytearray(), 0
    async for part in response.aiter_raw():
        total += len(part)
        *whole, rest = part.split(b"\n")
        for piece in whole:
            yield bytes(data + piece)
            data.clear()
        data += rest
        if len(data) > LINE_BYTES or total > ANSWER_BYTES:
            raise ValueError(f"a line of more than {LINE_BYTES} bytes, or an answer of more than {ANSWER_BYTES}")
    if data:
        yield bytes(data)


@dataclass(slots=True)
class Progress:
    """What there is of an answer: its tokens so far, and its prompt's, with their log-probabilities, if wanted."""

    given: list[int]
    prompt: list[Token] | None = None


class Front:
    """The members, and the requests that are with them."""

    def __init__(
        self, registry: RegistryServer, client: httpx.AsyncClient, page_tokens: int, token: str, model: str = ""
    ) -> None:
        self.client = client
        self._token = token
        self.prefill = Router(page_tokens)
        # Decoders have no prefixes: load alone decides.
        self.decode = Router(page_tokens, role="decode", credit=0, prefixes=1)
        self.done = self.failed = self.left = self.retried = self.tokens = 0
        self.queue = 0  # how many wait for their first token
        self.first_tokens: deque[tuple[float, float]] = deque(maxlen=FIRST_TOKENS)  # when, and after how long
        self.latencies = Latencies()
        self.tries: set[Try] = set()
        self._model = model
        self._registry = registry
        self._proofs: dict[str, tuple[Member, bool]] = {}
        self._changed = anyio.Event()

    @property
    def members(self) -> dict[str, int]:
        """How many members of each role are there."""
        return {"prefill": len(self.prefill.loads), "decode": len(self.decode.loads)}

    async def follow(self) -> None:
        """Take note of who comes and goes."""
        async for event in self._registry.watch():
            # Tokens of one model are nonsense to another. Which it is here is configured, or the first server says it.
            if not self._model and self._is_proven(event.member):
                self._model = str(event.member.attributes["model"])
            alike = [member for member in self.proven() if member.attributes["model"] == self._model]
            self.prefill.see(alike)
            self.decode.see(alike)
            if event.kind == "left":
                self._proofs.pop(event.member.name, None)
                for one in self.tries:
                    one.left(event.member)
            self._changed.set()
            self._changed = anyio.Event()

    def proven(self) -> list[Member]:
        """Return the members that have shown that they have the token; nothing is sent to others."""
        return [member for member in self._registry.members() if self._is_proven(member)]

    def _is_proven(self, member: Member) -> bool:
        known = self._proofs.get(member.name)
        if known is None or known[0] is not member:
            # Once for each change of a member, and not for all members at each change of one.
            known = self._proofs[member.name] = member, serving.is_proven(self._token, member)
        return known[1]

    def authorization(self, member: Member) -> dict[str, str]:
        """Return the header by which a member knows this router: the secret of its URL, and not the token."""
        return {"authorization": f"Bearer {web.url_secret(self._token, str(member.attributes['url']))}"}

    async def complete(self, asked: Completion, take: Take, echo: Callable[[list[Token]], None]) -> str:
        """Have a request served, hand out its tokens, and return why there are no more. Raises Refused."""
        given: list[int] = []
        progress = Progress(given)
        begun = time.monotonic()

        def tell() -> None:
            if progress.prompt is not None:
                echo(progress.prompt)

        async def pass_on(token: Token) -> bool:
            if not given:
                tell()
                self._note_first(time.monotonic() - begun)
            given.append(token.id)
            self.tokens += 1
            return await take(token)

        self.queue += 1
        try:
            finish = await self._complete(asked, progress, pass_on)
            if not given:
                tell()
            self.latencies.request.observe(time.monotonic() - begun)
            return finish
        finally:
            self.queue -= not given

    def _note_first(self, seconds: float) -> None:
        self.queue -= 1
        self.first_tokens.append((time.monotonic(), seconds))
        self.latencies.first_token.observe(seconds)

    async def _complete(self, asked: Completion, progress: Progress, take: Take) -> str:
        given = progress.given
        reason, failures, since, before = "", 0, time.monotonic(), 0  # since the first failure without a token between
        while failures < TRIES or time.monotonic() - since < PATIENCE_S:
            if given and given[-1] == vocabulary.END:
                return "stop"
            echo = asked.echo and progress.prompt is None
            if len(given) == asked.max_tokens and not echo:
                return "length"
            rest = Completion((*asked.prompt, *given), asked.max_tokens - len(given), asked.sampling, echo)
            with await self._try(rest) as one:
                try:
                    return await one.run(take, progress)
                except Refused as error:
                    if not error.retry:
                        raise
                    reason = str(error)
            self.retried += 1
            if not failures or len(given) > before:
                failures, since, before = 0, time.monotonic(), len(given)
            # What has failed is perhaps about to be known, and replaced.
            await anyio.sleep(min(0.05 * failures, 0.5))
            failures += 1
        raise Refused(503, reason)

    async def _try(self, asked: Completion) -> Try:
        """Return a new try, as soon as there is anybody for it."""
        reason = ""
        with anyio.move_on_after(PATIENCE_S):
            while True:
                changed = self._changed
                try:
                    return Try(self, asked)
                except NoMember as error:
                    reason = str(error)
                await changed.wait()
        raise Refused(503, f"{reason}; no server was available within {PATIENCE_S:.0f} s")


class Try:
    """One try of a request at one decode server, with some prefillers; `with` ends what it is charged with."""

    def __init__(self, front: Front, asked: Completion) -> None:
        self._front = front
        self._asked = asked
        self._decode = front.decode.choose(asked.prompt, time.monotonic())
        try:
            self._prefill = front.prefill.choose(asked.prompt, time.monotonic())
        except NoMember:
            front.decode.cancelled(self._decode)
            raise
        self._server = self._decode.members[0]
        self._gone = anyio.CancelScope()

    def __enter__(self) -> Try:
        self._front.tries.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._front.tries.discard(self)
        self._front.prefill.cancelled(self._prefill)
        self._front.decode.cancelled(self._decode)

    def left(self, member: Member) -> None:
        """Give up where this member is the decode server: it was silent for a lease, however its socket looks."""
        if member.name == self._server.name and member.incarnation == self._server.incarnation:
            self._gone.cancel()

    async def run(self, take: Take, progress: Progress) -> str:
        """Hand out the tokens, and return why there are no more. Raises Refused."""
        reason = f"{self._server.name} has left"
        with self._gone:
            try:
                return await self._converse(take, progress)
            except (httpx.HTTPError, ValueError, KeyError) as error:
                reason = f"{self._server.name} was lost: {type(error).__name__}: {error}"
        self._front.decode.failed(self._decode, self._server, time.monotonic())
        raise Refused(503, reason, retry="decode")

    async def _converse(self, take: Take, progress: Progress) -> str:
        front, asked = self._front, self._asked
        body = {
            "tokens": asked.prompt,
            "max_tokens": asked.max_tokens,
            "prefillers": [str(aiote.Address.from_bytes(member.address)) for member in self._prefill.members],
            "sampling": msgspec.to_builtins(asked.sampling),
            "echo": asked.echo,
        }
        url = f"{self._server.attributes['url']}/generate"
        headers = front.authorization(self._server)
        async with front.client.stream("POST", url, json=body, headers=headers) as response:
            if response.status_code != 200:
                whole = await bounded(response, REFUSAL_BYTES)
                self._refused(response.status_code, msgspec.json.decode(whole, type=Refusal), response.headers)
            async for text in lines(response):
                said = msgspec.json.decode(text, type=Said)
                if said.token is not None:
                    if await take(said.token):
                        return "stop"
                elif said.prompt is not None:
                    progress.prompt = said.prompt
                elif said.round is not None:
                    by = self._prefill.members[said.round - 1 : said.round]
                    if not by:
                        raise ValueError(
                            f"it names prefill server {said.round}, and there are {len(self._prefill.members)}"
                        )
                    front.prefill.delivered(self._prefill, by[0], time.monotonic())
                elif said.finish is not None:
                    front.decode.delivered(self._decode, self._server, time.monotonic())
                    return said.finish
                else:
                    raise ValueError("a line of its answer is empty")
        raise httpx.RemoteProtocolError("the answer stopped before its end")

    def _refused(self, status: int, body: Refusal, headers: httpx.Headers) -> None:
        """Take note of whose fault it is, and raise Refused."""
        now, whose = time.monotonic(), headers.get(web.RETRY, "")
        if whose == "prefill":
            self._front.prefill.delivered(self._prefill, None, now)
        elif whose:
            self._front.decode.failed(self._decode, self._server, now)
        if not 400 <= status < 600:
            raise ValueError(f"it answered with status {status}")
        error = body.error
        raise Refused(status, error.message, param=error.param, code=error.code, retry=whose)


async def all_of(front: Front, wanted: Sequence[Completion], take: TakeOf, echo: EchoOf) -> list[str]:
    """Have several answers made at a time, and return why each has no more tokens. Raises Refused for the first that
    fails, and none goes on then.
    """
    finishes = [""] * len(wanted)
    refused: list[Refused] = []

    async def one(index: int) -> None:
        try:
            finishes[index] = await front.complete(wanted[index], partial(take, index), partial(echo, index))
        except Refused as error:
            refused.append(error)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for index in range(len(wanted)):
            group.start_soon(one, index)
    if refused:
        raise refused[0]
    return finishes
