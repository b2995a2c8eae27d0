"""The options of one run, equal in every process of the run."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aiote.demo import weights
from aiote.demo.faults import DemoError
from aiote.demo.model import Model, ModelConfig
from aiote.demo.request_cache import Floats
from aiote.kvcache import Cache

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of a run. `layers` and `seed` are unused with a weights file, `provider` is for `open_engine`.

    Raises DemoError for chunks that are not whole pages.
    """

    provider: str
    layers: int
    seed: int
    weights: str | None
    page_tokens: int
    chunk_tokens: int
    new_tokens: int
    concurrency: int
    pool_pages: int

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1 or self.chunk_tokens % self.page_tokens:
            whole = max(-(-self.chunk_tokens // self.page_tokens), 1) * self.page_tokens
            raise DemoError(
                f"--chunk-tokens {self.chunk_tokens} is not a whole number of pages of {self.page_tokens} tokens; "
                f"try {whole}"
            )

    def config(self) -> ModelConfig:
        """Return the sizes of the model; raises DemoError if the weights file is not usable."""
        return weights.seeded_config(self.layers) if self.weights is None else weights.inspect(Path(self.weights))

    def model(self) -> Model:
        """Make the model; raises DemoError if the weights file is not usable."""
        if self.weights is None:
            return weights.seeded(weights.seeded_config(self.layers), self.seed)
        return weights.load(Path(self.weights))

    def pages_for(self, tokens: int) -> int:
        """Return how many pages `tokens` tokens need."""
        return -(-tokens // self.page_tokens)

    def cache(self, config: ModelConfig, name: str) -> tuple[Floats, Floats, Cache]:
        """Return a pool of `pool_pages` pages a layer [layers, pages, 2 (K, V), kv_heads, page_tokens, head_size], a
        pool of logits [pages, vocabulary], and the cache of both. In the cache a prompt's logits are a layer after the
        last, in group 1, in the page with the number of the prompt's last page.
        """
        pool, logits = self.memory(config), np.zeros((self.pool_pages, config.vocabulary), np.float32)
        cache = Cache(name)
        cache.add(pool, "layer page field head token item", fields=["k", "v"])
        cache.add(logits, "page item", layer=config.layers, group=1, fields=["logits"])
        return pool, logits, cache

    def memory(self, config: ModelConfig) -> Floats:
        """Return a cache of `pool_pages` pages a layer, filled with zeros."""
        shape = config.layers, self.pool_pages, 2, config.kv_heads, self.page_tokens, config.head_size
        return np.zeros(shape, dtype=np.float32)

    def with_pool_for(self, longest_prompt: int) -> Settings:
        """Return the same settings with pools that fit `concurrency` prompts of this length and their answers."""
        pages = self.pages_for(longest_prompt + self.new_tokens - 1)
        return dataclasses.replace(self, pool_pages=self.concurrency * pages)

    def to_json(self) -> str:
        """Return the settings as one line for a child's command line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Settings:
        """Read settings back; raises ValueError or TypeError if the line has none."""
        return cls(**json.loads(line))
