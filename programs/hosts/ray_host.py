"""aiote.connectors.ray in Ray: actors of one host hand each other tensors on the CPU, past the object store.

`make test-connectors` runs this in an environment with Ray and torch; it is no part of `make test`. What Ray's own
tests of its transports check is here, and what aiote promises beyond.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray._private.internal_api import node_stats
from ray.experimental import set_target_for_ref

from aiote import EngineConfig
from aiote.connectors.ray import register
from ray_actors import (
    Actor,
    Async,
    Restarted,
    abort,
    at_rest,
    beside,
    carried,
    fetching,
    manager,
    open_gate,
    registrations,
    served,
)

HERE = Path(__file__).parent
PATHS = f"{HERE}{os.pathsep}{HERE.parents[1] / 'tests'}"
MIB = 1 << 20
SOON_S = 60
"""What takes longer hangs, on machines on which other things run."""
LOST_S = EngineConfig().heartbeat_timeout + 4
"""A source that was killed is lost by then: after `heartbeat_timeout`, and a few seconds for Ray and a busy machine."""
STORE = 128 * MIB


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    key = os.urandom(16).hex()
    os.environ["AIOTE_CLUSTER_KEY"] = key
    variables = {"PYTHONPATH": PATHS, "AIOTE_CLUSTER_KEY": key, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ray.init(num_cpus=2, object_store_memory=STORE, include_dashboard=False, runtime_env={"env_vars": variables})
    register()
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def pair(cluster) -> tuple[Any, Any]:
    return Actor.remote(), Actor.remote()


@pytest.fixture
def mortal() -> Iterator[Any]:
    """One whose process a test may kill."""
    actor = Actor.remote()
    yield actor
    ray.kill(actor)


@pytest.fixture(autouse=True)
def nothing_is_left(request) -> Iterator[None]:
    """After each test no tensor is registered, here and in the two actors."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        # Its traceback holds its references.
        return
    if "pair" in request.fixturenames:
        for actor in request.getfixturevalue("pair"):
            until(lambda actor=actor: ray.get(beside(actor, registrations)) == 0)
    assert manager().registrations == 0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stored() -> int:
    """How many bytes Ray has put into its object store so far."""
    (node,) = ray.nodes()
    counted = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"]).store_stats.cumulative_created_bytes
    return int(counted)


class Stopped:
    """Keep an actor's process from answering, so that fetches from it stay under way."""

    def __init__(self, actor: Any) -> None:
        self.pid = ray.get(actor.pid.remote())

    def __enter__(self) -> int:
        os.kill(self.pid, signal.SIGSTOP)
        return self.pid

    def __exit__(self, *_: object) -> None:
        try:
            os.kill(self.pid, signal.SIGCONT)
        except ProcessLookupError:
            pass


# Where tensors go.


def test_from_actor_to_actor_and_to_the_driver(pair):
    source, sink = pair
    ref = source.full.remote(1000, 3)
    assert ray.get(sink.describe.remote(ref)) == ("torch.uint8", (1000,), 3000)
    assert torch.equal(ray.get(ref), torch.full((1000,), 3, dtype=torch.uint8))


def test_from_the_driver_to_an_actor(pair):
    ref = ray.put(torch.arange(10), _tensor_transport="AIOTE")
    assert ray.get(pair[1].describe.remote(ref)) == ("torch.int64", (10,), 45)
    del ref


def test_what_an_actor_has_put_goes_to_others(pair):
    source, sink = pair
    refs = ray.get(source.put.remote(100, 2))
    assert ray.get(sink.take.remote(refs)) == 200
    assert int(ray.get(refs[0]).sum()) == 200


def test_actors_with_event_loops(pair):
    source, sink = Async.remote(), Async.remote()
    assert ray.get([sink.total.remote(source.full.remote(100, n)) for n in range(10)]) == [100 * n for n in range(10)]
    assert ray.get(pair[0].describe.remote(source.full.remote(10, 1))) == ("torch.uint8", (10,), 10)


def test_within_one_actor(pair):
    assert ray.get(pair[0].describe.remote(pair[0].full.remote(10, 4))) == ("torch.uint8", (10,), 40)


def test_through_a_chain_of_actors(pair):
    source, sink = pair
    ref = source.echo.remote(sink.echo.remote(source.full.remote(5000, 1)))
    assert ray.get(sink.describe.remote(ref)) == ("torch.uint8", (5000,), 5000)


# What goes.


def test_several_tensors_of_any_kind(pair):
    found = ray.get(pair[1].describe.remote(pair[0].several.remote()))
    assert [tuple(one) for one in found] == [
        ("torch.float32", (10,), 45.0),
        ("torch.float32", (0, 3), 0.0),
        ("torch.int64", (), 5.0),
        ("torch.bfloat16", (7, 9), 63.0),
    ]


def test_the_same_tensor_twice(pair):
    first, second = ray.get(pair[0].duplicate.remote())
    assert torch.equal(first, second)
    assert torch.equal(first, torch.arange(1000))


def test_views_that_overlap_and_share_their_storage(pair):
    ref = pair[0].overlapping.remote()
    first, second, third = ray.get(ref)
    whole = torch.arange(100)
    assert torch.equal(first, whole[:60])
    assert torch.equal(second, whole[40:])
    assert torch.equal(third, whole.view(10, 10))
    # They are one storage, which is registered until the last of them is gone.
    assert ray.get(beside(pair[0], registrations)) == 3


@pytest.mark.parametrize("plasma", [10, 4 * MIB])
def test_tensors_among_other_data(pair, plasma):
    assert ray.get(pair[1].text.remote(pair[0].mixed.remote(plasma))) == (plasma, 10, 10)


def test_no_tensor_at_all(pair):
    assert ray.get(pair[1].describe.remote(pair[0].echo.remote([]))) == []


def test_the_same_reference_many_times(pair):
    source, sink = pair
    ref = source.full.remote(1000, 1)
    assert ray.get(sink.alike.remote(ref, ref))
    assert [one[2] for one in ray.get([sink.describe.remote(ref) for _ in range(5)])] == [1000] * 5
    assert [int(one.sum()) for one in ray.get([ref, ref])] == [1000, 1000]


def test_many_tasks_out_of_order(pair):
    source, sink = pair
    refs = [source.full.remote(64, n % 100) for n in range(100)]
    found = ray.get([sink.describe.remote(ref) for ref in reversed(refs)])
    assert [one[2] for one in reversed(found)] == [64 * (n % 100) for n in range(100)]


def test_several_receivers_at_once(pair):
    ref = pair[0].full.remote(MIB, 1)
    receivers = [pair[1], *(Actor.remote() for _ in range(2))]
    for one in ray.get([receiver.describe.remote(ref) for receiver in receivers]):
        assert one[2] == MIB


def test_a_large_tensor_goes_past_the_object_store(pair):
    """It is eight times as large as the store; both engines count its bytes, Ray's store next to none."""
    source, sink = pair
    ray.get(sink.describe.remote(source.full.remote(10, 1)))
    before = ray.get([beside(sink, carried), beside(source, served)])
    was_stored = stored()
    assert ray.get(sink.describe.remote(source.full.remote(1024 * MIB, 1)))[2] == 1024 * MIB
    assert stored() - was_stored < MIB
    after = ray.get([beside(sink, carried), beside(source, served)])
    assert all(now - then >= 1024 * MIB for now, then in zip(after, before, strict=True))


def test_a_source_that_is_busy_with_a_task_is_read(mortal, pair):
    """As in Ray's tests of gloo, whose sender would have to send: here it takes no part."""
    ref = mortal.full.remote(16 * MIB, 1)
    ray.wait([ref], fetch_local=False)
    blocked = mortal.block.remote()
    assert ray.get(pair[1].describe.remote(ref), timeout=SOON_S)[2] == 16 * MIB
    assert int(ray.get(ref, timeout=SOON_S).sum()) == 16 * MIB
    assert ray.wait([blocked], timeout=0)[0] == []
    ray.get(beside(mortal, open_gate))
    assert ray.get(blocked)


def test_sixteen_fetches_overlap(mortal):
    refs = [mortal.full.remote(MIB, n) for n in range(16)]
    ray.wait(refs, num_returns=16, fetch_local=False)
    found: list[torch.Tensor] = []
    with Stopped(mortal):
        thread = threading.Thread(target=lambda: found.extend(ray.get(refs)))
        thread.start()
        until(lambda: fetching(None) == 16)
    thread.join(SOON_S)
    assert [int(one[0]) for one in found] == list(range(16))


def test_both_sides_are_idle_when_nothing_moves(pair):
    source, sink = pair
    ref = source.full.remote(MIB, 1)
    ray.get(sink.describe.remote(ref))
    for actor in pair:
        ray.get(beside(actor, at_rest))


def test_memory_of_fetched_tensors_is_used_again_and_never_while_a_view_is_held(pair):
    source = pair[0]
    found = ray.get(source.full.remote(4 * MIB, 1))
    address, view = found.data_ptr(), found.view(torch.bfloat16)[-1000:]
    before = view.clone()
    del found
    other = ray.get(source.full.remote(4 * MIB, 2))
    assert other.data_ptr() != address
    assert torch.equal(view.view(torch.uint8), before.view(torch.uint8))
    array = other.numpy()
    del view, other
    # Ray's own references to an object end a little after ours.
    until(lambda: ray.get(source.full.remote(4 * MIB, 3)).data_ptr() == address)
    assert int(array.min()) == int(array.max()) == 2


# Buffers.


def test_fetching_into_buffers(pair):
    ref = pair[0].overlapping.remote()
    buffers = [torch.zeros(60, dtype=torch.int64), torch.zeros(60, dtype=torch.int64), torch.zeros(10, 10).long()]
    set_target_for_ref(ref, buffers)
    found = ray.get(ref)
    assert all(one is buffer for one, buffer in zip(found, buffers, strict=True))
    assert torch.equal(buffers[1], torch.arange(40, 100))


def test_buffers_that_do_not_fit_are_refused(pair):
    ref = pair[0].full.remote(10, 1)
    for wrong in ([torch.zeros(9).byte()], [torch.zeros(10)], [torch.zeros(20).byte()[::2]]):
        set_target_for_ref(ref, wrong)
        with pytest.raises(ValueError):
            ray.get(ref)


def test_tensors_that_are_not_contiguous_are_refused(pair):
    with pytest.raises(ray.exceptions.RayTaskError, match="contiguous"):
        ray.get(pair[1].describe.remote(pair[0].uneven.remote()))


# Garbage.


def test_registrations_end_with_the_last_reference(pair):
    source, sink = pair
    refs = [source.full.remote(1000, n) for n in range(5)]
    ray.get([sink.describe.remote(ref) for ref in refs])
    assert ray.get(beside(source, registrations)) == 5
    del refs[1:]
    until(lambda: ray.get(beside(source, registrations)) == 1)
    assert int(ray.get(refs[0]).sum()) == 0


def test_a_reference_that_is_deleted_before_it_was_received(pair):
    source, sink = pair
    task = sink.describe.remote(source.full.remote(MIB, 1))
    assert ray.get(task)[2] == MIB


def test_a_reference_that_is_deleted_before_it_was_created(mortal):
    ref = mortal.full.remote(64 * MIB, 1)
    del ref
    until(lambda: ray.get(beside(mortal, registrations)) == 0)


# Failures.


def test_an_actor_that_was_restarted_knows_the_transport(pair):
    """As the page says: by `register` in its `__init__`."""
    actor = Restarted.remote()
    before = ray.get(actor.pid.remote(), timeout=SOON_S)
    assert ray.get(pair[1].describe.remote(actor.full.remote(10, 1)), timeout=SOON_S)[2] == 10
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.die.remote(), timeout=SOON_S)

    def restarted() -> bool:
        try:
            return ray.get(actor.pid.remote(), timeout=SOON_S) != before
        except ray.exceptions.RayActorError:
            return False

    until(restarted)
    assert ray.get(pair[1].describe.remote(actor.full.remote(10, 2)), timeout=SOON_S)[2] == 20
    ray.kill(actor)


def test_a_source_that_dies_before_it_has_created_anything(mortal, pair):
    started = time.monotonic()
    with pytest.raises((ray.exceptions.RayActorError, ray.exceptions.RayTaskError)):
        ray.get(pair[1].describe.remote(mortal.never.remote()))
    assert time.monotonic() - started < LOST_S
    assert ray.get(pair[1].pid.remote())


def test_a_source_that_died_before_it_was_asked(mortal, pair):
    ref = mortal.full.remote(1000, 1)
    ray.wait([ref], fetch_local=False)
    ray.kill(mortal)
    with pytest.raises((ray.exceptions.RayActorError, ray.exceptions.RayTaskError)):
        ray.get(pair[1].describe.remote(ref))
    with pytest.raises(ray.exceptions.RayError):
        ray.get(ref)
    assert ray.get(pair[1].pid.remote())


def test_a_source_that_is_killed_in_the_middle(mortal, pair):
    sink = pair[1]
    pid = ray.get(sink.pid.remote())
    ref = mortal.full.remote(64 * MIB, 1)
    ray.get(sink.describe.remote(ref))
    with Stopped(mortal) as source:
        task = sink.describe.remote(ref)
        until(lambda: ray.get(beside(sink, fetching)) == 1)
        started = time.monotonic()
        os.kill(source, signal.SIGKILL)
        with pytest.raises(ray.exceptions.RayTaskError, match="its source may have died"):
            ray.get(task)
        assert time.monotonic() - started < LOST_S
    assert ray.get(sink.pid.remote()) == pid
    assert ray.get(sink.describe.remote(pair[0].full.remote(10, 1)))[2] == 10


def test_an_aborted_fetch_ends_and_both_actors_live(mortal, pair):
    sink = pair[1]
    pids = ray.get([sink.pid.remote(), mortal.pid.remote()])
    ref = mortal.full.remote(64 * MIB, 1)
    ray.get(sink.describe.remote(ref))
    with Stopped(mortal):
        task = sink.describe.remote(ref)
        until(lambda: ray.get(beside(sink, fetching)) == 1)
        # As Ray does after RAY_rdt_fetch_fail_timeout_milliseconds.
        ray.get(beside(sink, abort, ref.hex()))
        with pytest.raises(ray.exceptions.RayTaskError, match="aborted"):
            ray.get(task)
    assert ray.get([sink.pid.remote(), mortal.pid.remote()]) == pids
    assert ray.get(beside(sink, fetching)) == 0
    ray.get(beside(sink, abort, ref.hex()))
    with pytest.raises(ray.exceptions.RayTaskError, match="aborted before it began"):
        ray.get(sink.describe.remote(ref))
    assert ray.get(sink.describe.remote(ref))[2] == 64 * MIB


def test_a_get_that_times_out_gives_the_fetch_up(mortal):
    ref = mortal.full.remote(64 * MIB, 1)
    ray.wait([ref], fetch_local=False)
    ray.get(ref)
    with Stopped(mortal):
        with pytest.raises(ray.exceptions.GetTimeoutError):
            ray.get(ref, timeout=0)
        until(lambda: fetching(None) == 0)
    assert int(ray.get(ref).sum()) == 64 * MIB
