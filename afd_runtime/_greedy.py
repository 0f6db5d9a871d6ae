# SPDX-License-Identifier: Apache-2.0
"""Greedy generation whose forwards never pass a number of rows; also a stand-alone script for undivided references.

`python afd_runtime/_greedy.py --model PATH --prompts JSON --out FILE.pt` loads the model with its own engine in a
process that never imports this project: the file imports torch and transformers only, and checks that at the end.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
    del sys.path[0]  # this folder: its modules must not be importable by their bare names

import argparse
import copy
import inspect
import json
import re
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

_EXPERTS_MODULE = re.compile(r"(?:^|\.)layers\.(\d+)\.mlp\.experts$")


@torch.no_grad()
def greedy_generate(
    model: Any,
    prompt_ids: list[list[int]],
    max_new_tokens: int,
    max_batch_tokens: int,
    *,
    pad_id: int = 0,
    stop_ids: Collection[int] = (),
    keep_logits: bool = True,
    on_token: Callable[[int, list[int]], None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Continues every prompt of one left-padded batch; no forward has more than `max_batch_tokens` rows.

    Returns token ids int64[B, T] and the float32 logits [B, T, V] that each was chosen from ([B, 0, V] without
    `keep_logits`), on the CPU. T is `max_new_tokens`, or less once every row has produced one of `stop_ids`.
    `on_token(step, tokens)` is called with each step's B tokens. Ties go to the lowest token id.
    """
    batch = len(prompt_ids)
    if not batch or not all(prompt_ids) or max_new_tokens < 1:
        raise ValueError("prompt_ids must be one or more non-empty lists, and max_new_tokens at least 1.")
    chunk = max_batch_tokens // batch
    if chunk < 1:
        raise ValueError(
            f"max_batch_tokens {max_batch_tokens} is less than the batch of {batch} prompts; "
            "raise it on both sides or send fewer prompts at once."
        )
    tokens, mask = _left_pad(prompt_ids, pad_id, model.device)
    logits, past = _prefill(model, tokens, mask, chunk)
    ids: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []
    done = torch.zeros(batch, dtype=torch.bool)
    for step in range(max_new_tokens):
        if ids:
            mask = torch.cat([mask, mask.new_ones(batch, 1)], dim=1)
            last = ids[-1].to(model.device)[:, None]
            logits, past = _forward(model, last, mask, mask.sum(-1, keepdim=True) - 1, past)
        logits = logits.float().cpu()
        chosen = logits.argmax(-1)
        ids.append(chosen)
        if keep_logits:
            kept.append(logits)
        if on_token is not None:
            on_token(step, chosen.tolist())
        done |= torch.isin(chosen, torch.tensor(list(stop_ids), dtype=chosen.dtype))
        if done.all():
            break
    scores = torch.stack(kept, dim=1) if keep_logits else torch.empty(batch, 0, logits.shape[-1])
    return torch.stack(ids, dim=1), scores


def _prefill(model: Any, tokens: torch.Tensor, mask: torch.Tensor, chunk: int) -> tuple[torch.Tensor, Any]:
    """The prompts in forwards of at most `chunk` columns; logits [B, V] after the last one, and the cache."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits, past = torch.empty(0), None
    for start in range(0, tokens.shape[1], chunk):
        end = min(start + chunk, tokens.shape[1])
        logits, past = _forward(model, tokens[:, start:end], mask[:, :end], positions[:, start:end], past)
    return logits, past


def _forward(
    model: Any, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, past: Any
) -> tuple[torch.Tensor, Any]:
    """One forward: logits [B, V] after the last token, and the key-value cache, which transformers 5.24 renamed."""
    cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    output = model(
        input_ids=tokens,
        attention_mask=mask,
        position_ids=positions,
        use_cache=True,
        logits_to_keep=1,
        **{cache: past},
    )
    return output.logits[:, -1], getattr(output, cache)


def _left_pad(prompts: list[list[int]], pad_id: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, int64[B, S], with padding on the left."""
    width = max(map(len, prompts))
    tokens = [[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)


@torch.no_grad()
def layer_outputs(model: Any, calls: list[dict[str, Any]]) -> list[torch.Tensor]:
    """What the model's own experts give for each of `calls`, computed in float32: float32[M, H] each, on the CPU.

    A call has `layer`, `hidden` [M, H], `topk_ids` int[M, k] and `topk_weights` [M, k]. Raises KeyError for a layer
    without experts. The weights are those that the model holds in its dtype.
    """
    found = [(_EXPERTS_MODULE.search(name), module) for name, module in model.named_modules()]
    modules = {int(match[1]): module for match, module in found if match}
    outputs: list[torch.Tensor] = [torch.empty(0)] * len(calls)
    for layer in sorted({call["layer"] for call in calls}):
        own = [index for index, call in enumerate(calls) if call["layer"] == layer]
        experts = copy.deepcopy(modules[layer]).float()
        hidden, ids, weights = (
            torch.cat([calls[index][name] for index in own]).to(model.device)
            for name in ("hidden", "topk_ids", "topk_weights")
        )
        result = experts(hidden.float(), ids.long(), weights.float()).cpu()
        for index, part in zip(own, result.split([len(calls[index]["hidden"]) for index in own]), strict=True):
            outputs[index] = part.clone()
    return outputs


def assert_undivided() -> None:
    """Raises if a module of this project has been imported into this process."""
    own = sorted(name for name in sys.modules if name.split(".")[0].startswith("afd_"))
    if own:
        raise RuntimeError(f"an undivided reference must not import this project, found {own}.")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Greedy generation by the engine alone.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True, help="JSON list of lists of token ids, or a file that holds it")
    parser.add_argument("--batches", type=json.loads, help="JSON lists of indices of prompts that go together")
    parser.add_argument("--out", required=True, help="torch file: ids, logits, seconds, layer_outputs")
    parser.add_argument("--layer-calls", nargs="*", default=[], help="torch files of calls for layer_outputs")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--max-batch-tokens", type=int, default=2048)
    parser.add_argument("--pad-id", type=int, default=0)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--attn-implementation", default=None)
    parser.add_argument("--experts-implementation", default=None)
    args = parser.parse_args(argv)

    from transformers import AutoModelForCausalLM

    prompts = json.loads(args.prompts if args.prompts.lstrip().startswith("[") else Path(args.prompts).read_text())
    chosen = {name: getattr(args, name) for name in ("attn_implementation", "experts_implementation")}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype), **chosen)
    model = model.to(args.device).eval()
    start = time.perf_counter()
    batches = args.batches or [list(range(len(prompts)))]
    results = []
    for batch in batches:
        chosen_prompts = [prompts[index] for index in batch]
        results.append(
            greedy_generate(model, chosen_prompts, args.max_new_tokens, args.max_batch_tokens, pad_id=args.pad_id)
        )
    order = torch.tensor(sum(batches, [])).argsort()
    ids, logits = (torch.cat(parts)[order] for parts in zip(*results, strict=True))
    seconds = time.perf_counter() - start
    outputs = {path: layer_outputs(model, torch.load(path, weights_only=True)["calls"]) for path in args.layer_calls}
    assert_undivided()
    torch.save({"ids": ids, "logits": logits, "seconds": seconds, "layer_outputs": outputs}, args.out)


if __name__ == "__main__":
    main()
