# SPDX-License-Identifier: Apache-2.0
"""Ranks, placements and token counts: pure functions."""

from __future__ import annotations

import itertools

import pytest

from afd_runtime.errors import AFDConfigError
from afd_runtime.ffn_metadata import aggregate_ffn_token_counts
from afd_runtime.topology import (
    ExpertPlacement,
    attention_world_rank,
    ffn_world_rank,
    role_rank,
    subgroup_attention_block,
)


@pytest.mark.parametrize(
    ("counts", "attention_ranks", "ffn_ranks", "want"),
    [
        ((0, 4, 5, 6), 4, 2, (5, 11)),
        ((3, 5), 2, 2, (3, 5)),
        ((1, 2, 3), 3, 2, (3, 3)),
        ((1, 2, 3, 4, 5, 6), 6, 4, (3, 3, 9, 6)),
        ((), 4, 2, (2, 2)),
        ((8,), 2, 1, (16,)),
        ((3, 5), 2, 1, (8,)),
        ((0, 4), 2, 1, (5,)),
        ((0, 0), 2, 1, (2,)),
        ((7,), 1, 2, (7, 0)),
    ],
)
def test_aggregate_ffn_token_counts(counts, attention_ranks, ffn_ranks, want) -> None:
    assert aggregate_ffn_token_counts(counts, attention_ranks, ffn_ranks) == want


def test_aggregate_uses_the_fallback_for_missing_peers() -> None:
    assert aggregate_ffn_token_counts((), 4, 2, fallback_count=8) == (16, 16)
    assert aggregate_ffn_token_counts((1, 2), 3, 1, fallback_count=5) == (8,)


@pytest.mark.parametrize("attention_ranks", range(1, 18))
@pytest.mark.parametrize("ffn_ranks", range(1, 6))
def test_blocks_cover_every_attention_rank_once(attention_ranks: int, ffn_ranks: int) -> None:
    blocks = [subgroup_attention_block(f, attention_ranks, ffn_ranks) for f in range(ffn_ranks)]
    assert list(itertools.chain(*blocks)) == list(range(attention_ranks))
    sizes = [len(block) for block in blocks]
    assert max(sizes) - min(sizes) <= 1


def test_blocks_of_known_groups() -> None:
    assert [list(subgroup_attention_block(f, 6, 4)) for f in range(4)] == [[0, 1], [2], [3, 4], [5]]
    assert [list(subgroup_attention_block(f, 3, 2)) for f in range(2)] == [[0, 1], [2]]
    assert list(subgroup_attention_block(0, 16, 1)) == list(range(16))


def test_world_ranks_are_ffn_first() -> None:
    world = [ffn_world_rank(f, 3, 2) for f in range(2)] + [attention_world_rank(a, 3, 2) for a in range(3)]
    assert world == [0, 1, 2, 3, 4]
    with pytest.raises(AFDConfigError, match="attention_rank is 3; allowed: 0 … 2"):
        attention_world_rank(3, 3, 2)
    with pytest.raises(AFDConfigError, match="ffn_rank is -1"):
        ffn_world_rank(-1, 3, 2)


@pytest.mark.parametrize(("dp", "pcp", "tp"), [(1, 1, 2), (2, 1, 2), (2, 2, 3), (1, 1, 1)])
def test_role_ranks_are_each_there_once(dp: int, pcp: int, tp: int) -> None:
    ranks = [
        role_rank(dp_rank=d, pcp_rank=p, tp_rank=t, pcp_size=pcp, tp_size=tp)
        for d in range(dp)
        for p in range(pcp)
        for t in range(tp)
    ]
    assert ranks == list(range(dp * pcp * tp))


@pytest.mark.parametrize("num_experts", [5, 8, 62, 160])
@pytest.mark.parametrize("ffn_ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", ["sharded", "replicated"])
def test_every_expert_is_computed_once_where_it_is_held(kind: str, num_experts: int, ffn_ranks: int) -> None:
    placement = ExpertPlacement(kind, num_experts, 6, ffn_ranks)
    cap = placement.num_local_experts_cap
    for attention_rank in range(6):
        peers = placement.peers(attention_rank)
        bucket = placement.expert_bucket(attention_rank).tolist()
        ranks = placement.expert_rank(attention_rank).tolist()
        assert len(set(bucket)) == num_experts and placement.sequencer(attention_rank) == peers[0]
        for expert in range(num_experts):
            peer, local = divmod(bucket[expert], cap)
            assert peers[peer] == ranks[expert]
            assert placement.local_experts(ranks[expert])[local] == expert
        assert all(attention_rank in placement.attention_peers(f) for f in peers)
    pairs = sum(len(placement.peers(a)) for a in range(6))
    assert pairs == sum(len(placement.attention_peers(f)) for f in range(ffn_ranks))


def test_sharded_remainder_is_on_the_leading_ranks() -> None:
    placement = ExpertPlacement("sharded", 10, 1, 4)
    assert [list(placement.local_experts(f)) for f in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert placement.num_local_experts_cap == 3
    assert placement.expert_bucket(0).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9, 10]


def test_placements_that_cannot_work_are_refused_by_name() -> None:
    with pytest.raises(AFDConfigError, match="placement='replicated' with num_attention_ranks=1 and num_ffn_ranks=2"):
        ExpertPlacement("replicated", 8, 1, 2)
    with pytest.raises(AFDConfigError, match="num_ffn_ranks=9 and num_experts=8"):
        ExpertPlacement("sharded", 8, 1, 9)
    with pytest.raises(AFDConfigError, match="placement is 'spread'; allowed: 'sharded', 'replicated'"):
        ExpertPlacement("spread", 8, 1, 1)  # type: ignore[arg-type]
    assert ExpertPlacement("replicated", 8, 16, 1).peers(15) == (0,)
    assert ExpertPlacement("sharded", 8, 1, 2).peers(0) == (0, 1)
