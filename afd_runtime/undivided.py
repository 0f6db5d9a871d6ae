# SPDX-License-Identifier: Apache-2.0
"""Runs the undivided model: its own engine, in a process that never imports this project."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from afd_runtime import _greedy
from afd_runtime.launch import ProcessGroup, follow, python_script
from afd_runtime.progress import Display

MAX_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Undivided:
    """ids: int64[B, T], greedy. logits: float32[B, T, V], that they were chosen from.

    layer_outputs: float32[M, H] of each call in each of the files that were given, by file.
    """

    ids: torch.Tensor
    logits: torch.Tensor
    layer_outputs: dict[Path, list[torch.Tensor]]


def run_undivided(
    group: ProcessGroup,
    model: Path,
    prompt_ids: Sequence[Sequence[int]],
    batches: Sequence[Sequence[int]],
    max_new_tokens: int,
    dtype: torch.dtype,
    device: str,
    run_dir: Path,
    display: Display,
    layer_calls: Sequence[Path] = (),
) -> Undivided:
    """Generates max_new_tokens for each prompt, and computes the experts of the calls in the files ``layer_calls``.

    batches: indices of the prompts that attention ranks have in one batch. Its padding moves the engine's own rounding,
    in float32 by up to 1.6e-5 of the largest logit with the demo models, against 4e-6 that the exchange adds.
    The process leaves its files in ``run_dir``. Raises ``ChildFailed``.
    """
    name = "undivided model"
    out, prompts = run_dir / "undivided.pt", run_dir / "undivided.json"
    prompts.write_text(json.dumps([list(ids) for ids in prompt_ids]))
    options = {
        "model": model,
        "prompts": prompts,
        "out": out,
        "batches": json.dumps([list(batch) for batch in batches]),
        "max-new-tokens": max_new_tokens,
        "max-batch-tokens": max(MAX_BATCH_TOKENS, len(prompt_ids)),
        "dtype": str(dtype).removeprefix("torch."),
        "device": device,
        "experts-implementation": "eager",  # the model file's own loop over experts
    }
    flags = [f"--{option}={value}" for option, value in options.items()]
    if layer_calls:
        flags += ["--layer-calls", *map(str, layer_calls)]
    child = group.start(name, python_script(Path(_greedy.__file__), *flags), runs_to_end=True)
    display.note(name, f"in a process of its own, prompts: {len(prompt_ids)}")
    follow(group, [child], display)
    saved = torch.load(out, weights_only=True, map_location="cpu")
    outputs = {Path(path): found for path, found in saved["layer_outputs"].items()}
    return Undivided(saved["ids"], saved["logits"], outputs)
