# SPDX-License-Identifier: Apache-2.0
"""vLLM's routed experts with every expert on an FFN rank.

`PluggableLayer.register_oot` replaces a class by its exact name, so `RoutedExperts` and each of its subclasses get a
remote twin. Only the quantisation method differs: it creates no weight, and its `apply` is one exchange.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor import custom_op
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder
from vllm.model_executor.models.utils import extract_layer_index

from afd_kernels import SwiGLU
from afd_runtime.errors import AFDConfigError

if TYPE_CHECKING:
    from afd_runtime.model_spec import ModelSpec
    from afd_runtime.remote_experts import AttentionSession

#: Parameters that a layer of experts holds for its router, not for an expert.
ROUTER_PARAMETERS = ("e_score_correction_bias", "hash_indices_table")


class RemoteExpertsMethod(FusedMoEMethodBase):
    """Computes a layer's routed experts on the FFN ranks, and the shared ones here between sending and waiting."""

    def __init__(self, moe: Any, session: AttentionSession, layer_idx: int) -> None:
        super().__init__(moe)
        self.session, self.layer_idx = session, layer_idx

    @property
    def supports_internal_mk(self) -> bool:
        """True: under data or sequence parallelism vLLM gathers nothing, each rank sends its own rows."""
        return True

    @property
    def mk_can_overlap_shared_experts(self) -> bool:
        """True: ``apply`` runs the shared experts."""
        return True

    @property
    def is_monolithic(self) -> bool:
        """False: vLLM's own router chooses the experts."""
        return False

    @property
    def topk_indices_dtype(self) -> torch.dtype:
        """As the message carries them."""
        return torch.int32

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Creates none."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """There is none."""

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: no kernel of vLLM runs."""
        return None

    def maybe_roundup_sizes(self, hidden_size: int, inner_size: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Rounds nothing up: rows travel as the model has them."""
        return hidden_size, inner_size

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """x: [M, H]; topk_weights, topk_ids: [M, k]. Returns the routed sum [M, H]; the shared output stays with vLLM.

        Rows past the step's count are padding and come back as zero.
        """

        def shared() -> None:
            if shared_experts is not None:
                shared_experts(shared_experts_input, SharedExpertsOrder.MK_INTERNAL_OVERLAPPED)

        return self.session.experts(self.layer_idx, x, topk_ids, topk_weights, meanwhile=shared)


class RemoteExperts:
    """Mixin over ``RoutedExperts``. ``afd_session`` is set by the class that ``remote_experts`` registers."""

    afd_session: AttentionSession

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> RemoteExpertsMethod:
        return RemoteExpertsMethod(moe_config, self.afd_session, extract_layer_index(prefix))

    @property
    def afd_layer_idx(self) -> int:
        """Which layer of the model this is."""
        return self.quant_method.layer_idx  # type: ignore[attr-defined]


@contextlib.contextmanager
def remote_experts(session: AttentionSession) -> Iterator[None]:
    """Models that are built inside have their routed experts behind ``session``; others are untouched.

    Raises ``AFDConfigError`` where another plugin has replaced one of the classes.
    """
    registered: list[str] = []
    try:
        for base in _with_subclasses(RoutedExperts):
            if base.__name__ in custom_op.op_registry_oot:
                other = custom_op.op_registry_oot[base.__name__]
                raise AFDConfigError(f"{base.__name__} is replaced by {other} already; switch that plugin off")
            remote = type(base.__name__, (RemoteExperts, base), {"afd_session": session, "__module__": __name__})
            PluggableLayer.register_oot(remote, name=base.__name__)
            registered.append(base.__name__)
        yield
    finally:
        for name in registered:
            del custom_op.op_registry_oot[name]


def _with_subclasses(base: type) -> list[type]:
    """``base`` and every subclass of it that has been imported, but for remote ones; each name once."""
    found: dict[str, type] = {}
    waiting = [base]
    while waiting:
        current = waiting.pop()
        if not issubclass(current, RemoteExperts):
            found.setdefault(current.__name__, current)
            waiting += current.__subclasses__()
    return list(found.values())


def check_remote(model: torch.nn.Module, spec: ModelSpec) -> None:
    """Raises ``AFDConfigError`` unless exactly the checkpoint's expert layers are remote and no expert is here."""
    found: list[int] = []
    for name, module in model.named_modules():
        if not isinstance(module, RoutedExperts):
            continue
        if not isinstance(module, RemoteExperts):
            raise AFDConfigError(
                f"{name} is of the class {type(module).__module__}.{type(module).__name__}, whose experts cannot be "
                "computed elsewhere; serve this model without AFD"
            )
        _check_layer(name, module, spec)
        found.append(module.afd_layer_idx)
    if sorted(found) != list(spec.expert_layers):
        raise AFDConfigError(
            f"{spec.path}: the checkpoint has experts in layers {list(spec.expert_layers)}, and this vLLM version "
            f"builds {type(model).__name__} with replaceable ones in {sorted(found)}; serve it without AFD"
        )


def make_opaque(model: torch.nn.Module) -> None:
    """Makes every MoE layer one operation to a compiler, as it is on GPUs: on a CPU vLLM would trace through it."""
    for module in model.modules():
        if isinstance(module, MoERunner):
            ops = torch.ops.vllm
            module._forward_entry = ops.moe_forward if module.shared_experts is None else ops.moe_forward_shared


def _check_layer(name: str, layer: Any, spec: ModelSpec) -> None:
    """Raises ``AFDConfigError`` where the engine's layer is not what the FFN side computes."""
    kept = [n for n, _ in layer.named_parameters() if n not in ROUTER_PARAMETERS]
    if kept:
        raise AFDConfigError(f"{name} has the parameters {kept}; allowed: none; serve this model without AFD")
    moe = layer.moe_config
    differing = {
        "num_experts": (moe.num_experts, spec.num_experts),
        "experts_per_token": (moe.experts_per_token, spec.top_k),
        "hidden_dim": (moe.hidden_dim, spec.hidden_size),
        "activation": (layer.activation.value, _activation(spec.activation)),
        "swiglu_limit": (layer.swiglu_limit if spec.activation.limit is None else None, None),
        "apply_router_weight_on_input": (layer.apply_router_weight_on_input, False),
    }
    for field, (engine, served) in differing.items():
        if engine != served:
            raise AFDConfigError(f"{name}: {field} is {engine!r} in vLLM; the FFN ranks compute {served!r}")


def _activation(activation: SwiGLU) -> str:
    """What vLLM calls the activation of the FFN side."""
    return "silu" if activation == SwiGLU() else "swigluoai"
