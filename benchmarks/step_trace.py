# SPDX-License-Identifier: Apache-2.0
"""One step of two stages in flight, kernel by kernel, and its picture.

``python -m benchmarks.step_trace OUT.json`` records it on one GPU, both roles in one process (``exchange.step``).
``python -m benchmarks.step_trace --draw OUT.json STEP.svg`` draws a recording, on any machine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.step_svg import draw


def recorded() -> dict[str, Any]:
    """{"title", "about", "spans"}; the spans are those of ``exchange.trace.spans``."""
    import torch

    from benchmarks.exchange.__main__ import about
    from benchmarks.exchange.step import TITLE, record

    device = torch.device("cuda", 0)
    told = about(device)
    return {"title": f"{TITLE}, {told['gpu']}", "about": told, "spans": record(device)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_trace")
    parser.add_argument("trace", type=Path, help="recording: written, or read with --draw")
    parser.add_argument("picture", type=Path, nargs="?", help="SVG to write, with --draw")
    parser.add_argument("--draw", action="store_true", help="draws a recording, without a GPU")
    chosen = parser.parse_args()
    if chosen.draw != (chosen.picture is not None):
        parser.error("--draw and a picture to write belong together: --draw OUT.json STEP.svg")
    if chosen.draw:
        chosen.picture.write_text(draw(json.loads(chosen.trace.read_text())), encoding="utf-8")
    else:
        chosen.trace.write_text(json.dumps(recorded(), indent=1) + "\n")


if __name__ == "__main__":
    main()
