# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers as the attention engine: its model, its router, its loader; the experts run elsewhere.

Two of the engine's own plug points carry everything: a registered experts implementation named `afd`, and a subclass
of the model whose experts modules own no parameter. A tensor that no parameter asks for is never read from disk.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from afd_runtime._greedy import greedy_generate
from afd_runtime.model_spec import ModelError, ModelSpec

__all__ = ["ExpertSession", "greedy_generate", "load_remote_model"]

IMPLEMENTATION = "afd"
_EXPERTS_MODULE = re.compile(r"(?:^|\.)layers\.(\d+)\.mlp\.experts$")


class ExpertSession(Protocol):
    """What a model needs of the attention side of a connection; see `AttentionSession`."""

    def begin_step(self, num_rows: int) -> None: ...
    def experts(
        self, layer_idx: int, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor: ...
    def end_step(self) -> None: ...
    def abort_step(self, reason: str) -> None: ...


def load_remote_model(
    path: str | Path,
    session: ExpertSession,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """The engine's model of `path` in eval mode, with every routed expert computed through `session`.

    No expert parameter is created and no expert tensor is read. `dtype` defaults to the checkpoint's. One forward is
    one step of `session`, announced with its rows (batch * sequence, padding included) before the first layer.
    Raises `ModelError` for a model that `ModelSpec` refuses, and where engine and checkpoint disagree.
    """
    spec = ModelSpec.from_pretrained(path)
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    engine_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if engine_class is None:
        raise ModelError(f"{path}: transformers has no causal language model for {type(config).__name__}.")
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_forward)
    chosen = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    model, report = _remote_class(engine_class, spec, session).from_pretrained(
        path, config=config, dtype=dtype or spec.dtype, experts_implementation=IMPLEMENTATION, output_loading_info=True,
        use_safetensors=True, local_files_only=True, **chosen,
    )  # fmt: skip
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ModelError(f"{path}: the checkpoint has no tensor for {missing[0]!r} ({len(missing)} are missing).")
    return model.requires_grad_(False).to(device).eval()


def _experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The `afd` experts implementation: hidden_states [M, H], top_k_index and top_k_weights [M, k] -> [M, H]."""
    return self.afd_session.experts(
        self.afd_layer_idx, hidden_states, top_k_index.to(torch.int32), top_k_weights.to(torch.float32)
    )


def _remote_class(engine_class: Any, spec: ModelSpec, session: ExpertSession) -> Any:
    """A subclass of the engine's model: experts without parameters, each forward one step of `session`.

    It keeps the engine's name and module, by which transformers recognises its own classes.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        super(remote_class, self).__init__(*args, **kwargs)
        _strip_experts(self, spec, session)

    @functools.wraps(engine_class.forward)  # generate() inspects the signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        session.begin_step(_num_rows(args, kwargs))
        try:
            output = super(remote_class, self).forward(*args, **kwargs)
        except BaseException as error:
            session.abort_step(f"{type(error).__name__}: {error}")
            raise
        session.end_step()
        return output

    def save_pretrained(self: Any, *_: Any, **__: Any) -> None:
        raise ModelError(f"a model with remote experts cannot be saved; copy the checkpoint {spec.path} instead.")

    namespace = {
        "__module__": engine_class.__module__,
        "__qualname__": engine_class.__qualname__,
        "__init__": __init__,
        "forward": forward,
        "save_pretrained": save_pretrained,
        "_keys_to_ignore_on_load_unexpected": [
            *(engine_class._keys_to_ignore_on_load_unexpected or []),
            *(rf"layers\.{layer}\.mlp\.experts\." for layer in spec.expert_layers),
        ],
    }
    remote_class: Any = type(engine_class.__name__, (engine_class,), namespace)
    return remote_class


def _num_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Rows of one forward: batch * sequence of input_ids [B, S] or inputs_embeds [B, S, H]."""
    tokens = args[0] if args else kwargs.get("input_ids")
    if tokens is None:
        tokens = kwargs.get("inputs_embeds")
    if tokens is None:
        raise ModelError("forward needs input_ids or inputs_embeds.")
    return tokens.shape[0] * tokens.shape[1]


def _strip_experts(model: torch.nn.Module, spec: ModelSpec, session: ExpertSession) -> None:
    """Takes the parameters out of every experts module (still on meta) and stamps its layer index."""
    found = {int(m[1]): module for name, module in model.named_modules() if (m := _EXPERTS_MODULE.search(name))}
    if sorted(found) != list(spec.expert_layers) or not all(hasattr(m, "is_concatenated") for m in found.values()):
        raise ModelError(
            f"{spec.path}: the checkpoint has experts in layers {list(spec.expert_layers)}, but this transformers "
            f"version builds replaceable ones in {sorted(found)}."
        )
    for layer, module in found.items():
        for name in [name for name, _ in module.named_parameters(recurse=False)]:
            delattr(module, name)
        if remaining := [name for name, _ in module.named_parameters()]:
            raise ModelError(f"layer {layer}: {type(module).__name__} has parameters {remaining} in submodules.")
        module.afd_layer_idx, module.afd_session = layer, session
        module._is_hf_initialized = True  # there is nothing left that the engine could initialise
