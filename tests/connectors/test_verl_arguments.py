"""aiote.connectors.verl without verl and torch: what it refuses before anything is sent."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiote.connectors.host import Sending
from aiote.errors import UsageError


class Registry:
    """verl's, which gives the class back that it takes."""

    @staticmethod
    def register(name: str) -> Any:
        return lambda kind: kind


@pytest.fixture
def engine(monkeypatch) -> Iterator[Any]:
    """The connector's class, as it is with stand-ins for its hosts."""
    contents: dict[str, dict[str, Any]] = {
        "torch": {"Tensor": object},
        "verl": {},
        "verl.checkpoint_engine": {"CheckpointEngine": object, "CheckpointEngineRegistry": Registry},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "aiote.connectors.verl", raising=False)
    yield importlib.import_module("aiote.connectors.verl").AioteCheckpointEngine
    sys.modules.pop("aiote.connectors.verl", None)


@pytest.mark.parametrize("senders", [-1, 0, "1", 1.0, True])
def test_a_number_of_senders_that_is_none_is_refused(engine, senders):
    words = f"senders is {senders!r}, expected a whole number from 1: how many trainer ranks send"
    with pytest.raises(UsageError, match=words):
        engine(bucket_size=1 << 20, senders=senders)


@pytest.mark.parametrize("size", [0, -5, "256", None])
def test_a_bucket_size_that_is_none_is_refused(engine, size):
    with pytest.raises(UsageError, match=f"bucket_size is {size!r}, expected a whole number from 1"):
        engine(bucket_size=size)


def metadata(ranks: int, senders: int | None) -> list[dict[str, Any]]:
    one = {"address": "a", "update": "u", "bucket_size": 1 << 20, "senders": senders}
    return [one for _ in range(ranks)]


@pytest.mark.parametrize(("trainers", "rollouts"), [(0, 2), (2, 0), (-1, 1), ("1", 1)])
def test_a_side_without_ranks_is_refused(engine, trainers, rollouts):
    with pytest.raises(UsageError, match="_world_size is .*, expected a whole number from 1: how many"):
        engine.build_topology(trainers, rollouts, metadata(3, None))


@pytest.mark.parametrize(("senders", "expected"), [(None, 2), (1, 1), (8, 2)])
def test_as_many_ranks_send_as_are_wanted_and_there(engine, senders, expected):
    trainers, rollouts = engine.build_topology(3, 2, metadata(5, senders))
    assert len(trainers["plan"][0]["senders"]) == expected
    assert len(rollouts["plan"]) == 2


def test_a_tensor_that_has_more_than_its_elements_is_refused():
    quantized = SimpleNamespace(is_quantized=True, dtype="torch.qint8", shape=(2,), nbytes=2)
    wrapped = SimpleNamespace(__tensor_flatten__=None, dtype="torch.float32", shape=(2,), nbytes=8)
    nobody: Any = SimpleNamespace()
    with pytest.raises(UsageError, match="w is quantized, and its scale would not travel"):
        next(Sending.add(nobody, "w", quantized))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="w is a SimpleNamespace, made of several tensors"):
        next(Sending.add(nobody, "w", wrapped))  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="_splitter"):
        next(Sending.add(nobody, "w", np.zeros(2)))  # type: ignore[arg-type]
