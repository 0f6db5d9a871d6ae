# SPDX-License-Identifier: Apache-2.0
"""P9: what a step costs the FFN side's host, and that one captured size class serves every number of rows."""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

import afd_kernels
from afd_kernels.message import LANE_FIELDS
from afd_kernels.signal import CLOCK_FIELDS
from benchmarks.exchange.group import Bank, Exchange, Spec, Stage, exchange
from benchmarks.exchange.ops import Ops
from benchmarks.exchange.report import MAX_GRAPHS, P9_HOST_US, P9_RATIO, Result, all_of, verdict
from benchmarks.exchange.timing import Delay, rounds

HOST_SPEC = Spec(num_experts=8, hidden_size=256, intermediate_size=128, top_k=2, num_layers=60)
HOST_STEPS = 200
WARM_STEPS = 20
REPLAY_ROWS = (1, 16, 100, 256)
QUEUE_US = 20_000.0  # longer than the host needs to queue the launches of an eager step

Spans = dict[int, list[tuple[float, float]]]


def timed_spans(
    start: tuple[Any, str], ends: Sequence[tuple[Any, str]], *, from_return: bool, times: Callable[[], tuple[int, int]]
) -> Spans:
    """Replaces methods of objects so that the time from ``start`` to an end's return is kept, by thread, in µs.

    start, ends: (object, method's name). from_return: counts from where ``start`` returns, else from its call. times:
    two clocks in ns. A second end without a start counts nothing.
    """
    spans: Spans = defaultdict(list)
    marks = threading.local()
    begin = getattr(*start)

    def begins(*args: Any, **kwargs: Any) -> Any:
        marks.at = times()
        result = begin(*args, **kwargs)
        if from_return:
            marks.at = times()
        return result

    def ending(end: Callable) -> Callable:
        def ends_here(*args: Any, **kwargs: Any) -> Any:
            result = end(*args, **kwargs)
            began, marks.at = getattr(marks, "at", None), None
            if began is not None:
                wall, cpu = (1e-3 * (now - then) for now, then in zip(times(), began, strict=True))
                spans[threading.get_ident()].append((wall, cpu))
            return result

        return ends_here

    setattr(*start, begins)
    for owner, name in ends:
        setattr(owner, name, ending(getattr(owner, name)))
    return spans


def timed_call(owner: Any, name: str) -> list[float]:
    """Replaces a method so that the host µs of each call are kept."""
    found: list[float] = []
    method = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter_ns()
        result = method(*args, **kwargs)
        found.append((time.perf_counter_ns() - start) * 1e-3)
        return result

    setattr(owner, name, timed)
    return found


def per_step(spans: Spans, steps: int) -> tuple[float, float]:
    """Medians over the last ``steps`` steps of (wall, CPU) µs, summed over the threads, one for each stage.

    Raises ``ValueError`` where a thread has fewer.
    """
    short = {thread: len(found) for thread, found in spans.items() if len(found) < steps}
    if short or not spans:
        raise ValueError(f"steps timed by thread: {short or 'none'}; allowed: {steps} in each")
    last = [found[-steps:] for found in spans.values()]
    sums = [[sum(part) for part in zip(*step, strict=True)] for step in zip(*last, strict=True)]
    return statistics.median(wall for wall, _ in sums), statistics.median(cpu for _, cpu in sums)


def measure_host(device: torch.device) -> Result:
    """200 steps of 60 layers in two stages: host time, replays, graphs, memory. Small experts: the host sees none.

    launch: from the order to the launched graph, of which replay is the launch of the graph alone. finish: from the
    step's end to the loop's next order. Both stages together; wall time holds what the threads wait for each other.
    """
    with exchange(Bank(HOST_SPEC, device), num_stages=2, max_batch_tokens=4096) as group:
        stages = [Stage(group, 16, stage) for stage in range(2)]
        group.checked_step(stages)
        server = group.servers[0]
        side, graphs = server.connector.ffn, server.runner.stage_graphs

        def clocks() -> tuple[int, int]:
            return time.perf_counter_ns(), time.thread_time_ns()

        calls = [timed_call(graph, "replay") for graph in graphs.values()]
        replays = [(graph, "replay") for graph in graphs.values()]
        launch = timed_spans((side.control, "next_orders"), replays, from_return=True, times=clocks)
        finish = timed_spans((side, "settle"), [(side, "leave")], from_return=False, times=clocks)
        for _ in range(WARM_STEPS):
            group.step_us(stages)
        before = memory(group)
        for _ in range(HOST_STEPS):
            group.step_us(stages)
        after = memory(group)
        (launch_us, launch_cpu), (finish_us, finish_cpu) = (per_step(s, HOST_STEPS) for s in (launch, finish))
        checks = {
            "host": launch_us + finish_us <= P9_HOST_US,
            "every step replays": server.runner.eager_steps == 0
            and all(sum(graph.replays.values()) == group.steps // 2 for graph in graphs.values()),
            "graphs": all(1 <= len(graph.graphs) <= MAX_GRAPHS for graph in graphs.values()),
            "memory": before == after,
        }
        return {
            "host_us": launch_us + finish_us, "launch_us": launch_us, "finish_us": finish_us,
            "replay_us": sum(statistics.median(call[-HOST_STEPS:]) for call in calls),
            "launch_cpu_us": launch_cpu, "finish_cpu_us": finish_cpu, "limit": P9_HOST_US, "steps": group.steps // 2,
            "replays": {stage: dict(graph.replays) for stage, graph in graphs.items()}, "memory_before": before,
            "graphs_per_stage": [len(graph.graphs) for graph in graphs.values()], "memory_after": after,
            **all_of("P9", checks),
        }  # fmt: skip


def memory(group: Exchange) -> dict[str, int]:
    """Bytes that torch holds, and that the device has free, between steps."""
    group.settle()
    torch.cuda.synchronize()
    return {"allocated": torch.cuda.memory_allocated(), "free": torch.cuda.mem_get_info()[0]}


def measure_replay(bank: Bank, rows: int, layers: int = 8) -> Result:
    """The FFN side's device time per layer with ``rows`` rows: its graph, and an eager call of exactly that size.

    Both by the same clock: from the end of the wait to the end of the reply.
    """
    bank = bank.with_layers(layers)
    with exchange(bank, max_batch_tokens=max(REPLAY_ROWS)) as group:
        stage = Stage(group, rows)
        group.checked_step([stage])
        figures = rounds({"replay_us": lambda: replayed_us(group, stage), "eager_us": EagerStep(bank, rows).us})
        ratio = statistics.median(replay / eager for replay, eager in zip(*figures.values(), strict=True))
        medians = {name: statistics.median(values) for name, values in figures.items()}
        classes = list(group.servers[0].runner.stage_graphs[0].classes)
        return {**medians, "ratio": ratio, "classes": classes, "layers": layers, **verdict("P9", ratio, P9_RATIO)}


def replayed_us(group: Exchange, stage: Stage) -> float:
    """One step; µs per layer that its FFN graph computed and replied."""
    before = group.clocks()
    group.step_us([stage])
    return float((group.clocks() - before)[:, 1:3].sum(1).double().mean()) * 1e-3


class EagerStep:
    """The FFN side of a step, sized for exactly ``rows`` rows, op by op without a graph."""

    def __init__(self, bank: Bank, rows: int) -> None:
        self.ops, self.layers = Ops(bank, rows), bank.spec.num_layers
        self.ops.check()
        device = bank.device
        self.delay = Delay(device, QUEUE_US)
        self.clock = torch.zeros(CLOCK_FIELDS, dtype=torch.int64, device=device)
        self.offline = torch.zeros(1, LANE_FIELDS, dtype=torch.int64, device=device)
        self.abort = torch.zeros(1, dtype=torch.int32, device=device)
        self.status = torch.zeros(1, LANE_FIELDS, dtype=torch.int64, device=device)

    def us(self) -> float:
        """µs per layer by the clock. The launches queue behind a delay, so that the device never waits for the host."""
        self.clock.zero_()
        self.delay.launch()
        for layer in range(self.layers):
            self.ops.dispatch(layer)
            afd_kernels.wait(  # of a lane that is offline: passes at once and sets the clock
                self.ops.slots, self.offline, abort=self.abort, status=self.status, timeout_s=1.0, clock=self.clock
            )
            self.ops.arrival()
            self.ops.experts()
            self.ops.reply(clock=self.clock)
        _, computed, replied, _ = self.clock.tolist()
        return (computed + replied) * 1e-3 / self.layers
