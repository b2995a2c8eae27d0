"""Record OpenTelemetry spans of calls, and of transfers within a trace (opentelemetry-api, the extra `opentelemetry`).

    client(Search, engine, address, interceptors=[tracing.client_interceptor()])
    serve(engine, Search(), interceptors=[tracing.server_interceptor()])
    stop = tracing.trace_transfers(engine)

A call carries the trace as a W3C `traceparent`. A transfer gets a span only below a span that is recorded, because a
span costs tens of microseconds and a small write only a few. A transfer without a span costs one look at the current
span.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.propagate import extract, inject
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from .context import CONTEXT_BYTES, call_context
from .wrapping import SUBMITS, Verb, wrap_verbs

__all__ = ["client_interceptor", "server_interceptor", "trace_transfers"]

SCOPE = "aiote"
HEADER = "traceparent"

Proceed = Callable[[], Awaitable[Any]]
Intercept = Callable[[Any, Proceed], Awaitable[Any]]


def client_interceptor(tracer: Tracer | None = None) -> Intercept:
    """Return an interceptor for clients that makes a span for each call; the server continues the trace.

    `tracer`: by default the global provider's.
    """
    chosen = tracer or trace.get_tracer(SCOPE)

    async def intercept(info: Any, proceed: Proceed) -> Any:
        with chosen.start_as_current_span(info.method, kind=SpanKind.CLIENT, attributes=_attributes(info)):
            carrier: dict[str, str] = {}
            inject(carrier)
            header = carrier.get(HEADER, "")
            token = call_context.set(header if len(header) <= CONTEXT_BYTES else "")
            try:
                return await proceed()
            finally:
                call_context.reset(token)

    return intercept


def server_interceptor(tracer: Tracer | None = None) -> Intercept:
    """Return an interceptor for servers that makes a span for each call, below the caller's span if there is one.

    OpenTelemetry parses the peer's trace context; if that is invalid, the span begins a new trace.
    """
    chosen = tracer or trace.get_tracer(SCOPE)

    async def intercept(info: Any, proceed: Proceed) -> Any:
        parent = extract({HEADER: info.context}) if info.context else contexts.Context()
        with chosen.start_as_current_span(
            info.method, context=parent, kind=SpanKind.SERVER, attributes=_attributes(info)
        ):
            return await proceed()

    return intercept


def _attributes(info: Any) -> dict[str, str]:
    return {"rpc.system": "aiote", "rpc.method": info.method, "network.peer.address": str(info.peer.address)}


def trace_transfers(engine: Any, tracer: Tracer | None = None, *, roots: bool = False) -> Callable[[], None]:
    """Give each transfer of an engine a span if the current span is recorded; return a function that stops this.

    With `roots` a transfer outside of any span also gets a span, which begins a trace. This covers the awaited verbs
    and the `submit_` forms, but not requests of prepared targets.
    """
    chosen = tracer or trace.get_tracer(SCOPE)

    def wanted() -> bool:
        current = trace.get_current_span()
        return current.is_recording() or (roots and not current.get_span_context().is_valid)

    stops = (
        wrap_verbs(engine, partial(_traced_await, chosen, wanted)),
        wrap_verbs(engine, partial(_traced_submit, chosen, wanted), SUBMITS),
    )

    def stop() -> None:
        for each in stops:
            each()

    return stop


def _traced_await(tracer: Tracer, wanted: Callable[[], bool], name: str, verb: Verb) -> Verb:
    def call(*args: Any, **kwargs: Any) -> Awaitable[Any]:
        awaited: Awaitable[Any] = traced(*args, **kwargs) if wanted() else verb(*args, **kwargs)
        return awaited

    async def traced(*args: Any, **kwargs: Any) -> Any:
        # Record only the type and text of an error: an exception event would keep the transfer's memory alive.
        with tracer.start_as_current_span(
            f"aiote.{name}", attributes=_extent(args), record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                return await verb(*args, **kwargs)
            except BaseException as error:
                _fail(span, error)
                raise

    return call


def _traced_submit(tracer: Tracer, wanted: Callable[[], bool], name: str, verb: Verb) -> Verb:
    def submit(*args: Any, **kwargs: Any) -> Any:
        if not wanted():
            return verb(*args, **kwargs)
        span = tracer.start_span(f"aiote.{name.removeprefix('submit_')}", attributes=_extent(args))
        try:
            transfer = verb(*args, **kwargs)
        except BaseException as error:
            _fail(span, error)
            span.end()
            raise
        transfer.add_done_callback(partial(_end, span))
        return transfer

    return submit


def _end(span: Span, transfer: Any) -> None:
    if (error := transfer.exception()) is not None:
        _fail(span, error)
    span.end()


def _fail(span: Span, error: BaseException) -> None:
    span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))


def _extent(args: tuple[Any, ...]) -> dict[str, int]:
    """Return the number of bytes that a verb moves, as a span attribute, if one of its arguments has `nbytes`."""
    sizes = [size for each in args if isinstance(size := getattr(each, "nbytes", None), int)]
    return {"aiote.bytes": sizes[0]} if sizes else {}
