"""How a token is chosen from logits, and what its log-probabilities are.

The random number for the token at a position comes from the request's seed and that position alone. So a request that
is continued by another server, from where the first one failed, goes on as it would have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

Logits = NDArray[Any]
SEEDS = 1 << 63


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to choose: the likeliest token at a `temperature` of 0; else from the likeliest ones that have `top_p` of the
    probability together. `logprobs`: how many alternatives to name; None: no log-probabilities at all.
    """

    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    seed: Annotated[int, Meta(ge=0, le=SEEDS - 1)] = 0
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """A token that was chosen; `top` are the likeliest ones, whether chosen or not, and `logprob` its own."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def choose(logits: Logits, position: int, how: Sampling) -> Token:
    """Return the token for a position. logits: [vocabulary]."""
    if how.temperature:
        number = _draw(logits.astype(np.float64) / how.temperature, position, how)
    else:
        number = int(np.argmax(logits))
    if how.logprobs is None:
        return Token(number)
    values = _normed(logits.astype(np.float64))
    best = np.argsort(-values, kind="stable")[: how.logprobs].tolist()
    return Token(number, float(values[number]), tuple((token, float(values[token])) for token in best))


def scores(logits: Logits, chosen: NDArray[np.uint32], top: int) -> tuple[NDArray[np.uint32], NDArray[np.float64]]:
    """Return the log-probabilities of tokens that are there already, and of the `top` likeliest in their places.

    logits: [tokens, vocabulary], chosen: [tokens]. What is returned is [tokens, 1 + top], each token's own first.
    """
    values = _normed(logits.astype(np.float64))
    best = np.argsort(-values, axis=-1, kind="stable")[:, :top]
    ids = np.concatenate([chosen[:, None], best], axis=1).astype(np.uint32)
    return ids, np.take_along_axis(values, ids.astype(np.intp), axis=1)


def _draw(logits: NDArray[np.float64], position: int, how: Sampling) -> int:
    probabilities = np.exp(_normed(logits))
    order = np.argsort(-probabilities, kind="stable")
    sums = np.cumsum(probabilities[order])
    # The first one is always among them; what comes before a token is less than top_p.
    count = int(np.searchsorted(sums, min(how.top_p, sums[-1]), side="left")) + 1
    random = np.random.Generator(np.random.Philox(key=how.seed, counter=position)).random()
    return int(order[min(int(np.searchsorted(sums[:count], random * sums[count - 1], side="right")), count - 1)])


def _normed(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    out: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return out
