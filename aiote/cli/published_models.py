"""Layouts and recipes of two published weight updates: Qwen3-235B on 128 -> 32 ranks, Kimi-K2 on 256 -> 128.

Shapes come from the models' configurations. Trainers hold bf16 (FSDP2, experts by name over expert-parallel ranks,
pipeline stages). Inference ranks hold fp8 with fp32 scales of 128x128 blocks, experts stacked by rank, and whole
tensors otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from aiote.weights import (
    Expression,
    Layout,
    Mesh,
    Quantized,
    Recipe,
    Replicate,
    Shard,
    Tensor,
    cat,
    quantized,
    stack,
)

BLOCK = 128
Shape = tuple[int, ...]
Placements = tuple[Replicate | Shard, ...]


@dataclass
class ModelTensors:
    """Collect the tensors of a model, layer by layer."""

    sources: dict[str, Tensor] = field(default_factory=dict)
    targets: dict[str, Tensor] = field(default_factory=dict)
    recipe: dict[str, Expression | Quantized | str] = field(default_factory=dict)

    def plan_of(self) -> tuple[Layout, Layout, Recipe]:
        return Layout(self.sources), Layout(self.targets), Recipe(self.recipe)

    def source(self, name: str, shape: Shape, mesh: Mesh) -> str:
        self.sources[name] = Tensor.over(shape, "BF16", mesh, (Shard(0),))
        return name

    def same(self, name: str, shape: Shape, mesh: Mesh, everywhere: Mesh, dtype: str = "BF16") -> None:
        """Add a tensor that all inference ranks hold unchanged."""
        self.sources[name] = Tensor.over(shape, dtype, mesh, (Shard(0),))
        self.targets[name] = Tensor.over(shape, dtype, everywhere, (Replicate(),))

    def dense(self, name: str, rows: dict[str, int], columns: int, mesh: Mesh, everywhere: Mesh) -> None:
        """Add a quantized matrix that all inference ranks hold, fused of tensors with the given numbers of rows."""
        parts = [self.source(part, (count, columns), mesh) for part, count in rows.items()]
        self.quantized(name, cat(*parts), (sum(rows.values()), columns), everywhere, (Replicate(),))

    def quantized(self, name: str, expression: Expression, shape: Shape, mesh: Mesh, placements: Placements) -> None:
        blocks = (*shape[:-2], *(-(-extent // BLOCK) for extent in shape[-2:]))
        self.targets[name] = Tensor.over(shape, "F8_E4M3", mesh, placements)
        self.targets[f"{name}_scale_inv"] = Tensor.over(blocks, "F32", mesh, placements)
        self.recipe[name] = quantized(expression, scale=f"{name}_scale_inv")

    def experts(
        self,
        layer: str,
        count: int,
        inner: int,
        hidden: int,
        *,
        meshes: list[Mesh],
        mesh: Mesh,
        placements: Placements,
    ) -> None:
        """Add the experts of a layer. Each of `meshes` trains an equal share of them."""
        each = count // len(meshes)
        parts: dict[str, list[str]] = {"gate": [], "up": [], "down": []}
        for e in range(count):
            for kind, names in parts.items():
                shape = (hidden, inner) if kind == "down" else (inner, hidden)
                names.append(self.source(f"{layer}.experts.{e}.{kind}", shape, meshes[e // each]))
        fused = stack(*(cat(gate, up) for gate, up in zip(parts["gate"], parts["up"], strict=True)))
        self.quantized(f"{layer}.w13", fused, (count, 2 * inner, hidden), mesh, placements)
        self.quantized(f"{layer}.w2", stack(*parts["down"]), (count, hidden, inner), mesh, placements)


def qwen3_235b(layers: int = 94) -> ModelTensors:
    """Qwen3-235B-A22B: PP8 of 16 ranks (EP8 x FSDP2 for experts) -> 4 replicas of EP8; stage p is nodes p and p + 8."""
    model, hidden = ModelTensors(), 4096
    replicas = Mesh.of(np.arange(32).reshape(4, 8))
    everywhere = Mesh.of(range(32))
    nodes = np.arange(128).reshape(16, 8)
    per_stage = 12
    for layer in range(layers):
        stage = np.concatenate([nodes[layer // per_stage], nodes[layer // per_stage + 8]])
        mesh, experts = Mesh.of(stage), [Mesh.of(stage[[e, e + 8]]) for e in range(8)]
        name = f"layers.{layer}"
        if layer == 0:
            model.same("embed", (151_936, hidden), mesh, everywhere)
        rows = {f"{name}.q": 8192, f"{name}.k": 512, f"{name}.v": 512}
        model.dense(f"{name}.qkv", rows, hidden, mesh, everywhere)
        model.dense(f"{name}.o_proj", {f"{name}.o": hidden}, 8192, mesh, everywhere)
        for norm, size in (("input_norm", hidden), ("post_norm", hidden), ("q_norm", 128), ("k_norm", 128)):
            model.same(f"{name}.{norm}", (size,), mesh, everywhere)
        model.same(f"{name}.router", (128, hidden), mesh, everywhere)
        model.experts(name, 128, 1536, hidden, meshes=experts, mesh=replicas, placements=(Replicate(), Shard(0)))
        if layer == layers - 1:
            model.same("norm", (hidden,), mesh, everywhere)
            model.same("lm_head", (151_936, hidden), mesh, everywhere)
    return model


def kimi_k2(
    expert_ranks: int = 64, layers: int = 61, *, trainers: int = 256, targets: int = 128, trained_by: int = 8
) -> ModelTensors:
    """Kimi-K2: PP16 of 16 ranks (EP8 x FSDP2 for experts) -> 128 ranks in EP of `expert_ranks`, other tensors whole.

    With more trainers, each of the 16 stages has more ranks; `trained_by` is the expert parallelism of its experts.
    """
    model, hidden, everywhere = ModelTensors(), 7168, Mesh.of(range(targets))
    replicas = Mesh.of(np.arange(targets).reshape(-1, expert_ranks))
    each = trainers // 16
    for layer in range(layers):
        stage = np.arange(each) + each * min(layer // 4, 15)
        mesh, experts = Mesh.of(stage), [Mesh.of(few) for few in stage.reshape(trained_by, -1)]
        name = f"layers.{layer}"
        if layer == 0:
            model.same("embed", (163_840, hidden), mesh, everywhere)
        rows = {f"{name}.q_a": 1536, f"{name}.kv_a": 576}
        model.dense(f"{name}.fused_qkv_a", rows, hidden, mesh, everywhere)
        model.dense(f"{name}.q_b_proj", {f"{name}.q_b": 12_288}, 1536, mesh, everywhere)
        model.dense(f"{name}.kv_b_proj", {f"{name}.kv_b": 16_384}, 512, mesh, everywhere)
        model.dense(f"{name}.o_proj", {f"{name}.o": hidden}, 8192, mesh, everywhere)
        for norm, size in (("input_norm", hidden), ("post_norm", hidden), ("q_norm", 1536), ("kv_norm", 512)):
            model.same(f"{name}.{norm}", (size,), mesh, everywhere)
        inner, mlp = (18_432, "mlp") if layer == 0 else (2048, "shared")
        rows = {f"{name}.{mlp}.gate": inner, f"{name}.{mlp}.up": inner}
        model.dense(f"{name}.{mlp}.gate_up_proj", rows, hidden, mesh, everywhere)
        model.dense(f"{name}.{mlp}.down_proj", {f"{name}.{mlp}.down": hidden}, inner, mesh, everywhere)
        if layer:
            model.same(f"{name}.router", (384, hidden), mesh, everywhere)
            model.same(f"{name}.router_bias", (384,), mesh, everywhere, "F32")
            model.experts(name, 384, 2048, hidden, meshes=experts, mesh=replicas, placements=(Replicate(), Shard(0)))
        if layer == layers - 1:
            model.same("norm", (hidden,), mesh, everywhere)
            model.same("lm_head", (163_840, hidden), mesh, everywhere)
    return model
