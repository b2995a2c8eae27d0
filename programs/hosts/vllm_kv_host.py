"""aiote.connectors.vllm's KV connector in vLLM: prefill and decode engines on the CPU, each in a process of its own.

`make test-connectors` runs this in an environment that has vLLM; it is no part of `make test`. One pair of processes
serves most tests: vLLM takes half a minute to start here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_models import write_model
from vllm_sides import Side, prompt, transfer_config

TOKENS, COUNT = 400, 8
LEASE_S = 3600
"""Longer than any test waits: blocks that are free again were not given up for that."""
SHORT_LEASE_S = 3.0
PROVIDERS = ["local", "socket", "tcp", "shm"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> str:
    os.environ["AIOTE_CLUSTER_KEY"] = os.urandom(16).hex()
    return write_model(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def logs(tmp_path_factory: Any) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def pair(model, logs) -> Iterator[tuple[Side, Side]]:
    prefiller = Side("prefill", model, transfer_config("kv_producer"), logs)
    decoder = Side("decode", model, transfer_config("kv_consumer"), logs)
    yield prefiller.ready(), decoder.ready()
    decoder.close()
    prefiller.close()


@pytest.fixture(scope="module")
def free(pair) -> dict[str, int]:
    """How many blocks each has when it has no request."""
    return {side.name: side.ask("free") for side in pair}


def alone(decoder: Side, tokens: list[int], count: int = COUNT) -> list[int]:
    """Return what one process makes of a prompt."""
    decoder.ask("forget")
    answer = decoder.generate(tokens, count).tokens
    decoder.ask("forget")
    return answer


@pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_prompt_computed_elsewhere_goes_on_as_in_one_process(pair, free, provider, reads):
    prefiller, decoder = pair
    prefiller.ask("rewire", transfer_config("kv_producer", provider))
    decoder.ask("rewire", transfer_config("kv_consumer", provider, reads=reads))
    expected, control = alone(decoder, prompt(TOKENS)), alone(decoder, prompt(TOKENS, 1))
    assert expected != control
    for tokens, wanted in ((prompt(TOKENS), expected), (prompt(TOKENS, 1), control)):
        params = prefiller.prefill(tokens)
        assert params["remote_num_tokens"] == TOKENS
        answer = decoder.generate(tokens, COUNT, params)
        assert (answer.tokens, answer.errors) == (wanted, [])
        name = params["remote_request_id"]
        offered, received = prefiller.ask("seen", "offered"), decoder.ask("seen", "received")
        assert len(offered[name][0]) == -(-TOKENS // 128)
        assert received == offered
        # It was the cache that came, not the prompt that was computed again: a lie about the prompt goes unnoticed.
        decoder.ask("forget")
    registered = [side.ask("facts")["registered"] for side in pair]
    lied = decoder.generate([*prompt(TOKENS - 1), 3], COUNT, prefiller.prefill(prompt(TOKENS, 1)))
    assert lied.tokens != alone(decoder, [*prompt(TOKENS - 1), 3])
    for side in pair:
        facts = side.ask("facts")
        assert facts["aiote"] == facts["vllm"], "all pages that a NIC could touch in the meantime are vLLM's own"
    # What moved them has had every block of the three requests from, or to, vLLM's storage, and nothing else.
    moves, answers = (decoder, prefiller) if reads else (prefiller, decoder)
    facts = moves.ask("facts")
    assert moves.ask("moved") == [(facts["vllm"][0], 3 * -(-TOKENS // 128) * facts["block"])]
    assert answers.ask("moved") == []
    assert [side.ask("facts")["registered"] for side in pair] == registered, "a request registers nothing"
    for side in pair:
        side.ask("forget")
        side.until(lambda side=side: side.ask("free") == free[side.name])


@pytest.fixture(scope="module")
def others(model, logs, pair) -> Iterator[tuple[Side, Side]]:
    """A producer that computes prompts in chunks of 128 tokens, and a consumer with 11 blocks, one of them vLLM's."""
    chunked = Side(
        "chunked", model, transfer_config("kv_producer"), logs, max_num_batched_tokens=128, max_model_len=512
    )
    small = Side(
        "small", model, transfer_config("kv_consumer"), logs, kv_cache_memory_bytes=11 << 16, max_model_len=768
    )
    yield chunked.ready(), small.ready()
    small.close()
    chunked.close()


@pytest.fixture
def local(pair) -> tuple[Side, Side]:
    """The pair, over shared memory, with nothing in its caches."""
    for side, role in zip(pair, ("kv_producer", "kv_consumer"), strict=True):
        side.ask("rewire", transfer_config(role, kv_lease_duration=LEASE_S))
        side.ask("forget")
        side.ask("seen", "offered")
        side.ask("seen", "received")
    return pair


def test_of_a_prefix_that_is_here_nothing_is_moved(local, free):
    prefiller, decoder = local
    expected = alone(decoder, prompt(TOKENS))
    params = prefiller.prefill(prompt(TOKENS))
    decoder.ask("seen", "received")
    decoder.generate(prompt(TOKENS)[:300], 1)
    assert decoder.generate(prompt(TOKENS), COUNT, params).tokens == expected
    (sums,) = decoder.ask("seen", "received").values()
    assert [value != 0 for value in sums[0]] == [False, False, True, True]
    # All that its producer has is here: nothing comes, and the producer need not wait for anybody.
    params = prefiller.prefill(prompt(TOKENS)[:200])
    assert decoder.generate(prompt(TOKENS), COUNT, params).tokens == expected
    for side in local:
        side.ask("forget")
        side.until(lambda side=side: side.ask("free") == free[side.name])
    assert decoder.ask("seen", "received") == {}


def test_parameters_that_make_no_sense_are_as_none(local):
    prefiller, decoder = local
    expected = alone(decoder, prompt(TOKENS))
    params = prefiller.prefill(prompt(TOKENS))
    lies: list[dict[str, Any]] = [{"aiote": None}, {"remote_num_tokens": "all"}, {"remote_request_id": ["x"]}]
    for lie in lies:
        assert decoder.generate(prompt(TOKENS), COUNT, {**params, **lie}).tokens == expected
        decoder.ask("forget")
    decoder.ask("rewire", transfer_config("kv_consumer", policy="recompute"))
    nobody = {**params, "aiote": {"addresses": ["aiote://nobody"], "first_tokens": [0]}}
    assert decoder.generate(prompt(TOKENS), COUNT, nobody).tokens == expected
    assert decoder.ask("failures") == 1
    decoder.ask("forget")
    assert decoder.generate(prompt(TOKENS), COUNT, params).tokens == expected
    assert decoder.ask("failures") == 0


def test_two_producers_one_of_which_computes_in_chunks(local, others):
    prefiller, decoder = local
    chunked, _ = others
    expected = [alone(decoder, prompt(TOKENS, seed)) for seed in range(6)]
    prefillers = [prefiller, chunked] * 3
    under_way = [
        decoder.add(prompt(TOKENS, seed), COUNT, one.prefill(prompt(TOKENS, seed)))
        for seed, one in enumerate(prefillers)
    ]
    assert [decoder.wait(name).tokens for name in under_way] == expected
    offered = {**prefiller.ask("seen", "offered"), **chunked.ask("seen", "offered")}
    assert decoder.ask("seen", "received") == offered
    assert len(offered) == 6


def test_a_request_that_is_preempted_goes_on(local, others):
    """Of two requests, each of which grows to 6 blocks, where there are 10."""
    prefiller, decoder = local
    small = others[1]
    expected = [alone(decoder, prompt(TOKENS, seed), 300) for seed in range(2)]
    has = small.ask("free")
    small.ask("count_preemptions")
    under_way = [small.add(prompt(TOKENS, seed), 300, prefiller.prefill(prompt(TOKENS, seed))) for seed in range(2)]
    assert [small.wait(name).tokens for name in under_way] == expected
    assert small.ask("preempted") > 0
    small.ask("forget")
    assert small.ask("free") == has


@pytest.mark.parametrize("renews", [True, False], ids=["renewed", "not-renewed"])
@pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])
def test_a_request_that_waits_for_blocks_keeps_its_cache(pair, free, reads, renews):
    """The decode engine has no blocks for two leases: what it renews is kept, and what it does not is given up."""
    prefiller, decoder = pair
    prefiller.ask("rewire", transfer_config("kv_producer", kv_lease_duration=SHORT_LEASE_S))
    often = SHORT_LEASE_S if renews else LEASE_S
    decoder.ask("rewire", transfer_config("kv_consumer", reads=reads, kv_lease_duration=often))
    expected = alone(decoder, prompt(TOKENS))
    prefiller.ask("forget")
    decoder.ask("occupy")
    params = prefiller.prefill(prompt(TOKENS))
    began = time.monotonic()
    name = decoder.add(prompt(TOKENS), COUNT, params)
    decoder.until(lambda: time.monotonic() > began + 2 * SHORT_LEASE_S)
    prefiller.ask("forget")
    held = free["prefill"] - prefiller.ask("free")
    assert held == (-(-TOKENS // 128) if renews else 0)
    decoder.ask("occupy")
    answer = decoder.wait(name)
    assert (answer.reason, answer.tokens) == (("length", expected) if renews else ("error", []))
    assert decoder.ask("failures") == (0 if renews else 1)
    for side in pair:
        side.ask("forget")
        side.until(lambda side=side: side.ask("free") == free[side.name])


def test_beside_another_connector(local, tmp_path):
    """vLLM's MultiConnector with its ExampleConnector, which keeps caches in files: each answers for its own."""

    def both(role: str) -> dict[str, Any]:
        example = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
        }
        children = [transfer_config(role), example]
        extra = {"connectors": children}
        return {**transfer_config(role), "kv_connector": "MultiConnector", "kv_connector_module_path": None} | {
            "kv_connector_extra_config": extra
        }

    prefiller, decoder = local
    expected = [alone(decoder, prompt(TOKENS, seed)) for seed in range(2)]
    lie = [*prompt(TOKENS - 1), 3]
    true = alone(decoder, lie)
    prefiller.ask("rewire", both("kv_producer"))
    decoder.ask("rewire", both("kv_consumer"))
    files = []
    for seed in range(2):
        params = prefiller.prefill(prompt(TOKENS, seed))
        files += [set(tmp_path.iterdir()).difference(*files)]
        assert decoder.generate(prompt(TOKENS, seed), COUNT, params).tokens == expected[seed]
        decoder.ask("forget")
    # Of a prompt that has no files, what came by the parameters is what is decoded, whatever the prompt is.
    assert decoder.generate(lie, COUNT, prefiller.prefill(prompt(TOKENS, 1))).tokens != true
    decoder.ask("forget")
    # Without parameters it is the files: with those of the other prompt the tokens are others.
    (first,), (second,) = files
    assert decoder.generate(prompt(TOKENS), COUNT).tokens == expected[0]
    decoder.ask("forget")
    for path, place in ((first, tmp_path / "kept"), (second, first), (tmp_path / "kept", second)):
        path.rename(place)
    assert decoder.generate(prompt(TOKENS), COUNT).tokens != expected[0]
