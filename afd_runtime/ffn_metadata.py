# SPDX-License-Identifier: Apache-2.0
"""Token counts of the FFN side, for size classes and metrics. The true counts travel in the packed header."""

from __future__ import annotations

from collections.abc import Sequence

from afd_runtime.topology import subgroup_attention_block


def aggregate_ffn_token_counts(
    token_counts: Sequence[int], num_attention_ranks: int, num_ffn_ranks: int, *, fallback_count: int = 1
) -> tuple[int, ...]:
    """Sums the counts of each FFN rank's block of attention ranks.

    token_counts: one count per attention rank, or one per data-parallel rank (then each is repeated for its
    tensor-parallel peers). Every peer counts as at least 1; a peer without a count as ``fallback_count``.
    Returns one sum per FFN rank.
    """
    counts = [int(count) for count in token_counts]
    if counts and num_attention_ranks % len(counts) == 0:
        repeat = num_attention_ranks // len(counts)
        counts = [count for count in counts for _ in range(repeat)]
    return tuple(
        sum(
            max(1, counts[attention_rank] if attention_rank < len(counts) else fallback_count)
            for attention_rank in subgroup_attention_block(ffn_rank, num_attention_ranks, num_ffn_ranks)
        )
        for ffn_rank in range(num_ffn_ranks)
    )
