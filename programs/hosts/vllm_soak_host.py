"""A soak of the KV connector in vLLM: engines of every role are killed, stopped and replaced while requests run.

`VLLM_SOAK_S` is how many seconds it takes, 60 by default, and `VLLM_SOAK_SEED` what is drawn. A request whose producer
is lost is computed by its consumer, so each answer has the tokens of one process; those of a killed consumer are lost
with it. Freed blocks are filled with a pattern, which stays until they are used again.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from vllm_models import write_model
from vllm_sides import Side, prompt, transfer_config

TOKENS, COUNT, PROMPTS, AT_ONCE = 400, 8, 6, 4
SOAK_S = float(os.environ.get("VLLM_SOAK_S", "60"))
SEED = int(os.environ.get("VLLM_SOAK_SEED", "21"))
STOPPED_S = 4.0
"""At most; the heartbeat limit is half of that."""
EVENTS = {"none": 24, "abort": 4, "stop a producer": 2, "kill a producer": 1, "kill the consumer": 0.3}


class Soak:
    """Two producers and a consumer, of which some are dead, stopped, or starting."""

    def __init__(self, folder: Path) -> None:
        self.draw = random.Random(SEED)
        self.model, self.logs = write_model(folder / "llama"), folder
        self.made = 0
        self.counts: Counter[str] = Counter()
        self.changed: list[int] = []
        self.stopped: dict[Side, float] = {}
        self.free: dict[Side, int] = {}
        self.under_way: dict[str, int] = {}
        self.producers = [self.start("kv_producer") for _ in range(2)]
        self.consumer = self.start("kv_consumer")
        self.expected: list[list[int]] = []
        self.guard(self.consumer)
        for side in self.producers:
            self.guard(side)
        for seed in range(PROMPTS):
            self.expected.append(self.consumer.generate(prompt(TOKENS, seed), COUNT).tokens)
        self.consumer.ask("forget")

    def start(self, role: str) -> Side:
        """Start a process."""
        self.made += 1
        config = transfer_config(role, policy="recompute", reads=self.draw.random() < 0.5)
        return Side(f"{role}-{self.made}", self.model, config, self.logs)

    def guard(self, side: Side) -> None:
        """Have it say whether freed blocks change, once it has started."""
        self.free[side.ready()] = side.ask("free")
        side.ask("guard")
        side.ask("slow", 0.05)

    def go_on(self) -> None:
        """Let those go on whose time has come."""
        for side, until in list(self.stopped.items()):
            if time.monotonic() > until:
                side.signal(signal.SIGCONT)
                del self.stopped[side]

    def producer(self) -> Side:
        """Return one that runs, when there is one."""
        while True:
            self.go_on()
            running = [side for side in self.producers if side not in self.stopped]
            if running:
                return self.draw.choice(running)
            time.sleep(0.01)

    def request(self) -> None:
        """Begin one, and let something happen to it."""
        seed, producer = self.draw.randrange(PROMPTS), self.producer()
        name = self.consumer.add(prompt(TOKENS, seed), COUNT, producer.prefill(prompt(TOKENS, seed)))
        self.under_way[name] = seed
        time.sleep(self.draw.random() * 0.03)
        (event,) = self.draw.choices(list(EVENTS), EVENTS.values())
        self.counts[event] += 1
        if event == "abort":
            self.consumer.abort(name)
            del self.under_way[name]
        elif event == "stop a producer":
            producer.signal(signal.SIGSTOP)
            self.stopped[producer] = time.monotonic() + self.draw.random() * STOPPED_S
        elif event == "kill a producer":
            producer.signal(signal.SIGKILL)
            self.producers.remove(producer)
            self.finish()
            self.producers.append(self.start("kv_producer"))
            self.guard(self.producers[-1])
        elif event == "kill the consumer":
            self.consumer.signal(signal.SIGKILL)
            self.under_way.clear()
            self.consumer = self.start("kv_consumer")
            self.guard(self.consumer)

    def finish(self) -> None:
        """Wait for all answers, which are right."""
        for name, seed in self.under_way.items():
            answer = self.consumer.wait(name)
            assert (answer.reason, answer.tokens) == ("length", self.expected[seed]), (name, answer)
            self.counts["right"] += 1
        self.under_way.clear()
        self.counts["fallbacks"] += self.consumer.ask("failures")
        self.consumer.ask("forget")

    def end(self) -> None:
        """Look for blocks that were written to when they were free, and for those that are not free again."""
        self.finish()
        for side in (*self.producers, self.consumer):
            if self.stopped.pop(side, None):
                side.signal(signal.SIGCONT)
            side.ask("slow", 0)
            side.ask("forget")
            side.until(lambda side=side: side.ask("free") == self.free[side])
            self.changed += side.ask("guarded")[1]

    def close(self) -> None:
        """End all that runs."""
        for side in (*self.producers, self.consumer):
            if side in self.stopped:
                side.signal(signal.SIGCONT)
            side.close()


@pytest.mark.timeout(SOAK_S + 1200)
def test_engines_of_every_role_are_killed_and_stopped(tmp_path):
    soak = Soak(tmp_path)
    try:
        end = time.monotonic() + SOAK_S
        while time.monotonic() < end:
            soak.request()
            if len(soak.under_way) >= AT_ONCE:
                soak.finish()
        soak.end()
    finally:
        soak.close()
    found = f"{len(soak.changed)} free blocks were written to"
    print(f"{SOAK_S:.0f} s, seed {SEED}, {soak.made} processes: {dict(soak.counts)}; {found}")
    assert soak.counts["right"]
    assert soak.changed == []
