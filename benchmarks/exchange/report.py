# SPDX-License-Identifier: Apache-2.0
"""Keys, bars and the result file. Touches no GPU."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

P8_OVER_US = 8.0
P9_HOST_US = 100.0
P9_RATIO = 1.15
MAX_GRAPHS = 4

Result = dict[str, Any]


def key(shape: str, rows: int, *parts: str) -> str:
    """The stable name of a case, such as ``exchange/qwen3-30b/bf16/M=16/stages=1``."""
    return "/".join(["exchange", shape, "bf16", f"M={rows}", *parts])


def p6_limit(rows: int) -> float | None:
    """µs that gate and dispatch to two FFN ranks may take; None past 512 rows, where the bar is a ratio to peers."""
    if rows <= 128:
        return 8.0
    return 13.0 if rows <= 512 else None


def p7_limit(rows: int, hidden_size: int) -> float | None:
    """µs that arrival, reply and combine may take together with two FFN ranks; None where there is no bar."""
    if rows > 128:
        return None
    return 9.0 if hidden_size <= 2048 else 13.0 if hidden_size <= 7168 else None


def verdict(bar: str, value: float, limit: float | None) -> Result:
    """``bar``, ``limit`` and ``met`` of a figure that has to stay at or below a limit; NaN never does.

    All three are None where there is no limit.
    """
    if limit is None:
        return {"bar": None, "limit": None, "met": None}
    return {"bar": bar, "limit": limit, "met": bool(value <= limit)}


def all_of(bar: str, checks: Mapping[str, bool]) -> Result:
    """``bar``, ``checks`` and ``met`` of a case that holds where every check does."""
    return {"bar": bar, "checks": {name: bool(value) for name, value in checks.items()}, "met": all(checks.values())}


def shift_tolerance(delay_us: float) -> float:
    """µs by which a finish may miss the shift that a planted delay asks for."""
    return 5.0 + 0.02 * delay_us


def summary(result: Mapping[str, Any]) -> str:
    """One line: the key, the figures, and whether the bar was met."""
    if "error" in result:
        return f"{result['key']}: {result['error']}"
    figures = [f"{name}={value:.1f}" for name, value in result.items() if isinstance(value, float) and name != "limit"]
    if result.get("bar"):
        limit = f" ≤ {result['limit']:g}" if isinstance(result.get("limit"), float) else ""
        figures.append(f"{result['bar']}{limit} {'met' if result['met'] else 'MISSED'}")
    return f"{result['key']}: {' '.join(figures)}"


class Report:
    """The result file, written anew after every case.

    usable: called after a case that failed; where it raises, the device is lost and the run ends.
    """

    def __init__(self, path: Path, about: Mapping[str, str], usable: Callable[[], object] = lambda: None) -> None:
        self.path, self.about, self.usable = path, dict(about), usable
        self.results: list[Result] = []

    def run(self, name: str, case: Callable[[], Result]) -> Result:
        """Runs one case and keeps its result under ``name``, or its error: the run goes on."""
        try:
            result = {"key": name, **case()}
        except Exception as error:
            traceback.print_exc()
            result = {"key": name, "error": f"{type(error).__name__}: {error}"}
            self._keep(result)
            self.usable()
            return result
        self._keep(result)
        return result

    def _keep(self, result: Result) -> None:
        self.results.append(result)
        print(summary(result), flush=True)
        document = {"about": self.about, "results": [_plain(r) for r in self.results]}
        self.path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    """Rounded for the file; NaN and infinity, which JSON lacks, become None."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return round(value, 3) if math.isfinite(value) else None
    return value
