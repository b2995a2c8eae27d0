"""A load generator: many clients at a time ask a router for completions, streamed, and report what they got.

    python examples/kvcache/load.py "http://127.0.0.1:8000/?token=..." --clients 8 --seconds 10

Prompts are drawn from a seed. A fraction of them begin with the same text, which a prefiller may then have cached; a
fraction of the clients leave after the first token. The exit status is 1 where a request failed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

import anyio
import httpx

LETTERS = "abcdefghijklmnopqrstuvwxyz      "
SILENCE_S = 60.0


@dataclass(slots=True)
class Tally:
    """What became of the requests."""

    first_s: list[float] = field(default_factory=list)
    done: int = 0
    left: int = 0
    tokens: int = 0
    failures: list[str] = field(default_factory=list)

    def summary(self, seconds: float) -> dict[str, object]:
        """Return the figures."""
        median = statistics.median(self.first_s) if self.first_s else None
        worst = max(self.first_s, default=None)
        return {
            "done": self.done,
            "left": self.left,
            "failed": len(self.failures),
            "requests_s": round(self.done / seconds, 2),
            "tokens_s": round(self.tokens / seconds, 1),
            "first_token_median_s": median and round(median, 4),
            "first_token_worst_s": worst and round(worst, 4),
            "failures": self.failures[:5],
        }


class Load:
    """Clients that ask one after another until the time is over."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.tally = Tally()
        self._random = random.Random(args.seed)
        self._common = self._text(args.prompt_bytes // 2)

    def _text(self, count: int) -> str:
        return "".join(self._random.choices(LETTERS, k=count))

    def prompt(self) -> str:
        """Return the next prompt."""
        if self._random.random() < self.args.alike:
            return self._common + self._text(self.args.prompt_bytes - len(self._common))
        return self._text(self.args.prompt_bytes)

    async def run(self) -> dict[str, object]:
        """Return the figures, when all requests are over."""
        limits = httpx.Limits(max_connections=self.args.clients)
        timeout = httpx.Timeout(SILENCE_S)
        begun = time.monotonic()
        url = urlsplit(self.args.url)
        headers = {"authorization": f"Bearer {parse_qs(url.query).get('token', [''])[0]}"}
        options = {"headers": headers, "limits": limits, "timeout": timeout, "trust_env": False}
        async with httpx.AsyncClient(base_url=f"{url.scheme}://{url.netloc}", **options) as client:
            async with anyio.create_task_group() as group:
                for _ in range(self.args.clients):
                    group.start_soon(self._client, client, begun + self.args.seconds)
        return self.tally.summary(time.monotonic() - begun)

    async def _client(self, client: httpx.AsyncClient, until: float) -> None:
        while time.monotonic() < until:
            try:
                await self._ask(client)
            except (httpx.HTTPError, ValueError, KeyError) as error:
                self.tally.failures.append(f"{type(error).__name__}: {error}")
                await anyio.sleep(0.1)

    async def _ask(self, client: httpx.AsyncClient) -> None:
        body = {"prompt": self.prompt(), "max_tokens": self.args.max_tokens, "stream": True, "temperature": 0}
        leaves = self._random.random() < self.args.leave
        begun, first, finish = time.monotonic(), 0.0, None
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise ValueError(f"status {response.status_code}: {(await response.aread())[:200]!r}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                said = json.loads(line.removeprefix("data: "))
                if "error" in said:
                    raise ValueError(said["error"]["message"])
                if not first:
                    first = time.monotonic() - begun
                    self.tally.first_s.append(first)
                    if leaves:
                        self.tally.left += 1
                        return
                self.tally.tokens += len(said["choices"][0]["token_ids"])
                finish = said["choices"][0]["finish_reason"]
        if finish is None:
            raise ValueError("the answer stopped before its end")
        self.tally.done += 1


def arguments() -> argparse.Namespace:
    """Return what was given on the command line."""
    parser = argparse.ArgumentParser(description="Ask a router for completions, and report.")
    parser.add_argument("url", help="the router's, as cluster.py prints it")
    parser.add_argument("--clients", type=int, default=8, help="requests at a time")
    parser.add_argument("--seconds", type=float, default=10.0, help="for how long new ones are made")
    parser.add_argument("--prompt-bytes", type=int, default=400, help="length of a prompt")
    parser.add_argument("--max-tokens", type=int, default=16, help="length of an answer")
    parser.add_argument("--alike", type=float, default=0.5, help="fraction of the prompts that begin alike")
    parser.add_argument("--leave", type=float, default=0.0, help="fraction of the clients that leave early")
    parser.add_argument("--seed", type=int, default=0, help="what prompts are drawn from")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        figures = anyio.run(Load(arguments()).run)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    print(json.dumps(figures, indent=2))
    sys.exit(1 if figures["failed"] or not figures["done"] else 0)
