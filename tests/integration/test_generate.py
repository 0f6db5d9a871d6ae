# SPDX-License-Identifier: Apache-2.0
"""``afd generate`` from end to end: right in every shape of group, wrong experts noticed, nothing left running."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from afd_runtime import cli
from afd_runtime.generate import GenerateRequest, ffn_command
from afd_runtime.launch import reserve_port
from afd_runtime.workers import Prompt

NEW_TOKENS = 32
MAX_BATCH_TOKENS = 24
PROMPTS = ((5, 17, 3), tuple(range(40, 51)), tuple(range(400, 371, -1)), tuple(7 * i % 500 for i in range(50)))
LONG = [f"--prompt-ids={','.join(map(str, ids))}" for ids in PROMPTS]
SHORT = ["--prompt-ids=5,17,3", "--prompt-ids=9,8,7,6,5", "--max-new-tokens=8"]

GROUPS = [
    ("deepseek_v3", 1, 1, "replicated"),
    ("deepseek_v3", 1, 3, "sharded"),
    ("deepseek_v3", 3, 2, "replicated"),
    ("qwen3_moe", 2, 2, "replicated"),
    ("qwen3_moe", 3, 2, "sharded"),
    ("gpt_oss", 1, 1, "sharded"),
    ("gpt_oss", 1, 3, "sharded"),
    ("gpt_oss", 2, 2, "sharded"),
]
FAULTS = [
    ("zeroed", "deepseek_v3"),
    ("shifted", "qwen3_moe"),
    ("swapped", "gpt_oss"),
    ("swapped", "deepseek_v3"),
    ("last-dropped", "qwen3_moe"),
    ("scaled", "gpt_oss"),
]


@pytest.mark.parametrize(("family", "attention_ranks", "ffn_ranks", "placement"), GROUPS)
def test_equal_to_the_undivided_model(
    checkpoint: Callable, serve: Callable, family: str, attention_ranks: int, ffn_ranks: int, placement: str
) -> None:
    group = [f"--attention-ranks={attention_ranks}", f"--ffn-ranks={ffn_ranks}", f"--placement={placement}"]
    limits = [f"--max-new-tokens={NEW_TOKENS}", f"--max-batch-tokens={MAX_BATCH_TOKENS}"]
    result = serve(checkpoint(family), *LONG, *limits, *group)
    check = result["check"]
    assert check["ok"] and result["exit_code"] == 0, check["mismatches"]
    assert check["tokens"] == len(PROMPTS) * NEW_TOKENS
    assert check["max_logit_error"] <= check["tolerance"] == 2e-5
    for prompt, ids in zip(result["prompts"], PROMPTS, strict=True):
        assert tuple(prompt["prompt_ids"]) == ids
        assert len(set(prompt["token_ids"])) >= 24, "too few distinct tokens to tell right experts from wrong ones"
    rows = sum(len(ids) + NEW_TOKENS - 1 for ids in PROMPTS)
    for layer in result["layers"].values():
        assert layer["rows"] >= rows and layer["bytes_out"] > 0 and layer["bytes_back"] > 0
        assert layer["wait_s"] > 0 and layer["experts_s"] > 0 and layer["reply_s"] > 0


@pytest.mark.parametrize(("fault", "family"), FAULTS)
def test_planted_fault_is_caught(
    checkpoint: Callable, serve: Callable, afd, tmp_path: Path, fault: str, family: str
) -> None:
    afd.plant(fault, tmp_path / "planted")
    result = serve(checkpoint(family), *SHORT, "--ffn-ranks=2")
    assert len(list((tmp_path / "planted").iterdir())) == 2
    assert result["exit_code"] == 1 and not result["check"]["ok"]
    assert result["check"]["max_logit_error"] > 5 * result["check"]["tolerance"]


def test_planting_nothing_changes_nothing(checkpoint: Callable, serve: Callable, afd, tmp_path: Path) -> None:
    afd.plant("none", tmp_path / "planted")
    result = serve(checkpoint("qwen3_moe"), *SHORT, "--ffn-ranks=2")
    assert len(list((tmp_path / "planted").iterdir())) == 2
    assert result["exit_code"] == 0 and result["check"]["ok"]


def test_text_report(checkpoint: Callable, afd) -> None:
    done = afd.run("generate", checkpoint("deepseek_v3"), *SHORT, "--check", "--dtype=float32")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"match: 2/2 prompts, 16 tokens, max logit error \d\.\de-\d\d", lines[-1])
    assert lines[0].startswith("prompt 0 (3 tokens): ")
    assert all(name in done.stdout for name in ("layer", "rows", "out", "back", "wait", "experts", "reply"))
    assert "FFN rank 0: loaded" in done.stderr and "\x1b" not in done.stderr + done.stdout


def test_text_prompt_with_the_checkpoints_tokenizer(checkpoint: Callable, afd, tmp_path: Path) -> None:
    model = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "with-tokenizer")
    words = {"[UNK]": 0, **{f"w{i}": i for i in range(1, 512)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    done = afd.run("generate", model, "--prompt=w5 w17 w3", "--max-new-tokens=4", "--check", "--json")
    assert done.returncode == 0, done.stderr
    (prompt,) = json.loads(done.stdout)["prompts"]
    assert prompt["prompt_ids"] == [5, 17, 3] and len(prompt["token_ids"]) == 4
    assert prompt["text"].split() == [f"w{i}" for i in prompt["token_ids"]]


REFUSALS = [
    (["--device=cuda:99"], "device is 'cuda:99', and torch sees"),
    (["--device=tpu"], "allowed: 'cpu', 'cuda', 'cuda:INDEX'"),
    (["--placement=replicated", "--ffn-ranks=2"], "placement='replicated'"),
    (["--prompt=hello"], "--prompt-ids 1,2,3"),
    (["--prompt-ids=1,99999"], "99999"),
    (["--prompt-ids=1,x"], "1,x"),
    (["--dtype=int8"], "int8"),
    (["--ffn-ranks=99"], "99"),
    (["--max-batch-tokens=1"], "max_batch_tokens"),
]


def test_ranks_that_share_a_gpu_ring_doorbells() -> None:
    """On any host: all ranks of one command are on one device. On CPUs there are none."""
    for device, doorbells in (("cuda", True), ("cuda:1", True), ("cpu", None)):
        request = GenerateRequest(Path("model"), (Prompt(ids=(1,)),), device=device)
        assert request.config("attention", 1).doorbells is doorbells
        assert ("--doorbells" in ffn_command(request, 0, 1, Path("run"))) is bool(doorbells)


def _refusal(arguments: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> str:
    """Runs the command in this process; returns what it wrote to stderr with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["afd", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "named"), REFUSALS)
def test_refused_in_one_line(checkpoint: Callable, monkeypatch, capsys, arguments: list[str], named: str) -> None:
    text = _refusal(["generate", checkpoint("qwen3_moe"), *SHORT, *arguments], monkeypatch, capsys)
    assert named in text and "Traceback" not in text


def test_no_checkpoint_is_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    for command in ("generate", "ffn"):
        text = _refusal([command, tmp_path], monkeypatch, capsys)
        assert text.count("\n") == 1
    text = _refusal(["generate", tmp_path, *SHORT], monkeypatch, capsys)
    assert str(tmp_path) in text


def test_refusal_as_a_process(checkpoint: Callable, afd) -> None:
    done = afd.run("generate", checkpoint("qwen3_moe"), *SHORT, "--device=tpu")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1


def test_dead_ffn_rank_is_named(checkpoint: Callable, afd, tmp_path: Path) -> None:
    afd.plant("dies", tmp_path / "planted")
    started = time.monotonic()
    done = afd.run("generate", checkpoint("qwen3_moe"), *SHORT)
    assert done.returncode == 3
    assert re.search(r"FFN rank 0 \(process \d+\) ended with exit code 7", done.stderr)
    assert "a planted death" in done.stderr
    assert time.monotonic() - started < 60


def _wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"the process ended without {text!r}")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_nothing_outlives_the_command(checkpoint: Callable, afd, number: signal.Signals, code: int) -> None:
    process = afd.start("generate", checkpoint("qwen3_moe"), *SHORT, "--max-new-tokens=900")
    _wait_for(process, "attached")
    assert len(afd.processes()) == 3
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == code
    assert afd.all_gone(within_s=3) == []


def test_ffn_ranks_in_any_order_without_an_engine(checkpoint: Callable, afd, tmp_path: Path) -> None:
    with reserve_port("127.0.0.1") as holder:
        group = ["--ffn-ranks=2", f"--port={holder.getsockname()[1]}"]
        processes = []
        for ffn_rank in (1, 0):
            afd.record_modules(tmp_path / f"modules-{ffn_rank}")
            processes.append(afd.start("ffn", checkpoint("qwen3_moe"), f"--ffn-rank={ffn_rank}", *group))
            time.sleep(1)
        for process in processes:
            _wait_for(process, "ready")
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=20)
    assert [process.returncode for process in processes] == [0, 0]
    for ffn_rank in (0, 1):
        modules = (tmp_path / f"modules-{ffn_rank}").read_text().split()
        assert "afd_runtime.server" in modules and "transformers" not in modules
