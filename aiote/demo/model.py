"""A decoder-only transformer in numpy: grouped-query attention over a paged cache, RoPE, RMSNorm, SwiGLU.

It owns the arithmetic and must not know where its pages came from. The same functions serve the prefiller, the decoder
and the one-process reference, on arrays of the same shapes and with one BLAS thread, so equal inputs give equal bits.
The demo's comparison of tokens relies on that. Position 0 is the first token; `stop` is always exclusive.

Sources: RoPE, arXiv 2104.09864 (rotating halves, as Llama does); grouped-query attention, arXiv 2305.13245; SwiGLU,
arXiv 2002.05202; RMSNorm, arXiv 1910.07467.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aiote.demo.request_cache import Floats, RequestCache, plan

__all__ = ["LayerWeights", "Model", "ModelConfig", "TokenSpan", "Weights", "swiglu"]

_EPSILON = np.float32(1e-5)
_ROPE_BASE = 10000.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes of a model; the shapes of its weights determine all of them."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    width: int
    hidden: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer, float32, with the shapes of `weights.layer_shapes`."""

    attention_norm: Floats
    query: Floats
    key: Floats
    value: Floats
    output: Floats
    mlp_norm: Floats
    gate: Floats
    up: Floats
    down: Floats


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model."""

    embedding: Floats
    layers: tuple[LayerWeights, ...]
    final_norm: Floats
    head: Floats


@dataclass(slots=True)
class TokenSpan:
    """Tokens start..stop on their way through the layers; each layer replaces `hidden` [tokens, width]."""

    start: int
    stop: int
    hidden: Floats
    cosines: Floats
    sines: Floats
    mask: Floats | None


class Model:
    """The transformer. It is stateless: a request's state is in its cache, so that threads may share a model."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        half = config.head_size // 2
        self._frequencies = _ROPE_BASE ** (-np.arange(half, dtype=np.float64) / half)

    def begin(self, tokens: Sequence[int], start: int) -> TokenSpan:
        """Embed the tokens of positions from `start` on, and prepare the position data that every layer needs."""
        stop = start + len(tokens)
        angles = np.outer(np.arange(start, stop, dtype=np.float64), self._frequencies)
        mask = None
        if len(tokens) > 1:
            mask = np.zeros((len(tokens), stop), dtype=np.float32)
            mask[np.arange(stop) > np.arange(start, stop)[:, None]] = -np.inf
        return TokenSpan(
            start=start,
            stop=stop,
            hidden=self.weights.embedding[np.asarray(tokens, dtype=np.intp)],
            cosines=np.cos(angles).astype(np.float32)[:, None, :],
            sines=np.sin(angles).astype(np.float32)[:, None, :],
            mask=mask,
        )

    def layer(self, number: int, span: TokenSpan, cache: RequestCache) -> None:
        """Run one layer over a span: store its keys and values in the cache and replace `span.hidden`."""
        normed = self.attend(number, span, cache)
        span.hidden = span.hidden + self.mlp(number, normed)

    def attend(self, number: int, span: TokenSpan, cache: RequestCache) -> Floats:
        """Run a layer's attention as `layer` does, and return the input of its MLP [tokens, width]."""
        span.hidden = span.hidden + self._attention(number, span, cache)
        return _rms_norm(span.hidden, self.weights.layers[number].mlp_norm)

    def mlp(self, number: int, normed: Floats) -> Floats:
        """Return the output of a layer's MLP for tokens [tokens, width]."""
        weights = self.weights.layers[number]
        return swiglu(normed, weights.gate, weights.up, weights.down)

    def logits(self, span: TokenSpan) -> Floats:
        """Return the logits [vocabulary] of the span's last position for the next token."""
        last = _rms_norm(span.hidden[-1:], self.weights.final_norm)
        logits: Floats = (last @ self.weights.head)[0]
        return logits

    def all_logits(self, span: TokenSpan) -> Floats:
        """Return the logits [tokens, vocabulary] of each of the span's positions for the token after it."""
        logits: Floats = _rms_norm(span.hidden, self.weights.final_norm) @ self.weights.head
        return logits

    def step(self, token: int, position: int, cache: RequestCache) -> Floats:
        """Run one token through all layers and return the logits for the next."""
        span = self.begin([token], position)
        for number in range(self.config.layers):
            self.layer(number, span, cache)
        return self.logits(span)

    def steps(self, tokens: Sequence[int], positions: Sequence[int], caches: Sequence[RequestCache]) -> Floats:
        """Run one token of each of several requests through all layers; return their logits [requests, vocabulary].

        Each weight matrix takes one product for all requests; attention runs for each request by itself. So the logits
        equal those of `step` up to rounding.
        """
        hidden: Floats = self.weights.embedding[np.asarray(tokens, dtype=np.intp)]
        spans = [self.begin([token], position) for token, position in zip(tokens, positions, strict=True)]
        cosines, sines = (np.concatenate([getattr(span, name) for span in spans]) for name in ("cosines", "sines"))
        for number in range(self.config.layers):
            weights = self.weights.layers[number]
            queries, keys, values = self._project(number, hidden, cosines, sines)
            heads: Floats = np.concatenate(
                [
                    self._mix(number, span, cache, queries[i : i + 1], keys[i : i + 1], values[i : i + 1])
                    for i, (span, cache) in enumerate(zip(spans, caches, strict=True))
                ]
            )
            hidden = hidden + heads @ weights.output.reshape(heads.shape[1], self.config.width)
            hidden = hidden + self.mlp(number, _rms_norm(hidden, weights.mlp_norm))
        logits: Floats = _rms_norm(hidden, self.weights.final_norm) @ self.weights.head
        return logits

    def prefill(self, tokens: Sequence[int], cache: RequestCache, chunk_tokens: int) -> Floats:
        """Run a whole prompt through all layers, chunk by chunk, and return the logits for the first new token."""
        logits = np.zeros(0, dtype=np.float32)
        for chunk in plan(len(tokens), chunk_tokens):
            span = self.begin(tokens[chunk.start : chunk.stop], chunk.start)
            for number in range(self.config.layers):
                self.layer(number, span, cache)
            logits = self.logits(span)
        return logits

    def _attention(self, number: int, span: TokenSpan, cache: RequestCache) -> Floats:
        heads = self._mix(number, span, cache, *self._project(number, span.hidden, span.cosines, span.sines))
        projected: Floats = heads @ self.weights.layers[number].output.reshape(heads.shape[1], self.config.width)
        return projected

    def _project(self, number: int, hidden: Floats, cosines: Floats, sines: Floats) -> tuple[Floats, Floats, Floats]:
        """Return the queries, keys and values [tokens, heads, head_size] of tokens."""
        config, weights = self.config, self.weights.layers[number]
        count, size = len(hidden), config.head_size
        normed = _rms_norm(hidden, weights.attention_norm)
        queries = _rotate((normed @ _flat(weights.query)).reshape(count, config.heads, size), cosines, sines)
        keys = _rotate((normed @ _flat(weights.key)).reshape(count, config.kv_heads, size), cosines, sines)
        return queries, keys, (normed @ _flat(weights.value)).reshape(count, config.kv_heads, size)

    def _mix(
        self, number: int, span: TokenSpan, cache: RequestCache, queries: Floats, keys: Floats, values: Floats
    ) -> Floats:
        """Store a request's new keys and values, and return its queries' attention output [tokens, heads * size]."""
        config = self.config
        count, size, group = len(queries), config.head_size, config.heads // config.kv_heads
        cache.write(number, span.start, keys, values)
        all_keys, all_values = cache.read(number, span.stop)
        # [kv_heads, group * tokens, size]: heads that share keys and values share one matrix product.
        grouped = queries.reshape(count, config.kv_heads, group, size).transpose(1, 2, 0, 3)
        grouped = grouped.reshape(config.kv_heads, group * count, size) * np.float32(size**-0.5)
        scores: Floats = (grouped @ all_keys.transpose(0, 2, 1)).reshape(config.kv_heads, group, count, span.stop)
        if span.mask is not None:
            scores += span.mask
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        mixed: Floats = scores.reshape(config.kv_heads, group * count, span.stop) @ all_values
        mixed /= scores.sum(axis=-1).reshape(config.kv_heads, group * count, 1)
        return mixed.reshape(config.heads, count, size).transpose(1, 0, 2).reshape(count, config.heads * size)


def swiglu(tokens: Floats, gate: Floats, up: Floats, down: Floats) -> Floats:
    """Return the output of an MLP with these matrices for tokens [..., width]."""
    gated = tokens @ gate
    # x * sigmoid(x) is computed with tanh, which cannot overflow.
    gated = gated * (np.float32(0.5) * (np.float32(1.0) + np.tanh(gated * np.float32(0.5))))
    made: Floats = (gated * (tokens @ up)) @ down
    return made


def _flat(projection: Floats) -> Floats:
    """View a projection [width, heads, head_size] as the matrix [width, heads * head_size]."""
    return projection.reshape(projection.shape[0], -1)


def _rms_norm(values: Floats, gain: Floats) -> Floats:
    mean: Floats = np.mean(np.square(values), axis=-1, keepdims=True, dtype=np.float32)
    scale: Floats = np.sqrt(mean + _EPSILON, dtype=np.float32)
    normed: Floats = values / scale * gain
    return normed


def _rotate(heads: Floats, cosines: Floats, sines: Floats) -> Floats:
    half = heads.shape[-1] // 2
    first, second = heads[..., :half], heads[..., half:]
    return np.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)
