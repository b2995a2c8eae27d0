"""What the tests of the KV connector share: engines of vLLM in processes of their own, and what they are asked.

A side is a process with an `LLM` whose engine core it steps itself, as vLLM's own process for it does: it steps while
there is something to do, sleeps 1 ms after a step without a forward, and hears what the test wants in between.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_mishaps import Mishaps

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
PATIENCE_S = 480
HEARTBEAT = {"heartbeat_timeout": 2.0, "connect_timeout": 2.0}


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return [(7 * number + 13 * seed + number * number * (seed + 1)) % 509 for number in range(tokens)]


def transfer_config(role: str, provider: str = "local", **extra: Any) -> dict[str, Any]:
    """Return the `kv_transfer_config` of a side."""
    policy = extra.pop("policy", "fail")
    return {
        "kv_connector": "AioteConnector",
        "kv_connector_module_path": "aiote.connectors.vllm",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"aiote": {"provider": provider, **HEARTBEAT}, **extra},
    }


def registrations() -> list[tuple[int, int]]:
    """Return where all memory lies that is registered from now on, and its length, as it is."""
    from aiote.rails.rail_set import RailSet

    keep, found = RailSet.keep_memory, []

    def kept(rails: Any, memory: Any) -> Any:
        found.append((memory.address, memory.length))
        return keep(rails, memory)

    RailSet.keep_memory = kept
    return found


@dataclass
class Answer:
    """What came of a request."""

    tokens: list[int]
    reason: str
    params: dict[str, Any] | None
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)


class Child(Mishaps):
    """The process's side of the pipe."""

    def __init__(self, pipe: Any, model: str, config: dict[str, Any] | None, settings: dict[str, Any]) -> None:
        from vllm import LLM

        self.pipe = pipe
        self.registered = registrations()
        # What is measured does nothing that a user's engine would not do.
        watched = settings.pop("watched", True)
        options = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "bfloat16",
            "max_model_len": 1024,
            "kv_cache_memory_bytes": 16 << 20,
            "max_num_seqs": 8,
            "disable_log_stats": True,
            **settings,
        }
        self.llm = LLM(model, kv_transfer_config=config, **options)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.crcs: dict[str, dict[str, dict[int, list[int]]]] = {"offered": {}, "received": {}}
        self.errors: list[str] = []
        self.occupied: list[Any] = []
        self.cancelled = self.failed = 0
        if watched and config is not None and config["kv_connector"] == "AioteConnector":
            self.watch()

    # What the test may ask for.

    def free(self) -> int:
        """Return how many blocks are free."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def occupy(self) -> None:
        """Take all free blocks, so that requests wait for some, or give those back that it has taken."""
        pool = self.scheduler.kv_cache_manager.block_pool
        taken, self.occupied = self.occupied, [] if self.occupied else pool.get_new_blocks(self.free())
        pool.free_blocks(taken)

    def forget(self) -> bool:
        """Forget all prefixes."""
        return self.core.reset_prefix_cache()

    def seen(self, which: str) -> dict[str, dict[int, list[int]]]:
        """Return and forget the checksums of the blocks of each request that was offered or received."""
        found, self.crcs[which] = self.crcs[which], {}
        return found

    def cpu(self) -> float:
        """Return the seconds of processor that the process has used."""
        return time.process_time()

    def preempted(self) -> int:
        """Return how often a request was preempted."""
        return self.preemptions

    def count_preemptions(self) -> None:
        """Count them from now on."""
        preempt = self.scheduler._preempt_request

        def counted(*arguments: Any, **options: Any) -> Any:
            self.preemptions += 1
            return preempt(*arguments, **options)

        self.preemptions = 0
        self.scheduler._preempt_request = counted

    def failures(self) -> int:
        """Return how many requests have not come since the last time."""
        found, self.failed = self.failed, 0
        return found

    def facts(self) -> dict[str, Any]:
        """Return what the connector has of vLLM's memory, and vLLM of it."""
        return {
            "registered": len(self.registered),
            # What is shorter is for messages.
            "aiote": sorted({one for one in self.registered if one[1] >= 1 << 20}),
            "vllm": sorted({(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in self.tensors()}),
            "block": sum(tensor[0].nbytes for tensor in self.bytes()),
        }

    def rewire(self, config: dict[str, Any]) -> None:
        """Have another connector, as if the engine had been started with this configuration."""
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer import kv_transfer_state as state
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

        vllm_config, caches = self.scheduler.vllm_config, self.scheduler.kv_cache_config
        runner = self.core.model_executor.driver_worker.worker.model_runner
        state.ensure_kv_transfer_shutdown()
        self.registered.clear()
        self.moved()
        worker_config = runner.vllm_config
        for one in {id(vllm_config): vllm_config, id(worker_config): worker_config}.values():
            one.kv_transfer_config = KVTransferConfig(**config)
            # vLLM's ExampleConnector knows one group of blocks; this model has no more.
            one.scheduler_config.disable_hybrid_kv_cache_manager = config["kv_connector"] == "MultiConnector"
        state.ensure_kv_transfer_initialized(worker_config, caches)
        worker = state.get_kv_transfer_group()
        worker.register_kv_caches(self.layers())
        self.scheduler.connector = KVConnectorFactory.create_connector(vllm_config, KVConnectorRole.SCHEDULER, caches)
        self.scheduler.connector.bind_kv_cache_manager(self.scheduler.kv_cache_manager)
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): worker.get_handshake_metadata()})
        self.scheduler.recompute_kv_load_failures = config["kv_load_failure_policy"] == "recompute"
        if config["kv_connector"] == "AioteConnector":
            self.watch()

    # How it looks at vLLM.

    def connector(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    def layers(self) -> dict[str, Any]:
        context = self.core.vllm_config.compilation_config.static_forward_context
        return {name: layer.kv_cache for name, layer in context.items() if hasattr(layer, "kv_cache")}

    def tensors(self) -> list[Any]:
        return list(self.layers().values())

    def bytes(self) -> list[Any]:
        import torch

        return [tensor.view(torch.uint8).numpy() for tensor in self.tensors()]

    def crc(self, block: int) -> int:
        value = 0
        for tensor in self.bytes():
            value = zlib.crc32(tensor[block].tobytes(), value)
        return value

    def watch(self) -> None:
        """Take the checksums of blocks when they are offered and when they have come, and count what is moved."""
        self.note_wanted()
        if self.core.vllm_config.parallel_config.world_size > 1:
            return  # the workers are in processes of their own
        self.hold_batches()
        transfers = self.connector()._transfers
        start, ended, wanted, dropped = transfers.start, transfers.take_ended, {}, set()

        def started(steps: Any) -> None:
            for one in steps.offered:
                self.crcs["offered"][one.request] = self.sums(one)
            wanted.update({one.request: one for one in steps.wanted})
            self.cancelled += len(steps.cancelled)
            dropped.update(steps.cancelled)
            start(steps)

        def over() -> Any:
            found = ended()
            for request in found.received - set(found.failed) - dropped:
                self.crcs["received"][wanted[request].remote_request] = self.sums(wanted[request])
            self.errors += found.failed.values()
            self.failed += len(found.failed)
            return found

        transfers.start, transfers.take_ended = started, over

    def sums(self, request: Any) -> dict[int, list[int]]:
        return {
            group: [0] * row.start + [self.crc(block) for block in row.blocks] for group, row in request.rows.items()
        }

    # Its life.

    def serve(self) -> None:
        """Step the engine, and do what the test wants between steps."""
        started: dict[str, float] = {}
        while True:
            busy = self.core.scheduler.has_requests()
            while self.pipe.poll(0 if busy else 1):
                kind, *arguments = self.pipe.recv()
                if kind == "end":
                    return
                if kind == "add":
                    started[arguments[0]] = time.monotonic()
                    self.add(*arguments)
                elif kind == "abort":
                    self.engine.abort_request([arguments[0]])
                else:
                    self.pipe.send(("answer", self.answer(kind, arguments)))
                busy = True
            if not busy:
                continue
            outputs = self.engine.step()
            for output in outputs:
                if output.finished:
                    (one,) = output.outputs
                    took = time.monotonic() - started.pop(output.request_id)
                    errors, self.errors = self.errors, []
                    answer = Answer(
                        list(one.token_ids), one.finish_reason or "", output.kv_transfer_params, took, errors
                    )
                    self.pipe.send(("done", output.request_id, answer))
            if not outputs:
                time.sleep(0.001)

    def add(self, name: str, tokens: list[int], count: int, params: dict[str, Any] | None) -> None:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, extra_args=extra)
        self.engine.add_request(name, {"prompt_token_ids": tokens}, sampling)

    def answer(self, kind: str, arguments: list[Any]) -> Any:
        try:
            return getattr(self, kind)(*arguments)
        except Exception:
            return RuntimeError(traceback.format_exc())


def child(pipe: Any, model: str, config: dict[str, Any] | None, settings: dict[str, Any], log: str) -> None:
    """Run a side."""
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        made = Child(pipe, model, config, settings)
    except Exception:
        traceback.print_exc()
        pipe.send(("failed", traceback.format_exc()))
        return
    pipe.send(("ready",))
    made.serve()
    made.llm.llm_engine.engine_core.shutdown()
    sys.stdout.flush()


class Side:
    """An engine in a process of its own, as the test sees it."""

    def __init__(self, name: str, model: str, config: dict[str, Any] | None, log: Path, **settings: Any) -> None:
        os.environ.update(ENVIRONMENT)
        context = multiprocessing.get_context("spawn")
        self.name, self.log = name, log / f"{name}.log"
        self.pipe, its = context.Pipe()
        arguments = (its, model, config, settings, str(self.log))
        # A daemon may have no workers of its own.
        alone = settings.get("tensor_parallel_size", 1) == 1
        self.process = context.Process(target=child, args=arguments, daemon=alone)
        self.process.start()
        its.close()
        self.done: dict[str, Answer] = {}
        self._numbers = 0
        self._ready = False

    def ready(self) -> Side:
        """Wait until it has started."""
        if not self._ready:
            kind, *why = self.receive()
            assert kind == "ready", why[0]
            self._ready = True
        return self

    def receive(self) -> Any:
        """Return the next message. Raises AssertionError for one that does not come."""
        assert self.pipe.poll(PATIENCE_S), f"{self.name} says nothing; {self.log}"
        try:
            return self.pipe.recv()
        except EOFError:
            raise AssertionError(f"{self.name} is gone: {self.log.read_text()[-3000:]}") from None

    def ask(self, method: str, *arguments: Any) -> Any:
        """Have a method of `Child` called."""
        self.ready()
        self.pipe.send((method, *arguments))
        while True:
            kind, *content = self.receive()
            if kind == "answer":
                if isinstance(content[0], RuntimeError):
                    raise content[0]
                return content[0]
            self.done[content[0]] = content[1]

    def add(self, tokens: list[int], count: int, params: dict[str, Any] | None = None) -> str:
        """Begin a request; return its name."""
        self.ready()
        self._numbers += 1
        name = f"{self.name}-{self._numbers}"
        self.pipe.send(("add", name, tokens, count, params))
        return name

    def wait(self, name: str) -> Answer:
        """Return what came of a request."""
        while name not in self.done:
            _, which, answer = self.receive()
            self.done[which] = answer
        return self.done.pop(name)

    def generate(self, tokens: list[int], count: int, params: dict[str, Any] | None = None) -> Answer:
        """Return what comes of a prompt."""
        return self.wait(self.add(tokens, count, params))

    def prefill(self, tokens: list[int]) -> dict[str, Any]:
        """Have a prompt computed; return what its decoder is to be told, as a proxy passes it on."""
        answer = self.generate(tokens, 1, {"do_remote_decode": True, "do_remote_prefill": False})
        assert answer.params is not None, answer
        return json.loads(json.dumps(answer.params))

    def abort(self, name: str) -> None:
        """Abort a request, which then says nothing more."""
        self.pipe.send(("abort", name))

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        os.kill(self.process.pid or 0, number)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"{self.name}; {self.log}"
            time.sleep(0.01)

    def close(self) -> None:
        """End it."""
        if self.process.is_alive():
            self.pipe.send(("end",))
            self.process.join(30)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
