# SPDX-License-Identifier: Apache-2.0
"""What torch.profiler saw of a step: its kernels, by the graph that launched them.

All kernels of one graph launch share its correlation number, and the numbers grow in the order of the launches.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_KERNEL = re.compile(r"_(?:p_)?(?:experts_)?(\w+?)_kernel\w*")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Kernel:
    """One execution on the device. launch: correlation number. Times in µs of the profiler's clock."""

    launch: int
    stream: int
    op: str
    start_us: float
    dur_us: float


def profile(function: Callable[[], object]) -> dict[str, Any]:
    """The Chrome trace of ``function`` and of all that it launched."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        function()
        torch.cuda.synchronize()  # the other role's threads have their kernels in the trace too
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(path))
        return json.loads(path.read_text())


def op_of(kernel: str) -> str:
    """The op that a kernel's name tells: ``_p_experts_up_kernel`` is ``up``; copies and fills are ``copy``."""
    if found := _KERNEL.fullmatch(kernel):
        return found[1]
    return "copy" if kernel.lower().startswith(("memcpy", "memset")) else kernel[:40]


def kernels_of(trace: Mapping[str, Any]) -> list[Kernel]:
    """The trace's kernels, copies and fills, by start."""
    found = [
        Kernel(event["args"]["correlation"], event["args"]["stream"], op_of(event["name"]), event["ts"], event["dur"])
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in _DEVICE
    ]
    return sorted(found, key=lambda kernel: kernel.start_us)


def role_of(graph: Sequence[Kernel]) -> str:
    """Whose graph it is: ``attention`` combines, ``ffn`` merges and replies; anything else is ``other``."""
    ops = {kernel.op for kernel in graph}
    if "combine" in ops:
        return "attention"
    return "ffn" if ops & {"merge", "reply"} else "other"


def graphs_of(kernels: Sequence[Kernel]) -> list[tuple[str, list[Kernel]]]:
    """(role, kernels) of each graph of a step, in the order of their launches. What else was launched is left out.

    Raises ``ValueError`` where no graph of one of the roles is there.
    """
    launches: dict[int, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        launches[kernel.launch].append(kernel)
    graphs = [(role_of(launches[number]), launches[number]) for number in sorted(launches)]
    roles = {role for role, _ in graphs}
    if not {"attention", "ffn"} <= roles:
        seen = sorted({(kernel.stream, kernel.op) for kernel in kernels})
        raise ValueError(
            f"the trace holds graphs of {sorted(roles)}; allowed: 'attention' and 'ffn'; (stream, op) seen: {seen}"
        )
    return [(role, graph) for role, graph in graphs if role != "other"]


def split(kernels: Sequence[Kernel], layers: int) -> dict[str, dict[str, float]]:
    """µs of device time per layer by role and op. The two wait kernels are told apart by their graphs."""
    totals: dict[str, dict[str, float]] = {"attention": {}, "ffn": {}}
    for role, graph in graphs_of(kernels):
        for kernel in graph:
            totals[role][kernel.op] = totals[role].get(kernel.op, 0.0) + kernel.dur_us / layers
    return totals


def spans(kernels: Sequence[Kernel], launched: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """What a picture of the step needs: stream, name, start_us, dur_us, role and stage of each kernel in its graphs.

    launched: (role, stage) of each graph, in the order of the launches. Time 0 is the attention side's first kernel.
    Raises ``ValueError`` where the trace tells other roles.
    """
    graphs = graphs_of(kernels)
    if [role for role, _ in graphs] != [role for role, _ in launched]:
        raise ValueError(f"the trace holds graphs of {[role for role, _ in graphs]}; launched were {list(launched)}")
    origin = min(graph[0].start_us for role, graph in graphs if role == "attention")
    return [
        {
            "stream": kernel.stream, "name": kernel.op, "start_us": round(kernel.start_us - origin, 3),
            "dur_us": round(kernel.dur_us, 3), "role": role, "stage": stage,
        }
        for (role, stage), (_, graph) in zip(launched, graphs, strict=True)
        for kernel in graph
    ]  # fmt: skip
