"""Own the trace context that a call carries from one engine to another besides its arguments."""

from __future__ import annotations

from contextvars import ContextVar

__all__ = ["CONTEXT_BYTES", "call_context"]

CONTEXT_BYTES = 512
"""The longest context that a call carries; a longer one is not sent. A W3C `traceparent` has 55 bytes."""

call_context: ContextVar[str] = ContextVar("aiote_call_context", default="")
"""The trace context that the next call of this task carries; a client interceptor sets it around the call."""
