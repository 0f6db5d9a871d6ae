# SPDX-License-Identifier: Apache-2.0
"""Counts the Triton launches of a process by kernel name (``AFD_COUNT_KERNELS=1``), replayed CUDA graphs included.

Imported only where launches are counted. A launch that is captured runs with each replay of its graph and not before,
so captured launches are counted for each graph apart and multiplied by its replays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import triton

from afd_runtime.errors import AFDError

if TYPE_CHECKING:
    from afd_runtime.server import FFNServer
    from afd_runtime.stage_graphs import StageGraphs


class FFNCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an FFN rank ran: launches by kernel name, graph replays, steps served."""

    kernels: dict[str, int]
    replays: int
    steps: int


class KernelCounts:
    """Launches since ``start``. launches: those that ran at once, by kernel name. captured: of each graph, in order.

    Graphs are told apart by the launches between their captures: in front of each the same work runs once eagerly.
    """

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.captured: list[Counter[str]] = []
        self._in_capture = False

    @classmethod
    def start(cls) -> KernelCounts:
        """Counts from here on, by Triton's launch hook."""
        counts = cls()
        triton.knobs.runtime.launch_enter_hook.add(counts.note)
        return counts

    def stop(self) -> None:
        """Counts no more."""
        triton.knobs.runtime.launch_enter_hook.remove(self.note)

    def note(self, metadata: Any) -> None:
        """The launch hook."""
        capturing = torch.cuda.is_current_stream_capturing()
        if capturing and not self._in_capture:
            self.captured.append(Counter())
        self._in_capture = capturing
        (self.captured[-1] if capturing else self.launches)[metadata.get()["name"]] += 1

    def replayed(self, stages: Iterable[StageGraphs]) -> Counter[str]:
        """Launches by the replays of all graphs of ``stages``, given in the order in which they were captured.

        Raises ``AFDError`` where there are not as many graphs as captures.
        """
        replays = [graphs.replays[bound] for graphs in stages for bound in graphs.graphs]
        if len(replays) != len(self.captured):
            seen = len(self.captured)
            raise AFDError(f"{seen} captures were seen for {len(replays)} graphs; count from before the first capture")
        total: Counter[str] = Counter()
        for count, kernels in zip(replays, self.captured, strict=True):
            total.update({name: count * launches for name, launches in kernels.items() if count})
        return total

    def of_server(self, server: FFNServer) -> FFNCounts:
        """What ``server`` ran since its graphs were captured (``launches`` was cleared then)."""
        stages = server.runner.stage_graphs.values()
        replays = sum(sum(graphs.replays.values()) for graphs in stages)
        return FFNCounts(dict(self.launches + self.replayed(stages)), replays, server.steps_served)


def total_counts(attention: Iterable[Mapping[str, int]], ffn: Sequence[FFNCounts]) -> dict[str, Any]:
    """``GenerateReport.kernels``: the sums over the attention ranks' launches and over the FFN ranks' counts."""
    kernels: dict[str, Counter[str]] = {"attention": Counter(), "ffn": Counter()}
    for launches in attention:
        kernels["attention"].update(launches)
    for counts in ffn:
        kernels["ffn"].update(counts.kernels)
    steps = {"ffn_steps": sum(counts.steps for counts in ffn), "ffn_replays": sum(counts.replays for counts in ffn)}
    return {**{role: dict(sorted(found.items())) for role, found in kernels.items()}, **steps}
