# SPDX-License-Identifier: Apache-2.0
"""Sizes of MoE layers that tests and benchmarks share. Pure data, without a tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """One MoE layer as a rank holds it.

    num_experts: on this rank. hidden_size: H. intermediate_size: I. top_k: choices per token. scoring, num_groups,
    topk_groups, renormalize, selection_bias: how the model routes, as for ``route``. whole: the rank has all experts,
    so that a gate belongs to it.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    scoring: str = "softmax"
    num_groups: int = 1
    topk_groups: int = 1
    renormalize: bool = True
    selection_bias: bool = False
    whole: bool = True

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(experts, H, I, k)"""
        return self.num_experts, self.hidden_size, self.intermediate_size, self.top_k

    def reduced(self, factor: int) -> Shape:
        """The same experts, choices and routing with H and I divided by ``factor``, rounded up to a multiple of 8."""
        hidden, inner = (-(-size // (8 * factor)) * 8 for size in (self.hidden_size, self.intermediate_size))
        return replace(self, hidden_size=hidden, intermediate_size=inner)


#: By the name that result files and tables use. ``dsv3-ep8``: one of eight ranks that share DeepSeek-V3's experts.
SHAPES: dict[str, Shape] = {
    "qwen3-30b": Shape(128, 2048, 768, 8),
    "dsv2-lite": Shape(64, 2048, 1408, 6, renormalize=False),
    "dsv3-ep8": Shape(32, 7168, 2048, 8, whole=False),
    "dsv3-ep1": Shape(256, 7168, 2048, 8, scoring="sigmoid", num_groups=8, topk_groups=4, selection_bias=True),
    "gpt-oss": Shape(128, 2880, 2880, 4),
    "mixtral": Shape(8, 4096, 14336, 2),
}
