"""aiote.connectors.vllm in vLLM: a real `LLM` on the CPU, and trainers in processes of their own.

`make test-connectors` runs this in an environment that has vLLM; it is no part of `make test`. The model is a Llama of
400,000 random parameters: with these its tokens depend on every layer.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams

PROMPT = {"prompt_token_ids": [(7 * number) % 509 for number in range(40)]}
PATIENCE_S = 120
CONFIG = LlamaConfig(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=512,
    max_position_embeddings=512,
    tie_word_embeddings=False,
)


def module(version: int) -> Any:
    """Return the model of a version."""
    torch.manual_seed(version)
    made = LlamaForCausalLM(CONFIG).to(torch.bfloat16)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.08)
    return made


def write_model(folder: Path, version: int) -> None:
    state = {name: tensor.contiguous() for name, tensor in module(version).state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**CONFIG.to_dict(), "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))


class Client:
    """A trainer's way to the LLM in the test's process: calls and answers over a pipe."""

    def __init__(self, pipe: Any) -> None:
        self._pipe, self._lock = pipe, threading.Lock()
        self.updating = threading.Event()

    def _call(self, method: str, *arguments: Any) -> None:
        with self._lock:
            self._pipe.send((method, arguments))
            if method == "update_weights":
                self.updating.set()
            error = self._pipe.recv()
        if error is not None:
            raise RuntimeError(error)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update")


def train(pipe: Any, versions: list[int], die_at: int) -> None:
    """Be a trainer: send these versions, or die in the middle."""
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.plugins import load_general_plugins

    load_general_plugins()

    class Source(ModuleSource):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for number, pair in enumerate(super().__iter__()):
                if number == die_at:
                    # Before the workers have heard of the update they have nothing to say of it.
                    client.updating.wait(PATIENCE_S)
                    os._exit(9)
                yield pair

    from aiote.connectors.vllm.weights import AioteTrainerInitInfo

    client, source = Client(pipe), Source(module(versions[0]))
    # Buckets smaller than a matrix: some tensors are split, and the trainer dies when a part of them has been loaded.
    init = AioteTrainerInitInfo(rank=0, workers=1, bucket_size=40_000)
    engine = WeightTransferTrainerFactory.trainer_init(init, client=client, source=source)
    for version in versions:
        with torch.no_grad():
            for parameter, other in zip(source._module.parameters(), module(version).parameters(), strict=True):
                parameter.copy_(other)
        engine.send_weights()
        pipe.send(("sent", (version,)))
        pipe.recv()
    pipe.send(("over", ()))


class Host:
    """The LLM, and what its tokens are of each version."""

    def __init__(self, folder: Path) -> None:
        write_model(folder, 0)
        self.llm = LLM(
            str(folder),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=256,
            kv_cache_memory_bytes=32 << 20,
            enable_prefix_caching=False,
            weight_transfer_config={"backend": "aiote"},
        )
        self.errors: list[str] = []

    def tokens(self) -> list[int]:
        parameters = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
        (output,) = self.llm.generate([PROMPT], parameters, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def serve(self, versions: list[int], die_at: int = -1) -> dict[int, list[int]]:
        """Run a trainer; return the tokens after each update. What the LLM raises is in `errors`, and told to it."""
        context = multiprocessing.get_context("spawn")
        mine, its = context.Pipe()
        trainer = context.Process(target=train, args=(its, versions, die_at))
        trainer.start()
        its.close()
        found: dict[int, list[int]] = {}
        self.errors = []
        try:
            while mine.poll(PATIENCE_S):
                method, arguments = mine.recv()
                if method == "over":
                    break
                error = None
                if method == "sent":
                    found[arguments[0]] = self.tokens()
                else:
                    try:
                        getattr(self.llm, method)(*arguments)
                    except Exception as raised:
                        error = f"{type(raised).__name__}: {raised}"
                        self.errors.append(error)
                mine.send(error)
        except (EOFError, BrokenPipeError):
            pass
        trainer.join(PATIENCE_S)
        assert not trainer.is_alive()
        return found


@pytest.fixture(scope="module")
def host(tmp_path_factory: Any) -> Host:
    os.environ["AIOTE_CLUSTER_KEY"] = os.urandom(16).hex()
    return Host(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def loaded(host: Host) -> dict[int, list[int]]:
    """What version 0 generates, loaded from its checkpoint, before any update."""
    return {0: host.tokens()}


def test_tokens_follow_the_version_of_the_weights(host, loaded):
    found = host.serve([1, 2, 3])
    assert host.errors == []
    assert len({tuple(tokens) for tokens in (*found.values(), *loaded.values())}) == 4
    again = host.serve([2, 0, 1, 3])
    assert {version: again[version] for version in (1, 2, 3)} == found
    assert again[0] == loaded[0], "after an update, as from the checkpoint"
    loaded.update(found)


@pytest.mark.parametrize("die_at", [0, 5, 12])
def test_a_trainer_that_dies_leaves_an_error_and_the_next_one_works(host, loaded, die_at):
    host.serve([2], die_at=die_at)
    (error,) = host.errors
    assert error.startswith("BroadcastError: ")
    assert "sender 0" in error
    # Layers are old or new, each whole: it generates something.
    assert len(host.tokens()) == 12
    assert host.serve([2, 3]) == {2: loaded[2], 3: loaded[3]}
    assert host.errors == []


def test_workers_that_refuse_an_update_are_told_to_the_trainer(host, loaded, monkeypatch):
    """Before a byte has moved; the trainer does not wait for workers that will never come."""
    engine = host.llm.llm_engine.model_executor.driver_worker.worker.weight_transfer_engine
    monkeypatch.setattr(type(engine), "parse_update_info", lambda *_: 1 / 0)
    assert host.serve([1]) == {}
    assert host.errors == ["ZeroDivisionError: division by zero"]
    monkeypatch.undo()
    assert host.serve([1]) == {1: loaded[1]}
