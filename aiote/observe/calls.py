"""Measure the calls of a service by method: how many, how long, how many failed, how many are under way.

    times = CallTimes()
    service.serve(engine, Search(), interceptors=[times.intercept])
    service.client(engine, address, Search, interceptors=[times.intercept])

An object may serve one side of one engine or several; its counts are then those of all. Calls without the interceptor
cost nothing more. For a stream the client's time ends when the stream has begun, the server's when it has ended.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from time import perf_counter_ns
from types import MappingProxyType
from typing import Any

from .latency import Histogram

__all__ = ["CallTimes"]


class CallTimes:
    """The histogram of each method's calls that went well, its failures, and its calls under way."""

    def __init__(self) -> None:
        self._by_method: dict[str, Histogram] = {}
        self._running: dict[str, int] = {}

    @property
    def by_method(self) -> Mapping[str, Histogram]:
        """The histogram of each method that was called."""
        return MappingProxyType(self._by_method)

    @property
    def running(self) -> Mapping[str, int]:
        """The number of calls of each method that are under way."""
        return MappingProxyType(self._running)

    async def intercept(self, info: Any, proceed: Callable[[], Awaitable[Any]]) -> Any:
        """Run a call and measure it; an interceptor for `aiote.service.client` and `serve`."""
        histogram = self._by_method.setdefault(info.method, Histogram())
        self._running[info.method] = self._running.get(info.method, 0) + 1
        began = perf_counter_ns()
        try:
            result = await proceed()
        except BaseException:
            histogram.failures += 1
            raise
        else:
            histogram.add(perf_counter_ns() - began)
            return result
        finally:
            self._running[info.method] -= 1
