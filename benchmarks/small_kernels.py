# SPDX-License-Identifier: Apache-2.0
"""The kernels around the experts of an exchanged layer, one by one: µs of one of 20 calls in a CUDA graph.

``python -m benchmarks.small_kernels OUT.json``. Before a time is taken, the ops one after the other must give what
``fused_experts`` gives, and a dispatch of one launch the bytes of one of four; ``four_us`` is the latter's time.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

from afd_kernels.message import tensor_at
from benchmarks.exchange.__main__ import about
from benchmarks.exchange.group import Bank, Spec
from benchmarks.exchange.ops import Ops
from benchmarks.exchange.report import Report, Result
from benchmarks.exchange.timing import op_us

SHAPES = {"E=128/H=2048": Spec(128, 2048, 256, 8, num_layers=2), "E=256/H=7168": Spec(256, 7168, 256, 8, num_layers=2)}
ROWS = (1, 16, 64, 128, 512)
FFN_RANKS = (1, 2)
COLUMNS = ("route_us", "dispatch_us", "four_us", "arrival_us", "reply_us", "combine_us")


def four_launches() -> mock._patch:
    """Inside, every batch counts as large."""
    return mock.patch.object(sys.modules["afd_kernels.dispatch"], "is_small", lambda *sizes: False)


def messages(ops: Ops) -> list[torch.Tensor]:
    """What a dispatch writes: the peers' slots, 0 where it writes nothing, and the row map."""
    slots = [tensor_at(address, ops.layout.nbytes, ops.x.device) for address in ops.slots.tolist()]
    written = [*slots, ops.row_map]
    for tensor in written:
        tensor.zero_()
    ops.dispatch(0)
    return [tensor.clone() for tensor in written]


def measure(bank: Bank, rows: int, ffn_ranks: int) -> Result:
    ops = Ops(bank, rows, ffn_ranks)
    ops.check()
    one = messages(ops)
    with four_launches():
        four = messages(ops)
    if not all(map(torch.equal, one, four)):
        raise AssertionError("a dispatch of one launch and one of four launches wrote different bytes")
    calls: dict[str, Callable[[int], object]] = {
        "route_us": ops.route, "dispatch_us": ops.dispatch, "arrival_us": lambda _: ops.arrival(),
        "reply_us": lambda _: ops.reply(), "combine_us": lambda _: ops.combine(),
    }  # fmt: skip
    figures: Result = {name: op_us(call) for name, call in calls.items()}
    with four_launches():
        figures["four_us"] = op_us(ops.dispatch)
    return figures


def table(results: list[Result]) -> str:
    """One line a case, µs."""
    lines = [["", *(name.removesuffix("_us") for name in COLUMNS)]]
    lines += [[result["key"], *(f"{result.get(name, float('nan')):.1f}" for name in COLUMNS)] for result in results]
    return "\n".join(f"{line[0]:32}" + "".join(f"{cell:>10}" for cell in line[1:]) for line in lines)


def main(out: Path) -> None:
    device = torch.device("cuda", 0)
    report = Report(out, about(device), usable=torch.cuda.synchronize)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        for shape, spec in SHAPES.items():
            bank = Bank(spec, device)
            for ffn_ranks in FFN_RANKS:
                for rows in ROWS:
                    name = f"small/{shape}/bf16/M={rows}/ffn={ffn_ranks}"
                    report.run(name, functools.partial(measure, bank, rows, ffn_ranks))
    print(table(report.results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
