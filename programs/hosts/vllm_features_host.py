"""The KV connector with what vLLM has beside plain attention: what its CPU build can do is transferred, and what it
cannot do is shown by its own error.
"""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from vllm_models import said, write_config
from vllm_sides import ENVIRONMENT, PATIENCE_S, Side, prompt, transfer_config

TOKENS, COUNT = 400, 4
WORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "MLA": ("mla", {}),
    "FP8": ("llama", {"kv_cache_dtype": "fp8"}),
    "sliding windows beside full attention": ("windows", {}),
    "blocks of 32 tokens": ("llama", {"block_size": 32}),
}
FAILS: dict[str, tuple[str, dict[str, Any], str]] = {
    "sleep mode": ("llama", {"enable_sleep_mode": True}, "Sleep mode is not supported on current platform"),
    "prefill contexts that are split": (
        "llama",
        {"prefill_context_parallel_size": 2},
        "Model Runner V1 does not support: prefill context parallel",
    ),
    "decode contexts that are split": (
        "llama",
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        "Decode context parallelism for GQA/MQA requires",
    ),
    "sparse attention and its indexer": ("sparse", {}, "Sparse Attention is not supported on CPU"),
}
# Of vLLM's libraries for processors, the one that is loaded has no scan, or its scan fails.
SCAN = ("IndexError: Dimension out of range", "has no attribute 'selective_scan_fwd'")
WITHOUT: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "states (mamba)": ("states", {}, SCAN),
    "states beside attention": ("hybrid", {}, SCAN),
    "pipeline parallel": ("llama", {"pipeline_parallel_size": 2}, ("in step_with_batch_queue",)),
}
"""They fail without a connector, too, at the first prompt."""


@pytest.fixture(scope="module", autouse=True)
def key() -> None:
    os.environ["AIOTE_CLUSTER_KEY"] = os.urandom(16).hex()


@pytest.mark.parametrize("what", WORKS)
def test_what_the_cpu_build_can_do_is_transferred(tmp_path, what):
    """With weights that vLLM draws its tokens say little: what is compared are the blocks."""
    kind, settings = WORKS[what]
    model = write_config(tmp_path / "model", kind)
    settings = {"load_format": "dummy", **settings}
    prefiller = Side("prefill", model, transfer_config("kv_producer"), tmp_path, **settings)
    decoder = Side("decode", model, transfer_config("kv_consumer"), tmp_path, **settings)
    try:
        has = {side.name: side.ask("free") for side in (prefiller, decoder)}
        expected = decoder.generate(prompt(TOKENS), COUNT).tokens
        decoder.ask("forget")
        answer = decoder.generate(prompt(TOKENS), COUNT, prefiller.prefill(prompt(TOKENS)))
        assert (answer.tokens, answer.errors) == (expected, [])
        offered, received = prefiller.ask("seen", "offered"), decoder.ask("seen", "received")
        assert received == offered
        (sums,) = received.values()
        assert all(len(set(group)) > 1 for group in sums.values()), "blocks differ"
        for side in (prefiller, decoder):
            facts = side.ask("facts")
            assert facts["aiote"] == facts["vllm"], "all pages that a NIC could touch in the meantime are vLLM's own"
            side.ask("forget")
            side.until(lambda side=side: side.ask("free") == has[side.name])
    finally:
        decoder.close()
        prefiller.close()


def error(folder: Path, kind: str, config: dict[str, Any] | None, settings: dict[str, Any]) -> str:
    """Return the error of a process of its own."""
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("spawn")
    pipe, its = context.Pipe()
    arguments = (its, write_config(folder / "model", kind), config, settings, str(folder / "log"))
    process = context.Process(target=said, args=arguments)
    process.start()
    try:
        assert pipe.poll(PATIENCE_S), (folder / "log").read_text()[-3000:]
        return str(pipe.recv())
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("what", FAILS)
def test_what_the_cpu_build_cannot_do(tmp_path, what):
    kind, settings, why = FAILS[what]
    assert why in error(tmp_path, kind, transfer_config("kv_both"), settings)


@pytest.mark.parametrize("what", WITHOUT)
def test_what_the_cpu_build_cannot_do_without_a_connector_either(tmp_path, what):
    kind, settings, why = WITHOUT[what]
    said = error(tmp_path, kind, None, settings)
    assert any(one in said for one in why), said


def test_a_cache_of_states_is_refused_by_name(tmp_path):
    assert "does not support a cache of MambaSpec" in error(tmp_path, "states", transfer_config("kv_both"), {})
