"""Make the pictures of docs/gallery.md from real runs; each is under 100 KB.

usage: gallery.py terminal OUT.svg [--columns 100] [--rows 40] [--after SECONDS] --run COMMAND
       gallery.py trace OUT.svg
       gallery.py failover OUT.svg

`terminal` runs a command in a terminal (tmux), and draws the screen after so many seconds or when the command has
ended. `trace` updates the weights of two engines from two others, and draws the OpenTelemetry spans of the update.
`failover` kills a rail and restores it while a Prometheus server scrapes the sender, and draws what Prometheus has.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import aiote
from aiote import service
from aiote.observe import tracing
from aiote.testing import Fabric, NicModel
from aiote.weights import Controller, Layout, Shard, serve_source, serve_target

MIB = 1 << 20
MOST_BYTES = 100_000
PHASE_S = 10.0
LOADERS = 4
LABELS_PT = 120  # the width of a span's name
SCRAPE = "global: {scrape_interval: 500ms, scrape_timeout: 500ms}\n"
SCRAPED = 'scrape_configs: [{{job_name: aiote, static_configs: [{{targets: ["127.0.0.1:{port}"]}}]}}]\n'
RATE = 'rate(aiote_rail_carried_bytes_total{engine="sender"}[2s]) / 1e6'
FAILED = 'aiote_rail_failovers_total{engine="sender"}'
P99 = "histogram_quantile(0.99, sum by (le) (rate(aiote_wait_seconds_bucket[2s]))) * 1000"


# A terminal.


def screen(command: str, columns: int, rows: int, after: float) -> str:
    """Run a command in a terminal, and return its screen with its colours."""
    name = f"aiote-gallery-{os.getpid()}"
    tmux = ["tmux", "-L", name, "-f", "/dev/null"]
    shell = f"{command}; tmux -L {name} wait-for -S over; sleep 600"
    session = ["new-session", "-d", "-x", str(columns), "-y", str(rows), shell]
    subprocess.run([*tmux, *session], check=True)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([*tmux, "wait-for", "over"], timeout=after, check=True)
        shown = subprocess.run([*tmux, "capture-pane", "-e", "-p"], check=True, capture_output=True, text=True)
    finally:
        subprocess.run([*tmux, "kill-server"], check=True)
    return shown.stdout.rstrip()


def draw_screen(out: Path, shown: str, columns: int, title: str) -> None:
    """Draw a screen as SVG that asks no other host for a font."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(shown))
    picture = console.export_svg(title=title)
    picture = re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.DOTALL)
    out.write_text(picture.replace("Fira Code", "ui-monospace"))


# A trace.


class Traces:
    """The finished spans of engines, each with a tracer of its own, as in a process of its own."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self._exporter = InMemorySpanExporter()
        self.names: dict[str, None] = {}

    def follow(self, engine: aiote.Engine, name: str) -> Any:
        """Trace the calls and transfers of an engine; return its tracer."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor

        provider = TracerProvider(resource=Resource({"service.name": name}))
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        tracer = provider.get_tracer("gallery")
        client, server = [tracing.client_interceptor(tracer)], [tracing.server_interceptor(tracer)]
        service.intercept_all(engine, client=client, server=server)
        tracing.trace_transfers(engine, tracer)
        self.names[name] = None
        return tracer

    def below(self, root: str) -> list[tuple[int, Any]]:
        """Return the spans of the trace that a span begins, each after its parent, with its depth."""
        spans = sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time or 0)
        (begun,) = (span for span in spans if span.name == root)

        def walk(span: Any, depth: int) -> Iterator[tuple[int, Any]]:
            yield depth, span
            for child in spans:
                if child.parent is not None and child.parent.span_id == span.context.span_id:
                    yield from walk(child, depth + 1)

        return list(walk(begun, 0))


async def traced_update() -> tuple[Traces, list[tuple[int, Any]]]:
    """Update the weights of two inference ranks from two trainers, and return the spans."""
    shapes = {f"layer{number}": (1024, 2048) for number in range(3)}
    rows, columns = (
        Layout.over(range(2), {name: (shape, "F32", Shard(axis)) for name, shape in shapes.items()}) for axis in (0, 1)
    )
    traces = Traces()
    async with AsyncExitStack() as opened:
        chief, *ranks = [await opened.enter_async_context(aiote.open_engine("local")) for _ in range(5)]
        tracer = traces.follow(chief, "controller")
        for number, engine in enumerate(ranks):
            traces.follow(engine, f"{'trainer' if number < 2 else 'inference'} {number % 2}")
            given = {"controllers": [chief.address]}
            if number < 2:
                tensors = {name: np.ones((512, 2048), np.float32) for name in shapes}
                served: Any = serve_source(engine, rows, number, tensors, **given)
            else:
                tensors = {name: np.zeros((1024, 1024), np.float32) for name in shapes}
                served = serve_target(engine, columns, number - 2, tensors, replica="a", **given)
            await opened.enter_async_context(served)
        addresses = [engine.address for engine in ranks]
        controller = Controller(chief, addresses[:2], addresses[2:])
        await controller.update(1)  # so that the next one has its plan and its connections
        with tracer.start_as_current_span("update"):
            await controller.update(2)
    return traces, traces.below("update")


def draw_trace(out: Path, traces: Traces, spans: Sequence[tuple[int, Any]]) -> None:
    """Draw a bar for each span, below its parent, in the colour of its engine."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 0.21 * len(spans) + 0.8), layout="constrained")
    axis = figure.subplots()
    colours, origin = list(traces.names), spans[0][1].start_time
    for row, (_, span) in enumerate(spans):
        name = span.resource.attributes["service.name"]
        left, width = (span.start_time - origin) * 1e-6, (span.end_time - span.start_time) * 1e-6
        axis.barh(row, width, left=left, color=f"C{colours.index(name)}")
    labels = ["\N{NO-BREAK SPACE}" * 3 * depth + span.name.removeprefix("aiote.weights.") for depth, span in spans]
    axis.set_yticks(range(len(spans)), labels, fontsize="small", ha="left")
    axis.tick_params(axis="y", pad=LABELS_PT)
    axis.set_ylim(len(spans) - 0.4, -0.6)
    axis.set_xlabel("ms since the update began")
    for number, name in enumerate(colours):
        axis.barh(0, 0, color=f"C{number}", label=name)
    axis.legend(fontsize="small", loc="lower right")
    save(figure, out)


# A failover that Prometheus saw.


@contextmanager
def prometheus(folder: Path, scraped: int) -> Iterator[str]:
    """Run a Prometheus server that scrapes a port, and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        own = free.getsockname()[1]
    config = folder / "prometheus.yml"
    config.write_text(SCRAPE + SCRAPED.format(port=scraped))
    options = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as log:
        command = ["prometheus", *options, f"--web.listen-address=127.0.0.1:{own}"]
        with subprocess.Popen(command, stdout=log, stderr=log) as process:
            try:
                yield f"http://127.0.0.1:{own}"
            finally:
                process.terminate()


def asked(address: str, expression: str, began: float) -> dict[str, tuple[list[float], list[float]]]:
    """Return the values of an expression since a time, by rail: seconds and values."""
    query = {"query": expression, "start": began, "end": time.time(), "step": 0.5}
    with urllib.request.urlopen(f"{address}/api/v1/query_range?{urllib.parse.urlencode(query)}") as got:
        results = json.load(got)["data"]["result"]
    found = {}
    for result in results:
        pairs = [(at - began, float(value)) for at, value in result["values"]]
        found[result["metric"].get("rail", "all")] = ([at for at, _ in pairs], [value for _, value in pairs])
    return found


@asynccontextmanager
async def writers(sender: aiote.Engine, receiver: aiote.Engine) -> AsyncIterator[None]:
    """Write and count, again and again, in several tasks."""

    async def write(imm: int) -> None:
        target = sender.attach(receiver.register(bytearray(MIB)).descriptor)
        source = sender.register(bytearray(MIB))
        with receiver.counter(imm) as arrivals:
            while True:
                waiting = asyncio.ensure_future(arrivals.wait(1))
                await sender.write_imm(source, target, imm)
                await waiting

    tasks = [asyncio.ensure_future(write(imm + 1)) for imm in range(LOADERS)]
    yield
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def failed_over() -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """Kill a rail, restore it, and return the series of each expression."""
    from prometheus_client import CollectorRegistry, start_http_server

    from aiote.observe.latency import Latencies
    from aiote.observe.prometheus import EngineCollector

    models = [NicModel(name="fast", gbps=1.6), NicModel(name="slow", gbps=0.8)]
    with Fabric(seed=1, model=models) as network, tempfile.TemporaryDirectory() as folder:
        async with network.open_engine() as sender, network.open_engine() as receiver:
            registry = CollectorRegistry()
            registry.register(EngineCollector(sender, "sender", Latencies(sender, every=1)))
            registry.register(EngineCollector(receiver, "receiver", Latencies(receiver, every=1)))
            server, thread = start_http_server(0, "127.0.0.1", registry)
            async with writers(sender, receiver):
                with prometheus(Path(folder), server.server_port) as address:
                    await asyncio.sleep(PHASE_S)
                    began = time.time()
                    for change in (network.kill_rail, network.restore_rail):
                        await asyncio.sleep(PHASE_S)
                        change(sender, "sim0")
                    await asyncio.sleep(PHASE_S)
                    expressions = (RATE, FAILED, P99)
                    series = {each: await asyncio.to_thread(asked, address, each, began) for each in expressions}
            server.shutdown()
            server.server_close()
            thread.join()
    return series


def draw_series(out: Path, series: dict[str, dict[str, tuple[list[float], list[float]]]]) -> None:
    """Draw the panels: each expression's lines, with the times at which the rail died and came back."""
    from matplotlib.figure import Figure

    units = {RATE: "MB/s, by rail", FAILED: "failovers, by rail", P99: "p99 of waits, ms"}
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    for axis, (expression, unit) in zip(figure.subplots(3, 1, sharex=True), units.items(), strict=True):
        for rail, (at, values) in sorted(series[expression].items()):
            axis.plot(at, values, label=rail)
        for number, text in enumerate(("sim0 dies", "sim0 is back"), 1):
            axis.axvline(number * PHASE_S, color="0.5", linestyle=":")
            axis.annotate(text, (number * PHASE_S, 0.5), xycoords=("data", "axes fraction"), fontsize="small")
        axis.set_ylim(bottom=0)
        axis.set_ylabel(unit)
        axis.set_title(expression, fontsize="small", family="monospace", loc="left")
        if len(series[expression]) > 1:
            axis.legend(fontsize="small", loc="lower left")
    axis.set_xlabel("seconds")
    save(figure, out)


def save(figure: Any, out: Path) -> None:
    """Write a picture whose text stays text, and whose bytes depend on nothing but what it shows."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "aiote"}):
        figure.savefig(out, metadata={"Date": None})


def main() -> int:
    """Make one picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("terminal", "trace", "failover"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--after", type=float, default=600.0)
    parser.add_argument("--run", default="aiote --help", metavar="COMMAND")
    given = parser.parse_args()
    if given.kind == "terminal":
        shown = screen(given.run, given.columns, given.rows, given.after)
        draw_screen(given.out, shown, given.columns, given.run)
    elif given.kind == "trace":
        draw_trace(given.out, *asyncio.run(traced_update()))
    else:
        draw_series(given.out, asyncio.run(failed_over()))
    if (size := given.out.stat().st_size) > MOST_BYTES:
        print(f"{given.out} has {size} bytes; at most {MOST_BYTES} are wanted", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
