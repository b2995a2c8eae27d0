"""The demo's transformer with a mixture of experts: each layer adds the output of a token's top experts to its MLP.

The MLP is then the shared expert of DeepSeekMoE (arXiv 2401.06066). An expert computes each row as a product of its
own, because the product of several rows may have other bits, and the ranks determine which rows come together.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aiote.demo import tokens, weights
from aiote.demo.model import swiglu
from aiote.demo.request_cache import Floats, RequestCache
from aiote.moe import MoeConfig

__all__ = ["EXPERTS", "LOCAL", "PROMPTS", "RANKS", "MoeModel", "MoeSettings"]

RANKS, EXPERTS, TOP_K = 4, 16, 4
LOCAL = EXPERTS // RANKS
PROMPTS = [
    tokens.encode(text)
    for text in (b"The lighthouse keeper ", b"A ship was announced ", b"Once, in a storm, ", b"He never looked ")
]
"""The prompt of each rank."""

_HIDDEN = 128
# The experts contribute so much that a text differs without some of them.
_EXPERT_GAIN = 4.0

Mix = Callable[[int, Floats], Awaitable[Floats]]


@dataclass(frozen=True, slots=True)
class MoeSettings:
    """The options of a run; each rank generates `tokens` tokens in each act."""

    provider: str
    layers: int
    tokens: int
    seed: int

    def config(self) -> MoeConfig:
        """Return the configuration of the ranks' group."""
        width = weights.seeded_config(self.layers).width
        most = max(map(len, PROMPTS))
        types = {"dtype": "float32", "out_dtype": "float32"}
        return MoeConfig(experts=EXPERTS, top_k=TOP_K, hidden=width, tokens=most, on_loss="mask", **types)  # type: ignore[arg-type]

    def to_json(self) -> str:
        """Return the settings as one line for a child's command line."""
        return json.dumps(dataclasses.asdict(self))


class MoeModel:
    """The model with all of its experts, though a rank computes only its own; equal settings give equal bits."""

    def __init__(self, settings: MoeSettings) -> None:
        self.layers = settings.layers
        config = weights.seeded_config(settings.layers)
        self._model = weights.seeded(config, settings.seed)
        rng = np.random.Generator(np.random.PCG64([settings.seed, EXPERTS]))

        def drawn(*shape: int) -> Floats:
            return rng.standard_normal((self.layers, *shape), dtype=np.float32) * np.float32(shape[-2] ** -0.5)

        self._router = drawn(config.width, EXPERTS)
        self._gate, self._up = (drawn(EXPERTS, config.width, _HIDDEN) for _ in range(2))
        self._down = drawn(EXPERTS, _HIDDEN, config.width) * np.float32(_EXPERT_GAIN)
        self._cache_shape = config.layers, 1, 2, config.kv_heads, -1, config.head_size

    def route(self, layer: int, normed: Floats) -> tuple[NDArray[np.int64], Floats]:
        """Return the experts of each token and their weights, both (tokens, k)."""
        scores = normed @ self._router[layer]
        ids = np.argsort(-scores, axis=1, kind="stable")[:, :TOP_K]
        chosen: Floats = np.exp(np.take_along_axis(scores, ids, 1))
        chosen /= np.sum(chosen, 1, keepdims=True)
        return ids, chosen

    def expert(self, layer: int, number: int, rows: Floats) -> Floats:
        """Return the output of an expert for rows (rows, width)."""
        own = (one[layer, number] for one in (self._gate, self._up, self._down))
        return swiglu(rows[:, None], *own)[:, 0]

    def shared(self, layer: int, normed: Floats) -> Floats:
        """Return the output of the layer's MLP for tokens (tokens, width)."""
        return self._model.mlp(layer, normed)

    def compute_locally(self, layer: int, normed: Floats, missing: Collection[int]) -> Floats:
        """Return the layer's addition to tokens without the experts of the `missing` ranks, computed here without an
        engine.

        The sum over k is computed as in `MoeGroup.combine`: in float32, in the order of k.
        """
        routed = np.zeros_like(normed)
        ids, shares = self.route(layer, normed)
        for token, slot in np.ndindex(ids.shape):
            number = int(ids[token, slot])
            if number // LOCAL not in missing:
                routed[token] += shares[token, slot] * self.expert(layer, number, normed[token : token + 1])[0]
        return self.shared(layer, normed) + routed

    async def generate(self, prompt: list[int], most: int, mix: Mix) -> AsyncGenerator[tuple[int, int], None]:
        """Yield the tokens that follow a prompt, greedily, each with a CRC-32 of all bits of its logits.

        `mix(layer, tokens)` returns the layer's addition to tokens after its attention.
        """
        # The whole request is in one page.
        shape = [len(prompt) + most if size < 0 else size for size in self._cache_shape]
        cache = RequestCache(np.zeros(shape, np.float32), [0])
        span = self._model.begin(prompt, 0)
        for position in range(len(prompt), len(prompt) + most):
            for layer in range(self.layers):
                normed = self._model.attend(layer, span, cache)
                span.hidden = span.hidden + await mix(layer, normed)
            logits = self._model.logits(span)
            token = int(np.argmax(logits))
            yield token, zlib.crc32(logits.data)
            span = self._model.begin([token], position)
