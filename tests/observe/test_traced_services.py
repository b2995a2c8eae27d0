"""Spans of what aiote's own services call: a weight update and a KV request are one trace each, over all engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from aiote import service
from aiote.observe import tracing
from aiote.weights import Controller, Layout, Replicate, serve_source, serve_target
from support.engines.opening import opened, pair
from support.kv.caches import Model, Side, fill
from support.kv.worlds import compute, world

pytestmark = pytest.mark.libfabric


class Traces:
    """The spans of some engines, each of which has a tracer of its own, as in a process of its own."""

    def __init__(self) -> None:
        self._exporters: list[InMemorySpanExporter] = []

    def tracer(self) -> Any:
        provider, exporter = TracerProvider(), InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        self._exporters.append(exporter)
        return provider.get_tracer("test")

    def follow(self, engine: Any) -> Any:
        """Trace the calls and transfers of an engine; return its tracer."""
        tracer = self.tracer()
        client, server = [tracing.client_interceptor(tracer)], [tracing.server_interceptor(tracer)]
        service.intercept_all(engine, client=client, server=server)
        tracing.trace_transfers(engine, tracer)
        return tracer

    @property
    def spans(self) -> list[Any]:
        return [span for exporter in self._exporters for span in exporter.get_finished_spans()]

    def below(self, root: str) -> dict[str, set[str]]:
        """Return the names of the spans of the trace that a span begins, each with the names of its parents."""
        (begun,) = (span for span in self.spans if span.name == root)
        mine = [span for span in self.spans if span.context.trace_id == begun.context.trace_id]
        names = {span.context.span_id: span.name for span in mine}
        found: dict[str, set[str]] = {}
        for span in mine:
            if span is not begun:
                found.setdefault(f"{span.kind.name} {span.name}", set()).add(names[span.parent.span_id])
        return found


async def test_a_weight_update_is_one_trace():
    traces, layout = Traces(), Layout.over([0], {"w": ((64, 64), "F32", Replicate())})
    source, target = np.ones((64, 64), np.float32), np.zeros((64, 64), np.float32)
    async with opened("local") as one, opened("local") as other, opened("local") as chief:
        tracer = [traces.follow(engine) for engine in (one, other, chief)][2]
        async with (
            serve_source(one, layout, 0, {"w": source}, controllers=[chief.address]),
            serve_target(other, layout, 0, {"w": target}, replica="a", share_memory=False, controllers=[chief.address]),
        ):
            controller = Controller(chief, [one.address], [other.address])
            with tracer.start_as_current_span("update"):
                await controller.update(1)
    assert np.array_equal(target, source)
    found = traces.below("update")
    calls = [f"Source/1.{name}" for name in ("describe", "prepare", "send")]
    check(found, "update", [f"aiote.weights.{name}" for name in (*calls, "Target/1.update", "Target/1.commit")])
    assert found["INTERNAL aiote.write"] == {"aiote.weights.Source/1.send"}


def check(found: dict[str, set[str]], root: str, calls: list[str]) -> None:
    """Each call has a span at its client, below the root, and one at its server, below the client's."""
    for call in calls:
        assert found[f"CLIENT {call}"] == {root}
        assert found[f"SERVER {call}"] == {call}


async def test_a_kv_request_is_one_trace():
    traces = Traces()
    async with (
        world("local", Side(), Side(), Model(layers=3, item=64, state=5)) as w,
        anyio.create_task_group() as group,
    ):
        here, there = w.rows(19)
        fill(w.left, here, 20)
        tracer = [traces.follow(side.engine) for side in (w.producers[0], w.consumers[0])][1]
        group.start_soon(compute, w.producers[0], "r", 19, here)
        with tracer.start_as_current_span("request"):
            async with w.consumers[0].receive(w.places, "r", tokens=19, rows=there) as reception:
                await reception.arrived()
    found = traces.below("request")
    check(found, "request", [f"kvcache.Transfers/1.{name}" for name in ("describe", "open", "push")])
    assert found["INTERNAL aiote.write_pages"] == {"kvcache.Transfers/1.push"}


class Adder(service.Service):
    """What is called."""

    @service.method
    async def add(self, one: int, other: int) -> int:
        """Add."""
        return one + other


async def test_what_runs_around_every_call_is_outermost_and_ends():
    heard: list[str] = []

    def saying(name: str) -> Callable[..., Any]:
        async def intercept(_: Any, proceed: Any) -> Any:
            heard.append(name)
            return await proceed()

        return intercept

    async with pair("local") as (left, right):
        stops = [
            service.intercept_all(left, client=[saying("all")]),
            service.intercept_all(right, server=[saying("served")]),
        ]
        async with service.serve(right, Adder(), interceptors=[saying("server")]):
            client = service.client(left, right.address, Adder, interceptors=[saying("client")])
            assert await client.add(1, 2) == 3
            assert heard == ["all", "client", "served", "server"]
            for stop in (*stops, *stops):
                stop()
            assert await client.add(1, 2) == 3
            assert heard[4:] == ["client", "server"]
