# SPDX-License-Identifier: Apache-2.0
"""Steps: session, step, rows and slot addresses reach the device by value, in one small launch in stream order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from afd_kernels._op import check, check_tensor, runs_kernel
from afd_kernels.message import LANE_FIELDS, MODE_OFFLINE, MODE_ONLINE, Lane, signal_word
from afd_kernels.signal import _EXCHANGE, _LANE_FIELDS, _MODE, _ROWS, _WORD, check_lanes

MEMBERS_PER_LAUNCH = 4


@triton.jit(do_not_specialize=["word", "mode", "rows"])
def _begin_kernel(lane_ptr, word, mode, rows):
    offs = tl.arange(0, _LANE_FIELDS)
    state = tl.where(offs == _MODE, mode, tl.where(offs == _ROWS, rows, 0)).to(tl.int64)
    tl.store(lane_ptr + offs, tl.where(offs == _WORD, word, state))


def begin_step(lane: torch.Tensor, *, session: int, step: int, rows: int, mode: int = MODE_ONLINE) -> None:
    """Writes a lane's state for a new step, in stream order; the values travel in the launch.

    lane: int64[8], written; the exchange index restarts at 0. session: 16 bits. step: 32 bits. rows: 0 or more.
    mode: ``MODE_OFFLINE`` (sends nothing, combine writes zeros) or ``MODE_ONLINE``.
    """
    check_tensor("lane", lane, shape=(LANE_FIELDS,), dtypes=(torch.int64,), like=lane)
    allowed = f"{MODE_OFFLINE} (offline), {MODE_ONLINE} (online)"
    check(mode in (MODE_OFFLINE, MODE_ONLINE), f"mode is {mode}; allowed: {allowed}")
    check(rows >= 0, f"rows is {rows}; allowed: 0 or more")
    word = signal_word(session, step, 0)
    if runs_kernel(lane):
        _begin_kernel[(1,)](lane, word, mode, rows, num_warps=1, enable_fp_fusion=True)
        return
    state = torch.zeros(LANE_FIELDS, dtype=torch.int64)
    state[Lane.WORD], state[Lane.MODE], state[Lane.ROWS] = word, mode, rows
    lane.copy_(state)


class StepMember(NamedTuple):
    """A lane that takes part in a step. lane: its row in the tables; slot, reply_slot: addresses of its slots."""

    lane: int
    slot: int
    reply_slot: int
    session: int
    step: int
    rows: int


@triton.jit
def _select(offs, i0, i1, i2, i3, v0, v1, v2, v3):
    return tl.where(offs == i0, v0, tl.where(offs == i1, v1, tl.where(offs == i2, v2, tl.where(offs == i3, v3, 0))))


@triton.jit(
    do_not_specialize=["A", "clear", "i0", "i1", "i2", "i3", "s0", "s1", "s2", "s3", "r0", "r1", "r2", "r3",
                       "w0", "w1", "w2", "w3", "n0", "n1", "n2", "n3"]
)  # fmt: skip
def _enter_kernel(
    slots_ptr, reply_slots_ptr, lanes_ptr, A, clear,
    i0, i1, i2, i3, s0, s1, s2, s3, r0, r1, r2, r3, w0, w1, w2, w3, n0, n1, n2, n3, A_PAD: tl.constexpr,
):  # fmt: skip
    offs = tl.arange(0, A_PAD)
    member = (offs == i0) | (offs == i1) | (offs == i2) | (offs == i3)
    mask = (offs < A) & (member | (offs < tl.where(clear != 0, A, 0)))
    lane = lanes_ptr + offs * _LANE_FIELDS
    tl.store(slots_ptr + offs, _select(offs, i0, i1, i2, i3, s0, s1, s2, s3), mask=mask)
    tl.store(reply_slots_ptr + offs, _select(offs, i0, i1, i2, i3, r0, r1, r2, r3), mask=mask)
    tl.store(lane + _WORD, _select(offs, i0, i1, i2, i3, w0, w1, w2, w3), mask=mask)
    tl.store(lane + _EXCHANGE, tl.zeros((A_PAD,), tl.int64), mask=mask)
    tl.store(lane + _ROWS, _select(offs, i0, i1, i2, i3, n0, n1, n2, n3).to(tl.int64), mask=mask)
    tl.store(lane + _MODE, member.to(tl.int64), mask=mask)


def enter_step(
    slots: torch.Tensor, reply_slots: torch.Tensor, lanes: torch.Tensor, members: Sequence[StepMember]
) -> None:
    """Writes the tables of an FFN rank's stage for a new step: the members' lanes are online, all others offline.

    slots, reply_slots: int64[A], written (0 for a lane that takes no part). lanes: int64[A, 8], written.
    """
    shape = tuple(slots.shape)
    check_tensor("slots", slots, shape=(None,), dtypes=(torch.int64,), like=slots, contiguous=True)
    check_tensor("reply_slots", reply_slots, shape=shape, dtypes=(torch.int64,), like=slots, contiguous=True)
    check_tensor("lanes", lanes, shape=(slots.numel(), LANE_FIELDS), dtypes=(torch.int64,), like=slots)
    check_lanes(lanes, slots)
    for member in members:
        check(0 <= member.lane < slots.numel(), f"lane is {member.lane}; allowed: 0 … {slots.numel() - 1}")
    if not members or not runs_kernel(slots):
        enter_step_ref(slots, reply_slots, lanes, members)
        return
    pad = triton.next_power_of_2(slots.numel())
    for first in range(0, len(members), MEMBERS_PER_LAUNCH):
        part = list(members[first : first + MEMBERS_PER_LAUNCH])
        part += [part[0]] * (MEMBERS_PER_LAUNCH - len(part))
        words = [signal_word(m.session, m.step, 0) for m in part]
        _enter_kernel[(1,)](
            slots, reply_slots, lanes, slots.numel(), int(first == 0), *(m.lane for m in part),
            *(m.slot for m in part), *(m.reply_slot for m in part), *words, *(m.rows for m in part), A_PAD=pad,
            num_warps=1, enable_fp_fusion=True,
        )  # fmt: skip


def enter_step_ref(
    slots: torch.Tensor, reply_slots: torch.Tensor, lanes: torch.Tensor, members: Sequence[StepMember]
) -> None:
    """Plain-torch ``enter_step``."""
    for table in (slots, reply_slots, lanes):
        table.zero_()
    for member in members:
        slots[member.lane], reply_slots[member.lane] = member.slot, member.reply_slot
        begin_step(lanes[member.lane], session=member.session, step=member.step, rows=member.rows)
