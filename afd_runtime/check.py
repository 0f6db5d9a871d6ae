# SPDX-License-Identifier: Apache-2.0
"""Compares a divided run in float32 with the undivided model, position by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

# Largest allowed |difference| of a logit, relative to the largest |logit| of its position, in float32. A 1 % error of
# the experts' weights shows as 2e-4 or more and may change no token. In lower precision rounding alone flips near-ties
# of the router, and right and wrong experts cannot be told apart by logits: layer_check.py compares layers instead.
TOLERANCE = 2e-5


@dataclass(frozen=True)
class CheckReport:
    """matched of prompts: same tokens, all logits within tolerance. max_logit_error: largest relative error seen.

    Positions after the first differing token of a prompt see other inputs and are not compared. ``mismatches`` says
    what differs first, one line a prompt.
    """

    matched: int
    prompts: int
    tokens: int
    max_logit_error: float
    tolerance: float
    mismatches: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.matched == self.prompts > 0

    def line(self) -> str:
        """The closing line of a check."""
        return (
            f"match: {self.matched}/{self.prompts} prompts, {self.tokens} tokens, "
            f"max logit error {self.max_logit_error:.1e}"
        )


@dataclass(frozen=True)
class Generated:
    """One prompt's new tokens and the logits that they were chosen from, float [len(token_ids), vocab]."""

    token_ids: Sequence[int]
    logits: torch.Tensor


def compare(divided: Mapping[int, Generated], undivided: Mapping[int, Generated]) -> CheckReport:
    """Compares two runs, keyed by prompt index, that computed in float32."""
    tokens, largest, mismatches = 0, 0.0, []
    for index, expected in sorted(undivided.items()):
        got = divided.get(index)
        if got is None:
            mismatches.append(f"prompt {index}: nothing was generated")
            continue
        same = _common_prefix(got.token_ids, expected.token_ids)
        errors = relative_errors(got.logits, expected.logits, same + 1)
        tokens += same
        largest = max([largest, *errors])
        mismatch = _first_mismatch(got.token_ids, expected.token_ids, errors, same)
        if mismatch:
            mismatches.append(f"prompt {index}: {mismatch}")
    total = len(undivided)
    return CheckReport(total - len(mismatches), total, tokens, largest, TOLERANCE, tuple(mismatches))


def relative_errors(got: torch.Tensor, expected: torch.Tensor, positions: int) -> list[float]:
    """Of each of the first ``positions`` rows: largest |difference| over largest |expected|; NaN counts as inf."""
    count = min(positions, len(got), len(expected))
    if not count:
        return []
    a, b = got[:count].double(), expected[:count].double()
    error = (a - b).abs().amax(-1) / b.abs().amax(-1).clamp_min(1e-30)
    return torch.nan_to_num(error, nan=float("inf")).tolist()


def _first_mismatch(got: Sequence[int], expected: Sequence[int], errors: list[float], same: int) -> str | None:
    for position, error in enumerate(errors):
        if error > TOLERANCE:
            return f"logits differ by {error:.1e} at new token {position} (allowed {TOLERANCE:.0e})"
    if same < max(len(got), len(expected)):
        pair = [ids[same] if same < len(ids) else "the end" for ids in (got, expected)]
        return f"new token {same} is {pair[0]}, undivided it is {pair[1]}"
    return None


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = list(zip(a, b, strict=False))
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
