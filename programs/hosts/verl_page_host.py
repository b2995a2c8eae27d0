"""What docs/connectors.md says of verl is a configuration that verl takes."""

from __future__ import annotations

import importlib

import yaml
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.workers.config import CheckpointEngineConfig

from support.connectors.recipes import recipe


def test_the_recipe_names_an_engine_that_verl_finds():
    config = CheckpointEngineConfig(
        **yaml.safe_load(recipe("verl"))["actor_rollout_ref"]["rollout"]["checkpoint_engine"]
    )
    importlib.import_module(config.custom_backend_module)
    assert CheckpointEngineRegistry.get(config.backend).__module__ == "aiote.connectors.verl"
    assert config.engine_kwargs == {"aiote": {}}
