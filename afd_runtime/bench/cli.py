# SPDX-License-Identifier: Apache-2.0
"""``afd bench``: measure, compare, draw and tabulate, and what every kernel takes. benchmarks/README.md: exit codes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

EXIT_WORSE, EXIT_NOTHING = 1, 5

app = typer.Typer(help="Measure the kernels, compare measurements, and the static gate.", no_args_is_help=True)


@app.command()
def static(
    table: Annotated[Path, typer.Option(help="The committed table.")] = Path("benchmarks/static/kernels.txt"),
    update: Annotated[bool, typer.Option("--update", help="Write the table anew.")] = False,
    processes: Annotated[int, typer.Option(min=1, help="Compile in so many processes.")] = 2,
) -> None:
    """Compile every kernel for every card, without a GPU, and compare what it takes with the table. Exit 1: changed."""
    import triton

    from afd_runtime.bench import static as gate

    with _refusals():
        old = gate.read(table) if table.exists() or not update else ("none", {})
    if not update and old[0] != triton.__version__:
        print(gate.verdict(old[0], triton.__version__, [])[1])
        raise typer.Exit(EXIT_NOTHING)
    new = gate.measure_all(processes=processes)
    changes = gate.differences(old[1], new)
    if update:
        gate.write(table, new, triton.__version__)
        print("\n".join([*changes, f"{table}: {len(new)} kernels, triton {triton.__version__} (before: {old[0]})"]))
        return
    passed, text = gate.verdict(old[0], triton.__version__, changes)
    print(text)
    if not passed:
        raise typer.Exit(EXIT_WORSE)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """A file that is missing or not what it should be is the user's mistake: one line and exit code 2."""
    from afd_runtime.errors import AFDConfigError

    try:
        yield
    except (OSError, ValueError) as error:
        raise AFDConfigError(str(error)) from error
