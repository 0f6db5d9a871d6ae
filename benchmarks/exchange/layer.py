# SPDX-License-Identifier: Apache-2.0
"""One exchanged layer: alone, against the experts and the attention side's ops (P8), and with two stages in flight."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.exchange import trace
from benchmarks.exchange.group import Bank, Exchange, Stage, exchange
from benchmarks.exchange.ops import Ops
from benchmarks.exchange.report import P8_OVER_US, Result, verdict
from benchmarks.exchange.timing import ROUNDS, repeated, rounds

MAX_ROWS = 256  # of the servers: a step of one row runs in the graph that serves up to 64


def measure_layer(bank: Bank, rows: int, ffn_ranks: int = 1) -> Result:
    """A layer from hidden states to combined output, in turn with ``fused_experts`` and with gate + dispatch alone.

    over_us: median of layer − experts − attention, each from one round; the bar holds for one FFN rank.
    """
    layers = bank.spec.num_layers
    with exchange(bank, ffn_ranks, max_batch_tokens=MAX_ROWS) as group:
        stage = Stage(group, rows)
        group.checked_step([stage])
        ops = Ops(bank, rows, ffn_ranks)
        ops.check()
        experts, attention = repeated(ops.fused, layers), repeated(ops.attention, layers)
        before = group.clocks()
        figures = rounds({
            "layer_us": lambda: group.step_us([stage]) / layers, "experts_us": experts, "attention_us": attention,
        })  # fmt: skip
        ffn = (group.clocks() - before)[:, :3].double().mean(0) * 1e-3 / (ROUNDS + 1)
        overs = [layer - e - a for layer, e, a in zip(*figures.values(), strict=True)]
        over = statistics.median(overs)
        return {
            **{name: statistics.median(values) for name, values in figures.items()}, "over_us": over,
            "over_spread_us": statistics.quantiles(overs, n=4)[2] - statistics.quantiles(overs, n=4)[0],
            "ffn_us": dict(zip(("waited", "computed", "replied"), ffn.tolist(), strict=True)),
            "split_us": split_of(group, [stage]), "layers": layers, "rounds": ROUNDS, "ffn_ranks": ffn_ranks,
            "max_batch_tokens": MAX_ROWS, **verdict("P8", over, P8_OVER_US if ffn_ranks == 1 else None),
        }  # fmt: skip


def measure_pair(bank: Bank, rows: int) -> Result:
    """Two stages in flight, each with ``rows`` rows, in turn with one of them alone.

    pair_us: per layer of both. stage_us: half of it. overlap: what two steps one after the other would take, over
    ``pair_us``; 1 is none, 2 all.
    """
    layers = bank.spec.num_layers
    with exchange(bank, num_stages=2, max_batch_tokens=MAX_ROWS) as group:
        stages = [Stage(group, rows, stage) for stage in range(2)]
        group.checked_step(stages)
        figures = rounds({
            "pair_us": lambda: group.step_us(stages) / layers, "single_us": lambda: group.step_us(stages[:1]) / layers,
        })  # fmt: skip
        pair, single = (statistics.median(figures[name]) for name in ("pair_us", "single_us"))
        overlaps = [2 * s / p for p, s in zip(*figures.values(), strict=True)]
        return {
            "pair_us": pair, "stage_us": pair / 2, "single_us": single, "overlap": statistics.median(overlaps),
            "split_us": split_of(group, stages), "layers": layers, "rounds": ROUNDS, "max_batch_tokens": MAX_ROWS,
        }  # fmt: skip


def split_of(group: Exchange, stages: Sequence[Stage]) -> Result:
    """µs of each kernel per layer, from one profiled step; ``{"error": …}`` where the profiler gave none."""
    try:
        trace.profile(lambda: group.step_us(stages))  # the profiler's own start
        recorded = trace.profile(lambda: group.step_us(stages))
        return dict(trace.split(trace.kernels_of(recorded), group.bank.spec.num_layers))
    except (KeyError, ValueError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
