# SPDX-License-Identifier: Apache-2.0
"""The plan of a small batch, in one launch: one program for each peer's header, one for each token.

No program waits for another: each reads all choices (a few KB) and ranks its own among them. What it writes is byte for
byte what the three launches of ``plan`` write.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from afd_kernels.message import MessageLayout
from afd_kernels.plan import choices, rows_of_step, write_peer

MAX_PAIRS = 4096
PAIRS_PER_STEP = 1024
NUM_WARPS = 8
_MAX_PAIRS = tl.constexpr(MAX_PAIRS)


def is_small(num_tokens: int, top_k: int, num_buckets: int) -> bool:
    """True where one launch plans the batch. Each program reads all pairs, so the work grows with their square."""
    return num_tokens * triton.next_power_of_2(top_k) <= MAX_PAIRS and num_buckets < (1 << 31) // MAX_PAIRS - 1


def small_meta(top_k: int, num_experts: int, num_peers: int) -> dict[str, int]:
    """Compile-time sizes of the kernels that plan a small batch; they do not depend on the batch."""
    k_pad, d_pad = triton.next_power_of_2(top_k), triton.next_power_of_2(max(1, num_peers))
    return {
        "TOP_K": top_k, "K_PAD": k_pad, "T": max(1, PAIRS_PER_STEP // (k_pad * max(1, d_pad // 8))), "D_PAD": d_pad,
        "E_PAD": triton.next_power_of_2(num_experts + 1),
    }  # fmt: skip


@triton.jit
def _slots(slots_ptr, peer, mask, LOCAL: tl.constexpr):
    # addresses of peers' slots; (LOCAL) the given memory itself
    if LOCAL:
        return slots_ptr.to(tl.int64) + peer.to(tl.int64) * 0
    else:
        return tl.load(slots_ptr + peer, mask=mask, other=0)


@triton.jit
def plan_peer(
    ids_ptr, weights_ptr, bucket_ptr, slots_ptr, lane_ptr, sent_ptr, d, rows, num_tokens, E, NB, E_LOCAL, offsets_at,
    layer, TOP_K: tl.constexpr, K_PAD: tl.constexpr, T: tl.constexpr, E_PAD: tl.constexpr, LOCAL: tl.constexpr,
    HAS_SENT: tl.constexpr,
):  # fmt: skip
    """Counts one peer's pairs by expert and its rows; writes its expert offsets and header."""
    totals = tl.zeros((E_PAD,), tl.int32)
    num_rows = tl.zeros((), tl.int32)
    for first in range(0, rows, T):
        bucket, _ = choices(ids_ptr, weights_ptr, bucket_ptr, first + tl.arange(0, T), rows, E, NB, TOP_K, K_PAD)
        local = bucket - d * E_LOCAL  # [T, K_PAD]
        local = tl.where((local >= 0) & (local < E_LOCAL), local, E_LOCAL)
        totals += tl.histogram(tl.reshape(local, (T * K_PAD,)), E_PAD)
        num_rows += tl.sum(tl.max((local < E_LOCAL).to(tl.int32), axis=1), axis=0)
    totals = tl.where(tl.arange(0, E_PAD) < E_LOCAL, totals, 0)
    write_peer(
        slots_ptr, lane_ptr, sent_ptr, d, totals, num_rows, num_tokens, E_LOCAL, offsets_at, layer, E_PAD, LOCAL,
        HAS_SENT,
    )  # fmt: skip


@triton.jit
def plan_token(
    ids_ptr, weights_ptr, bucket_ptr, slots_ptr, row_map_ptr, token, rows, num_tokens, E, NB, D, E_LOCAL, pairs_at,
    weights_at, TOP_K: tl.constexpr, K_PAD: tl.constexpr, T: tl.constexpr, D_PAD: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """Writes one token's pairs, weights and row map. Returns [D_PAD] its row in each peer's message, -1: not sent."""
    offs_k, offs_d = tl.arange(0, K_PAD), tl.arange(0, D_PAD)
    bucket, weight = choices(ids_ptr, weights_ptr, bucket_ptr, token + tl.arange(0, 1), rows, E, NB, TOP_K, K_PAD)
    bucket, weight = tl.reshape(bucket, (K_PAD,)), tl.reshape(weight, (K_PAD,))
    peer = bucket // E_LOCAL
    here = (peer[None, :] == offs_d[:, None]) & (bucket < NB)[None, :]  # [D_PAD, K_PAD]
    # a pair's place in its peer's list is the number of smaller keys (bucket, then pair) from the peer's lowest on
    low, key = peer * E_LOCAL * _MAX_PAIRS, bucket * _MAX_PAIRS + token * K_PAD + offs_k
    position, row = tl.zeros((K_PAD,), tl.int32), tl.zeros((D_PAD,), tl.int32)
    for first in range(0, tl.where(token < rows, rows, 0), T):
        offs_t = first + tl.arange(0, T)
        buckets, _ = choices(ids_ptr, weights_ptr, bucket_ptr, offs_t, rows, E, NB, TOP_K, K_PAD)  # [T, K_PAD]
        keys = tl.reshape(buckets * _MAX_PAIRS + offs_t[:, None] * K_PAD + offs_k[None, :], (T * K_PAD,))
        smaller = (keys[:, None] >= low[None, :]) & (keys[:, None] < key[None, :])
        position += tl.sum(smaller.to(tl.int32), axis=0)
        if not LOCAL:
            of_peer = buckets[:, :, None] - (offs_d * E_LOCAL)[None, None, :]
            sent = tl.max(((of_peer >= 0) & (of_peer < E_LOCAL)).to(tl.int32), axis=1)  # [T, D_PAD]
            row += tl.sum(tl.where((offs_t < token)[:, None], sent, 0), axis=0)
    if LOCAL:
        row += tl.where(token < rows, token, -1)
    else:
        row = tl.where(tl.max(here.to(tl.int32), axis=1) == 1, row, -1)
        tl.store(row_map_ptr + offs_d * num_tokens + token, row, mask=offs_d < D)
    slot = _slots(slots_ptr, peer, bucket < NB, LOCAL)
    pairs = (slot + pairs_at).to(tl.pointer_type(tl.int32))
    row_of_pair = tl.sum(tl.where(here, row[:, None], 0), axis=0)
    tl.store(pairs + position, row_of_pair * TOP_K + offs_k, mask=bucket < NB)
    slot = _slots(slots_ptr, offs_d, row >= 0, LOCAL)
    weights = (slot + weights_at).to(tl.pointer_type(tl.float32)) + tl.maximum(row, 0) * TOP_K
    written = (row >= 0)[:, None] & (offs_k < TOP_K)[None, :]
    tl.store(weights[:, None] + offs_k[None, :], tl.where(here, weight[None, :], 0.0), mask=written)
    return row


@triton.jit(do_not_specialize=["num_tokens"])
def _small_plan_kernel(
    ids_ptr, weights_ptr, bucket_ptr, slot_ptr, num_tokens, E, E_LOCAL, offsets_at, pairs_at, weights_at,
    TOP_K: tl.constexpr, K_PAD: tl.constexpr, T: tl.constexpr, D_PAD: tl.constexpr, E_PAD: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    rows = rows_of_step(slot_ptr, num_tokens, True)
    if pid == 0:
        plan_peer(
            ids_ptr, weights_ptr, bucket_ptr, slot_ptr, slot_ptr, slot_ptr, 0, rows, num_tokens, E, E_LOCAL, E_LOCAL,
            offsets_at, 0, TOP_K, K_PAD, T, E_PAD, True, False,
        )  # fmt: skip
    else:
        plan_token(
            ids_ptr, weights_ptr, bucket_ptr, slot_ptr, slot_ptr, pid - 1, rows, num_tokens, E, E_LOCAL, 1, E_LOCAL,
            pairs_at, weights_at, TOP_K, K_PAD, T, D_PAD, True,
        )  # fmt: skip


def launch_small_plan(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, bucket: torch.Tensor, slot: torch.Tensor, layout: MessageLayout
) -> None:
    """Plans a layer on one rank: ``slot`` is the memory of the one slot itself, and row i is token i."""
    num_tokens, top_k = topk_ids.shape
    _small_plan_kernel[(1 + num_tokens,)](
        topk_ids, topk_weights, bucket, slot, num_tokens, bucket.numel(), layout.num_experts,
        layout.offset("expert_offsets"), layout.offset("pairs"), layout.offset("weights"),
        **small_meta(top_k, layout.num_experts, 1), num_warps=NUM_WARPS, enable_fp_fusion=True,
    )  # fmt: skip
