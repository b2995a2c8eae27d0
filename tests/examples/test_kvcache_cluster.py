"""The cluster of examples/kvcache: what it generates, what it streams, what it shows, and clients that leave."""

from __future__ import annotations

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import anyio
import httpx
import pytest

from aiote.demo.one_process import run_reference
from support.checkout.browser import Browser
from support.kv.example_cluster import Cluster, events, reference_settings

pytestmark = [pytest.mark.libfabric, pytest.mark.one_library]

LONG = "the pump house at the end of the pier had been painted green, then grey, then green again; " * 3
PROMPTS = ["x", "two engines and a page", LONG, LONG + "and white", LONG[:63], LONG[:64], LONG[:127] + "\u00e9"]
# What takes a large model its time, so that something can happen in the middle of a prompt.
SLOWER_S = 0.03
SLOW = "a very long prompt, of which nobody awaits the end. " * 38
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    running = Cluster(tmp_path_factory.mktemp("cluster"), prefill=2, decode=2, slower=SLOWER_S)
    yield running
    running.kill()


@pytest.fixture(scope="module")
def references():
    async def all_of_them():
        return await run_reference(reference_settings(NEW_TOKENS), [text.encode() for text in PROMPTS], lambda: None)

    return [result.tokens for result in anyio.run(all_of_them)]


def test_tokens_are_those_of_one_process(cluster, references):
    with ThreadPoolExecutor(4) as pool:
        # Twice, for the second time the beginnings are in the prefillers' caches.
        found = list(pool.map(cluster.complete, PROMPTS * 2, [NEW_TOKENS] * len(PROMPTS) * 2))
    assert found == references * 2
    prefill = [member["stats"] for member in cluster.members("prefill")]
    assert sum(stats["cached_tokens"] for stats in prefill) >= 256
    assert all(stats["done"] for stats in prefill)
    cluster.until_idle()


def test_an_answer_has_openai_s_form(cluster):
    answer = cluster.ask("a question", 3).json()
    assert (answer["object"], answer["model"], len(answer["choices"])) == ("text_completion", "aiote-demo", 1)
    assert answer["usage"] == {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["text"].encode()) == ("length", bytes(choice["token_ids"]))
    assert cluster.client.get("/v1/models").json()["data"][0]["id"] == "aiote-demo"
    body = {"prompt": [256, *b"a question"], "max_tokens": 3, "temperature": 0}
    as_tokens = cluster.client.post("/v1/completions", json=body)
    assert as_tokens.json()["choices"][0]["token_ids"] == choice["token_ids"]


def test_a_stream_has_the_same_tokens(cluster, references):
    with cluster.stream(LONG, NEW_TOKENS) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        *parts, last, done = events(response.iter_lines())
    assert [part["choices"][0]["token_ids"] for part in parts] == [[token] for token in references[PROMPTS.index(LONG)]]
    assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
    assert len({part["id"] for part in [*parts, last]}) == 1


def test_malformed_and_too_large_bodies_are_refused(cluster):
    def post(**given):
        return cluster.client.post("/v1/completions", **given).status_code

    kind = {"content-type": "application/json"}
    assert post(content=b"{", headers=kind) == post(content=b"[]", headers=kind) == 400
    assert post(content=b"{}", headers={**kind, "x-long": "x" * (17 << 10)}) == 400
    assert post(data={"prompt": "x"}) == 415
    assert post(content=b" " * (2 << 20), headers=kind) == 413
    assert cluster.client.post("/scale", json={"prefill": -1}).status_code == 400
    assert cluster.client.post("/scale", json={"prefill": 17}).status_code == 400


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/"), ("GET", "/events"), ("GET", "/stats"), ("POST", "/scale"), ("POST", "/v1/completions")],
)
def test_nobody_is_served_without_the_token_or_under_another_name(cluster, method, path):
    body = {"prefill": 5, "prompt": "x"} if method == "POST" else None
    for url in (cluster.url, *(member["url"] for member in cluster.members())):
        for headers in ({}, {"authorization": "Bearer x"}):
            assert httpx.request(method, url + path, json=body, headers=headers, trust_env=False).status_code == 401
    right = {"authorization": f"Bearer {cluster.token}"}
    elsewhere = {**right, "host": "evil.example:8000"}
    assert httpx.request(method, cluster.url + path, json=body, headers=elsewhere, trust_env=False).status_code == 403
    if method == "POST":
        # What a form on another page could send has its token in the URL, if anywhere.
        found = httpx.post(f"{cluster.url}{path}?token={cluster.token}", json=body, trust_env=False)
        assert found.status_code == 401
    assert len(cluster.members("prefill")) == 2


def test_the_decode_servers_generate_for_the_router_alone(cluster):
    (url, *_) = (member["url"] for member in cluster.members("decode"))
    body = {"tokens": [1], "max_tokens": 1, "prefillers": ["aiote://127.0.0.1:1"]}
    assert httpx.post(f"{url}/generate", json=body, trust_env=False).status_code == 401


def counted(stats, role, name):
    return sum(member["stats"][name] for member in stats["members"] if member["role"] == role)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_all_the_way(cluster, stream):
    before = cluster.until_idle()
    address = urlsplit(cluster.url)
    body = b'{"prompt": "%s", "max_tokens": 8, "stream": %s}' % (
        b"%d" % stream + SLOW.encode(),
        str(stream).lower().encode(),
    )
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(head % (cluster.token.encode(), len(body)) + body)
        held = cluster.until(lambda stats: stats["totals"]["pages_held"] > 200, "pages held on both sides")
        assert held["requests"]["open"] == 1
    left = time.monotonic()
    after = cluster.until_idle()
    assert time.monotonic() - left < 20, "the limit for a prefiller that says nothing is 30 s"
    assert after["requests"]["left"] == before["requests"]["left"] + 1
    assert counted(after, "decode", "cancelled") == counted(before, "decode", "cancelled") + 1
    assert counted(after, "prefill", "cancelled") == counted(before, "prefill", "cancelled") + 1
    assert after["requests"]["failed"] == before["requests"]["failed"]
    # Nobody was disconnected for it: the prefill server has confirmed.
    assert counted(after, "decode", "peers") == counted(before, "decode", "peers")
    assert len(cluster.complete("the next one")) == 8


def test_the_page_and_its_numbers_are_served(cluster):
    page = cluster.client.get("/")
    assert page.status_code == 200
    assert "<title>aiote" in page.text
    assert "http://" not in page.text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page.text
    with cluster.client.stream("GET", "/events") as response:
        seen = [numbers for numbers, _ in zip(events(response.iter_lines()), range(2), strict=False)]
    assert seen[0]["time"] < seen[1]["time"]
    assert [member["name"] for member in seen[1]["members"]] == ["prefill-1", "prefill-2", "decode-1", "decode-2"]
    for member in seen[1]["members"]:
        assert member["state"] == "ready"
        assert member["stats"]["pages"] == 8 * 2048 // 8
        (rail,) = member["rails"]
        assert (rail["name"], rail["provider"], rail["state"]) == ("lo", "tcp", "up")
        assert rail["gib_s"] >= 0
        if member["role"] == "prefill":
            assert rail["bytes_carried"] >= member["stats"]["bytes_written"]


@pytest.mark.needs_browser
def test_the_page_in_a_browser_shows_members_and_requests(cluster, tmp_path):
    with Browser(tmp_path) as page:
        page.open(cluster.page)
        page.until("document.querySelectorAll('#members tr').length == 4")
        assert page.value("document.getElementById('state').textContent") == "2 prefill and 2 decode servers"
        rows = page.value("[...document.querySelectorAll('#members tr')].map(row => row.innerText)")
        assert all("ready" in row and "lo tcp up" in row and "iB/s" in row for row in rows)
        tile = "[...document.querySelectorAll('.tile')].find(tile => tile.innerText.includes('requests done'))"
        done = f"Number({tile}.querySelector('b').textContent)"
        before = page.value(done)
        cluster.complete("one more, while somebody looks")
        page.until(f"{done} == {before + 1}")
        # Each of the four has a line by now: there was a first token, and seconds have passed.
        page.until("[...document.querySelectorAll('figure')].every(plot => plot.querySelector('polyline'))")
        titles = page.value("[...document.querySelectorAll('figcaption span')].map(title => title.textContent)")
        assert [title.split()[0] for title in titles] == ["written", "time", "queue:", "pages"]
        assert page.errors == []


TOO_WIDE = """[...document.querySelectorAll('body, td, th, figure, .tile')]
    .filter(element => element.scrollWidth > element.clientWidth + 1
                       || element.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
    .map(element => element.outerHTML)"""


@pytest.mark.needs_browser
@pytest.mark.parametrize("width", [1280, 800, 400])
def test_the_page_fits_its_window(cluster, tmp_path, width):
    with Browser(tmp_path) as page:
        page.tell("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        page.open(cluster.page)
        page.until("document.querySelectorAll('#members tr').length == 4")
        assert page.value("document.documentElement.clientWidth") <= width
        assert page.value(TOO_WIDE) == []


def busy_of(stats):
    prefill = [member for member in stats["members"] if member["role"] == "prefill"]
    return [member for member in prefill if member["stats"]["requests"] and member["gib_s"] > 0]


def test_a_drained_prefiller_finishes_what_it_has(cluster):
    cluster.until_idle()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(cluster.complete, "1. " + SLOW, 4)
        (busy,) = busy_of(cluster.until(busy_of, "a prefiller that writes"))
        os.kill(busy["stats"]["pid"], signal.SIGTERM)
        cluster.until(lambda stats: any(member["state"] == "draining" for member in stats["members"]), "draining")
        # It takes nothing new meanwhile, and nobody waits for it.
        assert len(cluster.complete("a short one", 2)) == 2
        assert not answer.done()
        assert len(answer.result()) == 4
    after = cluster.until_idle()
    assert (after["requests"]["retried"], counted(after, "decode", "failovers")) == (0, 0)
    cluster.program.until(lambda: f"{busy['name']} ended with status 0" in cluster.program.err, "end")
    cluster.until_members(2, 2)


def test_a_drained_cluster_finishes_what_it_has(cluster):
    """The last one: it ends the cluster."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(cluster.complete, SLOW, 12)
        cluster.until(lambda stats: stats["totals"]["pages_held"] > 200, "a request under way")
        cluster.program.send(signal.SIGTERM)
        assert len(answer.result()) == 12
    assert cluster.program.end() == 0
