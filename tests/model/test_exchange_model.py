# SPDX-License-Identifier: Apache-2.0
"""spin searches the exchange model: the good configurations completely, each broken one until it finds a trace."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location(
    "exchange_model_check", Path(__file__).parents[2] / "models" / "check.py"
)
assert _spec is not None and _spec.loader is not None
check = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = check
_spec.loader.exec_module(check)

_MISSING = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
needs_spin = pytest.mark.skipif(
    bool(_MISSING) and not os.environ.get("CI"),
    reason=f"{' and '.join(_MISSING)} not found; install it: apt-get install -y spin gcc",
)


@needs_spin
@pytest.mark.parametrize("name", check.GOOD)
def test_every_state_of_the_protocol_holds(name: str) -> None:
    result = check.search(check.GOOD[name])
    assert result.error == "", result.output[-3000:]
    assert result.complete and result.depth < check.MAX_DEPTH, result.output[-3000:]
    assert result.states > 100_000


@needs_spin
@pytest.mark.parametrize("name", check.ENDS)
def test_no_run_goes_on_for_ever(name: str) -> None:
    result = check.search(check.ENDS[name], cycles=True)
    assert result.error == "" and result.complete, result.output[-3000:]
    assert "non-progress cycles" in result.output and result.states > 100_000


@needs_spin
@pytest.mark.parametrize("name", check.BROKEN)
def test_a_trace_is_found_without_one_part_of_the_protocol(name: str) -> None:
    result = check.search(check.BROKEN[name], optimise=False)
    assert "assertion violated" in result.error, result.output[-3000:]
    assert result.complete is False


@needs_spin
@pytest.mark.parametrize("name", [*check.BELL, *check.BELL_BROKEN])
def test_no_ring_of_a_doorbell_is_lost(name: str) -> None:
    holds = name in check.BELL
    result = check.search({**check.BELL, **check.BELL_BROKEN}[name], optimise=False, model=check.DOORBELL.read_text())
    assert bool(result.error) is not holds, result.output[-3000:]
    assert result.states > 1000 or not holds


@needs_spin
@pytest.mark.parametrize("name", check.WITNESS)
def test_the_end_that_a_fault_should_lead_to_is_reached(name: str) -> None:
    assert "assertion violated" in check.search(check.WITNESS[name], optimise=False).error


def test_the_model_holds_the_table_of_the_code() -> None:
    model = check.generate()
    from afd_runtime import protocol

    for row in protocol.TABLE:
        short = "att" if row.side is protocol.Side.ATTENTION else "ffn"
        body = model.split(f"inline {short}_{row.event.value}(p) {{")[1].split("\n}")[0]
        assert f"{short}[p] == {row.source.name} -> {short}[p] = {row.target.name}" in body
    assert model.count("not in the table") == len({(row.side, row.event) for row in protocol.TABLE})
    assert "@" not in model
