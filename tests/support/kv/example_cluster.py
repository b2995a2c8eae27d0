"""The cluster of examples/kvcache, started for real, and what is asked of it over HTTP."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from aiote.demo import Settings
from support.process.examples import Program

PATIENCE_S = 60.0
LAYERS = 2
PAGE_TOKENS = 8
CHUNK_TOKENS = 64
CONTEXT = 2048
OPTIONS = {
    "provider": "tcp",
    "port": 0,
    "layers": LAYERS,
    "page-tokens": PAGE_TOKENS,
    "chunk-tokens": CHUNK_TOKENS,
    "context": CONTEXT,
    "slots": 8,
    "lease": 2,
}


def reference_settings(new_tokens: int) -> Settings:
    """Return what the one-process reference is to do like the cluster does it."""
    return Settings("tcp", LAYERS, 0, None, PAGE_TOKENS, CHUNK_TOKENS, new_tokens, 1, CONTEXT // PAGE_TOKENS)


class Cluster:
    """A cluster that runs; `program` is the one command."""

    def __init__(self, folder: Path, **options: Any) -> None:
        arguments = [f"--{name}={value}" for name, value in {**OPTIONS, **options}.items()]
        self.program = Program(folder, dict(os.environ), "kvcache/cluster.py", *arguments)
        self.page = self.program.address().partition(" is ready")[0]
        self.url, _, self.token = self.page.partition("/?token=")
        # A connection that is kept would look like one that a test has left behind.
        limits = httpx.Limits(max_keepalive_connections=0)
        headers = {"authorization": f"Bearer {self.token}"}
        self.client = httpx.Client(
            base_url=self.url, headers=headers, timeout=PATIENCE_S, limits=limits, trust_env=False
        )

    def stats(self) -> dict[str, Any]:
        return self.client.get("/stats").json()

    def members(self, role: str = "") -> list[dict[str, Any]]:
        return [member for member in self.stats()["members"] if member["role"] == (role or member["role"])]

    def until(self, true: Callable[[dict[str, Any]], object], what: str) -> dict[str, Any]:
        """Wait until the numbers are as they should be, and return them."""
        deadline = time.monotonic() + PATIENCE_S
        while not true(stats := self.stats()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not {what} within {PATIENCE_S} s: {stats}\n{self.program.err}")
            time.sleep(0.05)
        return stats

    def until_members(self, prefill: int, decode: int) -> None:
        wanted = ["prefill"] * prefill + ["decode"] * decode
        self.until(
            lambda stats: (
                [member["role"] for member in stats["members"] if member["state"] == "ready"] == wanted
                and len(stats["members"]) == len(wanted)
            ),
            f"{prefill} and {decode} members",
        )

    def until_idle(self) -> dict[str, Any]:
        """Wait until no page is held by anybody and no request goes on anywhere."""
        return self.until(is_idle, "all pages back")

    def ask(self, prompt: str, max_tokens: int = 8, **more: Any) -> httpx.Response:
        return self.client.post(
            "/v1/completions", json={"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
        )

    def complete(self, prompt: str, max_tokens: int = 8) -> list[int]:
        answer = self.ask(prompt, max_tokens)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]

    @contextmanager
    def stream(self, prompt: str, max_tokens: int) -> Iterator[httpx.Response]:
        body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "temperature": 0}
        with self.client.stream("POST", "/v1/completions", json=body) as response:
            yield response

    def scale(self, **wanted: int) -> None:
        assert self.client.post("/scale", json=wanted).status_code == 202

    def end(self, number: int) -> int:
        self.client.close()
        self.program.send(number)
        return self.program.end()

    def kill(self) -> None:
        self.client.close()
        if self.program.process.poll() is None:
            self.program.process.kill()
            self.program.process.wait()


def is_idle(stats: dict[str, Any]) -> bool:
    members = [member["stats"] for member in stats["members"]]
    return not stats["requests"]["open"] and all(
        found is not None and not (found["pages_held"] or found["requests"] or found["waiting"]) for found in members
    )


def events(lines: Iterator[str]) -> Iterator[Any]:
    """Iterate over server-sent events: JSON, or the text that ends a stream."""
    for line in lines:
        if line:
            assert line.startswith("data: "), line
            text = line.removeprefix("data: ")
            yield text if text == "[DONE]" else json.loads(text)
