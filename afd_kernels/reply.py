# SPDX-License-Identifier: Apache-2.0
"""Reply (FFN side): weighted sum over a row's local choices, written straight to the requester, then published.

The sum is in fp32 and in choice order. A choice with weight 0 is masked, not multiplied: what lies there is not read.
"""

from __future__ import annotations

import time

import torch
import triton
import triton.language as tl

from afd_kernels._op import (
    check,
    check_tensor,
    element_of,
    is_tracing,
    reference,
    register,
    runs_kernel,
    slot_pointer,
    workspace_for,
)
from afd_kernels.arrival import ExpertSchedule
from afd_kernels.launch import num_programs
from afd_kernels.message import HEADER_BYTES, MODE_ONLINE, Lane, ReplyLayout, tensor_at
from afd_kernels.signal import (
    _EXCHANGE,
    _LANE_FIELDS,
    _MODE,
    CLOCK_FIELDS,
    arrive_last,
    check_lanes,
    check_optional,
    global_timer,
    lane_word,
    ring,
    store_release,
)
from afd_kernels.signal_host import publish_host, ring_ref

REPLY_WORKSPACE = 16
_HEADER_BYTES = tl.constexpr(HEADER_BYTES)


@triton.jit
def weighted_row(y_ptr, weights, row, cols, H, TOP_K: tl.constexpr):
    """fp32 sum over the choices of one row: sum of ``weights[k] * y[row * TOP_K + k]`` where the weight is not 0."""
    acc = tl.zeros(cols.shape, tl.float32)
    for k in tl.static_range(TOP_K):
        weight = tl.load(weights + k)
        y = tl.load(y_ptr + (row * TOP_K + k) * H + cols, mask=cols < tl.where(weight != 0.0, H, 0), other=0.0)
        acc += weight * y.to(tl.float32)
    return acc


@triton.jit
def _reply_kernel(
    y_ptr, weight_address_ptr, lane_base_ptr, slots_ptr, lanes_ptr, bells_ptr, clock_ptr, counter_ptr, out_ptr, H,
    A: tl.constexpr, A_PAD: tl.constexpr, TOP_K: tl.constexpr, BLOCK_H: tl.constexpr, HAS_BELLS: tl.constexpr,
    HAS_CLOCK: tl.constexpr,
):  # fmt: skip
    if HAS_CLOCK:
        if tl.program_id(0) == 0:
            start = global_timer()
            tl.store(clock_ptr + 1, tl.load(clock_ptr + 1) + start - tl.load(clock_ptr + 3))
            tl.store(clock_ptr + 3, start)
    offs_a, offs_h = tl.arange(0, A_PAD), tl.arange(0, BLOCK_H)
    mask_a = offs_a < A
    starts = tl.load(lane_base_ptr + offs_a, mask=mask_a, other=0)
    ends = tl.load(lane_base_ptr + 1 + offs_a, mask=mask_a, other=2147483647)
    weight_addresses = tl.load(weight_address_ptr + offs_a, mask=mask_a, other=0)
    # a lane that went offline after its rows were merged: neither its weights nor its slot may be there any more
    online = tl.load(lanes_ptr + offs_a * _LANE_FIELDS + _MODE, mask=mask_a, other=0) == 1
    slots = tl.load(slots_ptr + offs_a, mask=mask_a & online, other=0)
    chunks = tl.cdiv(H, BLOCK_H)
    for work in range(tl.program_id(0), tl.load(lane_base_ptr + A) * chunks, tl.num_programs(0)):
        row = work // chunks
        cols = (work % chunks) * BLOCK_H + offs_h
        mine = offs_a == tl.sum((row >= ends).to(tl.int32), axis=0)
        local = (row - tl.sum(tl.where(mine, starts, 0), axis=0)).to(tl.int64)
        slot = tl.sum(tl.where(mine, slots, 0), axis=0)
        if slot != 0:
            weights = tl.sum(tl.where(mine, weight_addresses, 0), axis=0)
            weights = weights.to(tl.pointer_type(tl.float32)) + local * TOP_K
            acc = weighted_row(y_ptr, weights, row.to(tl.int64), cols, H, TOP_K)
            out = (slot_pointer(slot) + _HEADER_BYTES).to(tl.pointer_type(out_ptr.dtype.element_ty))
            tl.store(out + local * H + cols, acc.to(out_ptr.dtype.element_ty), mask=cols < H)
    if arrive_last(counter_ptr, tl.num_programs(0)):
        for a in range(A):
            lane_ptr = lanes_ptr + a * _LANE_FIELDS
            slot = tl.load(slots_ptr + a)
            if (tl.load(lane_ptr + _MODE) == 1) & (slot != 0):
                store_release(slot + 120, lane_word(lane_ptr))
                if HAS_BELLS:
                    ring(tl.load(bells_ptr + a), lane_word(lane_ptr))
                tl.store(lane_ptr + _EXCHANGE, tl.load(lane_ptr + _EXCHANGE) + 1)
        if HAS_CLOCK:
            end = global_timer()
            tl.store(clock_ptr + 2, tl.load(clock_ptr + 2) + end - tl.load(clock_ptr + 3, volatile=True))
            tl.store(clock_ptr + 3, end)


def reply(
    y: torch.Tensor,
    schedule: ExpertSchedule,
    reply_slots: torch.Tensor,
    lanes: torch.Tensor,
    layout: ReplyLayout,
    *,
    bells: torch.Tensor | None = None,
    clock: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> None:
    """Answers every online lane: writes its reply rows, publishes, and advances the lane's exchange.

    y: [cap_rows * top_k, H] as ``experts_forward`` wrote it. reply_slots: int64[A], addresses of the requesters' reply
    slots, multiples of 16, written. lanes: int64[A, 8], EXCHANGE advanced. layout: of the reply slots (its dtype may be
    float32).
    bells: int64[A], addresses of the requesters' doorbells (0: none), rung after the words (see ``wait``).
    clock: int64[4] that the wait wrote: [1] grows by the nanoseconds from its end to the start of this, [2] by those of
    this.
    workspace: uint8[``REPLY_WORKSPACE``], zeroed once. A lane with zero rows is answered too.
    """
    shape = (schedule.cap_rows * schedule.top_k, schedule.hidden_size)
    check_tensor("y", y, shape=shape, dtypes=(schedule.dtype,), like=y, contiguous=True)
    lanes_only = (schedule.num_lanes,)
    check_tensor("reply_slots", reply_slots, shape=lanes_only, dtypes=(torch.int64,), like=y, contiguous=True)
    check_tensor("lanes", lanes, shape=(schedule.num_lanes, 8), dtypes=(torch.int64,), like=y)
    check_lanes(lanes, reply_slots)
    check(
        layout.hidden_size == schedule.hidden_size,
        f"layout.hidden_size is {layout.hidden_size}; allowed: the schedule's {schedule.hidden_size}",
    )
    check_optional("bells", bells, schedule.num_lanes, torch.int64, y)
    check_optional("clock", clock, CLOCK_FIELDS, torch.int64, y)
    workspace = workspace_for(workspace, REPLY_WORKSPACE, y.device, "REPLY_WORKSPACE")
    args = (y, schedule.weight_address, schedule.lane_base, reply_slots, lanes, bells, clock, workspace, schedule.top_k,
            layout.cap_rows, layout.dtype)  # fmt: skip
    (_reply_op if is_tracing() else _reply)(*args)


def _reply(
    y: torch.Tensor, weight_address: torch.Tensor, lane_base: torch.Tensor, reply_slots: torch.Tensor,
    lanes: torch.Tensor, bells: torch.Tensor | None, clock: torch.Tensor | None, workspace: torch.Tensor, top_k: int,
    cap_rows: int, dtype: torch.dtype,
) -> None:  # fmt: skip
    num_lanes, hidden = reply_slots.numel(), y.shape[1]
    if not runs_kernel(y):
        layout = ReplyLayout(cap_rows, hidden, dtype)
        _answer(y, weight_address, lane_base, reply_slots, lanes, top_k, layout, bells, clock)
        return
    block_h = min(2048, triton.next_power_of_2(hidden))
    grid = num_programs(y.device, y.shape[0] // top_k * triton.cdiv(hidden, block_h), per_sm=4)
    _reply_kernel[(grid,)](
        y, weight_address, lane_base, reply_slots, lanes, bells, clock, workspace.view(torch.int32),
        element_of(dtype, y), hidden, A=num_lanes, A_PAD=triton.next_power_of_2(num_lanes), TOP_K=top_k,
        BLOCK_H=block_h, HAS_BELLS=bells is not None, HAS_CLOCK=clock is not None, num_warps=max(1, block_h // 256),
        enable_fp_fusion=True,
    )  # fmt: skip


@reference
def reply_ref(y, schedule, reply_slots, lanes, layout, *, bells=None, clock=None, workspace=None):
    """Plain-torch ``reply``."""
    _answer(y, schedule.weight_address, schedule.lane_base, reply_slots, lanes, schedule.top_k, layout, bells, clock)


def _answer(y, weight_address, lane_base, reply_slots, lanes, top_k, layout, bells=None, clock=None):
    start = time.monotonic_ns()
    bases = lane_base.tolist()
    for lane, (address, state) in enumerate(zip(reply_slots.tolist(), lanes.tolist(), strict=True)):
        if address == 0 or state[Lane.MODE] != MODE_ONLINE:
            continue
        rows = bases[lane + 1] - bases[lane]
        slot = layout.views(tensor_at(address, layout.nbytes, y.device))
        if rows:
            weights = tensor_at(int(weight_address[lane]), 4 * rows * top_k, y.device).view(torch.float32)
            mine = y[bases[lane] * top_k : bases[lane + 1] * top_k].view(rows, top_k, -1)
            slot.rows[:rows] = weighted_sum_ref(mine, weights.view(rows, top_k)).to(layout.dtype)
        word = state[Lane.WORD] | state[Lane.EXCHANGE]
        if y.device.type == "cpu":
            publish_host(address, word)
        else:
            slot.signal.fill_(word)
        if bells is not None:
            ring_ref(int(bells[lane]), word, y.device)
        lanes[lane, Lane.EXCHANGE] += 1
    if clock is not None:
        end = time.monotonic_ns()
        clock += torch.tensor([0, start - int(clock[3]), end - start, end - int(clock[3])], device=clock.device)


@reference
def weighted_sum_ref(y, weights):
    """sum over choices of weights[M, k] * y[M, k, H] in fp32, in choice order; a choice with weight 0 is masked."""
    out = torch.zeros(y.shape[0], y.shape[2], dtype=torch.float32, device=y.device)
    for k in range(y.shape[1]):
        out += torch.where(weights[:, k, None] != 0, weights[:, k, None] * y[:, k].float(), 0.0)
    return out


_reply_op = register("reply", _reply, mutates=("lanes", "clock", "workspace"))
