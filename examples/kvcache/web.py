"""HTTP as all servers of this folder speak it: whom they answer, what they refuse and how, and how long they wait.

All of a cluster have one *token*, and answer only who knows it: as `Authorization: Bearer TOKEN`, or in a GET's URL as
`?token=TOKEN`. `/health` alone needs none. A refusal has OpenAI's form; where another server may take the request,
the header `x-kvcache-retry` says whose fault it was.

The router sends the token to nobody: the URLs of servers come out of the registry, where whoever has the cluster key
may write. A server gives a *proof* with its name and its URL, which takes the token to make; the router asks no other.
It shows each a secret that is made of the token and of that URL, and good for nothing else.

| a client that                                  | is limited by                                        |
|------------------------------------------------|------------------------------------------------------|
| sends a long head                              | `HEAD_BYTES`: status 400                             |
| takes long for its head, or sends none         | `HEAD_S`: it is disconnected                         |
| sends a long body, or takes long for it        | `BODY_BYTES`, `BODY_S`: status 413, 408              |
| does not read its answer                       | `SEND_S`: the request is cancelled                   |
| comes with many others                         | `MOST_CONNECTIONS`: status 503                       |
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import anyio
import anyio.lowlevel
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

import aiote

HEAD_BYTES = 16 << 10
HEAD_S = 10.0
BODY_BYTES = 1 << 20
BODY_S = 20.0
SEND_S = 60.0
MOST_CONNECTIONS = 4096
RETRY = "x-kvcache-retry"
OPEN = ("/health",)

Body = TypeVar("Body")
Emit = Callable[[bytes], Awaitable[None]]


class Refused(Exception):
    """A request that is answered with an HTTP status and a sentence, and with the parameter that it is about.

    `retry`: whose fault it is, "prefill" or "decode", where another server may well take it.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry: str = ""
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry = status, param, code, retry

    @property
    def body(self) -> dict[str, Any]:
        """The answer, in OpenAI's form."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the answer."""
        headers = {RETRY: self.retry} if self.retry else {}
        if self.status == 408:
            # What comes next would be the rest of the body.
            headers["connection"] = "close"
        return JSONResponse(self.body, self.status, headers)


def application(routes: Sequence[Route]) -> Starlette:
    """Return an application whose errors have OpenAI's form, also those of Starlette and of bugs."""

    def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        return error.response()

    def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        # Not `request.url`: of a target such as "[" it cannot be made.
        return Refused(error.status_code, f"{error.detail} ({request.method} {request.scope['path']})").response()

    def broken(_: Request, __: Exception) -> Response:
        return Refused(500, "the server failed; its log has the error").response()

    handlers = {Refused: refused, HTTPException: unknown, Exception: broken}
    return Starlette(routes=routes, exception_handlers=handlers)


def health(trouble: str) -> Response:
    """Answer whoever asks whether this server takes requests."""
    return JSONResponse({"status": trouble or "ok"}, 503 if trouble else 200)


# Requests.


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


async def body_of(request: Request, kind: type[Body]) -> Body:
    """Return a request's body, JSON of a type. Raises Refused, which names the parameter that is wrong."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        # A page of another site cannot send this type without asking first.
        raise Refused(415, "expected content-type: application/json")
    data = bytearray()
    with anyio.move_on_after(BODY_S):
        async for part in request.stream():
            data += part
            if len(data) > BODY_BYTES:
                raise Refused(413, f"the body has more than {BODY_BYTES} bytes, which is the limit")
        return _decoded(bytes(data), kind)
    raise Refused(408, f"the body did not arrive within {BODY_S:.0f} s")


def _decoded(data: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        param = path.strip("`.") or None
        if "unknown field" in text:
            name = text.split("`")[1]
            param = f"{param}.{name}" if param else name
            message = f"Unrecognized request argument supplied: {param}"
            raise Refused(400, message, param=param, code="unknown_parameter") from None
        if "missing required field" in text:
            param = text.split("`")[1]
        raise Refused(400, f"{param or 'the body'}: {text}", param=param, code="invalid_value") from None
    except RecursionError:
        raise Refused(400, "the body is nested too deeply", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise Refused(400, f"the body is not JSON: {error}", code="invalid_json") from None


class Answer(Response):
    """An answer that `produce` makes piece by piece, and that is cancelled in the moment in which the client leaves.

    Before the first piece `Refused` becomes an answer with its status; afterwards it is for `produce` to tell. Several
    tasks may emit.
    """

    def __init__(self, calls: Calls, produce: Callable[[Emit], Awaitable[None]], media_type: str) -> None:
        super().__init__(media_type=media_type)
        self._calls = calls
        self._produce = produce
        self._started = self._stalled = False
        self._turn = anyio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; see ASGI."""
        refused: Refused | None = Refused(503, "the server is ending", retry="decode")
        with self._calls.open():
            async with anyio.create_task_group() as group:
                group.start_soon(_until_left, receive, group.cancel_scope)
                try:
                    await self._produce(lambda data: self._emit(send, data, group.cancel_scope))
                    refused = None
                except Refused as error:
                    refused = error
                group.cancel_scope.cancel()
        # One who has left does not get it; `send` does nothing then.
        if not self._started and refused is not None:
            await refused.response()(scope, receive, send)
        elif not self._stalled:
            await self._emit(send, b"", anyio.CancelScope())

    async def _emit(self, send: Send, data: bytes, whole: anyio.CancelScope) -> None:
        with anyio.move_on_after(SEND_S) as patience:
            async with self._turn:
                if not self._started:
                    self._started = True
                    headers = [(b"content-type", (self.media_type or "").encode()), (b"cache-control", b"no-store")]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": data, "more_body": bool(data)})
        if patience.cancelled_caught:
            self._stalled = True
            whole.cancel()
            await anyio.lowlevel.checkpoint()


async def _until_left(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


# Who is answered.


def secret_of(token: str, *parts: str) -> str:
    """Return what only those can make of these parts who have the token."""
    text = "\0".join(f"{len(part)} {part}" for part in parts)
    return hmac.digest(token.encode(), text.encode(), "sha256").hex()


def url_secret(token: str, url: str) -> str:
    """Return what the server at a URL takes instead of the token."""
    return secret_of(token, "url", url)


class Guard:
    """An application for those who know the token, or this server's own secret, under a name that is this server's.

    A browser sends what any page asks of it, also of this host: such a page has no token, and where it had its own name
    resolved to this address, the `Host` is that name. An address is no such name.
    """

    def __init__(self, app: ASGIApp, token: str, names: Sequence[str], url: str) -> None:
        self._app = app
        self._taken = token.encode(), url_secret(token, url).encode()
        self._names = {"localhost", *names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; see ASGI."""
        request = Request(scope)
        if not self._ours(request.headers.get("host", "")):
            refused = Refused(403, "the Host header is not a name of this server", code="unknown_host")
            await refused.response()(scope, receive, send)
        elif scope["path"] not in OPEN and not self._knows(self._given(request)):
            refused = Refused(401, "the token (API key) is missing or wrong", code="invalid_api_key")
            await refused.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in self._names or bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def _knows(self, given: bytes) -> bool:
        return any(hmac.compare_digest(given, one) for one in self._taken)

    @staticmethod
    def _given(request: Request) -> bytes:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            given = request.query_params.get("token", "") if request.method == "GET" else ""
        return given.encode()


# The server.


class Connection(H11Protocol):
    """uvicorn's, with a limit for how long a request's head takes: it has one only for who says nothing at all between
    two requests.
    """

    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._await_head()

    def on_response_complete(self) -> None:
        """Begin to wait for the next head."""
        super().on_response_complete()
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        super().connection_lost(exc)
        if self._patience is not None:
            self._patience.cancel()

    def _await_head(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._patience = self.loop.call_later(HEAD_S, self._drop_unless_after, self.cycle)

    def _drop_unless_after(self, last: object) -> None:
        if self.cycle is last and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the program."""
        yield


def reachable(args: argparse.Namespace, engine: aiote.Engine) -> str:
    """Return the host under which others reach what is served here: where that is all addresses, the engine's."""
    return args.advertise or (engine.address.host if args.host in ("", "0.0.0.0", "::") else args.host)


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
    url = f"http://{f'[{name}]' if ':' in name else name}:{listener.getsockname()[1]}"
    config = uvicorn.Config(
        Guard(app, token, (name, args.host), url),
        http=Connection,
        log_config=None,
        log_level="error",
        access_log=False,
        lifespan="off",
        ws="none",
        h11_max_incomplete_event_size=HEAD_BYTES,
        limit_concurrency=MOST_CONNECTIONS,
    )
    server = _Server(config)
    async with anyio.create_task_group() as group:
        # Not cancelled but told to end, also when all else is cancelled: it would leave connections behind.
        group.start_soon(_shielded, server, listener)
        try:
            yield url
        finally:
            for kind in calls:
                kind.end()
            server.should_exit = True


async def _shielded(server: _Server, listener: socket.socket) -> None:
    with anyio.CancelScope(shield=True), listener:
        await server.serve(sockets=[listener])
