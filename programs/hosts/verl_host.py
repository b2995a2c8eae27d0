"""aiote.connectors.verl in verl: the real `CheckpointEngineManager`, workers and Ray, on the CPU.

`make test-connectors` runs this in an environment that has verl; it is no part of `make test`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

from verl_actors import Rollout, Trainer

HERE = str(Path(__file__).parent)
TRAINERS, ROLLOUTS = 2, 3
SOON_S = 60
"""A failure that takes longer hangs: far above heartbeat_timeout, for machines on which other things run."""


class Replica:
    """What the manager asks of a replica, besides its workers."""

    def __init__(self, worker: Any) -> None:
        self.workers = [worker]

    async def _nothing(self, **_: Any) -> None:
        pass

    abort_all_requests = release_kv_cache = resume_kv_cache = resume_generation = _nothing


def group(kind: Any, count: int, **arguments: Any) -> RayWorkerGroup:
    pool = RayResourcePool(process_on_nodes=[count], use_gpu=False, max_colocate_count=1)
    made = RayClassWithInitArgs(cls=ray.remote(kind), **arguments)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, use_gpu=False, device_name="cpu")


class Cluster:
    """Trainers, rollouts and the manager; a group that has lost a rank is made anew."""

    def __init__(self) -> None:
        self.config = CheckpointEngineConfig(
            backend="aiote", update_weights_bucket_megabytes=1, custom_backend_module="aiote.connectors.verl"
        )
        self.trainers = group(Trainer, TRAINERS, config=self.config)
        rollout_config = RolloutConfig(name="vllm", checkpoint_engine=self.config)
        self.rollouts = group(Rollout, ROLLOUTS, rollout_config=rollout_config)
        self.replicas = [Replica(worker) for worker in self.rollouts.workers]
        self.step = 0
        self.manage()

    def manage(self) -> None:
        self.manager = CheckpointEngineManager(self.config, self.trainers, self.replicas)

    def sync(self, large: int = 0) -> None:
        """Make an update, and check every bit of it on all replicas."""
        self.trainers.configure(large)
        self.update()
        self.check(large)

    def update(self) -> None:
        self.step += 1
        self.manager.update_weights(global_steps=self.step)

    def check(self, large: int = 0) -> None:
        for replica in self.manager.replicas:
            assert ray.get(replica.workers[0].wrong.remote(self.step, large)) == []

    def facts(self) -> list[dict[str, Any]]:
        return self.trainers.facts() + [ray.get(one.workers[0].facts.remote()) for one in self.manager.replicas]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    key = os.urandom(16).hex()
    variables = {"PYTHONPATH": HERE, "AIOTE_CLUSTER_KEY": key, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ray.init(num_cpus=12, include_dashboard=False, runtime_env={"env_vars": variables}, log_to_driver=True)
    yield Cluster()
    ray.shutdown()


def test_every_replica_has_every_bit_of_five_updates(cluster):
    for _ in range(5):
        cluster.sync()


def test_replicas_come_and_go_between_updates(cluster):
    manager, last = cluster.manager, cluster.replicas[-1]
    manager.remove_replicas([last])
    cluster.sync()
    manager.remove_replicas([cluster.replicas[1]])
    cluster.sync()
    manager.add_replicas([last, cluster.replicas[1]])
    cluster.sync()


def test_loops_answer_while_weights_move(cluster):
    """How soon is printed: on a machine with a core for each rank 50 ms are kept, which none may count on."""
    workers = [cluster.trainers.workers[0], cluster.replicas[0].workers[0]]
    latencies: list[float] = []

    async def ping(done: asyncio.Event) -> None:
        while not done.is_set():
            started = time.monotonic()
            await asyncio.gather(*[worker.ping.remote() for worker in workers])
            latencies.append(time.monotonic() - started)

    async def main() -> float:
        done, started = asyncio.Event(), time.monotonic()
        pinging = asyncio.ensure_future(ping(done))
        await asyncio.to_thread(cluster.update)
        done.set()
        await pinging
        return time.monotonic() - started

    cluster.trainers.configure(256)
    elapsed = asyncio.run(main())
    latencies.sort()
    median, worst = latencies[len(latencies) // 2], latencies[-1]
    print(
        f"\n1 GiB in {elapsed:.1f} s, {len(latencies)} pings: median {1000 * median:.0f}, worst {1000 * worst:.0f} ms"
    )
    assert len(latencies) > 10
    cluster.check(256)


def test_registrations_and_memory_are_flat(cluster):
    cluster.sync()
    before = cluster.facts()
    for _ in range(20):
        cluster.sync()
    for was, now in zip(before, cluster.facts(), strict=True):
        assert now["registrations"] == was["registrations"]
        assert now["resident"] - was["resident"] < 64 << 20


def test_a_server_that_fails_is_told_to_the_driver_and_the_next_update_works(cluster):
    ray.get(cluster.replicas[1].workers[0].configure.remote(fail_at=5))
    started = time.monotonic()
    with pytest.raises(ray.exceptions.RayTaskError, match="out of memory|it ended the update before it had all of it"):
        cluster.sync()
    assert time.monotonic() - started < SOON_S
    ray.get(cluster.replicas[1].workers[0].configure.remote())
    cluster.sync()


def test_a_rollout_that_is_killed_ends_the_update_and_the_rest_go_on(cluster):
    dead = cluster.replicas.pop()
    address = ray.get(dead.workers[0].facts.remote())["address"]
    ray.get(dead.workers[0].configure.remote(fail_at=5, how="die"))
    started = time.monotonic()
    with pytest.raises((ray.exceptions.RayActorError, ray.exceptions.RayTaskError)) as raised:
        cluster.sync()
    assert time.monotonic() - started < SOON_S
    assert "died" in str(raised.value) or address in str(raised.value)
    cluster.manager.remove_replicas([dead])
    cluster.sync()
    cluster.sync()


def test_a_trainer_that_is_killed_ends_the_update_and_its_successors_go_on(cluster):
    cluster.trainers.configure(0, (1, 6))
    started = time.monotonic()
    with pytest.raises((ray.exceptions.RayActorError, ray.exceptions.RayTaskError)):
        cluster.update()
    assert time.monotonic() - started < SOON_S
    cluster.trainers = group(Trainer, TRAINERS, config=cluster.config)
    cluster.manage()
    cluster.sync()
    cluster.sync()
