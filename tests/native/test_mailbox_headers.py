"""The header of a message comes from outside and is read natively: nothing beyond what arrived is ever taken."""

from __future__ import annotations

import errno
import importlib.util
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.checkout import compiled

SLOT_BYTES = 64
SLOTS = 4
HEADER = struct.Struct(
    "=IIQQQ"
)  # kind, length, messages of ours that it has consumed, its number, and up to which ours have come
DATA, CREDITS = 1, 2
Deliver = Callable[[list[bytes]], tuple[list[bytes], int]]

FIELDS = st.sampled_from([0, 1, 2, 3, 31, 32, 33, 2**31, 2**32 - 32, 2**32 - 1])
NUMBERS = st.sampled_from([1, 2, 3, 4, 1, 2, 3, 4, 5, 6, 8, 9, 0, 2**63, 2**64 - 1])
HEADERS = st.builds(HEADER.pack, FIELDS, FIELDS, st.sampled_from([0, 0, 0, 1, 2**63, 2**64 - 1]), NUMBERS, NUMBERS)
HONEST = st.builds(
    lambda payload, number: HEADER.pack(DATA, len(payload), 0, number, 0) + payload, st.binary(max_size=32), NUMBERS
)
MESSAGES = HONEST | st.just(HEADER.pack(CREDITS, 0, 0, 0, 0)) | st.binary(max_size=SLOT_BYTES)
MESSAGES |= st.builds(lambda head, rest: (head + rest)[:SLOT_BYTES], HEADERS, st.binary(max_size=32))


@pytest.fixture(scope="module")
def deliver(tmp_path_factory: pytest.TempPathFactory) -> Deliver:
    source = Path(__file__).parent / "mailboxes" / "mailboxes.pyx"
    path = compiled.module(source, tmp_path_factory.mktemp("mailboxes"))
    spec = importlib.util.spec_from_file_location("mailboxes", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.deliver


def expected(messages: list[bytes]) -> tuple[list[bytes], int]:
    """What a mailbox says to them that has sent nothing itself, so that no credit can come back."""
    taken: list[bytes] = []
    seen, floor = [0] * SLOTS, 0
    for message in messages:
        if len(message) < HEADER.size:
            return taken, errno.EPROTO
        kind, length, consumed, number, arrived = HEADER.unpack(message[: HEADER.size])
        if kind not in (DATA, CREDITS) or length > len(message) - HEADER.size or consumed or arrived:
            return taken, errno.EPROTO
        if number if kind == CREDITS else not (seen[number % SLOTS] < number <= floor + SLOTS):
            return taken, errno.EPROTO
        if kind == DATA:
            seen[number % SLOTS] = number
            while floor + 1 in seen:
                floor += 1
            taken.append(message[HEADER.size : HEADER.size + length])
    return taken, 0


@given(messages=st.lists(MESSAGES, max_size=4))
@example([HEADER.pack(DATA, 32, 0, 1, 0) + b"x" * 32])
@example([HEADER.pack(DATA, 33, 0, 1, 0) + b"x" * 32])
@example([HEADER.pack(DATA, 2**32 - 1, 0, 1, 0)])
@example([HEADER.pack(DATA, 0, 0, 1, 0), b"x" * 31])
@example([HEADER.pack(DATA, 0, 0, 2, 0), HEADER.pack(DATA, 0, 0, 1, 0)])
@example([HEADER.pack(DATA, 0, 0, 1, 0), HEADER.pack(DATA, 0, 0, 1, 0)])
@example([HEADER.pack(DATA, 0, 0, 1, 0), HEADER.pack(DATA, 0, 0, 5, 9), HEADER.pack(DATA, 0, 0, 1, 0)])
@example([HEADER.pack(CREDITS, 0, 1, 0, 0)])
@example([HEADER.pack(CREDITS, 0, 0, 1, 0)])
def test_any_bytes_are_a_message_or_the_end_of_the_peer(deliver: Deliver, messages: list[bytes]) -> None:
    assert deliver(messages) == expected(messages)
