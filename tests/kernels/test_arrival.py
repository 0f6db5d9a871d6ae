# SPDX-License-Identifier: Apache-2.0
"""arrival: the schedule against its reference and against lists that loops make of the messages."""

import pytest
import torch
from kernel_harness import DEVICE, World, blocks, to_cpu
from test_dispatch import routed

from afd_kernels import (
    MODE_OFFLINE,
    MODE_ONLINE,
    Header,
    Lane,
    MessageLayout,
    StatusCode,
    arrival,
    new_schedule,
    schedule_bytes,
    tensor_at,
)
from afd_kernels.arrival import TILE_SHIFT, arrival_ref
from afd_kernels.testing import poison

NAMES = ("row_address", "pair_address", "weight_address", "lane_base", "lane_prefix", "lane_start", "expert_base",
         "tiles", "num_tiles", "error")  # fmt: skip


def sent(rows, experts, top_k, *, hidden=8, cap=None, modes=None, seed=0) -> World:
    """One FFN rank with a message in each lane's slot. modes: as this rank sees the lanes."""
    size, bucket = blocks(experts, 1)
    world = World(1, len(rows), MessageLayout(size, cap or max(rows) + 2, top_k, hidden, torch.float32))
    world.begin(rows)
    for a, tokens in enumerate(rows):
        world.send(a, *routed(tokens, experts, top_k, hidden, torch.float32, seed=seed + a), bucket)
    for a, mode in enumerate(modes or [MODE_ONLINE] * len(rows)):
        world.ffn_lanes[0][a, 2] = mode
    return world


def merged(world: World, active: list[bool]) -> list[list[tuple[int, int]]]:
    """For each expert the (lane, pair) of its rows, in order: what the messages say."""
    lists = [[] for _ in range(world.layout.num_experts)]
    for a, on in enumerate(active):
        if not on:
            continue
        message = world.layout.views(world.requests[0][a].cpu())
        offsets, pairs = message.expert_offsets.tolist(), message.pairs.tolist()
        for expert, rows in enumerate(lists):
            rows += [(a, pair) for pair in pairs[offsets[expert] : offsets[expert + 1]]]
    return lists


def read(schedule, world: World) -> list[list[tuple[int, int]]]:
    """The same lists, read through the schedule as its docstring says."""
    prefix, start = schedule.lane_prefix.tolist(), schedule.lane_start.tolist()
    layout, lists = world.layout, []
    pairs = [
        tensor_at(address, 4 * layout.cap_rows * layout.top_k, DEVICE).view(torch.int32).tolist() if address else []
        for address in schedule.pair_address.tolist()
    ]
    for expert in range(schedule.num_experts):
        rows = []
        for a in range(schedule.num_lanes):
            assert prefix[expert][a] <= prefix[expert][a + 1]
            rows += [(a, pairs[a][start[expert][a] + r]) for r in range(prefix[expert][a], prefix[expert][a + 1])]
        lists.append(rows)
    return lists


def check(schedule, world: World, active: list[bool]) -> None:
    lists = merged(world, active)
    assert read(schedule, world) == lists
    base = [0]
    for rows in lists:
        base.append(base[-1] + len(rows))
    assert schedule.expert_base.tolist() == base
    block_m = schedule.block_m
    tiles = [e | t << TILE_SHIFT for e, rows in enumerate(lists) for t in range(-(-len(rows) // block_m))]
    assert schedule.num_tiles.tolist() == [len(tiles)] and schedule.tiles[: len(tiles)].tolist() == tiles
    rows = [int(world.message(0, a).header[Header.ROWS]) if on else 0 for a, on in enumerate(active)]
    assert schedule.lane_base.tolist() == [sum(rows[:a]) for a in range(len(rows) + 1)]
    slots = world.requests_to(0).tolist()
    layout = world.layout
    for a in (a for a, on in enumerate(active) if on):
        assert int(schedule.row_address[a]) == slots[a] + layout.offset("rows")
        assert int(schedule.weight_address[a]) == slots[a] + layout.offset("weights")
    check_reference(schedule, world)


def check_reference(schedule, world: World) -> None:
    """The reference on CPU copies of the slots; addresses are compared as offsets into their slots."""
    copies = [slot.cpu().clone() for slot in world.requests[0]]
    slots = torch.tensor([c.data_ptr() for c in copies])
    twin = new_schedule(
        schedule.num_lanes, world.layout, block_m=schedule.block_m, device=torch.device("cpu"),
        max_rows=schedule.cap_rows,
    )  # fmt: skip
    lanes, layer = world.merged_with  # a lane that is refused goes offline
    arrival_ref(slots, lanes, world.layout, schedule=twin, layer=layer)
    assert torch.equal(lanes, world.ffn_lanes[0].cpu())
    tiles = int(twin.num_tiles)
    for name in NAMES[3:]:
        a, b = (to_cpu(getattr(s, name)) for s in (schedule, twin))
        if name == "tiles":
            a, b = a[:tiles], b[:tiles]
        if name == "lane_start":  # of a lane without rows of this expert it is never read
            used = twin.lane_prefix[:, 1:] > twin.lane_prefix[:, :-1]
            a, b = a[used], b[used]
        assert torch.equal(a, b), name
    for name in NAMES[:3]:
        assert torch.equal(getattr(schedule, name).cpu() - world.requests_to(0).cpu(), getattr(twin, name) - slots)


def merge(world: World, **kwargs):
    world.merged_with = world.ffn_lanes[0].cpu().clone(), kwargs.get("layer", -1)
    return arrival(world.requests_to(0), world.ffn_lanes[0], world.layout, **kwargs)


@pytest.mark.parametrize(
    "rows,experts,top_k,block_m",
    [([1], 1, 1, 16), ([5], 7, 3, 16), ([5, 3], 62, 6, 16), ([40, 0, 33], 5, 4, 32), ([0, 0], 9, 2, 16),
     ([3, 1, 4, 1, 5, 9, 2, 6], 160, 8, 16), ([2, 7, 1], 384, 8, 64), ([70, 70], 2, 2, 16),
     ([3, 2, 1, 4, 2], 12, 32, 1)],
)  # fmt: skip
def test_merge(rows, experts, top_k, block_m, launches):
    world = sent(rows, experts, top_k)
    schedule = merge(world, block_m=block_m)
    check(schedule, world, [True] * len(rows))
    assert not schedule.error.any()
    assert torch.equal(world.ffn_lanes[0], world.lanes), "arrival changed its lanes"
    launches.expect("_merge_kernel")


def test_more_than_128_tiles_of_one_expert(launches):
    world = sent([150], 1, 1)
    check(merge(world, block_m=1), world, [True])
    launches.expect("_merge_kernel")


@pytest.mark.parametrize("offline", [0, 1, 2])
def test_offline_lane_and_lane_without_a_slot(offline, launches):
    modes = [MODE_ONLINE] * 3
    modes[offline] = MODE_OFFLINE
    world = sent([4, 6, 5], 8, 2, modes=modes)
    check(merge(world), world, [a != offline for a in range(3)])
    slots = world.requests_to(0)
    world.ffn_lanes[0][:, 2] = MODE_ONLINE
    slots[offline] = 0
    schedule = arrival(slots, world.ffn_lanes[0], world.layout)
    lists = merged(world, [a != offline for a in range(3)])
    assert schedule.expert_base.tolist()[-1] == sum(map(len, lists)) and not schedule.error.any()
    launches.expect("_merge_kernel")


def test_one_lane_state_vector_is_refused_by_shape():
    world = sent([4], 8, 2)
    with pytest.raises(ValueError, match="lanes has shape"):
        arrival(world.requests_to(0), world.ffn_lanes[0][0], world.layout)


@pytest.mark.parametrize(
    "field,value",
    [(Header.MAGIC, 0), (Header.MAGIC, 0x5B5B5B5B), (Header.VERSION, 2), (Header.ROWS, 9), (Header.ROWS, -1),
     (Header.PAIRS, -1), (Header.PAIRS, 17)],
)  # fmt: skip
@pytest.mark.parametrize("bad", [0, 1])
def test_refused_header(field, value, bad, launches):
    world = sent([4, 6], 8, 2, cap=8)
    world.message(0, bad).header[field] = value
    schedule = merge(world)
    assert schedule.error.tolist() == [int(a == bad) for a in range(2)]
    check(schedule, world, [a != bad for a in range(2)])
    launches.expect("_merge_kernel")


def test_capacity_is_allowed(launches):
    world = sent([8, 8], 4, 2, cap=8)
    for a in range(2):
        assert int(world.message(0, a).header[Header.ROWS]) <= 8
    schedule = merge(world)
    assert not schedule.error.any()
    check(schedule, world, [True, True])
    launches.expect("_merge_kernel")


def test_schedule_and_workspace_are_used_again(launches):
    """A schedule that held more before: nothing of it shows. Its memory was poison."""
    worlds = [
        sent(rows, 8, 2, cap=50, seed=i) for i, rows in enumerate([[50, 40, 30], [1, 0, 2], [50, 50, 50], [0] * 3])
    ]
    layout = worlds[0].layout
    nbytes = schedule_bytes(3, layout, 16)
    workspace = poison(nbytes + 64, dtype=torch.uint8, device=DEVICE)
    schedule = new_schedule(3, layout, block_m=16, device=torch.device(DEVICE), workspace=workspace)
    for world in worlds:
        world.ffn_lanes[0].copy_(world.lanes)
        assert merge(world, schedule=schedule) is schedule
        check(schedule, world, [True] * 3)
    assert (workspace[nbytes:] == 0x5B).all()
    with pytest.raises(ValueError, match=f"at least {nbytes}"):
        new_schedule(3, layout, block_m=16, device=torch.device(DEVICE), workspace=workspace[: nbytes - 1])
    launches.expect("_merge_kernel")


def test_typed_errors():
    world = sent([4, 6], 8, 2)
    schedule = new_schedule(3, world.layout, block_m=16, device=torch.device(DEVICE))
    with pytest.raises(ValueError, match="schedule is for 3 lanes"):
        merge(world, schedule=schedule)
    schedule = new_schedule(2, world.layout, block_m=32, device=torch.device(DEVICE))
    with pytest.raises(ValueError, match="block_m 32"):
        merge(world, schedule=schedule, block_m=16)
    with pytest.raises(ValueError, match="block_m is 24; allowed: a power of two"):
        merge(world, block_m=24)
    with pytest.raises(ValueError, match="slots is torch.int32"):
        arrival(world.requests_to(0).int(), world.ffn_lanes[0], world.layout)


def status_cells(lanes: int) -> torch.Tensor:
    return torch.full((lanes, 8), -7, dtype=torch.int64, device=DEVICE)


def test_message_of_another_layer_is_refused(launches):
    """The lane goes offline and its cell says which layer came; the others are merged."""
    world = sent([4, 6, 5], 8, 2)
    layer = int(world.message(0, 0).header[Header.LAYER])
    world.message(0, 1).header[Header.LAYER] = layer + 3
    status = status_cells(3)
    schedule = merge(world, layer=layer, status=status)
    assert schedule.error.tolist() == [0, 1, 0]
    check(schedule, world, [True, False, True])
    rows = int(world.message(0, 1).header[Header.ROWS])
    assert status.tolist() == [[-7] * 8, [StatusCode.MALFORMED, 1, layer, layer + 3, rows, 6, -7, -7], [-7] * 8]
    assert world.ffn_lanes[0][:, Lane.MODE].tolist() == [MODE_ONLINE, MODE_OFFLINE, MODE_ONLINE]
    launches.expect("_merge_kernel")


def test_more_rows_than_announced_are_refused(launches):
    world = sent([4, 6], 8, 2)
    world.ffn_lanes[0][1, Lane.ROWS] = int(world.message(0, 1).header[Header.ROWS]) - 1
    status = status_cells(2)
    schedule = merge(world, status=status)
    assert schedule.error.tolist() == [0, 1] and status[:, 0].tolist() == [-7, StatusCode.MALFORMED]
    rows = int(world.message(0, 1).header[Header.ROWS])
    assert status[1, 4:].tolist() == [rows, rows - 1, -7, -7]
    check(schedule, world, [True, False])
    launches.expect("_merge_kernel")


def test_rows_past_the_bound_of_a_size_class_are_refused(launches):
    """The schedule has a bound of all lanes together; the lanes that pass it are refused, those before are served."""
    world = sent([4, 5, 3], 8, 2)
    rows = [int(world.message(0, a).header[Header.ROWS]) for a in range(3)]
    schedule = new_schedule(3, world.layout, block_m=16, device=torch.device(DEVICE), max_rows=rows[0] + rows[1])
    merge(world, schedule=schedule)
    assert schedule.error.tolist() == [0, 0, 1] and schedule.lane_base.tolist()[-1] == rows[0] + rows[1]
    launches.expect("_merge_kernel")
