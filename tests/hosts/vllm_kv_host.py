"""aiote.connectors.vllm's KV connector in vLLM: prefill and decode engines on the CPU, each in a process of its own.

`make test-connectors` runs this in an environment that has vLLM; it is no part of `make test`. One pair of processes
serves most tests: vLLM takes half a minute to start here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_sides import Side, prompt, transfer_config, write_model

TOKENS, COUNT = 400, 8
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
    for side in pair:
        facts = side.ask("facts")
        assert sorted(map(tuple, facts["aiote"])) == facts["vllm"], "vLLM's own memory is what is registered"
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
    lied = decoder.generate([*prompt(TOKENS - 1), 3], COUNT, prefiller.prefill(prompt(TOKENS, 1)))
    assert lied.tokens != alone(decoder, [*prompt(TOKENS - 1), 3])
    for side in pair:
        side.ask("forget")
        side.until(lambda side=side: side.ask("free") == free[side.name])
