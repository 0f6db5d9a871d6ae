# SPDX-License-Identifier: Apache-2.0
"""``make demo``: small checkpoints of three families, each served by three processes and checked."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from afd_runtime.demo_models import write_demo_model
from afd_runtime.launch import python_module

FAMILIES = ("deepseek_v3", "qwen3_moe", "gpt_oss")
PROMPTS = ("5,17,3", "40,41,42,43,44,45,46", "400,39,38,37,36,35,34,33,32,31,30,29")
OPTIONS = ("--ffn-ranks=2", "--max-new-tokens=32", "--max-batch-tokens=24", "--dtype=float32", "--check")


def run_family(family: str, root: Path) -> bool:
    """Writes the checkpoint of ``family`` below ``root`` and serves it. True if it matched the undivided model."""
    model = root / family
    if not (model / "config.json").is_file():
        disable_progress_bar()
        write_demo_model(family, model)
    prompts = [f"--prompt-ids={ids}" for ids in PROMPTS]
    shown = " ".join(["afd generate", str(model), *prompts, *OPTIONS])
    print(f"\n== {family}: one attention process, two FFN processes ==\n{shown}", flush=True)
    return subprocess.run(python_module("afd_runtime.cli", "generate", str(model), *prompts, *OPTIONS)).returncode == 0


def main(argv: list[str] | None = None) -> int:
    """Returns 0 if every family matched, else 1."""
    parser = argparse.ArgumentParser(description="Serve three small models in parts and check each.")
    parser.add_argument("--keep", type=Path, help="directory for the checkpoints (default: removed at the end)")
    keep = parser.parse_args(argv).keep
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="afd-demo-") as temporary:
        failed = [family for family in FAMILIES if not run_family(family, keep or Path(temporary))]
    seconds = time.perf_counter() - started
    if failed:
        print(f"\ndemo: {', '.join(failed)} did not match, {seconds:.0f} s", file=sys.stderr)
        return 1
    print(f"\ndemo: {len(FAMILIES)} of {len(FAMILIES)} models match the undivided model, {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
