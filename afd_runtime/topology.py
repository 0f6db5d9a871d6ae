# SPDX-License-Identifier: Apache-2.0
"""Which rank is where, and which FFN rank computes which expert for which attention rank. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from afd_runtime.errors import AFDConfigError


def _check_rank(name: str, value: int, size: int) -> None:
    if not 0 <= value < size:
        raise AFDConfigError(f"{name} is {value}; allowed: 0 … {size - 1} (there are {size})")


def subgroup_attention_block(ffn_rank: int, num_attention_ranks: int, num_ffn_ranks: int) -> range:
    """The contiguous block of attention ranks that belongs to an FFN rank: ``[ceil(f·A/F), ceil((f+1)·A/F))``."""
    _check_rank("ffn_rank", ffn_rank, num_ffn_ranks)
    return range(
        -(-ffn_rank * num_attention_ranks // num_ffn_ranks), -(-(ffn_rank + 1) * num_attention_ranks // num_ffn_ranks)
    )


def ffn_world_rank(ffn_rank: int, num_attention_ranks: int, num_ffn_ranks: int) -> int:
    """World order is ``F0 …, A0 …``: an FFN rank's world rank is its own."""
    _check_rank("ffn_rank", ffn_rank, num_ffn_ranks)
    return ffn_rank


def attention_world_rank(attention_rank: int, num_attention_ranks: int, num_ffn_ranks: int) -> int:
    """World order is ``F0 …, A0 …``: attention rank a is world rank ``F + a``."""
    _check_rank("attention_rank", attention_rank, num_attention_ranks)
    return num_ffn_ranks + attention_rank


def role_rank(*, dp_rank: int = 0, pcp_rank: int = 0, tp_rank: int = 0, pcp_size: int = 1, tp_size: int = 1) -> int:
    """Rank inside a role: ``(dp_rank·pcp_size + pcp_rank)·tp_size + tp_rank``."""
    _check_rank("pcp_rank", pcp_rank, pcp_size)
    _check_rank("tp_rank", tp_rank, tp_size)
    return (dp_rank * pcp_size + pcp_rank) * tp_size + tp_rank


@dataclass(frozen=True)
class ExpertPlacement:
    """Says where (attention rank, expert) is computed.

    ``sharded``: FFN rank f holds a contiguous block of the experts, the remainder on the leading ranks, and serves
    every attention rank. ``replicated``: every FFN rank holds all experts and serves its block of attention ranks.
    """

    kind: Literal["sharded", "replicated"]
    num_experts: int
    num_attention_ranks: int
    num_ffn_ranks: int

    def __post_init__(self) -> None:
        if self.kind not in ("sharded", "replicated"):
            raise AFDConfigError(f"placement is {self.kind!r}; allowed: 'sharded', 'replicated'")
        for name in ("num_experts", "num_attention_ranks", "num_ffn_ranks"):
            if getattr(self, name) < 1:
                raise AFDConfigError(f"{name} is {getattr(self, name)}; allowed: 1 or more")
        if self.kind == "sharded" and self.num_ffn_ranks > self.num_experts:
            raise AFDConfigError(
                f"placement='sharded' with num_ffn_ranks={self.num_ffn_ranks} and num_experts={self.num_experts}: an "
                f"FFN rank would hold no expert; allowed: at most {self.num_experts} FFN ranks"
            )
        if self.kind == "replicated" and self.num_attention_ranks < self.num_ffn_ranks:
            raise AFDConfigError(
                f"placement='replicated' with num_attention_ranks={self.num_attention_ranks} and "
                f"num_ffn_ranks={self.num_ffn_ranks}: an FFN rank would serve nobody; allowed: at least as many "
                "attention ranks as FFN ranks; use placement='sharded' or fewer FFN ranks"
            )

    def local_experts(self, ffn_rank: int) -> range:
        """The global ids of the experts that an FFN rank holds, in local order."""
        _check_rank("ffn_rank", ffn_rank, self.num_ffn_ranks)
        if self.kind == "replicated":
            return range(self.num_experts)
        each, extra = divmod(self.num_experts, self.num_ffn_ranks)
        start = ffn_rank * each + min(ffn_rank, extra)
        return range(start, start + each + (ffn_rank < extra))

    @property
    def num_local_experts_cap(self) -> int:
        """The largest number of experts that any FFN rank holds."""
        return len(self.local_experts(0))

    def peers(self, attention_rank: int) -> tuple[int, ...]:
        """The FFN ranks that an attention rank sends to, in order. Its steps are numbered by the first of them."""
        _check_rank("attention_rank", attention_rank, self.num_attention_ranks)
        if self.kind == "sharded":
            return tuple(range(self.num_ffn_ranks))
        return tuple(f for f in range(self.num_ffn_ranks) if attention_rank in self._block(f))

    def attention_peers(self, ffn_rank: int) -> tuple[int, ...]:
        """The attention ranks that an FFN rank serves, in order."""
        _check_rank("ffn_rank", ffn_rank, self.num_ffn_ranks)
        return tuple(range(self.num_attention_ranks)) if self.kind == "sharded" else tuple(self._block(ffn_rank))

    def sequencer(self, attention_rank: int) -> int:
        """The FFN rank that numbers an attention rank's steps: the first of its peers.

        With ``sharded`` that is FFN rank 0 for everybody, so all FFN ranks serve one order of steps. With
        ``replicated`` a lane lives on one FFN rank only, which needs no order but its own.
        """
        return self.peers(attention_rank)[0]

    def expert_rank(self, attention_rank: int) -> torch.Tensor:
        """int32[num_experts]: the FFN rank that computes each expert for this attention rank."""
        ranks = torch.empty(self.num_experts, dtype=torch.int32)
        for ffn_rank in self.peers(attention_rank):
            ids = self.local_experts(ffn_rank)
            ranks[ids.start : ids.stop] = ffn_rank
        return ranks

    def expert_bucket(self, attention_rank: int) -> torch.Tensor:
        """int32[num_experts]: ``peer index · num_local_experts_cap + local expert`` of each expert."""
        bucket = torch.empty(self.num_experts, dtype=torch.int32)
        for peer_index, ffn_rank in enumerate(self.peers(attention_rank)):
            ids = self.local_experts(ffn_rank)
            first = peer_index * self.num_local_experts_cap
            bucket[ids.start : ids.stop] = torch.arange(first, first + len(ids), dtype=torch.int32)
        return bucket

    def _block(self, ffn_rank: int) -> range:
        return subgroup_attention_block(ffn_rank, self.num_attention_ranks, self.num_ffn_ranks)
