# SPDX-License-Identifier: Apache-2.0
"""Tables of the README from committed results: ``python -m benchmarks.tables`` rewrites what its marks enclose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "h200" / "exchange.json"
BEGIN, END = "<!-- generated: exchange -->", "<!-- end of generated -->"


def exchange_table(data: Mapping[str, Any]) -> str:
    """One row for each shape and number of rows: a layer, what it consists of, and the bar for the rest."""
    results = {r["key"]: r for r in data["results"] if "error" not in r}
    cells = {tuple(key.split("/")[1:4:2]) for key in results if key.endswith("/stages=1")}
    lines = ["| shape | rows | layer | experts alone | gate + dispatch | the rest (bar 8) | a stage of two |",
             "|---|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for shape, rows in sorted(cells, key=lambda cell: (cell[0], int(cell[1][2:]))):
        one = results[f"exchange/{shape}/bf16/{rows}/stages=1"]
        two = results.get(f"exchange/{shape}/bf16/{rows}/stages=2", {})
        figures = [one[name] for name in ("layer_us", "experts_us", "attention_us", "over_us")] + [two.get("stage_us")]
        texts = ["not measured" if figure is None else f"{figure:.1f}" for figure in figures]
        texts[3] += "" if one["met"] else " missed"
        lines.append(f"| {shape} | {rows[2:]} | {' | '.join(texts)} |")
    host = results.get("exchange/host/layers=60/stages=2")
    about = data["about"]
    where = f"{about['gpu']}, torch {about['torch']}, triton {about['triton']}"
    lines += ["", f"Microseconds on one {where}; both roles in one process, each side's layers one CUDA graph."]
    if host is not None:
        verdict = "met" if host["met"] else "missed"
        lines += [f"Host work of an FFN step of 60 layers in two stages: {host['host_us']:.0f} (bar 100, {verdict})."]
    return "\n".join(lines) + "\n"


def rewritten(page: str, table: str) -> str:
    """The page with ``table`` between its marks. Raises ``ValueError`` where a mark is missing."""
    start, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    return f"{page[:start]}\n\n{table}\n{page[end:]}"


def main() -> None:
    readme = ROOT / "README.md"
    readme.write_text(rewritten(readme.read_text(), exchange_table(json.loads(RESULT.read_text()))))


if __name__ == "__main__":
    main()
