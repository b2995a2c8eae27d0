"""A file transfer whose one side is interrupted or killed: the other says so, and no half file gets a name."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

pytestmark = [pytest.mark.libfabric, pytest.mark.one_library]

BYTES = 256 << 20


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "received"
    path.mkdir()
    return path


@pytest.fixture
def source(tmp_path) -> Path:
    """A file that takes a while: something to see at its beginning, then a hole."""
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.write(b"\x01" * 4096)
        file.truncate(BYTES)
    return path


def arriving(folder: Path) -> bool:
    """Tell whether the first bytes were written into the file that is to come."""
    parts = list(folder.iterdir())
    if not parts:
        return False
    with parts[0].open("rb") as file:
        return file.read(1) == b"\x01"


@pytest.fixture
def pair(start, provider, folder, source):
    """A receiver and a sender in the midst of a file."""
    receiver = start("send_file.py", "--provider", provider, "receive", folder)
    sender = start("send_file.py", "--provider", provider, "send", source, receiver.address())
    sender.until(lambda: arriving(folder), "first bytes")
    return receiver, sender


ENDS = [
    ("tcp", signal.SIGINT, 130),
    ("tcp", signal.SIGKILL, -signal.SIGKILL),
    ("shm", signal.SIGINT, 130),
    ("shm", signal.SIGKILL, -signal.SIGKILL),
]


@pytest.mark.parametrize(("provider", "number", "status"), ENDS)
def test_the_receiver_fails_and_keeps_no_file_when_the_sender_ends(pair, folder, number, status):
    receiver, sender = pair
    sender.send(number)
    assert sender.end() == status
    assert receiver.end() == 1
    assert receiver.err.startswith("send_file.py: lost the other side: ")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("provider", "number", "status"), ENDS)
def test_the_sender_fails_when_the_receiver_ends(pair, folder, source, number, status):
    receiver, sender = pair
    receiver.send(number)
    assert receiver.end() == status
    assert sender.end() == 1
    assert sender.err.startswith("send_file.py: ")
    assert not (folder / source.name).exists()
    if number == signal.SIGINT:
        assert list(folder.iterdir()) == []


def test_a_receiver_that_waits_is_interrupted(start, folder):
    receiver = start("send_file.py", "receive", folder)
    receiver.address()
    receiver.send(signal.SIGINT)
    assert receiver.end() == 130
    assert receiver.err == "send_file.py: interrupted\n"
    assert list(folder.iterdir()) == []
