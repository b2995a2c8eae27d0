"""A loader that is drawn: steps that each make another array of those before them, and a write to a parameter.

A library's module (`numpy_loaders`, `torch_loaders`) says what may be drawn. Steps are drawn with the real arrays at
hand, so that most of them are valid.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Step = tuple[str, Callable[[Any], Any]]
KINDS = {"moves": 50, "makes": 25, "joins": 12, "asks": 8, "hostile": 5}
"""How often each kind of step is drawn."""


def swallowed(call: Callable[[], Any], other: Any) -> Any:
    """Return what a call returns, and where it fails something else, as a careless loader does."""
    try:
        return call()
    except Exception:
        return other


class Drawn:
    """A loader of one parameter, the arrays that it gets, and in `text` what was drawn."""

    def __init__(self, library: Any, seed: int) -> None:
        rng = random.Random(seed)
        self._library = library
        self.values = {f"w{i}": library.source(rng) for i in range(rng.choice([1, 1, 2]))}
        self.text = [f"{name} {value.dtype} {tuple(value.shape)}" for name, value in self.values.items()]
        self._steps: list[Callable[[list[Any]], Any]] = []
        made = list(self.values.values())
        for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 4])):
            self._draw(rng, made)
        self._at = rng.choice([len(made) - 1, len(made) - 1, rng.randrange(len(made))])
        self._parameter, view = library.target(rng, made[self._at])
        text, self._write = rng.choice(library.writes(rng, made[self._at], view))
        self.text.append(f"{text} of {self._at} to {self._parameter.dtype} {tuple(self._parameter.shape)}")

    def _draw(self, rng: random.Random, made: list[Any]) -> None:
        at = rng.randrange(len(made)) if rng.random() < 0.3 else len(made) - 1
        x = made[at]
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        text, call = rng.choice(getattr(self._library, kind)(rng, x))
        alike = [i for i, one in enumerate(made) if one.shape == x.shape and one.dtype == x.dtype]
        several, number = [at, *alike[:2]], rng.randrange(6)

        def step(before: list[Any]) -> Any:
            found = call([before[i] for i in several] if kind == "joins" else before[at])
            return found[number % len(found)] if isinstance(found, (list, tuple)) else found

        try:
            found = step(made)
        except Exception:
            return  # which this array does not have
        if self._library.is_usable(found):
            self.text.append(f"{len(made)}: {text} of {at}, {number}")
            self._steps.append(step)
            made.append(found)

    def parameters(self) -> dict[str, Any]:
        return {"p": self._library.copied(self._parameter)}

    def load(self, pairs: Any, parameters: Any) -> None:
        made = [tensor for _, tensor in pairs]
        for step in self._steps:
            made.append(step(made))
        self._write(parameters["p"], made[self._at])
