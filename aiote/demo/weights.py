"""The weights of a model: drawn from a seed, or read from a safetensors file that the user names.

The tensors of a file and their shapes, which determine the sizes of the model (w width, h heads, k key and value heads,
s head size, f hidden size of the MLP; the vocabulary is that of `tokens`):

    embedding                   [vocabulary, w]
    layers.N.attention_norm     [w]
    layers.N.query              [w, h, s]
    layers.N.key                [w, k, s]
    layers.N.value              [w, k, s]
    layers.N.output             [h, s, w]
    layers.N.mlp_norm           [w]
    layers.N.gate               [w, f]
    layers.N.up                 [w, f]
    layers.N.down               [f, w]
    final_norm                  [w]
    head                        [w, vocabulary]

F64, F32 and F16 are accepted; the model computes with float32. `aiote demo weights OUT.safetensors` writes such a file.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from aiote.demo.faults import DemoError
from aiote.demo.model import LayerWeights, Model, ModelConfig, Weights
from aiote.demo.request_cache import Floats
from aiote.demo.tokens import VOCABULARY

__all__ = ["fingerprint", "inspect", "load", "save", "seeded", "seeded_config", "shapes"]

_LAYER_FIELDS = ("attention_norm", "query", "key", "value", "output", "mlp_norm", "gate", "up", "down")
_DTYPES = ("F64", "F32", "F16")

# This gain makes attention pick few positions out of thousands. With scores of unit size it would average all
# positions, and a wrong page would change no token.
_QUERY_GAIN = 4.0
# This gain sets the logits so far apart that the greedy choice does not depend on rounding.
_HEAD_GAIN = 4.0
# A seeded model knows no language. A head that favours lower-case letters and the space makes its text look like words.
_LIKELY = {**dict.fromkeys(range(32, 127), 0.55), **dict.fromkeys(b"abcdefghijklmnopqrstuvwxyz", 1.0), 32: 1.2}
_UNLIKELY = 0.1


def seeded_config(layers: int) -> ModelConfig:
    """Return the sizes of a seeded model of `layers` layers."""
    return ModelConfig(layers=layers, heads=8, kv_heads=2, head_size=32, width=256, hidden=704, vocabulary=VOCABULARY)


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of one layer's tensors by their names."""
    width, hidden, size = config.width, config.hidden, config.head_size
    return {
        "attention_norm": (width,),
        "query": (width, config.heads, size),
        "key": (width, config.kv_heads, size),
        "value": (width, config.kv_heads, size),
        "output": (config.heads, size, width),
        "mlp_norm": (width,),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a model by their names in a file."""
    out: dict[str, tuple[int, ...]] = {"embedding": (config.vocabulary, config.width)}
    for number in range(config.layers):
        out.update({f"layers.{number}.{name}": shape for name, shape in layer_shapes(config).items()})
    out["final_norm"] = (config.width,)
    out["head"] = (config.width, config.vocabulary)
    return out


def seeded(config: ModelConfig, seed: int) -> Model:
    """Draw a model's weights from a seed: the same seed and sizes give the same bits."""
    rng = np.random.Generator(np.random.PCG64(seed))
    tensors: dict[str, Floats] = {}
    for name, shape in shapes(config).items():
        if name.endswith("norm"):
            tensors[name] = np.ones(shape, dtype=np.float32)
        else:
            tensors[name] = rng.standard_normal(shape, dtype=np.float32) * np.float32(_scale(name, config))
    favour = np.full(config.vocabulary, _UNLIKELY, dtype=np.float32)
    for token, factor in _LIKELY.items():
        favour[token] = factor
    tensors["head"] *= favour
    return _assemble(config, tensors)


def _scale(name: str, config: ModelConfig) -> float:
    """Return the standard deviation that keeps a tensor's output near unit size."""
    kind = name.rpartition(".")[2]
    if kind == "embedding":
        return 1.0
    if kind == "query":
        return float(_QUERY_GAIN * config.width**-0.5)
    if kind == "output":
        return float((config.heads * config.head_size) ** -0.5)
    if kind == "down":
        return float(config.hidden**-0.5)
    if kind == "head":
        return float(_HEAD_GAIN * config.width**-0.5)
    return float(config.width**-0.5)


def inspect(path: Path) -> ModelConfig:
    """Read the sizes of the model in a safetensors file, without its tensors.

    Raises DemoError if the file is missing or is not a safetensors file, or if its tensors differ from the table above.
    """
    with _open(path) as file:
        found: dict[str, tuple[int, ...]] = {}
        for name in file.keys():  # noqa: SIM118 (the handle is no mapping)
            tensor = file.get_slice(name)
            found[name] = tuple(tensor.get_shape())
            if tensor.get_dtype() not in _DTYPES:
                raise DemoError(f"{path}: {name} is {tensor.get_dtype()}; expected one of {', '.join(_DTYPES)}")
    return _config_of(path, found)


def load(path: Path) -> Model:
    """Read a model from a safetensors file; raises DemoError as `inspect` does."""
    config = inspect(path)
    with _open(path) as file:
        tensors = {name: np.ascontiguousarray(file.get_tensor(name), dtype=np.float32) for name in shapes(config)}
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all():
            raise DemoError(f"{path}: {name} contains a value that is not finite")
    return _assemble(config, tensors)


def save(model: Model, path: Path) -> None:
    """Write a model to a safetensors file that `load` reads back to the same bits. Raises DemoError."""
    _safetensors()
    from safetensors.numpy import save_file

    try:
        save_file({name: np.ascontiguousarray(tensor) for name, tensor in _named(model)}, path)
    except OSError as error:
        raise DemoError(f"{path}: cannot be written: {error.strerror or error}") from error
    except Exception as error:
        # The library wraps an OS error in its own type.
        raise DemoError(f"{path}: cannot be written: {error}") from error


def fingerprint(model: Model) -> str:
    """Return a checksum (CRC-32) of the sizes and weights, as eight hexadecimal digits."""
    value = zlib.crc32(repr(model.config).encode())
    for _, tensor in _named(model):
        value = zlib.crc32(np.ascontiguousarray(tensor).data, value)
    return f"{value:08x}"


def _named(model: Model) -> Iterator[tuple[str, Floats]]:
    weights = model.weights
    yield "embedding", weights.embedding
    for number, layer in enumerate(weights.layers):
        for name in _LAYER_FIELDS:
            yield f"layers.{number}.{name}", getattr(layer, name)
    yield "final_norm", weights.final_norm
    yield "head", weights.head


def _assemble(config: ModelConfig, tensors: Mapping[str, Floats]) -> Model:
    layers = tuple(
        LayerWeights(**{name: tensors[f"layers.{number}.{name}"] for name in _LAYER_FIELDS})
        for number in range(config.layers)
    )
    weights = Weights(tensors["embedding"], layers, tensors["final_norm"], tensors["head"])
    return Model(config, weights)


def _safetensors() -> Any:
    try:
        import safetensors
    except ImportError as error:
        raise DemoError('weight files need safetensors; install with: pip install "aiote[safetensors]"') from error
    return safetensors


def _open(path: Path) -> Any:
    safetensors = _safetensors()
    if not path.is_file():
        raise DemoError(f"{path}: no such file; `aiote demo weights {path}` writes one to try")
    try:
        return safetensors.safe_open(path, framework="numpy")
    except Exception as error:
        # SafetensorError is a plain Exception subclass; an unreadable file is an OSError.
        raise DemoError(f"{path}: cannot be read as a safetensors file: {error}") from error


def _config_of(path: Path, found: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    query, key, gate = (found.get(f"layers.0.{name}", ()) for name in ("query", "key", "gate"))
    if len(query) != 3 or len(key) != 3 or len(gate) != 2:
        raise DemoError(
            f"{path}: not a model of this demo: layers.0.query [width, heads, head_size], layers.0.key "
            "[width, kv_heads, head_size] and layers.0.gate [width, hidden] give its sizes, and some are missing"
        )
    layers = len({name.split(".")[1] for name in found if name.startswith("layers.")})
    config = ModelConfig(layers, query[1], key[1], query[2], query[0], gate[1], VOCABULARY)
    if min(layers, *query, *key, *gate) < 1 or config.heads % config.kv_heads or config.head_size % 2:
        raise DemoError(
            f"{path}: {config.heads} heads, {config.kv_heads} key and value heads of size {config.head_size}: "
            "expected the heads to be a multiple of the key and value heads, and an even size"
        )
    wanted = shapes(config)
    for name in sorted(wanted.keys() | found.keys()):
        if found.get(name) != wanted.get(name):
            raise DemoError(
                f"{path}: {name} is {_shape(found.get(name))}, expected {_shape(wanted.get(name))} "
                f"(the sizes come from layers.0; the vocabulary is {VOCABULARY}: bytes, a begin and an end token)"
            )
    return config


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))
