# SPDX-License-Identifier: Apache-2.0
"""Device times from CUDA-graph replays, and a kernel that does nothing for a given time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch
import triton
import triton.language as tl

from afd_kernels.signal import global_timer

ROUNDS = 30


def capture(function: Callable[[], object], stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    """The graph of ``function``, which has run once on ``stream`` (default: the current one)."""
    graph = torch.cuda.CUDAGraph()
    stream = stream or torch.cuda.current_stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        function()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Device time of one replay, in µs."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def repeated(op: Callable[[int], object], calls: int) -> Callable[[], float]:
    """Measures ``op``: each call gives the device time in µs of one of ``calls`` in a graph. ``op`` gets 0, 1, …"""

    def all_calls() -> None:
        for index in range(calls):
            op(index)

    all_calls()
    graph = capture(all_calls)
    return lambda: replay_us(graph) / calls


def op_us(op: Callable[[int], object], calls: int = 20) -> float:
    """Median device time of one call of ``op`` in a graph of ``calls``, in µs."""
    measure = repeated(op, calls)
    measure()
    return statistics.median(measure() for _ in range(ROUNDS))


def rounds(measures: Mapping[str, Callable[[], float]], count: int = ROUNDS) -> dict[str, list[float]]:
    """``count`` figures of each measure, taken in turn: A B C, C B A, A B C, …"""
    for measure in measures.values():
        measure()
    figures: dict[str, list[float]] = {name: [] for name in measures}
    for index in range(count):
        for name in list(measures)[:: -1 if index % 2 else 1]:
            figures[name].append(measures[name]())
    return figures


@triton.jit
def _delay_kernel(stamps_ptr, duration_ptr):
    start = global_timer()
    tl.store(stamps_ptr, start)
    duration = tl.load(duration_ptr)
    now = start
    while now - start < duration:
        now = global_timer()
    tl.store(stamps_ptr + 1, now)


class Delay:
    """A kernel of one warp that polls the device's clock; the duration is read on the device, so a graph may hold it.

    stamps: int64[2], nanoseconds of that clock at its last start and end.
    """

    def __init__(self, device: torch.device, us: float = 0.0) -> None:
        self.stamps = torch.zeros(2, dtype=torch.int64, device=device)
        self.duration = torch.zeros(1, dtype=torch.int64, device=device)
        self.launch()  # loads it: a first launch would wait for kernels that wait
        self.set(us)

    def set(self, us: float) -> None:
        """Of the launches and replays from now on. Waits until the device has it."""
        self.duration.fill_(round(us * 1e3))
        torch.cuda.current_stream().synchronize()

    def launch(self) -> None:
        """On the current stream."""
        _delay_kernel[(1,)](self.stamps, self.duration, num_warps=1, enable_fp_fusion=True)

    def read(self) -> tuple[int, int]:
        """Start and end of the last launch in ns. The stream that it ran on has been waited for."""
        start, end = self.stamps.tolist()
        return start, end
