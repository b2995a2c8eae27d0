"""Opening and closing a group of ranks: `open_group`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import aiote

from .. import service
from ..aio import run_background_tasks, run_shielded
from .config import MoeConfig
from .device import Launcher
from .group import MoeGroup

__all__ = ["open_group"]


@asynccontextmanager
async def open_group(
    engine: aiote.Engine,
    members: Sequence[aiote.Address | str],
    rank: int,
    config: MoeConfig,
    *,
    group: int = 0,
    debug: bool = False,
    device: int | Launcher | None = None,
    masked: Iterable[int] = (),
    open_timeout: float | None = None,
) -> AsyncIterator[MoeGroup]:
    """Be a rank of a group for the length of an `async with`; `members` are the addresses of all ranks, in order.

    The body begins when every rank has opened the group, in whatever order, within `open_timeout` seconds: by default
    the engine's `connect_timeout`, `math.inf` for no limit. All memory is allocated and registered here. An engine may
    be in several groups, which differ by their number `group`. With `debug` the rows of a batch are overwritten once it
    is over. With `device`, the number of a GPU, arrays are in its memory (cupy's, torch's). Steps then launch kernels
    on cupy's current stream, which must be the same in all steps; their results are valid in the order of that stream.
    With on_loss="mask" the ranks in `masked`, which every rank gives alike, take no part from the start.
    Raises UsageError if ranks have different configs, or if there is no such GPU; PeerError if a rank cannot be
    reached; ConnectTimeoutError, which names the ranks that have not come; FabricError if memory cannot be registered.
    On leaving, raises GroupBrokenError if kernels of a GPU that use this rank's memory do not end.
    """
    moe = MoeGroup(engine, members, rank, config, group=group, debug=debug, device=device)
    for lost in masked:
        moe.mask(lost, "it was masked when the group opened")
    await moe.memory.register(engine, moe.others)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(run_shielded, moe.close)
        await stack.enter_async_context(service.serve(engine, moe.service(moe)))
        tasks = await stack.enter_async_context(run_background_tasks())
        try:
            await moe.open(tasks, open_timeout)
            yield moe
        finally:
            await run_shielded(moe.leave)
