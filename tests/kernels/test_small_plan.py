# SPDX-License-Identifier: Apache-2.0
"""One launch plans a small batch: bit by bit what the launches of a large one write, on both sides of the switch."""

import sys

import pytest
import torch
import triton
from kernel_harness import DEVICE, World, blocks, generator, round_robin, same_bits, to_cpu

from afd_kernels import MODE_OFFLINE, MODE_ONLINE, MessageLayout
from afd_kernels.plan import carve_plan, launch_plan
from afd_kernels.small_plan import MAX_PAIRS, PAIRS_PER_STEP, is_small, launch_small_plan
from afd_kernels.testing import poison

LARGE = ("_plan_count_kernel", "_plan_scan_kernel", "_plan_write_kernel", "_pack_kernel")


def choices(tokens, experts, top_k, *, seed=0):
    """(ids, weights): some ids are -1 or past the experts, some weights 0, and some tokens have no expert at all."""
    g = generator(seed)
    ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=g, dtype=torch.int32)
    ids[torch.rand(tokens, top_k, generator=g) < 0.1] = -1
    ids[torch.rand(tokens, generator=g) < 0.2] = -1
    weights = torch.rand(tokens, top_k, generator=g) + 0.01
    weights[torch.rand(tokens, top_k, generator=g) < 0.1] = 0
    return ids.to(DEVICE), weights.to(DEVICE)


@pytest.fixture
def force(monkeypatch):
    """Says of every batch that it is small, or that it is large."""
    module = sys.modules["afd_kernels.dispatch"]
    return lambda small: monkeypatch.setattr(module, "is_small", lambda *sizes: small)


def sent_with(force, small, peers, experts, top_k, tokens, *, rows=None, mode=MODE_ONLINE, placement=round_robin):
    """All that a dispatch writes: slots, row map, rows sent."""
    force(small)
    size, bucket = placement(experts, peers)
    world = World(peers, 1, MessageLayout(size, max(1, tokens), top_k, 17, torch.float32))
    world.begin([tokens if rows is None else rows], modes=[mode])
    ids, weights = choices(tokens, experts, top_k, seed=tokens)
    x = torch.randn(tokens, 17, generator=generator(1)).to(DEVICE)
    row_map = poison(peers, tokens, dtype=torch.int32, device=DEVICE)
    sent = torch.full((peers,), 5, dtype=torch.int64, device=DEVICE)
    world.send(0, x, ids, weights, bucket, row_map=row_map, sent=sent, layer=3)
    return to_cpu([*(slots[0] for slots in world.requests), row_map, sent])


def check(force, launches, *args, **kwargs):
    small, large = (sent_with(force, which, *args, **kwargs) for which in (True, False))
    for a, b in zip(small, large, strict=True):
        assert same_bits(a, b)
    launches.expect("_dispatch_kernel", *(LARGE if args[3] else LARGE[-1:]))
    return small


SIZES = [  # peers, experts, top_k, tokens
    (1, 1, 1, 1), (1, 62, 8, 33), (2, 160, 6, 70), (8, 384, 8, 21), (8, 62, 3, 67), (1, 384, 32, 35), (3, 62, 1, 70),
    (2, 160, 32, 5), (33, 384, 4, 9), (2, 62, 5, 0), (8, 160, 8, 1),
]  # fmt: skip


@pytest.mark.parametrize("placement", [blocks, round_robin])
@pytest.mark.parametrize("peers,experts,top_k,tokens", SIZES)
def test_same_bytes(peers, experts, top_k, tokens, placement, force, launches):
    check(force, launches, peers, experts, top_k, tokens, placement=placement)


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("top_k", [8, 13, 32])
def test_around_a_step_of_the_loop(top_k, more, force, launches):
    """A program reads the choices step by step; the last step holds one token, all, or one less."""
    tokens = PAIRS_PER_STEP // triton.next_power_of_2(top_k) + more
    check(force, launches, 2, 62, top_k, tokens)


@pytest.mark.parametrize("rows", [0, 1, 33, 70])
def test_rows_of_the_lane(rows, force, launches):
    row_map = check(force, launches, 2, 62, 32, 70, rows=rows)[-2]
    assert (row_map[:, rows:] == -1).all()


def test_offline(force, launches):
    *slots, row_map, sent = check(force, launches, 2, 62, 8, 9, mode=MODE_OFFLINE)
    assert (row_map == -1).all() and sent.tolist() == [5, 5]


@pytest.mark.parametrize("top_k,most", [(32, 128), (17, 128), (8, 512), (5, 512), (1, 4096)])
def test_where_the_switch_lies(top_k, most):
    assert MAX_PAIRS == 4096
    assert is_small(0, top_k, 512) and is_small(most, top_k, 512) and not is_small(most + 1, top_k, 512)
    assert not is_small(1, top_k, 1 << 19), "the key of a pair would not fit 32 bits"


def test_dispatch_on_both_sides_of_the_switch(launches):
    """Nothing forced: the last batch of one launch, and the first of four, against the plain reference."""
    size, bucket = round_robin(62, 2)
    for tokens, kernels in ((128, ("_dispatch_kernel",)), (129, LARGE)):
        before = launches.copy()
        world = World(2, 1, MessageLayout(size, 129, 32, 3, torch.float32))
        world.begin([tokens])
        ids, weights = choices(tokens, 62, 32)
        row_map = world.send(0, torch.ones(tokens, 3, device=DEVICE), ids, weights, bucket)
        assert {n for n in launches if launches[n] > before[n]} - {"_begin_kernel"} == set(kernels)
        real = (ids >= 0) & (ids < 62) & (weights != 0)
        for peer in range(2):
            here = (real & (ids % 2 == peer)).any(1)
            assert torch.equal(row_map[peer], torch.where(here, here.cumsum(0) - 1, -1).int())


@pytest.mark.parametrize("experts,top_k,tokens", [(1, 1, 1), (62, 8, 33), (160, 6, 130), (384, 32, 33)])
def test_layer_on_one_rank(experts, top_k, tokens, launches):
    layout = MessageLayout(experts, tokens, top_k, 8, torch.float32)
    ids, weights = choices(tokens, experts, top_k)
    bucket = torch.arange(experts, dtype=torch.int32, device=DEVICE)
    small, large = (poison(layout.offset("rows"), dtype=torch.uint8, device=DEVICE) for _ in range(2))
    launch_small_plan(ids, weights, bucket, small, layout)
    _, starts, counts = carve_plan(_Fresh(), tokens, top_k, experts, 1)
    launch_plan(ids, weights, bucket, large, large, large, counts, starts, layout, 1, 0, local=True)
    assert same_bits(small, large) and not (small == 0x5B).all()
    launches.expect("_small_plan_kernel", *LARGE[:3])


class _Fresh:
    """Memory of its own for each part of the plan's workspace."""

    def take(self, shape, dtype):
        return torch.zeros(shape, dtype=dtype, device=DEVICE)
