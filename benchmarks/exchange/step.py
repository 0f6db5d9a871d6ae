# SPDX-License-Identifier: Apache-2.0
"""Records one step of two stages in flight, kernel by kernel, for a picture."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.exchange import trace
from benchmarks.exchange.group import SHAPES, Bank, Exchange, Spec, Stage, exchange
from benchmarks.exchange.timing import Delay

SHAPE, LAYERS, ROWS, WORK_US = "qwen3-30b", 4, 64, 100.0
TITLE = f"One step, two stages in flight: {SHAPE}, {LAYERS} layers, {ROWS} rows a stage"


class Replay:
    """A graph's replay, noted in the order of all launches. ``replay`` is what a caller needs of it."""

    lock = threading.Lock()

    def __init__(self, launched: list[tuple[str, int]], role: str, stage: int, replay: Callable[..., None]) -> None:
        self._launched, self._place, self._replay = launched, (role, stage), replay

    def replay(self, *args: Any) -> None:
        with self.lock:
            self._launched.append(self._place)
            self._replay(*args)


def record(device: torch.device) -> list[dict[str, Any]]:
    """Runs and checks a step of two stages, then records one: ``trace.spans``.

    A kernel that holds one SM for ``WORK_US`` stands in front of each layer for the attention work, which in a real
    group runs on a GPU of its own.
    """
    bank = Bank(Spec(*SHAPES[SHAPE], num_layers=LAYERS), device)
    with torch.cuda.stream(torch.cuda.Stream(device)), exchange(bank, num_stages=2, max_batch_tokens=ROWS) as group:
        works = [Delay(device, WORK_US) for _ in range(2)]
        stages = [Stage(group, ROWS, s, before=lambda _, s=s: works[s].launch()) for s in range(2)]
        group.checked_step(stages)
        launched = note_launches(group, stages)
        trace.profile(lambda: group.step_us(stages))  # the profiler's own start
        group.settle()
        launched.clear()
        kernels = trace.kernels_of(trace.profile(lambda: group.step_us(stages)))
        return trace.spans(kernels, launched)


def note_launches(group: Exchange, stages: Sequence[Stage]) -> list[tuple[str, int]]:
    """From now on the returned list grows by (role, stage) with each graph that is launched."""
    launched: list[tuple[str, int]] = []
    for stage, graphs in group.servers[0].runner.stage_graphs.items():
        graphs.replay = Replay(launched, "ffn", stage, graphs.replay).replay  # type: ignore[method-assign]
    for one in stages:
        one.graph = Replay(launched, "attention", one.stage, one.graph.replay)  # type: ignore[assignment]
    return launched
