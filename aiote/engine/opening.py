"""Check the arguments of `open_engine` and open the engine."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any

from ..config import EngineConfig
from ..errors import FabricError, UsageError
from ..rails import sim_identity
from .engine import Engine

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Opening", "open_engine"]


class Opening:
    """The result of `open_engine`: `async with` opens and closes; `await` opens, and the caller closes."""

    def __init__(self, provider: str, rails: tuple[str, ...] | None, config: EngineConfig) -> None:
        self.arguments = (provider, rails, config)
        self._engine: Engine | None = None

    async def _open(self) -> Engine:
        provider, rails, config = self.arguments
        if provider == "sim" and config.identity is None:
            # The identity decides which of two crossing connections stays; the same seed must give the same result.
            config = dataclasses.replace(config, identity=sim_identity())
        try:
            engine = Engine(provider, rails, config)
            try:
                await engine._open()
            except BaseException:
                engine.abort()
                raise
        except FabricError:
            raise
        except OSError as error:
            # Mostly from the event loop, which watches our descriptors and has run out of its own.
            raise FabricError(error.errno or 0, error.strerror or str(error), operation="open engine") from error
        return engine

    def __await__(self) -> Generator[Any, Any, Engine]:
        return self._open().__await__()

    async def __aenter__(self) -> Engine:
        self._engine = await self._open()
        return self._engine

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._engine is not None
        await self._engine.aclose()


def open_engine(
    provider: str = "auto", rails: Iterable[str] | None = None, config: EngineConfig | None = None, **settings: Any
) -> Opening:
    """Open an engine on the running event loop: `async with open_engine(...) as engine`.

    provider: "auto" (the best provider present, and shared memory for peers on this host), "local" or "socket" (which
    need no library), "tcp", "shm", "verbs", a libfabric provider's name, or "sim" (within an `aiote.testing.Fabric`).
    rails: names or local IP addresses of the NICs to open; by default the NIC that has the engine's own address, or all
    simulated NICs. config: an `EngineConfig`; settings: single fields by name, such as `spin_us=0`, which override
    `config`. `await open_engine(...)` returns an engine that the caller closes with `await engine.aclose()`. Raises
    FabricError if libfabric or the provider is missing, UsageError.
    """
    if not isinstance(provider, str):
        raise UsageError(f"provider must be a name, got {type(provider).__name__}")
    if isinstance(rails, str):
        raise UsageError(f"rails={rails!r}: expected a list of names, like [{rails!r}]")
    chosen = None if rails is None else tuple(rails)
    if chosen is not None and not 1 <= len(chosen) <= 8:
        raise UsageError(f"rails: expected from 1 to 8 names, got {len(chosen)}")
    return Opening(provider, chosen, _apply_settings(config, settings))


def _apply_settings(config: EngineConfig | None, settings: dict[str, Any]) -> EngineConfig:
    """Return the config with settings changed. Raises UsageError for a name that is not a setting."""
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    for name in settings:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean {near[0]}?" if near else f": expected one of {', '.join(names)}"
            raise UsageError(f"open_engine: {name!r} is no setting{hint}")
    if config is not None and not isinstance(config, EngineConfig):
        raise UsageError(f"config must be an EngineConfig, got {type(config).__name__}")
    return EngineConfig(**settings) if config is None else dataclasses.replace(config, **settings)
