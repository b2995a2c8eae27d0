"""A real Prometheus scrapes an engine, and each expression of the dashboard and of the page has an answer."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from prometheus_client import CollectorRegistry, generate_latest, start_http_server

from aiote import service
from aiote.kvcache import PagePool
from aiote.observe import CallTimes
from aiote.observe.latency import Latencies
from aiote.observe.prometheus import CallCollector, EngineCollector, PoolCollector
from support.engines.opening import PATIENCE_S, across, linked

DOCS = Path(__file__).parents[2] / "docs"
KNOWN_COMPLAINT = "aiote_counter_waits metric name should not include type 'counter'\n"
"""Of a name that says whose waits it counts."""
CONFIG = """
global: {{scrape_interval: 250ms, scrape_timeout: 250ms}}
scrape_configs: [{{job_name: aiote, static_configs: [{{targets: ["127.0.0.1:{port}"]}}]}}]
"""

pytestmark = [
    pytest.mark.libfabric,
    pytest.mark.one_library,
    pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian: apt-get install prometheus)"),
]


class Echo(service.Service):
    """What is called."""

    @service.method
    async def echo(self, text: str) -> str:
        """Return the text."""
        return text


def expressions() -> list[str]:
    """Return the expressions of the dashboard, for every engine and the shortest interval, and those of the page."""
    dashboard = json.loads((DOCS / "_static" / "grafana.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    page = (DOCS / "howto" / "observe.md").read_text()
    table = page[page.index("| Question | Expression |") :].split("\n\n")[0]
    return [
        *(one.replace("$__rate_interval", "5s").replace("$engine", ".*") for one in asked),
        *re.findall(r"\| `([^`]+)` \|$", table, re.MULTILINE),
    ]


def registry(engine: Any, times: CallTimes) -> CollectorRegistry:
    found = CollectorRegistry()
    found.register(EngineCollector(engine, "it", Latencies(engine, every=1, verbs=True)))
    found.register(CallCollector(times, "echo"))
    found.register(PoolCollector(PagePool(4, 4, 4), "pool"))
    return found


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def answer(port: int, expression: str) -> list[Any]:
    """Return the samples that an expression gives now; none while Prometheus is not up."""
    query = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}", timeout=PATIENCE_S) as got:
            return list(json.load(got)["data"]["result"])
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{expression}: {error.read().decode()}") from error
    except urllib.error.URLError:
        return []


async def test_promtool_has_one_complaint_about_the_names():
    async with linked("local") as (left, _):
        text = generate_latest(registry(left, CallTimes()))
    command = ["promtool", "check", "metrics"]
    done = await asyncio.to_thread(subprocess.run, command, input=text, capture_output=True)
    assert (done.stdout + done.stderr).decode() == KNOWN_COMPLAINT


@pytest.fixture
def prometheus(tmp_path):
    """A server that scrapes the first port and answers on the second."""
    ports, config = (free_port(), free_port()), tmp_path / "prometheus.yml"
    config.write_text(CONFIG.format(port=ports[0]))
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    with (tmp_path / "log").open("wb") as log:
        listen = f"--web.listen-address=127.0.0.1:{ports[1]}"
        with subprocess.Popen([*command, listen], stdout=log, stderr=log) as process:
            yield ports
            process.kill()


async def test_every_expression_has_an_answer(prometheus):
    scraped, asked = prometheus
    times = CallTimes()
    async with linked("local") as (left, right), service.serve(right, Echo()), anyio.create_task_group() as group:
        client = service.client(left, right.address, Echo, interceptors=[times.intercept])
        source, target = left.register(bytearray(1 << 16)), across(left, right, bytearray(1 << 16))
        server, thread = start_http_server(scraped, "127.0.0.1", registry(left, times))

        over = anyio.Event()

        async def load() -> None:
            while not over.is_set():
                await left.write(source, target)
                await client.echo("it")
                await anyio.sleep(0.01)

        group.start_soon(load)
        # Where an expression compares, it has no sample while its condition does not hold: Prometheus only parses it.
        conditions = [one for one in expressions() if " > 0" in one]
        silent = [one for one in expressions() if one not in conditions]
        with anyio.fail_after(PATIENCE_S):
            while silent:
                await anyio.sleep(0.5)
                found = [await anyio.to_thread.run_sync(answer, asked, one) for one in silent]
                silent = [one for one, samples in zip(silent, found, strict=True) if not samples]
        for one in conditions:
            await anyio.to_thread.run_sync(answer, asked, one)
        over.set()
    server.shutdown()
    server.server_close()
    thread.join()
