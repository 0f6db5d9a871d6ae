# SPDX-License-Identifier: Apache-2.0
"""The static gate: what every kernel takes in every checked-in configuration on every card, against a committed table.

It needs no GPU. The table holds for one version of triton: under another one nothing is compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from afd_runtime.bench.compiled import Resources, compile_for, resources
from afd_runtime.bench.launches import CARDS, every_launch

#: Largest change of each figure that passes: an absolute one and a share of the old figure, whichever is larger.
LIMITS: Mapping[str, tuple[int, float]] = {
    "registers": (4, 0.04), "stack": (0, 0.0), "shared": (0, 0.0), "wgmma": (0, 0.0), "mma": (0, 0.0),
    "ptx": (8, 0.03), "code": (256, 0.05),
}  # fmt: skip
UPDATE = "make static-update"
_HEAD = f"""\
# What every kernel takes, as compiled without a GPU; written by `{UPDATE}`, compared by tests and `afd bench static`.
# registers of a thread, bytes of stack of a thread (spills), bytes of shared memory of a block, warp-group and warp
# matrix instructions, PTX instructions, bytes of machine code
"""

Table = dict[str, Resources]


def measure(capability: int) -> Table:
    """Compiles everything for one card. Keys: ``<kernel> <variant> sm_<capability>``."""
    return {
        f"{launch.name} {variant} sm_{capability}": resources(compile_for(launch, capability))
        for variant, launch in every_launch(capability)
    }


def measure_all(capabilities: Iterable[int] = tuple(CARDS), processes: int = 2) -> Table:
    """``measure`` of several cards, in processes of their own."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return {key: row for table in pool.map(measure, capabilities) for key, row in table.items()}


def write(path: Path, table: Table, triton: str) -> None:
    """Writes the table: one line for each kernel, sorted."""
    columns = [field.name for field in dataclasses.fields(Resources)]
    lines = [[*key.split(), *map(str, dataclasses.astuple(row))] for key, row in sorted(table.items())]
    rows = [["kernel", "variant", "card", *columns], *lines]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text = "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
    path.write_text(f"{_HEAD}# triton {triton}\n{text}\n")


def read(path: Path) -> tuple[str, Table]:
    """(version of triton, table). Raises ``ValueError`` for a file that is none."""
    lines = path.read_text().splitlines()
    versions = [line.split()[2] for line in lines if line.startswith("# triton ")]
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    columns = [field.name for field in dataclasses.fields(Resources)]
    if len(versions) != 1 or not rows or rows[0] != ["kernel", "variant", "card", *columns]:
        raise ValueError(f"{path} is no table of the static gate; write it anew: {UPDATE}")
    return versions[0], {" ".join(row[:3]): Resources(*map(int, row[3:])) for row in rows[1:]}


def differences(old: Table, new: Table) -> list[str]:
    """One line for each kernel that changed by more than ``LIMITS`` or is only in one table, old and new."""
    found = [f"{key}: not in the committed table: {new[key]}" for key in sorted(new.keys() - old.keys())]
    found += [f"{key}: in the committed table, not compiled any more" for key in sorted(old.keys() - new.keys())]
    for key in sorted(old.keys() & new.keys()):
        if changed := [_change(name, old[key], new[key]) for name in LIMITS if _exceeds(name, old[key], new[key])]:
            found.append(f"{key}: {', '.join(changed)}")
    return found


def verdict(old_triton: str, new_triton: str, changes: Sequence[str]) -> tuple[bool, str]:
    """(passed, what to print)."""
    if old_triton != new_triton:
        return True, f"not comparable: the table is of triton {old_triton}, installed is {new_triton}"
    if not changes:
        return True, "every kernel takes what the committed table says"
    return False, "\n".join([*changes, f"{len(changes)} kernels changed; where that is meant: {UPDATE}"])


def of_cards(table: Table, capabilities: Iterable[int]) -> Table:
    """The lines of some cards."""
    ends = tuple(f" sm_{capability}" for capability in capabilities)
    return {key: row for key, row in table.items() if key.endswith(ends)}


def _exceeds(name: str, old: Resources, new: Resources) -> bool:
    before, after = getattr(old, name), getattr(new, name)
    absolute, share = LIMITS[name]
    return abs(after - before) > max(absolute, share * before)


def _change(name: str, old: Resources, new: Resources) -> str:
    return f"{name} {getattr(old, name)} -> {getattr(new, name)}"
