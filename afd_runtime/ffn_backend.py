# SPDX-License-Identifier: Apache-2.0
"""The experts of one FFN rank: loaded from a checkpoint without an engine, computed by `afd_kernels`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

import afd_kernels
from afd_runtime.checkpoint import DTYPES, ModelError, SafetensorsIndex, TensorEntry, TensorReader
from afd_runtime.model_spec import ModelSpec

if TYPE_CHECKING:
    from afd_kernels import ExpertSchedule

Progress = Callable[[int, int], None]
_IDENTITY_BYTES = 16


@dataclass(frozen=True)
class ExpertWeights:
    """One layer's local experts, in the order of `ExpertBank.expert_ids`, as the checkpoint stores them.

    w_up [E, 2I, H] and w_down [E, H, I] (views with other strides for gpt-oss), b_up [E, 2I] and b_down [E, H] or None.
    """

    w_up: torch.Tensor
    w_down: torch.Tensor
    b_up: torch.Tensor | None = None
    b_down: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        parts = (self.w_up, self.w_down, self.b_up, self.b_down)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


class ExpertBank:
    """The local experts of every exchanged layer. `bytes_read` is what loading read from disk, headers apart."""

    def __init__(
        self, spec: ModelSpec, expert_ids: Sequence[int], layers: dict[int, ExpertWeights], bytes_read: int
    ) -> None:
        self.spec = spec
        self.expert_ids = tuple(expert_ids)
        self.layers = layers
        self.bytes_read = bytes_read

    @classmethod
    def load(
        cls,
        spec: ModelSpec,
        expert_ids: Sequence[int],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        layers: Sequence[int] | None = None,
        progress: Progress | None = None,
    ) -> ExpertBank:
        """Reads exactly these experts of `layers` (default: all exchanged ones) and converts them to `dtype`.

        `dtype` defaults to the checkpoint's. `progress(done_bytes, total_bytes)` is called after each layer.
        Raises `ModelError` for a wrong argument and for a checkpoint that changed since `spec` was made.
        """
        chosen = spec.expert_layers if layers is None else tuple(layers)
        _check_request(spec, expert_ids, chosen, dtype)
        index = SafetensorsIndex.open(spec.path)
        plan = {layer: _local_entries(spec, index, layer, expert_ids) for layer in chosen}
        total = sum(entry.nbytes for parts in plan.values() for entries in parts.values() for entry in entries)
        loaded: dict[int, ExpertWeights] = {}
        with TensorReader() as reader, torch.no_grad():
            for layer, entries in plan.items():
                loaded[layer] = _load_layer(spec, entries, reader, device, dtype or spec.dtype)
                if progress is not None:
                    progress(reader.bytes_read, total)
            return cls(spec, expert_ids, loaded, reader.bytes_read)

    @property
    def nbytes(self) -> int:
        """Device memory of the weights, in bytes."""
        return sum(weights.nbytes for weights in self.layers.values())

    def forward(
        self,
        layer_idx: int,
        schedule: ExpertSchedule,
        *,
        y: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes the scheduled pairs of one layer: [cap_rows * top_k, H], unweighted, in pair order.

        y: written and returned. workspace: as for ``experts_forward``.
        """
        weights = self.layers.get(layer_idx)
        if weights is None:
            raise ModelError(f"layer_idx {layer_idx} has no experts here; loaded are {sorted(self.layers)}.")
        return afd_kernels.experts_forward(
            schedule,
            weights.w_up,
            weights.w_down,
            activation=self.spec.activation,
            b_up=weights.b_up,
            b_down=weights.b_down,
            y=y,
            workspace=workspace,
        )


def _check_request(
    spec: ModelSpec, expert_ids: Sequence[int], layers: tuple[int, ...], dtype: torch.dtype | None
) -> None:
    wrong = [expert for expert in expert_ids if not 0 <= expert < spec.num_experts]
    if wrong or len(set(expert_ids)) != len(expert_ids):
        raise ModelError(
            f"expert_ids must be distinct and in 0..{spec.num_experts - 1}, found {wrong or list(expert_ids)}."
        )
    if absent := sorted(set(layers) - set(spec.expert_layers)):
        raise ModelError(f"layers {absent} have no experts in {spec.path}; those with are {list(spec.expert_layers)}.")
    if dtype is not None and dtype not in DTYPES.values():
        raise ModelError(f"dtype {dtype} is not supported; choose one of {sorted(map(str, DTYPES.values()))}.")


def _local_entries(
    spec: ModelSpec, index: SafetensorsIndex, layer: int, expert_ids: Sequence[int]
) -> dict[str, list[TensorEntry]]:
    """Where each part of each of these experts lies; the slice of a fused tensor is contiguous on disk."""
    layout = spec.layout
    if layout.kind == "per_expert":
        parts = ("gate", "up", "down")
        return {part: [index.entry(layout.name(layer, part, expert)) for expert in expert_ids] for part in parts}
    names = spec.expert_tensors(layer)
    return {name.rsplit(".", 1)[1]: [index.entry(name).part(expert) for expert in expert_ids] for name in names}


def _load_layer(
    spec: ModelSpec,
    entries: dict[str, list[TensorEntry]],
    reader: TensorReader,
    device: torch.device | str,
    dtype: torch.dtype,
) -> ExpertWeights:
    inner, hidden = spec.intermediate_size, spec.hidden_size

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(len(next(iter(entries.values()))), *shape, dtype=dtype, device=device)

    if spec.layout.kind == "fused_transposed":
        w_up, w_down, b_up, b_down = empty(hidden, 2 * inner), empty(inner, hidden), empty(2 * inner), empty(hidden)
        targets = {"gate_up_proj": w_up, "down_proj": w_down, "gate_up_proj_bias": b_up, "down_proj_bias": b_down}
        weights = ExpertWeights(w_up.transpose(1, 2), w_down.transpose(1, 2), b_up, b_down)
    else:
        w_up, w_down = empty(2 * inner, hidden), empty(hidden, inner)
        targets = {"gate": w_up[:, :inner], "up": w_up[:, inner:], "down": w_down}
        targets |= {"gate_up_proj": w_up, "down_proj": w_down}
        weights = ExpertWeights(w_up, w_down)
    for part, local_entries in entries.items():
        for local, entry in enumerate(local_entries):
            reader.copy_into(entry, targets[part][local])
    return weights


def expert_identity(spec: ModelSpec) -> str:
    """16 hex digits over dtype, shape and a few leading bytes of every part of every expert of the checkpoint.

    Equal on both sides for equal weights, whatever the sharding into files; loads nothing.
    """
    digest = hashlib.sha256()
    index = SafetensorsIndex.open(spec.path)
    with TensorReader() as reader:
        for layer in spec.expert_layers:
            for part, entries in _local_entries(spec, index, layer, range(spec.num_experts)).items():
                for expert, entry in enumerate(entries):
                    digest.update(f"{layer} {expert} {part} {entry.dtype} {entry.shape}\n".encode())
                    digest.update(reader.raw(entry, min(_IDENTITY_BYTES, entry.nbytes)))
    return digest.hexdigest()[:16]
