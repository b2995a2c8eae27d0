"""The scheduler's side of the KV connector for vLLM: what requests say of each other, and blocks to rows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote.connectors.vllm.requests import BlockRow, Offered, RequestTable, Steps, Wanted

ADDRESS = "aiote://127.0.0.1:38503/5bd42e82b292382d3c88b9c0ebc9ba67.18eac90921963061"
NOTHING = Steps([], [], [])


def table(block_tokens: dict[int, int], produces: bool = True) -> RequestTable:
    made = RequestTable("engine", block_tokens, produces=produces, settings={"tp_size": 1})
    made.addresses = [ADDRESS]
    return made


def told(tokens: int = 40, blocks: list[list[int]] | None = None, sizes: dict[int, int] | None = None) -> Any:
    """Return what the one who receives a request is told, by way of JSON."""
    sizes = sizes or {0: 16}
    blocks = blocks or [[7, 3, 9]]
    params = table(sizes).record_finished("r", {"do_remote_decode": True}, tokens, blocks)
    return json.loads(json.dumps(params))


def test_a_prompt_that_is_computed_is_offered_once():
    producer = table({0: 16})
    params = producer.record_finished("r", {"do_remote_decode": True}, 40, [[7, 3, 9, 4]])
    assert params is not None
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert (params["remote_host"], params["remote_port"], params["tp_size"]) == ("127.0.0.1", 38503, 1)
    assert (params["remote_engine_id"], params["remote_block_ids"]) == ("engine", [[7, 3, 9]])
    assert producer.take_steps(0.0) == Steps([Offered("r", 40, {0: BlockRow([7, 3, 9], 0)})], [], [])
    assert producer.take_steps(0.0) == NOTHING


@pytest.mark.parametrize("why", ["not asked for", "aborted", "no blocks", "no producer", "no workers"])
def test_what_is_not_offered(why):
    producer = table({0: 16}, produces=why != "no producer")
    if why == "no workers":
        producer.addresses = []
    params = {} if why == "not asked for" else {"do_remote_decode": True}
    tokens, blocks = 0 if why == "aborted" else 16, [[]] if why == "no blocks" else [[1]]
    assert producer.record_finished("r", params, tokens, blocks) is None
    assert producer.record_finished("s", None, tokens, blocks) is None
    assert producer.take_steps(0.0) == NOTHING


def test_what_is_here_already_is_not_received():
    consumer, params = table({0: 16}), told()
    assert consumer.external(params, 40, 16) == 24
    assert consumer.external(params, 30, 16) == 14
    assert consumer.external(params, 40, 40) == 0
    assert consumer.external(None, 40, 0) == consumer.external({"do_remote_decode": True}, 40, 0) == 0
    consumer.record_allocated("d", params, 40, [[5, 1, 2]], 24)
    assert consumer.take_steps(0.0) == Steps([], [Wanted("d", "r", [ADDRESS], 40, {0: BlockRow([1, 2], 1)})], [])
    # Nothing is received twice.
    assert consumer.external(params, 40, 0) == 0
    consumer.record_allocated("d", params, 40, [[5, 1, 2]], 0)
    assert consumer.take_steps(0.0) == NOTHING


def test_a_request_that_waits_is_renewed_until_it_has_come():
    consumer = table({0: 16})
    gone = {**told(), "remote_request_id": "gone"}
    consumer.record_arrived("d", told(), 100.0)
    consumer.record_arrived("gone", gone, 103.0)
    for params in (None, {}, {"do_remote_decode": True}, {**told(), "aiote": None}):
        consumer.record_arrived("other", params, 103.0)
    assert consumer.take_steps(104.9) == NOTHING
    assert consumer.take_steps(105.0) == NOTHING._replace(renewed={ADDRESS: ["r", "gone"]})
    assert consumer.take_steps(109.9) == NOTHING
    assert consumer.record_finished("gone", gone, 0, [[]]) is None
    assert consumer.take_steps(110.0) == Steps([], [Wanted("gone", "gone", [ADDRESS], 40, {})], [], {ADDRESS: ["r"]})
    consumer.record_allocated("d", told(), 40, [[5, 1, 2]], 40)
    assert consumer.take_steps(115.0).renewed == {ADDRESS: ["r"]}, "it may take long to come"
    consumer.record_received("d")
    assert consumer.take_steps(120.0) == NOTHING
    # Not at once, however long nobody has waited.
    consumer.record_arrived("next", told(), 300.0)
    assert consumer.take_steps(300.0) == NOTHING
    consumer.record_allocated("next", told(), 40, [[5, 1, 2]], 0)
    assert consumer.take_steps(400.0).renewed is None


def test_an_abort_ends_what_is_under_way_and_releases_what_is_not():
    consumer = table({0: 16})
    params = told()
    consumer.record_allocated("d", params, 40, [[5, 1, 2]], 40)
    consumer.take_steps(0.0)
    assert consumer.record_finished("d", params, 0, [[5, 1, 2]]) is None
    assert consumer.take_steps(0.0) == Steps([], [], ["d"])
    consumer.record_received("d")
    assert consumer.record_finished("d", params, 0, [[5, 1, 2]]) is None
    assert consumer.take_steps(0.0) == NOTHING
    never, here = told(), told()
    assert consumer.record_finished("never", never, 0, [[]]) is None
    consumer.record_allocated("here", here, 40, [[5, 1, 2]], 0)
    unwanted = [Wanted(name, "r", [ADDRESS], 40, {}) for name in ("never", "here")]
    assert consumer.take_steps(0.0) == Steps([], unwanted, [])
    assert consumer.record_finished("never", never, 0, [[]]) is None
    assert consumer.take_steps(0.0) == NOTHING


def test_pages_that_a_window_has_gone_past_are_on_neither_side():
    sizes = {0: 16, 3: 16}
    producer = table(sizes)
    blocks = {0: [7, 3, 9], 3: [0, 0, 8]}
    params = producer.record_finished("r", {"do_remote_decode": True}, 40, [blocks[0], [], [], blocks[3]])
    assert params is not None
    assert producer.take_steps(0.0).offered == [Offered("r", 40, {0: BlockRow([7, 3, 9], 0), 3: BlockRow([8], 2)})]
    consumer = table(sizes)
    consumer.record_allocated("d", params, 40, [[4, 5, 6], [], [], [0, 2, 1]], 40)
    assert consumer.take_steps(0.0).wanted[0].rows == {0: BlockRow([4, 5, 6], 0), 3: BlockRow([1], 2)}


@pytest.mark.parametrize(
    "lie",
    [
        {"aiote": None},
        {"aiote": {"addresses": [], "first_tokens": [0]}},
        {"aiote": {"addresses": [3], "first_tokens": [0]}},
        {"aiote": {"addresses": [ADDRESS], "first_tokens": [-1]}},
        {"remote_request_id": "x" * 257},
        {"remote_request_id": None},
        {"remote_num_tokens": -1},
        {"remote_num_tokens": 1.5},
    ],
)
def test_parameters_that_make_no_sense_are_as_none(lie):
    consumer, params = table({0: 16}), {**told(), **lie}
    assert consumer.external(params, 40, 0) == 0
    consumer.record_allocated("d", params, 40, [[1, 2, 3]], 0)
    assert consumer.record_finished("d", params, 0, [[1, 2, 3]]) is None
    assert consumer.take_steps(0.0) == NOTHING


@given(st.integers(1, 200), st.integers(0, 200), st.integers(0, 200), st.sampled_from([1, 4, 16]), st.integers(1, 32))
def test_both_sides_mean_the_same_tokens(computed, prompt, cached, size, decoder_size):
    """What is received has each token that is missing, and of none more than a block before or behind."""
    blocks = list(range(1, 300))
    producer, consumer = table({0: size}), table({0: decoder_size})
    params = producer.record_finished("r", {"do_remote_decode": True}, computed, [blocks])
    offered = producer.take_steps(0.0).offered[0].rows[0]
    assert len(offered.blocks) * size >= computed > (len(offered.blocks) - 1) * size
    cached -= cached % decoder_size
    count = consumer.external(params, prompt, cached)
    assert count == max(0, min(prompt, computed) - cached)
    consumer.record_allocated("d", params, prompt, [blocks], count)
    (wanted,) = consumer.take_steps(0.0).wanted
    if not count:
        assert wanted.rows == {}
        return
    row = wanted.rows[0]
    first, stop = row.start * decoder_size, (row.start + len(row.blocks)) * decoder_size
    assert first == cached
    assert stop - decoder_size < cached + count <= stop
    assert row.blocks == blocks[row.start : row.start + len(row.blocks)]
