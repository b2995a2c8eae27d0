"""The KV connector in vLLM when something fails: engines that are killed or stopped, and requests that are aborted."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_models import write_model
from vllm_sides import HEARTBEAT, Side, prompt, transfer_config

TOKENS, COUNT = 400, 8
ABORTS = 200
MARGIN_S = 6.0
"""How long, beyond the time-out, a failure may take to be told on a busy machine, recomputing included."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> str:
    os.environ["AIOTE_CLUSTER_KEY"] = os.urandom(16).hex()
    return write_model(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def logs(tmp_path_factory: Any) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def sides(model, logs) -> Iterator[dict[str, Side]]:
    """Producers that are stopped and killed, one that lives; a consumer that is killed, and one that lives."""
    doomed = [f"doomed-{policy}-{reads}" for policy in ("recompute", "fail") for reads in (False, True)]
    roles = dict.fromkeys((*doomed, "prefill"), "kv_producer")
    roles |= dict.fromkeys(("doomed-decode", "decode"), "kv_consumer")
    made = {}
    for name, role in roles.items():
        made[name] = Side(name, model, transfer_config(role), logs)
    for side in made.values():
        side.ready()
    yield made
    for side in made.values():
        side.close()


@pytest.fixture(scope="module")
def free(sides) -> dict[str, int]:
    return {name: side.ask("free") for name, side in sides.items()}


@pytest.fixture(scope="module")
def expected(sides) -> list[int]:
    """What one process makes of the prompt."""
    decoder = sides["decode"]
    tokens = decoder.generate(prompt(TOKENS), COUNT).tokens
    decoder.ask("forget")
    return tokens


def all_free(side: Side, count: int) -> None:
    """Wait until a side has its blocks again."""
    side.ask("forget")
    side.until(lambda: side.ask("free") == count)


@pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])
def test_no_block_is_freed_before_its_drain_is_confirmed(sides, free, expected, reads):
    """Freed blocks are filled with a pattern, which stays until they are used again; others go on undisturbed."""
    prefiller, decoder = sides["prefill"], sides["decode"]
    draw = random.Random(7)
    decoder.ask("rewire", transfer_config("kv_consumer", reads=reads))
    for side in (prefiller, decoder):
        side.ask("guard")
    before = decoder.ask("guarded")[2]
    moves = decoder if reads else prefiller
    moves.ask("slow", 0.02)
    under_way: list[str] = []
    aborted = 0
    while aborted < ABORTS:
        params = prefiller.prefill(prompt(TOKENS))
        if draw.random() < 0.1:
            assert decoder.wait(decoder.add(prompt(TOKENS), COUNT, params)).tokens == expected
            continue
        under_way.append(decoder.add(prompt(TOKENS), COUNT, params))
        if len(under_way) == 4:
            draw.shuffle(under_way)
            for name in under_way:
                time.sleep(draw.random() * 0.01)
                decoder.abort(name)
            aborted += len(under_way)
            under_way.clear()
    moves.ask("slow", 0)
    for side in (prefiller, decoder):
        all_free(side, free[side.name])
        filled, changed, cancelled = side.ask("guarded")
        assert filled
        assert changed == []
    assert cancelled - before > ABORTS // 4, "many were aborted on their way"
    assert decoder.generate(prompt(TOKENS), COUNT, prefiller.prefill(prompt(TOKENS))).tokens == expected


@pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_producer_that_is_gone_in_the_middle(sides, free, expected, how, policy, reads):
    """One layer has come, the other never does."""
    decoder, living, doomed = sides["decode"], sides["prefill"], sides[f"doomed-{policy}-{reads}"]
    moves = decoder if reads else doomed
    if how == "killed":
        # It was stopped before, and has gone on.
        assert decoder.generate(prompt(TOKENS), COUNT, doomed.prefill(prompt(TOKENS))).tokens == expected
    decoder.ask("forget")
    decoder.ask("rewire", transfer_config("kv_consumer", policy=policy, reads=reads))
    moves.ask("slow", math.inf)
    name = decoder.add(prompt(TOKENS), COUNT, doomed.prefill(prompt(TOKENS)))
    decoder.until(lambda: decoder.ask("layers_arrived") == 1)
    decoder.ask("failures")
    began = time.monotonic()
    doomed.signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    answer = decoder.wait(name)
    assert time.monotonic() - began < HEARTBEAT["heartbeat_timeout"] + MARGIN_S
    assert (answer.reason, answer.tokens) == (("length", expected) if policy == "recompute" else ("error", []))
    assert decoder.ask("failures") == 1
    all_free(decoder, free["decode"])
    if reads:
        decoder.ask("slow", 0)
    assert decoder.generate(prompt(TOKENS), COUNT, living.prefill(prompt(TOKENS))).tokens == expected
    all_free(decoder, free["decode"])
    if how == "stopped":
        doomed.signal(signal.SIGCONT)
        doomed.ask("slow", 0)
        all_free(doomed, free[doomed.name])


def test_a_consumer_that_is_killed_leaves_no_block_with_its_producer(sides, free, expected):
    prefiller, doomed, decoder = sides["prefill"], sides["doomed-decode"], sides["decode"]
    prefiller.ask("slow", math.inf)
    doomed.add(prompt(TOKENS), COUNT, prefiller.prefill(prompt(TOKENS)))
    doomed.until(lambda: doomed.ask("layers_arrived") == 1)
    doomed.signal(signal.SIGKILL)
    began = time.monotonic()
    all_free(prefiller, free["prefill"])
    assert time.monotonic() - began < HEARTBEAT["heartbeat_timeout"] + MARGIN_S
    prefiller.ask("slow", 0)
    assert decoder.generate(prompt(TOKENS), COUNT, prefiller.prefill(prompt(TOKENS))).tokens == expected
