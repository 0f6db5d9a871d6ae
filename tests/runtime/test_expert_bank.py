# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
import tiny_checkpoint as tiny
import torch

from afd_runtime import checkpoint
from afd_runtime.ffn_backend import ExpertBank, expert_identity
from afd_runtime.model_spec import FAMILIES, ModelError, ModelSpec

EXPERT_BYTES = 3 * tiny.HIDDEN * tiny.INNER * 4
BIAS_BYTES = (2 * tiny.INNER + tiny.HIDDEN) * 4


def make(path: Path, family: str, shards: int = 1, dtype: torch.dtype = torch.float32) -> ModelSpec:
    return ModelSpec.from_pretrained(tiny.write(path, tiny.config(family), tiny.tensors(family, dtype), shards))


def expected(family: str, layer: int, expert: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """w_up [2I, H] and w_down [H, I] of one expert, then its biases where there are some."""
    tensors = tiny.tensors(family, dtype)
    if family == "gpt_oss":
        prefix = f"model.layers.{layer}.mlp.experts."
        up, down = tensors[prefix + "gate_up_proj"][expert].T, tensors[prefix + "down_proj"][expert].T
        return [up, down, tensors[prefix + "gate_up_proj_bias"][expert], tensors[prefix + "down_proj_bias"][expert]]
    names = ("block_sparse_moe.experts", "w1", "w3", "w2")
    module, gate, up, down = names if family == "mixtral" else ("mlp.experts", "gate_proj", "up_proj", "down_proj")
    prefix = f"model.layers.{layer}.{module}.{expert}."
    return [
        torch.cat([tensors[f"{prefix}{gate}.weight"], tensors[f"{prefix}{up}.weight"]]),
        tensors[f"{prefix}{down}.weight"],
    ]


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("ids", [(0, 1, 2, 3, 4), (3, 4), (4, 0, 2), (1,)])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_right_experts_in_the_order_asked_for(tmp_path: Path, family: str, ids: tuple[int, ...], shards: int) -> None:
    spec = make(tmp_path, family, shards)
    bank = ExpertBank.load(spec, ids)
    assert tuple(bank.layers) == spec.expert_layers
    for layer, weights in bank.layers.items():
        loaded = [part for part in (weights.w_up, weights.w_down, weights.b_up, weights.b_down) if part is not None]
        for local, expert in enumerate(ids):
            for part, right in zip(loaded, expected(family, layer, expert), strict=True):
                assert torch.equal(part[local], right)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_reads_its_own_experts_and_nothing_else(tmp_path: Path, family: str) -> None:
    spec = make(tmp_path, family, 3)
    per_expert = EXPERT_BYTES + (BIAS_BYTES if family == "gpt_oss" else 0)
    for count in (0, 1, 3, 5):
        bank = ExpertBank.load(spec, range(count))
        assert bank.bytes_read == bank.nbytes == count * per_expert * len(spec.expert_layers)


def test_bytes_read_is_what_the_system_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    preadv = checkpoint.os.preadv
    monkeypatch.setattr(checkpoint.os, "preadv", lambda *a: seen.append(preadv(*a)) or seen[-1])
    assert ExpertBank.load(make(tmp_path, "gpt_oss"), [2]).bytes_read == sum(seen) > 0


def test_gpt_oss_keeps_the_storage_of_the_checkpoint(tmp_path: Path) -> None:
    weights = ExpertBank.load(make(tmp_path, "gpt_oss"), [1, 2]).layers[0]
    assert weights.w_up.shape == (2, 12, 10) and weights.w_up.transpose(1, 2).is_contiguous()
    assert weights.w_down.shape == (2, 10, 6) and weights.w_down.transpose(1, 2).is_contiguous()


def test_fused_checkpoint_equals_per_expert_checkpoint(tmp_path: Path) -> None:
    per_expert = make(tmp_path / "a", "qwen3_moe")
    parts = [expected("qwen3_moe", 1, expert) for expert in range(5)]
    prefix = "model.layers.1.mlp.experts"
    tensors = {f"{prefix}.gate_up_proj": torch.stack([p[0] for p in parts])}
    tensors[f"{prefix}.down_proj"] = torch.stack([p[1] for p in parts])
    fused = ModelSpec.from_pretrained(tiny.write(tmp_path / "b", tiny.config("qwen3_moe"), tensors))
    one, two = (ExpertBank.load(spec, [4, 1]).layers[1] for spec in (per_expert, fused))
    assert torch.equal(one.w_up, two.w_up) and torch.equal(one.w_down, two.w_down)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("run", [torch.float32, torch.float16, torch.bfloat16])
def test_conversion_to_the_run_dtype(tmp_path: Path, stored: torch.dtype, run: torch.dtype) -> None:
    spec = make(tmp_path, "gpt_oss", dtype=stored)
    bank = ExpertBank.load(spec, [3], dtype=run)
    weights, right = bank.layers[2], expected("gpt_oss", 2, 3, stored)
    for part, exact in zip((weights.w_up, weights.w_down, weights.b_up, weights.b_down), right, strict=True):
        assert part.dtype == run and torch.equal(part[0], exact.to(run))
    assert bank.bytes_read == (EXPERT_BYTES + BIAS_BYTES) * 3 * stored.itemsize // 4
    assert bank.nbytes == (EXPERT_BYTES + BIAS_BYTES) * 3 * run.itemsize // 4


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    bank = ExpertBank.load(make(tmp_path, "mixtral"), [0, 3], progress=lambda *call: calls.append(call))
    assert [done for done, _ in calls] == [bank.bytes_read * n // 3 for n in (1, 2, 3)]
    assert {total for _, total in calls} == {bank.bytes_read}


def test_some_layers_only(tmp_path: Path) -> None:
    bank = ExpertBank.load(make(tmp_path, "mixtral"), [0], layers=[2])
    assert list(bank.layers) == [2] and bank.bytes_read == EXPERT_BYTES
    with pytest.raises(ModelError, match=r"layer_idx 0.*\[2\]"):
        bank.forward(0, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"expert_ids": [0, 5]}, r"0\.\.4.*\[5\]"),
        ({"expert_ids": [-1]}, r"\[-1\]"),
        ({"expert_ids": [2, 2]}, r"distinct.*\[2, 2\]"),
        ({"expert_ids": [0], "layers": [0, 1]}, r"layers \[0\] have no experts.*\[1, 2\]"),
        ({"expert_ids": [0], "dtype": torch.int8}, r"torch\.int8.*bfloat16"),
    ],
)  # fmt: skip
def test_wrong_arguments(tmp_path: Path, arguments: dict, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        ExpertBank.load(make(tmp_path, "deepseek_v3"), **arguments)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_identity(tmp_path: Path, family: str) -> None:
    same = [expert_identity(make(tmp_path / str(shards), family, shards)) for shards in (1, 2, 5)]
    assert len(set(same)) == 1 and len(same[0]) == 16
    for name in (name for name in tiny.tensors(family) if ".mlp.experts." in name):
        tensors = tiny.tensors(family)
        tensors[name].view(tensors[name].shape[0], -1)[0 if family == "deepseek_v3" else 3, 0] += 1
        changed = tiny.write(tmp_path / "changed", tiny.config(family), tensors)
        assert expert_identity(ModelSpec.from_pretrained(changed)) != same[0], name
    half = ModelSpec.from_pretrained(
        tiny.write(tmp_path / "half", tiny.config(family), tiny.tensors(family, torch.half))
    )
    assert expert_identity(half) != same[0]
