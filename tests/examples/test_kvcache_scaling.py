"""The cluster of examples/kvcache while it grows, shrinks and loses members, under load."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from clusters import PATIENCE_S, Cluster

pytestmark = [pytest.mark.libfabric, pytest.mark.one_library]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    running = Cluster(tmp_path_factory.mktemp("cluster"), prefill=1, decode=1)
    yield running
    running.kill()


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


def test_killed_members_are_replaced_and_their_requests_retried(cluster, load):
    cluster.scale(prefill=2, decode=2)
    cluster.until_members(2, 2)
    names = {member["name"] for member in cluster.members()}
    running = load(6, prompt_bytes=600, max_tokens=6, alike=0.2)
    cluster.until(lambda stats: stats["requests"]["open"], "load")
    prefill, decode = (cluster.members(role)[0]["name"] for role in ("prefill", "decode"))
    os.kill(pid_of(cluster, prefill), signal.SIGKILL)
    cluster.until(lambda stats: prefill not in {member["name"] for member in stats["members"]}, "the loss")
    os.kill(pid_of(cluster, decode), signal.SIGKILL)
    cluster.until(lambda stats: len({member["name"] for member in stats["members"]} - names) == 2, "replacements")
    figures(running)
    stats = cluster.until_idle()
    assert stats["requests"]["failed"] == 0
    assert {prefill, decode}.isdisjoint(member["name"] for member in stats["members"])


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
