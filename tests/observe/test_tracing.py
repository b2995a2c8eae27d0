"""Spans: of calls on both sides in one trace, of transfers below a recorded span alone, and free without one."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import Any

import anyio
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON
from opentelemetry.trace import SpanKind, StatusCode

import aiote
from aiote import service
from aiote.observe import tracing
from aiote.observe.context import CONTEXT_BYTES, call_context
from support.engines.opening import across, linked, pair, until


class Adder(service.Service):
    """What is called."""

    @service.method
    async def add(self, one: int, other: int) -> int:
        """Add."""
        return one + other

    @service.method
    async def fail(self) -> None:
        """Fail."""
        raise ValueError("as asked")

    @service.method
    async def seen(self) -> str:
        """Return the trace that the call is part of."""
        return service.current_call().context


def tracer(sampler: Any = ALWAYS_ON) -> tuple[Any, InMemorySpanExporter]:
    provider, spans = TracerProvider(sampler=sampler), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return provider.get_tracer("test"), spans


async def test_a_call_is_one_trace_on_both_sides():
    ours, here = tracer()
    theirs, there = tracer()
    async with pair("sim") as (left, right):
        async with service.serve(right, Adder(), interceptors=[tracing.server_interceptor(theirs)]):
            client = service.client(left, right.address, Adder, interceptors=[tracing.client_interceptor(ours)])
            assert await client.add(1, 2) == 3
            with pytest.raises(service.RemoteError, match="as asked"):
                await client.fail()
    for calling, called in zip(here.get_finished_spans(), there.get_finished_spans(), strict=True):
        assert (calling.kind, called.kind) == (SpanKind.CLIENT, SpanKind.SERVER)
        assert called.parent.span_id == calling.context.span_id
        assert called.context.trace_id == calling.context.trace_id
        assert called.name == calling.name == called.attributes["rpc.method"]
    assert [span.status.status_code for span in here.get_finished_spans()] == [StatusCode.UNSET, StatusCode.ERROR]


@pytest.mark.parametrize("said", ["", "no trace at all", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "\x00" * 55])
async def test_what_is_no_trace_begins_one(said):
    theirs, there = tracer()
    async with pair("sim") as (left, right):
        async with service.serve(right, Adder(), interceptors=[tracing.server_interceptor(theirs)]):
            client = service.client(left, right.address, Adder, interceptors=[saying(said)])
            assert await client.seen() == said
    (span,) = there.get_finished_spans()
    assert span.parent is None


def saying(text: str) -> Any:
    async def intercept(_: Any, proceed: Any) -> Any:
        token = call_context.set(text)
        try:
            return await proceed()
        finally:
            call_context.reset(token)

    return intercept


async def test_a_context_that_is_too_long_ends_the_call_and_no_other():
    async with pair("sim") as (left, right), service.serve(right, Adder()):
        plain = service.client(left, right.address, Adder)
        assert await plain.seen() == ""
        long = service.client(left, right.address, Adder, interceptors=[saying("x" * (CONTEXT_BYTES + 1))])
        with pytest.raises(aiote.UsageError, match="context"):
            await long.add(1, 2)
        assert await plain.add(1, 2) == 3
        most = service.client(left, right.address, Adder, interceptors=[saying("\u20ac" * CONTEXT_BYTES)])
        assert len(await most.seen()) == CONTEXT_BYTES


@contextmanager
def within(chosen: Any, name: str):
    with chosen.start_as_current_span(name):
        yield


async def test_transfers_have_spans_below_one_that_is_recorded():
    chosen, spans = tracer()
    async with linked("sim") as (left, right):
        source, target = left.register(bytearray(64)), across(left, right, bytearray(64))
        stop = tracing.trace_transfers(left, chosen)
        await left.write(source, target)
        assert not spans.get_finished_spans()
        with within(chosen, "step"):
            await left.write_imm(source, target, 1)
            with pytest.raises(aiote.UsageError):
                await left.write(source, target[:1])
            with anyio.CancelScope() as scope:
                scope.cancel()
                await left.write(source, target)
        written, failed, cancelled, step = spans.get_finished_spans()
        assert written.name == "aiote.write_imm"
        assert written.attributes["aiote.bytes"] == 64
        assert {span.parent.span_id for span in (written, failed, cancelled)} == {step.context.span_id}
        assert failed.status.status_code is cancelled.status.status_code is StatusCode.ERROR
        assert "UsageError" in failed.status.description
        stop()
        with within(chosen, "later"):
            await left.write(source, target)
        assert len(spans.get_finished_spans()) == 5


async def test_what_is_submitted_has_a_span_until_it_is_over():
    chosen, spans = tracer()
    async with linked("sim") as (left, right):
        source, target = left.register(bytearray(64)), across(left, right, bytearray(64))
        stop = tracing.trace_transfers(left, chosen)
        left.submit_write(source, target)
        with within(chosen, "step"):
            transfer = left.submit_write_imm(source, target, 1)
            with pytest.raises(aiote.UsageError):
                left.submit_read(target, source[:1])
            dropped = left.submit_write(source, target)
            dropped.cancel()
        await transfer
        await until(dropped.done)
        failed, step, *ended = spans.get_finished_spans()
        written, cancelled = sorted(ended, key=lambda span: span.name, reverse=True)
        assert [span.name for span in (failed, written, cancelled)] == ["aiote.read", "aiote.write_imm", "aiote.write"]
        assert {span.parent.span_id for span in (failed, written, cancelled)} == {step.context.span_id}
        assert written.end_time >= step.end_time
        codes = [span.status.status_code for span in (failed, written, cancelled)]
        assert codes == [StatusCode.ERROR, StatusCode.UNSET, StatusCode.ERROR]
        assert "cancelled" in cancelled.status.description
        stop()
        assert not {name for name in vars(left) if name.startswith(("submit_", "write"))}


async def test_a_transfer_outside_of_a_trace_may_begin_one():
    chosen, spans = tracer()
    async with linked("sim") as (left, right):
        source, target = left.register(bytearray(64)), across(left, right, bytearray(64))
        tracing.trace_transfers(left, chosen, roots=True)
        await left.write(source, target)
        await left.submit_write(source, target)
    assert [span.parent for span in spans.get_finished_spans()] == [None, None]


async def test_who_is_called_back_is_so_once_and_harms_nobody(monkeypatch):
    called, reported = [], []
    monkeypatch.setattr(sys, "excepthook", lambda *error: reported.append(error[0]))
    async with linked("sim") as (left, right):
        source, target = left.register(bytearray(64)), across(left, right, bytearray(64))
        transfer = left.submit_write(source, target)
        for function in (called.append, lambda _: 1 / 0, called.append):
            transfer.add_done_callback(function)
        assert not called
        await transfer
        transfer.add_done_callback(called.append)
        assert called == [transfer] * 3
        assert reported == [ZeroDivisionError]


async def test_what_nobody_samples_has_no_span():
    chosen, spans = tracer(ALWAYS_OFF)
    async with linked("sim") as (left, right):
        tracing.trace_transfers(left, chosen)
        with within(chosen, "step"):
            await left.write(left.register(bytearray(8)), across(left, right, bytearray(8)))
    assert not spans.get_finished_spans()
