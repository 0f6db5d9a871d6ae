# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint as tiny
import torch

from afd_kernels import SwiGLU
from afd_runtime.model_spec import FAMILIES, ModelError, ModelSpec


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_sizes_and_layers(tmp_path: Path, family: str, shards: int) -> None:
    path = tiny.write(tmp_path / "m", tiny.config(family), tiny.tensors(family, torch.bfloat16), shards)
    spec = ModelSpec.from_pretrained(path)
    assert (spec.model_type, spec.num_layers, spec.expert_layers) == (family, 3, tiny.EXPERT_LAYERS[family])
    assert (spec.num_experts, spec.top_k, spec.hidden_size, spec.intermediate_size) == (5, 2, 10, 6)
    assert (spec.dtype, spec.quantization) == (torch.bfloat16, None)
    expected = SwiGLU(alpha=1.702, beta=1.0, limit=6.5, interleaved=True) if family == "gpt_oss" else SwiGLU()
    assert spec.activation == expected


@pytest.mark.parametrize("key", ["n_routed_experts", "num_local_experts", "num_experts"])
def test_number_of_experts_under_each_name(tmp_path: Path, key: str) -> None:
    config = tiny.config("qwen3_moe")
    del config["num_experts"]
    assert (
        ModelSpec.from_pretrained(tiny.write(tmp_path, {**config, key: 5}, tiny.tensors("qwen3_moe"))).num_experts == 5
    )


def test_fused_tensors_are_recognised(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": torch.zeros(2, 10)}
    for layer in range(3):
        tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.zeros(5, 12, 10)
        tensors[f"model.layers.{layer}.mlp.experts.down_proj"] = torch.zeros(5, 10, 6)
    assert ModelSpec.from_pretrained(tiny.write(tmp_path, tiny.config("mixtral"), tensors)).layout.kind == "fused"


def test_layers_past_the_last_are_not_exchanged(tmp_path: Path) -> None:
    tensors = tiny.tensors("deepseek_v3")
    tensors |= {name.replace("layers.2", "layers.3"): t.clone() for name, t in tensors.items() if "layers.2" in name}
    assert ModelSpec.from_pretrained(tiny.write(tmp_path, tiny.config("deepseek_v3"), tensors)).expert_layers == (1, 2)


def test_config_hash_ignores_who_wrote_it(tmp_path: Path) -> None:
    tensors, config = tiny.tensors("qwen3_moe"), tiny.config("qwen3_moe")
    versions = [{}, {"transformers_version": "5.17.0", "_name_or_path": "x"}, {"rms_norm_eps": 1e-5}]
    paths = [tiny.write(tmp_path / str(i), {**config, **extra}, tensors) for i, extra in enumerate(versions)]
    first, other_writer, other_model = (ModelSpec.from_pretrained(path).config_hash for path in paths)
    assert first == other_writer != other_model


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as error:
        ModelSpec.from_pretrained(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, ["'fp8'", "bfloat16"]),
        ({"quantization_config": {"quant_method": "mxfp4"}}, ["'mxfp4'"]),
        ({"quantization_config": {"bits": 4}}, ["'unnamed'"]),
        ({"model_type": "llama", "n_routed_experts": None}, ["'llama'", "dense"]),
        ({"n_routed_experts": None}, ["'deepseek_v3'", "dense"]),
        ({"n_routed_experts": 0}, ["dense"]),
        ({"model_type": "jamba"}, ["'jamba'", "deepseek_v3", "qwen3_moe"]),
        ({"hidden_act": "gelu"}, ["'gelu'", "silu"]),
        ({"hidden_size": "10"}, ["hidden_size", "'10'"]),
        ({"moe_intermediate_size": None}, ["moe_intermediate_size", "None"]),
        ({"num_experts_per_tok": 6}, ["num_experts_per_tok 6", "5 experts"]),
        ({"num_local_experts": 7}, ["contradicting", "7"]),
        ({"n_routed_experts": 6}, ["experts.5.gate_proj.weight", "no tensor"]),
        ({"n_routed_experts": 4}, ["unexpected", "experts.4."]),
        ({"moe_intermediate_size": 8}, ["gate_proj.weight", "[6, 10]", "[8, 10]"]),
        ({"first_k_dense_replace": 0}, ["[0, 1, 2]", "[1, 2]"]),
        ({"num_hidden_layers": 4}, ["[1, 2, 3]", "[1, 2]"]),
    ],
)  # fmt: skip
def test_refused_by_config(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    message = refusal(tiny.write(tmp_path, tiny.config("deepseek_v3", **changes), tiny.tensors("deepseek_v3")))
    assert all(word in message for word in words), message


def test_quantised_is_refused_before_the_weights_are_looked_at(tmp_path: Path) -> None:
    config = tiny.config("deepseek_v3", quantization_config={"quant_method": "awq"})
    assert "'awq'" in refusal(tiny.write(tmp_path, config, None))


def test_scale_tensor_is_never_ignored(tmp_path: Path) -> None:
    extra = "model.layers.1.mlp.experts.0.gate_proj.weight_scale_inv"
    tensors = tiny.tensors("deepseek_v3") | {extra: torch.ones(1)}
    assert extra in refusal(tiny.write(tmp_path, tiny.config("deepseek_v3"), tensors))


def test_dtype_that_needs_a_scale_is_refused(tmp_path: Path) -> None:
    tensors = {name: t.to(torch.float8_e4m3fn) for name, t in tiny.tensors("deepseek_v3").items()}
    assert "F8_E4M3" in refusal(tiny.write(tmp_path, tiny.config("deepseek_v3"), tensors))


@pytest.mark.parametrize(("config", "word"), [(None, "no config.json"), ({"model_type": "x"}, "dense")])
def test_directory_without_checkpoint(tmp_path: Path, config: dict | None, word: str) -> None:
    assert word in refusal(tiny.write(tmp_path, config, None))


def test_config_without_weights(tmp_path: Path) -> None:
    assert "model.safetensors" in refusal(tiny.write(tmp_path, tiny.config("deepseek_v3"), None))


def test_no_directory(tmp_path: Path) -> None:
    assert "not a directory" in refusal(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["{", "[]", "\x80"])
def test_config_that_is_no_json_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    assert "JSON" in refusal(tmp_path)


def test_missing_shard(tmp_path: Path) -> None:
    path = tiny.write(tmp_path, tiny.config("qwen3_moe"), tiny.tensors("qwen3_moe"), shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in refusal(path)


def test_truncated_file(tmp_path: Path) -> None:
    path = tiny.write(tmp_path, tiny.config("qwen3_moe"), tiny.tensors("qwen3_moe"))
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-4])
    assert "incomplete" in refusal(path)
    (path / "model.safetensors").write_bytes(data[:5])
    assert "not a safetensors file" in refusal(path)
    (path / "model.safetensors").write_bytes(b"\xff" * 64)
    assert "not a safetensors file" in refusal(path)


def test_index_that_points_out_of_the_directory(tmp_path: Path) -> None:
    path = tiny.write(tmp_path, tiny.config("qwen3_moe"), tiny.tensors("qwen3_moe"), shards=2)
    index = path / "model.safetensors.index.json"
    weight_map = {name: f"../{file}" for name, file in json.loads(index.read_text())["weight_map"].items()}
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert "plain file names" in refusal(path)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'])
def test_malformed_index(tmp_path: Path, text: str) -> None:
    path = tiny.write(tmp_path, tiny.config("qwen3_moe"), tiny.tensors("qwen3_moe"), shards=2)
    (path / "model.safetensors.index.json").write_text(text)
    assert "index.json" in refusal(path)


def test_no_engine_is_imported() -> None:
    code = "import afd_runtime.ffn_backend, sys; print('transformers' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "False"


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 0}),
        ("qwen3_moe", {"decoder_sparse_step": None}),
        ("qwen2_moe", {"mlp_only_layers": "x"}),
        ("gpt_oss", {"swiglu_limit": None}),
        ("gpt_oss", {"swiglu_limit": float("nan")}),
        ("gpt_oss", {"swiglu_alpha": "auto"}),
        ("olmoe", {"model_type": ["olmoe"]}),
        ("olmoe", {"num_experts": 1 << 40}),
        ("deepseek_v3", {"num_hidden_layers": 1 << 40}),
    ],
)
def test_values_of_another_kind_end_in_a_refusal(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    path = tiny.write(tmp_path, tiny.config(family, **changes), tiny.tensors(family))
    try:
        ModelSpec.from_pretrained(path)
    except ModelError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        "1",
        '{"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [{}], "data_offsets": [0, 4]}}',
        "[" * 100000,
    ],
)
def test_header_of_another_kind(tmp_path: Path, header: str) -> None:  # fmt: skip
    path = tiny.write(tmp_path, tiny.config("olmoe"), None)
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(64))
    assert "model.safetensors" in refusal(path)


@pytest.mark.parametrize("value", [None, 1, [{}], {}])
def test_shard_that_is_no_name(tmp_path: Path, value: Any) -> None:
    path = tiny.write(tmp_path, tiny.config("olmoe"), tiny.tensors("olmoe"), shards=2)
    index = path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**weight_map, next(iter(weight_map)): value}}))
    assert "plain file names" in refusal(path)
