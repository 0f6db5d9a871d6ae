# SPDX-License-Identifier: Apache-2.0
"""Prints what ``afd generate`` did: the generated ids, one table, the line of the check; or all of it as JSON."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from afd_runtime.generate import GenerateReport
from afd_runtime.workers import LayerStats

COLUMNS = ("layer", "rows", "out", "back", "wait", "experts", "reply")


def print_report(report: GenerateReport, console: Console) -> None:
    """Ids (and text) of each prompt, the table of layers, the line of the check with what differs."""
    write = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
    for prompt in report.prompts:
        ids = ",".join(map(str, prompt.token_ids))
        write(f"prompt {prompt.index} ({len(prompt.prompt_ids)} tokens): {ids}")
        if prompt.text is not None:
            write(f"  {prompt.text!r}")
    console.print(layer_table(report.layers))
    tokens = sum(len(prompt.token_ids) for prompt in report.prompts)
    write(f"{tokens} tokens in {report.seconds:.1f} s, start of all processes included")
    if report.check is not None:
        for line in report.check.mismatches:
            write(line)
        write(report.check.line())


def layer_table(layers: dict[int, LayerStats]) -> Table:
    """One line a layer, see ``LayerStats``, and a last one with the sums."""
    table = Table()
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for layer, stats in layers.items():
        table.add_row(str(layer), *_cells(stats))
    table.add_section()
    fields = LayerStats.__struct_fields__
    table.add_row("all", *_cells(LayerStats(**{f: sum(getattr(s, f) for s in layers.values()) for f in fields})))
    return table


def report_json(report: GenerateReport) -> str:
    """The whole report as one JSON object."""
    layers = {str(layer): msgspec.to_builtins(stats) for layer, stats in report.layers.items()}
    content: dict[str, Any] = {
        "prompts": [msgspec.to_builtins(prompt) for prompt in report.prompts],
        "layers": layers,
        "seconds": report.seconds,
        "check": None if report.check is None else {**asdict(report.check), "ok": report.check.ok},
        "kernels": report.kernels,
    }
    return json.dumps(content, indent=2)


def _cells(stats: LayerStats) -> list[str]:
    times = (stats.wait_s, stats.experts_s, stats.reply_s)
    return [str(stats.rows), _size(stats.bytes_out), _size(stats.bytes_back), *(f"{t * 1e3:.1f} ms" for t in times)]


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**10:.1f} KiB" if nbytes < 2**20 else f"{nbytes / 2**20:.1f} MiB"
