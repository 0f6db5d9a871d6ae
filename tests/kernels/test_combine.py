# SPDX-License-Identifier: Apache-2.0
"""combine against its reference and against a loop over tokens and peers in fp64."""

import pytest
import torch
from kernel_harness import DEVICE, addresses, generator, new_slot, same_bits, strided, to_cpu

from afd_kernels import MODE_OFFLINE, Lane, ReplyLayout, begin_step, combine
from afd_kernels.combine import combine_ref
from afd_kernels.testing import assert_close, poison


def replies(peers, tokens, hidden, dtype, *, seed=0, share=0.6):
    """(layout, slots with NaN in the rows that nobody wrote, row_map, lane)"""
    g = generator(seed)
    layout = ReplyLayout(tokens + 3, hidden, dtype)
    row_map = torch.full((peers, tokens), -1, dtype=torch.int32)
    slots = [new_slot(layout) for _ in range(peers)]
    for peer, slot in enumerate(slots):
        rows = layout.views(slot).rows
        rows.fill_(float("nan"))
        sent = torch.rand(tokens, generator=g) < share
        if peer == 0 and tokens > 2:
            sent[1] = False
        n = int(sent.sum())
        row_map[peer, sent] = torch.randperm(n, generator=g).to(torch.int32)
        rows[:n] = torch.randn(n, hidden, generator=g).to(device=DEVICE, dtype=dtype)
    lane = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    begin_step(lane, session=3, step=9, rows=tokens)
    lane[Lane.EXCHANGE] = 4
    return layout, slots, row_map.to(DEVICE), lane


def oracle(layout, slots, row_map):
    out = torch.zeros(row_map.shape[1], layout.hidden_size, dtype=torch.float64)
    for slot, rows in zip(slots, row_map.tolist(), strict=True):
        table = layout.views(slot.cpu()).rows.double()
        for token, row in enumerate(rows):
            if row >= 0:
                out[token] += table[row]
    return out


@pytest.mark.parametrize(
    "peers,tokens,hidden", [(1, 1, 1), (1, 5, 33), (2, 7, 64), (3, 4, 1030), (5, 2, 17), (8, 3, 40)]
)
def test_combine(peers, tokens, hidden, dtype, launches):
    layout, slots, row_map, lane = replies(peers, tokens, hidden, dtype)
    out = poison(tokens, hidden, dtype=dtype, device=DEVICE)
    assert combine(addresses(slots), row_map, layout, lane, out=out) is out
    assert_close(out, oracle(layout, slots, row_map), dtype=dtype)
    assert int(lane[Lane.EXCHANGE]) == 5
    copies, state = to_cpu(slots), to_cpu(lane)
    table = torch.tensor([s.data_ptr() for s in copies])
    assert_close(out, combine_ref(table, row_map.cpu(), layout, state).to(dtype))
    assert state[Lane.EXCHANGE] == 6
    launches.expect("_combine_kernel")


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16])
def test_other_dtypes_and_strides(out_dtype, dtype, launches):
    layout, slots, row_map, lane = replies(3, 6, 21, dtype)
    assert combine(addresses(slots), row_map, layout, lane, dtype=out_dtype).dtype == out_dtype
    out = strided(torch.zeros(6, 21, dtype=out_dtype, device=DEVICE))
    combine(addresses(slots), row_map, layout, lane, out=out)
    want = oracle(layout, slots, row_map)
    assert_close(out, want, dtype=dtype if out_dtype == torch.float32 else out_dtype)
    whole = out._base
    assert whole[0].isnan().all() and whole[7:].isnan().all() and whole[:, 0].isnan().all(), "wrote outside of out"
    assert whole[:, 22:].isnan().all()
    launches.expect("_combine_kernel")


def test_fixed_order_and_repeatable(dtype, launches):
    layout, slots, row_map, lane = replies(4, 9, 65, dtype, share=1.0)
    first = combine(addresses(slots), row_map, layout, lane)
    second = combine(addresses(slots), row_map, layout, lane)
    assert same_bits(first, second)
    # the sum runs over peers in order, in fp32
    total = torch.zeros(9, 65)
    for slot, rows in zip(to_cpu(slots), row_map.cpu().long(), strict=True):
        total = total + layout.views(slot).rows[rows].float() * (rows >= 0)[:, None]
    assert same_bits(combine(addresses(slots), row_map[:, 2:3].contiguous(), layout, lane), total[2:3].to(dtype))
    launches.expect("_combine_kernel")


def test_token_that_nobody_computed_and_lane_offline(dtype, launches):
    layout, slots, row_map, lane = replies(2, 5, 12, dtype, share=1.0)
    row_map[:, 3] = -1
    out = combine(addresses(slots), row_map, layout, lane, out=poison(5, 12, dtype=dtype, device=DEVICE))
    assert (out[3] == 0).all() and not (out[2] == 0).all()
    lane[Lane.MODE] = MODE_OFFLINE
    before = lane.clone()
    out = combine(addresses(slots), row_map, layout, lane, out=poison(5, 12, dtype=dtype, device=DEVICE))
    assert (out == 0).all() and torch.equal(lane, before)
    launches.expect("_combine_kernel")


def test_offline_lane_reads_no_slot(launches):
    layout, slots, row_map, lane = replies(2, 5, 12, torch.float32)
    lane[Lane.MODE] = MODE_OFFLINE
    out = combine(torch.zeros(2, dtype=torch.int64, device=DEVICE), row_map, layout, lane)
    assert (out == 0).all()
    launches.expect("_combine_kernel")


@pytest.mark.parametrize("hidden", [8, 2050])
def test_no_tokens_still_advances_once(hidden, launches):
    layout, slots, row_map, lane = replies(2, 0, hidden, torch.float32)
    out = combine(addresses(slots), row_map, layout, lane)
    assert out.shape == (0, hidden) and int(lane[Lane.EXCHANGE]) == 5
    launches.expect("_combine_kernel")


def test_infinity_and_nan_stay_in_their_row(launches):
    layout, slots, row_map, lane = replies(2, 4, 16, torch.float32, share=1.0)
    clean = combine(addresses(slots), row_map, layout, lane)
    layout.views(slots[0]).rows[int(row_map[0, 3])] = float("inf")
    layout.views(slots[1]).rows[int(row_map[1, 0])] = float("nan")
    out = combine(addresses(slots), row_map, layout, lane)
    assert out[0].isnan().all() and (out[3] == float("inf")).all() and same_bits(out[1:3], clean[1:3])
    launches.expect("_combine_kernel")
