"""The trainers of `shardings` as torch makes them: FSDP2 on gloo, over replicas, experts or a pipeline's stage.

No rank has a whole tensor on the way: parameters are on `meta` until they are split.
"""

from __future__ import annotations

import os
from typing import Any

import ml_dtypes
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from support.weights import models

TYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


def sharded(training: str, model: str, rank: int, folder: str) -> nn.Module:
    """Return this rank's part of a model. All four ranks call it."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", init_method=f"file://{folder}/trainers", rank=rank, world_size=4)
    root, tensors = nn.Module(), models.TRAINED[model]()
    if training == "ep2 x fsdp2":
        _over_experts(root, tensors, rank)
    else:
        kinds = ("pp", "fsdp") if training == "pp2 x fsdp2" else ("replicas", "fsdp")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=kinds)
        for name, (shape, dtype) in tensors.items():
            stage = 0 if name == "embed" or name.startswith("layers.0.") else 1
            if kinds[0] == "replicas" or stage == rank // 2:
                _put(root, name, torch.empty(shape, dtype=TYPES[dtype], device="meta"))
        along = {3: Shard(1)}
        fully_shard(
            root,
            mesh=mesh["fsdp"] if kinds[0] == "pp" else mesh,
            shard_placement_fn=lambda parameter: along.get(parameter.ndim),
        )
    return root.to_empty(device="cpu")


def _over_experts(root: nn.Module, tensors: dict[str, Any], rank: int) -> None:
    """Split what is dense over all ranks, experts over expert-parallel ones first."""
    everyone = init_device_mesh("cpu", (4,))
    by_expert = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("fsdp", "ep"))
    for name, (shape, dtype) in tensors.items():
        if len(shape) == 3:
            mine = torch.empty((shape[0] // 2, *shape[1:]), dtype=TYPES[dtype], device="meta")
            _put(root, name, DTensor.from_local(mine, by_expert["ep"], [Shard(0)]))
        elif ".experts." not in name or int(name.split(".")[3]) // (models.EXPERTS // 2) == rank // 2:
            _put(root, name, torch.empty(shape, dtype=TYPES[dtype], device="meta"))
    for experts in [module for name, module in root.named_modules() if name.endswith(".experts")]:
        fully_shard(experts, mesh=by_expert["fsdp"])
    fully_shard(root, mesh=everyone)


def _put(root: nn.Module, name: str, tensor: torch.Tensor) -> None:
    *path, last = name.split(".")
    for step in path:
        if step not in root._modules:
            root.add_module(step, nn.Module())
        root = root._modules[step]
    root.register_parameter(last, nn.Parameter(tensor))


def array_of(tensor: Any) -> Any:
    """Return a DTensor's local part as numpy's array of the same memory."""
    local = tensor.detach().to_local()
    return local.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if local.dtype == torch.bfloat16 else local.numpy()
