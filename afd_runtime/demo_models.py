# SPDX-License-Identifier: Apache-2.0
"""Small seeded checkpoints of real architectures, for tests, examples and a first run without a download.

Default initialisation would make greedy generation cycle through a few tokens and hide wrong experts, so weights are
drawn so wide that routed experts decide the text: of 32 tokens at least 24 differ. Sizes are odd on purpose, but for
`deepseek_v2_wide`, whose sizes are those of real models, and those for vLLM, whose CPU kernels want multiples of 32 and
the head size of real MLA models. Only writing needs transformers.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 512


@dataclass(frozen=True)
class DemoModel:
    """Config of one demo checkpoint, and how wide its weights are drawn (standard deviations).

    model_type: the architecture, where it is not the family's name.
    """

    config: dict[str, Any]
    model_type: str | None = None
    expert_std: float = 0.3
    gate_std: float = 0.16
    embed_std: float = 0.3
    attention_std: float = 0.1
    other_std: float = 0.1
    shard_size: str = "10MB"


_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_MLA = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "num_attention_heads": 4}
_GQA = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}

DEMO_MODELS: dict[str, DemoModel] = {
    "deepseek_v2": DemoModel(
        {**_MLA, "hidden_size": 72, "intermediate_size": 100, "moe_intermediate_size": 56, "num_hidden_layers": 3,
         "n_routed_experts": 10, "n_shared_experts": 2, "num_experts_per_tok": 3, "first_k_dense_replace": 1,
         "q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 5, "topk_group": 2,
         "routed_scaling_factor": 1.5},
        attention_std=0.3,
    ),
    "deepseek_v3": DemoModel(
        {**_MLA, "hidden_size": 64, "intermediate_size": 100, "moe_intermediate_size": 40, "num_hidden_layers": 4,
         "n_routed_experts": 12, "n_shared_experts": 1, "num_experts_per_tok": 3, "first_k_dense_replace": 1,
         "q_lora_rank": 24, "n_group": 4, "topk_group": 2},
        attention_std=0.3,
        shard_size="300KB",
    ),
    "glm4_moe": DemoModel(
        {**_GQA, "hidden_size": 96, "intermediate_size": 104, "moe_intermediate_size": 40, "num_hidden_layers": 3,
         "n_routed_experts": 18, "n_shared_experts": 1, "num_experts_per_tok": 4, "first_k_dense_replace": 1,
         "n_group": 1, "topk_group": 1, "use_qk_norm": True}
    ),
    "gpt_oss": DemoModel(
        {**_GQA, "hidden_size": 96, "intermediate_size": 40, "num_hidden_layers": 4, "num_local_experts": 11,
         "num_experts_per_tok": 3, "sliding_window": 9, "max_position_embeddings": 131072},
        attention_std=0.2,
        shard_size="300KB",
    ),
    "mixtral": DemoModel(
        {**_GQA, "hidden_size": 64, "intermediate_size": 56, "num_hidden_layers": 3, "num_local_experts": 10,
         "num_experts_per_tok": 2, "tie_word_embeddings": True},
        embed_std=0.1,
        attention_std=0.2,
    ),
    "qwen3_moe": DemoModel(
        {**_GQA, "hidden_size": 80, "intermediate_size": 96, "moe_intermediate_size": 56, "num_hidden_layers": 4,
         "num_experts": 20, "num_experts_per_tok": 4, "mlp_only_layers": [1], "norm_topk_prob": True}
    ),
}  # fmt: skip

#: Too large for tests without a GPU: 1.1 G parameters, 2.3 GB in bfloat16.
WIDE_MODELS: dict[str, DemoModel] = {
    "deepseek_v2_wide": DemoModel(
        {"hidden_size": 2048, "intermediate_size": 2816, "moe_intermediate_size": 352, "num_hidden_layers": 8,
         "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
         "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": None, "n_routed_experts": 64,
         "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "topk_method": "greedy",
         "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
        model_type="deepseek_v2",
        expert_std=0.04,
        gate_std=0.03,
        embed_std=1.0,
        attention_std=0.03,
        other_std=0.02,
        shard_size="2GB",
    ),
}  # fmt: skip

_VLLM_SIZES = {"hidden_size": 96, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 4}
_VLLM_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}


def _for_vllm(family: str, **config: Any) -> DemoModel:
    """The demo model of ``family`` in sizes that vLLM serves on a CPU."""
    demo = DEMO_MODELS[family]
    return replace(demo, config={**demo.config, **_VLLM_SIZES, **config}, model_type=family)


VLLM_MODELS: dict[str, DemoModel] = {
    "deepseek_v2_vllm": _for_vllm("deepseek_v2", **_VLLM_MLA),
    "deepseek_v3_vllm": _for_vllm("deepseek_v3", **_VLLM_MLA, topk_method="noaux_tc", scoring_func="sigmoid"),
    "qwen3_moe_vllm": _for_vllm("qwen3_moe", head_dim=32),
}


def write_demo_model(
    family: str,
    path: str | Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shard_size: str | None = None,
    device: torch.device | str = "cpu",
) -> Path:
    """Writes a checkpoint of `family` to the new or empty directory `path` and returns it.

    family: a key of `DEMO_MODELS`, `WIDE_MODELS` or `VLLM_MODELS`. device: that draws the weights; equal arguments give
    equal weights, another kind of device gives others. Raises ValueError for an unknown family or a directory that
    holds something.
    """
    path, models = Path(path), {**DEMO_MODELS, **WIDE_MODELS, **VLLM_MODELS}
    if family not in models:
        raise ValueError(f"family {family!r} is unknown; choose one of {', '.join(models)}.")
    if path.is_dir() and any(path.iterdir()):
        raise ValueError(f"path {path} is not empty; choose a new directory, or remove this one first.")
    demo = models[family]
    model = empty_model(demo.model_type or family, demo, dtype).to_empty(device=device)
    model.tie_weights()
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            if not (name == "lm_head.weight" and model.config.tie_word_embeddings):
                tensor.copy_(_values(name, tensor.shape, demo, generator))
    model.save_pretrained(path, max_shard_size=shard_size or demo.shard_size)
    return path


def empty_model(model_type: str, demo: DemoModel, dtype: torch.dtype) -> Any:
    """The engine's model of `demo` on meta: nothing is allocated or drawn."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.for_model(model_type, **{**_COMMON, **demo.config})
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _values(name: str, shape: torch.Size, demo: DemoModel, generator: torch.Generator) -> torch.Tensor:
    """Float32 values for one tensor; routers, their selection bias and the biases of experts are never zero."""
    noise = torch.randn(shape, generator=generator, device=generator.device)
    if "norm" in name:
        return 1 + 0.1 * noise
    if name.endswith("e_score_correction_bias"):
        return 0.1 * noise
    if ".experts." in name:
        return demo.expert_std * noise
    if ".gate." in name or ".router." in name:
        return demo.gate_std * noise
    if "embed_tokens" in name:
        return demo.embed_std * noise
    if ".self_attn." in name and name.endswith(".weight"):
        return demo.attention_std * noise
    return demo.other_std * noise


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a small Mixture-of-Experts checkpoint.")
    parser.add_argument("family", choices=sorted({**DEMO_MODELS, **WIDE_MODELS, **VLLM_MODELS}))
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--device", default="cpu", help="that draws the weights; other kinds draw other ones")
    args = parser.parse_args(argv)
    dtype = getattr(torch, args.dtype)
    print(write_demo_model(args.family, args.path, seed=args.seed, dtype=dtype, device=args.device))


if __name__ == "__main__":
    main()
