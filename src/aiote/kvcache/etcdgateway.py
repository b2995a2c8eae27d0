"""Calls to etcd through the JSON gateway of its API v3: what is asked, what comes back, and who is asked next.

Keys and values travel in base64, 64-bit integers as decimal text. A call goes to the endpoint that answered last, and
to each of the others if that one does not. Every answer is bounded in time, and in length by the paging of its caller.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

import aiote

from .membership import RegistryError

if TYPE_CHECKING:
    import httpx

__all__ = ["EtcdError", "Gateway", "number", "packed", "prefix_end", "unpacked"]

REQUEST_S = 3.0
LINE_BYTES = 16 << 20
ASK_OTHERS = (4, 8, 13, 14)
"""gRPC codes that are the endpoint's own trouble: deadline exceeded, exhausted, internal, unavailable."""
UNKNOWN = 2


class EtcdError(RegistryError):
    """etcd refused, or no endpoint answered; `code` is gRPC's number of the reason, 14 where nobody answered."""

    def __init__(self, message: str, code: int = 14) -> None:
        super().__init__(message)
        self.code = code


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

    async def call(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        """Return the answer to one question. Raises EtcdError."""
        trouble = EtcdError("no endpoint was asked")
        for _ in self._endpoints:
            try:
                with anyio.move_on_after(REQUEST_S) as patience:
                    return await self._ask(path, body)
                if patience.cancelled_caught:
                    raise EtcdError(f"{self.endpoint}{path}: no answer within {REQUEST_S} s")
            except EtcdError as error:
                if error.code not in ASK_OTHERS:
                    raise
                trouble = error
                self.turn()
        raise trouble

    async def _ask(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        import httpx

        try:
            response = await self._open_client().post(self.endpoint + path, json=body)
            return _checked(path, response.status_code, response.content)
        except httpx.HTTPError as error:
            raise EtcdError(f"{self.endpoint}{path}: {type(error).__name__}: {error}") from error

    def _open_client(self) -> httpx.AsyncClient:
        if self._client is None:
            raise aiote.ClosedError("the registry is closed")
        return self._client

    async def stream(self, path: str, body: Mapping[str, object]) -> AsyncGenerator[dict[str, Any], None]:
        """Iterate over the answers to one question to the first endpoint; close it. Raises EtcdError."""
        import httpx

        timeout = httpx.Timeout(REQUEST_S, read=None)
        headers = {"Grpc-Metadata-hasleader": "true"}  # a member without a leader says so, rather than nothing
        request = self._open_client().stream("POST", self.endpoint + path, json=body, timeout=timeout, headers=headers)
        try:
            async with request as response:
                chunks = response.aiter_bytes()
                try:
                    async with aclosing(_lines(chunks)) as lines:
                        async for line in lines:
                            yield _checked(path, response.status_code, line)
                finally:
                    await _unwind(chunks)
        except httpx.HTTPError as error:
            raise EtcdError(f"{self.endpoint}{path}: {type(error).__name__}: {error}") from error


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > LINE_BYTES:
            raise EtcdError(f"an answer of more than {LINE_BYTES} bytes")


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


def _checked(path: str, status: int, content: bytes) -> dict[str, Any]:
    """Return what an answer says, without the envelope of streams. Raises EtcdError for a refusal, or no answer."""
    try:
        answer = json.loads(content)
        if not isinstance(answer, dict):
            raise ValueError("no object")
    except ValueError as error:
        raise EtcdError(f"{path}: status {status}, not an answer of etcd: {error}") from error
    trouble = answer.get("error")
    if trouble is not None or status != 200:
        details = trouble if isinstance(trouble, dict) else answer
        code = details.get("code", details.get("grpc_code", UNKNOWN if status < 500 else 14))
        raise EtcdError(f"{path}: {details.get('message') or trouble}", code if isinstance(code, int) else UNKNOWN)
    result = answer.get("result", answer)
    return result if isinstance(result, dict) else {}


def number(answer: Mapping[str, Any], *path: str) -> int:
    """Return the integer at a path of keys; what is left out of an answer is 0. Raises EtcdError."""
    value: Any = answer
    for key in path:
        value = value.get(key, 0) if isinstance(value, Mapping) else 0
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise EtcdError(f"{'.'.join(path)}: an integer expected, got {value!r}") from error


def packed(data: bytes) -> str:
    """Return bytes as the gateway takes them."""
    return base64.b64encode(data).decode()


def unpacked(text: object) -> bytes:
    """Return the bytes that the gateway wrote. Raises EtcdError."""
    try:
        return base64.b64decode(str(text), validate=True)
    except ValueError as error:
        raise EtcdError(f"no base64: {error}") from error


def prefix_end(prefix: bytes) -> bytes:
    """Return the first key behind all that begin so; a zero byte, which means no end, where there is none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes((kept[-1] + 1,)) if kept else b"\0"
