# SPDX-License-Identifier: Apache-2.0
"""Launch configurations of the grouped GEMMs: frozen dataclasses out of checked-in tables, by pure functions.

Nothing is tuned while serving. A configuration that needs more shared memory than the card has is made smaller.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from importlib import resources

import torch

from afd_kernels._op import check


@dataclass(frozen=True)
class GemmConfig:
    """Launch configuration of one grouped GEMM.

    block_m, block_n, block_k: rows and output columns of a tile, and the depth of one step of its sum.
    group_m: row tiles that share weights.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3
    group_m: int = 8

    def shared_memory(self, itemsize: int, weight_blocks: int) -> int:
        """Bytes of shared memory that the pipeline needs. weight_blocks: weight tiles per row tile (2: gate and up)."""
        rows = self.block_m + weight_blocks * self.block_n
        # wgmma reads its tiles while the next load is under way: one buffer more than with mma
        buffers = self.num_stages if self.block_m >= 64 and itemsize == 2 else max(1, self.num_stages - 1)
        return buffers * rows * self.block_k * itemsize


@functools.cache
def _table(gpu: str) -> dict[str, list[dict[str, int]]]:
    folder = resources.files("afd_kernels") / "configs"
    path = folder / gpu / "experts.json"
    return json.loads((path if path.is_file() else folder / "default" / "experts.json").read_text())


def pick(
    op: str, rows_per_expert: float, dtype: torch.dtype, *, gpu: str = "default", shared_memory: int = 101376
) -> GemmConfig:
    """The launch configuration of ``experts_up`` or ``experts_down``: a pure function of its arguments.

    rows_per_expert: expected rows of an expert that has any. gpu: folder under ``configs``. shared_memory: bytes that
    one block may use on the card; a configuration that needs more is made smaller, stages first.
    """
    key = f"{op}/{'4byte' if dtype.itemsize == 4 else '2byte'}"
    entries = _table(gpu)[key]
    entry = next((e for e in entries if rows_per_expert <= e["rows"]), entries[-1])
    config = GemmConfig(**{k: v for k, v in entry.items() if k != "rows"})
    return _fit(config, op, dtype, shared_memory)


def _fit(config: GemmConfig, op: str, dtype: torch.dtype, shared_memory: int) -> GemmConfig:
    blocks = 2 if op == "experts_up" else 1
    while config.shared_memory(dtype.itemsize, blocks) > shared_memory:
        if config.num_stages > 2:
            config = replace(config, num_stages=config.num_stages - 1)
        elif config.block_k > 16:
            config = replace(config, block_k=config.block_k // 2)
        else:
            config = replace(config, block_n=config.block_n // 2)
        check(config.block_n >= 16, f"shared_memory is {shared_memory} bytes; allowed: enough for a 16-column tile")
    return config


@functools.cache
def _device_limits(index: int) -> tuple[str, int, int]:
    p = torch.cuda.get_device_properties(index)
    folder = p.name.lower().replace("nvidia ", "").replace(" ", "-")
    return folder, p.shared_memory_per_block_optin, p.multi_processor_count  # type: ignore[attr-defined]


def pick_for(op: str, rows_per_expert: float, dtype: torch.dtype, device: torch.device) -> GemmConfig:
    """``pick`` with the limits of ``device``."""
    folder, shared_memory, _ = _limits(device)
    return pick(op, rows_per_expert, dtype, gpu=folder, shared_memory=shared_memory)


def _limits(device: torch.device) -> tuple[str, int, int]:
    if device.type != "cuda":
        return "default", 101376, 2
    return _device_limits(device.index if device.index is not None else torch.cuda.current_device())


def num_programs(device: torch.device, tiles: int, per_sm: int = 2) -> int:
    """Programs of a persistent kernel: one a tile, at most ``per_sm`` for each SM."""
    return max(1, min(tiles, per_sm * _limits(device)[2]))


def pick_experts(
    num_pairs: int, num_experts: int, dtype: torch.dtype, device: torch.device, *, block_m: int | None = None
) -> tuple[GemmConfig, GemmConfig]:
    """Configurations of both GEMMs for at most ``num_pairs`` pairs over ``num_experts`` experts.

    Both have the same block_m: the given one where there is one.
    """
    rows, shared_memory = num_pairs / max(1, num_experts), _limits(device)[1]
    up, down = (pick_for(op, rows, dtype, device) for op in ("experts_up", "experts_down"))
    block_m = block_m or min(up.block_m, down.block_m)
    return (
        _fit(replace(up, block_m=block_m), "experts_up", dtype, shared_memory),
        _fit(replace(down, block_m=block_m), "experts_down", dtype, shared_memory),
    )
