"""The cluster of examples/kvcache, asked by OpenAI's own client."""

from __future__ import annotations

import math
import os

import anyio
import httpx
import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from aiote.demo import RequestCache, plan
from aiote.demo import tokens as vocabulary
from aiote.demo.one_process import run_reference
from support.checkout.page_blocks import block, replaced
from support.kv.example_cluster import CONTEXT, PATIENCE_S, reference_settings

pytestmark = [pytest.mark.libfabric, pytest.mark.one_library]

MODEL = "aiote-demo"
PROMPTS = ["Once upon a time", "two engines and a page", "x"]
NEW_TOKENS = 12


@pytest.fixture
def client(cluster):
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=cluster.token, timeout=PATIENCE_S, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def references():
    """Return what one process says to each prompt, in tokens."""

    async def all_of_them():
        texts = [text.encode() for text in PROMPTS]
        return await run_reference(reference_settings(NEW_TOKENS), texts, lambda: None)

    return [result.tokens for result in anyio.run(all_of_them)]


def text_of(tokens):
    return vocabulary.decode(tokens).decode(errors="replace")


def greedy(client, prompt=PROMPTS[0], **more):
    given = {"model": MODEL, "max_tokens": NEW_TOKENS, "temperature": 0, **more}
    return client.completions.create(prompt=prompt, **given)


def test_a_list_of_prompts_is_answered_in_its_order(client, references):
    answer = greedy(client, PROMPTS)
    assert [choice.text for choice in answer.choices] == [text_of(tokens) for tokens in references]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    prompts = sum(len(text) + 1 for text in PROMPTS)
    assert answer.usage.prompt_tokens == prompts
    assert answer.usage.completion_tokens == sum(map(len, references))
    assert answer.usage.total_tokens == prompts + answer.usage.completion_tokens
    as_tokens = greedy(client, [vocabulary.encode(text.encode()) for text in PROMPTS])
    assert [choice.text for choice in as_tokens.choices] == [choice.text for choice in answer.choices]


def test_a_stream_ends_with_its_usage_where_that_is_asked_for(client, references):
    parts = list(greedy(client, PROMPTS, stream=True, stream_options={"include_usage": True}))
    *chunks, last = parts
    assert last.choices == []
    assert last.usage.completion_tokens == sum(map(len, references))
    assert all(chunk.usage is None for chunk in chunks)
    for index, tokens in enumerate(references):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(choice.text for choice in mine) == text_of(tokens)
        assert [choice.finish_reason for choice in mine if choice.finish_reason] == ["length"]
    assert all(chunk.choices and chunk.usage is None for chunk in greedy(client, stream=True))


def test_the_page_s_program_prints_what_the_cluster_answers(cluster, monkeypatch, capsys):
    monkeypatch.setenv("KVCACHE_TOKEN", cluster.token)
    exec(replaced(block("serving", 0), "http://localhost:8000", cluster.url), {"openai": openai, "os": os})
    assert capsys.readouterr().out


def test_an_answer_ends_before_a_stop(client, references):
    text = text_of(references[0])
    stop = text[4:7]
    place = text.index(stop)
    answer = greedy(client, stop=stop)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text[:place], "stop")
    assert answer.usage.completion_tokens == place + len(stop)
    parts = list(greedy(client, stop=["never there", stop], stream=True))
    assert "".join(part.choices[0].text for part in parts) == text[:place]
    # Nothing that could be a part of the stop was given out before.
    assert parts[-1].choices[0].finish_reason == "stop"
    unstopped = greedy(client, stop=text[-2:] + "?")
    assert (unstopped.choices[0].text, unstopped.choices[0].finish_reason) == (text, "length")


def test_a_prompt_is_repeated_where_that_is_asked_for(client, references):
    wanted = PROMPTS[0] + text_of(references[0])
    assert greedy(client, echo=True).choices[0].text == wanted
    assert "".join(part.choices[0].text for part in greedy(client, echo=True, stream=True)) == wanted


def test_without_a_limit_an_answer_fills_the_context(client):
    prompt = "y" * (CONTEXT - 41)  # and the mark of beginning
    answer = greedy(client, prompt, max_tokens=None)
    assert answer.usage.completion_tokens == 40 or answer.choices[0].finish_reason == "stop"
    assert greedy(client, max_tokens=openai.omit).usage.completion_tokens == 16


def test_log_probabilities_of_a_completion(client, references):
    (choice,) = greedy(client, logprobs=3).choices
    found = choice.logprobs
    assert found.tokens == [chr(token) for token in references[0]]
    assert found.text_offset == list(range(NEW_TOKENS))
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert len(top) == 3
        assert top[token] == logprob == max(top.values()) < 0
        assert sum(map(math.exp, top.values())) < 1
    parts = [part.choices[0].logprobs for part in greedy(client, logprobs=3, stream=True)]
    assert [one for part in parts if part for one in part.token_logprobs] == found.token_logprobs


def by_one_process(tokens):
    """Return the log-probabilities [tokens - 1, vocabulary] that one process gives for what follows each token."""
    settings = reference_settings(1)
    model = settings.model()
    cache = RequestCache(settings.memory(model.config), range(settings.pages_for(len(tokens))))
    logits = []
    for part in plan(len(tokens), settings.chunk_tokens):
        span = model.begin(tokens[part.start : part.stop], part.start)
        for layer in range(model.config.layers):
            model.layer(layer, span, cache)
        logits.append(model.all_logits(span))
    values = np.concatenate(logits)[:-1].astype(np.float64)
    return values - np.log(np.exp(values).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_log_probabilities_of_a_prompt(client, references, stream):
    # More than one chunk, a character of two bytes, and what the first request has left in the kept pages.
    prompt = "k\u00e4se, " * 12
    greedy(client, prompt)
    given = {"echo": True, "logprobs": 2, "stream": stream}
    answers = list(greedy(client, prompt, **given)) if stream else [greedy(client, prompt, **given)]
    choices = [answer.choices[0] for answer in answers]
    assert "".join(choice.text for choice in choices) == prompt + greedy(client, prompt).choices[0].text
    names, own, tops, offsets = (
        [one for choice in choices if choice.logprobs for one in getattr(choice.logprobs, name)]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    )
    tokens = vocabulary.encode(prompt.encode())
    assert (len(names), own[0], tops[0]) == (len(tokens) + NEW_TOKENS, None, None)
    wanted = by_one_process(tokens)
    # Batches of other sizes sum in another order, in 24 bits: some processors differ by 2 in a million.
    assert own[1 : len(tokens)] == pytest.approx(wanted[range(len(tokens) - 1), tokens[1:]].tolist(), rel=2e-5)
    for top, row in zip(tops[1 : len(tokens)], wanted, strict=True):
        assert sorted(top.values())[-2:] == pytest.approx(np.sort(row)[-2:].tolist(), rel=2e-5)
    assert [names[0], *names[2:5]] == ["<|begin|>", "bytes:\\xc3", "bytes:\\xa4", "s"]
    assert offsets[:5] == [0, 0, 1, 1, 2]
    assert offsets[len(tokens)] == len(prompt)


def test_a_prompt_is_judged_without_an_answer(cluster, client):
    """As tools that compare models do: which of several texts is the likeliest."""
    prompts = [vocabulary.encode(PROMPTS[0].encode()), [vocabulary.BEGIN]]
    for given in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        answer = greedy(client, prompts, max_tokens=0, echo=True, logprobs=0, n=2, **given)
        parts = list(answer) if given else [answer]
        found = sorted((one for part in parts for one in part.choices if one.logprobs), key=lambda one: one.index)
        assert [choice.text for choice in found] == [PROMPTS[0], PROMPTS[0], "", ""]
        assert [len(choice.logprobs.tokens) for choice in found] == [len(PROMPTS[0]) + 1] * 2 + [1, 1]
        assert [[*top.values()] for top in found[0].logprobs.top_logprobs[1:]] == [
            [value] for value in found[0].logprobs.token_logprobs[1:]
        ]
        ends = {one.finish_reason for part in parts for one in part.choices} - {None}
        assert (parts[-1].usage.completion_tokens, ends) == (0, {"length"})
    assert greedy(client, max_tokens=0, echo=True).choices[0].text == PROMPTS[0]
    cluster.until_idle()


def test_a_chat_is_answered_whole_and_as_a_stream(client):
    messages = [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": [{"type": "text", "text": "What moves "}, {"type": "text", "text": "the pages?"}]},
    ]
    given = {"model": MODEL, "messages": messages, "max_completion_tokens": 6, "temperature": 0}
    answer = client.chat.completions.create(**given, logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    assert (answer.object, choice.message.role, choice.finish_reason) == ("chat.completion", "assistant", "length")
    text = "system: Answer in one word.\nuser: What moves the pages?\nassistant: "
    assert answer.usage.prompt_tokens == len(text) + 1
    assert choice.message.content == greedy(client, text, max_tokens=6).choices[0].text
    assert "".join(one.token for one in choice.logprobs.content) == choice.message.content
    assert all(one.top_logprobs[0].logprob == one.logprob for one in choice.logprobs.content)
    assert all(len(one.top_logprobs) == 2 for one in choice.logprobs.content)
    chunks = list(client.chat.completions.create(**given, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    # What was answered may come back as it is.
    messages += [choice.message.model_dump(), {"role": "user", "content": "Why?"}]
    assert client.chat.completions.create(**given).usage.completion_tokens == 6


def test_a_seed_makes_drawn_answers_repeatable(client):
    def drawn(**more):
        return [choice.text for choice in greedy(client, temperature=1, n=3, **more).choices]

    first = drawn(seed=7)
    assert first == drawn(seed=7)
    assert len({*first, *drawn(seed=8)}) > 3
    # Almost nothing of the probability is left to draw from.
    assert set(drawn(seed=7, top_p=1e-9)) == {greedy(client).choices[0].text}
    assert drawn() != drawn()


REFUSED = [
    ({"prompt": []}, 400, "prompt", None),
    ({"prompt": ["a text", 5]}, 400, "prompt", None),
    ({"prompt": [[]]}, 400, "prompt", None),
    ({"prompt": [258]}, 400, "prompt", None),
    ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "invalid_value"),
    ({"prompt": "x", "max_tokens": "1"}, 400, "max_tokens", "invalid_value"),
    ({"prompt": "x" * CONTEXT}, 400, "max_tokens", "context_length_exceeded"),
    ({"prompt": "x", "temperature": 2.5}, 400, "temperature", "invalid_value"),
    ({"prompt": "x", "n": 129}, 400, "n", "invalid_value"),
    ({"prompt": ["x"] * 65, "n": 2}, 400, "prompt", None),
    ({"prompt": "x", "stop": ["a"] * 5}, 400, "stop", "invalid_value"),
    ({"prompt": "x", "stop": ""}, 400, "stop", "invalid_value"),
    ({"prompt": "x", "logprobs": 6}, 400, "logprobs", "invalid_value"),
    ({"prompt": "x", "best_of": 2}, 400, "best_of", "unsupported_parameter"),
    ({"prompt": "x", "suffix": "y"}, 400, "suffix", "unsupported_parameter"),
    ({"prompt": "x", "presence_penalty": 0.5}, 400, "presence_penalty", "unsupported_parameter"),
    ({"prompt": "x", "logit_bias": {"5": 1}}, 400, "logit_bias", "unsupported_parameter"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream_options", "invalid_value"),
    (
        {"prompt": "x", "stream": True, "stream_options": {"include_obfuscation": True}},
        400,
        "stream_options",
        "invalid_value",
    ),
    ({"prompt": "x", "extra_body": {"top_k": 5}}, 400, "top_k", "unknown_parameter"),
    ({"prompt": "x", "model": "gpt-9"}, 404, "model", "model_not_found"),
]


@pytest.mark.parametrize(("given", "status", "param", "code"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_what_is_not_done_is_refused_and_says_what(client, given, status, param, code):
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(**{"model": MODEL, **given})
    error = caught.value
    assert (error.status_code, error.param, error.code) == (status, param, code)
    assert error.type == "invalid_request_error"
    assert param in error.message
    assert set(error.body) == {"message", "type", "param", "code"}


REFUSED_CHATS = [
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "unsupported_parameter"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens", None),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages[0].name", "unknown_parameter"),
]


@pytest.mark.parametrize(("given", "param", "code"), REFUSED_CHATS, ids=[str(i) for i in range(len(REFUSED_CHATS))])
def test_what_a_chat_may_not_ask_is_refused(client, given, param, code):
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": messages, **given})
    assert (caught.value.param, caught.value.code) == (param, code)


def test_what_asks_for_nothing_is_taken(client):
    answer = greedy(
        client, best_of=1, presence_penalty=0, frequency_penalty=0.0, logit_bias={}, suffix=None, user="me", n=None
    )
    assert answer.usage.completion_tokens == NEW_TOKENS


def test_models_and_strangers(cluster, client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as caught:
            stranger.models.list()
    assert caught.value.code == "invalid_api_key"
    assert cluster.client.get("/v1/embeddings").json()["error"]["type"] == "invalid_request_error"


def sampled(response):
    assert response.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(response.text)
    return {
        (sample.name, sample.labels.get("role"), sample.labels.get("le")): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics_count_what_was_asked(cluster, client):
    urls = {member["role"]: member["url"] for member in cluster.members()}
    before = sampled(cluster.client.get("/metrics"))
    greedy(client, PROMPTS)
    after = sampled(cluster.client.get("/metrics"))

    def grown(name, role, le=None):
        return after[name, role, le] - before[name, role, le]

    assert grown("kvcache_requests_done_total", "router") == 1
    assert grown("kvcache_tokens_total", "router") == NEW_TOKENS * len(PROMPTS)
    assert grown("kvcache_first_token_seconds_count", None) == len(PROMPTS)
    assert grown("kvcache_first_token_seconds_bucket", None, "+Inf") == len(PROMPTS)
    assert (after["kvcache_members", "prefill", None], after["kvcache_members", "decode", None]) == (1, 1)
    cluster.until_idle()
    for role, name in (("prefill", "kvcache_written_bytes_total"), ("decode", "kvcache_arrived_bytes_total")):
        headers = {"authorization": f"Bearer {cluster.token}"}
        found = sampled(httpx.get(f"{urls[role]}/metrics", headers=headers, trust_env=False))
        assert found[name, role, None] > 0
        assert found["kvcache_pages_held", role, None] == 0


def test_health_needs_no_token_and_tells_who_is_missing(cluster):
    assert httpx.get(f"{cluster.url}/health", trust_env=False).json() == {"status": "ok"}
    cluster.scale(decode=0)
    cluster.until_members(1, 0)
    answer = httpx.get(f"{cluster.url}/health", trust_env=False)
    assert (answer.status_code, answer.json()) == (503, {"status": "there are no decode servers"})
    cluster.scale(decode=1)
    cluster.until_members(1, 1)
