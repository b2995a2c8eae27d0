"""A group of ranks for the length of an `async with`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import aiote

from .. import service
from ..service.background import beside, to_the_end
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

    Entered when every rank is there, in whatever order they come, within `open_timeout` seconds; the engine's
    `connect_timeout` by default, `math.inf` for no limit. All memory is allocated and registered here. An engine may be
    in several groups, by `group`. With `debug` rows of a batch that is over are overwritten. With `device`, the number
    of a GPU, arrays are of its memory (cupy's, torch's); steps launch kernels on cupy's current stream, which is the
    same in all of them, and what they return is valid in its order. With on_loss="mask" nobody waits for the ranks that
    are `masked`, on every rank alike, from the start.
    Raises UsageError for ranks that have different configs and for a GPU that is not there, PeerError for one that
    cannot be reached, ConnectTimeoutError that names those that have not come, FabricError where memory cannot be
    registered; when it is left, GroupBrokenError where a GPU does not end what uses this rank's memory.
    """
    moe = MoeGroup(engine, members, rank, config, group, debug, device)
    for lost in masked:
        moe.mask(lost, "it was masked when the group opened")
    await moe.memory.register(engine)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(to_the_end, moe.close)
        await stack.enter_async_context(service.serve(engine, moe.service(moe)))
        tasks = await stack.enter_async_context(beside())
        try:
            await moe.open(tasks, open_timeout)
            yield moe
        finally:
            await to_the_end(moe.leave)
