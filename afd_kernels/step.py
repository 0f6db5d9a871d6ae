# SPDX-License-Identifier: Apache-2.0
"""Steps: session, step, rows and slot addresses reach the device in one small launch in stream order.

On the attention side by value (``begin_step``, in front of the step's layers or graph); on the FFN side through a
record in pinned host memory that the step's graph begins by reading (``enter_step``), so that a step is one launch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from afd_kernels._op import check, check_tensor, reference, runs_kernel
from afd_kernels.message import LANE_FIELDS, MODE_OFFLINE, MODE_ONLINE, Lane, signal_word
from afd_kernels.signal import (
    _BELL_OPEN,
    _EXCHANGE,
    _LANE_FIELDS,
    _MODE,
    _ROWS,
    _WORD,
    CLOCK_FIELDS,
    check_lanes,
    check_optional,
)
from afd_kernels.signal_host import BELL_OPEN

INBOX_FIELDS = 8
_INBOX_FIELDS = tl.constexpr(INBOX_FIELDS)


@triton.jit
def set_bells(bells, mask, member):
    """Doorbells of members wait for their ring, all others are open. A ring that has come already stays."""
    tl.atomic_and(bells, ~_BELL_OPEN, mask=mask & member, scope="sys")
    tl.atomic_or(bells, _BELL_OPEN, mask=mask & (member == 0), scope="sys")


@triton.jit(do_not_specialize=["word", "mode", "rows", "D"])
def _begin_kernel(lane_ptr, bells_ptr, word, mode, rows, D, D_PAD: tl.constexpr, HAS_BELLS: tl.constexpr):
    if HAS_BELLS:
        bell = tl.arange(0, D_PAD)
        set_bells(bells_ptr + bell, bell < D, bell < tl.where(mode == 1, D, 0))
    offs = tl.arange(0, _LANE_FIELDS)
    state = tl.where(offs == _MODE, mode, tl.where(offs == _ROWS, rows, 0)).to(tl.int64)
    tl.store(lane_ptr + offs, tl.where(offs == _WORD, word, state))


def begin_step(
    lane: torch.Tensor, *, session: int, step: int, rows: int, mode: int = MODE_ONLINE,
    bells: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Writes a lane's state for a new step, in stream order; the values travel in the launch.

    lane: int64[8], written; the exchange index restarts at 0. session: 16 bits. step: 32 bits. rows: 0 or more.
    mode: ``MODE_OFFLINE`` (sends nothing, combine writes zeros) or ``MODE_ONLINE``. bells: int32[D], this side's
    doorbells: opened offline, waiting for their rings online.
    """
    check_tensor("lane", lane, shape=(LANE_FIELDS,), dtypes=(torch.int64,), like=lane)
    allowed = f"{MODE_OFFLINE} (offline), {MODE_ONLINE} (online)"
    check(mode in (MODE_OFFLINE, MODE_ONLINE), f"mode is {mode}; allowed: {allowed}")
    check(rows >= 0, f"rows is {rows}; allowed: 0 or more")
    if bells is not None:
        check_optional("bells", bells, bells.numel(), torch.int32, lane)
    word = signal_word(session, step, 0)
    if runs_kernel(lane):
        size = 0 if bells is None else bells.numel()
        _begin_kernel[(1,)](
            lane, bells, word, mode, rows, size, D_PAD=triton.next_power_of_2(max(1, size)),
            HAS_BELLS=bells is not None, num_warps=1, enable_fp_fusion=True,
        )  # fmt: skip
        return
    if bells is not None:
        _set_bells_ref(bells, torch.full_like(bells, mode == MODE_ONLINE, dtype=torch.bool))
    state = torch.zeros(LANE_FIELDS, dtype=torch.int64)
    state[Lane.WORD], state[Lane.MODE], state[Lane.ROWS] = word, mode, rows
    lane.copy_(state)


class StepMember(NamedTuple):
    """A lane that takes part in a step. lane: its row in the tables; slot, reply_slot: addresses of its slots.

    bell: address of the requester's doorbell for the reply (0: none).
    """

    lane: int
    slot: int
    reply_slot: int
    session: int
    step: int
    rows: int
    bell: int = 0


def fill_inbox(inbox: torch.Tensor, members: Sequence[StepMember]) -> None:
    """Host: writes who takes part in the next step, for ``enter_step`` to read. The step before it has ended.

    inbox: int64[A, 8] in host memory (pinned, where the tables are on a GPU), written.
    """
    if inbox.dtype != torch.int64 or inbox.dim() != 2 or inbox.shape[1] != INBOX_FIELDS or inbox.is_cuda:
        given = f"{inbox.dtype}{list(inbox.shape)} on {inbox.device}"
        raise ValueError(f"inbox is {given}; allowed: int64[A, {INBOX_FIELDS}] in host memory")
    lanes = inbox.shape[0]
    values = [0] * (lanes * INBOX_FIELDS)
    for member in members:
        check(0 <= member.lane < lanes, f"lane is {member.lane}; allowed: 0 … {lanes - 1}")
        word = signal_word(member.session, member.step, 0)
        entry = member.slot, member.reply_slot, member.bell, word, member.rows, MODE_ONLINE
        first = member.lane * INBOX_FIELDS
        values[first : first + len(entry)] = entry
    (ctypes.c_int64 * len(values)).from_address(inbox.data_ptr())[:] = values  # type: ignore[assignment]


@triton.jit(do_not_specialize=["A"])
def _enter_kernel(
    inbox_ptr, slots_ptr, reply_slots_ptr, lanes_ptr, peer_bells_ptr, bells_ptr, A,
    A_PAD: tl.constexpr, HAS_BELLS: tl.constexpr,
):  # fmt: skip
    offs = tl.arange(0, A_PAD)
    mask = offs < A
    entry = inbox_ptr + offs * _INBOX_FIELDS
    lane = lanes_ptr + offs * _LANE_FIELDS
    mode = tl.load(entry + 5, mask=mask, other=0, volatile=True)
    tl.store(slots_ptr + offs, tl.load(entry, mask=mask, other=0, volatile=True), mask=mask)
    tl.store(reply_slots_ptr + offs, tl.load(entry + 1, mask=mask, other=0, volatile=True), mask=mask)
    tl.store(lane + _WORD, tl.load(entry + 3, mask=mask, other=0, volatile=True), mask=mask)
    tl.store(lane + _EXCHANGE, tl.zeros((A_PAD,), tl.int64), mask=mask)
    tl.store(lane + _ROWS, tl.load(entry + 4, mask=mask, other=0, volatile=True), mask=mask)
    tl.store(lane + _MODE, mode, mask=mask)
    if HAS_BELLS:
        tl.store(peer_bells_ptr + offs, tl.load(entry + 2, mask=mask, other=0, volatile=True), mask=mask)
        set_bells(bells_ptr + offs, mask, mode == 1)


def enter_step(
    inbox: torch.Tensor,
    slots: torch.Tensor,
    reply_slots: torch.Tensor,
    lanes: torch.Tensor,
    *,
    peer_bells: torch.Tensor | None = None,
    bells: torch.Tensor | None = None,
) -> None:
    """Writes the tables of an FFN rank's stage for a new step: the members' lanes are online, all others offline.

    It reads what ``fill_inbox`` wrote when it runs, so a captured graph may begin with it and serve every step.
    inbox: int64[A, 8] in host memory. slots, reply_slots: int64[A], written (0 for a lane that takes no part). lanes:
    int64[A, 8], written. peer_bells: int64[A], written: doorbells of the requesters. bells: int32[A], this side's own:
    those of lanes that take no part are opened, the others' wait for their ring.
    """
    size = slots.numel()
    check_tensor("slots", slots, shape=(None,), dtypes=(torch.int64,), like=slots, contiguous=True)
    check_tensor("reply_slots", reply_slots, shape=(size,), dtypes=(torch.int64,), like=slots, contiguous=True)
    check_tensor("lanes", lanes, shape=(size, LANE_FIELDS), dtypes=(torch.int64,), like=slots)
    check_lanes(lanes, slots)
    check_tensor("inbox", inbox, shape=(size, INBOX_FIELDS), dtypes=(torch.int64,), like=inbox, contiguous=True)
    check(
        not slots.is_cuda or (inbox.device.type == "cpu" and inbox.is_pinned()),
        "inbox is not in pinned host memory; allocate it with pin_memory=True",
    )
    check((bells is None) == (peer_bells is None), "bells and peer_bells belong together; pass both or neither")
    check_optional("bells", bells, size, torch.int32, slots)
    check_optional("peer_bells", peer_bells, size, torch.int64, slots)
    if not runs_kernel(slots):
        enter_step_ref(inbox, slots, reply_slots, lanes, peer_bells=peer_bells, bells=bells)
        return
    _enter_kernel[(1,)](
        inbox, slots, reply_slots, lanes, peer_bells, bells, size, A_PAD=triton.next_power_of_2(size),
        HAS_BELLS=bells is not None, num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip


@reference
def enter_step_ref(inbox, slots, reply_slots, lanes, *, peer_bells=None, bells=None):
    """Plain-torch ``enter_step``."""
    slots.copy_(inbox[:, 0])
    reply_slots.copy_(inbox[:, 1])
    lanes.zero_()
    for field, column in ((Lane.WORD, 3), (Lane.ROWS, 4), (Lane.MODE, 5)):
        lanes[:, field] = inbox[:, column]
    if bells is not None:
        peer_bells.copy_(inbox[:, 2])
        _set_bells_ref(bells, inbox[:, 5] == MODE_ONLINE)


def _set_bells_ref(bells, member):
    bells.copy_(torch.where(member, bells & ~BELL_OPEN, bells | BELL_OPEN))


@triton.jit(do_not_specialize=["size"])
def _leave_kernel(clocks_ptr, out_ptr, size, BLOCK: tl.constexpr):
    for first in range(0, size, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        tl.store(out_ptr + offs, tl.load(clocks_ptr + offs, mask=offs < size), mask=offs < size)


def leave_step(clocks: torch.Tensor, out: torch.Tensor) -> None:
    """Copies a stage's clocks into host memory, in stream order: a kernel, so that a step's graph has no other node.

    clocks: int64[layers, 4]. out: the same shape in host memory (pinned, where ``clocks`` are on a GPU), written.
    """
    check_tensor("clocks", clocks, shape=(None, CLOCK_FIELDS), dtypes=(torch.int64,), like=clocks, contiguous=True)
    check_tensor("out", out, shape=tuple(clocks.shape), dtypes=(torch.int64,), like=out, contiguous=True)
    check(not clocks.is_cuda or out.is_pinned(), "out is not in pinned host memory; allocate it with pin_memory=True")
    if runs_kernel(clocks):
        _leave_kernel[(1,)](clocks, out, clocks.numel(), BLOCK=256, num_warps=4, enable_fp_fusion=True)
    else:
        out.copy_(clocks)
