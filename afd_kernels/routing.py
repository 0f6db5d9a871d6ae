# SPDX-License-Identifier: Apache-2.0
"""Routing: gate GEMM, scoring, selection bias, grouped top-k, renormalise, scale.

Scores: softmax over all experts (Switch, Mixtral), sigmoid (DeepSeek-V3, arXiv 2412.19437 eq. 12-16), sqrt-softplus.
Logits are computed and kept in fp32. Ties go to the lowest expert id. A row's result does not depend on other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from afd_kernels._op import (
    check,
    check_last_stride,
    check_tensor,
    is_tracing,
    reference,
    register,
    runs_kernel,
    workspace_for,
)
from afd_kernels.message import MAX_EXPERTS, MAX_TOP_K

SCORINGS = ("softmax", "sigmoid", "sqrt_softplus")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
_NAN_IN_GROUP = tl.constexpr(-1e38)
_EPSILON = tl.constexpr(1e-20)
_NOT_ELIGIBLE = tl.constexpr(-2147483648)
_TAKEN = tl.constexpr(-9223372036854775808)


@dataclass(frozen=True)
class GateConfig:
    """Launch configuration of the gate GEMM. split_k: parts of H that are summed, in order, by the top-k kernel."""

    block_m: int = 16
    block_n: int = 64
    block_k: int = 64
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 3


def pick_gate_config(num_tokens: int, num_experts: int, hidden_size: int) -> GateConfig:
    """The gate's launch configuration: small batches split H so that more than a handful of SMs load the weights."""
    block_m = 16 if num_tokens <= 64 else 64
    tiles = triton.cdiv(max(num_tokens, 1), block_m) * triton.cdiv(num_experts, 64)
    split_k = 1
    while split_k < 16 and tiles * split_k * 2 <= 128 and hidden_size // (split_k * 2) >= 256:
        split_k *= 2
    return GateConfig(block_m=block_m, split_k=split_k)


@triton.jit(do_not_specialize=["num_tokens"])
def _gate_kernel(
    x_ptr, w_ptr, parts_ptr, num_tokens, E, K, stride_xm, stride_we, part_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    pid_m, pid_n, pid_k = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < num_tokens, offs_n < E
    first_k = pid_k * part_k
    last_k = tl.minimum(first_k + part_k, K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(first_k, last_k, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        mask_k = offs_k < last_k
        x = tl.load(  # [BLOCK_M, BLOCK_K]
            x_ptr + offs_m.to(tl.int64)[:, None] * stride_xm + offs_k[None, :],
            mask=mask_m[:, None] & mask_k[None, :],
            other=0.0,
        )
        w = tl.load(  # [BLOCK_K, BLOCK_N]
            w_ptr + offs_n[None, :] * stride_we + offs_k[:, None], mask=mask_n[None, :] & mask_k[:, None], other=0.0
        )
        if UPCAST:
            x, w = x.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    out = parts_ptr + (pid_k * num_tokens + offs_m).to(tl.int64)[:, None] * E + offs_n[None, :]
    tl.store(out, acc, mask=mask_m[:, None] & mask_n[None, :])


@triton.jit
def _scores(logits, valid, SCORING: tl.constexpr):
    x = tl.minimum(tl.maximum(logits, -_FLOAT_MAX), _FLOAT_MAX)
    if SCORING == "softmax":
        x = tl.where(valid, x, -_FLOAT_MAX)
        top = tl.max(tl.max(x, axis=1), axis=0)
        e = tl.where(valid, tl.exp(x - top), 0.0)
        return e / tl.maximum(tl.sum(tl.sum(e, axis=1), axis=0), 1e-37)
    elif SCORING == "sigmoid":
        return tl.where(valid, 1.0 / (1.0 + tl.exp(-x)), 0.0)
    else:
        # log(1 + t) = 2 atanh(s): tl.log(1 + t) has no digits left where t is small
        t = tl.exp(-tl.abs(x))
        s = t / (2.0 + t)
        z = s * s
        series = 1 + z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11 + z * (1 / 13 + z / 15))))))
        log1p = 2.0 * s * series
        return tl.where(valid, tl.sqrt(tl.maximum(x, 0.0) + log1p), 0.0)


@triton.jit
def _ordered_key(value, eligible, index, COUNT: tl.constexpr):
    # fp32 order as int32 order, then the lowest index first; not-a-candidate sorts below every number
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    order = tl.where(eligible, bits ^ ((bits >> 31) & 0x7FFFFFFF), _NOT_ELIGIBLE)
    return (order.to(tl.int64) << 32) | (COUNT - 1 - index).to(tl.int64)


@triton.jit(do_not_specialize=["split_stride", "scale"])
def _top_k_kernel(
    logits_ptr, gate_bias_ptr, bias_ptr, weights_ptr, ids_ptr, E, split_stride, stride_lm, scale,
    SPLIT_K: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr, S_PAD: tl.constexpr, TOPK_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr, K_PAD: tl.constexpr, SCORING: tl.constexpr, RENORMALIZE: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    size = E // G
    offs_g, offs_s = tl.arange(0, G_PAD), tl.arange(0, S_PAD)
    expert = offs_g[:, None] * size + offs_s[None, :]  # [G_PAD, S_PAD]
    mask = (offs_g[:, None] < G) & (offs_s[None, :] < size)
    logits = tl.load(logits_ptr + row * stride_lm + expert, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, SPLIT_K):
        logits += tl.load(logits_ptr + part * split_stride + row * stride_lm + expert, mask=mask, other=0.0)
    if HAS_GATE_BIAS:
        logits += tl.load(gate_bias_ptr + expert, mask=mask, other=0.0).to(tl.float32)
    valid = mask & (logits == logits)
    score = _scores(logits, valid, SCORING)
    choice = score
    if SCORING == "softmax" and not HAS_BIAS:  # softmax keeps the order, but underflows to ties far below the top
        choice = tl.minimum(tl.maximum(logits, -_FLOAT_MAX), _FLOAT_MAX)
    if HAS_BIAS:
        choice += tl.load(bias_ptr + expert, mask=mask, other=0.0).to(tl.float32)
        valid = valid & (choice == choice)
    eligible = valid
    if TOPK_GROUPS < G:
        in_group = tl.where(valid, choice, _NAN_IN_GROUP)
        in_group = tl.where(mask, in_group, float("-inf"))
        best = tl.max(in_group, axis=1)
        if HAS_BIAS:
            first = tl.min(tl.where(in_group == best[:, None], offs_s[None, :], S_PAD), axis=1)
            second = tl.max(tl.where(offs_s[None, :] == first[:, None], float("-inf"), in_group), axis=1)
            best += tl.where(size > 1, second, 0.0)
            best = tl.where(best == best, best, float("inf"))  # +inf beside -inf
        group_key = _ordered_key(best, offs_g < G, offs_g, COUNT)
        group_key = tl.where(offs_g < G, group_key, _TAKEN)
        open_groups = tl.zeros((G_PAD,), tl.int32)
        for _ in tl.static_range(TOPK_GROUPS):
            best_group = group_key == tl.max(group_key, axis=0)
            open_groups = tl.where(best_group, 1, open_groups)
            group_key = tl.where(best_group, _TAKEN, group_key)
        eligible = valid & (open_groups[:, None] == 1)
    key = tl.where(mask, _ordered_key(choice, eligible, expert, COUNT), _TAKEN)
    offs_k = tl.arange(0, K_PAD)
    weights, ids = tl.zeros((K_PAD,), tl.float32), tl.zeros((K_PAD,), tl.int32)
    for k in range(TOP_K):
        top = tl.max(tl.max(key, axis=1), axis=0)
        hit = key == top
        weight = tl.sum(tl.sum(tl.where(hit & eligible, score, 0.0), axis=1), axis=0)
        weights = tl.where(offs_k == k, weight, weights)
        ids = tl.where(offs_k == k, (COUNT - 1 - (top & 0xFFFFFFFF)).to(tl.int32), ids)
        key = tl.where(hit, _TAKEN, key)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, axis=0) + _EPSILON)
    weights = weights * scale
    tl.store(weights_ptr + row * TOP_K + offs_k, weights, mask=offs_k < TOP_K)
    tl.store(ids_ptr + row * TOP_K + offs_k, ids, mask=offs_k < TOP_K)


def route(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    *,
    top_k: int,
    scoring: str = "softmax",
    gate_bias: torch.Tensor | None = None,
    selection_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    renormalize: bool = False,
    scale: float = 1.0,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and top-k: which experts each token goes to, and with what weight.

    hidden_states: [M, H] fp32, fp16 or bf16, last dimension contiguous. gate_weight: [E, H] of the same dtype or fp32.
    scoring: what turns logits into scores, "softmax", "sigmoid" or "sqrt_softplus".
    gate_bias: [E], added to the logits (gpt-oss). selection_bias: [E], added to the scores for the selection only.
    num_groups, topk_groups: experts outside the ``topk_groups`` best of ``num_groups`` equal groups are not eligible. A
    group scores the sum of its two best biased scores, or its best where there is no selection bias.
    renormalize: divide the chosen scores by their sum + 1e-20. scale: multiplies the result.
    out: (float32[M, top_k], int32[M, top_k]), written. workspace: uint8[``route_workspace``(M, E, H)].

    An expert whose logit is NaN is never preferred to one with a number; where fewer than ``top_k`` experts are
    eligible, the lowest remaining ids fill up with weight 0. Returns (weights, ids), best first.
    """
    num_tokens, hidden_size, num_experts = _check_route(hidden_states, gate_weight, gate_bias)
    _check_top_k(num_experts, top_k, scoring, selection_bias, num_groups, topk_groups, hidden_states)
    weights, ids = _outputs(out, num_tokens, top_k, hidden_states)
    parts = _gate_parts(workspace, num_tokens, num_experts, hidden_size, hidden_states)
    args = (hidden_states, gate_weight, gate_bias, selection_bias, parts, weights, ids, top_k, scoring, num_groups,
            topk_groups, renormalize, float(scale))  # fmt: skip
    (_route_op if is_tracing() else _route)(*args)
    return weights, ids


def top_k_from_logits(
    logits: torch.Tensor,
    *,
    top_k: int,
    scoring: str = "softmax",
    selection_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    renormalize: bool = False,
    scale: float = 1.0,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The second half of ``route``: logits [M, E] (fp32, fp16 or bf16, last dimension contiguous) → (weights, ids).

    All other arguments and the result are those of ``route``.
    """
    check_tensor("logits", logits, shape=(None, None), dtypes=_FLOATS, like=logits)
    check_last_stride("logits", logits)
    _check_top_k(logits.shape[1], top_k, scoring, selection_bias, num_groups, topk_groups, logits)
    weights, ids = _outputs(out, logits.shape[0], top_k, logits)
    args = (logits, selection_bias, weights, ids, top_k, scoring, num_groups, topk_groups, renormalize, float(scale))
    (_top_k_op if is_tracing() else _top_k_logits)(*args)
    return weights, ids


def route_workspace(num_tokens: int, num_experts: int, hidden_size: int) -> int:
    """Bytes of ``route``'s workspace: the fp32 logits, one copy for each part of H."""
    return pick_gate_config(num_tokens, num_experts, hidden_size).split_k * num_tokens * num_experts * 4


def _route(
    hidden_states: torch.Tensor, gate_weight: torch.Tensor, gate_bias: torch.Tensor | None,
    selection_bias: torch.Tensor | None, parts: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, top_k: int,
    scoring: str, num_groups: int, topk_groups: int, renormalize: bool, scale: float,
) -> None:  # fmt: skip
    if not runs_kernel(hidden_states):
        result = route_ref(
            hidden_states, gate_weight, top_k=top_k, scoring=scoring, gate_bias=gate_bias,
            selection_bias=selection_bias,
            num_groups=num_groups, topk_groups=topk_groups, renormalize=renormalize, scale=scale,
        )  # fmt: skip
        weights.copy_(result[0]), ids.copy_(result[1])
        return
    num_tokens, hidden_size = hidden_states.shape
    if num_tokens == 0:
        return
    num_experts = gate_weight.shape[0]
    config = pick_gate_config(num_tokens, num_experts, hidden_size)
    part_k = triton.cdiv(triton.cdiv(hidden_size, config.split_k), config.block_k) * config.block_k
    grid = (triton.cdiv(num_tokens, config.block_m), triton.cdiv(num_experts, config.block_n), config.split_k)
    _gate_kernel[grid](
        hidden_states, gate_weight, parts, num_tokens, num_experts, hidden_size, hidden_states.stride(0),
        gate_weight.stride(0), part_k, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        UPCAST=hidden_states.dtype != gate_weight.dtype, num_warps=config.num_warps, num_stages=config.num_stages,
        enable_fp_fusion=True,
    )  # fmt: skip
    _launch_top_k(parts, config.split_k, num_tokens * num_experts, num_experts, gate_bias, selection_bias, weights, ids,
                  top_k, scoring, num_groups, topk_groups, renormalize, scale, num_experts)  # fmt: skip


def _top_k_logits(
    logits: torch.Tensor, selection_bias: torch.Tensor | None, weights: torch.Tensor, ids: torch.Tensor, top_k: int,
    scoring: str, num_groups: int, topk_groups: int, renormalize: bool, scale: float,
) -> None:  # fmt: skip
    if not runs_kernel(logits):
        result = top_k_from_logits_ref(
            logits, top_k=top_k, scoring=scoring, selection_bias=selection_bias, num_groups=num_groups,
            topk_groups=topk_groups, renormalize=renormalize, scale=scale,
        )  # fmt: skip
        weights.copy_(result[0]), ids.copy_(result[1])
        return
    if logits.shape[0]:
        _launch_top_k(logits, 1, 0, logits.stride(0), None, selection_bias, weights, ids, top_k, scoring, num_groups,
                      topk_groups, renormalize, scale, logits.shape[1])  # fmt: skip


def _launch_top_k(logits, split_k, split_stride, stride_lm, gate_bias, selection_bias, weights, ids, top_k, scoring,
                  num_groups, topk_groups, renormalize, scale, num_experts):  # fmt: skip
    group_pad = triton.next_power_of_2(num_groups)
    size_pad = triton.next_power_of_2(num_experts // num_groups)
    _top_k_kernel[(weights.shape[0],)](
        logits, gate_bias, selection_bias, weights, ids, num_experts, split_stride, stride_lm, scale,
        SPLIT_K=split_k, G=num_groups, G_PAD=group_pad, S_PAD=size_pad, TOPK_GROUPS=min(topk_groups, num_groups),
        TOP_K=top_k, K_PAD=triton.next_power_of_2(top_k), SCORING=scoring, RENORMALIZE=renormalize,
        HAS_GATE_BIAS=gate_bias is not None, HAS_BIAS=selection_bias is not None, COUNT=4096,
        num_warps=1 if group_pad * size_pad <= 512 else 4, enable_fp_fusion=True,
    )  # fmt: skip


@reference
def route_ref(
    hidden_states, gate_weight, *, top_k, scoring="softmax", gate_bias=None, selection_bias=None, num_groups=1,
    topk_groups=1, renormalize=False, scale=1.0,
):  # fmt: skip
    """Plain-torch ``route``."""
    logits = hidden_states.float() @ gate_weight.float().t()
    if gate_bias is not None:
        logits = logits + gate_bias.float()
    return top_k_from_logits_ref(
        logits, top_k=top_k, scoring=scoring, selection_bias=selection_bias, num_groups=num_groups,
        topk_groups=topk_groups, renormalize=renormalize, scale=scale,
    )  # fmt: skip


@reference
def top_k_from_logits_ref(
    logits, *, top_k, scoring="softmax", selection_bias=None, num_groups=1, topk_groups=1, renormalize=False, scale=1.0
):
    """Plain-torch ``top_k_from_logits``, by a stable descending sort: ``torch.topk`` promises no order of ties."""
    logits = logits.float()
    valid = ~logits.isnan()
    finite = logits.clamp(-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max)
    if scoring == "softmax":
        scores = finite.masked_fill(~valid, float("-inf")).softmax(-1)
    elif scoring == "sigmoid":
        scores = finite.sigmoid()
    else:
        scores = (finite.clamp(min=0) + torch.log1p(torch.exp(-finite.abs()))).sqrt()
    scores = scores.masked_fill(~valid, 0.0)
    choice = scores if selection_bias is None else scores + selection_bias.float()
    if scoring == "softmax" and selection_bias is None:  # softmax keeps the order, but underflows to ties
        choice = finite
    valid = valid & ~choice.isnan()
    eligible = valid
    if topk_groups < num_groups:
        eligible = valid & _open_groups(choice, valid, num_groups, topk_groups, 1 if selection_bias is None else 2)
    # two stable sorts: by value, then candidates before the rest (whose order is by id)
    by_value = choice.masked_fill(~eligible, float("-inf")).sort(dim=-1, descending=True, stable=True).indices
    first = eligible.gather(1, by_value).to(torch.int8).sort(dim=-1, descending=True, stable=True).indices
    ids = by_value.gather(1, first)[:, :top_k]
    weights = scores.masked_fill(~eligible, 0.0).gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, ids.to(torch.int32)


def _open_groups(choice, valid, num_groups, topk_groups, best):
    num_tokens, num_experts = choice.shape
    grouped = choice.masked_fill(~valid, -1e38).view(num_tokens, num_groups, num_experts // num_groups)
    group_scores = grouped.sort(-1, descending=True).values[..., :best].sum(-1)
    group_scores = group_scores.masked_fill(group_scores.isnan(), float("inf"))  # +inf beside -inf
    chosen = group_scores.sort(dim=-1, descending=True, stable=True).indices[:, :topk_groups]
    is_open = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, chosen, True)
    return is_open.unsqueeze(-1).expand(-1, -1, num_experts // num_groups).reshape(num_tokens, num_experts)


def _check_route(hidden_states, gate_weight, gate_bias):
    check_tensor("hidden_states", hidden_states, shape=(None, None), dtypes=_FLOATS, like=hidden_states)
    dtypes = (hidden_states.dtype, torch.float32)
    check_tensor("gate_weight", gate_weight, shape=(None, hidden_states.shape[1]), dtypes=dtypes, like=hidden_states)
    for name, tensor in (("hidden_states", hidden_states), ("gate_weight", gate_weight)):
        check_last_stride(name, tensor)
    if gate_bias is not None:
        check_tensor("gate_bias", gate_bias, shape=(gate_weight.shape[0],), dtypes=_FLOATS, like=hidden_states)
        check(gate_bias.is_contiguous(), "gate_bias is not contiguous; call .contiguous()")
    return hidden_states.shape[0], hidden_states.shape[1], gate_weight.shape[0]


def check_top_k_sizes(num_experts: int, top_k: int, scoring: str, num_groups: int, topk_groups: int) -> None:
    """Refuses sizes that the top-k does not take."""
    check(1 <= num_experts <= MAX_EXPERTS, f"the number of experts is {num_experts}; allowed: 1 … {MAX_EXPERTS}")
    check(scoring in SCORINGS, f"scoring is {scoring!r}; allowed: {', '.join(SCORINGS)}")
    check(
        num_groups >= 1 and num_experts % num_groups == 0,
        f"num_groups is {num_groups}; allowed: divisors of the {num_experts} experts",
    )
    check(1 <= topk_groups <= num_groups, f"topk_groups is {topk_groups}; allowed: 1 … num_groups ({num_groups})")
    open_experts = num_experts // num_groups * topk_groups
    most = min(MAX_TOP_K, open_experts)
    check(1 <= top_k <= most, f"top_k is {top_k}; allowed: 1 … {most} ({open_experts} experts in the open groups)")


def _check_top_k(num_experts, top_k, scoring, selection_bias, num_groups, topk_groups, like):
    check_top_k_sizes(num_experts, top_k, scoring, num_groups, topk_groups)
    if selection_bias is not None:
        check_tensor("selection_bias", selection_bias, shape=(num_experts,), dtypes=_FLOATS, like=like)
        check(selection_bias.is_contiguous(), "selection_bias is not contiguous; call .contiguous()")


def _outputs(out, num_tokens, top_k, like):
    if out is None:
        weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=like.device)
        return weights, torch.empty(num_tokens, top_k, dtype=torch.int32, device=like.device)
    for name, tensor, dtype in (("out[0]", out[0], torch.float32), ("out[1]", out[1], torch.int32)):
        check_tensor(name, tensor, shape=(num_tokens, top_k), dtypes=(dtype,), like=like)
        check(tensor.is_contiguous(), f"{name} is not contiguous; allowed: contiguous [M, top_k]")
    return out


def _gate_parts(workspace, num_tokens, num_experts, hidden_size, like):
    nbytes = route_workspace(num_tokens, num_experts, hidden_size)
    if not runs_kernel(like):
        return torch.empty(0, dtype=torch.float32, device=like.device)
    if workspace is None:
        return torch.empty(nbytes // 4, dtype=torch.float32, device=like.device)
    return workspace_for(workspace, nbytes, like.device, "route_workspace")[:nbytes].view(torch.float32)


_route_op = register("route", _route, mutates=("parts", "weights", "ids"))
_top_k_op = register("top_k_from_logits", _top_k_logits, mutates=("weights", "ids"))
