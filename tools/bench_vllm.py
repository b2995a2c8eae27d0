"""Measure vLLM's first token behind aiote's KV connector and behind NIXL's, in one run.

Run it in the environment of `make test-connectors`, with NIXL beside vLLM:

    .venv-hosts/vllm/bin/python -m pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1
    .venv-hosts/vllm/bin/python -P tools/bench_vllm.py

Pairs of engines on the CPU, two with aiote's (written to, and reading) and one with NIXL's, take turns with prompts of
400 tokens: the prompt is computed by one and its next token by the other. What is said are medians over the rounds:
milliseconds from the moment when the prefill engine's answer is given to the decode engine until its token is here, and
the processor time that both engines used in a round. A pair is stopped while others have their turn: NIXL's polls all
the time, and would take the processors from aiote's.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "hosts"))

from vllm_models import write_model
from vllm_sides import Side, prompt, transfer_config

TOKENS = 400
ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
WARM_UP = 10
CONNECTORS = ("aiote", "aiote-reads", "nixl")
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def config(which: str, role: str) -> dict[str, Any]:
    """Return a connector's configuration; aiote's is that of a user who has set nothing."""
    if which == "nixl":
        return {"kv_connector": "NixlConnector", "kv_role": role, "kv_load_failure_policy": "fail"}
    return {**transfer_config(role), "kv_connector_extra_config": {"reads": which == "aiote-reads"}}


def pair(which: str, model: str, logs: Path, port: int) -> list[Side]:
    """Start a pair."""
    sides = []
    for number, (name, role) in enumerate(ROLES.items()):
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port + number)
        sides.append(
            Side(f"{which}-{name}", model, config(which, role), logs, enable_prefix_caching=False, watched=False)
        )
    return sides


def signal_to(sides: list[Side], number: int) -> None:
    """Send a signal to a pair."""
    for side in sides:
        side.signal(number)


def main() -> None:
    """Run it and say what was found."""
    os.environ.setdefault("AIOTE_CLUSTER_KEY", os.urandom(16).hex())
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "llama")
        pairs = {which: pair(which, model, Path(folder), 25600 + 100 * place) for place, which in enumerate(CONNECTORS)}
        found: dict[str, list[tuple[float, float]]] = {which: [] for which in pairs}
        tokens: dict[str, list[list[int]]] = {which: [] for which in pairs}
        for one in pairs.values():
            for side in one:
                side.ready()
            signal_to(one, signal.SIGSTOP)
        for number in range(WARM_UP + ROUNDS):
            for which, (prefiller, decoder) in pairs.items():
                signal_to(pairs[which], signal.SIGCONT)
                before = prefiller.ask("cpu") + decoder.ask("cpu")
                params = prefiller.prefill(prompt(TOKENS, number % 7))
                began = time.perf_counter()
                answer = decoder.generate(prompt(TOKENS, number % 7), 1, params)
                took = time.perf_counter() - began
                used = prefiller.ask("cpu") + decoder.ask("cpu") - before
                signal_to(pairs[which], signal.SIGSTOP)
                tokens[which].append(answer.tokens)
                if number >= WARM_UP:
                    found[which].append((took * 1e3, used * 1e3))
        assert tokens["aiote"] == tokens["aiote-reads"] == tokens["nixl"], "all bring the same caches"
        medians = {
            which: [statistics.median(column) for column in zip(*rows, strict=True)] for which, rows in found.items()
        }
        print(f"{ROUNDS} rounds, {TOKENS} tokens, medians, load {os.getloadavg()[0]:.1f}")
        for which, (first, used) in medians.items():
            print(f"{which:11} first token {first:7.2f} ms  processor {used:7.2f} ms")
        for which in CONNECTORS[:-1]:
            first, used = (ours / theirs for ours, theirs in zip(medians[which], medians["nixl"], strict=True))
            print(f"{which:11} to NIXL's: first token {first:.2f}, processor {used:.2f}")
        for one in pairs.values():
            for side in one:
                side.process.kill()


if __name__ == "__main__":
    main()
