"""What vLLM finds of aiote: `AioteConnector`, and `register`, the entry point, which it calls in each of its processes.

Names are registered, and nothing of vLLM or of torch is imported before vLLM asks for what they stand for.
"""

from __future__ import annotations

from typing import Any

__all__ = ["AioteConnector", "register"]

NAME = "aiote"


def register() -> None:
    """Register what vLLM's configuration may name: `{"backend": "aiote"}` in `--weight-transfer-config`.

    Does nothing where this vLLM has no weight transfer. Idempotent.
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
            # vLLM refuses a second registration; some of its processes load their plugins twice.
            continue


def __getattr__(name: str) -> Any:
    if name == "AioteConnector":
        from .connector import AioteConnector

        return AioteConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
