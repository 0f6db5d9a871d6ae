# SPDX-License-Identifier: Apache-2.0
"""Runs the undivided model: its own engine, in a process that never imports this project."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from afd_runtime import _greedy
from afd_runtime.launch import ProcessGroup, follow, python_script
from afd_runtime.progress import Display

MAX_BATCH_TOKENS = 4096


def run_undivided(
    group: ProcessGroup,
    model: Path,
    prompt_ids: Sequence[Sequence[int]],
    max_new_tokens: int,
    dtype: torch.dtype,
    device: str,
    run_dir: Path,
    display: Display,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy ids int64[B, max_new_tokens] and the logits float32[B, max_new_tokens, V] that they were chosen from.

    The process leaves its files in ``run_dir``. Raises ``ChildFailed``.
    """
    name = "undivided model"
    out, prompts = run_dir / "undivided.pt", run_dir / "undivided.json"
    prompts.write_text(json.dumps([list(ids) for ids in prompt_ids]))
    options = {
        "model": model,
        "prompts": prompts,
        "out": out,
        "max-new-tokens": max_new_tokens,
        "max-batch-tokens": max(MAX_BATCH_TOKENS, len(prompt_ids)),
        "dtype": str(dtype).removeprefix("torch."),
        "device": device,
    }
    flags = [f"--{option}={value}" for option, value in options.items()]
    child = group.start(name, python_script(Path(_greedy.__file__), *flags), runs_to_end=True)
    display.note(name, f"in a process of its own, prompts: {len(prompt_ids)}")
    follow(group, [child], display)
    saved = torch.load(out, weights_only=True, map_location="cpu")
    return saved["ids"], saved["logits"]
