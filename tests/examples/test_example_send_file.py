"""Files of every size arrive whole; what cannot be sent is said, and leaves nothing behind."""

from __future__ import annotations

import hashlib
import importlib.util
import random
import resource
from pathlib import Path

import pytest

pytestmark = [pytest.mark.libfabric, pytest.mark.one_library]

CHUNK = 4 << 20


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "received"
    path.mkdir()
    return path


def content_of(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@pytest.mark.parametrize(
    ("provider", "size"),
    [("tcp", 0), ("tcp", 1), ("tcp", 5 * CHUNK + 1), ("shm", 0), ("shm", 1), ("shm", 2 * CHUNK)],
)
def test_a_file_arrives(start, provider, folder, tmp_path, size):
    source = tmp_path / "a file, näme.bin"
    source.write_bytes(content_of(size))
    receiver = start("send_file.py", "--provider", provider, "receive", folder)
    sender = start("send_file.py", "--provider", provider, "send", source, receiver.address())
    assert sender.end() == 0
    assert receiver.end() == 0
    assert [path.name for path in folder.iterdir()] == [source.name]
    assert (folder / source.name).read_bytes() == source.read_bytes()
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    assert f"{size} bytes" in sender.out
    assert digest in sender.out
    assert digest in receiver.out
    assert sender.err == receiver.err == ""


def test_a_name_that_is_taken_is_refused(start, folder, tmp_path):
    source = tmp_path / "taken"
    source.write_bytes(b"new")
    (folder / "taken").write_bytes(b"old")
    receiver = start("send_file.py", "receive", folder)
    sender = start("send_file.py", "send", source, receiver.address())
    assert (sender.end(), receiver.end()) == (1, 1)
    assert (
        sender.err
        == "send_file.py: the other side gave up: taken exists in the receiver's folder; rename one of the two\n"
    )
    assert receiver.err == "send_file.py: taken exists in the receiver's folder; rename one of the two\n"
    assert [path.read_bytes() for path in folder.iterdir()] == [b"old"]


def test_a_file_that_the_receiver_has_no_room_for_is_refused(start, folder, tmp_path):
    source = tmp_path / "huge"
    source.write_bytes(bytes(2 << 20))
    # Over tcp, for the limit holds for files in shared memory as well.
    receiver = start("send_file.py", "--provider", "tcp", "receive", folder)
    address = receiver.address()
    resource.prlimit(receiver.process.pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    sender = start("send_file.py", "--provider", "tcp", "send", source, address)
    assert (sender.end(), receiver.end()) == (1, 1)
    assert sender.err.startswith("send_file.py: the other side gave up: ")
    assert list(folder.iterdir()) == []


def test_another_program_is_noticed(start, folder):
    receiver = start("send_file.py", "receive", folder)
    client = start("ping.py", "--connect", receiver.address())
    assert receiver.end() == 1
    assert receiver.err == "send_file.py: the other side does not speak as this program does\n"
    assert client.end() == 1
    assert list(folder.iterdir()) == []


WRONG = [
    ([], 2, "arguments are required"),
    (["receive", "nowhere"], 2, "'nowhere' is not a folder"),
    (["send", "nothing", "aiote://127.0.0.1:1"], 2, "'nothing' is not a file"),
    (["send", ".", "aiote://127.0.0.1:1"], 2, "'.' is not a file"),
    (["send", "out", "127.0.0.1"], 2, "no port number after the host"),
    (["send", "out", "aiote://127.0.0.1:1"], 1, "its control port cannot be reached"),
    (["receive", ".", "--host", "0.0.0.0"], 1, "loopback only"),
    (["--provider", "smoke", "receive", "."], 1, "smoke"),
]


def test_wrong_arguments_are_refused_with_the_reason(start):
    programs = [start("send_file.py", *arguments, AIOTE_CLUSTER_KEY="") for arguments, _, _ in WRONG]
    for program, (_, status, said) in zip(programs, WRONG, strict=True):
        assert program.end() == status
        assert said in program.err
        assert program.out == ""


def test_a_damaged_file_gets_no_name(tmp_path):
    path = Path(__file__).parents[2] / "examples" / "send_file.py"
    spec = importlib.util.spec_from_file_location("send_file", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    part, final = tmp_path / "part", tmp_path / "final"
    with pytest.raises(module.FileError, match="damaged"):
        module.check_and_name(part, None, hashlib.sha256(b"x").hexdigest(), final)
    part.touch()
    module.check_and_name(part, None, hashlib.sha256(b"").hexdigest(), final)
    assert final.exists()
    assert not part.exists()
