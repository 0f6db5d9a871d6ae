# SPDX-License-Identifier: Apache-2.0
"""A whole MoE layer on one rank, without a message: the plan, then the same grouped GEMMs as the exchange."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from afd_kernels._op import Carver, check, check_tensor, is_tracing, reference, register, runs_kernel, workspace_for
from afd_kernels.arrival import ExpertSchedule, _named, launch_merge
from afd_kernels.arrival import _carve as _carve_schedule
from afd_kernels.experts import SwiGLU, check_experts, expert_ref, experts_forward
from afd_kernels.launch import pick_experts
from afd_kernels.message import MAX_TOP_K, MessageLayout
from afd_kernels.plan import carve_plan, launch_plan
from afd_kernels.reply import weighted_row, weighted_sum_ref
from afd_kernels.routing import route
from afd_kernels.small_plan import is_small, launch_small_plan


@triton.jit
def _weighted_sum_kernel(
    y_ptr, weights_ptr, out_ptr, H, stride_om, TOP_K: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    acc = weighted_row(y_ptr, weights_ptr + row * TOP_K, row, cols, H, TOP_K)
    tl.store(out_ptr + row * stride_om + cols, acc.to(out_ptr.dtype.element_ty), mask=cols < H)


def fused_experts(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: SwiGLU = SwiGLU(),
    b_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """The experts of one MoE layer: for each token the weighted sum of its experts' outputs.

    x: [M, H] fp32, fp16 or bf16, last dimension contiguous.
    w_up: [E, 2I, H], w_down: [E, H, I], dtype of x, any strides. ``activation`` says how gate and up lie along 2I.
    topk_weights: float32[M, k]. topk_ids: int32[M, k]; an id outside 0 … E-1 (-1: not on this rank) and a weight of 0
    contribute nothing. b_up: [E, 2I], b_down: [E, H]. out: [M, H], every row written.
    workspace: uint8[``fused_experts_workspace``], zeroed once. Returns out.

    A row's result does not depend on the other rows, as long as M stays in one size class of the launch table.
    """
    _check_fused(x, w_up, w_down, topk_weights, topk_ids, b_up, b_down)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    check_tensor("out", out, shape=tuple(x.shape), dtypes=(x.dtype,), like=x)
    check(out.shape[1] == 1 or out.stride(1) == 1, f"out has strides {out.stride()}; allowed: last 1")
    a = activation
    args = (x, w_up, w_down, topk_weights, topk_ids, b_up, b_down, out, workspace, [a.alpha, a.beta, a.limit or 0.0],
            [a.gate_first, a.interleaved])  # fmt: skip
    (_fused_op if is_tracing() else _fused)(*args)
    return out


def fused_moe(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    *,
    top_k: int,
    scoring: str = "softmax",
    gate_bias: torch.Tensor | None = None,
    selection_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    renormalize: bool = False,
    scale: float = 1.0,
    activation: SwiGLU = SwiGLU(),
    b_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One whole MoE layer without shared experts: ``route``, then ``fused_experts``. Arguments and result as theirs."""
    weights, ids = route(
        hidden_states, gate_weight, top_k=top_k, scoring=scoring, gate_bias=gate_bias, selection_bias=selection_bias,
        num_groups=num_groups, topk_groups=topk_groups, renormalize=renormalize, scale=scale,
    )  # fmt: skip
    return fused_experts(
        hidden_states, w_up, w_down, weights, ids, activation=activation, b_up=b_up, b_down=b_down, out=out
    )


def fused_experts_workspace(
    num_tokens: int, num_experts: int, intermediate_size: int, hidden_size: int, top_k: int, dtype: torch.dtype,
    device: torch.device,
) -> int:  # fmt: skip
    """Bytes of ``fused_experts``'s workspace for exactly ``num_tokens`` tokens."""
    layout = MessageLayout(num_experts, num_tokens, top_k, hidden_size, dtype)
    carver = Carver()
    _carve(carver, layout, intermediate_size, pick_experts(num_tokens * top_k, num_experts, dtype, device)[0].block_m)
    return carver.nbytes


def _carve(carver: Carver, layout: MessageLayout, intermediate: int, block_m: int) -> tuple:
    pairs = layout.cap_rows * layout.top_k
    schedule = _carve_schedule(carver, 1, layout, block_m)  # first: its counters lie there for any number of tokens
    plan = carve_plan(carver, layout.cap_rows, layout.top_k, layout.num_experts, 1)
    slot = carver.take((layout.offset("rows"),), torch.uint8)
    bucket = carver.take((layout.num_experts,), torch.int32)
    h = carver.take((max(16, pairs * intermediate * layout.dtype.itemsize),), torch.uint8)
    return plan, slot, schedule, bucket, h, carver.take((pairs, layout.hidden_size), layout.dtype)


def _fused(
    x: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor,
    b_up: torch.Tensor | None, b_down: torch.Tensor | None, out: torch.Tensor,
    workspace: torch.Tensor | None, constants: list[float], flags: list[bool],
) -> None:  # fmt: skip
    activation = SwiGLU(constants[0], constants[1], constants[2] or None, *flags)
    num_tokens, hidden = x.shape
    if num_tokens == 0:
        return
    if not runs_kernel(x):
        fused_experts_ref(x, w_up, w_down, topk_weights, topk_ids, activation=activation, b_up=b_up, b_down=b_down,
                          out=out)  # fmt: skip
        return
    num_experts, top_k, intermediate = w_up.shape[0], topk_ids.shape[1], w_down.shape[2]
    # not in ``fused_experts``: the launch tables are not read inside ``torch.compile``
    nbytes = fused_experts_workspace(num_tokens, num_experts, intermediate, hidden, top_k, x.dtype, x.device)
    workspace = workspace_for(workspace, nbytes, x.device, "fused_experts_workspace")
    layout = MessageLayout(num_experts, num_tokens, top_k, hidden, x.dtype)
    configs = pick_experts(num_tokens * top_k, num_experts, x.dtype, x.device)
    block_m = configs[0].block_m
    plan, slot, tensors, bucket, h, y = _carve(Carver(workspace), layout, intermediate, block_m)
    _, starts, counts = plan
    torch.arange(num_experts, out=bucket)
    if is_small(num_tokens, top_k, num_experts):
        launch_small_plan(topk_ids, topk_weights, bucket, slot, layout)
    else:
        launch_plan(topk_ids, topk_weights, bucket, slot, slot, slot, counts, starts, layout, 1, 0, local=True)
    launch_merge(slot, slot, x, tensors[:-1], layout, block_m, local=True)
    schedule = ExpertSchedule(
        **_named(tensors), block_m=block_m, top_k=top_k, cap_rows=num_tokens, cap_pairs=num_tokens * top_k,
        hidden_size=hidden, row_stride=x.stride(0), dtype=x.dtype,
        row_alignment=16 if x.data_ptr() % 16 == 0 else x.element_size(),
    )  # fmt: skip
    experts_forward(schedule, w_up, w_down, activation=activation, b_up=b_up, b_down=b_down, y=y, workspace=h,
                    config=configs)  # fmt: skip
    block_h = min(1024, triton.next_power_of_2(hidden))
    at = layout.offset("weights")
    weights = slot[at : at + 4 * num_tokens * top_k].view(torch.float32)
    _weighted_sum_kernel[(num_tokens, triton.cdiv(hidden, block_h))](
        y,
        weights,
        out,
        hidden,
        out.stride(0),
        TOP_K=top_k,
        BLOCK_H=block_h,
        num_warps=4,
        enable_fp_fusion=True,
    )


@reference
def fused_experts_ref(
    x, w_up, w_down, topk_weights, topk_ids, *, activation=SwiGLU(), b_up=None, b_down=None, out=None, workspace=None
):
    """Plain-torch ``fused_experts``: a loop over experts."""
    out = torch.empty_like(x) if out is None else out
    num_tokens, top_k = topk_ids.shape
    y = torch.zeros(num_tokens * top_k, x.shape[1], dtype=x.dtype, device=x.device)
    real = (topk_weights != 0) & (topk_ids >= 0) & (topk_ids < w_up.shape[0])
    flat = torch.where(real, topk_ids, -1).flatten()
    for expert in flat.unique().tolist():
        if expert >= 0:
            pairs = (flat == expert).nonzero().squeeze(1)
            bias_up, bias_down = (None if b is None else b[expert] for b in (b_up, b_down))
            rows = expert_ref(x[pairs // top_k], w_up[expert], w_down[expert], bias_up, bias_down, activation)
            y[pairs] = rows.to(y.dtype)
    weights = torch.where(real, topk_weights, 0.0)
    return out.copy_(weighted_sum_ref(y.view(num_tokens, top_k, x.shape[1]), weights))


def _check_fused(x, w_up, w_down, topk_weights, topk_ids, b_up, b_down) -> None:
    check_tensor("x", x, shape=(None, None), dtypes=(torch.float32, torch.float16, torch.bfloat16), like=x)
    check(x.shape[1] == 1 or x.stride(1) == 1, f"x has strides {x.stride()}; allowed: last 1; call .contiguous()")
    check_experts(w_up, w_down, b_up, b_down, x.dtype, x.shape[1], x)
    check_tensor("topk_ids", topk_ids, shape=(x.shape[0], None), dtypes=(torch.int32,), like=x)
    top_k = topk_ids.shape[1]
    check(1 <= top_k <= MAX_TOP_K, f"topk_ids has {top_k} columns; allowed: 1 … {MAX_TOP_K}")
    check_tensor("topk_weights", topk_weights, shape=(x.shape[0], top_k), dtypes=(torch.float32,), like=x)
    for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        check(tensor.is_contiguous(), f"{name} is not contiguous; call .contiguous()")


_fused_op = register("fused_experts", _fused, mutates=("out", "workspace"))
