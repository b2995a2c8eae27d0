"""Send a file: the sender's NIC writes it straight into the receiver's mapping of the new file.

On one machine, in two terminals:

    python examples/send_file.py receive ~/Downloads         # prints its address, takes one file
    python examples/send_file.py send video.mkv 'aiote://...'

On two machines: the same, with AIOTE_CLUSTER_KEY set to one secret of 16 bytes or more on both.

The file appears under its name only when it is complete and its SHA-256 is right; until then it is a hidden `.part`
file in the same folder, removed if anything goes wrong. Exit status: 0 done, 1 failed, 2 wrong arguments, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import hashlib
import json
import mmap
import os
import secrets
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import aiote

CHUNK_BYTES = 4 << 20
WINDOW = 4  # chunks under way at a time, each with a buffer of its own at the sender

T = TypeVar("T")


class FileError(Exception):
    """What ends this program, for a person."""


async def unless_lost(peer: aiote.Peer, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end, or fail as soon as the peer is lost: a counter does not know whose writes it counts."""
    working, losing = asyncio.ensure_future(work), asyncio.ensure_future(peer.wait_closed())
    try:
        await asyncio.wait({working, losing}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise FileError(f"lost the other side: {losing.result()}")
        return await working
    finally:
        for task in (working, losing):
            task.cancel()
        await asyncio.gather(working, losing, return_exceptions=True)


def progress(verb: str, total: int) -> Callable[[int], None]:
    """Return a function that shows how many bytes are done, on a terminal only."""

    def show(done: int) -> None:
        if sys.stderr.isatty():
            share = 100 * done // total if total else 100
            print(f"\r{verb} {share:3d} % of {total} bytes", end="\n" if done == total else "", file=sys.stderr)

    return show


async def talk(engine: aiote.Engine, peer: aiote.Peer, **words: object) -> None:
    await engine.send(peer, json.dumps(words).encode())


async def hear(engine: aiote.Engine, peer: aiote.Peer) -> bytes:
    """Return the next message of that peer; this program has one at a time and ignores others."""
    while (message := await engine.recv()).source is not peer:
        pass
    return message.data


def understand(data: bytes, *wanted: str) -> list[Any]:
    """Return the wanted words of a message; what the other side says went wrong is raised."""
    try:
        words = json.loads(data)
        if "error" in words:
            raise FileError(f"the other side gave up: {words['error']}")
        return [words[name] for name in wanted]
    except (ValueError, KeyError, TypeError) as error:
        raise FileError("the other side does not speak as this program does") from error


# The receiver.


async def receive(engine: aiote.Engine, folder: Path) -> None:
    """Take one file from whoever sends first."""
    print(engine.address, flush=True)
    message = await engine.recv()
    sender = message.source
    try:
        stored = await unless_lost(sender, take_file(engine, message, folder))
    except (FileError, OSError) as error:
        await last_word(engine, sender, error=str(error))
        raise
    print(stored)
    await last_word(engine, sender, stored=True)


async def last_word(engine: aiote.Engine, sender: aiote.Peer, **words: object) -> None:
    """Say how it ended, and give the sender a moment to read that: it leaves when it has."""
    with contextlib.suppress(aiote.AioteError, TimeoutError):
        await talk(engine, sender, **words)
        await asyncio.wait_for(sender.wait_closed(), 2)


async def take_file(engine: aiote.Engine, message: aiote.Message, folder: Path) -> str:
    """Make room, let the sender write, check, and give the file its name."""
    name, size, chunks = understand(message.data, "name", "bytes", "chunks")
    if not (isinstance(name, str) and isinstance(size, int) and isinstance(chunks, int) and 0 <= size < 1 << 62):
        raise FileError("the other side does not speak as this program does")
    final = folder / name
    if final.name != name or name in ("", ".", ".."):
        raise FileError(f"{name!r} is not the name of a file")
    if final.exists():
        raise FileError(f"{name} exists in the receiver's folder; rename one of the two")
    with part_file(folder) as file:
        memory = await make_room(file, size)
        with engine.counter() as arrivals:
            descriptor = engine.register(memory).descriptor if memory is not None else b""
            await talk(engine, message.source, imm=arrivals.imm, descriptor=base64.b64encode(descriptor).decode())
            show = progress("received", size)
            for done in range(chunks):
                show(size * done // chunks)
                await arrivals.wait(1)
            show(size)
            (expected,) = understand(await hear(engine, message.source), "sha256")
        await asyncio.to_thread(check_and_name, Path(file.name), memory, expected, final)
    return f"{final}: {size} bytes, SHA-256 {expected}"


@contextlib.contextmanager
def part_file(folder: Path) -> Iterator[BinaryIO]:
    """Open a file under a temporary name, which is gone at the end."""
    part = folder / f".{secrets.token_hex(8)}.part"
    try:
        with open(part, "xb+") as file:
            yield file
    finally:
        part.unlink(missing_ok=True)


async def make_room(file: BinaryIO, size: int) -> mmap.mmap | None:
    """Give a file its size and map it; None for no bytes.

    The mapping stays until the process ends: a sender that still writes when we are interrupted then writes to a file
    without a name, and not to memory that is no longer ours.
    """
    if size == 0:
        return None
    # Reserved before anything is written: a disk that fills up later would kill the process (SIGBUS).
    await asyncio.to_thread(os.posix_fallocate, file.fileno(), 0, size)
    return mmap.mmap(file.fileno(), size)


def check_and_name(part: Path, memory: mmap.mmap | None, expected: str, final: Path) -> None:
    """Give a file whose checksum is right its name, unless somebody took that meanwhile."""
    if hashlib.sha256(memory if memory is not None else b"").hexdigest() != expected:
        raise FileError("the file arrived damaged: its SHA-256 differs from the sender's")
    if memory is not None:
        memory.flush()
    if final.exists():
        raise FileError(f"{final.name} exists in the receiver's folder; rename one of the two")
    part.rename(final)


# The sender.


async def send(engine: aiote.Engine, file: BinaryIO, address: aiote.Address) -> None:
    """Send one file and wait until it is stored."""
    receiver = await engine.connect(address)
    started = time.perf_counter()
    size, digest = await unless_lost(receiver, send_to(engine, receiver, file))
    seconds = time.perf_counter() - started
    print(f"{file.name}: {size} bytes in {seconds:.2f} s, {size / seconds / 2**20:.1f} MiB/s, SHA-256 {digest}")


async def send_to(engine: aiote.Engine, receiver: aiote.Peer, file: BinaryIO) -> tuple[int, str]:
    """Offer the file, write it where the receiver says, and return its size and SHA-256 once it is stored."""
    size = os.fstat(file.fileno()).st_size
    await talk(engine, receiver, name=Path(file.name).name, bytes=size, chunks=-(-size // CHUNK_BYTES))
    imm, descriptor = understand(await hear(engine, receiver), "imm", "descriptor")
    digest = hashlib.sha256()
    if size:
        await write_chunks(engine, file.fileno(), engine.attach(base64.b64decode(descriptor)), imm, digest)
    await talk(engine, receiver, sha256=digest.hexdigest())
    understand(await hear(engine, receiver), "stored")
    return size, digest.hexdigest()


async def write_chunks(
    engine: aiote.Engine, file: int, target: aiote.RemoteRegion, imm: int, digest: hashlib._Hash
) -> None:
    """Read, hash and write chunk by chunk, WINDOW of them under way at a time."""
    size = target.nbytes
    show = progress("sent", size)
    buffers = [bytearray(min(CHUNK_BYTES, size)) for _ in range(WINDOW)]
    regions = [engine.register(buffer) for buffer in buffers]
    transfers: list[aiote.Transfer | None] = [None] * WINDOW
    for number, start in enumerate(range(0, size, CHUNK_BYTES)):
        slot, stop = number % WINDOW, min(start + CHUNK_BYTES, size)
        if (before := transfers[slot]) is not None:
            await before  # until then its buffer belongs to the NIC
        view = memoryview(buffers[slot])[: stop - start]
        # In a thread, for reading and hashing block; both let other threads run.
        await asyncio.to_thread(read_chunk, file, view, start, digest)
        transfers[slot] = engine.submit_write_imm(regions[slot][0 : stop - start], target[start:stop], imm)
        show(start)
    for transfer in transfers:
        if transfer is not None:
            await transfer
    show(size)


def read_chunk(file: int, view: memoryview, start: int, digest: hashlib._Hash) -> None:
    got = 0
    while got < len(view):
        count = os.preadv(file, [view[got:]], start + got)
        if count == 0:
            raise FileError("the file became shorter while it was being sent")
        got += count
    digest.update(view)


# The command line.


def existing_file(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file")
    return path


def existing_folder(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_dir() or not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder that can be written to")
    return path


def engine_address(text: str) -> aiote.Address:
    try:
        return aiote.Address.parse(text)
    except aiote.UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Send a file by one-sided writes.")
    parser.add_argument(
        "--provider", default="auto", help="auto (the default), local, socket, tcp or shm; the same on both sides"
    )
    roles = parser.add_subparsers(dest="role", required=True, metavar="receive|send")
    role = roles.add_parser("receive", help="print an address and take one file")
    role.add_argument("folder", type=existing_folder, help="where to put it")
    role.add_argument(
        "--host", help="this machine's address for the sender; other than loopback needs AIOTE_CLUSTER_KEY"
    )
    role = roles.add_parser("send", help="send one file")
    role.add_argument("file", type=existing_file)
    role.add_argument("address", type=engine_address, help="what the receiver printed")
    return parser.parse_args()


def run(args: argparse.Namespace) -> None:
    if args.role == "receive":
        asyncio.run(main(args, None))
    else:
        with args.file.open("rb") as file:
            asyncio.run(main(args, file))


async def main(args: argparse.Namespace, file: BinaryIO | None) -> None:
    config = aiote.EngineConfig(host=getattr(args, "host", None))
    async with aiote.open_engine(args.provider, config=config) as engine:
        if file is None:
            await receive(engine, args.folder)
        else:
            await send(engine, file, args.address)


if __name__ == "__main__":
    try:
        run(arguments())
    except (FileError, aiote.AioteError, OSError, ValueError) as error:
        raise SystemExit(f"send_file.py: {error}") from None
    except KeyboardInterrupt:
        print("send_file.py: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
