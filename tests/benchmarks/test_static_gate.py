# SPDX-License-Identifier: Apache-2.0
"""The static gate: every kernel against the committed table, and that a change is seen."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
import triton
import typer.testing

import afd_kernels
from afd_kernels import GemmConfig
from afd_runtime import cli
from afd_runtime.bench import static
from afd_runtime.bench.compiled import Resources, compile_for, resources
from afd_runtime.bench.launches import CARDS, every_launch, gemms
from afd_runtime.errors import AFDConfigError

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "benchmarks" / "static" / "kernels.txt"
ROW = Resources(registers=100, stack=0, shared=4096, wgmma=4, mma=0, ptx=1000, code=10000)


@pytest.mark.parametrize("capability", CARDS)
def test_kernels_take_what_the_table_says(capability) -> None:
    version, table = static.read(TABLE)
    committed = static.of_cards(table, [capability])
    if version != triton.__version__:
        pytest.skip(static.verdict(version, triton.__version__, [])[1])
    passed, text = static.verdict(version, version, static.differences(committed, static.measure(capability)))
    assert passed, text


def test_the_table_holds_every_kernel_and_every_configuration() -> None:
    _, table = static.read(TABLE)
    sources = Path(afd_kernels.__file__).parent.glob("*.py")
    kernels = {name for path in sources for name in re.findall(r"^def (_\w+_kernel)\(", path.read_text(), re.M)}
    for capability in CARDS:
        keys = static.of_cards(table, [capability])
        assert {key.split()[0] for key in keys} == kernels
        assert {f"{launch.name} {variant} sm_{capability}" for variant, launch in every_launch(capability)} == set(keys)


def test_warp_groups_multiply_where_the_tiles_are_large_enough() -> None:
    _, table = static.read(TABLE)
    large = {key: row for key, row in static.of_cards(table, [90, 100]).items() if "2byte/rows=1000000000" in key}
    assert len(large) == 4 and all(row.wgmma and not row.mma and not row.stack for row in large.values())


def test_a_table_is_read_as_it_was_written(tmp_path) -> None:
    table = {"_a_kernel default/2byte/rows=16 sm_90": ROW, "_b_kernel bf16 sm_120": dataclasses.replace(ROW, stack=8)}
    path = tmp_path / "table.txt"
    static.write(path, table, "3.9.0")
    assert static.read(path) == ("3.9.0", table)
    path.write_text("# triton 3.9.0\nkernel registers\n")
    with pytest.raises(ValueError, match="table.txt is no table of the static gate"):
        static.read(path)


@pytest.mark.parametrize(
    "change,seen",
    [
        ({"registers": 104}, False), ({"registers": 105}, True), ({"registers": 95}, True), ({"stack": 8}, True),
        ({"shared": 4100}, True), ({"wgmma": 0, "mma": 16}, True), ({"ptx": 1030}, False), ({"ptx": 1031}, True),
        ({"code": 10500}, False), ({"code": 9400}, True),
    ],
)  # fmt: skip
def test_small_changes_pass_and_larger_ones_are_told_with_old_and_new(change, seen) -> None:
    found = static.differences({"_a_kernel x sm_90": ROW}, {"_a_kernel x sm_90": dataclasses.replace(ROW, **change)})
    assert bool(found) == seen
    for name, value in change.items() if seen else ():
        assert f"{name} {getattr(ROW, name)} -> {value}" in found[0]


def test_kernels_that_come_or_go_are_told() -> None:
    found = static.differences({"_old_kernel x sm_90": ROW}, {"_new_kernel x sm_90": ROW})
    assert [line.split(":")[0] for line in found] == ["_new_kernel x sm_90", "_old_kernel x sm_90"]
    passed, text = static.verdict("3.9.0", "3.9.0", found)
    assert not passed and static.UPDATE in text


def test_another_triton_is_not_compared() -> None:
    passed, text = static.verdict("3.9.0", "3.6.0", ["_a_kernel x sm_90: registers 1 -> 200"])
    assert passed and text == "not comparable: the table is of triton 3.9.0, installed is 3.6.0"


def test_a_planted_change_of_a_launch_table_shows() -> None:
    """One stage fewer than the table's configuration: the same source, another kernel."""
    _, table = static.read(TABLE)
    committed = table["_p_experts_down_kernel default/2byte/rows=16 sm_80"]
    planted = GemmConfig(block_m=16, block_n=128, block_k=64, num_warps=4, num_stages=3, group_m=1)
    launch = next(launch for launch in gemms(torch.bfloat16, planted, planted) if "down" in launch.name)
    found = static.differences({launch.name: committed}, {launch.name: resources(compile_for(launch, 80))})
    assert len(found) == 1 and f"shared {committed.shared} -> " in found[0]


def test_the_command_refuses_what_is_no_table(tmp_path) -> None:
    missing = tmp_path / "missing.txt"
    with pytest.raises(AFDConfigError, match="missing.txt"):
        typer.testing.CliRunner().invoke(cli.app, ["bench", "static", "--table", str(missing)], catch_exceptions=False)


def test_the_command_says_that_another_triton_is_not_compared(tmp_path) -> None:
    path = tmp_path / "table.txt"
    static.write(path, {"_a_kernel x sm_90": ROW}, "3.1.0")
    result = typer.testing.CliRunner().invoke(cli.app, ["bench", "static", "--table", str(path)])
    assert result.exit_code == 5 and "not comparable: the table is of triton 3.1.0" in result.output
