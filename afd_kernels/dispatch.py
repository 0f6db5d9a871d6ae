# SPDX-License-Identifier: Apache-2.0
"""Dispatch (attention side): plan, pack and publish one packed message per FFN rank.

A small batch is one launch: each program plans one token and copies its row. A large one is planned in three launches,
and a fourth copies the rows. Both write the same bytes, and no atomic decides an order. A token goes once to each peer
that computes at least one of its choices; a choice with weight 0 or id -1 is sent nowhere. Rows go straight into the
peers' slots, and the last program to finish publishes. Addresses of slots come from a device table, never from an
argument.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from afd_kernels._op import (
    Carver,
    check,
    check_tensor,
    is_tracing,
    reference,
    register,
    runs_kernel,
    slot_pointer,
    workspace_for,
)
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
from afd_kernels.plan import carve_plan, launch_plan, rows_of_step
from afd_kernels.signal import (
    _MODE,
    arrive_last,
    check_lanes,
    check_optional,
    lane_word,
    ring,
    store_release,
)
from afd_kernels.signal_host import publish_host, ring_ref
from afd_kernels.small_plan import NUM_WARPS, is_small, plan_peer, plan_token, small_meta

ROW_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _publish(slots_ptr, lane_ptr, bells_ptr, counter_ptr, D, HAS_BELLS: tl.constexpr):
    # the grid's last program: after every program's stores, each peer's word, then its bell
    if arrive_last(counter_ptr, tl.num_programs(0)):
        if tl.load(lane_ptr + _MODE) == 1:
            word = lane_word(lane_ptr)
            for d in range(D):
                store_release(tl.load(slots_ptr + d) + 120, word)
                if HAS_BELLS:
                    ring(tl.load(bells_ptr + d), word)


@triton.jit
def _store_row(slots_ptr, d, row, x, cols, H, rows_at):
    # part of a row into a peer's slot; row -1: not sent there
    slot = (slot_pointer(tl.load(slots_ptr + d)) + rows_at).to(tl.pointer_type(x.dtype))
    tl.store(slot + row.to(tl.int64) * H + cols, x, mask=cols < tl.where(row >= 0, H, 0))


@triton.jit(do_not_specialize=["num_tokens", "layer"], do_not_specialize_on_alignment=["sent_ptr"])
def _dispatch_kernel(
    x_ptr, ids_ptr, weights_ptr, bucket_ptr, slots_ptr, lane_ptr, row_map_ptr, sent_ptr, bells_ptr, counter_ptr,
    num_tokens, E, NB, D, E_LOCAL, H, stride_xm, offsets_at, pairs_at, weights_at, rows_at, layer,
    TOP_K: tl.constexpr, K_PAD: tl.constexpr, T: tl.constexpr, D_PAD: tl.constexpr, E_PAD: tl.constexpr,
    BLOCK_H: tl.constexpr, HAS_SENT: tl.constexpr, HAS_BELLS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    rows = rows_of_step(lane_ptr, num_tokens, False)
    if pid < D:
        plan_peer(
            ids_ptr, weights_ptr, bucket_ptr, slots_ptr, lane_ptr, sent_ptr, pid, rows, num_tokens, E, NB, E_LOCAL,
            offsets_at, layer, TOP_K, K_PAD, T, E_PAD, False, HAS_SENT,
        )  # fmt: skip
    else:
        token, offs_d = pid - D, tl.arange(0, D_PAD)
        limit = tl.where(token < rows, H, 0)
        x_row = x_ptr + token.to(tl.int64) * stride_xm
        cols = tl.arange(0, BLOCK_H)
        x = tl.load(x_row + cols, mask=cols < limit)  # under way while the token is planned
        row_of_peer = plan_token(
            ids_ptr, weights_ptr, bucket_ptr, slots_ptr, row_map_ptr, token, rows, num_tokens, E, NB, D, E_LOCAL,
            pairs_at, weights_at, TOP_K, K_PAD, T, D_PAD, False,
        )  # fmt: skip
        for first in range(0, limit, BLOCK_H):
            for d in range(D):
                row = tl.sum(tl.where(offs_d == d, row_of_peer, 0), axis=0)
                if row >= 0:
                    _store_row(slots_ptr, d, row, x, first + cols, H, rows_at)
            following = first + BLOCK_H + cols
            x = tl.load(x_row + following, mask=following < limit)
    _publish(slots_ptr, lane_ptr, bells_ptr, counter_ptr, D, HAS_BELLS)


@triton.jit(do_not_specialize=["num_tokens"])
def _pack_kernel(
    x_ptr, row_map_ptr, slots_ptr, lane_ptr, bells_ptr, counter_ptr, num_tokens, D, H, stride_xm, rows_at,
    BLOCK_H: tl.constexpr, HAS_BELLS: tl.constexpr,
):  # fmt: skip
    offs_h = tl.arange(0, BLOCK_H)
    chunks = tl.cdiv(H, BLOCK_H)
    rows = tl.where(tl.load(lane_ptr + _MODE) == 1, num_tokens, 0)
    for work in range(tl.program_id(0), rows * chunks, tl.num_programs(0)):
        token = (work // chunks).to(tl.int64)
        cols = (work % chunks) * BLOCK_H + offs_h
        x = tl.load(x_ptr + token * stride_xm + cols, mask=cols < H)
        for d in range(D):
            row = tl.load(row_map_ptr + d * num_tokens + token)
            if row >= 0:
                _store_row(slots_ptr, d, row, x, cols, H, rows_at)
    _publish(slots_ptr, lane_ptr, bells_ptr, counter_ptr, D, HAS_BELLS)


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
    bells: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sends each token's row, pairs and weights to the peers that compute its experts, and publishes.

    x: [M, H] of ``layout.dtype``, last dimension contiguous. topk_ids: int32[M, k], -1 is an expert that is nowhere.
    topk_weights: float32[M, k]. expert_bucket: int32[E], ``peer * layout.num_experts + local expert`` (-1: nowhere).
    slots: int64[D], addresses of the peers' request slots, multiples of 16, written. lane: int64[8]; offline sends and
    publishes nothing; rows past ``lane[ROWS]`` are not sent. layer: written into the header.
    row_map: int32[D, M], written: row of each token in each peer's message, -1 where it was not sent; ``combine``
    needs it. sent: int64[D], the rows sent to each peer are added to it. bells: int64[D], addresses of the peers'
    doorbells (0: none), rung after the words (see ``wait``).
    workspace: uint8[``dispatch_workspace``(M, layout, D)], zeroed once. Returns row_map.

    The host writes nothing to a slot when M is over ``layout.cap_rows``: it raises first.
    """
    _check_dispatch(x, topk_ids, topk_weights, expert_bucket, slots, layout, lane)
    num_tokens, num_peers = x.shape[0], slots.numel()
    if row_map is None:
        row_map = torch.empty(num_peers, num_tokens, dtype=torch.int32, device=x.device)
    check_tensor("row_map", row_map, shape=(num_peers, num_tokens), dtypes=(torch.int32,), like=x, contiguous=True)
    check_optional("sent", sent, num_peers, torch.int64, x)
    check_optional("bells", bells, num_peers, torch.int64, x)
    if runs_kernel(x):
        nbytes = dispatch_workspace(num_tokens, layout, num_peers)
        workspace = workspace_for(workspace, nbytes, x.device, "dispatch_workspace")
    else:
        workspace = torch.empty(0, dtype=torch.uint8)
    args = (x, topk_ids, topk_weights, expert_bucket, slots, lane, row_map, sent, bells, workspace, layout.num_experts,
            layout.cap_rows, layer)  # fmt: skip
    (_dispatch_op if is_tracing() else _dispatch)(*args)
    return row_map


def dispatch_workspace(num_tokens: int, layout: MessageLayout, num_peers: int) -> int:
    """Bytes of ``dispatch``'s workspace for at most ``num_tokens`` tokens."""
    carver = Carver()
    carve_plan(carver, num_tokens, layout.top_k, layout.num_experts, num_peers)
    return carver.nbytes


def _dispatch(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, expert_bucket: torch.Tensor,
    slots: torch.Tensor, lane: torch.Tensor, row_map: torch.Tensor, sent: torch.Tensor | None,
    bells: torch.Tensor | None, workspace: torch.Tensor, num_experts: int, cap_rows: int, layer: int,
) -> None:  # fmt: skip
    num_tokens, hidden_size = x.shape
    num_peers = slots.numel()
    layout = MessageLayout(num_experts, cap_rows, topk_ids.shape[1], hidden_size, x.dtype)
    if not runs_kernel(x):
        dispatch_ref(x, topk_ids, topk_weights, expert_bucket=expert_bucket, slots=slots, layout=layout, lane=lane,
                     layer=layer, row_map=row_map, sent=sent, bells=bells)  # fmt: skip
        return
    counter, starts, counts = carve_plan(Carver(workspace), num_tokens, layout.top_k, num_experts, num_peers)
    if is_small(num_tokens, layout.top_k, num_peers * num_experts):
        _dispatch_kernel[(max(1, num_peers + num_tokens),)](
            x, topk_ids, topk_weights, expert_bucket, slots, lane, row_map, sent, bells, counter, num_tokens,
            expert_bucket.numel(), num_peers * num_experts, num_peers, num_experts, hidden_size, x.stride(0),
            *(layout.offset(field) for field in ("expert_offsets", "pairs", "weights", "rows")), layer,
            **small_meta(layout.top_k, num_experts, num_peers),
            BLOCK_H=min(8192, triton.next_power_of_2(hidden_size)), HAS_SENT=sent is not None,
            HAS_BELLS=bells is not None, num_warps=NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip
        return
    launch_plan(topk_ids, topk_weights, expert_bucket, slots, lane, row_map, counts, starts, layout, num_peers, layer,
                local=False, sent=sent)  # fmt: skip
    block_h = min(2048, triton.next_power_of_2(hidden_size))
    grid = max(1, min(num_tokens * triton.cdiv(hidden_size, block_h), 1024))
    _pack_kernel[(grid,)](
        x, row_map, slots, lane, bells, counter, num_tokens, num_peers, hidden_size, x.stride(0),
        layout.offset("rows"), BLOCK_H=block_h, HAS_BELLS=bells is not None, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@reference
def dispatch_ref(
    x, topk_ids, topk_weights, *, expert_bucket, slots, layout, lane, layer=0, row_map=None, sent=None, bells=None,
    workspace=None,
):  # fmt: skip
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
        if bells is not None:
            ring_ref(int(bells[peer]), state[Lane.WORD] | state[Lane.EXCHANGE], x.device)
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
