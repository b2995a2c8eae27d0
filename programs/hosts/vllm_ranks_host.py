"""The KV connector between tensor-parallel groups of different sizes, with vLLM's own workers on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from vllm_models import write_model
from vllm_sides import Side, prompt, transfer_config

TOKENS, COUNT = 400, 8
FULL, HEADS = 400 // 128, 2


@pytest.fixture(scope="module")
def groups(tmp_path_factory: Any) -> Iterator[dict[int, Side]]:
    """A side for both roles of one rank, and one of two."""
    os.environ["AIOTE_CLUSTER_KEY"] = os.urandom(16).hex()
    model, logs = write_model(tmp_path_factory.mktemp("model") / "llama"), tmp_path_factory.mktemp("logs")
    made = {
        ranks: Side(f"ranks-{ranks}", model, transfer_config("kv_both"), logs, tensor_parallel_size=ranks)
        for ranks in (1, 2)
    }
    for side in made.values():
        side.ready()
    yield made
    for side in made.values():
        side.close()


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
def test_heads_are_divided_and_put_together(groups, prefill, decode):
    """Sums in another order round otherwise, so what is compared are blocks, head by head, and the first token."""
    prefiller, decoder = groups[prefill], groups[decode]
    has = {side.name: side.ask("free") for side in groups.values()}
    found = []
    for seed in range(4):
        alone = decoder.generate(prompt(TOKENS, seed), COUNT).tokens
        decoder.ask("forget")
        params = prefiller.prefill(prompt(TOKENS, seed))
        # The last one is not full, and what is generated goes there.
        offered = prefiller.ask("heads", params["remote_block_ids"][0][:FULL])
        answer = decoder.generate(prompt(TOKENS, seed), COUNT, params)
        assert (answer.reason, answer.errors) == ("length", [])
        assert decoder.ask("heads_received", params["remote_request_id"], FULL) == offered
        assert len({value for heads in offered for value in heads}) == FULL * HEADS, "they differ"
        found.append(answer.tokens[0] == alone[0])
        for side in groups.values():
            side.ask("forget")
            side.until(lambda side=side: side.ask("free") == has[side.name])
    assert sum(found) >= 3
    lied = decoder.generate([*prompt(TOKENS - 1), 3], COUNT, prefiller.prefill(prompt(TOKENS, 1)))
    decoder.ask("forget")
    assert lied.tokens != decoder.generate([*prompt(TOKENS - 1), 3], COUNT).tokens
    decoder.ask("forget")
