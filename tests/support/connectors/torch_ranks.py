"""Ranks in processes of their own, which find each other by torch.distributed (gloo).

A scenario is "module.function" of `support` or of the test's folder; it takes (rank, ranks) and what it returns is
sent back. torch is imported in the processes alone.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import traceback
from pathlib import Path
from typing import Any

PATIENCE_S = 120


def _rank(pipe: Any, scenario: str, rank: int, ranks: int, folder: str, key: str) -> None:
    os.environ.update(AIOTE_CLUSTER_KEY=key, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    try:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        module, _, name = scenario.rpartition(".")
        found = getattr(importlib.import_module(module), name)(rank, ranks)
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise
    pipe.send((True, found))


def run(scenario: str, ranks: int, folder: Path, gone: tuple[int, ...] = ()) -> list[Any]:
    """Run "module.function" on so many ranks; return what each returned, None for those that end without a word."""
    context, key = multiprocessing.get_context("spawn"), os.urandom(16).hex()
    pipes = [context.Pipe() for _ in range(ranks)]
    processes = [
        context.Process(target=_rank, args=(its, scenario, rank, ranks, str(folder), key), daemon=True)
        for rank, (_, its) in enumerate(pipes)
    ]
    try:
        for process, (_, its) in zip(processes, pipes, strict=True):
            process.start()
            its.close()
        return [None if rank in gone else _answer(rank, mine) for rank, (mine, _) in enumerate(pipes)]
    finally:
        for process, (mine, _) in zip(processes, pipes, strict=True):
            process.kill()
            process.join(PATIENCE_S)
            process.close()
            mine.close()


def _answer(rank: int, pipe: Any) -> Any:
    if not pipe.poll(PATIENCE_S):
        raise TimeoutError(f"rank {rank} does not answer")
    well, found = pipe.recv()
    assert well, f"rank {rank}: {found}"
    return found
