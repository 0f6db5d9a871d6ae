# SPDX-License-Identifier: Apache-2.0
"""dispatch, byte by byte: each slot must be its poison with exactly the message of a loop over tokens on it."""

import sys

import pytest
import torch
from kernel_harness import (
    DEVICE,
    GUARD,
    World,
    addresses,
    blocks,
    generator,
    new_slot,
    round_robin,
    same_bits,
    strided,
    to_cpu,
)

from afd_kernels import (
    MODE_OFFLINE,
    MODE_ONLINE,
    Header,
    Lane,
    MessageLayout,
    begin_step,
    dispatch,
    dispatch_workspace,
    signal_word,
)
from afd_kernels.dispatch import dispatch_ref
from afd_kernels.testing import poison

LARGE = ("_plan_count_kernel", "_plan_scan_kernel", "_plan_write_kernel", "_pack_kernel")


@pytest.fixture(params=["one launch", "four launches"])
def plan(request, monkeypatch):
    """The kernels of a dispatch whose batch counts as small, or as large."""
    small = request.param == "one launch"
    monkeypatch.setattr(sys.modules["afd_kernels.dispatch"], "is_small", lambda *sizes: small)
    return ("_dispatch_kernel",) if small else LARGE


def routed(tokens, experts, top_k, hidden, dtype, *, seed=0, holes=0.1):
    """(x, ids, weights); a share ``holes`` of the choices has id -1, as many have weight 0."""
    g = generator(seed)
    x = torch.randn(tokens, hidden, generator=g).to(dtype)
    ids = torch.rand(tokens, max(experts, top_k), generator=g).argsort(1)[:, :top_k] % experts
    weights = torch.rand(tokens, top_k, generator=g) + 0.01
    ids[torch.rand(tokens, top_k, generator=g) < holes] = -1
    weights[torch.rand(tokens, top_k, generator=g) < holes] = 0
    return x.to(DEVICE), ids.to(torch.int32).to(DEVICE), weights.to(DEVICE)


def expected(layout, before, x, ids, weights, bucket, peer, *, word, layer, rows):
    """(slot, row_map) that a loop over tokens makes of the slot ``before``."""
    slot = before.clone()
    message = layout.views(slot)
    size = layout.num_experts
    lists, kept, row_map = [[] for _ in range(size)], [], [-1] * len(ids)
    for token in range(min(rows, len(ids))):
        local = []
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            at = bucket[expert] if 0 <= expert < len(bucket) and weight != 0 else -1
            local.append(at - peer * size if peer * size <= at < (peer + 1) * size else -1)
        if all(e < 0 for e in local):
            continue
        row_map[token] = len(kept)
        message.rows[len(kept)] = x[token]
        for choice, expert in enumerate(local):
            message.weights[len(kept), choice] = weights[token, choice] if expert >= 0 else 0.0
            if expert >= 0:
                lists[expert].append(len(kept) * layout.top_k + choice)
        kept.append(token)
    pairs = sum(lists, [])
    message.pairs[: len(pairs)] = torch.tensor(pairs, dtype=torch.int32)
    for expert in range(size + 1):
        message.expert_offsets[expert] = sum(map(len, lists[:expert]))
    session, step, exchange = word
    fields = [0x41464431, 1, session, step, layer, exchange, len(kept), len(pairs), 0]
    message.header[:9] = torch.tensor(fields, dtype=torch.int64).to(torch.int32)
    message.signal[0] = signal_word(*word)
    return slot, row_map


def check(world: World, lane: int, x, ids, weights, bucket, *, step=5, exchange=0, layer=0, rows=None, send=None):
    """Sends with the kernel and with the reference and compares both with the loop, byte by byte."""
    before = [to_cpu(slots[lane]) for slots in world.requests]
    state = to_cpu(world.lanes[lane])
    row_map = (send or world.send)(lane, x, ids, weights, bucket, layer=layer)
    assert torch.equal(state, world.lanes[lane].cpu()), "dispatch changed its lane"
    copies = [b.clone() for b in before]
    on_cpu = to_cpu((x, ids, weights))
    ref_map = dispatch_ref(*on_cpu, expert_bucket=bucket.cpu(), slots=torch.tensor([c.data_ptr() for c in copies]),
                           layout=world.layout, lane=state, layer=layer)  # fmt: skip
    assert torch.equal(row_map.cpu(), ref_map)
    for peer in range(world.num_peers):
        slot, rows_of_peer = expected(
            world.layout, before[peer], *on_cpu, bucket.tolist(), peer, word=(40000 + lane, step, exchange),
            layer=layer, rows=x.shape[0] if rows is None else rows,
        )  # fmt: skip
        assert row_map[peer].tolist() == rows_of_peer
        same_message(world.layout, world.requests[peer][lane].cpu(), slot, "kernel")
        same_message(world.layout, copies[peer], slot, "reference")
    return row_map


def same_message(layout, actual, want, what):
    for name, a, b in zip(layout.views(want)._fields, layout.views(actual), layout.views(want), strict=True):
        assert same_bits(a, b), f"{what}: {name}\n{a}\n{b}"
    assert torch.equal(actual, want), f"{what}: something between or behind the fields was written"


SHAPES = [  # tokens, top_k, peers, experts, hidden
    (1, 1, 1, 1, 1), (5, 3, 2, 7, 33), (37, 4, 3, 12, 64), (70, 8, 1, 62, 20), (9, 32, 2, 72, 17), (40, 6, 5, 160, 24),
    (2, 2, 2, 3, 2100), (21, 32, 1, 512, 8), (130, 3, 8, 64, 16),
]  # fmt: skip


@pytest.mark.parametrize("placement", [blocks, round_robin])
@pytest.mark.parametrize("tokens,top_k,peers,experts,hidden", SHAPES)
def test_bytes(tokens, top_k, peers, experts, hidden, placement, launches, plan):
    size, bucket = placement(experts, peers)
    world = World(peers, 1, MessageLayout(size, tokens + 3, top_k, hidden, torch.float32))
    world.begin([tokens])
    check(world, 0, *routed(tokens, experts, top_k, hidden, torch.float32), bucket, layer=7)
    launches.expect(*plan)


def test_dtypes_and_strides(dtype, launches, plan):
    size, bucket = round_robin(10, 3)
    world = World(3, 2, MessageLayout(size, 12, 4, 50, dtype))
    world.begin([11, 12])
    x, ids, weights = routed(11, 10, 4, 50, dtype)
    x[4] = float("nan")
    check(world, 0, strided(x), ids, weights, bucket)
    check(world, 1, *routed(12, 10, 4, 50, dtype, seed=1, holes=0), bucket)
    launches.expect(*plan)


@pytest.mark.parametrize("peers", [1, 3])
def test_no_tokens(peers, launches, plan):
    size, bucket = blocks(9, peers)
    world = World(peers, 1, MessageLayout(size, 4, 2, 8, torch.float32))
    world.begin([0])
    row_map = check(world, 0, *routed(0, 9, 2, 8, torch.float32), bucket)
    assert row_map.shape == (peers, 0)
    launches.expect(plan[-1])


@pytest.mark.parametrize("rows", [0, 1, 33, 70])
def test_rows_past_the_lane(rows, launches, plan):
    size, bucket = blocks(8, 2)
    world = World(2, 1, MessageLayout(size, 70, 3, 16, torch.float32))
    world.begin([rows])
    row_map = check(world, 0, *routed(70, 8, 3, 16, torch.float32), bucket, rows=rows)
    assert (row_map[:, rows:] == -1).all()
    launches.expect(*plan)


def test_offline_writes_nothing(launches, plan):
    size, bucket = blocks(8, 2)
    world = World(2, 1, MessageLayout(size, 9, 3, 16, torch.float32))
    world.begin([9], modes=[MODE_OFFLINE])
    before = [to_cpu(slots[0]) for slots in world.requests]
    row_map = world.send(0, *routed(9, 8, 3, 16, torch.float32), bucket)
    assert (row_map == -1).all()
    assert all(torch.equal(b, slots[0].cpu()) for b, slots in zip(before, world.requests, strict=True))
    launches.expect(*plan)


def test_offline_needs_no_slot(launches, plan):
    size, bucket = blocks(8, 2)
    layout = MessageLayout(size, 9, 3, 16, torch.float32)
    lane = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    x, ids, weights = routed(9, 8, 3, 16, torch.float32)
    nowhere = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    row_map = dispatch(x, ids, weights, expert_bucket=bucket, slots=nowhere, layout=layout, lane=lane)
    assert (row_map == -1).all()
    launches.expect(*plan)


@pytest.mark.parametrize("what", ["ids -1", "ids past E", "weights 0", "bucket -1"])
def test_choices_that_go_nowhere(what, launches, plan):
    size, bucket = blocks(8, 2)
    world = World(2, 1, MessageLayout(size, 6, 3, 16, torch.float32))
    world.begin([6])
    x, ids, weights = routed(6, 8, 3, 16, torch.float32, holes=0)
    if what == "bucket -1":
        bucket[2::3] = -1
    elif what == "weights 0":
        weights[2], weights[3, 1], weights[4] = 0.0, -0.0, 0.0
    else:
        ids[2], ids[3, 1], ids[4] = (-1, -7, -1) if what == "ids -1" else (8, 2**31 - 1, 9)
    row_map = check(world, 0, x, ids, weights, bucket)
    if what != "bucket -1":
        assert (row_map[:, [2, 4]] == -1).all()
    launches.expect(*plan)


@pytest.mark.parametrize("expert", [0, 3, 7])
def test_all_tokens_on_one_expert(expert, launches, plan):  # case 13
    size, bucket = blocks(8, 2)
    world = World(2, 1, MessageLayout(size, 140, 1, 8, torch.float32))
    world.begin([140])
    x, ids, weights = routed(140, 8, 1, 8, torch.float32, holes=0)
    row_map = check(world, 0, x, torch.full_like(ids, expert), weights, bucket)
    assert row_map[expert // 4].tolist() == list(range(140)) and (row_map[1 - expert // 4] == -1).all()
    launches.expect(*plan)


def test_an_expert_twice_and_negative_weights(launches, plan):
    size, bucket = blocks(4, 2)
    world = World(2, 1, MessageLayout(size, 3, 4, 8, torch.float32))
    world.begin([3])
    x, ids, weights = routed(3, 4, 4, 8, torch.float32, holes=0)
    ids[:] = torch.tensor([2, 0, 2, 0], dtype=torch.int32, device=DEVICE)
    weights[1] = -weights[1]
    check(world, 0, x, ids, weights, bucket)
    launches.expect(*plan)


def test_several_exchanges_and_steps(launches, plan):
    """One workspace, one row_map, one slot, used again: nothing of the message before shows."""
    size, bucket = round_robin(12, 2)
    world = World(2, 1, MessageLayout(size, 40, 4, 16, torch.float32))
    nbytes = dispatch_workspace(40, world.layout, 2)
    workspace = torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE)
    for step, (exchange, tokens) in enumerate([(0, 40), (1, 3), (65535, 40), (2, 0), (3, 35)]):
        world.begin([tokens], step=2**32 - 5 + step)
        world.lanes[0, Lane.EXCHANGE] = exchange
        row_map = poison(2, tokens, dtype=torch.int32, device=DEVICE)

        def send(lane, *args, row_map=row_map, **kwargs):
            assert world.send(lane, *args, row_map=row_map, workspace=workspace, **kwargs) is row_map
            return row_map

        inputs = routed(tokens, 12, 4, 16, torch.float32, seed=step)
        check(world, 0, *inputs, bucket, step=2**32 - 5 + step, exchange=exchange, layer=step, send=send)
    launches.expect(*plan)


def test_repeatable(dtype, launches, plan):
    size, bucket = round_robin(12, 3)
    world = World(3, 2, MessageLayout(size, 66, 4, 40, dtype))
    for a in range(2):
        begin_step(world.lanes[a], session=9, step=1, rows=66)
        world.send(a, *routed(66, 12, 4, 40, dtype), bucket)
    assert all(torch.equal(*slots) for slots in world.requests)
    launches.expect(*plan)


def test_too_many_rows_writes_nothing(launches):  # case 30
    size, bucket = blocks(8, 2)
    world = World(2, 1, MessageLayout(size, 5, 3, 16, torch.float32))
    world.begin([6])
    before = [to_cpu(slots[0]) for slots in world.requests]
    with pytest.raises(ValueError, match="x has 6 rows, the slot holds 5"):
        world.send(0, *routed(6, 8, 3, 16, torch.float32), bucket)
    assert all(torch.equal(b, slots[0].cpu()) for b, slots in zip(before, world.requests, strict=True))
    launches.expect_none()


def test_workspace_too_small(launches):
    size, bucket = blocks(8, 2)
    world = World(2, 1, MessageLayout(size, 6, 3, 16, torch.float32))
    world.begin([6])
    nbytes = dispatch_workspace(6, world.layout, 2)
    workspace = torch.zeros(nbytes - 1, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match=f"at least {nbytes}"):
        world.send(0, *routed(6, 8, 3, 16, torch.float32), bucket, workspace=workspace)
    launches.expect_none()


def test_rows_are_the_tokens_with_an_expert_there(launches, plan):
    size, bucket = round_robin(16, 4)
    world = World(4, 1, MessageLayout(size, 50, 2, 8, torch.float32))
    world.begin([50])
    x, ids, weights = routed(50, 16, 2, 8, torch.float32)
    world.send(0, x, ids, weights, bucket)
    real = (ids >= 0) & (weights != 0)
    for peer in range(4):
        tokens = (real & (ids % 4 == peer)).any(1).nonzero().squeeze(1)
        message = world.message(peer, 0)
        assert int(message.header[Header.ROWS]) == len(tokens)
        assert int(message.header[Header.PAIRS]) == int((real & (ids % 4 == peer)).sum())
        assert same_bits(message.rows[: len(tokens)], x[tokens])
        assert (world.requests[peer][0][-GUARD:] == 0x5B).all()
    launches.expect(*plan)


def test_single_slot_addresses(launches, plan):
    """Slots need not be in order, or even different memory regions per lane: addresses come from the table."""
    layout = MessageLayout(2, 4, 2, 8, torch.float32)
    first, second = new_slot(layout), new_slot(layout)
    lane = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    begin_step(lane, session=1, step=1, rows=4, mode=MODE_ONLINE)
    x, ids, weights = routed(4, 4, 2, 8, torch.float32, holes=0)
    bucket = torch.arange(4, dtype=torch.int32, device=DEVICE)
    dispatch(x, ids, weights, expert_bucket=bucket, slots=addresses([second, first]), layout=layout, lane=lane)
    before = poison(second.numel(), dtype=torch.uint8)
    layout.views(before).signal.zero_()
    args = (*to_cpu((x, ids, weights)), bucket.tolist())
    for peer, slot in enumerate((second, first)):
        want, _ = expected(layout, before, *args, peer, word=(1, 1, 0), layer=0, rows=4)
        same_message(layout, slot.cpu(), want, "kernel")
    launches.expect(*plan)


def test_rows_sent_are_counted(launches, plan):
    """They add up over dispatches; a lane that is offline adds nothing."""
    world = World(2, 1, MessageLayout(4, 9, 2, 8, torch.float32))
    size, bucket = blocks(8, 2)
    sent, total = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.zeros(2, dtype=torch.int64)
    for seed, rows in enumerate((9, 0, 4)):
        world.begin([rows], step=seed)
        x, ids, weights = (t.to(DEVICE) for t in routed(9, 8, 2, 8, torch.float32, seed=seed))
        row_map = world.send(0, x, ids, weights, bucket, sent=sent)
        total += (row_map >= 0).sum(1).cpu()
    world.begin([5], modes=[MODE_OFFLINE])
    world.send(0, x, ids, weights, bucket, sent=sent)
    assert sent.tolist() == total.tolist() and total.sum() > 0
    launches.expect(*plan)
