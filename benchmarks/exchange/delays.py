# SPDX-License-Identifier: Apache-2.0
"""A delay on one side moves the other side's finish by as much and changes no bit; a lost publish ends at the limit."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from afd_runtime.errors import AFDError, AFDTimeoutError
from benchmarks.exchange.group import Bank, Exchange, Spec, Stage, exchange
from benchmarks.exchange.report import Result, all_of, shift_tolerance
from benchmarks.exchange.timing import Delay

SPEC = Spec(num_experts=8, hidden_size=256, intermediate_size=128, top_k=2, num_layers=6)
ROWS = 16
AT_LAYER = 3
DELAYS_US = (0.0, 20.0, 1000.0)
REPEATS = 15
PLACES = ("attention", "experts", "FFN graph")
ORDERS = ("FFN first", "attention first")
LIMIT_S = 0.5
COVER_US = 500.0  # in front of the FFN side's graph: what the host needs to launch it passes behind this delay


def cases() -> list[tuple[str, str]]:
    """(place, order) of each delay case.

    In front of the FFN side's graph a delay is only visible while the attention side waits already: attention first.
    """
    return [(place, order) for place in PLACES for order in ORDERS if place != "FFN graph" or order == ORDERS[1]]


@dataclass
class Rig:
    """A group with a delay in each place: in both sides' graphs at ``AT_LAYER``, and in front of the FFN side's.

    finish: stamps the end of the attention side. may_launch, launched: of the FFN side's graph.
    """

    group: Exchange
    stage: Stage
    delays: dict[str, Delay]
    finish: Delay
    may_launch: threading.Event
    launched: threading.Event

    def step(self, order: str) -> dict[str, int]:
        """One step, whose graphs are launched in that order. Returns ns by the device's clock.

        FFN graph: when the delay in front of it began. reply: end of the last reply before ``AT_LAYER``. FFN end,
        attention end: of each side's step.
        """
        group, stage = self.group, self.stage
        stage.poison()
        torch.cuda.current_stream().synchronize()
        self.may_launch.clear()
        self.launched.clear()
        group.begin([stage])
        if order == ORDERS[0]:
            self.may_launch.set()
            if not self.launched.wait(5.0):
                raise TimeoutError("the FFN side did not launch its graph within 5 s")
        with torch.cuda.stream(stage.stream):
            stage.graph.replay()
            self.finish.launch()
            self.may_launch.set()
            group.session.end_step(stage.stage)
        replies = group.clocks()[:, 3].tolist()
        return {
            "FFN graph": self.delays["FFN graph"].read()[0], "reply": replies[AT_LAYER - 1], "FFN end": replies[-1],
            "attention end": self.finish.read()[0],
        }  # fmt: skip


@contextlib.contextmanager
def rig(device: torch.device) -> Iterator[Rig]:
    """A small group with its delays, all of them 0."""
    delays = {place: Delay(device) for place in PLACES}

    def at_layer(place: str):
        return lambda layer: delays[place].launch() if layer == AT_LAYER else None

    with exchange(Bank(SPEC, device, before=at_layer("experts")), max_batch_tokens=ROWS) as group:
        stage = Stage(group, ROWS, before=at_layer("attention"))
        found = Rig(group, stage, delays, Delay(device), threading.Event(), threading.Event())
        graphs = group.servers[0].runner.stage_graphs[0]
        replay = graphs.replay

        def hold(rows: int) -> None:
            found.may_launch.wait(5.0)
            delays["FFN graph"].launch()
            replay(rows)
            found.launched.set()

        graphs.replay = hold  # type: ignore[method-assign]
        found.may_launch.set()
        group.checked_step([stage])
        yield found


def span_us(place: str, times: dict[str, int]) -> float:
    """From a moment before the delay in ``place``, on which both sides agree, to the other side's end."""
    start = times["FFN graph" if place == "FFN graph" else "reply"]
    return (times["FFN end" if place == "attention" else "attention end"] - start) * 1e-3


def measure_delay(device: torch.device, place: str, order: str) -> Result:
    """By how much each delay in ``place`` moves the other side's end, and whether all bits are those without it.

    order: of the two graphs' launches.
    """
    with rig(device) as r:
        r.step(ORDERS[0])
        want = [output.clone() for output in r.stage.outputs]
        spans: dict[float, list[float]] = {us: [] for us in DELAYS_US}
        equal = True
        for us in DELAYS_US * REPEATS:
            r.delays[place].set(us + (COVER_US if place == "FFN graph" else 0.0))
            spans[us].append(span_us(place, r.step(order)))
            equal &= all(torch.equal(*pair) for pair in zip(r.stage.outputs, want, strict=True))
        return shifts(spans, equal)


def shifts(spans: dict[float, list[float]], equal: bool) -> Result:
    """The verdict of one place and order. spans: µs by planted delay, 0 among them."""
    medians = {us: statistics.median(values) for us, values in spans.items()}
    moved = {us: median - medians[0.0] for us, median in medians.items() if us}
    checks = {f"{us:g} µs": abs(shift - us) <= shift_tolerance(us) for us, shift in moved.items()}
    return {
        "base_us": medians[0.0], "shift_us": {f"{us:g}": shift for us, shift in moved.items()},
        "tolerance_us": {f"{us:g}": shift_tolerance(us) for us in moved},
        **all_of("delay", {**checks, "bits": equal}),
    }  # fmt: skip


def measure_lost_publish(device: torch.device) -> Result:
    """A step that the FFN side never launches: the attention side ends at its limit, names the rank, and goes on."""
    with exchange(Bank(SPEC, device), max_batch_tokens=ROWS, reply_timeout_s=LIMIT_S) as group:
        stage = Stage(group, ROWS)
        group.checked_step([stage])
        graphs = group.servers[0].runner.stage_graphs[0]
        replay, graphs.replay = graphs.replay, lambda rows: None  # type: ignore[method-assign]
        start, raised = time.monotonic(), None
        try:
            group.step_us([stage])
        except AFDError as error:
            raised = error
        seconds = time.monotonic() - start
        graphs.replay = replay  # type: ignore[method-assign]
        time.sleep(0.2)
        group.checked_step([stage])
        checks = {
            "time limit": isinstance(raised, AFDTimeoutError) and LIMIT_S <= seconds <= LIMIT_S + 1.0,
            "names the peer": "FFN rank 0" in str(raised),
        }
        return {"seconds": seconds, "limit_s": LIMIT_S, "raised": str(raised), **all_of("lost publish", checks)}
