# SPDX-License-Identifier: Apache-2.0
"""What an attention rank refuses before anything is written: rows, layers and tensors that do not fit its step."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from afd_runtime.config import AFDConfig
from afd_runtime.connectors.attention_lane import Lane
from afd_runtime.errors import AFDCapacityError, AFDError

if TYPE_CHECKING:
    from afd_runtime.model_spec import ModelSpec


def integer_rows(rows: Mapping[int, int]) -> dict[int, int]:
    """``rows`` by stage as Python's int, which is what messages hold. Raises ``AFDError`` for anything else."""
    try:
        return {int(operator.index(stage)): int(operator.index(count)) for stage, count in rows.items()}
    except TypeError:
        raise AFDError(f"rows is {dict(rows)}; allowed: an integer for each stage; convert the counts to int") from None


def check_begin(lane: Lane, num_rows: int, config: AFDConfig) -> None:
    """Raises ``AFDCapacityError`` or ``AFDError`` where a step of ``num_rows`` rows cannot begin."""
    most = config.max_batch_tokens
    if num_rows > most:
        raise AFDCapacityError(
            f"num_rows is {num_rows}; allowed: up to max_batch_tokens={most}; split the batch, or raise "
            "max_batch_tokens on both sides"
        )
    if num_rows < 0:
        raise AFDError(f"num_rows is {num_rows}; allowed: 0 … {most}")
    if lane.offline:
        raise AFDError(f"stage {lane.stage} is offline; begin its step after offline({lane.stage}) has ended")
    if lane.rows is not None:
        raise AFDError(f"stage {lane.stage} is still in step {lane.step}; call end_step or abort_step first")


def check_exchange(
    lane: Lane, hidden: torch.Tensor, layer_idx: int, spec: ModelSpec, config: AFDConfig, *, capturing: bool
) -> None:
    """Raises ``AFDCapacityError`` or ``AFDError`` where this layer cannot be sent now, or not with these rows.

    capturing: the current stream is being captured.
    """
    if lane.offline and layer_idx not in spec.expert_layers:
        raise AFDError(f"layer_idx is {layer_idx}; allowed: {list(spec.expert_layers)}")
    if lane.rows is None and not lane.offline:
        raise AFDError(f"layer {layer_idx} is sent outside a step of stage {lane.stage}; call begin_step first")
    if lane.rows is not None and capturing:
        raise AFDError(f"layer {layer_idx} is captured inside step {lane.step}; capture it in offline({lane.stage})")
    if not lane.offline:
        _check_order(lane, layer_idx, spec.expert_layers)
    dtype, most = lane.layout.request.dtype, config.max_batch_tokens
    if hidden.dim() != 2 or hidden.shape[1] != spec.hidden_size or hidden.dtype != dtype:
        raise AFDError(
            f"hidden is {hidden.dtype}{list(hidden.shape)}; allowed: {dtype}[M, {spec.hidden_size}]; cast it, or "
            "connect with its dtype"
        )
    if hidden.shape[0] > most:
        raise AFDCapacityError(
            f"hidden has {hidden.shape[0]} rows; allowed: up to max_batch_tokens={most}; split the batch, or raise "
            "max_batch_tokens on both sides"
        )
    if hidden.shape[0] < (lane.rows or 0):
        raise AFDError(f"hidden has {hidden.shape[0]} rows; the step was begun with {lane.rows}; begin it with fewer")


def _check_order(lane: Lane, layer_idx: int, layers: tuple[int, ...]) -> None:
    done = lane.layer_index
    if done >= len(layers) or layers[done] != layer_idx:
        allowed = layers[done] if done < len(layers) else "none, all were sent; call end_step"
        raise AFDError(f"layer_idx is {layer_idx} in step {lane.step} of stage {lane.stage}; allowed: {allowed}")


def check_choices(hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, top_k: int) -> None:
    """Raises ``AFDError`` unless both are [M, top_k] for hidden [M, H]."""
    if topk_ids.shape != topk_weights.shape or topk_ids.shape != (hidden.shape[0], top_k):
        raise AFDError(
            f"topk_ids is {tuple(topk_ids.shape)} and topk_weights {tuple(topk_weights.shape)}; allowed: "
            f"[{hidden.shape[0]}, {top_k}] for both (rows of hidden, top_k of the model)"
        )
