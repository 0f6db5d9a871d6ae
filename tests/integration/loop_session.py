# SPDX-License-Identifier: Apache-2.0
"""A session without processes: plain torch computes each exchange from an ExpertBank."""

from __future__ import annotations

from typing import Any

import torch

from afd_runtime.ffn_backend import ExpertBank
from afd_runtime.model_spec import ModelSpec

CAP = 24


class LoopSession:
    """Computes in place of the FFN side, expert by expert, and records every call. `fault` spoils the result."""

    def __init__(self, spec: ModelSpec, fault: str | None = None, **load: Any) -> None:
        self.spec, self.fault, self.calls = spec, fault, []
        self.bank = ExpertBank.load(spec, range(spec.num_experts), **load)

    def begin_step(self, num_rows: int) -> None:
        assert num_rows <= CAP, f"{num_rows} rows do not fit"
        self.calls.append(("begin", num_rows))

    def end_step(self) -> None:
        self.calls.append(("end",))

    def abort_step(self, reason: str) -> None:
        self.calls.append(("abort", reason))

    def experts(self, layer_idx: int, hidden: Any, topk_ids: Any, topk_weights: Any) -> torch.Tensor:
        self.calls.append(("experts", layer_idx, tuple(hidden.shape)))
        assert hidden.ndim == 2 and topk_ids.shape == topk_weights.shape == (hidden.shape[0], self.spec.top_k)
        assert topk_ids.dtype == torch.int32 and topk_weights.dtype == torch.float32
        if self.fault == "shifted":
            topk_ids = (topk_ids + 1) % self.spec.num_experts
        if self.fault == "scaled":
            topk_weights = topk_weights * 1.01
        result = torch.zeros(hidden.shape, dtype=torch.float32)
        for expert in range(self.spec.num_experts - (self.fault == "last-dropped")):
            rows, choice = torch.where(topk_ids == expert)
            if len(rows) and self.fault != "zeroed":
                result.index_add_(
                    0, rows, self.expert(layer_idx, expert, hidden[rows]) * topk_weights[rows, choice, None]
                )
        return result.to(hidden.dtype)

    def expert(self, layer_idx: int, expert: int, x: torch.Tensor) -> torch.Tensor:
        weights, act = self.bank.layers[layer_idx], self.spec.activation
        y = x.float() @ weights.w_up[expert].float().T
        if weights.b_up is not None:
            y = y + weights.b_up[expert]
        gate, up = (y[:, ::2], y[:, 1::2]) if act.interleaved else y.chunk(2, dim=-1)
        if self.fault == "swapped":
            gate, up = up, gate
        if act.limit is not None:
            gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
        y = (up + act.beta) * gate * torch.sigmoid(act.alpha * gate)
        y = y @ weights.w_down[expert].float().T
        return y if weights.b_down is None else y + weights.b_down[expert]
