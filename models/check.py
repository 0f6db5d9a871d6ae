# SPDX-License-Identifier: Apache-2.0
"""Searches the exchange model with spin: ``python models/check.py`` (all), ``python models/check.py any_fault …``.

Each configuration of ``GOOD`` and ``LONG`` is searched completely and holds; those of ``ENDS`` have no run without an
end; each of ``BROKEN`` leaves out one part of the protocol (or has a fault of its confirmation), and spin must find a
trace; each of ``WITNESS`` asks for an end that must be reachable, so that the good ones do not hold by doing nothing.
``BELL`` and ``BELL_BROKEN`` are the same for the model of one doorbell.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
from generate import generate  # noqa: E402

DOORBELL = Path(__file__).resolve().parent / "doorbell.pml"
LIMIT_MB, LIMIT_S, MAX_DEPTH = 3500, 170, 100_000
_TWO = "COARSE STAGES=2"
_ONE_THREAD = f"{_TWO} INTERLEAVED ONE_ORDER"
GOOD = {
    "any_fault": "CRASH_A=1 CRASH_F=1 GIVE_UP=1 DROP=1",
    "two_faults": "GIVE_UP=1 DROP=1 FAULTS=2",
    "two_stages": f"{_TWO} STEPS=1 LAYERS=1 FAULTS=0",
    "two_stages_one_thread": f"{_ONE_THREAD} FAULTS=0",
    "two_stages_crash": f"{_ONE_THREAD} STEPS=1 LAYERS=1 CRASH_A=1 REJOIN=0",
}
LONG = {  # the same properties in larger configurations
    "long_crash_and_abort": "CRASH_A=1 GIVE_UP=1 DROP=1 FAULTS=2 STEPS=1",
    "long_three_layers": "LAYERS=3 CRASH_A=1 CRASH_F=1 GIVE_UP=1 DROP=1",
    "long_two_stages_crash": f"{_ONE_THREAD} STEPS=1 CRASH_A=1 REJOIN=0",
    "long_two_stages_rejoin": f"{_ONE_THREAD} STEPS=1 LAYERS=1 CRASH_A=1",
    "long_two_stages_give_up": f"{_ONE_THREAD} STEPS=1 GIVE_UP=1",
}
ENDS = {"every_run_ends": GOOD["any_fault"]}  # searched for cycles: no run goes on for ever
BROKEN = {
    "no_sequencer": "NO_SEQUENCER FAULTS=0",
    "no_acknowledgement": "NO_ACK FAULTS=0",
    "no_session": "NO_SESSION REUSE_WINDOWS CRASH_A=1",
    "no_abort_after_crash": "NO_ABORT CRASH_A=1",
    "no_abort_of_a_step": "NO_ABORT GIVE_UP=1",
    "reused_windows": "REUSE_WINDOWS CRASH_A=1",
    "stages_in_series": f"{_TWO} STEPS=1 SERIES FAULTS=0",
    "stages_ordered_apart": f"{_TWO} STEPS=1 INTERLEAVED FAULTS=0",
    "confirm_names_the_served_step": "OLD_CONFIRM GIVE_UP=1",
    "drop_leaves_an_abort_unconfirmed": "DROP_RACE GIVE_UP=1 DROP=1 FAULTS=2",
}
BELL = {"doorbell": "", "doorbell_crash": "CRASH=1", "doorbell_long": "EXCHANGES=5 OPENINGS=4 CRASH=1"}
BELL_BROKEN = {
    "bell_of_the_word_only": "WORD_ONLY",
    "bell_opened_by_a_plain_store": "OVERWRITES",
    "bell_silenced_at_the_start_of_a_step": "ENTER_SILENCES OPENINGS=0",
    "bell_without_a_watchdog": "NO_WATCHDOG CRASH=1",
}
WITNESS = {
    "rejoined": "CRASH_A=1 WITNESS=1",
    "all_left": "CRASH_F=1 WITNESS=2",
    "stepped_on_after_giving_up": "GIVE_UP=1 WITNESS=3",
    "stepped_on_after_a_drop": "DROP=1 WITNESS=3",
}


class Result(NamedTuple):
    """What pan said. complete: the whole state space was searched; error: the first violation, or ''."""

    states: int
    depth: int
    complete: bool
    error: str
    seconds: float
    output: str


def search(defines: str, *, optimise: bool = True, cycles: bool = False, model: str | None = None) -> Result:
    """Generates, compiles and runs one configuration. Raises ``RuntimeError`` where spin or gcc fail.

    model: its text, None: the exchange's. optimise: off compiles faster, for a search that ends early. cycles: searches
    for a run without an end instead of assertions and end states.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "exchange.pml").write_text(generate() if model is None else model)
        flags = [f"-D{define}" for define in defines.split()]
        _run(["spin", *flags, "-a", "exchange.pml"], folder)
        kind = ["-DNP", "-DNOREDUCE"] if cycles else ["-DSAFETY"]
        gcc = ["nice", "gcc", "-O2" if optimise else "-O0", "-w", *kind, "-DCOLLAPSE", f"-DMEMLIM={LIMIT_MB}"]
        gcc += ["-o", "pan", "pan.c"]
        _run(gcc, folder)
        start = time.monotonic()
        output = _run(["nice", "./pan", f"-m{MAX_DEPTH}", *(["-l"] if cycles else [])], folder)
        seconds = time.monotonic() - start
    errors = re.search(r"errors: (\d+)", output)
    states, depth = re.search(r"(\d+) states, stored", output), re.search(r"depth reached (\d+)", output)
    if errors is None or states is None or depth is None:
        raise RuntimeError(f"pan printed no result for {defines}:\n{output[-2000:]}")
    incomplete = re.search(r"Search not completed|max search depth too small|out of memory|memory limit", output)
    violation = re.search(r"^pan:1: (.*)$", output, re.MULTILINE)
    error = violation.group(1) if violation else "" if errors.group(1) == "0" else "error"
    return Result(int(states.group(1)), int(depth.group(1)), incomplete is None, error, seconds, output)


def _run(command: list[str], folder: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        said = f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{said}")
    return done.stdout + done.stderr


def main(names: list[str]) -> int:
    """Searches the named configurations (none: all) and prints one line each."""
    bell = {**BELL, **BELL_BROKEN}
    everything = {**GOOD, **ENDS, **LONG, **BROKEN, **WITNESS, **bell}
    unknown = [name for name in names if name not in everything]
    if unknown:
        print(f"no configuration {', '.join(unknown)}; there are: {', '.join(everything)}", file=sys.stderr)
        return 2
    failed = 0
    for name in names or everything:
        holds = name in GOOD or name in LONG or name in ENDS or name in BELL
        model = DOORBELL.read_text() if name in bell else None
        result = search(everything[name], optimise=holds, cycles=name in ENDS, model=model)
        good = result.complete and not result.error if holds else bool(result.error)
        said = "every state holds" if holds and good else result.error.split(" (at")[0][:60] or "no violation"
        failed += not good
        verdict = "ok  " if good else "FAIL"
        print(f"{verdict} {name:34} {result.states:>9} states {result.seconds:6.1f} s  {said}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
