"""A pytest plugin: what does not run, in two tables, each entry with its reason; the summary lists them.

`DEFECTS` are of libfabric 1.17's providers, which the engine does not get around yet; the same tests run with 2.x.
`UNSETTLED` tests expect one of two right errors, and on a busy machine the other one comes first.
"""

from __future__ import annotations

import os

import pytest

from aiote_native.libfabric.library import probe

LOCK = "shm 1.17 spins for ever on a lock that a killed process held"
SOCKETS = "tcp 1.17 keeps sockets of connections that were cut while they were made"

DEFECTS = {
    "test_example_send_file_ends.py::test_the_receiver_ends[shm-9": LOCK,
    "test_example_send_file_ends.py::test_the_sender_ends[shm-9": LOCK,
    "test_killed_peer.py::": LOCK + ", and tcp 1.17 reports a killed peer late",
    "test_simultaneous.py::test_five_at_once": SOCKETS,
    "test_connecting.py::test_an_engine_closed_while_it_connects": SOCKETS,
}
UNSETTLED = {
    "test_engine_life.py::test_closing_ends_every_await": "which error ends a send depends on the load",
    "test_killed_peer.py::test_everything_under_way_ends_when_the_peer_is_killed": "so does the first error",
    "test_connecting.py::test_an_engine_closed_while_it_connects": "so do half-made connections",
}


def old() -> bool:
    """Tell whether this run uses a libfabric before 2.0."""
    path = os.environ.get("AIOTE_LIBFABRIC", "")
    return bool(path) and os.path.exists(path) and probe(path, {})[1] < 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    table = {part: f"unsettled: {reason}" for part, reason in UNSETTLED.items()}
    if old():
        table |= {part: f"libfabric 1.17: {reason}" for part, reason in DEFECTS.items()}
    for item in items:
        for part, reason in table.items():
            if part in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))
