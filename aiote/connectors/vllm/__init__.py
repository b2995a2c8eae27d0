"""aiote's interface for vLLM: `AioteConnector`, and the entry point `register`, which vLLM calls in each process.

`register` registers names only. Neither vLLM's classes nor torch are imported before vLLM requests a named object.
"""

from __future__ import annotations

from typing import Any

__all__ = ["AioteConnector", "register"]

NAME = "aiote"


def register() -> None:
    """Register the backend that vLLM's configuration may name: `{"backend": "aiote"}` in `--weight-transfer-config`.

    Does nothing if this vLLM has no weight transfer. Idempotent.
    """
    try:
        from vllm.distributed.weight_transfer import factory
    except ImportError:
        return
    sides = (
        (factory.WeightTransferEngineFactory, "AioteWeightTransferEngine"),
        (factory.WeightTransferTrainerFactory, "AioteTrainerWeightTransferEngine"),
    )
    for registry, name in sides:
        try:
            registry.register_engine(NAME, "aiote.connectors.vllm.weights", name)
        except ValueError:
            # vLLM refuses a second registration, and some of its processes load their plugins twice.
            continue


def __getattr__(name: str) -> Any:
    if name == "AioteConnector":
        from .connector import AioteConnector

        return AioteConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
