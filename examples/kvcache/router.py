"""The router: takes completions in OpenAI's form, chooses who works on them, and shows the cluster.

    python examples/kvcache/router.py --port 8000

It keeps the registry of the members, which it prints as `registry` when it is ready, and the URL of its page with the
token, which it makes where `KVCACHE_TOKEN` is not set.

| path                    | what                                                                               |
|-------------------------|------------------------------------------------------------------------------------|
| POST /v1/completions    | `prompt` (a text, or tokens), `max_tokens`, `stream`; greedy, so `temperature` 0   |
| GET /v1/models          | the one model                                                                      |
| GET /, /events, /stats  | the page, its stream of numbers, the same numbers once                             |
| POST /scale             | {"prefill": n, "decode": m}, where it was started by something that scales          |

A request whose prefiller or decode server fails goes to others, also in the middle of a stream: what was generated
before comes out the same, so it is skipped.
"""

from __future__ import annotations

import argparse
import codecs
import json
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

import aiote
import serving
from aiote.demo import Orders, tell, tokens
from aiote.discovery import Member, RegistryServer
from aiote.kvcache import NoMember, Router
from serving import Answer, Calls, Emit, Refused
from watching import Watcher

MODEL = "aiote-demo"
PAGE = Path(__file__).with_name("page.html")
TRIES = 6
PATIENCE_S = 15.0  # how long a request waits for a member that could take it
MOST_CALLS = 1024
MOST_SERVERS = 16  # of a role
MOST_VIEWERS = 64

Take = Callable[[int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Completion:
    """What a client asks for."""

    prompt: tuple[int, ...]
    max_tokens: int
    stream: bool
    model: str
    id: str

    @classmethod
    def of(cls, body: dict[str, Any], context: int) -> Completion:
        """Read a body in OpenAI's form. Raises Refused for what is wrong, and for what is not offered."""
        prompt, most = body.get("prompt"), body.get("max_tokens", 16)
        if isinstance(prompt, str):
            prompt = tokens.encode(prompt.encode(errors="replace"))
        if not isinstance(prompt, list) or not prompt:
            raise Refused(400, "prompt: a text or a list of tokens expected; one prompt a request")
        if not all(type(token) is int and 0 <= token < tokens.VOCABULARY for token in prompt):
            raise Refused(400, f"prompt: tokens from 0 to {tokens.VOCABULARY - 1} expected")
        if type(most) is not int or most < 1 or len(prompt) + most > context:
            raise Refused(400, f"max_tokens: at least 1, and with the {len(prompt)} of the prompt at most {context}")
        if body.get("n", 1) != 1 or body.get("temperature") not in (None, 0, 0.0):
            raise Refused(400, "n must be 1 and temperature 0: generation is greedy")
        if not isinstance(body.get("stream", False), bool):
            raise Refused(400, "stream: true or false expected")
        model = str(body.get("model", MODEL))[:64]
        return cls(tuple(prompt), most, bool(body.get("stream")), model, f"cmpl-{secrets.token_hex(12)}")

    def chunk(self, text: str, token_ids: list[int], finish: str | None, **more: Any) -> dict[str, Any]:
        """Return an answer, or a part of one."""
        choice = {"index": 0, "text": text, "token_ids": token_ids, "logprobs": None, "finish_reason": finish}
        head = {"id": self.id, "object": "text_completion", "created": int(time.time()), "model": self.model}
        return {**head, "choices": [choice], **more}


class Front:
    """Who is there, and how requests get to them."""

    def __init__(self, registry: RegistryServer, client: httpx.AsyncClient, page_tokens: int) -> None:
        self.client = client
        self.prefill = Router(page_tokens)
        # Decoders have no prefixes: load alone decides.
        self.decode = Router(page_tokens, role="decode", credit=0, prefixes=1)
        self.done = self.failed = self.left = self.retried = self.tokens = 0
        self.tries: set[Try] = set()
        self._model = ""
        self._registry = registry
        self._changed = anyio.Event()

    async def follow(self) -> None:
        """Take note of who comes and goes."""
        async for event in self._registry.watch():
            # Tokens of one model are nonsense to another: the first that comes says which it is here.
            self._model = self._model or str(event.member.attributes.get("model", ""))
            alike = [member for member in self._registry.members() if member.attributes.get("model") == self._model]
            self.prefill.see(alike)
            self.decode.see(alike)
            if event.kind == "left":
                for one in self.tries:
                    one.left(event.member)
            self._changed.set()
            self._changed = anyio.Event()

    async def complete(self, asked: Completion, take: Take) -> str:
        """Have a request served, hand out its tokens, and return why there are no more. Raises Refused."""
        given, reason = 0, ""
        for number in range(TRIES):
            one = await self._try(asked)
            skip = given

            async def pass_on(token: int) -> None:
                nonlocal given, skip
                if skip:
                    skip -= 1
                    return
                given += 1
                self.tokens += 1
                await take(token)

            try:
                with one:
                    return await one.run(pass_on)
            except Refused as error:
                if not error.retry:
                    raise
                reason = str(error)
            self.retried += 1
            # What has failed is perhaps about to be known.
            await anyio.sleep(0.05 * number)
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
        raise Refused(503, f"{reason}; nobody came within {PATIENCE_S:.0f} s")


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

    async def run(self, take: Take) -> str:
        """Hand out the tokens, and return why there are no more. Raises Refused."""
        reason = f"{self._server.name} has left"
        with self._gone:
            try:
                return await self._converse(take)
            except (httpx.HTTPError, json.JSONDecodeError) as error:
                reason = f"{self._server.name} was lost: {type(error).__name__}: {error}"
        self._front.decode.failed(self._decode, self._server, time.monotonic())
        raise Refused(503, reason, retry=True)

    async def _converse(self, take: Take) -> str:
        front, asked = self._front, self._asked
        prefillers = [str(aiote.Address.from_bytes(member.address)) for member in self._prefill.members]
        body = {"tokens": asked.prompt, "max_tokens": asked.max_tokens, "prefillers": prefillers}
        url = f"{self._server.attributes['url']}/generate"
        async with front.client.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                self._refused(json.loads(await response.aread())["error"])
            async for text in response.aiter_lines():
                said = json.loads(text)
                if "token" in said:
                    await take(said["token"])
                elif "round" in said:
                    by = self._prefill.members[said["round"] - 1]
                    front.prefill.delivered(self._prefill, by, time.monotonic())
                else:
                    front.decode.delivered(self._decode, self._server, time.monotonic())
                    return str(said["finish"])
        raise httpx.RemoteProtocolError("the answer has no end")

    def _refused(self, error: dict[str, Any]) -> None:
        """Take note of whose fault it is, and raise Refused."""
        now = time.monotonic()
        if error.get("whose") == "prefill":
            self._front.prefill.delivered(self._prefill, None, now)
        elif error["retry"]:
            self._front.decode.failed(self._decode, self._server, now)
        raise Refused(error["code"], error["message"], retry=error["retry"])


class Api:
    """What is served over HTTP."""

    def __init__(self, front: Front, watcher: Watcher, calls: Calls, viewers: Calls, args: argparse.Namespace) -> None:
        self.front, self.watcher, self.calls, self.viewers = front, watcher, calls, viewers
        self._context = args.context
        self._scalable = args.scalable

    def application(self) -> Starlette:
        """Return the application."""
        routes = [
            Route("/", self.page),
            Route("/events", self.events),
            Route("/stats", self.stats),
            Route("/scale", self.scale, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/completions", self.completions, methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers={Refused: serving.refusal})

    async def page(self, _: Request) -> Response:
        """Serve the page."""
        return HTMLResponse(PAGE.read_text(), headers={"cache-control": "no-store"})

    async def stats(self, _: Request) -> Response:
        """Serve the numbers once."""
        return JSONResponse(await self.watcher.look())

    async def events(self, _: Request) -> Response:
        """Serve the numbers as they change."""

        async def produce(emit: Emit) -> None:
            while True:
                await emit(event(await self.watcher.look()))
                await anyio.sleep(self.watcher.period)

        if len(self.viewers) >= MOST_VIEWERS:
            raise Refused(429, f"{MOST_VIEWERS} are watching")
        return Answer(self.viewers, produce, "text/event-stream")

    async def models(self, _: Request) -> Response:
        """Serve the list of models, which is one."""
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "aiote"}]})

    async def scale(self, request: Request) -> Response:
        """Ask whoever started the router for other numbers of servers."""
        body = await serving.body_of(request)
        if not self._scalable:
            raise Refused(409, "start the servers with cluster.py to have them scaled")
        wanted = {role: body[role] for role in ("prefill", "decode") if role in body}
        if not wanted or not all(type(count) is int and 0 <= count <= MOST_SERVERS for count in wanted.values()):
            raise Refused(400, f'{{"prefill": n, "decode": m}} expected, each at most {MOST_SERVERS}')
        tell(scale=wanted)
        return JSONResponse({"scale": wanted}, 202)

    async def completions(self, request: Request) -> Response:
        """Serve a completion."""
        asked = Completion.of(await serving.body_of(request), self._context)
        if len(self.calls) >= MOST_CALLS:
            raise Refused(429, f"{MOST_CALLS} requests are being served")
        if asked.stream:
            return Answer(self.calls, partial(self._stream, asked), "text/event-stream")
        return Answer(self.calls, partial(self._whole, asked), "application/json")

    async def _whole(self, asked: Completion, emit: Emit) -> None:
        out: list[int] = []

        async def take(token: int) -> None:
            out.append(token)

        finish = await self._counted(asked, take)
        usage = {"prompt_tokens": len(asked.prompt), "completion_tokens": len(out)}
        usage["total_tokens"] = sum(usage.values())
        text = tokens.decode(out).decode(errors="replace")
        await emit(json.dumps(asked.chunk(text, out, finish, usage=usage)).encode())

    async def _stream(self, asked: Completion, emit: Emit) -> None:
        text = codecs.getincrementaldecoder("utf-8")("replace")
        begun = False

        async def take(token: int) -> None:
            nonlocal begun
            begun = True
            await emit(event(asked.chunk(text.decode(tokens.decode([token])), [token], None)))

        try:
            finish = await self._counted(asked, take)
        except Refused as error:
            if not begun:
                raise
            await emit(event(error.body))
            return
        await emit(event(asked.chunk(text.decode(b"", True), [], finish)) + b"data: [DONE]\n\n")

    async def _counted(self, asked: Completion, take: Take) -> str:
        try:
            finish = await self.front.complete(asked, take)
        except Refused:
            self.front.failed += 1
            raise
        except anyio.get_cancelled_exc_class():
            self.front.left += 1
            raise
        self.front.done += 1
        return finish


def event(data: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"


async def main(args: argparse.Namespace, orders: Orders) -> None:
    """Serve until told to drain, and then until the requests are over that are there."""
    calls, viewers = Calls(), Calls()
    # A decode server may be silent for as long as its prompts wait; who is lost leaves the registry.
    token = os.environ.get(serving.TOKEN) or secrets.token_urlsafe(16)
    client = httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=2.0),
        headers={"authorization": f"Bearer {token}"},
        limits=httpx.Limits(),
        trust_env=False,
    )
    async with client, aiote.open_engine(args.provider) as engine:
        async with RegistryServer(engine) as registry, anyio.create_task_group() as group:
            front = Front(registry, client, args.page_tokens)
            watcher = Watcher(front, registry, client)
            group.start_soon(front.follow)
            app = Api(front, watcher, calls, viewers, args).application()
            async with serving.http(app, args, engine, token, calls, viewers) as url:
                tell(ready=url, page=f"{url}/?token={token}", registry=str(engine.address))
                await orders.drain.wait()
                # Whoever watches would do so for ever; who waits for tokens gets them.
                viewers.end()
                await orders.unhurried(calls.none)
            group.cancel_scope.cancel()


if __name__ == "__main__":
    parser = serving.parser("Take completions, and choose who works on them.")
    parser.add_argument("--scalable", action="store_true", help="print what POST /scale asks for, for the parent to do")
    arguments = parser.parse_args()
    sys.exit(serving.start("router.py", partial(main, arguments), with_parent=arguments.with_parent))
