# SPDX-License-Identifier: Apache-2.0
"""Signals: publish a word in a peer's slot, wait for words in one's own, with abort and time limit.

A signal word is session | step | exchange (``message.signal_word``). A waiter passes on equality. A word of another
session, or a newer one of the same session, is a protocol error and is reported at once; an older one is waited out.

Ranks of different processes on one GPU add a *doorbell*, an int32 that the waiting stream waits for in front of the
wait kernel: one that spins would share the GPU by time slices with the very process that it waits for. The producer
publishes, then rings; the wait kernel passes once it has seen both, and silences the bell. Bit 1 of a bell is the
waiting side's own: nobody will ring (the lane takes no part), or a watchdog lets the stream pass so that the kernel can
look (``open_bells``). ``models/doorbell.pml`` shows that no ring is lost.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from afd_kernels._op import INTERPRETED, check, check_tensor, is_tracing, register, runs_kernel
from afd_kernels.message import LANE_FIELDS, SIGNAL_OFFSET, Lane
from afd_kernels.signal_host import BELL_OPEN, wait_ref

_INTERPRETED = tl.constexpr(INTERPRETED)
_SIGNAL_OFFSET = tl.constexpr(SIGNAL_OFFSET)
_WORD = tl.constexpr(int(Lane.WORD))
_EXCHANGE = tl.constexpr(int(Lane.EXCHANGE))
_MODE = tl.constexpr(int(Lane.MODE))
_ROWS = tl.constexpr(int(Lane.ROWS))
_LANE_FIELDS = tl.constexpr(LANE_FIELDS)
_SESSION_BITS = tl.constexpr(48)
_BELOW_SESSION = tl.constexpr((1 << 48) - 1)
_BELL_OPEN = tl.constexpr(BELL_OPEN)
CLOCK_FIELDS = 4
ABORT_EVERY = 64
INTERPRETER_POLLS = 64


@triton.jit
def store_release(address, word):
    """System-scope release store of one 64-bit word at an int64 address."""
    if _INTERPRETED:
        tl.atomic_xchg(address.to(tl.pointer_type(tl.int64)), word)
    else:
        tl.inline_asm_elementwise(
            "st.release.sys.global.u64 [$1], $2; mov.u32 $0, 0;",
            "=r,l,l",
            [address, word],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def bell_of(word):
    """What a doorbell holds once the exchange of ``word`` was published: odd, positive, of int32."""
    return (((word & 0xFFFFFF) << 2) | 1).to(tl.int32)


@triton.jit
def ring(address, word):
    """System-scope release store of a word's ring at an int64 address (0: nobody listens)."""
    if address != 0:
        if _INTERPRETED:
            tl.atomic_xchg(address.to(tl.pointer_type(tl.int32)), bell_of(word))
        else:
            tl.inline_asm_elementwise(
                "st.release.sys.global.u32 [$1], $2; mov.u32 $0, 0;",
                "=r,l,r",
                [address, bell_of(word)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def load_acquire(address):
    """System-scope acquire load of 64-bit words at int64 addresses."""
    if _INTERPRETED:
        return tl.load(address.to(tl.pointer_type(tl.int64)))
    else:
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.u64 $0, [$1];", "=l,l", [address], dtype=tl.int64, is_pure=False, pack=1
        )


@triton.jit
def global_timer():
    """Nanoseconds of a clock that all SMs share; 0 in the interpreter."""
    if _INTERPRETED:
        return tl.full((), 0, tl.int64)
    else:
        return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def arrive_last(counter_ptr, num_programs):
    """Block barrier, then a gpu-scope acq_rel arrival; True in the grid's last program, which resets the counter."""
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    last = arrived == num_programs - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit
def lane_word(lane_ptr):
    """The word that the lane publishes or expects in its current exchange."""
    return tl.load(lane_ptr + _WORD) | tl.load(lane_ptr + _EXCHANGE)


@triton.jit(do_not_specialize=["limit", "D"])
def _wait_kernel(
    slots_ptr, lanes_ptr, abort_ptr, status_ptr, bells_ptr, clock_ptr, limit, D,
    PER_LANE: tl.constexpr, LANE_STRIDE: tl.constexpr, D_PAD: tl.constexpr, ABORT_EVERY: tl.constexpr,
    HAS_BELLS: tl.constexpr, HAS_CLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.arange(0, D_PAD)
    mask = offs < D
    lane = lanes_ptr + offs * LANE_STRIDE
    slot = tl.load(slots_ptr + offs, mask=mask, other=0)
    waited = mask & (slot != 0) & (tl.load(lane + _MODE, mask=mask, other=0) == 1)
    expected = tl.load(lane + _WORD, mask=mask, other=0) | tl.load(lane + _EXCHANGE, mask=mask, other=0)
    # a lane that is not waited for polls the first waited slot: every thread of the vector loads some valid word
    any_slot = tl.max(tl.where(waited, slot, 0), axis=0)
    address = tl.where(waited, slot, any_slot) + _SIGNAL_OFFSET
    polls = tl.full((), 0, tl.int64)
    if _INTERPRETED:
        start = polls
    else:
        start = global_timer()
    pending = tl.sum(waited.to(tl.int32), axis=0)
    while pending > 0:  # only scalars are carried: triton 3.6 cannot lower vectors here
        observed = load_acquire(address)
        # a lane that failed was set offline below
        online = tl.load(lane + _MODE, mask=waited, other=0, volatile=True) == 1
        there = observed == expected
        if HAS_BELLS:  # a ring that came after its word was seen would let the next wait pass too early
            bell = tl.load(bells_ptr + offs, mask=waited, other=0, volatile=True)
            there = there & ((bell & ~_BELL_OPEN) == bell_of(expected))
        missing = waited & online & (there == 0)
        foreign = (observed != 0) & ((observed >> _SESSION_BITS) != (expected >> _SESSION_BITS))
        newer = (observed & _BELOW_SESSION) > (expected & _BELOW_SESSION)
        wrong = missing & (foreign | newer)
        pending = tl.sum(missing.to(tl.int32), axis=0)
        polls += 1
        if _INTERPRETED:
            now = polls
        else:
            now = global_timer()
        code = tl.where(wrong, 3, tl.where(now - start > limit, 1, 0))
        if polls % ABORT_EVERY == 0:
            flag = tl.load(abort_ptr + offs * PER_LANE, mask=missing, other=0, volatile=True)
            code = tl.where((flag != 0) & (wrong == 0), 2, code)
        failed = missing & (code != 0)
        num_failed = tl.sum(failed.to(tl.int32), axis=0)
        if num_failed > 0:
            if PER_LANE:
                cell = status_ptr + offs * _LANE_FIELDS
                tl.store(lane + _MODE, 0, mask=failed)
                pending -= num_failed
            else:  # the first that is wrong, or else the first that is missing, ends the wait
                any_wrong = tl.sum(wrong.to(tl.int32), axis=0) > 0
                first = tl.min(tl.where(wrong | (failed & (any_wrong == 0)), offs, D_PAD), axis=0)
                failed = offs == first
                cell = status_ptr + offs * 0
                tl.store(lane + _MODE, 0, mask=failed)
                pending = 0
            tl.store(cell + 1, offs.to(tl.int64), mask=failed)
            tl.store(cell + 2, expected, mask=failed)
            tl.store(cell + 3, observed, mask=failed)
            tl.store(cell, code.to(tl.int64), mask=failed)
    if HAS_BELLS:
        passed = waited & (tl.load(lane + _MODE, mask=waited, other=0, volatile=True) == 1)
        tl.store(bells_ptr + offs, tl.zeros((D_PAD,), tl.int32), mask=passed)
        tl.atomic_or(bells_ptr + offs, _BELL_OPEN, mask=mask & (passed == 0), scope="sys")
    if HAS_CLOCK:
        end = global_timer()
        if _INTERPRETED:
            tl.store(clock_ptr, tl.load(clock_ptr) + polls)
        else:
            tl.store(clock_ptr, tl.load(clock_ptr) + end - start)
        tl.store(clock_ptr + 3, end)


def wait(
    slots: torch.Tensor,
    lanes: torch.Tensor,
    *,
    abort: torch.Tensor,
    status: torch.Tensor,
    timeout_s: float,
    bells: torch.Tensor | None = None,
    clock: torch.Tensor | None = None,
) -> None:
    """Waits until every online peer's slot holds the word its lane expects (``WORD | EXCHANGE``).

    slots: int64[D], addresses of slots (0: no such peer). lanes: int64[8] (one lane, all peers) or int64[D, 8]; a lane
    whose wait failed is set offline.
    status: int64[8], written where a wait failed (``Status``), and the first failure ends the wait; or int64[D, 8], one
    cell for each lane, and the wait goes on for the others. abort: int32[1], or int32[D] beside int64[D, 8]; a non-zero
    value ends the wait. Both may lie in pinned host memory. timeout_s: seconds by the device clock; the interpreter
    counts polls instead.
    bells: int32[D], this side's doorbells: the peers ring them, and the stream has waited until each was above 0. The
    wait passes once it has seen word and ring, and leaves the bell at 0, or open where no ring is to come any more.
    clock: int64[4], [0] grows by the nanoseconds waited, [3] is when the wait ended.
    """
    _check_wait(slots, lanes, abort, status, timeout_s)
    check(
        bells is None or status.dim() == lanes.dim(),
        "status is int64[8] for int64[D, 8] lanes with bells; pass a cell each",
    )
    check_optional("bells", bells, slots.numel(), torch.int32, slots)
    check_optional("clock", clock, CLOCK_FIELDS, torch.int64, slots)
    args = slots, lanes, abort, status, float(timeout_s), bells, clock
    (_wait_op if is_tracing() else _wait)(*args)


def _wait(
    slots: torch.Tensor, lanes: torch.Tensor, abort: torch.Tensor, status: torch.Tensor, timeout_s: float,
    bells: torch.Tensor | None, clock: torch.Tensor | None,
) -> None:  # fmt: skip
    if slots.numel() == 0:
        return
    if not runs_kernel(slots):
        wait_ref(slots, lanes, abort=abort, status=status, timeout_s=timeout_s, bells=bells, clock=clock)
        return
    limit = INTERPRETER_POLLS if INTERPRETED else int(timeout_s * 1e9)
    _wait_kernel[(1,)](
        slots, lanes, abort, status, bells, clock, limit, slots.numel(), PER_LANE=status.dim() == 2,
        LANE_STRIDE=LANE_FIELDS if lanes.dim() == 2 else 0, D_PAD=max(32, triton.next_power_of_2(slots.numel())),
        ABORT_EVERY=ABORT_EVERY, HAS_BELLS=bells is not None, HAS_CLOCK=clock is not None, num_warps=1,
        enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["D"])
def _open_kernel(bells_ptr, D, D_PAD: tl.constexpr):
    offs = tl.arange(0, D_PAD)
    tl.atomic_or(bells_ptr + offs, _BELL_OPEN, mask=offs < D, scope="sys")


def open_bells(bells: torch.Tensor) -> None:
    """Opens doorbells, in stream order; a ring that has come already is kept. bells: int32[D], written."""
    check_optional("bells", bells, bells.numel(), torch.int32, bells)
    if runs_kernel(bells):
        size = bells.numel()
        _open_kernel[(1,)](bells, size, D_PAD=triton.next_power_of_2(max(1, size)), num_warps=1, enable_fp_fusion=True)
    else:
        bells |= BELL_OPEN


def _check_wait(
    slots: torch.Tensor, lanes: torch.Tensor, abort: torch.Tensor, status: torch.Tensor, timeout_s: float
) -> None:
    check_tensor("slots", slots, shape=(None,), dtypes=(torch.int64,), like=slots, contiguous=True)
    check_lanes(lanes, slots)
    per_lane = status.dim() == 2
    check(not per_lane or lanes.dim() == 2, "status is int64[D, 8] for one lane; allowed: int64[8]")
    check_host_cell("abort", abort, (slots.numel() if per_lane else 1,), torch.int32, slots)
    check_host_cell("status", status, (slots.numel(), LANE_FIELDS) if per_lane else (LANE_FIELDS,), torch.int64, slots)
    check(timeout_s > 0, f"timeout_s is {timeout_s}; allowed: above 0 seconds")


def check_optional(name: str, tensor: torch.Tensor | None, size: int, dtype: torch.dtype, like: torch.Tensor) -> None:
    """Checks an optional contiguous vector on the device of ``like``."""
    if tensor is not None:
        check_tensor(name, tensor, shape=(size,), dtypes=(dtype,), like=like, contiguous=True)


def check_host_cell(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, slots: torch.Tensor
) -> None:
    """Checks an abort flag or a status cell: on the slots' device, or in pinned host memory."""
    host = tensor.device.type == "cpu" and slots.is_cuda and tensor.is_pinned()
    check_tensor(name, tensor, shape=shape, dtypes=(dtype,), like=tensor if host else slots, contiguous=True)


def check_lanes(lanes: torch.Tensor, slots: torch.Tensor, *, one: bool = False) -> None:
    """Checks a lane state: int64[8], or (unless ``one``) int64[D, 8] for D slots."""
    shape = (LANE_FIELDS,) if one or lanes.dim() == 1 else (slots.shape[0], LANE_FIELDS)
    check_tensor("lane" if one else "lanes", lanes, shape=shape, dtypes=(torch.int64,), like=slots)
    check(lanes.is_contiguous(), "lanes is not contiguous; allowed: contiguous int64[8] or int64[D, 8]")


_wait_op = register("wait", _wait, mutates=("lanes", "status", "bells", "clock"))
