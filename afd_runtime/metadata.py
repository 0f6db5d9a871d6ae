# SPDX-License-Identifier: Apache-2.0
"""The payload types of the FFN worker and runner contract."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from afd_runtime.errors import AFDConfigError

if TYPE_CHECKING:
    from afd_kernels.arrival import ExpertSchedule


@dataclass(frozen=True)
class AFDDPMetadata:
    """Tokens of each attention rank in one stage of a step.

    num_tokens_across_dp_cpu: int32[dp] on the CPU; 0: that rank is not in the step. max_tokens_across_dp_cpu: the
    largest.
    """

    num_tokens_across_dp_cpu: torch.Tensor
    max_tokens_across_dp_cpu: int

    @classmethod
    def from_counts(cls, counts: list[int]) -> AFDDPMetadata:
        """From one count per attention rank. Equal counts may give the same object: nobody writes to it."""
        return _metadata(tuple(counts))


@functools.lru_cache(maxsize=1024)
def _metadata(counts: tuple[int, ...]) -> AFDDPMetadata:
    return AFDDPMetadata(torch.tensor(counts, dtype=torch.int32), max(counts, default=0))


@dataclass(frozen=True)
class AFDControlPayload:
    """What the control plane says about one step: a stage → counts map, and what kind of step it is."""

    dp_metadata_list: dict[int, AFDDPMetadata]
    is_graph_capturing: bool = False
    is_warmup: bool = False
    is_graph_replaying: bool = False


@dataclass
class AFDTransferMetadata:
    """Where a transfer belongs. seq_lens: rows of each lane that sent some, each above 0."""

    layer_idx: int
    stage_idx: int
    seq_lens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if any(length <= 0 for length in self.seq_lens):
            raise AFDConfigError(f"seq_lens is {self.seq_lens}; allowed: lengths above 0; leave idle lanes out")


@dataclass
class AFDTransferContext:
    """Goes from ``recv_attn_output`` to ``send_ffn_output``. states: whatever the connector needs to answer."""

    metadata: AFDTransferMetadata
    states: Any = None


@dataclass
class AFDA2FTransferPayload:
    """What the FFN side received for one (layer, stage).

    hidden_states: [rows, H]; empty with a packed message, whose rows stay in the slots. routing: the packed message's
    schedule. router_logits, input_ids: for connectors that send them instead.
    """

    hidden_states: torch.Tensor
    context: AFDTransferContext
    router_logits: torch.Tensor | None = None
    input_ids: torch.Tensor | None = None
    routing: ExpertSchedule | None = None
