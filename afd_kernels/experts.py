# SPDX-License-Identifier: Apache-2.0
"""The experts: grouped GEMM 1 (gathers rows where they arrived, SwiGLU in the epilogue) and grouped GEMM 2.

Both are persistent: programs take tiles until the table on the device ends, so their grid does not depend on the batch.
GEMM 1 writes activations in merged expert order; GEMM 2 writes each pair's result to row ``row * top_k + choice`` of
its
lane, where the reply sums a row's choices. Weights stay as the engines hold them. Accumulation is fp32. A row's result
does not depend on the other rows of the batch, for a given tile shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from afd_kernels._op import (
    check,
    check_tensor,
    is_tracing,
    reference,
    register,
    runs_kernel,
    workspace_for,
)
from afd_kernels.arrival import TILE_SHIFT, ExpertSchedule
from afd_kernels.launch import GemmConfig, num_programs, pick_experts
from afd_kernels.message import tensor_at
from afd_kernels.signal import arrive_last

_TILE_SHIFT = tl.constexpr(TILE_SHIFT)
_TILE_MASK = tl.constexpr((1 << TILE_SHIFT) - 1)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class SwiGLU:
    """The experts' activation: ``(u + beta) * g * sigmoid(alpha * g)`` of gate g and up u (arXiv 2002.05202).

    limit: g is clamped from above and u to ±limit (gpt-oss: 7, with alpha 1.702 and beta 1).
    gate_first: along the 2I axis the gate comes first, else the up part. interleaved: g and u alternate along it.
    """

    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None
    gate_first: bool = True
    interleaved: bool = False

    def __post_init__(self) -> None:
        check(self.limit is None or self.limit > 0, f"limit is {self.limit}; allowed: None, or above 0")


@triton.jit
def _tile_of(tile_id, num_tiles, num_n, GROUP_M: tl.constexpr):
    # row tiles in groups of GROUP_M, and within a group one column after the other: they share weights in L2
    per_group = GROUP_M * num_n
    first = (tile_id // per_group) * GROUP_M
    size = tl.minimum(num_tiles - first, GROUP_M)
    inside = tile_id % per_group
    return first + inside % size, inside // size


@triton.jit
def _take(tickets_ptr):
    """The next tile that nobody has taken. A program may be late or run alone on its SM: nobody waits for it."""
    return tl.atomic_add(tickets_ptr, 1, sem="relaxed", scope="gpu")


@triton.jit
def _put_back(tickets_ptr):
    """The grid's last program makes the counter ready for the next launch."""
    if arrive_last(tickets_ptr + 1, tl.num_programs(0)):
        tl.store(tickets_ptr, 0)


@triton.jit
def _locate(tiles_ptr, expert_base_ptr, tile_id, num_tiles, num_n, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr):
    # expert of a tile, where its merged rows begin, the tile's rows [BLOCK_M] within the expert, and its column
    tile, pid_n = _tile_of(tile_id, num_tiles, num_n, GROUP_M)
    entry = tl.load(tiles_ptr + tile)
    expert = entry & _TILE_MASK
    base = tl.load(expert_base_ptr + expert)
    offs_r = (entry >> _TILE_SHIFT) * BLOCK_M + tl.arange(0, BLOCK_M)
    return expert, base, offs_r, offs_r < tl.load(expert_base_ptr + expert + 1) - base, pid_n


@triton.jit
def _pairs_of_tile(
    pair_address_ptr, lane_prefix_ptr, lane_start_ptr, expert, offs_r, mask_r, A: tl.constexpr, A_PAD: tl.constexpr
):
    # [BLOCK_M] lane and pair (row * top_k + choice) of each merged row
    if A == 1:
        lane = offs_r * 0
    else:
        offs_a = tl.arange(0, A_PAD)
        after = tl.load(lane_prefix_ptr + expert * (A + 1) + 1 + offs_a, mask=offs_a < A, other=2147483647)
        lane = tl.minimum(tl.sum((offs_r[:, None] >= after[None, :]).to(tl.int32), axis=1), A - 1)
    start = tl.load(lane_start_ptr + expert * A + lane)
    pairs = tl.load(pair_address_ptr + lane).to(tl.pointer_type(tl.int32))
    pair = tl.load(pairs + start + offs_r, mask=mask_r, other=0)
    return lane, pair


@triton.jit
def _swiglu(g, u, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr):
    if LIMIT > 0:  # a NaN stays one: without ALL the limit would take its place
        g = tl.minimum(g, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        u = tl.maximum(u, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        u = tl.minimum(u, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return (u + BETA) * g / (1.0 + tl.exp(-ALPHA * g))


@triton.jit
def _p_experts_up_kernel(
    row_address_ptr, pair_address_ptr, lane_prefix_ptr, lane_start_ptr, expert_base_ptr, tiles_ptr, num_tiles_ptr,
    tickets_ptr, w_ptr, b_ptr, h_ptr, row_bytes, N, K, stride_we, stride_wn, stride_wk, stride_be,
    A: tl.constexpr, A_PAD: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, HAS_BIAS: tl.constexpr, INTERLEAVED: tl.constexpr,
    GATE_FIRST: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.load(num_tiles_ptr)
    num_n = tl.cdiv(N, BLOCK_N)
    tile_id = _take(tickets_ptr)
    while tile_id < num_tiles * num_n:
        following = _take(tickets_ptr)  # early: it is there when this tile is done
        expert, base, offs_r, mask_r, pid_n = _locate(
            tiles_ptr, expert_base_ptr, tile_id, num_tiles, num_n, GROUP_M, BLOCK_M
        )
        lane, pair = _pairs_of_tile(pair_address_ptr, lane_prefix_ptr, lane_start_ptr, expert, offs_r, mask_r, A, A_PAD)
        rows = tl.load(row_address_ptr + lane) + (pair // TOP_K).to(tl.int64) * row_bytes
        # of the pointer: the alignment of an address does not outlive its cast
        x_ptrs = tl.multiple_of(rows.to(tl.pointer_type(tl.uint8)), ALIGN).to(tl.pointer_type(w_ptr.dtype.element_ty))
        offs_k = tl.arange(0, BLOCK_K)
        offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < N
        w_expert = w_ptr + expert.to(tl.int64) * stride_we
        b_expert = b_ptr + expert.to(tl.int64) * stride_be
        if INTERLEAVED:
            offs_w = pid_n * (2 * BLOCK_N) + tl.arange(0, 2 * BLOCK_N)
            acc = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
            for k in range(0, K, BLOCK_K):
                at_k = k + offs_k
                x = tl.load(  # [BLOCK_M, BLOCK_K]
                    x_ptrs[:, None] + at_k[None, :], mask=mask_r[:, None] & (at_k < K)[None, :], other=0.0
                )
                w = tl.load(  # [BLOCK_K, 2 * BLOCK_N]
                    w_expert + at_k.to(tl.int64)[:, None] * stride_wk + offs_w.to(tl.int64)[None, :] * stride_wn,
                    mask=(offs_w < 2 * N)[None, :] & (at_k < K)[:, None],
                    other=0.0,
                )
                acc = tl.dot(x, w, acc, input_precision="ieee")
            if HAS_BIAS:
                acc += tl.load(b_expert + offs_w, mask=offs_w < 2 * N, other=0.0).to(tl.float32)[None, :]
            first, second = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N, 2)))
        else:
            first = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            second = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            w_first = w_expert + offs_n.to(tl.int64)[None, :] * stride_wn
            w_second = w_expert + (offs_n + N).to(tl.int64)[None, :] * stride_wn
            for k in range(0, K, BLOCK_K):
                at_k = k + offs_k
                x = tl.load(  # [BLOCK_M, BLOCK_K]
                    x_ptrs[:, None] + at_k[None, :], mask=mask_r[:, None] & (at_k < K)[None, :], other=0.0
                )
                w_mask = mask_n[None, :] & (at_k < K)[:, None]
                at_w = at_k.to(tl.int64)[:, None] * stride_wk
                first = tl.dot(x, tl.load(w_first + at_w, mask=w_mask, other=0.0), first, input_precision="ieee")
                second = tl.dot(x, tl.load(w_second + at_w, mask=w_mask, other=0.0), second, input_precision="ieee")
            if HAS_BIAS:
                first += tl.load(b_expert + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
                second += tl.load(b_expert + N + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
        if GATE_FIRST:
            h = _swiglu(first, second, ALPHA, BETA, LIMIT)
        else:
            h = _swiglu(second, first, ALPHA, BETA, LIMIT)
        out = h_ptr + (base + offs_r).to(tl.int64)[:, None] * N + offs_n[None, :]
        tl.store(out, h.to(h_ptr.dtype.element_ty), mask=mask_r[:, None] & mask_n[None, :])
        tile_id = following
    _put_back(tickets_ptr)


@triton.jit
def _p_experts_down_kernel(
    pair_address_ptr, lane_base_ptr, lane_prefix_ptr, lane_start_ptr, expert_base_ptr, tiles_ptr, num_tiles_ptr,
    tickets_ptr, h_ptr, w_ptr, b_ptr, y_ptr, N, K, stride_we, stride_wn, stride_wk, stride_be,
    A: tl.constexpr, A_PAD: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.load(num_tiles_ptr)
    num_n = tl.cdiv(N, BLOCK_N)
    tile_id = _take(tickets_ptr)
    while tile_id < num_tiles * num_n:
        following = _take(tickets_ptr)  # early: it is there when this tile is done
        expert, base, offs_r, mask_r, pid_n = _locate(
            tiles_ptr, expert_base_ptr, tile_id, num_tiles, num_n, GROUP_M, BLOCK_M
        )
        offs_k = tl.arange(0, BLOCK_K)
        offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < N
        h_rows = h_ptr + (base + offs_r).to(tl.int64)[:, None] * K
        w_cols = w_ptr + expert.to(tl.int64) * stride_we + offs_n.to(tl.int64)[None, :] * stride_wn
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            at_k = k + offs_k
            h = tl.load(h_rows + at_k[None, :], mask=mask_r[:, None] & (at_k < K)[None, :], other=0.0)
            w = tl.load(  # [BLOCK_K, BLOCK_N]
                w_cols + at_k.to(tl.int64)[:, None] * stride_wk, mask=mask_n[None, :] & (at_k < K)[:, None], other=0.0
            )
            acc = tl.dot(h, w, acc, input_precision="ieee")
        if HAS_BIAS:
            bias = tl.load(b_ptr + expert.to(tl.int64) * stride_be + offs_n, mask=mask_n, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        lane, pair = _pairs_of_tile(pair_address_ptr, lane_prefix_ptr, lane_start_ptr, expert, offs_r, mask_r, A, A_PAD)
        row = tl.load(lane_base_ptr + lane).to(tl.int64) * TOP_K + pair
        tl.store(
            y_ptr + row[:, None] * N + offs_n[None, :],
            acc.to(y_ptr.dtype.element_ty),
            mask=mask_r[:, None] & mask_n[None, :],
        )
        tile_id = following
    _put_back(tickets_ptr)


def experts_forward(
    schedule: ExpertSchedule,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    *,
    activation: SwiGLU = SwiGLU(),
    b_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
    y: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    config: tuple[GemmConfig, GemmConfig] | None = None,
) -> torch.Tensor:
    """Both grouped GEMMs over a schedule.

    w_up: [E, 2I, H], w_down: [E, H, I], any strides, dtype of the rows (gpt-oss's [E, H, 2I] goes in as
    ``.transpose(1, 2)``). b_up: [E, 2I], b_down: [E, H]. config: of GEMM 1 and 2, otherwise picked for the capacity.
    y: [cap_rows * top_k, H], written at ``(lane_base + row) * top_k + choice`` for each pair and left alone elsewhere.
    workspace: uint8[``experts_workspace``(schedule, I)]. Returns y.
    """
    intermediate = check_experts(w_up, w_down, b_up, b_down, schedule.dtype, schedule.hidden_size, w_up)
    check(
        w_up.shape[0] == schedule.num_experts,
        f"w_up has {w_up.shape[0]} experts; allowed: the schedule's {schedule.num_experts}",
    )
    check_tensor("schedule", schedule.tiles, shape=(None,), dtypes=(torch.int32,), like=w_up)
    if y is None:
        shape = (schedule.cap_rows * schedule.top_k, schedule.hidden_size)
        y = torch.empty(shape, dtype=schedule.dtype, device=w_up.device)
    shape = (schedule.cap_rows * schedule.top_k, schedule.hidden_size)
    check_tensor("y", y, shape=shape, dtypes=(schedule.dtype,), like=w_up)
    check(y.is_contiguous(), "y is not contiguous; allowed: contiguous [cap_rows * top_k, H]")
    if config is not None:
        up, down = config
        check(
            up.block_m == down.block_m == schedule.block_m,
            f"config has block_m {up.block_m} and {down.block_m}; allowed: the schedule's {schedule.block_m}",
        )
    nbytes = experts_workspace(schedule, intermediate)
    if workspace is None and runs_kernel(w_up):
        workspace = torch.empty(max(16, nbytes), dtype=torch.uint8, device=w_up.device)
    elif workspace is None or not runs_kernel(w_up):
        workspace = torch.empty(0, dtype=torch.uint8, device=w_up.device)
    else:
        workspace = workspace_for(workspace, nbytes, w_up.device, "experts_workspace")
    a, flags = activation, [activation.gate_first, activation.interleaved]
    args = (schedule.tensors(), schedule.tickets, w_up, w_down, b_up, b_down, y, workspace, schedule.top_k,
            schedule.row_stride, schedule.row_alignment, [a.alpha, a.beta, a.limit or 0.0], flags, schedule.block_m,
            _flat(config))  # fmt: skip
    (_experts_op if is_tracing() else _experts)(*args)
    return y


def experts_workspace(schedule: ExpertSchedule, intermediate_size: int) -> int:
    """Bytes of ``experts_forward``'s workspace: the activations between the two GEMMs."""
    return schedule.cap_pairs * intermediate_size * schedule.dtype.itemsize


def _flat(config: tuple[GemmConfig, GemmConfig] | None) -> list[int]:
    """For the op's boundary; empty where the launcher picks: the tables are not read inside ``torch.compile``."""
    return [n for c in config or () for n in (c.block_m, c.block_n, c.block_k, c.num_warps, c.num_stages, c.group_m)]


def _experts(
    schedule: list[torch.Tensor], tickets: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor,
    b_up: torch.Tensor | None, b_down: torch.Tensor | None, y: torch.Tensor, workspace: torch.Tensor, top_k: int,
    row_stride: int, row_alignment: int, constants: list[float], flags: list[bool], block_m: int, config: list[int],
) -> None:  # fmt: skip
    num_lanes, intermediate = schedule[0].numel(), w_down.shape[2]
    if not runs_kernel(w_up):
        activation = SwiGLU(constants[0], constants[1], constants[2] or None, *flags)
        _loop_experts(schedule, w_up, w_down, b_up, b_down, y, top_k, row_stride, activation)
        return
    if y.shape[0] == 0:
        return
    row_address, pair_address, _, lane_base, lane_prefix, lane_start, expert_base, tiles, num_tiles, _ = schedule
    h = workspace.view(w_up.dtype)
    if config:
        c1, c2 = GemmConfig(*config[:6]), GemmConfig(*config[6:])
    else:
        c1, c2 = pick_experts(y.shape[0], w_up.shape[0], w_up.dtype, w_up.device, block_m=block_m)
    hidden, itemsize = w_down.shape[1], w_up.dtype.itemsize
    shared = {"A": num_lanes, "A_PAD": triton.next_power_of_2(num_lanes), "TOP_K": top_k}
    grid = (num_programs(w_up.device, tiles.numel() * triton.cdiv(intermediate, c1.block_n)),)
    _p_experts_up_kernel[grid](
        row_address, pair_address, lane_prefix, lane_start, expert_base, tiles, num_tiles, tickets, w_up,
        w_up if b_up is None else b_up, h, row_stride * itemsize, intermediate, hidden, *w_up.stride(),
        0 if b_up is None else b_up.stride(0), **shared, **_meta(c1), HAS_BIAS=b_up is not None, GATE_FIRST=flags[0],
        INTERLEAVED=flags[1], ALPHA=constants[0], BETA=constants[1], LIMIT=constants[2],
        ALIGN=math.gcd(row_stride * itemsize, row_alignment), num_warps=c1.num_warps, num_stages=c1.num_stages,
        enable_fp_fusion=True,
    )  # fmt: skip
    grid = (num_programs(w_up.device, tiles.numel() * triton.cdiv(hidden, c2.block_n)),)
    _p_experts_down_kernel[grid](
        pair_address, lane_base, lane_prefix, lane_start, expert_base, tiles, num_tiles, tickets, h, w_down,
        w_down if b_down is None else b_down, y, hidden, intermediate, *w_down.stride(),
        0 if b_down is None else b_down.stride(0), **shared, **_meta(c2), HAS_BIAS=b_down is not None,
        num_warps=c2.num_warps, num_stages=c2.num_stages, enable_fp_fusion=True,
    )  # fmt: skip


def _meta(config: GemmConfig) -> dict[str, int]:
    return {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m}


@reference
def experts_forward_ref(
    schedule, w_up, w_down, *, activation=SwiGLU(), b_up=None, b_down=None, y=None, workspace=None, config=None
):
    """Plain-torch ``experts_forward``."""
    if y is None:
        shape = (schedule.cap_rows * schedule.top_k, schedule.hidden_size)
        y = torch.empty(shape, dtype=schedule.dtype, device=w_up.device)
    _loop_experts(schedule.tensors(), w_up, w_down, b_up, b_down, y, schedule.top_k, schedule.row_stride, activation)
    return y


def _loop_experts(schedule, w_up, w_down, b_up, b_down, y, top_k, row_stride, activation):
    """A loop over experts and lanes."""
    row_address, pair_address, _, lane_base, lane_prefix, lane_start = schedule[:6]
    hidden, dtype = w_down.shape[1], w_up.dtype
    bases, prefix, start = lane_base.tolist(), lane_prefix.tolist(), lane_start.tolist()
    tables = []
    for lane, base in enumerate(bases[:-1]):
        rows = bases[lane + 1] - base
        pairs = max((start[e][lane] + prefix[e][lane + 1] for e in range(len(prefix))), default=0)
        extent = ((rows - 1) * row_stride + hidden) * dtype.itemsize if rows else 0
        raw = tensor_at(int(row_address[lane]), extent, y.device).view(dtype)
        table = torch.as_strided(raw, (rows, hidden), (row_stride, 1)) if rows else raw.view(0, hidden)
        tables.append((table, tensor_at(int(pair_address[lane]), 4 * pairs, y.device).view(torch.int32).long()))
    for expert in range(w_up.shape[0]):
        parts = [(lane, prefix[expert][lane], prefix[expert][lane + 1]) for lane in range(len(tables))]
        lists = [tables[a][1][start[expert][a] + low : start[expert][a] + high] for a, low, high in parts]
        if not sum(part.numel() for part in lists):
            continue
        x = torch.cat([tables[a][0][pairs // top_k] for (a, _, _), pairs in zip(parts, lists, strict=True)])
        bias_up, bias_down = (None if b is None else b[expert] for b in (b_up, b_down))
        out = expert_ref(x, w_up[expert], w_down[expert], bias_up, bias_down, activation)
        rows = torch.cat([bases[a] * top_k + pairs for (a, _, _), pairs in zip(parts, lists, strict=True)])
        y[rows] = out.to(y.dtype)


@reference
def expert_ref(x, w_up, w_down, b_up, b_down, activation):
    """One expert on rows x [N, H]: fp32 sums, activations rounded to the rows' dtype as in the kernel."""
    up = x.float() @ w_up.float().t()
    if b_up is not None:
        up = up + b_up.float()
    first, second = (up[:, ::2], up[:, 1::2]) if activation.interleaved else up.chunk(2, dim=-1)
    g, u = (first, second) if activation.gate_first else (second, first)
    if activation.limit is not None:
        g, u = g.clamp(max=activation.limit), u.clamp(-activation.limit, activation.limit)
    h = ((u + activation.beta) * g * torch.sigmoid(activation.alpha * g)).to(x.dtype)
    out = h.float() @ w_down.float().t()
    return out if b_down is None else out + b_down.float()


def check_experts(w_up, w_down, b_up, b_down, dtype, hidden_size, like) -> int:
    """Checks the experts' weights and biases; returns the intermediate size."""
    check(dtype in _FLOATS, f"the rows are {dtype}; allowed: {', '.join(map(str, _FLOATS))}")
    check_tensor("w_down", w_down, shape=(None, hidden_size, None), dtypes=(dtype,), like=like)
    experts, _, intermediate = w_down.shape
    check_tensor("w_up", w_up, shape=(experts, 2 * intermediate, hidden_size), dtypes=(dtype,), like=like)
    for name, bias, width in (("b_up", b_up, 2 * intermediate), ("b_down", b_down, hidden_size)):
        if bias is not None:
            check_tensor(name, bias, shape=(experts, width), dtypes=_FLOATS, like=like)
            check(bias.stride(1) == 1, f"{name} has strides {bias.stride()}; allowed: last 1; call .contiguous()")
    return intermediate


_experts_op = register("experts_forward", _experts, mutates=("tickets", "y", "workspace"))
