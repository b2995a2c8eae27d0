"""The function `run`, which runs a coroutine in virtual time."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from ..errors import UsageError
from .fabric import Fabric
from .virtual import VirtualLoop

__all__ = ["run"]

T = TypeVar("T")
HOUR_S = 3600.0


def run(
    main: Coroutine[Any, Any, T] | Callable[[Fabric], Coroutine[Any, Any, T]],
    seed: int = 0,
    *,
    limit: float = HOUR_S,
    debug: bool | None = None,
    **fabric: Any,
) -> T:
    """Run a coroutine in virtual time, within a `Fabric` of this seed, and return its result.

    If `main` is a function, it is called with the fabric. `fabric` are further arguments of the `Fabric`. `limit`
    bounds the virtual time, in seconds. Raises TimeoutError at the limit, and StandstillError if every task waits for
    an event that cannot come. Python's own random numbers are seeded during the run.
    """
    if not inspect.iscoroutine(main) and not callable(main):
        raise UsageError(f"run: expected a coroutine, or a function that returns one, got {type(main).__name__}")

    async def body() -> T:
        with Fabric(seed, **fabric) as network:
            return await (main if inspect.iscoroutine(main) else main(network))

    state = random.getstate()
    random.seed(seed)
    try:
        with asyncio.Runner(debug=debug, loop_factory=partial(VirtualLoop, limit)) as runner:
            return runner.run(body())
    finally:
        random.setstate(state)
