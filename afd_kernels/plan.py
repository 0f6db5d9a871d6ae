# SPDX-License-Identifier: Apache-2.0
"""The plan of a large batch: which row goes where, for each peer's experts. A stable counting sort in three launches.

Count (experts of a block of tokens), scan (over blocks), write (pair lists, weights, row map). No atomic decides an
order: lists are sorted by local expert, then by token. ``dispatch`` plans into the peers' slots, ``fused_experts`` into
memory of its own. A small batch is planned in one launch (``small_plan``), with the same result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from afd_kernels._op import Carver
from afd_kernels.message import MAGIC, VERSION, MessageLayout
from afd_kernels.signal import _MODE, _ROWS, lane_word

PAIRS_PER_BLOCK = 128
_H_MAGIC = tl.constexpr(MAGIC)
_H_VERSION = tl.constexpr(VERSION)


def tokens_per_block(top_k: int) -> int:
    """Tokens that one program of the plan kernels handles."""
    return PAIRS_PER_BLOCK // triton.next_power_of_2(top_k)


@triton.jit
def slot_address(slots_ptr, peer, LOCAL: tl.constexpr):
    """int64 address of a peer's slot: an entry of the table, or (LOCAL) the given memory itself."""
    if LOCAL:
        return slots_ptr.to(tl.int64)
    else:
        return tl.load(slots_ptr + peer)


@triton.jit
def is_online(lane_ptr, LOCAL: tl.constexpr):
    if LOCAL:
        return tl.full((), 1, tl.int64) == 1
    else:
        return tl.load(lane_ptr + _MODE) == 1


@triton.jit
def rows_of_step(lane_ptr, num_tokens, LOCAL: tl.constexpr):
    if LOCAL:
        return num_tokens
    else:
        rows = tl.minimum(tl.load(lane_ptr + _ROWS), num_tokens).to(tl.int32)
        return tl.where(is_online(lane_ptr, LOCAL), rows, 0)


@triton.jit
def choices(ids_ptr, weights_ptr, bucket_ptr, token, rows, E, NB, TOP_K: tl.constexpr, K_PAD: tl.constexpr):
    """[T, K_PAD] bucket (peer * local experts + local expert) and weight of each choice of T tokens.

    A choice that is sent nowhere has bucket NB and weight 0.
    """
    offs_k = tl.arange(0, K_PAD)
    mask = (token[:, None] < rows) & (offs_k[None, :] < TOP_K)
    at = token.to(tl.int64)[:, None] * TOP_K + offs_k[None, :]
    ids = tl.load(ids_ptr + at, mask=mask, other=-1)
    weight = tl.load(weights_ptr + at, mask=mask, other=0.0)
    real = mask & (ids >= 0) & (ids < E) & (weight != 0.0)
    bucket = tl.load(bucket_ptr + ids, mask=real, other=-1)
    real = real & (bucket >= 0) & (bucket < NB)
    return tl.where(real, bucket, NB), tl.where(real, weight, 0.0)


@triton.jit
def write_peer(
    slots_ptr, lane_ptr, sent_ptr, d, totals, rows, num_tokens, E_LOCAL, offsets_at, layer,
    E_PAD: tl.constexpr, LOCAL: tl.constexpr, HAS_SENT: tl.constexpr,
):  # fmt: skip
    """Writes one peer's expert offsets and header, and adds to the rows sent. Returns where its lists start: [E_PAD].

    totals: [E_PAD], pairs of each local expert, 0 past them. rows: of the message.
    """
    offs_e = tl.arange(0, E_PAD)
    starts = tl.cumsum(totals, axis=0) - totals
    online = is_online(lane_ptr, LOCAL)
    if HAS_SENT:
        tl.store(sent_ptr + d, tl.load(sent_ptr + d) + tl.where(online, rows, 0))
    slot = slot_address(slots_ptr, d, LOCAL)
    offsets = (slot + offsets_at).to(tl.pointer_type(tl.int32))
    tl.store(offsets + offs_e, starts, mask=offs_e < tl.where(online, E_LOCAL + 1, 0))
    header = slot.to(tl.pointer_type(tl.int32))
    if LOCAL:
        word = tl.zeros((), tl.int64)
    else:
        word = lane_word(lane_ptr)
    h = tl.arange(0, 16)
    value = tl.where(h == 0, _H_MAGIC, tl.where(h == 1, _H_VERSION, tl.where(h == 4, layer, 0)))
    value = tl.where(h == 2, ((word >> 48) & 0xFFFF).to(tl.int32), value)
    value = tl.where(h == 3, ((word >> 16) & 0xFFFFFFFF).to(tl.int32), value)
    value = tl.where(h == 5, (word & 0xFFFF).to(tl.int32), value)
    value = tl.where(h == 6, tl.where(LOCAL, num_tokens, rows), value)
    value = tl.where(h == 7, tl.sum(totals, axis=0), value)
    tl.store(header + h, value, mask=h < tl.where(online, 9, 0))
    return starts


@triton.jit(do_not_specialize=["num_tokens"])
def _plan_count_kernel(
    ids_ptr, weights_ptr, bucket_ptr, lane_ptr, counts_ptr, num_tokens, E, NB, D, E_LOCAL,
    TOP_K: tl.constexpr, K_PAD: tl.constexpr, T: tl.constexpr, NB_PAD: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    rows = rows_of_step(lane_ptr, num_tokens, LOCAL)
    token = tl.program_id(0) * T + tl.arange(0, T)
    bucket, _ = choices(ids_ptr, weights_ptr, bucket_ptr, token, rows, E, NB, TOP_K, K_PAD)
    counts = tl.histogram(tl.reshape(bucket, (T * K_PAD,)), NB_PAD)
    out = counts_ptr + tl.program_id(0).to(tl.int64) * (NB + D)
    offs = tl.arange(0, NB_PAD)
    tl.store(out + offs, counts, mask=offs < NB)
    peer = bucket // E_LOCAL
    for d in range(D):
        sent = tl.max(((peer == d) & (bucket < NB)).to(tl.int32), axis=1)
        tl.store(out + NB + d, tl.sum(sent, axis=0))


@triton.jit(do_not_specialize=["num_blocks", "num_tokens", "layer"], do_not_specialize_on_alignment=["sent_ptr"])
def _plan_scan_kernel(
    counts_ptr, starts_ptr, slots_ptr, lane_ptr, sent_ptr, num_blocks, num_tokens, NB, D, E_LOCAL, offsets_at, layer,
    BLOCKS: tl.constexpr, E_PAD: tl.constexpr, LOCAL: tl.constexpr, HAS_SENT: tl.constexpr,
):  # fmt: skip
    # one program per peer: exclusive scan over blocks for each of its experts and for its rows, in place
    d = tl.program_id(0)
    offs_b, offs_e = tl.arange(0, BLOCKS), tl.arange(0, E_PAD)
    # column E_LOCAL stands for the peer's rows
    column = tl.where(offs_e < E_LOCAL, d * E_LOCAL + offs_e, NB + d)
    mask_e = offs_e <= E_LOCAL
    carry = tl.zeros((E_PAD,), tl.int32)
    for first in range(0, num_blocks, BLOCKS):
        block = first + offs_b
        at = counts_ptr + block.to(tl.int64)[:, None] * (NB + D) + column[None, :]
        mask = (block[:, None] < num_blocks) & mask_e[None, :]
        counts = tl.load(at, mask=mask, other=0)
        tl.store(at, tl.cumsum(counts, axis=0) - counts + carry[None, :], mask=mask)
        carry += tl.sum(counts, axis=0)
    rows = tl.sum(tl.where(offs_e == E_LOCAL, carry, 0), axis=0)
    totals = tl.where(offs_e < E_LOCAL, carry, 0)
    starts = write_peer(
        slots_ptr, lane_ptr, sent_ptr, d, totals, rows, num_tokens, E_LOCAL, offsets_at, layer, E_PAD, LOCAL, HAS_SENT
    )
    tl.store(starts_ptr + d * E_LOCAL + offs_e, starts, mask=offs_e < E_LOCAL)


@triton.jit(do_not_specialize=["num_tokens"])
def _plan_write_kernel(
    ids_ptr, weights_ptr, bucket_ptr, lane_ptr, counts_ptr, starts_ptr, slots_ptr, row_map_ptr,
    num_tokens, E, NB, D, E_LOCAL, pairs_at, weights_at,
    TOP_K: tl.constexpr, K_PAD: tl.constexpr, T: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    P: tl.constexpr = T * K_PAD
    rows = rows_of_step(lane_ptr, num_tokens, LOCAL)
    token = tl.program_id(0) * T + tl.arange(0, T)
    bucket, weight = choices(ids_ptr, weights_ptr, bucket_ptr, token, rows, E, NB, TOP_K, K_PAD)
    base = counts_ptr + tl.program_id(0).to(tl.int64) * (NB + D)
    offs_p = tl.arange(0, P)
    flat = tl.reshape(bucket, (P,))
    earlier = (flat[:, None] == flat[None, :]) & (offs_p[None, :] < offs_p[:, None])
    within = tl.reshape(tl.sum(earlier.to(tl.int32), axis=1), (T, K_PAD))
    real = bucket < NB
    position = within + tl.load(base + bucket, mask=real, other=0) + tl.load(starts_ptr + bucket, mask=real, other=0)
    peer = bucket // E_LOCAL
    offs_k = tl.arange(0, K_PAD)
    for d in range(D):
        here = real & (peer == d)
        slot = slot_address(slots_ptr, d, LOCAL)
        if LOCAL:
            row = token
            kept = token < rows
        else:
            sent = tl.max(here.to(tl.int32), axis=1)
            kept = sent == 1
            row = tl.load(base + NB + d) + tl.cumsum(sent, axis=0) - sent
            tl.store(row_map_ptr + d * num_tokens + token, tl.where(kept, row, -1), mask=token < num_tokens)
        pairs = (slot + pairs_at).to(tl.pointer_type(tl.int32))
        tl.store(pairs + position, row[:, None] * TOP_K + offs_k[None, :], mask=here)
        weights = (slot + weights_at).to(tl.pointer_type(tl.float32))
        at = row.to(tl.int64)[:, None] * TOP_K + offs_k[None, :]
        tl.store(weights + at, tl.where(here, weight, 0.0), mask=kept[:, None] & (offs_k[None, :] < TOP_K))


def carve_plan(
    carver: Carver, num_tokens: int, top_k: int, num_experts: int, num_peers: int
) -> tuple[torch.Tensor, ...]:
    blocks = max(1, triton.cdiv(num_tokens, tokens_per_block(top_k)))
    counter = carver.take((1,), torch.int32)
    starts = carver.take((num_peers * num_experts,), torch.int32)
    return counter, starts, carver.take((blocks, num_peers * (num_experts + 1)), torch.int32)


def launch_plan(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, bucket: torch.Tensor, slots: torch.Tensor, lane: torch.Tensor,
    row_map: torch.Tensor, counts: torch.Tensor, starts: torch.Tensor, layout: MessageLayout, num_peers: int,
    layer: int, *, local: bool, sent: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """The three plan kernels. local: ``slots`` is the memory of the one slot itself, and row i is token i."""
    num_tokens, top_k = topk_ids.shape
    k_pad, block = triton.next_power_of_2(top_k), tokens_per_block(top_k)
    blocks = max(1, triton.cdiv(num_tokens, block))
    buckets = num_peers * layout.num_experts
    sizes = (num_tokens, bucket.numel(), buckets, num_peers, layout.num_experts)
    meta = {"TOP_K": top_k, "K_PAD": k_pad, "T": block, "LOCAL": local}
    _plan_count_kernel[(blocks,)](
        topk_ids,
        topk_weights,
        bucket,
        lane,
        counts,
        *sizes,
        NB_PAD=triton.next_power_of_2(buckets + 1),
        **meta,
        enable_fp_fusion=True,
    )
    e_pad = triton.next_power_of_2(layout.num_experts + 1)
    _plan_scan_kernel[(num_peers,)](
        counts, starts, slots, lane, sent, blocks, num_tokens, buckets, num_peers, layout.num_experts,
        layout.offset("expert_offsets"), layer, BLOCKS=max(1, 8192 // e_pad), E_PAD=e_pad, LOCAL=local,
        HAS_SENT=sent is not None, num_warps=8, enable_fp_fusion=True,
    )  # fmt: skip
    _plan_write_kernel[(blocks,)](
        topk_ids, topk_weights, bucket, lane, counts, starts, slots, row_map, *sizes, layout.offset("pairs"),
        layout.offset("weights"), **meta, enable_fp_fusion=True,
    )  # fmt: skip
