# SPDX-License-Identifier: Apache-2.0
"""What one rank's process does: an FFN rank serves until it is told to stop, an attention rank works off one job."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from afd_runtime._greedy import greedy_generate
from afd_runtime.checkpoint import DTYPES
from afd_runtime.config import AFDConfig
from afd_runtime.devices import use_device
from afd_runtime.errors import AFDConfigError
from afd_runtime.ffn_backend import ExpertBank
from afd_runtime.model_spec import ModelSpec
from afd_runtime.progress import Display
from afd_runtime.topology import ExpertPlacement

if TYPE_CHECKING:
    from afd_runtime.http_probe import RankProbe
    from afd_runtime.kernel_counts import KernelCounts
    from afd_runtime.server import FFNServer

EXIT_WITHIN_S = 9.0  # of SIGTERM, whatever the process is doing
TORCH_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prompt: ``text``, which needs the checkpoint's tokenizer, or token ``ids``."""

    text: str | None = None
    ids: tuple[int, ...] | None = None


class PromptResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was generated for the prompt at ``index`` of the command line; ``text`` where it was given as text."""

    index: int
    prompt_ids: list[int]
    token_ids: list[int]
    text: str | None = None


class LayerStats(msgspec.Struct):
    """Totals of one exchanged layer. rows, bytes: summed over attention ranks; times in seconds: of the slowest rank.

    wait_s is an attention rank's; experts_s and reply_s are an FFN rank's, over all attention ranks that it serves.
    """

    rows: int = 0
    bytes_out: int = 0
    bytes_back: int = 0
    wait_s: float = 0.0
    experts_s: float = 0.0
    reply_s: float = 0.0

    @classmethod
    def of_session(cls, stats: Mapping[str, Any]) -> LayerStats:
        """From one layer's entry of ``AttentionSession.stats``, which holds more than these."""
        return cls(**{name: stats[name] for name in cls.__struct_fields__ if name in stats})

    def merge(self, other: LayerStats) -> None:
        """Adds another attention rank's totals of the same layer."""
        for name in ("rows", "bytes_out", "bytes_back"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("wait_s", "experts_s", "reply_s"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))


class AttentionJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that an attention rank's process needs. ``prompts`` is keyed by index.

    logits_path: where the logits go, calls_path: where ``LayerRecorder`` writes up to record_bytes; None: not kept.
    """

    model: str
    config: dict[str, Any]
    attention_rank: int
    device: str
    dtype: str
    prompts: dict[int, Prompt]
    max_new_tokens: int
    max_batch_tokens: int
    result_path: str
    logits_path: str | None = None
    calls_path: str | None = None
    record_bytes: int = 0
    count_kernels: bool = False


class AttentionResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an attention rank's process leaves in ``result_path``. A prompt ends at the first of ``stop_ids``.

    kernels: Triton launches of the forwards by kernel name, where they were counted.
    """

    prompts: list[PromptResult]
    layers: dict[int, LayerStats]
    stop_ids: list[int]
    kernels: dict[str, int] | None = None


def model_dtype(name: str, spec: ModelSpec) -> torch.dtype:
    """The dtype called ``name``; ``auto`` is the checkpoint's. Raises ``AFDConfigError``."""
    if name == "auto":
        return spec.dtype
    if name not in TORCH_DTYPES:
        raise AFDConfigError(f"dtype is {name!r}; allowed: auto, {', '.join(sorted(TORCH_DTYPES))}")
    return TORCH_DTYPES[name]


def refuse_device(device: str) -> None:
    """Raises ``AFDConfigError`` for a device that is not there or has no exchange."""
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise AFDConfigError(f"device is {device!r}; allowed: 'cpu', 'cuda', 'cuda:INDEX'")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise AFDConfigError(
            f"device is {device!r}, and torch sees {torch.cuda.device_count()} GPUs; use --device cpu, or install a "
            "torch that fits the driver"
        )


def serve_ffn_rank(
    model: Path,
    config: AFDConfig,
    ffn_rank: int,
    *,
    device: torch.device,
    dtype: str,
    display: Display,
    counts_path: Path | None = None,
    probe: RankProbe | None = None,
) -> None:
    """Loads the experts of one FFN rank and serves them until SIGTERM or SIGINT. Needs no engine.

    counts_path: launches are counted from the first on, and an ``FFNCounts`` is written there at the end.
    probe: what the HTTP pages read, told of each stage of the start.
    """
    from afd_runtime.server import FFNServer

    name = f"FFN rank {ffn_rank}"
    spec = ModelSpec.from_pretrained(model)
    use_device(device)
    placement = ExpertPlacement(config.placement, spec.num_experts, config.num_attention_ranks, config.num_ffn_ranks)
    experts = placement.local_experts(ffn_rank)
    torch_dtype = model_dtype(dtype, spec)
    config.token()  # refused before anything is loaded
    counts = None if counts_path is None else _kernel_counts()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # while loading
    progress = functools.partial(display.progress, name)
    if probe is not None:
        probe.doing = "loads its experts"
    bank = ExpertBank.load(spec, experts, device=device, dtype=torch_dtype, progress=progress)
    server = FFNServer(config, ffn_rank, spec, bank, device=device, dtype=torch_dtype)
    if probe is not None:
        probe.server = server
    ended = threading.Event()
    threading.Thread(target=_end_in_time, args=(server, ended), daemon=True).start()
    try:
        server.start()
        if counts is not None:
            counts.launches.clear()  # of capturing
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.request_stop())
        display.note(name, f"experts {experts.start}-{experts.stop - 1} of {spec.num_experts} ready, {server.endpoint}")
        server.serve_forever()
        if counts_path is not None and counts is not None:
            counts_path.write_bytes(msgspec.json.encode(counts.of_server(server)))
    finally:
        server.stop()
        ended.set()


def _end_in_time(server: FFNServer, ended: threading.Event) -> None:
    """Ends the process with 1 where it was asked to stop and a step that cannot even be given up keeps it too long."""
    while server.stop_asked_at is None or time.monotonic() - server.stop_asked_at < EXIT_WITHIN_S:
        if ended.wait(0.25):
            return
    print(
        f"afd: FFN rank {server.ffn_rank} was asked to stop, and its step did not end within {EXIT_WITHIN_S:g} s: "
        "the experts or a kernel do not return", file=sys.stderr, flush=True,
    )  # fmt: skip
    os._exit(1)


def run_attention_rank(job: AttentionJob, *, display: Display) -> None:
    """Attaches to the FFN ranks, generates for the job's prompts with transformers and writes the result."""
    from afd_runtime.integrations.transformers import load_remote_model
    from afd_runtime.layer_check import LayerRecorder
    from afd_runtime.remote_experts import AttentionSession

    spec = ModelSpec.from_pretrained(job.model)
    config = AFDConfig(**job.config)
    device, dtype = torch.device(job.device), model_dtype(job.dtype, spec)
    use_device(device)
    session = AttentionSession.connect(config, job.attention_rank, spec, device=device, dtype=dtype)
    try:
        recorder = LayerRecorder(session, len(spec.expert_layers), job.record_bytes) if job.calls_path else None
        model = load_remote_model(job.model, recorder or session, dtype=dtype, device=device)
        display.note(f"attention rank {job.attention_rank}", f"attached, prompts: {len(job.prompts)}")
        stop_ids = _stop_ids(model)
        counts = _kernel_counts() if job.count_kernels else None
        prompts = _generate(model, job, stop_ids)
        layers = {layer: LayerStats.of_session(stats) for layer, stats in session.stats.items()}
    finally:
        session.close()
    if recorder is not None:
        recorder.save(Path(str(job.calls_path)))
    result = AttentionResult(prompts, layers, stop_ids, dict(counts.launches) if counts else None)
    Path(job.result_path).write_bytes(msgspec.json.encode(result))


def _kernel_counts() -> KernelCounts:
    from afd_runtime.kernel_counts import KernelCounts

    return KernelCounts.start()


def cut_at_stop(token_ids: list[int], stop_ids: Collection[int]) -> list[int]:
    """``token_ids`` up to and with the first of ``stop_ids``: a batch goes on until its last prompt has stopped."""
    return next((token_ids[: i + 1] for i, token in enumerate(token_ids) if token in stop_ids), token_ids)


def _generate(model: Any, job: AttentionJob, stop_ids: list[int]) -> list[PromptResult]:
    prompt_ids = {index: _encode(job.model, prompt) for index, prompt in job.prompts.items()}
    ids, logits = greedy_generate(
        model,
        list(prompt_ids.values()),
        job.max_new_tokens,
        job.max_batch_tokens,
        stop_ids=stop_ids,
        keep_logits=job.logits_path is not None,
    )
    if job.logits_path is not None:
        torch.save(dict(zip(prompt_ids, logits.unbind(), strict=True)), job.logits_path)
    results = []
    for (index, given), row in zip(prompt_ids.items(), ids.tolist(), strict=True):
        new = cut_at_stop(row, stop_ids)
        text = None if job.prompts[index].text is None else _tokenizer(job.model).decode(new, skip_special_tokens=True)
        results.append(PromptResult(index, given, new, text))
    return results


def _stop_ids(model: Any) -> list[int]:
    """The ids that end generation, as the checkpoint's generation config, or else its config, says."""
    for config in (model.generation_config, model.config):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return list(eos) if isinstance(eos, (list, tuple)) else [eos]
    return []


def _encode(model: str, prompt: Prompt) -> list[int]:
    return list(prompt.ids) if prompt.ids is not None else _tokenizer(model).encode(prompt.text)


@functools.cache
def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, local_files_only=True)
