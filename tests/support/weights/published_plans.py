"""Plans of the published updates, each made once for all tests.

Pipeline stages between the first and the last are alike. Without LONG one of them is planned; `left_out` says how many
are not, and tests add what these would bring.
"""

from __future__ import annotations

import functools

from aiote.cli import published_models
from aiote.weights import UpdatePlan, plan_update
from support.machine import LONG

STAGES = {"qwen3_235b": 8, "kimi_k2": 16}
LAYERS = {"qwen3_235b": (94, 12 + 12 + 10), "kimi_k2": (61, 4 + 4 + 1)}
"""Of the whole, and of three stages."""


@functools.cache
def plan(model: str, gather: str, whole: bool = LONG, **arguments: int) -> UpdatePlan:
    """Return a plan, `whole` or of three stages."""
    layers = LAYERS[model][not whole]
    made = getattr(published_models, model)(layers=layers, **arguments)
    return plan_update(*made.plan_of(), gather=gather)  # type: ignore[arg-type]


def left_out(model: str) -> int:
    """Return how many stages like the second one `plan` leaves out."""
    return 0 if LONG else STAGES[model] - 3
