"""What one run was asked to do, and the job that a child process reads from its standard input."""

from __future__ import annotations

import base64
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aiote.demo import weights
from aiote.demo.model import Model, ModelConfig
from aiote.demo.pages import Floats
from aiote.kvcache import CacheLayout

__all__ = ["Job", "Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of a run, the same in every process. `layers` and `seed` are unused with a weights file."""

    provider: str
    layers: int
    seed: int
    weights: str | None
    page_tokens: int
    chunk_tokens: int
    new_tokens: int
    concurrency: int
    pool_pages: int

    def config(self) -> ModelConfig:
        """Return the sizes of the model; raises DemoError if the weights file is not usable."""
        return weights.seeded_config(self.layers) if self.weights is None else weights.inspect(Path(self.weights))

    def model(self) -> Model:
        """Make the model; raises DemoError if the weights file is not usable."""
        if self.weights is None:
            return weights.seeded(weights.seeded_config(self.layers), self.seed)
        return weights.load(Path(self.weights))

    def layout(self, config: ModelConfig) -> CacheLayout:
        """Return how the cache of a model of these sizes lies in memory."""
        return CacheLayout(config.layers, config.kv_heads, config.head_size, self.page_tokens, "float32")

    def memory(self, config: ModelConfig) -> Floats:
        """Return a cache of `pool_pages` pages a layer, of zeros."""
        return np.zeros((config.layers, self.pool_pages, *self.layout(config).page_shape(1)), dtype=np.float32)

    def with_pool_for(self, longest_prompt: int) -> Settings:
        """Return the same settings with pools in which `concurrency` prompts of so many tokens and answers fit."""
        pages = -(-(longest_prompt + self.new_tokens - 1) // self.page_tokens)
        return dataclasses.replace(self, pool_pages=self.concurrency * pages)


@dataclass(frozen=True, slots=True)
class Job:
    """A line of JSON on a child's standard input. `router` is an engine's address; `prompts` are for `local` alone."""

    settings: Settings
    router: str = ""
    prompts: tuple[bytes, ...] = ()

    def to_json(self) -> str:
        """Return the job as one line."""
        return json.dumps(
            {
                "settings": dataclasses.asdict(self.settings),
                "router": self.router,
                "prompts": [base64.b64encode(prompt).decode() for prompt in self.prompts],
            }
        )

    @classmethod
    def from_json(cls, line: str | bytes) -> Job:
        """Read a job back; raises ValueError, KeyError or TypeError if the line is none."""
        data = json.loads(line)
        prompts = tuple(base64.b64decode(prompt, validate=True) for prompt in data["prompts"])
        return cls(Settings(**data["settings"]), data["router"], prompts)
