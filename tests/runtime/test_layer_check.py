# SPDX-License-Identifier: Apache-2.0
"""The check of layers: what is recorded within how many bytes, and that each kind of difference is seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from afd_runtime.layer_check import LayerCall, LayerCheckReport, LayerRecord, LayerRecorder, compare_layers

H, K, LAYERS = 33, 3, 2
ROW_BYTES = LAYERS * (2 * 2 * H + 8 * K)  # of a step: hidden and out in bfloat16, ids and weights


class Echo:
    """An ``ExpertSession`` that answers ``2 * hidden`` and notes what it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def begin_step(self, num_rows: int) -> None:
        self.calls.append(("begin", num_rows))

    def experts(self, layer_idx: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.calls.append(("experts", layer_idx))
        return 2 * hidden

    def end_step(self) -> None:
        self.calls.append(("end",))

    def abort_step(self, reason: str) -> None:
        self.calls.append(("abort", reason))


def _step(recorder: LayerRecorder, rows: int) -> None:
    recorder.begin_step(rows)
    for layer in range(LAYERS):
        hidden = torch.arange(rows)[:, None].expand(rows, H).to(torch.bfloat16)
        out = recorder.experts(layer, hidden, torch.full((rows, K), layer, dtype=torch.int32), torch.ones(rows, K))
        assert torch.equal(out, 2 * hidden)
        hidden.fill_(float("nan"))  # engines reuse memory
        out.fill_(float("nan"))
    recorder.end_step()


def test_everything_is_recorded_where_there_is_room(tmp_path: Path) -> None:
    session = Echo()
    recorder = LayerRecorder(session, LAYERS)
    for rows in (5, 1):
        _step(recorder, rows)
    recorder.begin_step(7)
    recorder.experts(0, torch.ones(7, H), torch.zeros(7, K, dtype=torch.int32), torch.ones(7, K))
    recorder.abort_step("planted")
    assert session.calls[-3:] == [("begin", 7), ("experts", 0), ("abort", "planted")]
    recorder.save(tmp_path / "calls.pt")
    record = LayerRecord.load(tmp_path / "calls.pt", [0, 2])
    assert [(c.step, c.layer, len(c.hidden)) for c in record.calls] == [(0, 0, 5), (0, 1, 5), (1, 0, 1), (1, 1, 1)]
    assert (record.rows, record.rows_kept, record.prompts) == (6, 6, [0, 2])
    for call in record.calls:
        assert torch.equal(call.hidden[:, 0].long(), torch.arange(len(call.hidden)))
        assert torch.equal(call.out, 2 * call.hidden) and call.topk_ids.unique().tolist() == [call.layer]


def test_a_long_step_leaves_room_for_those_after_it() -> None:
    recorder = LayerRecorder(Echo(), LAYERS, limit=20 * ROW_BYTES)
    for rows in (30, 3, 3, 3, 3):
        _step(recorder, rows)
    kept = [len(call.hidden) for call in recorder.calls[::LAYERS]]
    assert kept == [10, 3, 3, 2, 1]
    assert recorder.calls[0].hidden[:, 0].tolist() == list(range(0, 30, 3))
    assert (recorder.rows, recorder.rows_kept) == (42, sum(kept))
    for _ in range(9):
        _step(recorder, 1)
    assert recorder.rows_kept == 19 and recorder.rows == 51


def _record(seed: int, prompts: tuple[int, ...]) -> tuple[LayerRecord, list[torch.Tensor]]:
    """Calls in bfloat16 that are right but for rounding, and their references."""
    generator = torch.Generator().manual_seed(seed)
    calls, expected = [], []
    for step, rows in enumerate((7, 1, 2)):
        for layer in range(LAYERS):
            reference = torch.randn(rows, H, generator=generator)
            ids, weights = torch.zeros(rows, K, dtype=torch.int32), torch.ones(rows, K)
            calls.append(LayerCall(step, layer, torch.ones(rows, H), ids, weights, reference.to(torch.bfloat16)))
            expected.append(reference)
    return LayerRecord(prompts, calls, 10, 10), expected


def _compare(change=None) -> LayerCheckReport:
    """Two ranks; ``change`` spoils the output of rank 1's call of layer 1 in step 1."""
    records, expected = {}, {}
    for rank, prompts in enumerate([(0, 2), (1,)]):
        records[rank], expected[rank] = _record(rank, prompts)
    if change is not None:
        spoilt = replace(records[1].calls[3], out=change(records[1].calls[3].out.clone()))
        records[1].calls[3] = spoilt
    tokens = {0: ([1, 2, 3], [1, 2, 3]), 1: ([1, 2], [1, 7]), 2: ([4, 5, 6], [9, 5, 6])}
    return compare_layers(records, expected, torch.bfloat16, tokens)


def test_rounding_matches() -> None:
    report = _compare()
    assert report.ok and not report.mismatches
    assert report.line() == (
        f"match: 3/3 prompts, 12 layer calls, max error {report.max_error:.1e} (allowed 3.0e-02), tokens equal 6/8"
    )
    assert 0 < report.max_error < 1e-2 and 0 < report.max_scale_error < 1e-3


def _one_element(out: torch.Tensor) -> torch.Tensor:
    out[0, 5] += 0.1 * out.abs().max()
    return out


def _small_everywhere(out: torch.Tensor) -> torch.Tensor:
    return out + 0.01 * out.abs().max() * (-1) ** torch.arange(out.shape[1])


def _nan(out: torch.Tensor) -> torch.Tensor:
    out[0, 0] = float("nan")
    return out


@pytest.mark.parametrize("change", [_one_element, _small_everywhere, _nan, torch.zeros_like], ids=lambda f: f.__name__)
def test_a_wrong_call_fails_the_prompts_of_its_rank(change) -> None:
    report = _compare(change)
    assert not report.ok and (report.matched, report.prompts) == (2, 3)
    assert report.mismatches[0].startswith("attention rank 1: layer 1 of step 1 differs by")


def test_a_scale_that_single_calls_do_not_show() -> None:
    records, expected = {}, {}
    records[0], expected[0] = _record(0, (0,))
    for index, call in enumerate(records[0].calls):
        if call.layer == 1:
            records[0].calls[index] = replace(call, out=call.out.float() * 1.006)
    report = compare_layers(records, expected, torch.bfloat16, {0: ([1], [1])})
    assert report.max_error < report.tolerance and report.max_rms < report.rms_tolerance
    assert not report.ok and "the scale of layer 1 is off by" in report.mismatches[0]


def test_what_was_left_out_is_said_and_nothing_is_no_match() -> None:
    record, expected = _record(0, (0,))
    partly = replace(record, rows=50)
    assert compare_layers({0: partly}, {0: expected}, torch.bfloat16, {0: ([1], [1])}).line().endswith(
        "tokens equal 1/1, 40 of 50 rows were too many to record"
    )  # fmt: skip
    empty = LayerRecord((0,), [], 3, 0)
    report = compare_layers({0: empty}, {0: []}, torch.bfloat16, {0: ([1], [1])})
    assert not report.ok and "no layer call" in report.mismatches[0]
    assert not compare_layers({}, {}, torch.bfloat16, {}).ok
    with pytest.raises(ValueError):
        compare_layers({0: record}, {0: expected[1:]}, torch.bfloat16, {0: ([1], [1])})


def test_a_layer_that_gives_nothing_matches_nothing() -> None:
    record, expected = _record(0, (0,))
    zero = [torch.zeros_like(reference) for reference in expected]
    assert not compare_layers({0: record}, {0: zero}, torch.bfloat16, {0: ([1], [1])}).ok
    nothing = replace(record, calls=[replace(c, out=torch.zeros_like(c.out)) for c in record.calls])
    assert compare_layers({0: nothing}, {0: zero}, torch.bfloat16, {0: ([1], [1])}).ok
