"""What the servers of this folder share: their arguments, their place in the registry, and how they answer over HTTP.

All of a cluster have one *token*, in the environment as `KVCACHE_TOKEN`, and answer only who knows it: as
`Authorization: Bearer TOKEN`, or in a GET's URL as `?token=TOKEN`.
"""

from __future__ import annotations

import argparse
import hmac
import ipaddress
import json
import logging
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import urlsplit

import anyio
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

import aiote
from aiote.demo import DemoError, Orders, Settings, leave_with_parent, live
from aiote.discovery import EmbeddedRegistry, Member, Registration, Registry

TOKEN = "KVCACHE_TOKEN"
BODY_BYTES = 1 << 20
SETTLE_S = 0.3
TELL_S = 2.0  # how long to wait for the registry to hear that a server drains


class Refused(Exception):
    """A request that is answered with an HTTP status and a sentence.

    `retry`: another server may well take it; `whose` fault it is, "prefill" or "decode".
    """

    def __init__(self, status: int, message: str, *, retry: bool = False, whose: str = "decode") -> None:
        super().__init__(message)
        self.status = status
        self.retry = retry
        self.whose = whose

    @property
    def body(self) -> dict[str, Any]:
        """The answer, in OpenAI's form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        facts = {"code": self.status, "retry": self.retry, "whose": self.whose}
        return {"error": {"message": str(self), "type": kind, **facts}}


# Arguments and the model.


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with what every server takes."""
    out = argparse.ArgumentParser(description=description)
    out.add_argument(
        "--provider", default="auto", help="auto (the default), local, socket, tcp or shm; the same everywhere"
    )
    out.add_argument("--host", default="127.0.0.1", help="where HTTP is served")
    out.add_argument(
        "--advertise", metavar="HOST", help="under which others reach that; needed where --host is no such"
    )
    out.add_argument("--port", type=int, default=0, help="the port of it; 0, the default: any free one")
    out.add_argument("--page-tokens", type=int, default=16, help="tokens of a page")
    out.add_argument("--context", type=int, default=4096, help="tokens of the longest prompt with its answer")
    out.add_argument("--with-parent", action="store_true", help="drain when standard input ends")
    return out


def model_parser(description: str, *, member: bool = True) -> argparse.ArgumentParser:
    """Return a parser with what prefill and decode servers take; a cluster takes all that makes no `member`."""
    out = parser(description)
    if member:
        out.add_argument("--registry", required=True, metavar="ADDRESS", help="the router's engine, which it prints")
        out.add_argument("--name", help="unique in the cluster; the process number is the default")
    out.add_argument("--layers", type=int, default=4, help="layers of the seeded model")
    out.add_argument("--seed", type=int, default=0, help="seed of its weights")
    out.add_argument("--weights", help="a safetensors file instead (aiote demo weights makes one)")
    out.add_argument("--chunk-tokens", type=int, default=256, help="tokens that are prefilled at a time: whole pages")
    out.add_argument("--slower", type=float, default=0.0, help="seconds that a layer of a chunk takes in addition")
    out.add_argument("--slots", type=int, default=16, help="requests that have pages at a time")
    out.add_argument("--lease", type=float, default=3.0, help="seconds after which a silent member has left")
    return out


def settings_of(args: argparse.Namespace) -> Settings:
    """Return the demo's settings, which make its model. Raises DemoError."""
    pages = args.slots * -(-args.context // args.page_tokens)
    return Settings(
        provider=args.provider,
        layers=args.layers,
        seed=args.seed,
        weights=args.weights,
        page_tokens=args.page_tokens,
        chunk_tokens=args.chunk_tokens,
        new_tokens=args.context,
        concurrency=args.slots,
        pool_pages=pages,
    )


@asynccontextmanager
async def member_of_a_cluster(args: argparse.Namespace) -> AsyncIterator[tuple[aiote.Engine, Registry]]:
    """Open an engine that knows the router's registry. Raises AioteError."""
    async with aiote.open_engine(args.provider) as engine:
        router = aiote.Address.parse(args.registry)
        async with EmbeddedRegistry(engine, router, lease_s=args.lease) as registry:
            yield engine, registry


def member(args: argparse.Namespace, role: str, engine: aiote.Engine, url: str, model: str) -> Member:
    """Return a server as the registry is to know it."""
    name = args.name or f"{role}-{os.getpid()}"
    return Member(name, role, bytes(engine.address), time.time_ns(), {"url": url, "model": model})


async def announce_draining(registry: Registry, registration: Registration) -> None:
    """Tell the registry that nothing more is wanted, and give those time who were told otherwise a moment ago.

    Where the registry is gone, whoever asks all the same is refused, and goes elsewhere.
    """
    if registry.in_touch:
        with anyio.move_on_after(TELL_S):
            await registration.update({**registration.member.attributes, "draining": True})
        await anyio.sleep(SETTLE_S)


def engine_stats(engine: aiote.Engine) -> dict[str, Any]:
    """Return what is to be shown of an engine."""
    counted = engine.statistics()
    rails = [
        {"name": rail.name, "provider": rail.provider, "state": rail.state, "bytes_carried": carried}
        for rail, carried in zip(engine.rails, counted.carried, strict=True)
    ]
    return {
        "pid": os.getpid(),
        "rails": rails,
        "peers": len(engine.peers),
        "transfers": counted.outstanding + counted.queued,
    }


def token() -> str:
    """Return the cluster's token. Raises DemoError where there is none."""
    if not os.environ.get(TOKEN):
        raise DemoError(f"{TOKEN} is not set in the environment: give it the router's token")
    return os.environ[TOKEN]


def reachable(args: argparse.Namespace, engine: aiote.Engine) -> str:
    """Return the host under which others reach what is served here: where that is all addresses, the engine's."""
    return args.advertise or (engine.address.host if args.host in ("", "0.0.0.0", "::") else args.host)


def start(name: str, main: Callable[[Orders], Awaitable[None]], *, with_parent: bool) -> int:
    """Run a server that ends as it is told, and return its exit status."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=f"{name}: %(message)s")
    for chatty in ("httpx", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    if with_parent:
        leave_with_parent(sys.stdin.fileno())
    return live(name, main)


# HTTP.


class Calls:
    """The requests that are being answered; `end` cancels them all."""

    def __init__(self) -> None:
        self.ended = False
        self._scopes: set[anyio.CancelScope] = set()
        self._quiet = anyio.Event()

    def __len__(self) -> int:
        return len(self._scopes)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Count one more, and cancel it at the end of all."""
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                if self.ended:
                    scope.cancel()
                yield
            finally:
                self._scopes.discard(scope)
                if not self._scopes:
                    self._quiet.set()

    async def none(self) -> None:
        """Wait until there is none."""
        while self._scopes:
            self._quiet = anyio.Event()
            await self._quiet.wait()

    def end(self) -> None:
        """Cancel all, now and from now on."""
        self.ended = True
        for scope in tuple(self._scopes):
            scope.cancel()


Emit = Callable[[bytes], Awaitable[None]]


class Answer(Response):
    """An answer that `produce` makes piece by piece, and that is cancelled in the moment in which the client leaves.

    Before the first piece `Refused` becomes an answer with its status; afterwards it is for `produce` to tell.
    """

    def __init__(self, calls: Calls, produce: Callable[[Emit], Awaitable[None]], media_type: str) -> None:
        super().__init__(media_type=media_type)
        self._calls = calls
        self._produce = produce
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; see ASGI."""
        refused: Refused | None = Refused(503, "the server is ending", retry=True)
        with self._calls.open():
            async with anyio.create_task_group() as group:
                group.start_soon(_until_left, receive, group.cancel_scope)
                try:
                    await self._produce(lambda data: self._emit(send, data))
                    refused = None
                except Refused as error:
                    refused = error
                group.cancel_scope.cancel()
        # One who has left does not get it; `send` does nothing then.
        if not self._started and refused is not None:
            await JSONResponse(refused.body, refused.status)(scope, receive, send)
        else:
            await self._emit(send, b"")

    async def _emit(self, send: Send, data: bytes) -> None:
        if not self._started:
            self._started = True
            headers = [(b"content-type", (self.media_type or "").encode()), (b"cache-control", b"no-store")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data, "more_body": bool(data)})


async def _until_left(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def body_of(request: Request) -> dict[str, Any]:
    """Return a request's JSON object. Raises Refused."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        # A page of another site cannot send this type without asking first.
        raise Refused(415, "expected content-type: application/json")
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > BODY_BYTES:
            raise Refused(413, f"the body has more than {BODY_BYTES} bytes")
    try:
        body = json.loads(bytes(data))
    except ValueError as error:
        raise Refused(400, f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refused(400, "the body is no JSON object")
    return body


def refusal(_: Request, error: Exception) -> JSONResponse:
    """Answer a request that was refused before anything was done for it."""
    assert isinstance(error, Refused)
    return JSONResponse(error.body, error.status)


class Guard:
    """An application for those who know the token, under a name that is this server's.

    A browser sends what any page asks of it, also of this host: such a page has no token, and where it had its own name
    resolved to this address, the `Host` is that name. An address is no such name.
    """

    def __init__(self, app: ASGIApp, token: str, names: Sequence[str]) -> None:
        self._app = app
        self._token = token.encode()
        self._names = {"localhost", *names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; see ASGI."""
        request = Request(scope)
        if not self._ours(request.headers.get("host", "")):
            await refusal(request, Refused(403, "Host is no name of this server"))(scope, receive, send)
        elif not hmac.compare_digest(self._given(request), self._token):
            await refusal(request, Refused(401, "the token is missing or wrong"))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in self._names or bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    @staticmethod
    def _given(request: Request) -> bytes:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            given = request.query_params.get("token", "") if request.method == "GET" else ""
        return given.encode()


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the program."""
        yield


@asynccontextmanager
async def http(
    app: ASGIApp, args: argparse.Namespace, engine: aiote.Engine, token: str, *calls: Calls
) -> AsyncIterator[str]:
    """Serve an application for the length of the block, to those who have the token, and give its URL; at the end open
    requests are cancelled.
    """
    name = reachable(args, engine)
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    listener = socket.create_server((args.host, args.port), family=family, backlog=512)
    guarded = Guard(app, token, (name, args.host))
    config = uvicorn.Config(guarded, log_config=None, log_level="error", access_log=False, lifespan="off", ws="none")
    server = _Server(config)
    async with anyio.create_task_group() as group:
        # Not cancelled but told to end, also when all else is cancelled: it would leave connections behind.
        group.start_soon(_shielded, server, listener)
        try:
            yield f"http://{f'[{name}]' if ':' in name else name}:{listener.getsockname()[1]}"
        finally:
            for kind in calls:
                kind.end()
            server.should_exit = True


async def _shielded(server: _Server, listener: socket.socket) -> None:
    with anyio.CancelScope(shield=True), listener:
        await server.serve(sockets=[listener])
