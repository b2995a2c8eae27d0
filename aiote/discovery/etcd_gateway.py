"""Calls to etcd through the JSON gateway of its API v3: what is asked, what comes back, and who is asked next.

Keys and values travel in base64, 64-bit integers as decimal text. A call goes to the endpoint that answered last, and
to each of the others if that one does not. Every answer is bounded in time, and in length: `ANSWER_BYTES`. What is not
an answer of etcd raises EtcdError, and nothing else.
"""

from __future__ import annotations

import base64
import functools
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

import aiote

from .membership import RegistryError

if TYPE_CHECKING:
    import httpx

__all__ = [
    "EtcdError",
    "Gateway",
    "LineSplitter",
    "checked",
    "number",
    "packed",
    "prefix_end",
    "printable",
    "records",
    "unpacked",
]

REQUEST_S = 3.0
ANSWER_BYTES = 4 << 20
"""Of an answer, and of one line of a stream: a page of the largest members has 1.2 MiB, etcd's largest value 2 MiB."""
HEADERS = {"Accept-Encoding": "identity", "Content-Type": "application/json"}  # a few bytes of gzip can be any number
ASK_OTHERS = (4, 8, 13, 14)
"""gRPC codes that are the endpoint's own trouble: deadline exceeded, exhausted, internal, unavailable."""
UNKNOWN = 2
OUT_OF_RANGE = 11
TOO_MANY, TOO_LONG = -1, -2
"""Reasons of our own: more than can be taken of keys, of bytes."""
PERMANENT = (3, 7, 16, TOO_MANY)
"""What comes again however often one asks: invalid argument (nobody's name is one), permission denied, who are you?"""
OF_STATUS = {400: 3, 401: 16, 403: 7}
TEXT = 500
"""Characters of an answer that are told in an error."""
_INTEGERS = (-(1 << 63), (1 << 63) - 1)


class EtcdError(RegistryError):
    """etcd refused, or no endpoint answered; `code` is gRPC's number of the reason, 14 where nobody answered."""

    def __init__(self, message: str, code: int = 14) -> None:
        super().__init__(message)
        self.code = code

    @property
    def permanent(self) -> bool:
        """Whether asking again is of no use before somebody has changed etcd or the options."""
        return self.code in PERMANENT


class Gateway:
    """The endpoints of one cluster: `http://host:2379`. `options` go to `httpx.AsyncClient` (verify, cert, headers).

    The environment's proxies are not asked, unless `options` have trust_env=True.
    """

    def __init__(self, endpoints: str | Iterable[str], options: Mapping[str, Any] | None = None) -> None:
        chosen = (endpoints,) if isinstance(endpoints, str) else tuple(endpoints)
        if not chosen or not all(one.startswith(("http://", "https://")) for one in chosen):
            raise aiote.UsageError(f"endpoints={endpoints!r}: expected http://host:port or https://host:port")
        self._endpoints = [one.rstrip("/") for one in chosen]
        self._options = dict(options or {})
        self._client: httpx.AsyncClient | None = None

    @property
    def endpoint(self) -> str:
        """The one that is asked first."""
        return self._endpoints[0]

    def turn(self) -> None:
        """Ask another endpoint first from now on."""
        self._endpoints.append(self._endpoints.pop(0))

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Have connections for the length of an `async with`. Raises UsageError where httpx is not installed."""
        try:
            import httpx
        except ImportError as error:
            raise aiote.UsageError("etcd is reached through httpx: pip install 'aiote[etcd]'") from error
        # Loading the system's certificates takes longer than all else here.
        verify = any(one.startswith("https://") for one in self._endpoints)
        settings = {"trust_env": False, "verify": verify, **self._options, "timeout": httpx.Timeout(REQUEST_S)}
        async with httpx.AsyncClient(**settings) as self._client:
            try:
                yield
            finally:
                self._client = None

    async def call(self, path: str, body: Mapping[str, object], lease_s: float = math.inf) -> dict[str, Any]:
        """Return the answer to one question. Raises EtcdError.

        Where it is about a lease of so many seconds, all endpoints but one may be silent for a third of that together.
        """
        limit = min(REQUEST_S, lease_s / 3 / max(1, len(self._endpoints) - 1))
        trouble = EtcdError("no endpoint was asked")
        for _ in self._endpoints:
            try:
                with anyio.move_on_after(limit) as patience:
                    return await self._ask(path, body)
                if patience.cancelled_caught:
                    raise EtcdError(f"{self.endpoint}{path}: no answer within {limit:.1f} s")
            except EtcdError as error:
                if error.code not in ASK_OTHERS:
                    raise
                trouble = error
                self.turn()
        raise trouble

    async def _ask(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        async with self._answering(path, body, REQUEST_S) as (status, chunks):
            return checked(path, status, await _whole(path, chunks))

    @asynccontextmanager
    async def _answering(
        self, path: str, body: Mapping[str, object], read_s: float | None, **headers: str
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """Ask the first endpoint, and have the status and the bytes of its answer."""
        import httpx

        client, content = self._open_client(), json.dumps(body).encode()
        timeout = httpx.Timeout(REQUEST_S, read=read_s)
        request = client.build_request(
            "POST", self.endpoint + path, content=content, timeout=timeout, headers=HEADERS | headers
        )
        request.stream = _body_type()(content)
        try:
            async with aclosing(await client.send(request, stream=True)) as response:
                chunks = response.aiter_raw()
                try:
                    yield response.status_code, chunks
                finally:
                    await _unwind(chunks)
        except httpx.HTTPError as error:
            raise EtcdError(f"{self.endpoint}{path}: {type(error).__name__}: {error}") from error

    def _open_client(self) -> httpx.AsyncClient:
        if self._client is None:
            raise aiote.ClosedError("the registry is closed")
        return self._client

    async def stream(self, path: str, body: Mapping[str, object]) -> AsyncGenerator[dict[str, Any], None]:
        """Iterate over the answers to one question to the first endpoint; close it. Raises EtcdError."""
        # A member without a leader says so, rather than nothing.
        async with self._answering(path, body, None, **{"Grpc-Metadata-hasleader": "true"}) as (status, chunks):
            if status != 200:
                checked(path, status, await _whole(path, chunks))
            lines = LineSplitter()
            async for chunk in chunks:
                for line in lines.feed(chunk):
                    yield checked(path, status, line)


class LineSplitter:
    """Cuts a stream in lines; one of more than ANSWER_BYTES raises EtcdError, before more than a chunk more is held."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take a chunk and return the lines that it completes."""
        first, *more = chunk.split(b"\n")
        self._rest += first
        lines = []
        for part in more:
            lines.append(bytes(self._rest))
            self._rest = bytearray(part)
        if max(map(len, (*lines, self._rest))) > ANSWER_BYTES:
            raise _too_long("the stream")
        return lines


async def _whole(path: str, chunks: AsyncIterator[bytes]) -> bytes:
    content = bytearray()
    async for chunk in chunks:
        content += chunk
        if len(content) > ANSWER_BYTES:
            raise _too_long(path)
    return bytes(content)


def _too_long(what: str) -> EtcdError:
    return EtcdError(f"{what}: an answer of more than {ANSWER_BYTES} bytes", TOO_LONG)


@functools.cache
def _body_type() -> Callable[[bytes], Any]:
    """Return the class of requests' bodies: httpx's own is an async generator, which trio reports where a cancelled
    request leaves it half sent.
    """
    import httpx

    class Body(httpx.AsyncByteStream):
        def __init__(self, content: bytes) -> None:
            self._unsent = [content]

        def __aiter__(self) -> AsyncIterator[bytes]:
            return self

        async def __anext__(self) -> bytes:
            if not self._unsent:
                raise StopAsyncIteration
            return self._unsent.pop()

    return Body


async def _unwind(chunks: AsyncIterator[bytes]) -> None:
    """End httpx's generators, which are within each other: trio complains of those that were merely left."""
    import httpx

    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            async for _ in chunks:
                pass
        except httpx.HTTPError:
            pass


def checked(path: str, status: int, content: bytes) -> dict[str, Any]:
    """Return what an answer says, without the envelope of streams. Raises EtcdError for a refusal, or no answer."""
    try:
        answer = json.loads(content)
        if not isinstance(answer, dict):
            raise ValueError("no object")
    except (ValueError, RecursionError) as error:
        said = f"status {status}, not an answer of etcd: {error}"
        raise EtcdError(f"{path}: {said}", OF_STATUS.get(status, 14)) from error
    trouble = answer.get("error")
    if trouble is not None or status != 200:
        details = trouble if isinstance(trouble, dict) else answer
        likely = OF_STATUS.get(status, UNKNOWN if status < 500 else 14)
        code = details.get("code", details.get("grpc_code", likely))
        said = printable(details.get("message") or trouble)
        raise EtcdError(f"{path}: {said}", code if isinstance(code, int) else UNKNOWN)
    result = answer.get("result", answer)
    return result if isinstance(result, dict) else {}


def number(answer: Mapping[str, Any], *path: str) -> int:
    """Return the integer at a path of keys; what is left out of an answer is 0. Raises EtcdError."""
    value: Any = answer
    for key in path:
        value = value.get(key, 0) if isinstance(value, Mapping) else 0
    try:
        found = int(value)
        if not _INTEGERS[0] <= found <= _INTEGERS[1]:
            raise ValueError("more than 64 bits")
    except (TypeError, ValueError, OverflowError) as error:
        raise EtcdError(f"{'.'.join(path)}: an integer expected, got {printable(value)}") from error
    return found


def records(answer: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """Return the list of objects under a key; what is left out of an answer is empty. Raises EtcdError."""
    found = answer.get(key) or []
    if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
        raise EtcdError(f"{key}: a list of objects expected, got {printable(found)}")
    return found


def printable(value: object) -> str:
    """Return what an error says of a value: of what is nested only that, for it may be so without end."""
    return str(value)[:TEXT] if isinstance(value, str | int | float | None) else type(value).__name__


def packed(data: bytes) -> str:
    """Return bytes as the gateway takes them."""
    return base64.b64encode(data).decode()


def unpacked(text: object) -> bytes:
    """Return the bytes that the gateway wrote. Raises EtcdError."""
    try:
        if not isinstance(text, str):
            raise ValueError(printable(text))
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise EtcdError(f"no base64: {error}") from error


def prefix_end(prefix: bytes) -> bytes:
    """Return the first key behind all that begin so; a zero byte, which means no end, where there is none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes((kept[-1] + 1,)) if kept else b"\0"
