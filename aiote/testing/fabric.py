"""The simulated network as tests use it: it opens engines, breaks their NICs, and records events."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Generator, Iterable, Sequence
from contextvars import Token
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from anyio.abc import SocketAttribute

import aiote

from ..errors import UsageError
from ..rails.sim import SimNetwork, SimRail, World, current_network
from .nics import UNRULY, NicModel
from .virtual import VirtualLoop

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Fabric", "Happened"]

MAX_RAILS = 8
SECOND = 1_000_000_000


class Happened(NamedTuple):
    """One event: its time (seconds), its kind, the engine, its NIC, the operation.

    `what`: post, place (a piece of the payload is in memory), deliver (the immediate or the message is), complete,
    fail, open and close (of an endpoint), fault. `status` is a negative error number, but the opcode of a post, and the
    state of a fault.
    """

    time: float
    what: str
    engine: int
    rail: int
    number: int
    length: int
    status: int


def running_virtual_loop() -> VirtualLoop | None:
    """Return the running event loop if its time is virtual, else None."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return None
    return loop if isinstance(loop, VirtualLoop) else None


class FabricOpening:
    """The object that `open_engine` returns. It can be awaited or entered, as that of `aiote.open_engine`."""

    def __init__(self, fabric: Fabric, rails: Iterable[str] | None, config: aiote.EngineConfig | None) -> None:
        self._fabric = fabric
        self._opening = aiote.open_engine("sim", rails, config)
        self._engine: aiote.Engine | None = None

    async def _open(self) -> aiote.Engine:
        token = current_network.set(self._fabric.network)
        try:
            return await self._opening
        finally:
            current_network.reset(token)

    def __await__(self) -> Generator[Any, Any, aiote.Engine]:
        return self._open().__await__()

    async def __aenter__(self) -> aiote.Engine:
        self._engine = await self._open()
        return self._engine

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._engine is not None
        await self._engine.aclose()


class Fabric:
    """A simulated network. The same seed, and the same calls in virtual time, give the same events.

    Each engine has `rails` NICs, named sim0, sim1 and so on, all of one `model` or each of its own model. As a context
    manager the fabric is the network of `open_engine("sim")`, and is closed at the end. Otherwise only its own
    `open_engine` uses it, and the caller closes it by `close`. `trace` returns up to `remembered` events.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        rails: int | None = None,
        model: NicModel | Sequence[NicModel] = UNRULY,
        remembered: int = 100_000,
    ) -> None:
        """Describe the network; it is made when the first engine is opened. Raises UsageError."""
        models = [model] * (rails or 1) if isinstance(model, NicModel) else list(model)
        if not 1 <= len(models) <= MAX_RAILS or rails not in (None, len(models)):
            raise UsageError(
                f"rails={rails!r} with {len(models)} models: expected 1 to {MAX_RAILS} rails, and one "
                "model or one for each"
            )
        self.seed = seed
        self.network = SimNetwork(
            seed, [each.nic(i) for i, each in enumerate(models)], lambda: running_virtual_loop() is not None, remembered
        )
        self.network.on_open = self._attach
        self._tokens: list[Token[SimNetwork | None]] = []

    def _attach(self, world: World) -> None:
        loop = running_virtual_loop()
        if world.virtual and loop is not None:
            loop.attach(world)

    def open_engine(
        self, rails: Iterable[str] | None = None, config: aiote.EngineConfig | None = None, **settings: Any
    ) -> FabricOpening:
        """Open an engine on this network, as `aiote.open_engine` does; `settings` are fields of the config."""
        base = config if config is not None else aiote.EngineConfig()
        return FabricOpening(self, rails, dataclasses.replace(base, **settings) if settings else base)

    def __enter__(self) -> Fabric:
        self._tokens.append(current_network.set(self.network))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        current_network.reset(self._tokens.pop())
        if error is None:
            self.close()
        elif self.network.has_opened_engine and not self.network.world.children:
            self.network.close()

    def close(self) -> None:
        """Close the network. Raises UsageError while an engine is open on it. Idempotent."""
        try:
            self.network.close()
        except RuntimeError as failure:
            raise UsageError(f"the fabric: {failure}; close the engines first") from failure

    # Faults of NICs and hosts.

    def rail(self, engine: aiote.Engine, rail: int | str = 0) -> SimRail:
        """Return an engine's NIC, by its number or its name. Raises UsageError."""
        rails = cast("list[SimRail]", engine._runtime.rail_set.rails)
        found = [each for each in rails if rail in (each.index, each.name)]
        if not found or not isinstance(found[0], SimRail):
            raise UsageError(f"{engine!r} has no simulated rail {rail!r}")
        return found[0]

    def kill_rail(
        self,
        engine: aiote.Engine,
        rail: int | str = 0,
        *,
        silently: bool = False,
        at: float | None = None,
        after: int | None = None,
    ) -> None:
        """Kill a NIC: now, `at` a time in seconds, or `after` that many more events.

        Operations in flight over it, from either side, end with an error, though some of their bytes may have arrived;
        endpoints on it are unusable from then on. `silently`: neither side gets an error, and all operations continue
        if the NIC is restored before the endpoints are closed.
        """
        self._change(engine, rail, "silent" if silently else "broken", at, after)

    def restore_rail(
        self, engine: aiote.Engine, rail: int | str = 0, *, at: float | None = None, after: int | None = None
    ) -> None:
        """Restore a NIC. New endpoints on it work, and so do old ones if the NIC was only silent."""
        self._change(engine, rail, "up", at, after)

    def _change(self, engine: aiote.Engine, rail: int | str, state: str, at: float | None, after: int | None) -> None:
        self.rail(engine, rail).device.change(state, self._when(at), after)

    def slow_rail(
        self,
        engine: aiote.Engine,
        rail: int | str = 0,
        *,
        by: float,
        at: float | None = None,
        after: int | None = None,
    ) -> None:
        """Delay all arrivals at a NIC `by` that many seconds; 0 ends the delay."""
        self.rail(engine, rail).device.slow(round(by * SECOND), self._when(at), after)

    @staticmethod
    def _when(at: float | None) -> int | None:
        return None if at is None else round(at * SECOND)

    def crash(self, engine: aiote.Engine) -> None:
        """Crash an engine's process: its NICs fall silent without an error to peers, and its connections are reset."""
        for rail in engine._runtime.rail_set.rails:
            self.kill_rail(engine, rail.index, silently=True)
        engine.abort()

    def partition(self, engine: aiote.Engine) -> None:
        """Partition an engine's host: its NICs are silent and its connections carry no bytes, without an error on any
        side.

        It works only in virtual time. Both sides continue to run, but receive nothing from each other. Raises
        UsageError.
        """
        self._hold(engine, held=True)
        for rail in engine._runtime.rail_set.rails:
            self.kill_rail(engine, rail.index, silently=True)

    def heal(self, engine: aiote.Engine) -> None:
        """End a partition, and let held bytes and operations continue. Raises UsageError."""
        self._hold(engine, held=False)
        for rail in engine._runtime.rail_set.rails:
            self.restore_rail(engine, rail.index)

    def _hold(self, engine: aiote.Engine, *, held: bool) -> None:
        loop = running_virtual_loop()
        if loop is None:
            raise UsageError("connections can be delayed in virtual time only: use aiote.testing.run")
        loop.ports.hold(engine.address.port, held)
        for stream in engine._links.control_streams():
            near = stream.extra(SocketAttribute.raw_socket).transport  # type: ignore[attr-defined]
            for transport in (near, near.other):
                if held:
                    transport.partition()
                else:
                    transport.heal()

    # Time and events.

    @property
    def now(self) -> float:
        """Seconds of the network's own time."""
        return self.network.world.now / SECOND

    @property
    def events(self) -> int:
        """The number of events so far: stages of operations, timers, faults."""
        return self.network.world.events

    @property
    def digest(self) -> str:
        """A digest of all events, including their times if time is virtual."""
        return f"{self.network.world.digest:016x}"

    def trace(self) -> list[Happened]:
        """Return the events from the first one on, at most `remembered` of them."""
        return [Happened(entry[0] / SECOND, *entry[1:]) for entry in self.network.world.seen()]
