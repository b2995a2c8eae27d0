"""vLLM's KV connector layer by layer: both engines are told of a prompt at once, as a proxy that names it does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from vllm_models import write_model
from vllm_sides import Side, prompt, transfer_config

LAYERS, COUNT = 16, 8
IN_STEP = 384
"""The most tokens of a step."""
WHOLE, CHUNKS = 300, 900
LEASE_S = 3600
"""Longer than any test waits: blocks that are free again were not given up for that."""
LAYER_S = 0.1
"""The most that the prefill engine waits before it writes a layer, so that a decode engine has to wait for it."""
NUMBERS = count()


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> str:
    os.environ["AIOTE_CLUSTER_KEY"] = os.urandom(16).hex()
    return write_model(tmp_path_factory.mktemp("model") / "llama", num_hidden_layers=LAYERS)


def config(role: str, **extra: Any) -> dict[str, Any]:
    return transfer_config(role, layers=True, kv_lease_duration=LEASE_S, **extra)


@pytest.fixture(scope="module")
def sides(model, tmp_path_factory) -> Iterator[dict[str, Side]]:
    """Two prefill engines, one of which is killed, and a decode engine."""
    logs: Path = tmp_path_factory.mktemp("logs")
    made = {
        name: Side(name, model, config("kv_producer"), logs, max_num_batched_tokens=IN_STEP)
        for name in ("prefill", "doomed")
    }
    made["decode"] = Side("decode", model, config("kv_consumer", policy="recompute"), logs)
    for name, side in made.items():
        side.ready()
        if name != "decode":
            side.addresses = side.ask("addresses")
    yield made
    for side in made.values():
        side.close()


@pytest.fixture(scope="module")
def free(sides) -> dict[str, int]:
    return {name: side.ask("free") for name, side in sides.items()}


@pytest.fixture(scope="module")
def expected(sides) -> dict[int, list[int]]:
    """What one process makes of each prompt."""
    found = {}
    for tokens in (WHOLE, CHUNKS):
        found[tokens] = sides["decode"].generate(prompt(tokens), COUNT).tokens
        sides["decode"].ask("forget")
    return found


def both(sides: dict[str, Side], tokens: int, prefiller: str = "prefill") -> tuple[str, str]:
    """Tell both engines of a prompt, the decode engine first; return the names of the requests."""
    prefill, decode, name = sides[prefiller], sides["decode"], f"ours-{next(NUMBERS)}"
    told = {"do_remote_prefill": True, "remote_request_id": name, "aiote": {"addresses": prefill.addresses}}
    receiving = decode.add(prompt(tokens), COUNT, told)
    prefill.until(lambda: prefill.ask("is_asked", name))
    return prefill.add(prompt(tokens), 1, {"do_remote_decode": True, "transfer_id": name}), receiving


def all_free(sides: dict[str, Side], free: dict[str, int], *names: str) -> None:
    for name in names:
        sides[name].until(lambda name=name: sides[name].ask("free") == free[name])
        # A prefix is forgotten only when no request holds blocks.
        assert sides[name].ask("forget")


@pytest.mark.parametrize("tokens", [WHOLE, CHUNKS], ids=["whole", "chunks"])
def test_layers_move_while_later_ones_are_computed(sides, free, expected, tokens):
    """The trace has each layer that vLLM saved, in order, and how many writes were over by then."""
    prefill, decode = sides["prefill"], sides["decode"]
    all_free(sides, free, "prefill")
    prefill.ask("trace_saves")
    sending, receiving = both(sides, tokens)
    answer = decode.wait(receiving)
    assert (answer.tokens, answer.errors) == (expected[tokens], [])
    assert (prefill.wait(sending).params or {})["remote_num_tokens"] == tokens
    trace = prefill.ask("saved_layers")
    print(f"{tokens} tokens:", *(f"{(at - trace[0][0]) * 1e3:.1f} ms: {landed}" for at, _, landed in trace), sep="\n  ")
    assert [layer for _, layer, _ in trace] == [layer for _, layer, _ in trace[:LAYERS]] * -(-tokens // IN_STEP)
    assert trace == sorted(trace)
    assert [landed for _, _, landed in trace] == sorted(landed for _, _, landed in trace)
    assert trace[-1][2] > 0, "some layers had arrived before the last one was computed"
    all_free(sides, free, "decode")


def test_a_prompt_that_is_preempted_between_two_chunks_comes(sides, free, expected):
    prefill, decode = sides["prefill"], sides["decode"]
    all_free(sides, free, "prefill")
    prefill.ask("count_preemptions")
    prefill.ask("preempt_before", 2)
    sending, receiving = both(sides, CHUNKS)
    answer = decode.wait(receiving)
    assert (answer.tokens, answer.errors) == (expected[CHUNKS], [])
    prefill.wait(sending)
    assert prefill.ask("preempted") == 1
    decode.ask("forget")


def test_a_prompt_that_is_aborted_on_either_side_keeps_no_block(sides, free, expected):
    prefill, decode = sides["prefill"], sides["decode"]
    sending, receiving = both(sides, CHUNKS)
    decode.abort(receiving)
    prefill.wait(sending)
    sending, receiving = both(sides, CHUNKS)
    prefill.abort(sending)
    # The decode engine hears of it, and computes the prompt.
    assert decode.wait(receiving).tokens == expected[CHUNKS]
    sending, receiving = both(sides, WHOLE)
    prefill.wait(sending)
    assert decode.wait(receiving).tokens == expected[WHOLE]
    all_free(sides, free, "decode", "prefill")


def test_an_engine_that_dies_between_two_layers_costs_no_block(sides, free, expected):
    decode, doomed = sides["decode"], sides["doomed"]
    decode.ask("failures")
    both_named = both(sides, WHOLE, "doomed")
    assert decode.wait(both_named[1]).tokens == expected[WHOLE]
    doomed.wait(both_named[0])
    decode.ask("forget")
    doomed.ask("trace_saves", LAYERS // 2)
    _, receiving = both(sides, WHOLE, "doomed")
    assert decode.wait(receiving).tokens == expected[WHOLE]
    assert decode.ask("failures") == 1
    all_free(sides, free, "decode")


# The decode engine computes a request once its first layer is here.


@pytest.fixture(scope="module")
def early(sides, free, expected) -> Side:
    """The decode engine, which waits for each layer alone."""
    decode = sides["decode"]
    decode.ask("rewire", config("kv_consumer", policy="recompute", layer_loads=True))
    decode.ask("trace_loads")
    return decode


@pytest.mark.parametrize("tokens", [WHOLE, CHUNKS], ids=["whole", "chunks"])
def test_a_layer_is_computed_while_later_ones_are_to_come(sides, free, expected, early, tokens):
    """The trace has each layer that vLLM waited for, and how many layers of the request were here after the wait."""
    all_free(sides, free, "prefill")
    sides["prefill"].ask("slow", LAYER_S)
    sending, receiving = both(sides, tokens)
    answer = early.wait(receiving)
    assert (answer.tokens, answer.errors) == (expected[tokens], [])
    sides["prefill"].wait(sending)
    sides["prefill"].ask("slow", 0.0)
    trace = early.ask("loaded_layers")
    print(f"{tokens} tokens:", *(f"{(at - trace[0][0]) * 1e3:.1f} ms: {here}" for at, here in trace), sep="\n  ")
    assert len(trace) == LAYERS
    assert all(here > number for number, (_, here) in enumerate(trace))
    assert trace[0][1] < LAYERS, "the first layer was computed before the last one was here"
    all_free(sides, free, "decode")


def test_an_engine_that_dies_between_two_loads_costs_no_block(sides, free, expected, early):
    assert early.generate(prompt(WHOLE), COUNT).tokens == expected[WHOLE]
    early.ask("failures")
    all_free(sides, free, "decode")
    sides["prefill"].ask("slow", LAYER_S)
    sides["prefill"].ask("trace_saves", LAYERS // 2)
    _, receiving = both(sides, WHOLE)
    assert early.wait(receiving).tokens == expected[WHOLE]
    assert early.ask("failures") == 1
    all_free(sides, free, "decode")
