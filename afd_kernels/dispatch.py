# SPDX-License-Identifier: Apache-2.0
"""Dispatch (attention side): plan, pack and publish one packed message per FFN rank.

The plan is a stable counting sort in three launches: count (experts of a block of tokens), scan (over blocks), write
(pair lists, weights, row map). No atomic decides an order. A token goes once to each peer that computes at least one of
its choices; a choice with weight 0 or id -1 is sent nowhere. The pack kernel copies the rows straight into the peers'
slots and its last program publishes. Addresses of slots come from a device table, never from an argument.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from afd_kernels._op import Carver, check, check_tensor, is_tracing, reference, register, runs_kernel, workspace_for
from afd_kernels.message import (
    MAGIC,
    MODE_ONLINE,
    VERSION,
    Header,
    Lane,
    MessageLayout,
    split_word,
    tensor_at,
)
from afd_kernels.signal import _MODE, _ROWS, arrive_last, check_lanes, lane_word, publish_host, store_release

PAIRS_PER_BLOCK = 128
ROW_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
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
def _is_online(lane_ptr, LOCAL: tl.constexpr):
    if LOCAL:
        return tl.full((), 1, tl.int64) == 1
    else:
        return tl.load(lane_ptr + _MODE) == 1


@triton.jit
def _rows_of_step(lane_ptr, num_tokens, LOCAL: tl.constexpr):
    if LOCAL:
        return num_tokens
    else:
        rows = tl.minimum(tl.load(lane_ptr + _ROWS), num_tokens).to(tl.int32)
        return tl.where(_is_online(lane_ptr, LOCAL), rows, 0)


@triton.jit
def _block_buckets(
    ids_ptr, weights_ptr, bucket_ptr, rows, E, NB, TOP_K: tl.constexpr, K_PAD: tl.constexpr, T: tl.constexpr
):
    # [T, K_PAD] bucket (peer * local experts + local expert) and weight of each choice; NB where it is sent nowhere
    token = tl.program_id(0) * T + tl.arange(0, T)
    offs_k = tl.arange(0, K_PAD)
    mask = (token[:, None] < rows) & (offs_k[None, :] < TOP_K)
    at = token.to(tl.int64)[:, None] * TOP_K + offs_k[None, :]
    ids = tl.load(ids_ptr + at, mask=mask, other=-1)
    weight = tl.load(weights_ptr + at, mask=mask, other=0.0)
    real = mask & (ids >= 0) & (ids < E) & (weight != 0.0)
    bucket = tl.load(bucket_ptr + ids, mask=real, other=-1)
    real = real & (bucket >= 0) & (bucket < NB)
    return token, tl.where(real, bucket, NB), tl.where(real, weight, 0.0)


@triton.jit(do_not_specialize=["num_tokens"])
def _plan_count_kernel(
    ids_ptr, weights_ptr, bucket_ptr, lane_ptr, counts_ptr, num_tokens, E, NB, D, E_LOCAL,
    TOP_K: tl.constexpr, K_PAD: tl.constexpr, T: tl.constexpr, NB_PAD: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    rows = _rows_of_step(lane_ptr, num_tokens, LOCAL)
    token, bucket, _ = _block_buckets(ids_ptr, weights_ptr, bucket_ptr, rows, E, NB, TOP_K, K_PAD, T)
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
    starts = tl.cumsum(totals, axis=0) - totals
    tl.store(starts_ptr + d * E_LOCAL + offs_e, starts, mask=offs_e < E_LOCAL)
    pairs = tl.sum(totals, axis=0)
    online = _is_online(lane_ptr, LOCAL)
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
    value = tl.where(h == 6, tl.where(LOCAL, num_tokens, rows), tl.where(h == 7, pairs, value))
    tl.store(header + h, value, mask=h < tl.where(online, 9, 0))


@triton.jit(do_not_specialize=["num_tokens"])
def _plan_write_kernel(
    ids_ptr, weights_ptr, bucket_ptr, lane_ptr, counts_ptr, starts_ptr, slots_ptr, row_map_ptr,
    num_tokens, E, NB, D, E_LOCAL, pairs_at, weights_at,
    TOP_K: tl.constexpr, K_PAD: tl.constexpr, T: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    P: tl.constexpr = T * K_PAD
    rows = _rows_of_step(lane_ptr, num_tokens, LOCAL)
    token, bucket, weight = _block_buckets(ids_ptr, weights_ptr, bucket_ptr, rows, E, NB, TOP_K, K_PAD, T)
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


@triton.jit(do_not_specialize=["num_tokens"])
def _pack_kernel(
    x_ptr, row_map_ptr, slots_ptr, lane_ptr, counter_ptr, num_tokens, D, H, stride_xm, rows_at,
    BLOCK_H: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    offs_h = tl.arange(0, BLOCK_H)
    chunks = tl.cdiv(H, BLOCK_H)
    online = tl.load(lane_ptr + _MODE) == 1
    rows = tl.where(online, num_tokens, 0)
    for work in range(tl.program_id(0), rows * chunks, tl.num_programs(0)):
        token = (work // chunks).to(tl.int64)
        cols = (work % chunks) * BLOCK_H + offs_h
        x = tl.load(x_ptr + token * stride_xm + cols, mask=cols < H)
        for d in range(D):
            row = tl.load(row_map_ptr + d * num_tokens + token)
            if row >= 0:
                slot = tl.load(slots_ptr + d) + rows_at
                out = slot.to(tl.pointer_type(x_ptr.dtype.element_ty)) + row.to(tl.int64) * H
                tl.store(out + cols, x, mask=cols < H)
    if arrive_last(counter_ptr, tl.num_programs(0)):
        if online:
            word = lane_word(lane_ptr)
            for d in range(D):
                store_release(tl.load(slots_ptr + d) + 120, word)


def dispatch(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    expert_bucket: torch.Tensor,
    slots: torch.Tensor,
    layout: MessageLayout,
    lane: torch.Tensor,
    layer: int = 0,
    row_map: torch.Tensor | None = None,
    sent: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sends each token's row, pairs and weights to the peers that compute its experts, and publishes.

    x: [M, H] of ``layout.dtype``, last dimension contiguous. topk_ids: int32[M, k], -1 is an expert that is nowhere.
    topk_weights: float32[M, k]. expert_bucket: int32[E], ``peer * layout.num_experts + local expert`` (-1: nowhere).
    slots: int64[D], addresses of the peers' request slots, written. lane: int64[8]; offline sends and publishes
    nothing; rows past ``lane[ROWS]`` are not sent. layer: written into the header.
    row_map: int32[D, M], written: row of each token in each peer's message, -1 where it was not sent; ``combine``
    needs it. sent: int64[D], the rows sent to each peer are added to it.
    workspace: uint8[``dispatch_workspace``(M, layout, D)], zeroed once. Returns row_map.

    The host writes nothing to a slot when M is over ``layout.cap_rows``: it raises first.
    """
    _check_dispatch(x, topk_ids, topk_weights, expert_bucket, slots, layout, lane)
    num_tokens, num_peers = x.shape[0], slots.numel()
    if row_map is None:
        row_map = torch.empty(num_peers, num_tokens, dtype=torch.int32, device=x.device)
    check_tensor("row_map", row_map, shape=(num_peers, num_tokens), dtypes=(torch.int32,), like=x, contiguous=True)
    if sent is not None:
        check_tensor("sent", sent, shape=(num_peers,), dtypes=(torch.int64,), like=x, contiguous=True)
    if runs_kernel(x):
        nbytes = dispatch_workspace(num_tokens, layout, num_peers)
        workspace = workspace_for(workspace, nbytes, x.device, "dispatch_workspace")
    else:
        workspace = torch.empty(0, dtype=torch.uint8)
    args = (x, topk_ids, topk_weights, expert_bucket, slots, lane, row_map, sent, workspace, layout.num_experts,
            layout.cap_rows, layer)  # fmt: skip
    (_dispatch_op if is_tracing() else _dispatch)(*args)
    return row_map


def dispatch_workspace(num_tokens: int, layout: MessageLayout, num_peers: int) -> int:
    """Bytes of ``dispatch``'s workspace for at most ``num_tokens`` tokens."""
    carver = Carver()
    _carve(carver, num_tokens, layout.top_k, layout.num_experts, num_peers)
    return carver.nbytes


def _carve(carver: Carver, num_tokens: int, top_k: int, num_experts: int, num_peers: int) -> tuple[torch.Tensor, ...]:
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
        layout.offset("expert_offsets"), layer, BLOCKS=max(1, 4096 // e_pad), E_PAD=e_pad, LOCAL=local,
        HAS_SENT=sent is not None, enable_fp_fusion=True,
    )  # fmt: skip
    _plan_write_kernel[(blocks,)](
        topk_ids, topk_weights, bucket, lane, counts, starts, slots, row_map, *sizes, layout.offset("pairs"),
        layout.offset("weights"), **meta, enable_fp_fusion=True,
    )  # fmt: skip


def _dispatch(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, expert_bucket: torch.Tensor,
    slots: torch.Tensor, lane: torch.Tensor, row_map: torch.Tensor, sent: torch.Tensor | None,
    workspace: torch.Tensor, num_experts: int, cap_rows: int, layer: int,
) -> None:  # fmt: skip
    num_tokens, hidden_size = x.shape
    num_peers = slots.numel()
    layout = MessageLayout(num_experts, cap_rows, topk_ids.shape[1], hidden_size, x.dtype)
    if not runs_kernel(x):
        dispatch_ref(x, topk_ids, topk_weights, expert_bucket=expert_bucket, slots=slots, layout=layout, lane=lane,
                     layer=layer, row_map=row_map, sent=sent)  # fmt: skip
        return
    counter, starts, counts = _carve(Carver(workspace), num_tokens, layout.top_k, num_experts, num_peers)
    launch_plan(topk_ids, topk_weights, expert_bucket, slots, lane, row_map, counts, starts, layout, num_peers, layer,
                local=False, sent=sent)  # fmt: skip
    block_h = min(2048, triton.next_power_of_2(hidden_size))
    grid = max(1, min(num_tokens * triton.cdiv(hidden_size, block_h), 1024))
    _pack_kernel[(grid,)](
        x, row_map, slots, lane, counter, num_tokens, num_peers, hidden_size, x.stride(0), layout.offset("rows"),
        BLOCK_H=block_h, D_PAD=triton.next_power_of_2(num_peers), num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@reference
def dispatch_ref(
    x, topk_ids, topk_weights, *, expert_bucket, slots, layout, lane, layer=0, row_map=None, sent=None, workspace=None
):
    """Plain-torch ``dispatch``. Slot addresses are those of memory on x's device."""
    num_tokens, top_k = topk_ids.shape
    if row_map is None:
        row_map = torch.empty(slots.numel(), num_tokens, dtype=torch.int32, device=x.device)
    row_map.fill_(-1)
    state = lane.tolist()
    if state[Lane.MODE] != MODE_ONLINE:
        return row_map
    ids = topk_ids[: state[Lane.ROWS]].long()
    weights = topk_weights[: ids.shape[0]]
    real = (ids >= 0) & (ids < expert_bucket.numel()) & (weights != 0)
    bucket = torch.where(real, expert_bucket.long()[ids.clamp(0, expert_bucket.numel() - 1)], -1)
    for peer, address in enumerate(slots.tolist()):
        message = layout.views(tensor_at(address, layout.nbytes, x.device))
        first = peer * layout.num_experts
        here = (bucket >= first) & (bucket < first + layout.num_experts)
        tokens = here.any(1).nonzero().squeeze(1)
        rows = tokens.numel()
        row_map[peer, tokens] = torch.arange(rows, dtype=torch.int32, device=x.device)
        if sent is not None:
            sent[peer] += rows
        _write_pairs(message, here[tokens], bucket[tokens] - first, layout.num_experts)
        message.weights[:rows] = torch.where(here[tokens], weights[tokens], 0.0)
        message.rows[:rows] = x[tokens]
        _write_header(message.header, state[Lane.WORD] | state[Lane.EXCHANGE], layer, rows, int(here.sum()))
        if x.device.type == "cpu":
            publish_host(address, state[Lane.WORD] | state[Lane.EXCHANGE])
        else:
            message.signal.fill_(state[Lane.WORD] | state[Lane.EXCHANGE])
    return row_map


def _write_pairs(message, here, local_expert, num_experts):
    pairs = here.flatten().nonzero().squeeze(1)  # row * top_k + choice, by row
    expert = local_expert.flatten()[pairs]
    message.pairs[: pairs.numel()] = pairs[expert.argsort(stable=True)].to(torch.int32)
    counts = torch.bincount(expert, minlength=num_experts)
    message.expert_offsets[0] = 0
    message.expert_offsets[1:] = counts.cumsum(0).to(torch.int32)


def _write_header(header, word, layer, rows, pairs):
    session, step, exchange = split_word(word)
    values = {Header.MAGIC: MAGIC, Header.VERSION: VERSION, Header.SESSION: session, Header.STEP: step,
              Header.LAYER: layer, Header.EXCHANGE: exchange, Header.ROWS: rows, Header.PAIRS: pairs,
              Header.FLAGS: 0}  # fmt: skip
    wrapped = [v - (1 << 32) if v >= 1 << 31 else v for v in values.values()]
    header[: len(values)] = torch.tensor(wrapped, dtype=torch.int32)


def _check_dispatch(x, topk_ids, topk_weights, expert_bucket, slots, layout, lane):
    check_tensor("x", x, shape=(None, layout.hidden_size), dtypes=(layout.dtype,), like=x)
    check(
        layout.dtype in ROW_DTYPES,
        f"layout.dtype is {layout.dtype}; allowed: {', '.join(map(str, ROW_DTYPES))} (fp8 rows have a field but no "
        f"kernel yet)",
    )
    check(not layout.with_token_ids, "layout.with_token_ids is True; routing by token id is not supported yet")
    check(x.shape[1] == 1 or x.stride(1) == 1, f"x has strides {x.stride()}; allowed: last 1; call .contiguous()")
    check(
        x.shape[0] <= layout.cap_rows,
        f"x has {x.shape[0]} rows, the slot holds {layout.cap_rows}; send fewer rows a step, or raise "
        f"max_batch_tokens on both sides",
    )
    for name, tensor, dtype in (("topk_ids", topk_ids, torch.int32), ("topk_weights", topk_weights, torch.float32)):
        check_tensor(name, tensor, shape=(x.shape[0], layout.top_k), dtypes=(dtype,), like=x)
        check(tensor.is_contiguous(), f"{name} is not contiguous; call .contiguous()")
    check_tensor("expert_bucket", expert_bucket, shape=(None,), dtypes=(torch.int32,), like=x, contiguous=True)
    check_tensor("slots", slots, shape=(None,), dtypes=(torch.int64,), like=x, contiguous=True)
    check_lanes(lane, slots, one=True)


_dispatch_op = register("dispatch", _dispatch, mutates=("row_map", "sent", "workspace"))
