# SPDX-License-Identifier: Apache-2.0
"""Combine (attention side): sum of the peers' reply rows in a fixed order in fp32, then cast. Bitwise repeatable."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from afd_kernels._op import check, check_tensor, element_of, is_tracing, reference, register, runs_kernel, slot_pointer
from afd_kernels.message import HEADER_BYTES, MODE_ONLINE, Lane, ReplyLayout, tensor_at
from afd_kernels.signal import _EXCHANGE, _MODE, check_lanes

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_HEADER_BYTES = tl.constexpr(HEADER_BYTES)


@triton.jit(do_not_specialize=["num_tokens"])
def _combine_kernel(
    slots_ptr, row_map_ptr, lane_ptr, reply_ptr, out_ptr, num_tokens, H, stride_om,
    D: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    online = tl.load(lane_ptr + _MODE) == 1
    acc = tl.zeros((BLOCK_H,), tl.float32)
    for d in tl.static_range(D):
        row = tl.load(row_map_ptr + d * num_tokens + token, mask=token < num_tokens, other=-1).to(tl.int64)
        rows = slot_pointer(tl.load(slots_ptr + d)) + _HEADER_BYTES
        rows = rows.to(tl.pointer_type(reply_ptr.dtype.element_ty))
        limit = tl.where((row >= 0) & online, H, 0)
        acc += tl.load(rows + row * H + cols, mask=cols < limit, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + token * stride_om + cols,
        acc.to(out_ptr.dtype.element_ty),
        mask=cols < tl.where(token < num_tokens, H, 0),
    )
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & online:
        tl.store(lane_ptr + _EXCHANGE, tl.load(lane_ptr + _EXCHANGE) + 1)


def combine(
    reply_slots: torch.Tensor,
    row_map: torch.Tensor,
    layout: ReplyLayout,
    lane: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Adds up what the peers computed for each token. The words have been waited for.

    reply_slots: int64[D], addresses of the reply slots in this device's memory, multiples of 16. row_map: int32[D, M]
    from ``dispatch``.
    lane: int64[8], EXCHANGE advanced; offline writes zeros. out: [M, H], every row written (zeros for a token that no
    peer computed). dtype: of a new ``out`` (default: that of the replies). Returns out.
    """
    shape: tuple[int | None, ...] = (reply_slots.numel(), None)
    check_tensor("row_map", row_map, shape=shape, dtypes=(torch.int32,), like=row_map, contiguous=True)
    check_tensor("reply_slots", reply_slots, shape=(None,), dtypes=(torch.int64,), like=row_map, contiguous=True)
    check_lanes(lane, reply_slots, one=True)
    if out is None:
        shape = (row_map.shape[1], layout.hidden_size)
        out = torch.empty(shape, dtype=dtype or layout.dtype, device=row_map.device)
    check_tensor("out", out, shape=(row_map.shape[1], layout.hidden_size), dtypes=_FLOATS, like=row_map)
    check(out.shape[1] == 1 or out.stride(1) == 1, f"out has strides {out.stride()}; allowed: last 1")
    args = (reply_slots, row_map, lane, out, layout.cap_rows, layout.dtype)
    (_combine_op if is_tracing() else _combine)(*args)
    return out


def _combine(
    reply_slots: torch.Tensor, row_map: torch.Tensor, lane: torch.Tensor, out: torch.Tensor, cap_rows: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    num_tokens, hidden = out.shape
    if not runs_kernel(out):
        combine_ref(reply_slots, row_map, ReplyLayout(cap_rows, hidden, dtype), lane, out=out)
        return
    block_h = min(1024, triton.next_power_of_2(hidden))
    _combine_kernel[(max(1, num_tokens), triton.cdiv(hidden, block_h))](
        reply_slots, row_map, lane, element_of(dtype, out), out, num_tokens, hidden, out.stride(0),
        D=reply_slots.numel(),
        BLOCK_H=block_h, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@reference
def combine_ref(reply_slots, row_map, layout, lane, *, out=None, dtype=None):
    """Plain-torch ``combine``."""
    num_tokens = row_map.shape[1]
    if out is None:
        shape = (num_tokens, layout.hidden_size)
        out = torch.empty(shape, dtype=dtype or layout.dtype, device=row_map.device)
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    if int(lane[Lane.MODE]) == MODE_ONLINE:
        for address, rows in zip(reply_slots.tolist(), row_map.long(), strict=True):
            replies = layout.views(tensor_at(address, layout.nbytes, out.device)).rows
            sent = (rows >= 0).nonzero().squeeze(1)
            total[sent] += replies[rows[sent]].float()
        lane[Lane.EXCHANGE] += 1
    return out.copy_(total)


_combine_op = register("combine", _combine, mutates=("lane", "out"))
