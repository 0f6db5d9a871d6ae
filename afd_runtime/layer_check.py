# SPDX-License-Identifier: Apache-2.0
"""Compares each exchanged layer with the undivided model's experts: the check of runs in less than float32.

There rounding alone flips near-ties of the router, so logits and tokens of a right run differ too. What a layer gave is
therefore compared with what the undivided model's own experts give for the very same rows, expert ids and weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from afd_kernels.testing import TOLERANCES

if TYPE_CHECKING:
    from afd_runtime.integrations.transformers import ExpertSession

RECORD_BYTES = 256 << 20  # of all attention ranks together
# Rounding errors of a layer average out and a wrong scale does not: the scale of a layer's output, by least squares
# over all its calls, may be off by this share of the largest error that a single element may have.
SCALE_SHARE = 0.1


@dataclass(frozen=True)
class LayerCall:
    """One exchanged layer of one step. hidden, out: [M, H]; topk_ids: int32[M, k]; topk_weights: float32[M, k]."""

    step: int
    layer: int
    hidden: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    out: torch.Tensor

    def cpu(self) -> LayerCall:
        """The same on the CPU."""
        tensors = ("hidden", "topk_ids", "topk_weights", "out")
        return replace(self, **{name: getattr(self, name).cpu() for name in tensors})


class LayerRecorder:
    """An ``ExpertSession`` around another one that keeps what every exchanged layer got and gave.

    num_layers: exchanged layers of a step. limit: bytes to keep in all. A step keeps at most half of what is left, so
    that a long prompt leaves room for the steps after it; of a step that needs more, rows at even distances are kept.
    calls: of the steps that ended, on the CPU. rows, rows_kept: of these steps.
    """

    def __init__(self, session: ExpertSession, num_layers: int, limit: int = RECORD_BYTES) -> None:
        self._session, self._num_layers, self._left = session, num_layers, limit
        self._step: list[LayerCall] = []
        self._steps = self._step_rows = self._keep = 0
        self.calls: list[LayerCall] = []
        self.rows = self.rows_kept = 0

    def begin_step(self, num_rows: int) -> None:
        self._session.begin_step(num_rows)
        self._step, self._step_rows, self._keep = [], num_rows, -1

    def experts(
        self, layer_idx: int, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        out = self._session.experts(layer_idx, hidden, topk_ids, topk_weights)
        tensors = (hidden, topk_ids, topk_weights, out)
        if self._keep < 0:
            row_bytes = self._num_layers * sum(t.shape[1] * t.element_size() for t in tensors)
            self._keep = min(self._step_rows, self._left // 2 // row_bytes)
            self._left -= self._keep * row_bytes
        if self._keep:
            rows = torch.arange(self._keep, device=hidden.device) * self._step_rows // self._keep
            self._step.append(LayerCall(self._steps, layer_idx, *(t[rows] for t in tensors)))
        return out

    def end_step(self) -> None:
        self._session.end_step()
        self.calls += [call.cpu() for call in self._step]
        self.rows, self.rows_kept = self.rows + self._step_rows, self.rows_kept + max(0, self._keep)
        self._step, self._steps = [], self._steps + 1

    def abort_step(self, reason: str) -> None:
        self._step = []
        self._session.abort_step(reason)

    def save(self, path: Path) -> None:
        """Writes a file for ``LayerRecord.load`` and for ``_greedy.py --layer-calls``."""
        calls = [dict(vars(call)) for call in self.calls]
        torch.save({"calls": calls, "rows": self.rows, "rows_kept": self.rows_kept}, path)


@dataclass(frozen=True)
class LayerRecord:
    """What one attention rank recorded. prompts: indices of its prompts. rows, rows_kept: as of ``LayerRecorder``."""

    prompts: Collection[int]
    calls: Sequence[LayerCall]
    rows: int
    rows_kept: int

    @classmethod
    def load(cls, path: Path, prompts: Collection[int]) -> LayerRecord:
        """Reads what ``LayerRecorder.save`` wrote."""
        saved = torch.load(path, weights_only=True)
        return cls(prompts, [LayerCall(**call) for call in saved["calls"]], saved["rows"], saved["rows_kept"])


@dataclass(frozen=True)
class LayerCheckReport:
    """matched of prompts: every recorded layer call of their attention rank is within the tolerances.

    Errors are relative to the largest |value| of the call's reference: the largest of an element (``max_error``) and
    the largest root mean square of a call (``max_rms``); ``max_scale_error`` is of a layer, see ``SCALE_SHARE``.
    layer_calls: compared, over rows_compared of rows rows. tokens_equal of tokens: reported, not judged.
    """

    matched: int
    prompts: int
    layer_calls: int
    rows: int
    rows_compared: int
    max_error: float
    max_rms: float
    max_scale_error: float
    tolerance: float
    rms_tolerance: float
    scale_tolerance: float
    tokens_equal: int
    tokens: int
    mismatches: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.matched == self.prompts > 0 and self.layer_calls > 0

    def line(self) -> str:
        """The closing line of a check."""
        left_out = self.rows - self.rows_compared
        return (
            f"match: {self.matched}/{self.prompts} prompts, {self.layer_calls} layer calls, max error "
            f"{self.max_error:.1e} (allowed {self.tolerance:.1e}), tokens equal {self.tokens_equal}/{self.tokens}"
            + (f", {left_out} of {self.rows} rows were too many to record" if left_out else "")
        )


@dataclass(frozen=True)
class CallErrors:
    """Of one call: largest and root mean square error, relative to the reference; <out, ref> and <ref, ref>."""

    error: float
    rms: float
    product: float
    square: float

    @classmethod
    def of(cls, out: torch.Tensor, expected: torch.Tensor) -> CallErrors:
        """out, expected: [M, H]. What is not a number counts as inf."""
        a, e = out.double(), expected.double()
        difference = torch.nan_to_num((a - e).abs() / e.abs().max().clamp_min(1e-30), nan=torch.inf, posinf=torch.inf)
        rms = difference.square().mean().sqrt()
        return cls(difference.max().item(), rms.item(), (a * e).sum().item(), e.square().sum().item())


def compare_layers(
    records: Mapping[int, LayerRecord],
    expected: Mapping[int, Sequence[torch.Tensor]],
    dtype: torch.dtype,
    tokens: Mapping[int, tuple[Sequence[int], Sequence[int]]],
) -> LayerCheckReport:
    """Compares what was recorded in ``dtype`` with what the undivided model's experts give, by attention rank.

    expected: float32[M, H] of each call of each rank. tokens: (divided, undivided) by prompt index.
    Raises ``ValueError`` where there are not as many references as calls.
    """
    limit = TOLERANCES[dtype]
    matched, mismatches, errors, scales = 0, [], [], [0.0]
    for rank, record in sorted(records.items()):
        found = [CallErrors.of(call.out, e) for call, e in zip(record.calls, expected[rank], strict=True)]
        by_layer = _scale_errors(record.calls, found)
        wrong = _wrong(record.calls, found, by_layer, dtype) if found else ["no layer call was recorded"]
        if wrong:
            mismatches.append(f"attention rank {rank}: {wrong[0]}" + (f" ({len(wrong) - 1} more)" if wrong[1:] else ""))
        matched += 0 if wrong else len(record.prompts)
        errors += found
        scales += by_layer.values()
    return LayerCheckReport(
        matched=matched, prompts=len(tokens), layer_calls=len(errors), rows=sum(r.rows for r in records.values()),
        rows_compared=sum(r.rows_kept for r in records.values()), max_error=max((e.error for e in errors), default=0.0),
        max_rms=max((e.rms for e in errors), default=0.0), max_scale_error=max(scales),
        tolerance=limit.max_relative, rms_tolerance=limit.rms, scale_tolerance=SCALE_SHARE * limit.max_relative,
        tokens_equal=sum(a == b for prompt in tokens.values() for a, b in zip(*prompt, strict=False)),
        tokens=sum(max(map(len, prompt)) for prompt in tokens.values()), mismatches=tuple(mismatches),
    )  # fmt: skip


def _scale_errors(calls: Sequence[LayerCall], errors: Sequence[CallErrors]) -> dict[int, float]:
    """By layer: how far the scale of its output is off, by least squares over its calls. NaN counts as inf."""
    found = {}
    for layer in sorted({call.layer for call in calls}):
        own = [e for call, e in zip(calls, errors, strict=True) if call.layer == layer]
        square = sum(e.square for e in own)
        scale = sum(e.product for e in own) / square if square else 1.0
        found[layer] = abs(scale - 1) if scale == scale else float("inf")
    return found


def _wrong(
    calls: Sequence[LayerCall], errors: Sequence[CallErrors], scale_errors: Mapping[int, float], dtype: torch.dtype
) -> list[str]:
    """What is not within the tolerances, one line a call and one a layer whose scale is off."""
    limit = TOLERANCES[dtype]
    scale_limit = SCALE_SHARE * limit.max_relative
    return [
        f"layer {call.layer} of step {call.step} differs by {e.error:.1e} (allowed {limit.max_relative:.1e}), "
        f"rms {e.rms:.1e} (allowed {limit.rms:.1e})"
        for call, e in zip(calls, errors, strict=True)
        if not (e.error <= limit.max_relative and e.rms <= limit.rms)
    ] + [
        f"the scale of layer {layer} is off by {error:.1e} (allowed {scale_limit:.1e})"
        for layer, error in scale_errors.items()
        if not error <= scale_limit
    ]
