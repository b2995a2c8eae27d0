"""The parent's side of the one-process generation: starts it in a process of its own and reads its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aiote.demo.child import how_it_ended, spawn
from aiote.demo.faults import DemoError
from aiote.demo.local import LocalResult
from aiote.demo.settings import Job, Settings

__all__ = ["run_reference"]


async def run_reference(settings: Settings, prompts: Sequence[bytes], each: Callable[[], None]) -> list[LocalResult]:
    """Generate for the prompts in one process and return the results in order; `each` is called after every request.

    Raises DemoError if that process ends early or writes something else.
    """
    results: list[LocalResult] = []
    async with spawn("local", Job(settings, prompts=tuple(prompts))) as child:
        async for line in child.lines():
            try:
                results.append(LocalResult.from_json(line))
            except (ValueError, KeyError, TypeError) as error:
                raise DemoError(f"the {child.name} wrote {line[:80]!r}, which is no result") from error
            each()
        code = await child.wait()
        if code or [result.request for result in results] != list(range(len(prompts))):
            raise DemoError(
                f"the {child.name} (pid {child.pid}) ended after {len(results)} of {len(prompts)} requests "
                f"({how_it_ended(code)}): {child.complaint or 'it said nothing'}"
            )
    return results
