# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of the FFN step: one for each (stage, size class), over all exchanged layers, for every token layout.

A size class is a bound of the rows of all lanes together; it picks the tile shapes. Counts, participants and slot
addresses are read on the device, so a graph that was captured before any peer existed serves whoever attaches. Each
stage has one arena, sized for its largest class before the first capture and never grown.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import afd_kernels
from afd_runtime.errors import AFDCapacityError, AFDConfigError

if TYPE_CHECKING:
    from afd_kernels.arrival import ExpertSchedule
    from afd_runtime.connectors.p2p_ffn import FFNSide

logger = logging.getLogger("afd_runtime.ffn")
MAX_CLASSES = 4


def size_classes(max_rows: int) -> tuple[int, ...]:
    """Row bounds of the size classes of a stage that can get ``max_rows`` rows: at most four, the last is max_rows."""
    return tuple(bound for bound in (64, 512, 2048) if bound < max_rows) + (max_rows,)


@dataclass(frozen=True)
class Arena:
    """What the layers of a stage share. y: [rows * k, H]; h: uint8, activations; schedule: uint8; counter: of reply."""

    y: torch.Tensor
    h: torch.Tensor
    schedule: torch.Tensor
    counter: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return sum(t.numel() * t.element_size() for t in (self.y, self.h, self.schedule, self.counter))


class StageGraphs:
    """The graphs of one stage of an FFN rank.

    bank: ``ExpertBank`` on the device. classes: row bounds, ascending (default: ``size_classes``).
    replays: replays so far, by class.
    """

    def __init__(self, side: FFNSide, bank: Any, stage: int, classes: Sequence[int] | None = None) -> None:
        self.side, self.bank, self.stage = side, bank, stage
        most = len(side.served) * side.config.max_batch_tokens
        self.classes = tuple(classes or size_classes(most))
        if not 1 <= len(self.classes) <= MAX_CLASSES or list(self.classes) != sorted(set(self.classes)):
            raise AFDConfigError(f"size classes are {self.classes}; allowed: 1 … {MAX_CLASSES}, ascending")
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.replays = dict.fromkeys(self.classes, 0)
        self.arena: Arena | None = None

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures the classes that are missing. No peer takes part: every lane is offline."""
        if self.arena is None:
            self.arena = self._new_arena()
        stream = torch.cuda.Stream(self.side.device, priority=-1)
        for bound in self.classes:
            if bound in self.graphs:
                continue
            with torch.cuda.stream(stream):
                self._serve(bound)  # compiles and loads every kernel
                stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._serve(bound)
            with torch.cuda.stream(stream):
                graph.replay()  # uploads it
                stream.synchronize()
            self.graphs[bound] = graph
        self.side.tables[self.stage].captured()
        logger.info("stage %d: graphs for %s rows, arena %d bytes", self.stage, self.classes, self.arena.nbytes)

    def replay(self, rows: int) -> None:
        """Launches the smallest class that holds ``rows``, on the current stream.

        Raises ``AFDCapacityError`` where none does.
        """
        bound = next((bound for bound in self.classes if rows <= bound), None)
        if bound is None:
            raise AFDCapacityError(f"the step has {rows} rows; the largest size class holds {self.classes[-1]}")
        self.replays[bound] += 1
        self.graphs[bound].replay()

    def _new_arena(self) -> Arena:
        side, bound = self.side, self.classes[-1]
        layout, device, lanes = side.layout.request, side.device, len(side.served)
        schedules = [self._schedule_shape(c) for c in self.classes]
        nbytes = max(afd_kernels.schedule_bytes(lanes, layout, block_m, c) for c, block_m in schedules)
        inner = side.spec.intermediate_size
        return Arena(
            y=torch.zeros(bound * layout.top_k, layout.hidden_size, dtype=layout.dtype, device=device),
            h=torch.zeros(
                max(16, bound * layout.top_k * inner * layout.dtype.itemsize), dtype=torch.uint8, device=device
            ),
            schedule=torch.zeros(nbytes, dtype=torch.uint8, device=device),
            counter=torch.zeros(afd_kernels.REPLY_WORKSPACE, dtype=torch.uint8, device=device),
        )

    def _schedule_shape(self, bound: int) -> tuple[int, int]:
        layout = self.side.layout.request
        experts, device = self.side.num_local_experts, self.side.device
        configs = afd_kernels.pick_experts(bound * layout.top_k, experts, layout.dtype, device)
        return bound, configs[0].block_m

    def _serve(self, bound: int) -> None:
        arena, layout = self.arena, self.side.layout.request
        assert arena is not None
        _, block_m = self._schedule_shape(bound)
        schedule = afd_kernels.new_schedule(
            len(self.side.served), layout, block_m=block_m, device=self.side.device, max_rows=bound,
            workspace=arena.schedule,
        )  # fmt: skip
        tables = self.side.tables[self.stage]
        tables.enter()
        for index, layer in enumerate(self.side.spec.expert_layers):
            self._serve_layer(index, layer, schedule, arena.y[: bound * layout.top_k])
        afd_kernels.leave_step(tables.clocks, tables.read_clocks)

    def _serve_layer(self, index: int, layer: int, schedule: ExpertSchedule, y: torch.Tensor) -> None:
        side, arena = self.side, self.arena
        assert arena is not None
        tables = side.tables[self.stage]
        tables.wait(side.config.peer_timeout_s, index)
        afd_kernels.arrival(
            tables.slots, tables.lanes, side.layout.request, schedule=schedule, layer=layer, status=tables.status
        )
        self.bank.forward(layer, side.local_schedule(schedule), y=y, workspace=arena.h)
        afd_kernels.reply(
            y, schedule, tables.reply_slots, tables.lanes, side.layout.reply, bells=tables.peer_bells,
            clock=tables.clocks[index], workspace=arena.counter,
        )  # fmt: skip
