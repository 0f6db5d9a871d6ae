# SPDX-License-Identifier: Apache-2.0
"""The comparison with the undivided model sees each kind of difference."""

from __future__ import annotations

import pytest
import torch

from afd_runtime.check import TOLERANCE, Generated, compare


def _run(tokens: int = 5, vocab: int = 31, seed: int = 0) -> dict[int, Generated]:
    generator = torch.Generator().manual_seed(seed)
    logits = [torch.randn(tokens, vocab, generator=generator) for _ in range(3)]
    return {i: Generated(x.argmax(-1).tolist(), x) for i, x in enumerate(logits)}


def _changed(run: dict[int, Generated], **fields: object) -> dict[int, Generated]:
    return {**run, 1: Generated(**{"token_ids": run[1].token_ids, "logits": run[1].logits, **fields})}


def test_equal_runs_match() -> None:
    report = compare(_run(), _run())
    assert report.ok and report.line() == "match: 3/3 prompts, 15 tokens, max logit error 0.0e+00"


@pytest.mark.parametrize(("factor", "ok"), [(0.5, True), (1.5, False)])
def test_tolerance_is_relative_to_the_largest_logit_of_the_position(factor: float, ok: bool) -> None:
    run = _run()
    logits = run[1].logits.clone()
    logits[3, 7] += factor * TOLERANCE * logits[3].abs().max()
    report = compare(_changed(run, logits=logits), run)
    assert report.ok is ok
    assert report.max_logit_error == pytest.approx(factor * 2e-5, rel=0.02)
    assert ok or ("prompt 1: logits differ" in report.mismatches[0] and "token 3" in report.mismatches[0])


def test_nan_is_a_mismatch() -> None:
    run = _run()
    logits = run[1].logits.clone()
    logits[2, 0] = float("nan")
    report = compare(_changed(run, logits=logits), run)
    assert not report.ok and report.max_logit_error == float("inf")


def test_tokens_after_a_difference_are_not_counted() -> None:
    run = _run()
    ids = list(run[1].token_ids)
    ids[2] += 1
    report = compare(_changed(run, token_ids=ids), run)
    assert report.matched == 2 and report.tokens == 12 and "new token 2" in report.mismatches[0]


def test_early_end_missing_prompt_and_no_prompt_are_mismatches() -> None:
    run = _run()
    short = _changed(run, token_ids=run[1].token_ids[:3], logits=run[1].logits[:3])
    assert "the end" in compare(short, run).mismatches[0]
    assert "nothing" in compare({0: run[0], 2: run[2]}, run).mismatches[0]
    assert not compare({}, {}).ok
