# SPDX-License-Identifier: Apache-2.0
"""``afd generate --device cuda --check``: six families and one of realistic width, by processes that share one GPU.

Each run is a command of its own, with references forbidden on the GPU and launches counted; four run at a time, which
the tests then look at one by one. Each prints a line, and all go to the JSON file ``AFD_GENERATE_REPORT`` if it is set.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
import triton

from afd_runtime.demo_models import DEMO_MODELS, WIDE_MODELS, write_demo_model

pytestmark = pytest.mark.timeout(400)
ROOT = Path(__file__).parents[2]
PARALLEL = int(os.environ.get("AFD_TEST_PARALLEL", "4"))
LIMIT_S = 150  # of one command; alone it takes about 30 s, most of it imports and the start of CUDA
NEW_TOKENS, MAX_BATCH_TOKENS = 24, 40
PROMPTS = ((5, 17, 3), tuple(range(40, 51)), tuple(range(400, 371, -1)), tuple(7 * i % 500 for i in range(50)))
DTYPES = ("float32", "bfloat16")
FFN_KERNELS = ("_wait_kernel", "_merge_kernel", "_p_experts_up_kernel", "_p_experts_down_kernel", "_reply_kernel")


@dataclass(frozen=True)
class Run:
    """One command."""

    family: str
    dtype: str
    attention_ranks: int = 1
    ffn_ranks: int = 1

    def __str__(self) -> str:
        return f"{self.family}-{self.dtype}-{self.attention_ranks}A{self.ffn_ranks}F"


@dataclass(frozen=True)
class Outcome:
    """How a command ended. seconds: of all of it, the check included."""

    exit_code: int
    stdout: str
    stderr: str
    seconds: float


SMALL = [
    Run(family, dtype, *((1, 2) if (number + index) % 2 else (2, 1)))
    for number, family in enumerate(sorted(DEMO_MODELS))
    for index, dtype in enumerate(DTYPES)
]
WIDE = [Run(family, dtype) for family in WIDE_MODELS for dtype in DTYPES]


def environment() -> dict[str, str]:
    """As a user has it, not as tests with both roles in one process need it."""
    kept = {k: v for k, v in os.environ.items() if k not in ("CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS")}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    checks = {"AFD_FORBID_REFERENCE": "1", "AFD_COUNT_KERNELS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}
    return {**kept, **checks, "PYTHONPATH": path}


def execute(run: Run, model: Path) -> Outcome:
    """Runs the command to its end. It is killed after ``LIMIT_S``, and its processes end with it."""
    command = [sys.executable, "-m", "afd_runtime.cli", "generate", str(model), "--device=cuda", "--check", "--json"]
    command += [f"--prompt-ids={','.join(map(str, ids))}" for ids in PROMPTS]
    command += [f"--dtype={run.dtype}", f"--attention-ranks={run.attention_ranks}", f"--ffn-ranks={run.ffn_ranks}"]
    command += [f"--max-new-tokens={NEW_TOKENS}", f"--max-batch-tokens={MAX_BATCH_TOKENS}"]
    started = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
    return Outcome(done.returncode, done.stdout, done.stderr, time.perf_counter() - started)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Run, Future[Outcome]]]:
    """All runs, under way. The wide checkpoint is drawn on the GPU while the first of them start."""
    root = tmp_path_factory.mktemp("checkpoints")
    with ThreadPoolExecutor(PARALLEL) as pool:
        models = {family: write_demo_model(family, root / family) for family in DEMO_MODELS}
        futures = {run: pool.submit(execute, run, models[run.family]) for run in SMALL}
        try:
            for family in WIDE_MODELS:
                models[family] = write_demo_model(family, root / family, dtype=torch.bfloat16, device="cuda")
            torch.cuda.empty_cache()
            yield futures | {run: pool.submit(execute, run, models[run.family]) for run in WIDE}
        finally:
            pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def report() -> dict:
    """What the runs gave so far."""
    import transformers

    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    about |= {"transformers": transformers.__version__, "new_tokens": NEW_TOKENS, "prompts": list(map(len, PROMPTS))}
    return {"about": about, "runs": []}


@pytest.mark.parametrize("run", [*SMALL, *WIDE], ids=str)
def test_equal_to_the_undivided_model(run: Run, outcomes: dict, report: dict, capsys) -> None:
    outcome = outcomes[run].result()
    assert outcome.exit_code in (0, 1), outcome.stderr[-4000:]
    result = json.loads(outcome.stdout)
    check, kernels = result["check"], result["kernels"]
    entry = {**asdict(run), "exit_code": outcome.exit_code, "check": check, "kernels": kernels}
    entry |= {"serve_s": round(result["seconds"], 1), "all_s": round(outcome.seconds, 1), "layers": result["layers"]}
    report["runs"].append(entry)
    if path := os.environ.get("AFD_GENERATE_REPORT"):
        Path(path).write_text(json.dumps(report, indent=1) + "\n")
    with capsys.disabled():
        print(f"\n{line(run, entry)}", flush=True)
    assert outcome.exit_code == 0 and check["ok"], check["mismatches"]
    assert check["matched"] == len(PROMPTS) and check["tokens"] == len(PROMPTS) * NEW_TOKENS
    assert all(len(set(prompt["token_ids"])) >= 8 for prompt in result["prompts"]), "too few tokens to prove anything"
    check_counts(kernels, len(result["layers"]), check.get("layer_calls"))


def line(run: Run, entry: dict) -> str:
    """One run in one line."""
    check, kernels = entry["check"], entry["kernels"]
    errors = {key: f"{check[key]:.1e}" for key in check if key.startswith("max_")}
    launches = {role: sum(kernels[role].values()) for role in ("attention", "ffn")}
    steps, replays = kernels["ffn_steps"], kernels["ffn_replays"]
    return (
        f"{run}: exit {entry['exit_code']}, {check['matched']}/{check['prompts']} prompts, {errors}, "
        f"launches {launches}, {replays} of {steps} steps replayed, {entry['serve_s']} s of {entry['all_s']} s"
    )


def check_counts(kernels: dict, num_layers: int, layer_calls: int | None) -> None:
    """Every exchanged layer of every step ran each of the kernels, on both sides. layer_calls: as recorded, or None."""
    attention, ffn = Counter(kernels["attention"]), Counter(kernels["ffn"])
    exchanges, served = attention["_wait_kernel"], kernels["ffn_steps"] * num_layers
    assert exchanges > 0 and exchanges % num_layers == 0 and exchanges == (layer_calls or exchanges), attention
    assert attention["_dispatch_kernel"] + attention["_pack_kernel"] == attention["_combine_kernel"] == exchanges
    assert kernels["ffn_replays"] == kernels["ffn_steps"] > 0
    assert {name: ffn[name] for name in FFN_KERNELS} == dict.fromkeys(FFN_KERNELS, served), ffn
