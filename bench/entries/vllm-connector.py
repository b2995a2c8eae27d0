"""Measure vLLM's first token behind aiote's KV connector and behind NIXL's, in one run.

Run it in the environment of `make test-connectors`, with NIXL beside vLLM:

    .venv-hosts/vllm/bin/python -m pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1
    .venv-hosts/vllm/bin/python -P bench/run.py vllm-connector

Pairs of engines on the CPU, three with aiote's (whole requests, layer by layer, and reading) and one with NIXL's, take
turns with prompts of some lengths: the prompt is computed by one and its next token by the other. What is said are
medians over the rounds, in milliseconds: `prompt`, from the moment when the prompt is given until its token is here;
`answer`, the same from the prefill engine's answer on; and the processor time that both engines used in a round. Layer
by layer both engines are given the prompt at once, so there is no `answer`. A pair is stopped while others have their
turn: NIXL's polls all the time, and would take the processors from aiote's. `--only aiote nixl` leaves pairs out.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "programs" / "hosts"))

from vllm_models import write_model
from vllm_sides import Side, prompt, transfer_config

WARM_UP = 10
CONNECTORS = ("aiote", "aiote-layers", "aiote-reads", "nixl")
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def config(which: str, role: str) -> dict[str, Any]:
    """Return a connector's configuration; aiote's is that of a user who has set nothing."""
    if which == "nixl":
        return {"kv_connector": "NixlConnector", "kv_role": role, "kv_load_failure_policy": "fail"}
    extra = {"reads": which == "aiote-reads", "layers": which == "aiote-layers"}
    return {**transfer_config(role), "kv_connector_extra_config": extra}


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


class Round(NamedTuple):
    """What a prompt took, in milliseconds."""

    prompt: float
    answer: float
    processor: float


class Pair:
    """A prefill and a decode engine, which run only while they have their turn."""

    def __init__(self, which: str, model: str, logs: Path, port: int) -> None:
        self.which, self.number = which, 0
        self.prefill, self.decode = self.sides = pair(which, model, logs, port)
        self.addresses: list[str] = []

    def first_token(self, tokens: list[int]) -> tuple[Round, list[int]]:
        """Have a prompt computed; return what it took, and the token."""
        signal_to(self.sides, signal.SIGCONT)
        before = self.processor()
        began = time.perf_counter()
        answered = began
        if self.which == "aiote-layers" and self.addresses:
            self.number += 1
            name = f"ours-{self.number}"
            told = {"do_remote_prefill": True, "remote_request_id": name, "aiote": {"addresses": self.addresses}}
            sending = self.prefill.add(tokens, 1, {"do_remote_decode": True, "transfer_id": name})
            answer = self.decode.generate(tokens, 1, told)
        else:
            params = self.prefill.prefill(tokens)
            answered, sending = time.perf_counter(), ""
            self.addresses = params.get("aiote", {}).get("addresses", [])
            answer = self.decode.generate(tokens, 1, params)
        ended = time.perf_counter()
        if sending:
            self.prefill.wait(sending)
        used = self.processor() - before
        signal_to(self.sides, signal.SIGSTOP)
        return Round(1e3 * (ended - began), 1e3 * (ended - answered), 1e3 * used), answer.tokens

    def processor(self) -> float:
        """Return the seconds of processor that both have used."""
        return float(self.prefill.ask("cpu") + self.decode.ask("cpu"))


def measured(pairs: list[Pair], tokens: int, rounds: int) -> dict[str, Round]:
    """Return the medians of each pair for prompts of a length."""
    found: dict[str, list[Round]] = {one.which: [] for one in pairs}
    for number in range(WARM_UP + rounds):
        answers = []
        for one in pairs:
            took, answer = one.first_token(prompt(tokens, number % 7))
            answers.append(answer)
            if number >= WARM_UP:
                found[one.which].append(took)
        assert answers.count(answers[0]) == len(answers), "all bring the same caches"
    return {which: Round(*map(statistics.median, zip(*rows, strict=True))) for which, rows in found.items()}


def say(medians: dict[str, Round]) -> None:
    """Print the medians of each pair, and their ratios to NIXL's."""
    for which, one in medians.items():
        # Layer by layer there is no answer to wait for.
        names = [name for name in Round._fields if (which, name) != ("aiote-layers", "answer")]
        found = (f"{name} {getattr(one, name):7.2f} ms" for name in names)
        print(f"{which:12}", *found, sep="  ")
        if which != "nixl" and "nixl" in medians:
            ratios = (f"{name} {getattr(one, name) / getattr(medians['nixl'], name):.2f}" for name in names)
            print(f"{'':12}  to NIXL's: {', '.join(ratios)}")


def arguments() -> argparse.Namespace:
    """Return what the caller wants."""
    parser = argparse.ArgumentParser(description="Measure vLLM's first token behind KV connectors.")
    parser.add_argument("rounds", nargs="?", type=int, default=200)
    parser.add_argument("--tokens", nargs="+", type=int, default=[400], help="the lengths of prompts")
    parser.add_argument("--layers", type=int, default=2, help="the layers of the model")
    parser.add_argument("--only", nargs="+", choices=CONNECTORS, default=list(CONNECTORS))
    return parser.parse_args()


def main() -> None:
    """Run it and say what was found."""
    wanted = arguments()
    os.environ.setdefault("AIOTE_CLUSTER_KEY", os.urandom(16).hex())
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "llama", num_hidden_layers=wanted.layers)
        pairs = [Pair(which, model, Path(folder), 25600 + 100 * place) for place, which in enumerate(wanted.only)]
        for one in pairs:
            for side in one.sides:
                side.ready()
            signal_to(one.sides, signal.SIGSTOP)
        for tokens in wanted.tokens:
            medians = measured(pairs, tokens, wanted.rounds)
            print(f"{wanted.rounds} rounds, {tokens} tokens, {wanted.layers} layers, load {os.getloadavg()[0]:.1f}")
            say(medians)
        for one in pairs:
            for side in one.sides:
                side.process.kill()


if __name__ == "__main__":
    main()
