"""What EFA's rails have to withstand, a case a process: `adversity.py CASE`. Each says at its end what it saw.

A *canary* is what the caller writes to a target once an await has ended: a byte that comes after that overwrites it.
"""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import gc
import os
import resource
import sys
import time
import warnings
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import aiote
from support.rails.standin_efa import REQUESTS, break_pairs, counted, fault, faulty, still_open

IMM = 7
SIZE = 1 << 20
CANARY = 0xAA
PACKET = 32 << 10
NICS = ("standin0-rdm", "standin1-rdm")
SOON = {"drain_timeout": 2.0, "heartbeat_interval": 0.5, "heartbeat_timeout": 20.0}
LONG = "AIOTE_TEST_LONG" in os.environ
HANGS_S = 1200 if LONG else 120


async def until(condition) -> None:
    """Wait for what has to come."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def pair(nics: int = 1, **settings) -> AsyncIterator[tuple[aiote.Engine, aiote.Engine]]:
    """Two connected engines."""
    both = [await aiote.open_engine(provider="efa", rails=list(NICS[:nics]), **SOON | settings) for _ in range(2)]
    await both[0].connect(both[1].address)
    try:
        yield both[0], both[1]
    finally:
        for engine in both:
            await engine.aclose()


async def released(memory: bytearray) -> None:
    """Let go what is held, and see that none of it lands on the canary."""
    held = still_open("packets")
    # Lenient, a close takes back what was sent: that shows which fault of ours only late packets find.
    assert held or os.environ.get("EFA_STANDIN_LENIENT") == "late", "no packet was held: the case shows nothing"
    fault("hold", 0)
    await until(lambda: still_open("packets") == still_open("unread") == 0)
    assert memory.count(CANARY) == len(memory), "a byte landed after the await had ended"
    print("packets that were held until the end:", held)


async def owner(transfer: aiote.Transfer) -> None:
    await transfer


async def cancelled(nics: int) -> None:
    async with pair(nics) as (left, right):
        memory = bytearray(SIZE)
        source, target = left.register(b"\1" * SIZE), left.attach(right.register(memory).descriptor)
        await left.write(source, target)
        fault("hold", REQUESTS)
        transfer = left.submit_write_imm(source, target, IMM)
        waiting = asyncio.ensure_future(owner(transfer))
        await until(lambda: still_open("packets") == SIZE // PACKET)
        await asyncio.sleep(0)  # for the task to begin
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        error = transfer.exception()
        assert isinstance(error, aiote.TransferError), repr(error)
        assert error.confirmed, "two live processes agree on the end"
        memory[:] = bytes([CANARY]) * SIZE
        await released(memory)


async def revoked(nics: int) -> None:
    async with pair(nics) as (left, right):
        memory = bytearray(SIZE)
        region = right.register(memory)
        lease = region.lease(slice(0, SIZE), left.address)
        source, target = left.register(b"\1" * SIZE), left.attach(lease.descriptor)
        fault("hold", REQUESTS)
        transfer = left.submit_write(source, target)
        await until(lambda: still_open("packets") == SIZE // PACKET)
        await lease.revoke()
        memory[:] = bytes([CANARY]) * SIZE
        await asyncio.gather(transfer, return_exceptions=True)
        assert isinstance(transfer.exception(), aiote.AioteError)
        await released(memory)


async def lost(nics: int) -> None:
    """The sender is gone without a word; what it sent is on its way still. Another engine keeps the network."""
    async with aiote.open_engine(provider="efa", rails=list(NICS[:nics])):
        async with pair(nics) as (left, right):
            memory = bytearray(SIZE)
            region = right.register(memory)
            source, target = left.register(b"\1" * SIZE), left.attach(region.descriptor)
            fault("hold", REQUESTS)
            transfer = left.submit_write(source, target)
            await until(lambda: still_open("packets") == SIZE // PACKET)
            left.abort()
            await until(lambda: not right.peers)
            await region.aclose()
            memory[:] = bytes([CANARY]) * SIZE
            await asyncio.gather(transfer, return_exceptions=True)
            await released(memory)


async def closed(nics: int) -> None:
    """Messages and writes of both sides are on their way when one closes: whoever posts on a closed pair crashes."""
    for turn in range(8):
        async with pair(nics, message_pool=2) as (left, right):
            memory = bytearray(SIZE)
            source, target = left.register(b"\1" * SIZE), left.attach(right.register(memory).descriptor)
            with faulty("hold", REQUESTS if turn % 2 else 2):
                under_way = [left.submit_write_imm(source[:4096], target[:4096], IMM) for _ in range(40)]
                sends = [
                    asyncio.ensure_future(one.send(other.address, bytes(9000)))
                    for one, other in ((left, right), (right, left))
                    for _ in range(12)
                ]
                for _ in range(4 * (turn // 2)):
                    await asyncio.sleep(0)
                (left if turn % 4 < 2 else right).abort()
                await until(lambda engine=right if turn % 4 < 2 else left: not engine.peers)
            await asyncio.gather(*under_way, *sends, return_exceptions=True)
            left.abort(), right.abort()
    print("discarded:", counted("discarded"))


async def placed(transfers: list[aiote.Transfer]) -> None:
    """Wait until all is in place, and the sender knows it: a lenient stand-in tells it only what was read."""
    told = os.environ.get("EFA_STANDIN_LENIENT") != "discard"

    def known() -> int:
        return sum(transfer.done() for transfer in transfers) + (0 if told else still_open("work"))

    await until(lambda: still_open("packets") == still_open("unread") == 0 and known() >= len(transfers))


async def forgotten(_nics: int) -> None:
    """Pairs break between the acknowledgement and the reading: what came is dropped by the close, and counted again."""
    async with pair(2, stripe_bytes=64) as (left, right):
        memory = bytearray(SIZE)
        source, target = left.register(b"\1" * SIZE), left.attach(right.register(memory).descriptor)
        links = [link for engine in (left, right) for link in engine._runtime.core.peers]
        for turn in range(6):
            nic, before = turn % 2, counted("discarded")
            with faulty("hide", 1, nic):
                parts = [slice(at * 64, at * 64 + 64) for at in range(200)]
                confirmed = [left.submit_write_imm(source[part], target[part], IMM) for part in parts]
                await placed(confirmed)
                break_pairs(nic)
                after = [left.submit_write_imm(source[part], target[part], IMM) for part in parts[:50]]
                # Not longer: the NIC may be back, and what is done again may go over it.
                await until(lambda before=before: counted("discarded") > before)
            await right.counter(IMM).wait(250)
            await asyncio.gather(*confirmed, *after)
            await until(lambda: all(link.carries(number) for link in links for number in (0, 1)))
            assert right.counter(IMM).value == 0
    print("dropped by closes, and counted again:", counted("discarded"))


async def failed(_nics: int) -> None:
    """Work fails by a code of the NIC. It is done again, and only a request for memory that is gone fails."""
    async with pair(2, stripe_bytes=64, schedule="round-robin") as (left, right):
        memory = bytearray(SIZE)
        source, target = left.register(b"\1" * SIZE), left.attach(right.register(memory).descriptor)
        links = [link for engine in (left, right) for link in engine._runtime.core.peers]
        parts = [slice(at * 64, at * 64 + 64) for at in range(200)]
        for code in ("not_ready_ends", "flushed"):
            before, waiting = counted(code), counted("not_ready")
            with faulty("dry", 20 if code == "not_ready_ends" else 20_000, 0):
                transfers = [left.submit_write_imm(source[part], target[part], IMM) for part in parts]
                if code == "flushed":
                    await until(lambda waiting=waiting: counted("not_ready") > waiting)
                    break_pairs(0)
                await right.counter(IMM).wait(len(parts))
                await asyncio.gather(*transfers)
                assert counted(code) > before, code
            await until(lambda: all(link.carries(number) for link in links for number in (0, 1)))
            assert right.counter(IMM).value == 0
            assert memory[: 64 * len(parts)] == b"\1" * 64 * len(parts)
            memory[:] = bytes(SIZE)
        region = right.register(bytearray(64))
        stale = left.attach(region.descriptor)
        await region.aclose()
        refused = left.submit_write(source[:64], stale)
        await asyncio.gather(refused, return_exceptions=True)
        error = refused.exception()
        assert isinstance(error, aiote.TransferError), repr(error)
        assert isinstance(error.cause, aiote.FabricError), repr(error.cause)
        assert (error.cause.errno, counted("bad_key")) == (errno.EINVAL, 1)
        await until(lambda: all(link.carries(number) for link in links for number in (0, 1)))
        await left.write(source, target)
        assert memory == b"\1" * SIZE


async def gone(nics: int) -> None:
    """The peer's pairs are gone, and the NIC hears of it before the control connection is read."""
    async with pair(nics) as (left, right):
        source, target = left.register(bytes(SIZE)), left.attach(right.register(bytearray(SIZE)).descriptor)
        fault("hold", REQUESTS)
        transfers = [left.submit_write(source[:64], target[:64]) for _ in range(20)]
        await until(lambda: still_open("packets") == len(transfers))
        right.abort()
        fault("hold", 0)
        while counted("gone") < len(transfers):
            time.sleep(0.001)
        await asyncio.gather(*transfers, return_exceptions=True)
        assert all(isinstance(transfer.exception(), aiote.AioteError) for transfer in transfers)
        await until(lambda: not left.peers)


async def unreachable(nics: int) -> None:
    """No packet comes through, as where no security group allows it: the error says so, and later all is well."""
    async with AsyncExitStack() as stack:
        left, right = [
            await stack.enter_async_context(aiote.open_engine(provider="efa", rails=list(NICS[:nics]), **SOON))
            for _ in range(2)
        ]
        with faulty("lose", 1000):
            try:
                await left.connect(right.address)
            except aiote.PeerError as error:
                print(error)
            else:
                raise AssertionError("it connected")
        assert counted("unreachable")
        await left.connect(right.address)
        await left.write_imm(None, right.address, IMM)
        await right.counter(IMM).wait(1)


async def granted_again(_nics: int) -> None:
    """The memory of a revoked lease is leased again at once, with the same key, while a write is on its way."""
    async with pair() as (left, right):
        memory = bytearray(SIZE)
        region = right.register(memory)
        lease = region.lease(slice(0, SIZE), left.address)
        source, target = left.register(b"\1" * SIZE), left.attach(lease.descriptor)
        fault("hold", REQUESTS)
        transfer = left.submit_write(source, target)
        await until(lambda: still_open("packets") == SIZE // PACKET)
        await lease.revoke()
        memory[:] = bytes([CANARY]) * SIZE
        async with region.lease(slice(0, SIZE), left.address):
            await released(memory)
        await asyncio.gather(transfer, return_exceptions=True)
        assert isinstance(transfer.exception(), aiote.AioteError)


async def slow_receiver(_nics: int) -> None:
    """A loop that stands still: nothing is lost, no queue overflows, and memory stays what it is."""
    count = 1_000_000 if LONG else 10_000
    page = 64
    right = await aiote.open_engine(provider="efa", **SOON)
    left = await aiote.open_engine(provider="efa", progress="thread", **SOON)
    pool = bytearray(page * 1024)
    await left.connect(right.address)
    source, target = left.register(bytes(pool)), left.attach(right.register(pool).descriptor)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    numbers = [number % 1024 for number in range(count)]
    transfer = left.submit_write_pages(*(aiote.Pages(region, numbers, page) for region in (source, target)), IMM)
    while counted("not_ready") < 64:  # until nothing gets through any more
        time.sleep(0.001)
    await transfer
    await right.counter(IMM).wait(count)
    assert right.counter(IMM).value == 0
    assert counted("overflown") == 0
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 64 << 10, f"{grown} KiB more"
    for engine in (left, right):
        await engine.aclose()
    print("writes:", count, "without a receive:", counted("not_ready"))


async def joins(_nics: int) -> None:
    """Peers come and go; nothing of them stays."""
    count = 1000 if LONG else 60
    kinds = ("endpoints", "registrations", "addresses")
    async with aiote.open_engine(provider="efa", **SOON) as hub:
        seen: list[tuple[object, ...]] = []
        opened = len(os.listdir("/proc/self/fd"))
        for number in range(count):
            async with aiote.open_engine(provider="efa", **SOON) as guest:
                await guest.connect(hub.address)
                await guest.write_imm(None, hub.address, IMM)
                await hub.counter(IMM).wait(1)
            await until(lambda: not hub.peers)
            if number % (count // 4) == count // 4 - 1:
                gc.collect()
                await until(lambda: len(os.listdir("/proc/self/fd")) <= opened)
                rss = int(Path("/proc/self/statm").read_text().split()[1])
                seen.append((*map(still_open, kinds), rss))
    assert len({entry[:-1] for entry in seen}) == 1, seen
    pages = [entry[-1] for entry in seen]
    assert pages[-1] - pages[1] < 1024, f"resident pages: {pages}"
    print("joins:", count, "endpoints, registrations, addresses, pages:", seen)


async def crowded(_nics: int) -> None:
    """More peers than the hub's NIC has queue pairs: a socket carries the others, until one that goes makes room."""
    most = int(os.environ["EFA_STANDIN_QPS"])
    peers = most * 300 // 256
    hub = await aiote.open_engine(provider="efa", **SOON)
    told: list[object] = []
    hub.listen_events(lambda event: event.name == "rail.full" and told.append(event.details["peer"]))
    guests = []
    for number in range(peers):
        os.environ["EFA_STANDIN_HOST"] = f"g{number}"  # a host of its own, with a NIC of its own
        guests.append(await aiote.open_engine(provider="efa", **SOON))
        await guests[-1].connect(hub.address)
    assert len(told) == peers - most, told
    assert still_open("endpoints") == 2 * most
    source = guests[-1].register(bytes(64))
    target = guests[-1].attach(hub.register(bytearray(64)).descriptor)
    await guests[-1].write(source, target)
    assert guests[-1].statistics().carried == (0, 64)
    for guest in guests:
        await guest.write_imm(None, hub.address, IMM)
    await hub.counter(IMM).wait(peers)
    await guests[0].aclose()
    await until(lambda: len(hub.peers) == peers - 1)
    os.environ["EFA_STANDIN_HOST"] = "late"
    guests[0] = await aiote.open_engine(provider="efa", **SOON)
    await guests[0].connect(hub.address)
    assert len(told) == peers - most
    for guest in (*guests, hub):
        await guest.aclose()
    print("peers:", peers, "by a socket:", len(told))


CASES = {case.__name__: case for case in (cancelled, revoked, lost, closed, forgotten, failed, gone, unreachable)}
CASES |= {case.__name__: case for case in (granted_again, slow_receiver, joins, crowded)}

if __name__ == "__main__":
    warnings.simplefilter("ignore", RuntimeWarning)
    name, _, nics = sys.argv[1].partition(":")
    faulthandler.dump_traceback_later(HANGS_S, exit=True)
    asyncio.run(CASES[name](int(nics or 1)))
