"""What travels with a call from one engine to another besides its arguments: the trace that it is part of."""

from __future__ import annotations

from contextvars import ContextVar

__all__ = ["CONTEXT_BYTES", "call_context"]

CONTEXT_BYTES = 512
"""A W3C `traceparent` has 55 bytes; a longer context is not sent."""

call_context: ContextVar[str] = ContextVar("aiote_call_context", default="")
"""What the next call of this task carries; an interceptor of the client sets it around the call."""
