"""The cluster of examples/kvcache while it grows, shrinks and loses members, under load."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from support.kv.example_cluster import PATIENCE_S, events

pytestmark = [pytest.mark.libfabric, pytest.mark.one_library]


@pytest.fixture
def load(start, cluster):
    def run(seconds, **options):
        more = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        return start("kvcache/load.py", cluster.page, "--seconds", seconds, "--clients", 3, *more)

    return run


def figures(program):
    status = program.end()
    found = json.loads(program.out)
    assert (status, found["failed"], found["failures"]) == (0, 0, []), found
    assert found["done"] > 5
    return found


def pid_of(cluster, name):
    return next(member["stats"]["pid"] for member in cluster.members() if member["name"] == name)


def test_no_request_fails_while_members_come_and_go(cluster, load):
    running = load(10, prompt_bytes=200, max_tokens=6, leave=0.1)
    cluster.scale(prefill=2, decode=2)
    cluster.until_members(2, 2)
    cluster.until(lambda stats: all(member["stats"]["done"] for member in stats["members"]), "work for each")
    cluster.scale(prefill=1, decode=1)
    cluster.until_members(1, 1)
    figures(running)
    stats = cluster.until_idle()
    assert stats["requests"]["failed"] == 0


def names_of(stats):
    return {member["name"] for member in stats["members"]}


def test_a_killed_member_is_replaced_and_its_requests_go_on_elsewhere(cluster, load):
    cluster.scale(prefill=2, decode=2)
    cluster.until_members(2, 2)
    before = cluster.stats()
    running = load(6, prompt_bytes=600, max_tokens=40, alike=0.2)
    for role in ("prefill", "decode"):
        (name, *_) = (member["name"] for member in cluster.members(role))

        def busy(stats, name=name):
            return any(
                member["name"] == name and (member["stats"] or {}).get("requests") for member in stats["members"]
            )

        cluster.until(busy, f"work for {name}")
        os.kill(pid_of(cluster, name), signal.SIGKILL)
        cluster.until(lambda stats, name=name: name not in names_of(stats), "the loss")
    cluster.until(lambda stats: len(names_of(stats) - names_of(before)) == 2, "replacements")
    figures(running)
    stats = cluster.until_idle()
    assert stats["requests"]["failed"] == before["requests"]["failed"]


@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 1, "seed": 11}], ids=["greedy", "drawn"])
def test_an_answer_goes_on_where_its_decode_server_died(cluster, how):
    cluster.scale(prefill=1, decode=1)
    cluster.until_members(1, 1)
    cluster.until_idle()
    count = 600
    whole = cluster.ask("an answer that is long enough", count, **how).json()["choices"][0]["token_ids"]
    (server,) = cluster.members("decode")
    body = {"prompt": "an answer that is long enough", "max_tokens": count, "stream": True, **how}
    with cluster.client.stream("POST", "/v1/completions", json=body) as response:
        found = events(response.iter_lines())
        parts = [next(found) for _ in range(3)]
        os.kill(server["stats"]["pid"], signal.SIGKILL)
        *more, done = found
    tokens = [token for part in parts + more for token in part["choices"][0]["token_ids"]]
    assert (tokens, done) == (whole, "[DONE]")
    cluster.until_members(1, 1)
    assert cluster.stats()["requests"]["retried"] > 0


def test_two_deaths_start_two_while_others_join_and_drain(cluster, load):
    cluster.scale(prefill=2, decode=2)
    cluster.until_members(2, 2)
    before = cluster.stats()
    running = load(10, prompt_bytes=400, max_tokens=6, leave=0.1)
    cluster.until(lambda stats: stats["requests"]["open"], "load")
    # All of the first ones die at once, but for one of each role.
    dead = [cluster.members(role)[0]["name"] for role in ("prefill", "decode")]
    pids = [pid_of(cluster, name) for name in dead]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    cluster.until(lambda stats: len(names_of(stats) - names_of(before)) == 2 and not names_of(stats) & {*dead}, "two")
    cluster.until_members(2, 2)
    # One more joins, and the newest drains while there is work.
    cluster.scale(prefill=3)
    cluster.until_members(3, 2)
    cluster.scale(prefill=2, decode=1)
    cluster.until_members(2, 1)
    figures(running)
    stats = cluster.until_idle()
    assert stats["requests"]["failed"] == before["requests"]["failed"]
    # A member that has drained has left the registry before its process ends.
    cluster.program.until(lambda: len(cluster.program.children()) == 4, "router and three members alone")


def test_an_interrupt_ends_all_at_once(cluster):
    """The last one: it ends the cluster."""
    pids = [member["stats"]["pid"] for member in cluster.members()]
    begun = time.monotonic()
    assert cluster.end(signal.SIGINT) == 130
    assert time.monotonic() - begun < PATIENCE_S / 2
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.parametrize(("name", "text"), [("minimal", "7 pages"), ("pages", "100 tokens")])
def test_the_smallest_programs_move_every_page(start, name, text):
    program = start(f"kvcache/{name}.py")
    assert program.end() == 0
    assert program.out == f"{text} in 4 layers: True\n"
    assert program.err == ""
