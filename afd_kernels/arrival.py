# SPDX-License-Identifier: Apache-2.0
"""Arrival (FFN side): merge the expert lists of all lanes into one schedule that the grouped GEMMs read.

Pair lists and rows stay where they arrived. The schedule holds, per expert, a prefix over lanes, and one table of row
tiles; everything is read on the device, so one captured sequence serves every layout. ``schedule_ref`` is its twin.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
import triton
import triton.language as tl

from afd_kernels._op import Carver, check, check_tensor, is_tracing, reference, register, runs_kernel, workspace_for
from afd_kernels.message import (
    LANE_FIELDS,
    MAGIC,
    MODE_OFFLINE,
    MODE_ONLINE,
    VERSION,
    Header,
    Lane,
    MessageLayout,
    tensor_at,
)
from afd_kernels.signal import _LANE_FIELDS, _MODE, _ROWS, check_host_cell, check_lanes
from afd_kernels.signal_host import Status, StatusCode

TILE_SHIFT = 10
_MAGIC = tl.constexpr(MAGIC)
_VERSION = tl.constexpr(VERSION)
_TILE_SHIFT = tl.constexpr(TILE_SHIFT)


@dataclass(frozen=True)
class ExpertSchedule:
    """Which rows each local expert reads, over all lanes: one ragged metadata object for both GEMMs and the reply.

    A: lanes. E: local experts. A merged row r of expert e belongs to the lane a with
    ``lane_prefix[e, a] <= r < lane_prefix[e, a + 1]``; its pair is entry ``lane_start[e, a] + r`` of that lane's list.

    row_address, pair_address, weight_address: int64[A], where each lane's rows, pairs and weights lie.
    lane_base: int32[A + 1], prefix of rows over lanes. lane_prefix: int32[E, A + 1]. lane_start: int32[E, A].
    expert_base: int32[E + 1], prefix of merged rows over experts. tiles: int32[cap_tiles], ``expert | tile << 10``.
    num_tiles: int32[1]. error: int32[A], 1 where a lane's header was refused (such a lane contributes nothing).
    tickets: int32[2], zero between launches: the GEMMs' programs take their tiles from it.
    Host constants: block_m, top_k, cap_rows and cap_pairs (over all lanes), hidden_size, row_stride (elements), dtype,
    row_alignment (bytes, of every lane's first row).
    """

    row_address: torch.Tensor
    pair_address: torch.Tensor
    weight_address: torch.Tensor
    lane_base: torch.Tensor
    lane_prefix: torch.Tensor
    lane_start: torch.Tensor
    expert_base: torch.Tensor
    tiles: torch.Tensor
    num_tiles: torch.Tensor
    error: torch.Tensor
    tickets: torch.Tensor
    block_m: int
    top_k: int
    cap_rows: int
    cap_pairs: int
    hidden_size: int
    row_stride: int
    dtype: torch.dtype
    row_alignment: int = 16

    @property
    def num_lanes(self) -> int:
        return self.row_address.numel()

    @property
    def num_experts(self) -> int:
        return self.expert_base.numel() - 1

    def tensors(self) -> list[torch.Tensor]:
        """What ``arrival`` writes, in declaration order."""
        return [self.row_address, self.pair_address, self.weight_address, self.lane_base, self.lane_prefix,
                self.lane_start, self.expert_base, self.tiles, self.num_tiles, self.error]  # fmt: skip


def schedule_bytes(num_lanes: int, layout: MessageLayout, block_m: int, max_rows: int | None = None) -> int:
    """Bytes of the buffer that ``new_schedule`` cuts up."""
    carver = Carver()
    _carve(carver, num_lanes, layout, block_m, max_rows)
    return carver.nbytes


def new_schedule(
    num_lanes: int, layout: MessageLayout, *, block_m: int, device: torch.device, row_stride: int | None = None,
    max_rows: int | None = None, workspace: torch.Tensor | None = None,
) -> ExpertSchedule:  # fmt: skip
    """An unfilled schedule for ``num_lanes`` lanes. block_m: rows of a GEMM tile, a power of two.

    max_rows: bound of the rows of all lanes together (default: full slots); lanes past it are refused on arrival.
    workspace: uint8[``schedule_bytes``(num_lanes, layout, block_m, max_rows)].
    """
    check(block_m >= 1 and block_m & (block_m - 1) == 0, f"block_m is {block_m}; allowed: a power of two")
    max_rows = num_lanes * layout.cap_rows if max_rows is None else max_rows
    nbytes = schedule_bytes(num_lanes, layout, block_m, max_rows)
    workspace = workspace_for(workspace, nbytes, device, "schedule_bytes")
    tensors = _carve(Carver(workspace), num_lanes, layout, block_m, max_rows)
    return ExpertSchedule(
        **_named(tensors), block_m=block_m, top_k=layout.top_k, cap_rows=max_rows,
        cap_pairs=max_rows * layout.top_k, hidden_size=layout.hidden_size,
        row_stride=layout.hidden_size if row_stride is None else row_stride, dtype=layout.dtype, row_alignment=16,
    )  # fmt: skip


_FIELDS = tuple(field.name for field in fields(ExpertSchedule))  # here: torch.compile does not trace ``fields``


def _named(tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip(_FIELDS, tensors, strict=False))


def _carve(
    carver: Carver, num_lanes: int, layout: MessageLayout, block_m: int, max_rows: int | None = None
) -> list[torch.Tensor]:
    experts = layout.num_experts
    rows = num_lanes * layout.cap_rows if max_rows is None else max_rows
    cap_tiles = triton.cdiv(rows * layout.top_k, block_m) + experts
    tickets = carver.take((2,), torch.int32)  # first: schedules of other sizes in the same memory have it there too
    return [
        carver.take((num_lanes,), torch.int64), carver.take((num_lanes,), torch.int64),
        carver.take((num_lanes,), torch.int64), carver.take((num_lanes + 1,), torch.int32),
        carver.take((experts, num_lanes + 1), torch.int32), carver.take((experts, num_lanes), torch.int32),
        carver.take((experts + 1,), torch.int32), carver.take((cap_tiles,), torch.int32),
        carver.take((1,), torch.int32), carver.take((num_lanes,), torch.int32), tickets,
    ]  # fmt: skip


@triton.jit(do_not_specialize=["cap_rows", "cap_pairs", "max_rows", "layer"])
def _merge_kernel(
    slots_ptr, lanes_ptr, x_ptr,
    row_address_ptr, pair_address_ptr, weight_address_ptr, lane_base_ptr, lane_prefix_ptr, lane_start_ptr,
    expert_base_ptr, tiles_ptr, num_tiles_ptr, error_ptr, status_ptr,
    A, E, cap_rows, cap_pairs, max_rows, layer, offsets_at, pairs_at, weights_at, rows_at,
    BLOCK_M: tl.constexpr, E_PAD: tl.constexpr, A_PAD: tl.constexpr, LOCAL: tl.constexpr, HAS_STATUS: tl.constexpr,
):  # fmt: skip
    # one program per expert; each computes the whole prefix (a few KB) and writes its own rows of it
    expert = tl.program_id(0)
    offs_e, offs_a = tl.arange(0, E_PAD), tl.arange(0, A_PAD)
    mask_a = offs_a < A
    if LOCAL:
        slot = slots_ptr.to(tl.int64) + tl.zeros((A_PAD,), tl.int64)
        active = mask_a
        bound = tl.zeros((A_PAD,), tl.int64) + cap_rows
    else:
        slot = tl.load(slots_ptr + offs_a, mask=mask_a, other=0)
        lane = lanes_ptr + offs_a * _LANE_FIELDS
        active = mask_a & (slot != 0) & (tl.load(lane + _MODE, mask=mask_a, other=0) == 1)
        bound = tl.minimum(tl.load(lane + _ROWS, mask=mask_a, other=0), cap_rows)
    header = slot.to(tl.pointer_type(tl.int32))
    sent = tl.load(header + 6, mask=active, other=0)
    pairs = tl.load(header + 7, mask=active, other=0)
    magic = tl.load(header, mask=active, other=0)
    version = tl.load(header + 1, mask=active, other=0)
    of_layer = tl.load(header + 4, mask=active, other=0)
    sound = (magic == _MAGIC) & (version == _VERSION) & (sent >= 0) & (sent <= bound)
    sound = sound & (pairs >= 0) & (pairs <= cap_pairs) & (of_layer == tl.where(layer < 0, of_layer, layer))
    so_far = tl.cumsum(tl.where(active, tl.minimum(tl.maximum(sent, 0), cap_rows), 0), axis=0)
    sound = sound & (so_far <= max_rows)
    error = active & (sound == 0)
    active = active & sound
    rows = tl.where(active, sent, 0)
    offsets = (slot + offsets_at).to(tl.pointer_type(tl.int32))
    mask = (offs_e[:, None] < E) & active[None, :]
    start = tl.load(offsets[None, :] + offs_e[:, None], mask=mask, other=0)  # [E_PAD, A_PAD]
    counts = tl.load(offsets[None, :] + offs_e[:, None] + 1, mask=mask, other=0) - start
    counts = tl.maximum(counts, 0)
    after = tl.cumsum(counts, axis=1)
    total = tl.sum(counts, axis=1)
    base = tl.cumsum(total, axis=0) - total
    num_tiles = (total + BLOCK_M - 1) // BLOCK_M
    first_tile = tl.cumsum(num_tiles, axis=0) - num_tiles
    mine = offs_e == expert
    row = mine[:, None] & mask_a[None, :]
    tl.store(lane_prefix_ptr + expert * (A + 1) + 1 + offs_a[None, :] + offs_e[:, None] * 0, after, mask=row)
    tl.store(lane_prefix_ptr + expert * (A + 1), 0)
    tl.store(lane_start_ptr + expert * A + offs_a[None, :] + offs_e[:, None] * 0, start - (after - counts), mask=row)
    tl.store(expert_base_ptr + expert + offs_e * 0, base, mask=mine)
    tile_at = tl.sum(tl.where(mine, first_tile, 0), axis=0)
    tiles_of = tl.sum(tl.where(mine, num_tiles, 0), axis=0)
    for first in range(0, tiles_of, 128):
        tile = first + tl.arange(0, 128)
        tl.store(tiles_ptr + tile_at + tile, expert | (tile << _TILE_SHIFT), mask=tile < tiles_of)
    if expert == 0:
        tl.store(expert_base_ptr + E, tl.sum(total, axis=0))
        tl.store(num_tiles_ptr, tl.sum(num_tiles, axis=0))
        tl.store(lane_base_ptr, 0)
        tl.store(lane_base_ptr + 1 + offs_a, tl.cumsum(rows, axis=0), mask=mask_a)
        tl.store(error_ptr + offs_a, error.to(tl.int32), mask=mask_a)
        if not LOCAL:  # programs that read this late leave the lane out as well
            tl.store(lane + _MODE, 0, mask=error)
        if HAS_STATUS:
            cell = status_ptr + offs_a * _LANE_FIELDS
            tl.store(cell + 1, offs_a.to(tl.int64), mask=error)
            tl.store(cell + 2, layer.to(tl.int64) + offs_a * 0, mask=error)
            tl.store(cell + 3, of_layer.to(tl.int64), mask=error)
            tl.store(cell + 4, sent.to(tl.int64), mask=error)
            tl.store(cell + 5, bound, mask=error)
            tl.store(cell, tl.full((A_PAD,), 4, tl.int64), mask=error)
        if LOCAL:
            row_address = x_ptr.to(tl.int64) + tl.zeros((A_PAD,), tl.int64)
        else:
            row_address = slot + rows_at
        tl.store(row_address_ptr + offs_a, row_address, mask=mask_a)
        tl.store(pair_address_ptr + offs_a, slot + pairs_at, mask=mask_a)
        tl.store(weight_address_ptr + offs_a, slot + weights_at, mask=mask_a)


def arrival(
    slots: torch.Tensor,
    lanes: torch.Tensor,
    layout: MessageLayout,
    *,
    block_m: int | None = None,
    schedule: ExpertSchedule | None = None,
    layer: int = -1,
    status: torch.Tensor | None = None,
) -> ExpertSchedule:
    """Merges the messages in the online lanes' request slots into one schedule. The words have been waited for.

    slots: int64[A], addresses of request slots in this device's memory (0: no such lane). lanes: int64[A, 8]; an
    offline lane contributes nothing. block_m: rows of a GEMM tile (default 16, or that of ``schedule``). schedule:
    written. layer: that the messages must be of (-1: any).
    A header of another magic, version or layer, with more rows than the lane announced (``lanes[a, ROWS]``) or the
    slot holds, or with more pairs than it holds, is refused: ``schedule.error`` is 1, the lane goes offline, and
    ``status`` (int64[A, 8], may lie in pinned host memory) says ``StatusCode.MALFORMED``, both layers and the rows.
    """
    check_tensor("slots", slots, shape=(None,), dtypes=(torch.int64,), like=slots, contiguous=True)
    check_tensor("lanes", lanes, shape=(slots.numel(), 8), dtypes=(torch.int64,), like=slots)
    check_lanes(lanes, slots)
    if schedule is None:
        schedule = new_schedule(slots.numel(), layout, block_m=block_m or 16, device=slots.device)
    check(
        block_m in (None, schedule.block_m) and schedule.num_lanes == slots.numel(),
        f"schedule is for {schedule.num_lanes} lanes and block_m {schedule.block_m}; "
        f"allowed: {slots.numel()} lanes, block_m {block_m}",
    )
    for name in ("num_experts", "top_k", "hidden_size", "dtype"):
        mine, theirs = getattr(schedule, name), getattr(layout, name)
        check(mine == theirs, f"schedule has {name} {mine}; allowed: the layout's {theirs}")
    if status is not None:
        check_host_cell("status", status, (slots.numel(), LANE_FIELDS), torch.int64, slots)
    args: tuple[Any, ...] = (slots, lanes, *schedule.tensors(), layout.num_experts, layout.cap_rows,
                             layout.top_k, layout.hidden_size, layout.dtype, schedule.block_m,
                             schedule.cap_rows, layer, status)  # fmt: skip
    (_arrival_op if is_tracing() else _arrival)(*args)
    return schedule


def launch_merge(
    slots: torch.Tensor, lanes: torch.Tensor, x: torch.Tensor, tensors: list[torch.Tensor], layout: MessageLayout,
    block_m: int, *, local: bool, max_rows: int | None = None, layer: int = -1, status: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """The merge kernel. local: ``slots`` is the memory of the one slot itself, and its rows are those of ``x``."""
    num_lanes = tensors[0].numel()
    _merge_kernel[(layout.num_experts,)](
        slots, lanes, x, *tensors, status, num_lanes, layout.num_experts, layout.cap_rows,
        layout.cap_rows * layout.top_k, num_lanes * layout.cap_rows if max_rows is None else max_rows, layer,
        layout.offset("expert_offsets"), layout.offset("pairs"), layout.offset("weights"), layout.offset("rows"),
        BLOCK_M=block_m, E_PAD=triton.next_power_of_2(layout.num_experts), A_PAD=triton.next_power_of_2(num_lanes),
        LOCAL=local, HAS_STATUS=status is not None, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def _arrival(
    slots: torch.Tensor, lanes: torch.Tensor, row_address: torch.Tensor, pair_address: torch.Tensor,
    weight_address: torch.Tensor, lane_base: torch.Tensor, lane_prefix: torch.Tensor, lane_start: torch.Tensor,
    expert_base: torch.Tensor, tiles: torch.Tensor, num_tiles: torch.Tensor, error: torch.Tensor, num_experts: int,
    cap_rows: int, top_k: int, hidden_size: int, dtype: torch.dtype, block_m: int, max_rows: int,
    layer: int, status: torch.Tensor | None,
) -> None:  # fmt: skip
    layout = MessageLayout(num_experts, cap_rows, top_k, hidden_size, dtype)
    tensors = [row_address, pair_address, weight_address, lane_base, lane_prefix, lane_start, expert_base, tiles,
               num_tiles, error]  # fmt: skip
    if runs_kernel(slots):
        launch_merge(
            slots, lanes, slots, tensors, layout, block_m, local=False, max_rows=max_rows, layer=layer, status=status
        )
    else:
        _fill(slots, lanes, layout, tensors, block_m, max_rows=max_rows, layer=layer, status=status)


@reference
def arrival_ref(slots, lanes, layout, *, block_m=None, schedule=None, layer=-1, status=None):
    """Plain-torch ``arrival``."""
    if schedule is None:
        schedule = new_schedule(slots.numel(), layout, block_m=block_m or 16, device=slots.device)
    _fill(slots, lanes, layout, schedule.tensors(), schedule.block_m, max_rows=schedule.cap_rows, layer=layer,
          status=status)  # fmt: skip
    return schedule


def _fill(slots, lanes, layout, tensors, block_m, max_rows=None, layer=-1, status=None):
    """Fills the schedule's tensors in place."""
    row_address, pair_address, weight_address, lane_base, lane_prefix, lane_start, expert_base = tensors[:7]
    tiles, num_tiles, error = tensors[7:]
    num_lanes, experts = row_address.numel(), layout.num_experts
    counts = torch.zeros(experts, num_lanes, dtype=torch.int64)
    starts, rows = torch.zeros_like(counts), torch.zeros(num_lanes, dtype=torch.int64)
    error.zero_()
    left = num_lanes * layout.cap_rows if max_rows is None else max_rows
    for lane, (address, state) in enumerate(zip(slots.tolist(), lanes.tolist(), strict=True)):
        if address == 0 or state[Lane.MODE] != MODE_ONLINE:
            continue
        message = layout.views(tensor_at(address, layout.nbytes, slots.device))
        header = message.header.tolist()
        sound = header[Header.MAGIC] == MAGIC and header[Header.VERSION] == VERSION
        sound = sound and 0 <= header[Header.ROWS] <= min(state[Lane.ROWS], layout.cap_rows)
        sound = sound and layer in (-1, header[Header.LAYER])
        left -= min(max(header[Header.ROWS], 0), layout.cap_rows)
        sound = sound and left >= 0
        if not (sound and 0 <= header[Header.PAIRS] <= layout.cap_rows * layout.top_k):
            error[lane], lanes[lane, Lane.MODE] = 1, MODE_OFFLINE
            if status is not None:
                bound = min(state[Lane.ROWS], layout.cap_rows)
                status[lane, 1:6] = torch.tensor([lane, layer, header[Header.LAYER], header[Header.ROWS], bound])
                status[lane, Status.CODE] = int(StatusCode.MALFORMED)
            continue
        offsets = message.expert_offsets.cpu().long()
        starts[:, lane], counts[:, lane] = offsets[:-1], (offsets[1:] - offsets[:-1]).clamp(min=0)
        rows[lane] = header[Header.ROWS]
    for offset, target in (("rows", row_address), ("pairs", pair_address), ("weights", weight_address)):
        target.copy_(slots + layout.offset(offset))
    lane_base[0], lane_prefix[:, 0], expert_base[0] = 0, 0, 0
    lane_base[1:] = rows.cumsum(0)
    lane_prefix[:, 1:] = counts.cumsum(1)
    lane_start.copy_(starts - (counts.cumsum(1) - counts))
    totals = counts.sum(1)
    expert_base[1:] = totals.cumsum(0)
    tiles_of = (totals + block_m - 1) // block_m
    entries = [e | t << TILE_SHIFT for e, n in enumerate(tiles_of.tolist()) for t in range(n)]
    num_tiles[0] = len(entries)
    tiles[: len(entries)] = torch.tensor(entries, dtype=torch.int32)


_arrival_op = register("arrival", _arrival, mutates=(
    "row_address", "pair_address", "weight_address", "lane_base", "lane_prefix", "lane_start", "expert_base", "tiles",
    "num_tiles", "error", "lanes", "status",
))  # fmt: skip
