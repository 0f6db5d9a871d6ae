# SPDX-License-Identifier: Apache-2.0
"""``supported``: whether an op takes certain sizes, before anything is allocated; in the words of its error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from afd_kernels._op import check
from afd_kernels.dispatch import ROW_DTYPES
from afd_kernels.message import MessageLayout
from afd_kernels.routing import check_top_k_sizes

MIN_CAPABILITY = (8, 0)


def _route(dtype: torch.dtype, *, num_experts: int, top_k: int, scoring: str = "softmax", num_groups: int = 1,
           topk_groups: int = 1) -> None:  # fmt: skip
    check_top_k_sizes(num_experts, top_k, scoring, num_groups, topk_groups)


def _message(dtype: torch.dtype, *, num_experts: int, top_k: int, hidden_size: int, cap_rows: int = 1) -> None:
    MessageLayout(num_experts, cap_rows, top_k, hidden_size, dtype)


_OPS: dict[str, Callable[..., None]] = {
    "route": _route, "dispatch": _message, "arrival": _message, "experts_forward": _message, "reply": _message,
    "combine": _message, "fused_experts": _message,
}  # fmt: skip


def supported(op: str, *, dtype: torch.dtype, device: torch.device | str = "cuda", **sizes: Any) -> str | None:
    """None where ``op`` takes these sizes, otherwise the reason, in the words of its error.

    op: ``route``, ``dispatch``, ``arrival``, ``experts_forward``, ``reply``, ``combine`` or ``fused_experts``.
    sizes: num_experts and top_k; for ``route`` also scoring, num_groups, topk_groups; for the others hidden_size and
    cap_rows (rows of a slot or of a call). device: a CUDA device needs compute capability 8.0.
    """
    if op not in _OPS:
        raise ValueError(f"op is {op!r}; allowed: {', '.join(_OPS)}")
    try:
        allowed = ", ".join(map(str, ROW_DTYPES))
        check(dtype in ROW_DTYPES, f"dtype is {dtype}; allowed: {allowed}; cast it first")
        _OPS[op](dtype, **sizes)
        device = torch.device(device)
        if device.type == "cuda" and torch.cuda.is_available():
            capability = torch.cuda.get_device_capability(device)
            check(capability >= MIN_CAPABILITY, f"device has compute capability {capability}; allowed: 8.0 and newer")
    except ValueError as reason:
        return str(reason)
    return None
