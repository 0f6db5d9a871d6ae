# SPDX-License-Identifier: Apache-2.0
"""Runs the cases that were asked for and writes the result file after each."""

from __future__ import annotations

import argparse
import faulthandler
import functools
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton

from benchmarks.exchange import delays, host, layer, ops
from benchmarks.exchange.group import SHAPES, Bank, Spec
from benchmarks.exchange.report import Report, Result, key

TOKENS = (1, 16, 64, 128, 256)
PARTS = ("layer", "pair", "ranks", "sent", "answered", "replay", "host", "delays")
PATIENCE_S = 150  # a case that takes longer hangs: its threads are printed and the run ends


def about(device: torch.device) -> dict[str, str]:
    """GPU, versions and commit."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    commit = os.environ.get("AFD_COMMIT") or head  # for a copy of the tree without its history
    return {
        "gpu": torch.cuda.get_device_name(device), "torch": torch.__version__, "triton": triton.__version__,
        "commit": commit,
    }  # fmt: skip


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exchange")
    parser.add_argument("out", type=Path, help="result file")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="rows of a step of each stage")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    chosen = parser.parse_args(argv)
    if wrong := [rows for rows in chosen.tokens if not 1 <= rows <= layer.MAX_ROWS]:
        parser.error(f"--tokens holds {wrong}; allowed: 1 … {layer.MAX_ROWS}")
    return chosen


def run_shape(report: Report, name: str, bank: Bank, tokens: Sequence[int], parts: Sequence[str]) -> None:
    """The cases of one shape."""
    measures: dict[str, tuple[str, Callable[..., Result]]] = {
        "layer": ("stages=1", layer.measure_layer),
        "pair": ("stages=2", layer.measure_pair),
        "ranks": ("stages=1/ffn=2", functools.partial(layer.measure_layer, ffn_ranks=2)),
        "sent": ("sent/ffn=2", ops.measure_sent),
        "answered": ("answered/ffn=2", ops.measure_answered),
    }
    for rows in tokens:
        for part, (suffix, measure) in measures.items():
            if part in parts:
                run(report, key(name, rows, suffix), functools.partial(measure, bank, rows))
    for rows in host.REPLAY_ROWS if "replay" in parts else ():
        run(report, key(name, rows, "replay"), functools.partial(host.measure_replay, bank, rows))


def run(report: Report, name: str, case: Callable[[], Result]) -> None:
    """One case, with a limit on how long it may hang."""
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    report.run(name, case)
    faulthandler.cancel_dump_traceback_later()


def main() -> None:
    chosen, device = arguments(), torch.device("cuda", 0)
    report = Report(chosen.out, about(device), usable=torch.cuda.synchronize)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        if "host" in chosen.parts:
            run(report, "exchange/host/layers=60/stages=2", lambda: host.measure_host(device))
        if "delays" in chosen.parts:
            for place, order in delays.cases():
                case = functools.partial(delays.measure_delay, device, place, order)
                run(report, f"exchange/delay/{place}/{order}", case)
            run(report, "exchange/lost publish", lambda: delays.measure_lost_publish(device))
        for name in chosen.shapes:
            bank = Bank(Spec(*SHAPES[name]), device)
            run_shape(report, name, bank, chosen.tokens, chosen.parts)


if __name__ == "__main__":
    main()
