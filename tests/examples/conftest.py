"""Running examples as people do: as processes of their own, whose output is read while they run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.kv.example_cluster import Cluster
from support.process.examples import Program


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Program]]:
    """Start an example: `start("ping.py", "--count", "3", AIOTE_CLUSTER_KEY="...")`; what still runs is killed."""
    programs: list[Program] = []

    def run(name: str, *arguments: object, **environment: str) -> Program:
        folder = tmp_path_factory.mktemp(Path(name).stem)
        texts = [str(argument) for argument in arguments]
        programs.append(Program(folder, {**os.environ, **environment}, name, *texts))
        return programs[-1]

    yield run
    for program in programs:
        if program.process.poll() is None:
            program.process.kill()
            program.process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Run examples/kvcache, with one server of each role."""
    running = Cluster(tmp_path_factory.mktemp("cluster"), prefill=1, decode=1)
    yield running
    running.kill()


@pytest.fixture(params=["tcp", "shm"])
def provider(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True, scope="module")
def no_litter() -> Iterator[None]:
    """Remove the shared memory of the processes that these tests killed; its names carry their numbers."""
    yield
    for path in Path("/dev/shm").glob("aiote-*-*"):
        number = path.name.split("-")[1]
        if number.isdecimal() and not Path(f"/proc/{number}").exists():
            path.unlink(missing_ok=True)
