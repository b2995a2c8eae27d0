"""Calls to etcd through the JSON gateway of its API v3: requests, answers, and the choice of the endpoint.

Keys and values travel in base64, 64-bit integers as decimal text. A call goes to the endpoint that answered last, and,
if that does not answer, to each of the others. Every answer is bounded in time, and in length by `ANSWER_BYTES`. An
answer that is not etcd's raises EtcdError and no other exception.
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
"""The longest answer, or line of a stream: a page of the largest members has 1.2 MiB, etcd's largest value 2 MiB."""
HEADERS = {"Accept-Encoding": "identity", "Content-Type": "application/json"}  # a little gzip can expand to any size
ASK_OTHERS = (4, 8, 13, 14)
"""gRPC codes of failures of one endpoint: deadline exceeded, exhausted, internal, unavailable."""
UNKNOWN = 2
OUT_OF_RANGE = 11
TOO_MANY, TOO_LONG = -1, -2
"""Our own codes: too many keys, and too many bytes."""
PERMANENT = (3, 7, 16, TOO_MANY)
"""Codes that recur on retry: invalid argument (no member's name causes it), permission denied, unauthenticated."""
OF_STATUS = {400: 3, 401: 16, 403: 7}
TEXT = 500
"""The most characters of an answer that an error message quotes."""
_INTEGERS = (-(1 << 63), (1 << 63) - 1)


class EtcdError(RegistryError):
    """etcd refused a request, or no endpoint answered; `code` is gRPC's number of the reason, 14 without an answer."""

    def __init__(self, message: str, code: int = 14) -> None:
        super().__init__(message)
        self.code = code

    @property
    def permanent(self) -> bool:
        """Whether a retry can only succeed after a change of etcd or of the options."""
        return self.code in PERMANENT


class Gateway:
    """The endpoints of one cluster: `http://host:2379`.

    `options` are passed to `httpx.AsyncClient` (verify, cert, headers). The environment's proxies are used only if
    `options` have trust_env=True. Raises UsageError for malformed endpoints.
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
        """The endpoint that is asked first."""
        return self._endpoints[0]

    def turn(self) -> None:
        """Ask another endpoint first from now on."""
        self._endpoints.append(self._endpoints.pop(0))

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Hold an HTTP client for the length of an `async with`. Raises UsageError if httpx is not installed."""
        try:
            import httpx
        except ImportError as error:
            raise aiote.UsageError("a registry in etcd needs httpx: pip install 'aiote[etcd]'") from error
        # Load the system's certificates only if needed, because that takes longer than everything else here.
        verify = any(one.startswith("https://") for one in self._endpoints)
        settings = {"trust_env": False, "verify": verify, **self._options, "timeout": httpx.Timeout(REQUEST_S)}
        async with httpx.AsyncClient(**settings) as self._client:
            try:
                yield
            finally:
                self._client = None

    async def call(self, path: str, body: Mapping[str, object], lease_s: float = math.inf) -> dict[str, Any]:
        """Return the answer to one request. Raises EtcdError.

        `lease_s` is the length of the lease that the request is about. The timeouts of all endpoints but one then add
        up to at most a third of it.
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
        """Ask the first endpoint, and yield the status and the bytes of its answer. Raises EtcdError."""
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
        """Iterate over the answers of the first endpoint to one request. The caller closes it. Raises EtcdError."""
        # With this header a member of etcd without a leader reports that, instead of staying silent.
        async with self._answering(path, body, None, **{"Grpc-Metadata-hasleader": "true"}) as (status, chunks):
            if status != 200:
                checked(path, status, await _whole(path, chunks))
            lines = LineSplitter()
            async for chunk in chunks:
                for line in lines.feed(chunk):
                    yield checked(path, status, line)


class LineSplitter:
    """Splits a stream into lines. Raises EtcdError for a line over ANSWER_BYTES, and holds at most one chunk more."""

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
    return EtcdError(f"{what}: the answer has more than {ANSWER_BYTES} bytes", TOO_LONG)


@functools.cache
def _body_type() -> Callable[[bytes], Any]:
    """Return the class of requests' bodies.

    It replaces httpx's own, an async generator, which trio reports if a cancelled request leaves it half sent.
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
    """End httpx's nested generators by a cancelled iteration, because trio reports generators that are abandoned."""
    import httpx

    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            async for _ in chunks:
                pass
        except httpx.HTTPError:
            pass


def checked(path: str, status: int, content: bytes) -> dict[str, Any]:
    """Return the content of an answer, without the envelope of streams. Raises EtcdError for a refusal or no answer."""
    try:
        answer = json.loads(content)
        if not isinstance(answer, dict):
            raise ValueError("expected a JSON object")
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
    """Return the integer at a path of keys; 0 if the answer omits it. Raises EtcdError for anything else."""
    value: Any = answer
    for key in path:
        value = value.get(key, 0) if isinstance(value, Mapping) else 0
    try:
        found = int(value)
        if not _INTEGERS[0] <= found <= _INTEGERS[1]:
            raise ValueError("more than 64 bits")
    except (TypeError, ValueError, OverflowError) as error:
        raise EtcdError(f"{'.'.join(path)}: expected an integer, got {printable(value)}") from error
    return found


def records(answer: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """Return the list of objects under a key; empty if the answer omits it. Raises EtcdError for anything else."""
    found = answer.get(key) or []
    if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
        raise EtcdError(f"{key}: expected a list of objects, got {printable(found)}")
    return found


def printable(value: object) -> str:
    """Return the text of a value for an error message; only the type of a nested value, whose depth has no bound."""
    return str(value)[:TEXT] if isinstance(value, str | int | float | None) else type(value).__name__


def packed(data: bytes) -> str:
    """Return bytes in base64, as the gateway takes them."""
    return base64.b64encode(data).decode()


def unpacked(text: object) -> bytes:
    """Return the bytes of the gateway's base64. Raises EtcdError for anything else."""
    try:
        if not isinstance(text, str):
            raise ValueError(printable(text))
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise EtcdError(f"etcd sent text that is not base64: {error}") from error


def prefix_end(prefix: bytes) -> bytes:
    """Return the first key after all keys with a prefix; a zero byte, which means no end, if there is no such key."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes((kept[-1] + 1,)) if kept else b"\0"
