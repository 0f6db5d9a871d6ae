# SPDX-License-Identifier: Apache-2.0
"""Greedy generation with attention and experts in separate processes of this host, and its check."""

from __future__ import annotations

import importlib.util
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from afd_runtime import envs
from afd_runtime.check import CheckReport, Generated, compare
from afd_runtime.config import AFDConfig
from afd_runtime.errors import AFDConfigError
from afd_runtime.launch import ProcessGroup, follow, python_module, reserve_port
from afd_runtime.layer_check import RECORD_BYTES, LayerCheckReport, LayerRecord, compare_layers
from afd_runtime.model_spec import ModelSpec
from afd_runtime.progress import Display
from afd_runtime.topology import ExpertPlacement
from afd_runtime.undivided import Undivided, run_undivided
from afd_runtime.workers import (
    TORCH_DTYPES,
    AttentionJob,
    AttentionResult,
    LayerStats,
    Prompt,
    PromptResult,
    cut_at_stop,
    model_dtype,
    refuse_device,
)

HOST = "127.0.0.1"
STOP_S, COUNTS_STOP_S = 5.0, 20.0  # processes may take so long to end; an FFN rank writes its counts last
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "tiktoken.model")


@dataclass(frozen=True)
class GenerateRequest:
    """What ``afd generate`` was asked for. ``port`` 0 picks a free one.

    ``dtype`` "auto" is the checkpoint's; with ``check`` it is float32. All ranks share ``device``.
    ``count_kernels``: the report has Triton launches by kernel name.
    """

    model: Path
    prompts: tuple[Prompt, ...]
    max_new_tokens: int = 32
    num_attention_ranks: int = 1
    num_ffn_ranks: int = 1
    placement: str = "sharded"
    device: str = "cpu"
    dtype: str = "auto"
    max_batch_tokens: int = 2048
    port: int = 0
    check: bool = False
    verbose: bool = False
    count_kernels: bool = field(default_factory=envs.AFD_COUNT_KERNELS.get)

    @property
    def doorbells(self) -> bool | None:
        """``AFDConfig.doorbells`` of every rank: they share one GPU, however many the host has."""
        return True if self.device.startswith("cuda") else None

    @property
    def chosen_dtype(self) -> str:
        """What every process is told."""
        return "float32" if self.check and self.dtype == "auto" else self.dtype

    @property
    def checks_layers(self) -> bool:
        """Whether the check compares layers: in less than float32, where logits cannot be compared."""
        return self.check and self.chosen_dtype != "float32"

    def config(self, role: str, port: int) -> AFDConfig:
        """The group as a process of ``role`` sees it. Raises pydantic's ``ValidationError``."""
        return AFDConfig.model_validate(
            {
                "role": role,
                "port": port,
                "num_attention_ranks": self.num_attention_ranks,
                "num_ffn_ranks": self.num_ffn_ranks,
                "placement": self.placement,
                "max_batch_tokens": self.max_batch_tokens,
                "doorbells": self.doorbells,
            }
        )

    def prompts_of(self, attention_rank: int) -> dict[int, Prompt]:
        """The prompts of one attention rank, by index: they are dealt out in turn."""
        dealt = range(attention_rank, len(self.prompts), self.num_attention_ranks)
        return {index: self.prompts[index] for index in dealt}


@dataclass(frozen=True)
class GenerateReport:
    """What a run produced. ``prompts`` are in the order given; ``check`` is None where none was asked for.

    kernels: None, or Triton launches by kernel name of each role, all ranks together (``attention``, ``ffn``), with the
    steps that FFN ranks served and the graphs that they replayed (``ffn_steps``, ``ffn_replays``).
    """

    prompts: list[PromptResult]
    layers: dict[int, LayerStats]
    seconds: float
    check: CheckReport | LayerCheckReport | None = None
    kernels: dict[str, Any] | None = None


def generate(request: GenerateRequest, display: Display) -> GenerateReport:
    """Runs the request. Every process that it starts has ended when it returns or raises.

    Raises ``ModelError`` or ``AFDConfigError`` before a process is started, ``ChildFailed`` afterwards.
    """
    validate(request)
    with tempfile.TemporaryDirectory(prefix="afd-") as run_dir:
        started = time.perf_counter()
        results = _serve(request, Path(run_dir), display)
        seconds = time.perf_counter() - started
        prompts = sorted((p for result in results for p in result.prompts), key=lambda prompt: prompt.index)
        kernels = _total_kernels(request, results, Path(run_dir)) if request.count_kernels else None
        check = _check(request, prompts, results[0].stop_ids, Path(run_dir), display) if request.check else None
    return GenerateReport(prompts, total_layers(results), seconds, check, kernels)


def validate(request: GenerateRequest) -> None:
    """Refuses what cannot work, before anything is loaded or started."""
    refuse_device(request.device)
    if importlib.util.find_spec("transformers") is None:
        raise AFDConfigError("transformers is not installed; install it with: pip install 'afd[transformers]'")
    if request.max_new_tokens < 1:
        raise AFDConfigError(f"max_new_tokens is {request.max_new_tokens}; allowed: 1 or more")
    if not request.prompts:
        raise AFDConfigError("no prompt; give --prompt TEXT or --prompt-ids 1,2,3, each as often as you like")
    spec = ModelSpec.from_pretrained(request.model)
    model_dtype(request.chosen_dtype, spec)  # refuses an unknown one
    ExpertPlacement(request.placement, spec.num_experts, request.num_attention_ranks, request.num_ffn_ranks)  # type: ignore[arg-type]
    request.config("attention", request.port or 1)
    if len(request.prompts_of(0)) > request.max_batch_tokens:
        raise AFDConfigError(
            f"max_batch_tokens is {request.max_batch_tokens} for {len(request.prompts_of(0))} prompts on one attention "
            "rank; allowed: at least one token a prompt; raise it or use more attention ranks"
        )
    _check_ids(request)
    if any(prompt.text is not None for prompt in request.prompts) and not has_tokenizer(request.model):
        raise AFDConfigError(
            f"--prompt needs a tokenizer and {request.model} has none; give token ids: --prompt-ids 1,2,3"
        )


def _check_ids(request: GenerateRequest) -> None:
    vocab_size = json.loads((request.model / "config.json").read_text()).get("vocab_size")
    for prompt in request.prompts:
        if prompt.ids is None:
            continue
        if not prompt.ids:
            raise AFDConfigError("a --prompt-ids has no id; give at least one, as in --prompt-ids 1,2,3")
        wrong = [i for i in prompt.ids if i < 0 or (vocab_size is not None and i >= vocab_size)]
        if wrong:
            raise AFDConfigError(f"--prompt-ids has the id {wrong[0]}; allowed: 0 to {(vocab_size or 2**31) - 1}")


def has_tokenizer(model: Path) -> bool:
    """True if the checkpoint's directory holds a tokenizer."""
    return any((model / name).is_file() for name in TOKENIZER_FILES)


def total_layers(results: list[AttentionResult]) -> dict[int, LayerStats]:
    """The totals of each layer over all attention ranks."""
    totals: dict[int, LayerStats] = {}
    for result in results:
        for layer, stats in result.layers.items():
            totals.setdefault(layer, LayerStats()).merge(stats)
    return dict(sorted(totals.items()))


def _serve(request: GenerateRequest, run_dir: Path, display: Display) -> list[AttentionResult]:
    stop_s = COUNTS_STOP_S if request.count_kernels else STOP_S
    group = ProcessGroup(stop_timeout_s=stop_s, forward_stderr=request.verbose)
    with group, _chosen_port(request.port) as port:
        for ffn_rank in range(request.num_ffn_ranks):
            command = ffn_command(request, ffn_rank, port, run_dir)
            group.start(f"FFN rank {ffn_rank}", command, runs_to_end=False)
        jobs = _write_jobs(request, port, run_dir)
        workers = [
            group.start(f"attention rank {rank}", _worker_command(job), runs_to_end=True) for rank, job in jobs.items()
        ]
        follow(group, workers, display)
        return [
            msgspec.json.decode((run_dir / f"result-{rank}.json").read_bytes(), type=AttentionResult) for rank in jobs
        ]


def _total_kernels(request: GenerateRequest, results: list[AttentionResult], run_dir: Path) -> dict[str, Any]:
    from afd_runtime.kernel_counts import FFNCounts, total_counts

    files = [run_dir / f"counts-{rank}.json" for rank in range(request.num_ffn_ranks)]
    ffn = [msgspec.json.decode(file.read_bytes(), type=FFNCounts) for file in files]
    return total_counts([result.kernels or {} for result in results], ffn)


def _check(
    request: GenerateRequest,
    prompts: list[PromptResult],
    stop_ids: list[int],
    run_dir: Path,
    display: Display,
) -> CheckReport | LayerCheckReport:
    prompt_ids = [prompt.prompt_ids for prompt in prompts]
    dtype = TORCH_DTYPES[request.chosen_dtype]
    calls = {rank: run_dir / f"calls-{rank}.pt" for rank in range(request.num_attention_ranks)}
    calls = {rank: path for rank, path in calls.items() if path.is_file()}
    batches = [list(batch) for rank in range(request.num_attention_ranks) if (batch := request.prompts_of(rank))]
    with ProcessGroup(forward_stderr=request.verbose) as group:
        undivided = run_undivided(
            group, request.model, prompt_ids, batches, request.max_new_tokens, dtype, request.device, run_dir, display,
            tuple(calls.values()),
        )  # fmt: skip
    expected_ids = [cut_at_stop(row, stop_ids) for row in undivided.ids.tolist()]
    if not request.checks_layers:
        return _check_logits(prompts, expected_ids, undivided, run_dir)
    records = {rank: LayerRecord.load(path, request.prompts_of(rank)) for rank, path in calls.items()}
    outputs = {rank: undivided.layer_outputs[path] for rank, path in calls.items()}
    tokens = {p.index: (p.token_ids, ids) for p, ids in zip(prompts, expected_ids, strict=True)}
    return compare_layers(records, outputs, dtype, tokens)


def _check_logits(
    prompts: list[PromptResult], expected_ids: list[list[int]], undivided: Undivided, run_dir: Path
) -> CheckReport:
    logits: dict[int, torch.Tensor] = {}
    for path in run_dir.glob("logits-*.pt"):
        logits |= torch.load(path, weights_only=True, map_location="cpu")
    divided = {p.index: Generated(p.token_ids, logits[p.index]) for p in prompts}
    expected = zip(prompts, expected_ids, undivided.logits, strict=True)
    return compare(divided, {prompt.index: Generated(ids, rows) for prompt, ids, rows in expected})


@contextmanager
def _chosen_port(port: int) -> Iterator[int]:
    """``port``, or for 0 a free one, held as long as the context lasts. Raises ``AFDConfigError`` if it is taken."""
    try:
        holder = reserve_port(HOST, port)
    except OSError as error:
        raise AFDConfigError(f"port is {port}: {error.strerror}; choose another one, or 0 for a free one") from None
    with holder:
        yield holder.getsockname()[1]


def ffn_command(request: GenerateRequest, ffn_rank: int, port: int, run_dir: Path) -> list[str]:
    """The command line of an FFN rank's process, which listens on ``port`` and writes its counts to ``run_dir``."""
    options = {
        "ffn-rank": ffn_rank,
        "ffn-ranks": request.num_ffn_ranks,
        "attention-ranks": request.num_attention_ranks,
        "placement": request.placement,
        "device": request.device,
        "dtype": request.chosen_dtype,
        "max-batch-tokens": request.max_batch_tokens,
        "host": HOST,
        "port": port,
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    flags += ["--doorbells"] if request.doorbells else []
    flags += [f"--kernel-counts={run_dir / f'counts-{ffn_rank}.json'}"] if request.count_kernels else []
    return python_module("afd_runtime.cli", "ffn", str(request.model), *flags, "--events")


def _write_jobs(request: GenerateRequest, port: int, run_dir: Path) -> dict[int, Path]:
    """Writes one job for each attention rank that has a prompt. A rank without one stays away and is not waited for."""
    jobs = {}
    for rank in range(request.num_attention_ranks):
        prompts = request.prompts_of(rank)
        if not prompts:
            continue
        job = AttentionJob(
            model=str(request.model),
            config=request.config("attention", port).model_dump(exclude_defaults=True),
            attention_rank=rank,
            device=request.device,
            dtype=request.chosen_dtype,
            prompts=prompts,
            max_new_tokens=request.max_new_tokens,
            max_batch_tokens=request.max_batch_tokens,
            result_path=str(run_dir / f"result-{rank}.json"),
            logits_path=str(run_dir / f"logits-{rank}.pt") if request.check and not request.checks_layers else None,
            calls_path=str(run_dir / f"calls-{rank}.pt") if request.checks_layers else None,
            record_bytes=RECORD_BYTES // request.num_attention_ranks,
            count_kernels=request.count_kernels,
        )
        jobs[rank] = run_dir / f"job-{rank}.json"
        jobs[rank].write_bytes(msgspec.json.encode(job))
    return jobs


def _worker_command(job: Path) -> list[str]:
    return python_module("afd_runtime.cli", "attention-worker", str(job))
