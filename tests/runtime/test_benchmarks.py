# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' parts that need no GPU: figures from traces, bars, host timing, the picture, their own checks."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import afd_kernels
from benchmarks import step_svg, step_trace, tables
from benchmarks.exchange import __main__ as cli
from benchmarks.exchange import delays, host, report, timing, trace
from benchmarks.exchange.group import Bank, Spec, oracle
from benchmarks.exchange.ops import Ops

SPEC = Spec(num_experts=6, hidden_size=40, intermediate_size=24, top_k=3, num_layers=3, dtype=torch.float32)
ROOT = tables.ROOT
SVG = "{http://www.w3.org/2000/svg}"


def event(launch: int, name: str, start: float, dur: float, *, stream: int = 7, cat: str = "kernel") -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": dur,
            "args": {"correlation": launch, "stream": stream}}  # fmt: skip


def chrome() -> dict:
    """Two layers of two stages, launched FFN stage 1 first; one stream for all, so that only the launches tell."""
    attention = ("_gate_kernel", "_pack_kernel", "_wait_kernel", "_combine_kernel")
    ffn = ("_enter_kernel", "_wait_kernel", "_merge_kernel", "_p_experts_up_kernel", "_reply_kernel")
    events = [event(1, "_begin_kernel", 0.0, 1.0), {"ph": "M", "name": "process_name", "args": {}}]
    events.append({"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0, "dur": 1, "args": {}})
    for launch, names, start in ((10, ffn, 92.0), (11, ffn, 93.0), (20, attention, 100.0), (21, attention, 101.0)):
        for layer in range(2):
            for index, name in enumerate(names):
                events.append(event(launch, name, start + 50 * layer + 10 * index, 1.0 + index))
    events.append(event(10, "Memcpy DtoH (Device -> Pinned)", 190.0, 2.5, cat="gpu_memcpy"))
    return {"traceEvents": events[::-1]}


@pytest.mark.parametrize(
    "kernel,op",
    [
        ("_p_experts_up_kernel", "up"), ("_wait_kernel", "wait"), ("_plan_scan_kernel", "plan_scan"),
        ("_top_k_kernel_0d1d", "top_k"), ("Memset (Device)", "copy"),
        ("void at::native::foo<int>", "void at::native::foo<int>"),
    ],
)  # fmt: skip
def test_op_names(kernel, op) -> None:
    assert trace.op_of(kernel) == op


def test_split_tells_the_waits_apart_by_their_graphs() -> None:
    found = trace.split(trace.kernels_of(chrome()), layers=2)
    # two stages × two layers of each kernel, over two layers
    assert found["attention"] == pytest.approx({"gate": 2.0, "pack": 4.0, "wait": 6.0, "combine": 8.0})
    assert found["ffn"] == pytest.approx(
        {"enter": 2.0, "wait": 4.0, "merge": 6.0, "up": 8.0, "reply": 10.0, "copy": 1.25}
    )


def test_a_trace_without_one_side_is_refused() -> None:
    kernels = [kernel for kernel in trace.kernels_of(chrome()) if kernel.launch < 20]
    with pytest.raises(ValueError, match="holds graphs of .*'ffn'.*allowed: 'attention' and 'ffn'.*merge"):
        trace.split(kernels, layers=2)


def test_spans_take_their_stage_from_the_order_of_launches() -> None:
    launched = [("ffn", 1), ("ffn", 0), ("attention", 0), ("attention", 1)]
    spans = trace.spans(trace.kernels_of(chrome()), launched)
    first = {place: min(s["start_us"] for s in spans if (s["role"], s["stage"]) == place) for place in launched}
    assert first == {("ffn", 1): -8.0, ("ffn", 0): -7.0, ("attention", 0): 0.0, ("attention", 1): 1.0}
    assert "begin" not in {s["name"] for s in spans} and len(spans) == 2 * 2 * (4 + 5) + 1
    with pytest.raises(ValueError, match="launched were"):
        trace.spans(trace.kernels_of(chrome()), launched[::-1])


# -- the picture -----------------------------------------------------------------------------------------------------


def drawn(spans: list[dict] | None = None) -> tuple[str, ElementTree.Element]:
    launched = [("ffn", 1), ("ffn", 0), ("attention", 0), ("attention", 1)]
    found = spans or trace.spans(trace.kernels_of(chrome()), launched)
    picture = step_svg.draw({"title": "a & <b>", "spans": found})
    return picture, ElementTree.fromstring(picture)


def bars(root: ElementTree.Element) -> list[ElementTree.Element]:
    return [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]


def test_picture_has_four_rows_and_alternative_text() -> None:
    picture, root = drawn()
    assert picture == drawn()[0]
    texts = [text.text for text in root.iter(f"{SVG}text")]
    rows = [text for text in texts if "stage" in text]
    assert rows == ["attention, stage 0", "attention, stage 1", "FFN, stage 0", "FFN, stage 1"]
    assert {"0 µs", "wait", "experts", "reply", "a & <b>"} <= set(texts) and "attention work (stand-in)" not in texts
    assert root.get("role") == "img" and root.get("aria-labelledby") == "title desc"
    assert root.find(f"{SVG}title").text == "a & <b>"
    assert "attention, stage 0 works for 14 µs and waits for 6 µs" in root.find(f"{SVG}desc").text


def test_bars_lie_in_the_picture_and_waits_are_hatched() -> None:
    _, root = drawn()
    _, _, width, height = map(float, root.get("viewBox").split())
    shown = bars(root)
    assert len(shown) == 2 * 2 * (4 + 5) + 1 - 2  # all but what each FFN stage entered with, which lies before time 0
    for bar in shown:
        x, y, w, h = (float(bar.get(name)) for name in ("x", "y", "width", "height"))
        assert step_svg.LEFT <= x and x + w <= width - step_svg.RIGHT + 0.7 and 0 <= y and y + h <= height
        assert (bar.get("fill") == "url(#waiting)") == bar.find(f"{SVG}title").text.startswith("wait")


def test_a_wait_that_began_before_the_step_is_cut() -> None:
    span = {"role": "ffn", "stage": 0, "stream": 1, "name": "wait", "start_us": -2000.0, "dur_us": 2050.0}
    work = {"role": "ffn", "stage": 0, "stream": 1, "name": "up", "start_us": 50.0, "dur_us": 50.0}
    _, root = drawn([span, work])
    wait, up = bars(root)
    assert float(wait.get("x")) == step_svg.LEFT and float(wait.get("width")) == pytest.approx(float(up.get("width")))
    with pytest.raises(ValueError, match="spans is empty after time 0"):
        drawn([{**span, "dur_us": 10.0}])


def test_ticks_are_round_and_few() -> None:
    for end in (0.7, 3.0, 12.0, 13.0, 99.0, 1740.0, 123456.0):
        step = step_svg.tick_step(end)
        assert end / step <= step_svg.MAX_TICKS
        assert step / 10 ** math.floor(math.log10(step)) in (1.0, 2.0, 5.0)
        assert step == 1.0 or end / step > step_svg.MAX_TICKS / 2.5


def test_every_kernel_of_the_package_has_a_colour() -> None:
    sources = Path(afd_kernels.__file__).parent.glob("*.py")
    names = {name for path in sources for name in re.findall(r"^def (_\w+_kernel)\(", path.read_text(), re.M)}
    assert {"_wait_kernel", "_p_experts_up_kernel", "_combine_kernel"} <= names
    not_in_a_step = {"begin", "open", "weighted_sum"}
    unknown = {op for name in names if step_svg.group_of(op := trace.op_of(name)) == "other"}
    assert unknown <= not_in_a_step


def test_drawing_from_the_command_line(tmp_path, monkeypatch, capsys) -> None:
    source, target = tmp_path / "step.json", tmp_path / "step.svg"
    span = {"role": "ffn", "stage": 0, "stream": 1, "name": "up", "start_us": 0.0, "dur_us": 5.0}
    source.write_text(json.dumps({"title": "µ", "spans": [span]}))
    monkeypatch.setattr(sys, "argv", ["step_trace", "--draw", str(source), str(target)])
    step_trace.main()
    assert ElementTree.parse(target).getroot().tag == f"{SVG}svg"
    monkeypatch.setattr(sys, "argv", ["step_trace", "--draw", str(source)])
    with pytest.raises(SystemExit):
        step_trace.main()
    assert "--draw and a picture" in capsys.readouterr().err


# -- bars and the result file ----------------------------------------------------------------------------------------


def test_limits_of_the_bars() -> None:
    assert [report.p6_limit(rows) for rows in (1, 128, 129, 512, 513)] == [8.0, 8.0, 13.0, 13.0, None]
    assert [report.p7_limit(*at) for at in ((128, 2048), (1, 7168), (129, 2048), (64, 9000))] == [9.0, 13.0, None, None]
    assert report.verdict("P8", 8.0, 8.0)["met"] is True and report.verdict("P8", 8.01, 8.0)["met"] is False
    assert report.verdict("P8", math.nan, 8.0)["met"] is False
    assert set(report.verdict("P8", 1.0, None).values()) == {None}
    assert report.all_of("P9", {"a": True, "b": False})["met"] is False
    assert report.key("qwen3-30b", 16, "stages=1") == "exchange/qwen3-30b/bf16/M=16/stages=1"


def test_a_failed_case_is_recorded_and_the_run_goes_on(tmp_path) -> None:
    path = tmp_path / "out.json"
    kept = report.Report(path, {"gpu": "none"})

    def fails() -> report.Result:
        raise AssertionError("wrong result")

    kept.run("a", fails)
    kept.run("b", lambda: {"x_us": 1.23456, "y": math.nan, "met": True, "bar": None, "z": {1: (math.inf, 2)}})
    found = json.loads(path.read_text())
    assert found["about"] == {"gpu": "none"}
    assert found["results"] == [
        {"key": "a", "error": "AssertionError: wrong result"},
        {"key": "b", "x_us": 1.235, "y": None, "met": True, "bar": None, "z": {"1": [None, 2]}},
    ]


def test_a_lost_device_ends_the_run_after_the_error_is_recorded(tmp_path) -> None:
    path = tmp_path / "out.json"

    def lost() -> None:
        raise RuntimeError("the device is lost")

    with pytest.raises(RuntimeError, match="the device is lost"):
        report.Report(path, {}, usable=lost).run("a", lambda: {}["missing"])
    assert json.loads(path.read_text())["results"] == [{"key": "a", "error": "KeyError: 'missing'"}]


def test_command_line_refuses_what_the_servers_do_not_hold(capsys) -> None:
    assert cli.arguments(["out.json"]).tokens == list(cli.TOKENS)
    with pytest.raises(SystemExit):
        cli.arguments(["out.json", "--tokens", "0", "16", "257"])
    assert "[0, 257]; allowed: 1 … 256" in capsys.readouterr().err


# -- timing ----------------------------------------------------------------------------------------------------------


def test_rounds_alternate() -> None:
    calls: list[str] = []

    def measure(name: str) -> Callable[[], float]:
        return lambda: calls.append(name) or float(len(calls))

    figures = timing.rounds({name: measure(name) for name in "ab"}, count=3)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"
    assert figures == {"a": [3.0, 6.0, 7.0], "b": [4.0, 5.0, 8.0]}


class Loop:
    """An FFN loop whose calls take known times by a clock that each thread has for itself."""

    def __init__(self) -> None:
        self.now = threading.local()

    def times(self) -> tuple[int, int]:
        wall = getattr(self.now, "ns", 0)
        return wall, wall // 2

    def spend(self, us: int) -> None:
        self.now.ns = self.times()[0] + 1000 * us

    def order(self) -> None:
        self.spend(1000)

    def launch(self, us: int) -> None:
        self.spend(us)

    def settle(self) -> None:
        self.spend(5)

    def leave(self) -> None:
        self.spend(2)


def test_host_time_is_from_order_to_launch_and_sums_the_stages() -> None:
    loop = Loop()
    launch = host.timed_spans((loop, "order"), [(loop, "launch")], from_return=True, times=loop.times)
    finish = host.timed_spans((loop, "settle"), [(loop, "leave")], from_return=False, times=loop.times)
    barrier = threading.Barrier(2)

    def stage(us: int) -> None:
        barrier.wait()
        loop.launch(7)  # not after an order: counts nothing
        for step in range(4):
            loop.order()
            loop.launch(us if step else 900)
            loop.spend(3000)  # the step runs
            loop.settle()
            loop.leave()

    threads = [threading.Thread(target=stage, args=(us,)) for us in (10, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert host.per_step(launch, 3) == pytest.approx((40.0, 20.0))
    assert host.per_step(finish, 4) == pytest.approx((14.0, 7.0))
    with pytest.raises(ValueError, match="allowed: 5 in each"):
        host.per_step(launch, 5)
    with pytest.raises(ValueError, match="none"):
        host.per_step({}, 1)


def test_shifts_of_a_delay() -> None:
    spans = {0.0: [100.0, 101.0, 99.0], 20.0: [121.0, 122.0, 119.0], 1000.0: [1090.0, 1110.0, 1130.0]}
    found = delays.shifts(spans, equal=True)
    assert found["shift_us"] == {"20": 21.0, "1000": 1010.0} and found["met"]
    assert not delays.shifts(spans, equal=False)["met"]
    absorbed = delays.shifts({**spans, 20.0: [101.0]}, equal=True)
    assert absorbed["checks"] == {"20 µs": False, "1000 µs": True, "bits": True} and not absorbed["met"]


def test_a_delay_is_measured_at_the_other_side() -> None:
    times = {"FFN graph": 1_000, "reply": 5_000, "FFN end": 25_000, "attention end": 41_000}
    assert [delays.span_us(place, times) for place in delays.PLACES] == [20.0, 36.0, 40.0]
    assert ("FFN graph", "FFN first") not in delays.cases() and len(delays.cases()) == 5


# -- what the measurements check first --------------------------------------------------------------------------------


@pytest.mark.parametrize("ffn_ranks", [1, 2, 3])
def test_ops_are_those_of_a_layer(ffn_ranks) -> None:
    ops = Ops(Bank(SPEC, torch.device("cpu")), rows=5, ffn_ranks=ffn_ranks)
    ops.check()
    ops.parts[-1].w_down = ops.parts[-1].w_down.roll(1, dims=0)  # experts of one rank mixed up
    with pytest.raises(AssertionError, match=f"5 rows, {ffn_ranks} FFN ranks"):
        ops.check()


def test_ops_refuse_experts_that_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match="ffn_ranks is 4; allowed: a divisor of the 6 experts"):
        Ops(Bank(SPEC, torch.device("cpu")), rows=2, ffn_ranks=4)


def test_oracle_knows_only_the_formula() -> None:
    bank = Bank(SPEC, torch.device("cpu"))
    x = torch.randn(4, SPEC.hidden_size, generator=torch.Generator().manual_seed(1))
    weights, ids = bank.route(x)
    got = afd_kernels.fused_experts(x, bank.w_up, bank.w_down, weights, ids)
    torch.testing.assert_close(got.double(), oracle(bank, x), rtol=2e-5, atol=2e-5)
    swapped = bank.w_up.roll(SPEC.intermediate_size, dims=1)  # gate and up in the other order
    wrong = afd_kernels.fused_experts(x, swapped, bank.w_down, weights, ids)
    assert not torch.allclose(wrong.double(), oracle(bank, x), rtol=1e-2, atol=1e-2)


def test_banks_share_their_weights() -> None:
    bank = Bank(SPEC, torch.device("cpu"))
    part, fewer = bank.part(range(2, 4)), bank.with_layers(1)
    assert part.w_up.data_ptr() == bank.w_up[2].data_ptr() and part.w_up.shape[0] == 2
    assert fewer.spec == dataclasses.replace(SPEC, num_layers=1) and fewer.w_down is bank.w_down


def test_the_readme_s_table_is_that_of_the_committed_results() -> None:
    page, data = (ROOT / "README.md").read_text(), json.loads(tables.RESULT.read_text())
    table = tables.exchange_table(data)
    assert tables.rewritten(page, table) == page, "run: python -m benchmarks.tables"
    assert table.count("\n| ") >= 10 and "missed" in table
    worse = json.loads(json.dumps(data))
    worse["results"][0]["layer_us"] += 1
    assert tables.exchange_table(worse) != table
