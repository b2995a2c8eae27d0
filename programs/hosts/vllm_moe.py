"""aiote.connectors.vllm_moe with vLLM's own kernels on the CPU: `make test-connectors` runs this where vLLM is."""

from __future__ import annotations

import inspect
import os

import pytest

os.environ.update(VLLM_NO_USAGE_STATS="1", OMP_NUM_THREADS="1")

from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.experts.fused_batched_moe import BatchedTritonExperts

from aiote.connectors.vllm_moe import AiotePrepareAndFinalize
from support.connectors import torch_ranks


def test_the_class_is_what_vllm_asks_for():
    base = mk.FusedMoEPrepareAndFinalizeModular
    assert issubclass(AiotePrepareAndFinalize, base)
    assert not inspect.isabstract(AiotePrepareAndFinalize)
    for name, ours in vars(AiotePrepareAndFinalize).items():
        theirs = getattr(base, name, None)
        if inspect.isfunction(ours) and theirs is not None and name != "__init__":
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), name
    assert {"prepare", "finalize", *base.__abstractmethods__} <= set(vars(AiotePrepareAndFinalize))


@pytest.mark.parametrize("ranks", [2, 3])
def test_experts_for_a_cpu_give_the_bits_of_one_process(tmp_path, ranks):
    off = torch_ranks.run("vllm_moe_ranks.standard", ranks, tmp_path)
    # Of one process's fused sum: each expert's row was rounded to bfloat16 in between.
    assert max(off) < 0.01


def test_batched_experts_give_the_bits_of_one_process(tmp_path):
    # vLLM's others of this format run on GPUs alone.
    assert not BatchedTritonExperts._supports_current_device()
    torch_ranks.run("vllm_moe_ranks.batched", 2, tmp_path)


def test_vllms_own_code_for_deep_ep_runs_over_ours(tmp_path):
    torch_ranks.run("vllm_moe_ranks.drop_in", 2, tmp_path)


def test_what_cannot_be_had_is_refused_and_harms_nothing(tmp_path):
    torch_ranks.run("vllm_moe_ranks.refusals", 2, tmp_path)
