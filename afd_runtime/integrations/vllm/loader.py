# SPDX-License-Identifier: Apache-2.0
"""vLLM's loader without the experts: a tensor of a remote expert is left out by its name, before it is read."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from afd_runtime.errors import AFDConfigError
from afd_runtime.integrations.vllm.experts import RemoteExperts

LOAD_FORMAT = "afd"


@dataclass
class LoadReport:
    """Tensors and bytes that were read, and expert tensors that were left out."""

    tensors_read: int = 0
    bytes_read: int = 0
    expert_tensors_left_out: int = 0


@register_model_loader(LOAD_FORMAT)
class RemoteExpertsLoader(DefaultModelLoader):
    """Reads safetensors as vLLM's own loader does, but for the experts. ``model.afd_load_report`` is a `LoadReport`."""

    def __init__(self, load_config: Any) -> None:
        own = copy.copy(load_config)
        own.load_format = "safetensors"  # what the inherited file search goes by
        super().__init__(own)
        self._left_out: set[str] = set()
        self._report = LoadReport()

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Loads everything but the experts. Raises ``AFDConfigError`` where ``model`` has no remote experts."""
        layers = [module for module in model.modules() if isinstance(module, RemoteExperts)]
        if not layers:
            raise AFDConfigError(f"{type(model).__name__} has no remote experts; serve this model without AFD")
        self._left_out = {
            name for layer in layers for name in layer.afd_session.spec.expert_tensors(layer.afd_layer_idx)
        }
        super().load_weights(model, model_config)
        model.afd_load_report = self._report  # type: ignore[assignment]

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        found = self._prepare_weights(
            source.model_or_path, source.subfolder, source.revision, False, source.allow_patterns_overrides
        )
        files = found[1]  # how much more there is differs between versions
        for file in sorted(files):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  a safe_open is no mapping
                    if name in self._left_out:
                        self._report.expert_tensors_left_out += 1
                        continue
                    tensor = opened.get_tensor(name)
                    self._report.tensors_read += 1
                    self._report.bytes_read += tensor.nbytes
                    yield source.prefix + name, tensor
