# SPDX-License-Identifier: Apache-2.0
"""The check of runs in bfloat16 and float16: right in all families and shapes of group, wrong experts noticed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loop_session import CAP, LoopSession
from transformers import AutoModelForCausalLM

from afd_runtime._greedy import greedy_generate, layer_outputs
from afd_runtime.demo_models import DEMO_MODELS
from afd_runtime.integrations.transformers import load_remote_model
from afd_runtime.layer_check import LayerCheckReport, LayerRecord, LayerRecorder, compare_layers
from afd_runtime.model_spec import ModelSpec

PROMPTS = [[5, 17, 3], list(range(40, 51)), [7 * i % 500 + 1 for i in range(37)], [400]]
IDS = [f"--prompt-ids={','.join(map(str, ids))}" for ids in PROMPTS]
SHORT = ["--prompt-ids=5,17,3", "--prompt-ids=9,8,7,6,5", "--max-new-tokens=8"]
FAULTS = ["zeroed", "shifted", "swapped", "last-dropped", "scaled"]


def check_in_one_process(path: Path, dtype: torch.dtype, fault: str | None = None) -> LayerCheckReport:
    """A few steps with experts from plain torch, against the experts of the undivided model."""
    spec = ModelSpec.from_pretrained(path)
    recorder = LayerRecorder(LoopSession(spec, fault, dtype=dtype), len(spec.expert_layers))
    ids, _ = greedy_generate(load_remote_model(path, recorder, dtype=dtype), PROMPTS, 4, CAP)
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager").eval()
    expected = layer_outputs(whole, [vars(call) for call in recorder.calls])
    record = LayerRecord(range(4), recorder.calls, recorder.rows, recorder.rows_kept)
    tokens = {index: (row, row) for index, row in enumerate(ids.tolist())}
    return compare_layers({0: record}, {0: expected}, dtype, tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", sorted(DEMO_MODELS))
def test_rounding_is_far_below_the_tolerances(checkpoint: Callable, family: str, dtype: torch.dtype) -> None:
    report = check_in_one_process(checkpoint(family), dtype)
    assert report.ok and report.rows == report.rows_compared > 100
    assert report.max_error < report.tolerance / 4 and report.max_rms < report.rms_tolerance / 3
    assert report.max_scale_error < report.scale_tolerance / 3


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("family", sorted(DEMO_MODELS))
def test_planted_faults_are_noticed(checkpoint: Callable, family: str, fault: str) -> None:
    report = check_in_one_process(checkpoint(family), torch.bfloat16, fault)
    assert not report.ok and report.matched == 0
    assert max(report.max_error / report.tolerance, report.max_scale_error / report.scale_tolerance) > 3


@pytest.mark.parametrize(
    ("family", "dtype", "attention_ranks", "ffn_ranks"),
    [("deepseek_v2", "bfloat16", 1, 2), ("gpt_oss", "bfloat16", 2, 1), ("qwen3_moe", "float16", 2, 2)],
)
def test_equal_to_the_undivided_experts(
    checkpoint: Callable, serve: Callable, family: str, dtype: str, attention_ranks: int, ffn_ranks: int
) -> None:
    group = [f"--attention-ranks={attention_ranks}", f"--ffn-ranks={ffn_ranks}", "--max-batch-tokens=24"]
    result = serve(checkpoint(family), *IDS, "--max-new-tokens=12", *group, dtype=dtype)
    check, layers = result["check"], result["layers"]
    assert check["ok"] and result["exit_code"] == 0, check["mismatches"]
    assert check["matched"] == len(PROMPTS) and 0 < check["max_error"] < check["tolerance"] / 2
    assert check["rows_compared"] == check["rows"] == next(iter(layers.values()))["rows"]
    assert check["layer_calls"] >= 12 * attention_ranks * len(layers)
    assert check["tokens"] == 12 * len(PROMPTS) and check["tokens_equal"] > 0


@pytest.mark.parametrize(
    ("fault", "planted"), [("shifted", 2), ("scaled-twice", 2), ("lost-weight", 1), ("wrong-expert", 1), ("scaled", 2)]
)
def test_planted_fault_is_caught(
    checkpoint: Callable, serve: Callable, afd, tmp_path: Path, fault: str, planted: int
) -> None:
    afd.plant(fault, tmp_path / "planted")
    result = serve(checkpoint("deepseek_v2"), *SHORT, "--ffn-ranks=2", dtype="bfloat16")
    assert len(list((tmp_path / "planted").iterdir())) == planted
    assert result["exit_code"] == 1 and not result["check"]["ok"] and result["check"]["matched"] == 0
    assert re.match(r"attention rank 0: (layer|the scale of layer) \d", result["check"]["mismatches"][0])


def test_text_report(checkpoint: Callable, afd) -> None:
    done = afd.run("generate", checkpoint("deepseek_v2"), *SHORT, "--check", "--dtype=bfloat16")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"match: 2/2 prompts, 16 layer calls, max error \d\.\de-\d\d \(allowed 3\.0e-02\), tokens equal \d+/16",
        done.stdout.splitlines()[-1],
    )


def test_kernels_are_counted_where_asked_for(checkpoint: Callable, serve: Callable, afd) -> None:
    """On CPUs the references run, so nothing is counted; that kernels are is tested on a GPU."""
    assert serve(checkpoint("mixtral"), *SHORT)["kernels"] is None
    afd.env["AFD_COUNT_KERNELS"] = "1"
    kernels = serve(checkpoint("mixtral"), *SHORT, "--ffn-ranks=2")["kernels"]
    assert kernels == {"attention": {}, "ffn": {}, "ffn_steps": 16, "ffn_replays": 0}
