# SPDX-License-Identifier: Apache-2.0
"""For tests, also users' own: input generators, NaN-poisoned buffers, the tolerance table, a token-by-token oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from afd_kernels.experts import SwiGLU


@dataclass(frozen=True)
class Tolerance:
    """Largest error and root mean square error allowed, each relative to the reference's largest absolute value."""

    max_relative: float
    rms: float


#: Against an fp64 oracle. fp32 accumulates in fp32; fp16 and bf16 round rows, activations and results.
TOLERANCES = {
    torch.float32: Tolerance(2e-5, 2e-6),
    torch.float16: Tolerance(4e-3, 5e-4),
    torch.bfloat16: Tolerance(3e-2, 4e-3),
}


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, *, dtype: torch.dtype | None = None, what: str = ""
) -> None:
    """Raises ``AssertionError`` unless ``actual`` is close to ``expected``. NaN never passes.

    dtype: whose entry of ``TOLERANCES`` holds (default: that of ``actual``). what: begins the message.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if actual.numel() == 0:
        return
    limit = TOLERANCES[dtype or actual.dtype]
    a, e = actual.detach().cpu().double(), expected.detach().cpu().double()
    scale = e.abs().max().clamp(min=1e-30)
    error = (a - e).abs() / scale
    worst, rms = error.max().item(), error.square().mean().sqrt().item()
    if not (worst <= limit.max_relative and rms <= limit.rms):
        raise AssertionError(
            f"{what}: max-relative {worst:.3g} (limit {limit.max_relative:.3g}), rms {rms:.3g} (limit {limit.rms:.3g})"
        )


def poison(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A buffer full of NaN (floating types) or of a large odd pattern: what is not written fails loudly."""
    if dtype.is_floating_point:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)
    return torch.full(shape, 0x5B if dtype == torch.uint8 else 0x5B5B5B5B, dtype=dtype, device=device)


@dataclass(frozen=True)
class ExpertInputs:
    """Random inputs of a MoE layer, scaled so that outputs are of order one."""

    x: torch.Tensor
    gate_weight: torch.Tensor
    w_up: torch.Tensor
    w_down: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    b_up: torch.Tensor | None
    b_down: torch.Tensor | None


def expert_inputs(
    num_tokens: int, num_experts: int, hidden_size: int, intermediate_size: int, top_k: int, *,
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", bias: bool = False, seed: int = 0,
    skew: float = 0.0,
) -> ExpertInputs:  # fmt: skip
    """Inputs as the engines hold them. skew: share of tokens whose first choice is forced onto expert 0."""
    g = torch.Generator(device="cpu").manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=g) * scale).to(device=device, dtype=dtype)

    logits = torch.randn(num_tokens, num_experts, generator=g)
    logits[: int(num_tokens * skew), 0] = 100.0
    weights, ids = logits.softmax(-1).topk(min(top_k, num_experts), dim=-1)
    return ExpertInputs(
        x=draw(num_tokens, hidden_size),
        gate_weight=draw(num_experts, hidden_size, scale=hidden_size**-0.5),
        w_up=draw(num_experts, 2 * intermediate_size, hidden_size, scale=hidden_size**-0.5),
        w_down=draw(num_experts, hidden_size, intermediate_size, scale=intermediate_size**-0.5),
        topk_weights=(weights / weights.sum(-1, keepdim=True)).to(device=device, dtype=torch.float32),
        topk_ids=ids.to(device=device, dtype=torch.int32),
        b_up=draw(num_experts, 2 * intermediate_size) if bias else None,
        b_down=draw(num_experts, hidden_size) if bias else None,
    )


def moe_oracle(
    x: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *,
    activation: SwiGLU = SwiGLU(), b_up: torch.Tensor | None = None, b_down: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The formula of a MoE layer, token by token, in fp64 on the CPU; shares no code with ops or references."""
    x, w_up, w_down = (t.detach().cpu().double() for t in (x, w_up, w_down))
    out = torch.zeros_like(x)
    intermediate = w_down.shape[2]
    for token in range(x.shape[0]):
        for weight, expert in zip(topk_weights[token].tolist(), topk_ids[token].tolist(), strict=True):
            if weight == 0 or not 0 <= expert < w_up.shape[0]:
                continue
            up = w_up[expert] @ x[token]
            if b_up is not None:
                up = up + b_up[expert].detach().cpu().double()
            halves = (up[0::2], up[1::2]) if activation.interleaved else (up[:intermediate], up[intermediate:])
            gate, lin = halves if activation.gate_first else halves[::-1]
            if activation.limit is not None:
                gate = gate.clamp(max=activation.limit)
                lin = lin.clamp(min=-activation.limit, max=activation.limit)
            result = w_down[expert] @ (gate / (1 + torch.exp(-activation.alpha * gate)) * (lin + activation.beta))
            if b_down is not None:
                result = result + b_down[expert].detach().cpu().double()
            out[token] += weight * result
    return out
