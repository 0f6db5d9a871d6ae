# SPDX-License-Identifier: Apache-2.0
"""vLLM with its routed experts in other processes against undivided vLLM: tokens, logprobs, parameters, bytes read."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed")

from engine_runs import MAX_TOKENS, PROMPTS  # noqa: E402

from afd_runtime.checkpoint import SafetensorsIndex  # noqa: E402
from afd_runtime.launch import reserve_port  # noqa: E402
from afd_runtime.model_spec import ModelSpec  # noqa: E402

LOGPROB_TOLERANCE = 1e-3
FAMILIES = ("deepseek_v2", "deepseek_v3", "qwen3_moe")


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Of the logprobs at all positions; infinite where the five most likely tokens are not the same."""
    worst = 0.0
    for mine, theirs in zip(one["logprobs"], other["logprobs"], strict=True):
        for position, expected in zip(mine, theirs, strict=True):
            if position.keys() != expected.keys():
                return float("inf")
            worst = max(worst, *(abs(position[token] - expected[token]) for token in expected))
    return worst


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_undivided_vllm(
    undivided: Callable, divided: Callable, vllm_checkpoint: Callable, family: str, record_property: Callable
) -> None:
    right, result = undivided(family), divided(family, ffn_ranks=2)
    tokens = result["tokens"]
    assert len({token for row in tokens for token in row}) >= 64, "too few distinct tokens to prove anything"
    assert tokens == right["tokens"] and [len(row) for row in tokens] == [MAX_TOKENS] * len(PROMPTS)
    difference = largest_difference(result, right)
    assert difference <= LOGPROB_TOLERANCE
    assert expert_parameters(right) and not expert_parameters(result)
    check_report(result["reports"], vllm_checkpoint(family))
    record_property("served", f"vLLM {family}: {len(tokens)} prompts, max logprob error {difference:.1e}")


def expert_parameters(result: dict[str, Any]) -> list[str]:
    """Names of parameters in a worker that hold routed experts."""
    (names,) = result["parameters"]
    return [name for name in names if ".experts." in name and not name.endswith("e_score_correction_bias")]


def check_report(reports: list[dict[str, Any]], model: Path) -> None:
    """No expert byte was read, and each layer sent every scheduled token once."""
    (report,) = reports
    spec, index = ModelSpec.from_pretrained(model), SafetensorsIndex.open(model)
    experts = {name for layer in spec.expert_layers for name in spec.expert_tensors(layer)}
    others = index.names - experts
    assert report["load"] == {
        "tensors_read": len(others),
        "bytes_read": sum(index.entry(name).nbytes for name in others),
        "expert_tensors_left_out": len(experts),
    }
    rows = sum(len(prompt) + MAX_TOKENS - 1 for prompt in PROMPTS)
    assert {int(layer) for layer in report["layers"]} == set(spec.expert_layers)
    assert {layer["rows"] for layer in report["layers"].values()} == {rows}


def test_compiled_equals_compiled_undivided_vllm(
    divided: Callable, vllm_run: Callable, vllm_checkpoint: Callable
) -> None:
    right = vllm_run(vllm_checkpoint("qwen3_moe"), enforce_eager=False)
    result = divided("qwen3_moe", enforce_eager=False)
    assert result["tokens"] == right["tokens"]
    assert largest_difference(result, right) <= LOGPROB_TOLERANCE


def test_two_data_parallel_ranks_of_which_one_ends_early(
    undivided: Callable, vllm_run: Callable, vllm_checkpoint: Callable, ffn_group: Callable
) -> None:
    """Rank 1 has one short prompt and then nothing; neither rank waits for the other's exchanges."""
    right, jobs = (
        undivided("qwen3_moe")["tokens"],
        [{"prompts": PROMPTS[1:]}, {"prompts": PROMPTS[:1], "max_tokens": 5}],
    )
    with reserve_port("127.0.0.1") as holder:
        port = holder.getsockname()[1]
    with ffn_group("qwen3_moe", attention_ranks=2) as afd, ThreadPoolExecutor() as pool:

        def rank(index: int) -> dict[str, Any]:
            env = {"VLLM_DP_RANK": index, "VLLM_DP_RANK_LOCAL": index, "VLLM_DP_SIZE": 2, "VLLM_DP_MASTER_PORT": port}
            env = {name: str(value) for name, value in env.items()} | {"VLLM_DP_MASTER_IP": "127.0.0.1"}
            return vllm_run(vllm_checkpoint("qwen3_moe"), afd, job=jobs[index], env=env)

        results = list(pool.map(rank, range(2)))
    assert results[0]["tokens"] == right[1:] and results[1]["tokens"] == [right[0][:5]]
    for result, job in zip(results, jobs, strict=True):
        rows = sum(len(prompt) + job.get("max_tokens", MAX_TOKENS) - 1 for prompt in job["prompts"])
        assert {layer["rows"] for layer in result["reports"][0]["layers"].values()} == {rows}


@pytest.mark.parametrize("fault", ["scaled", "last-dropped"])
def test_planted_fault_is_noticed(undivided: Callable, divided: Callable, fault: str) -> None:
    result = divided("qwen3_moe", fault=fault)
    assert largest_difference(result, undivided("qwen3_moe")) > LOGPROB_TOLERANCE
