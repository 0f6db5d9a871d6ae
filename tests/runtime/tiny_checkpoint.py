# SPDX-License-Identifier: Apache-2.0
"""Hand-made checkpoints of a few kilobytes: no engine writes them, so no engine is needed to test readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, INNER, EXPERTS, LAYERS = 10, 6, 5, 3

CONFIG: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"n_routed_experts": EXPERTS, "moe_intermediate_size": INNER, "first_k_dense_replace": 1},
    "glm4_moe": {"n_routed_experts": EXPERTS, "moe_intermediate_size": INNER, "first_k_dense_replace": 2},
    "deepseek_v2": {"n_routed_experts": EXPERTS, "moe_intermediate_size": INNER, "first_k_dense_replace": 0},
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": INNER, "decoder_sparse_step": 2},
    "qwen2_moe": {"num_experts": EXPERTS, "moe_intermediate_size": INNER, "mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": EXPERTS, "intermediate_size": INNER},
    "olmoe": {"num_experts": EXPERTS, "intermediate_size": INNER},
    "gpt_oss": {"num_local_experts": EXPERTS, "intermediate_size": INNER, "swiglu_limit": 6.5},
}
EXPERT_LAYERS = {
    "deepseek_v3": (1, 2),
    "glm4_moe": (2,),
    "deepseek_v2": (0, 1, 2),
    "qwen3_moe": (1,),
    "qwen2_moe": (0, 2),
    "mixtral": (0, 1, 2),
    "olmoe": (0, 1, 2),
    "gpt_oss": (0, 1, 2),
}


def config(family: str, **changes: Any) -> dict[str, Any]:
    base = {"model_type": family, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_experts_per_tok": 2}
    return {**base, "hidden_act": "silu", **CONFIG[family], **changes}


def tensors(family: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Random expert tensors of every exchanged layer, and a few tensors of other kinds with similar names."""
    generator = torch.Generator().manual_seed(7)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    module, parts = "mlp.experts", ("gate_proj", "up_proj", "down_proj")
    if family == "mixtral":
        module, parts = "block_sparse_moe.experts", ("w1", "w3", "w2")
    result = {"model.embed_tokens.weight": rand(12, HIDDEN)}
    for layer in EXPERT_LAYERS[family]:
        prefix = f"model.layers.{layer}.{module}"
        result[f"model.layers.{layer}.mlp.shared_experts.up_proj.weight"] = rand(INNER, HIDDEN)
        if family == "gpt_oss":
            result[f"{prefix}.gate_up_proj"] = rand(EXPERTS, HIDDEN, 2 * INNER)
            result[f"{prefix}.gate_up_proj_bias"] = rand(EXPERTS, 2 * INNER)
            result[f"{prefix}.down_proj"] = rand(EXPERTS, INNER, HIDDEN)
            result[f"{prefix}.down_proj_bias"] = rand(EXPERTS, HIDDEN)
            continue
        for expert in range(EXPERTS):
            for part, shape in zip(parts, ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)), strict=True):
                result[f"{prefix}.{expert}.{part}.weight"] = rand(*shape)
    return result


def write(path: Path, config: dict[str, Any] | None, tensors: dict[str, torch.Tensor] | None, shards: int = 1) -> Path:
    """Writes a model directory; with `shards` > 1 tensors go round-robin to shards named in an index."""
    path.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    if tensors is None:
        return path
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    names = sorted(tensors)
    files = [f"model-{shard + 1:05}-of-{shards:05}.safetensors" for shard in range(shards)]
    for shard, file in enumerate(files):
        save_file({name: tensors[name] for name in names[shard::shards]}, path / file)
    weight_map = {name: files[i % shards] for i, name in enumerate(names)}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path
