"""The simulated network as `open_engine` and tests meet it."""

from __future__ import annotations

import asyncio
import time

import pytest

import aiote
from aiote.testing import CONNECTX7_400G, UNRULY, Fabric, NicModel, VirtualLoop, run
from support.engines.opening import run_script

pytestmark = pytest.mark.libfabric


async def test_without_a_network_it_says_what_to_do():
    with pytest.raises(aiote.UsageError, match="aiote.testing.Fabric"):
        await aiote.open_engine("sim")


async def test_a_fabric_is_the_network_of_its_block():
    with Fabric(1, rails=3) as fabric:
        async with aiote.open_engine("sim") as engine, aiote.open_engine("sim", ["sim2", "sim0"]) as other:
            assert [rail.name for rail in engine.rails] == ["sim0", "sim1", "sim2"]
            assert [rail.name for rail in other.rails] == ["sim2", "sim0"]
            with pytest.raises(aiote.UsageError, match="'sim3' does not exist; this network has sim0, sim1, sim2"):
                await aiote.open_engine("sim", ["sim3"])
            with pytest.raises(aiote.UsageError, match="close the engines first"):
                fabric.close()
            with pytest.raises(aiote.UsageError, match="no simulated rail 7"):
                fabric.kill_rail(engine, 7)
    with pytest.raises(aiote.UsageError, match="closed"):
        await fabric.open_engine()


async def test_two_networks_do_not_reach_each_other_s_rails():
    """Nor does one that is used in real time serve a loop in virtual time."""
    one, other = Fabric(1), Fabric(2)
    async with one.open_engine() as left, other.open_engine() as right:
        with pytest.raises(aiote.PeerError):
            await left.connect(right.address)
    one.close()
    other.close()


def test_a_network_keeps_its_kind_of_time():
    fabric = Fabric(1)

    async def use() -> None:
        async with fabric.open_engine():
            pass

    asyncio.run(use())
    with pytest.raises(aiote.UsageError, match="virtual time"):
        run(use())
    fabric.close()


def test_the_thread_mode_is_refused_in_virtual_time():
    async def main(fabric: Fabric) -> None:
        with pytest.raises(aiote.UsageError, match="adaptive"):
            await fabric.open_engine(progress="thread")

    run(main)


@pytest.mark.parametrize(
    "wrong",
    [{"rails": 0}, {"rails": 9}, {"rails": 3, "model": [UNRULY]}, {"model": []}],
    ids=lambda wrong: str(list(wrong)),
)
def test_numbers_of_rails_are_checked(wrong):
    with pytest.raises(aiote.UsageError, match="expected 1 to 8 rails"):
        Fabric(1, **wrong)


@pytest.mark.parametrize(
    "wrong", [{"gbps": -1}, {"pieces": 5}, {"refusals": 1}, {"queue": 0}], ids=lambda wrong: str(wrong)
)
def test_models_are_checked(wrong):
    with pytest.raises(aiote.UsageError):
        NicModel(name="none", **wrong)


def test_rails_of_different_models_and_offsets_carry_all_bytes():
    """NICs that address memory in different ways, one much slower: all bytes arrive, and the times add up."""

    async def main(fabric: Fabric) -> None:
        async with fabric.open_engine() as left, fabric.open_engine() as right:
            pool = bytearray(1 << 20)
            source, target = left.register(b"x" * (1 << 20)), left.attach(right.register(pool).descriptor)
            await left.write_imm(source, target, 1)
            await right.counter(1).wait(1)
            assert pool == b"x" * (1 << 20)
            assert [rail.speed_mbps for rail in left.rails] == [400_000, 0, 1000]

    run(main, 1, model=[CONNECTX7_400G, UNRULY, NicModel(name="old", gbps=1)])


def test_an_hour_of_heartbeats_takes_a_bounded_number_of_turns(monkeypatch):
    """Each second costs eighteen turns of the loop, for two heartbeats; what those take is up to the machine."""
    turns = 0

    class Counting(VirtualLoop):
        def _run_once(self) -> None:
            nonlocal turns
            turns += 1
            super()._run_once()  # type: ignore[misc]

    monkeypatch.setattr("aiote.testing.virtual_run.VirtualLoop", Counting)

    async def main(fabric: Fabric) -> float:
        async with fabric.open_engine() as left, fabric.open_engine() as right:
            await left.connect(right.address)
            for _ in range(60):
                await asyncio.sleep(60)
                await left.send(right.address, b"still here")
                await right.recv()
            return fabric.now

    started = time.process_time()
    assert run(main, limit=4000) >= 3600
    assert 3600 < turns < 40 * 3600
    assert time.process_time() - started < 60


def test_the_trace_says_what_happened():
    async def main(fabric: Fabric) -> None:
        async with fabric.open_engine() as left, fabric.open_engine() as right:
            await left.connect(right.address)
            before = len(fabric.trace())
            await left.write_imm(None, right.address, 3)
            await right.counter(3).wait(1)
            after = [entry for entry in fabric.trace()[before:] if entry.length == 0]
            assert [(entry.what, entry.engine) for entry in after] == [
                ("post", 0), ("place", 1), ("deliver", 1), ("complete", 0)
            ]  # fmt: skip
            assert sorted(entry.time for entry in after) == [entry.time for entry in after]

    run(main, 3)


def test_a_watched_value_and_a_refused_post_have_virtual_timers():
    """What no descriptor announces is looked at by timers, and those are virtual."""
    value = bytearray(8)

    async def main(fabric: Fabric) -> None:
        async with fabric.open_engine() as left, fabric.open_engine() as right:
            asyncio.get_running_loop().call_later(5, value.__setitem__, 0, 1)
            async for _, new in left.watch(value):
                assert new == 1
                break
            assert 5 <= fabric.now < 5.01
            await asyncio.gather(*(left.write_imm(None, right.address, 3) for _ in range(500)))
            assert left.statistics().refused > 100
            assert right.counter(3).value == 500

    run(main, 3, model=NicModel(name="refusing", refusals=0.5))


def test_the_simulated_network_needs_no_libfabric():
    done = run_script(
        """
        import aiote
        from aiote.testing import Fabric, run

        async def main(fabric: Fabric) -> None:
            async with aiote.open_engine("sim") as left, aiote.open_engine("sim") as right:
                await left.write_imm(None, right.address, 3)
                await right.counter(3).wait(1)
                fabric.kill_rail(left)
                try:
                    await left.write_imm(None, right.address, 3)
                except aiote.AioteError as error:
                    print(error)

        run(main)
        """,
        AIOTE_LIBFABRIC="/nonexistent/libfabric.so.1",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "sim0" in done.stdout
