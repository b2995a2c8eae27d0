"""Weights: the same seed gives the same bits, a file gives back what was written, and a bad file says what is wrong."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from aiote.demo import weights
from aiote.demo.faults import DemoError
from aiote.demo.model import ModelConfig
from aiote.demo.settings import Settings
from aiote.demo.tokens import VOCABULARY

CONFIG = ModelConfig(layers=2, heads=4, kv_heads=2, head_size=4, width=8, hidden=12, vocabulary=VOCABULARY)


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in weights.shapes(CONFIG).items()}


def test_a_seed_gives_the_same_bits():
    one, same, other = (weights.fingerprint(weights.seeded(CONFIG, seed)) for seed in (1, 1, 2))
    assert one == same
    assert one != other
    assert one != weights.fingerprint(weights.seeded(ModelConfig(1, 4, 2, 4, 8, 12, VOCABULARY), 1))


def test_a_file_gives_back_what_was_written(tmp_path):
    path = tmp_path / "w.safetensors"
    model = weights.seeded(CONFIG, 5)
    weights.save(model, path)
    assert weights.inspect(path) == CONFIG
    assert weights.fingerprint(weights.load(path)) == weights.fingerprint(model)
    settings = Settings("tcp", 9, 0, str(path), 4, 4, 1, 1, 1)
    assert settings.config() == CONFIG
    assert weights.fingerprint(settings.model()) == weights.fingerprint(model)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_weights_of_other_floats_are_converted(tmp_path, dtype):
    path = tmp_path / "w.safetensors"
    save_file({name: tensor.astype(dtype) for name, tensor in tensors().items()}, path)
    model = weights.load(path)
    assert model.weights.head.dtype == np.float32
    assert np.array_equal(model.weights.head, tensors()["head"].astype(dtype).astype(np.float32))


def change(name: str, shape: tuple[int, ...] | None, dtype: type = np.float32) -> dict[str, np.ndarray]:
    changed = {**tensors(), name: np.zeros(shape or (1,), dtype=dtype)}
    if shape is None:
        del changed[name]
    return changed


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (change("layers.0.query", None), r"layers\.0\.query"),
        (change("layers.0.query", (8, 16)), r"layers\.0\.query \[width, heads, head_size\]"),
        (change("layers.1.down", None), r"layers\.1\.down is absent, expected \[12, 8\]"),
        (change("layers.1.down", (12, 9)), r"layers\.1\.down is \[12, 9\], expected \[12, 8\]"),
        (change("layers.2.up", (8, 12)), r"layers\.2\..* is absent"),
        (change("bias", (8,)), r"bias is \[8\], expected absent"),
        (change("embedding", (32000, 8)), r"embedding is \[32000, 8\], expected \[258, 8\]"),
        (change("layers.0.key", (8, 3, 4)), "multiple of the key and value heads"),
        (change("layers.0.key", (8, 0, 4)), "multiple of the key and value heads"),
        (change("head", (8, VOCABULARY), np.int32), "head is I32; expected one of F64, F32, F16"),
    ],
)
def test_a_file_of_something_else_is_explained(tmp_path, content, says):
    path = tmp_path / "w.safetensors"
    save_file(content, path)
    with pytest.raises(DemoError, match=says):
        weights.inspect(path)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_numbers_are_refused(tmp_path, value):
    path = tmp_path / "w.safetensors"
    content = tensors()
    content["layers.1.value"][0, 0, 0] = value
    save_file(content, path)
    with pytest.raises(DemoError, match=r"layers\.1\.value contains a value that is not finite"):
        weights.load(path)


@pytest.mark.parametrize(
    "content", [b"", b"hello", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 40) + json.dumps({}).encode()]
)
def test_a_file_that_is_no_safetensors_is_named(tmp_path, content):
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(DemoError, match=r"w\.safetensors: cannot be read as a safetensors file"):
        weights.inspect(path)


def test_a_missing_file_says_how_to_get_one(tmp_path):
    with pytest.raises(DemoError, match=r"no such file; `aiote demo weights"):
        weights.load(tmp_path / "absent.safetensors")


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(DemoError, match=r"w\.safetensors: cannot be written"):
        weights.save(weights.seeded(CONFIG, 0), tmp_path / "absent" / "w.safetensors")
