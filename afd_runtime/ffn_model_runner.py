# SPDX-License-Identifier: Apache-2.0
"""``GPUFFNModelRunner``: computes the FFN side of a step, driven by the control plane. No scheduler, no KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from afd_runtime.connectors.base import AFDConnector
from afd_runtime.errors import AFDConfigError, AFDError, NoControlPlaneError
from afd_runtime.metadata import AFDA2FTransferPayload, AFDDPMetadata
from afd_runtime.stage_graphs import StageGraphs

GraphKey = tuple[tuple[int, tuple[int, ...]], ...]


def graph_key(dp_metadata_list: Mapping[int, AFDDPMetadata]) -> GraphKey:
    """The exact token layout of a step: (stage, counts) by stage."""
    return tuple(
        (stage, tuple(metadata.num_tokens_across_dp_cpu.tolist()))
        for stage, metadata in sorted(dp_metadata_list.items())
    )


class GPUFFNModelRunner:
    """Runs steps of one FFN rank.

    connector: with a control plane. model: ``ExpertBank``, or an engine's model with ``compute_experts_output`` and
    ``compute_ffn_output``. layers: the exchanged layers, in order. graphs: captured steps by ``graph_key``.
    on_layer: called with (metadata, dp_metadata) before a layer is computed, for an engine's forward context.
    """

    def __init__(
        self,
        connector: AFDConnector,
        model: Any,
        layers: Sequence[int],
        *,
        compute_gate_on_attention: bool = True,
        use_cuda_graph: bool = False,
        graphs: Mapping[GraphKey, Callable[[], None]] | None = None,
        on_layer: Callable[[Any, AFDDPMetadata], None] | None = None,
    ) -> None:
        if connector.control_plane is None:
            raise NoControlPlaneError(
                f"connector {type(connector).__name__} has control_plane=None; the FFN runner is driven by a control "
                "plane; use a connector that has one, such as 'p2p'"
            )
        self.connector, self.model, self.layers = connector, model, tuple(layers)
        self.compute_gate_on_attention, self.use_cuda_graph = compute_gate_on_attention, use_cuda_graph
        self.graphs = dict(graphs or {})
        self.on_layer = on_layer
        self.stage_graphs: dict[int, StageGraphs] = {}
        self._streams: dict[int, torch.cuda.Stream] = {}
        self.replays = self.eager_steps = 0

    def initialize_afd_connector(self) -> None:
        """Opens the connector, once."""
        if not self.connector.is_initialized:
            self.connector.init_afd_connector()

    @torch.inference_mode()
    def execute_model(
        self,
        scheduler_output: Any = None,
        intermediate_tensors: Any = None,
        *,
        dp_metadata_list: Mapping[int, AFDDPMetadata] | None = None,
        is_graph_capturing: bool = False,
        is_warmup: bool = False,
        is_graph_replaying: bool = False,
    ) -> None:
        """Serves one step: replays a captured graph that fits, otherwise runs it eagerly.

        dp_metadata_list: stage → counts, as the control plane gave it; None is refused.
        """
        if dp_metadata_list is None:
            raise AFDError("dp_metadata_list is None; allowed: the payload's map; the control plane drives this runner")
        if self.stage_graphs:
            self._replay_stages(dp_metadata_list)
            return
        replay = None if is_graph_capturing or is_warmup else self._find_graph(dp_metadata_list, is_graph_replaying)
        if replay is not None:
            self.replays += 1
            replay()
            return
        self.eager_steps += 1
        self._ffn_forward(dp_metadata_list)

    def _replay_stages(self, dp_metadata_list: Mapping[int, AFDDPMetadata]) -> None:
        side = self.connector.ffn  # type: ignore[attr-defined]
        if len(dp_metadata_list) == 1:
            (stage,) = dp_metadata_list
            self.replays += 1
            self.stage_graphs[stage].replay(side.step_rows(stage))
            side.finish_step(stage)
            return
        streams = {stage: self._stream(stage) for stage in dp_metadata_list}  # they wait for each other's layers
        for stage, stream in streams.items():
            self.replays += 1
            with torch.cuda.stream(stream):
                self.stage_graphs[stage].replay(side.step_rows(stage))
        for stage, stream in streams.items():
            with torch.cuda.stream(stream):
                side.finish_step(stage)

    def _stream(self, stage: int) -> torch.cuda.Stream:
        if stage not in self._streams:
            self._streams[stage] = torch.cuda.Stream(self.stage_graphs[stage].side.device, priority=-1)
        return self._streams[stage]

    def _find_graph(
        self, dp_metadata_list: Mapping[int, AFDDPMetadata], is_graph_replaying: bool
    ) -> Callable[[], None] | None:
        """With ``any_layout`` the smallest captured class that holds each count; otherwise only the exact key."""
        key = graph_key(dp_metadata_list)
        if not self.connector.any_layout:
            return self.graphs.get(key) if is_graph_replaying else None
        fitting = [captured for captured in self.graphs if _holds(captured, key)]
        best = min(fitting, key=lambda captured: sum(sum(counts) for _, counts in captured), default=None)
        return None if best is None else self.graphs[best]

    def _ffn_forward(self, dp_metadata_list: Mapping[int, AFDDPMetadata]) -> None:
        """Layers (outer) × stages (inner): receive, compute, send."""
        for layer_idx in self.layers:
            for stage_idx in sorted(dp_metadata_list):
                payload = self.connector.recv_attn_output(ubatch_idx=stage_idx, layer_idx=layer_idx)
                metadata = payload.context.metadata
                metadata.layer_idx, metadata.stage_idx = layer_idx, stage_idx
                if self.on_layer is not None:
                    self.on_layer(metadata, dp_metadata_list[stage_idx])
                self.connector.send_ffn_output(self._compute(payload, layer_idx), payload.context)

    def _compute(self, payload: AFDA2FTransferPayload, layer_idx: int) -> torch.Tensor:
        if payload.routing is not None:
            return self.model.forward(layer_idx, payload.routing)
        if self.compute_gate_on_attention:
            if payload.router_logits is None:
                raise AFDError(
                    f"layer {layer_idx} arrived without routing and router_logits while "
                    "compute_gate_on_attention=True; the attention side must send one of them"
                )
            return self.model.compute_experts_output(payload.hidden_states, layer_idx, payload.router_logits)
        return self.model.compute_ffn_output(payload.hidden_states, layer_idx, input_ids=payload.input_ids)

    def capture_model(
        self,
        dp_metadata_list: Mapping[int, AFDDPMetadata] | None = None,
        *,
        is_warmup: bool = False,
        is_attn_graph_capturing: bool = False,
    ) -> None:
        """Captures the (stage, size class) graphs that are missing; receives nothing. Without CUDA graphs: nothing."""
        if not self.use_cuda_graph:
            return
        side = getattr(self.connector, "ffn", None)
        if side is None or not self.connector.any_layout:
            raise AFDConfigError(
                f"use_cuda_graph=True with connector {type(self.connector).__name__}: only the 'p2p' connector's steps "
                "can be captured; set use_cuda_graph=False"
            )
        for stage in range(side.config.num_stages):
            if stage not in self.stage_graphs:
                self.stage_graphs[stage] = StageGraphs(side, self.model, stage)
            self.stage_graphs[stage].capture()

    def sample_tokens(self, grammar_output: Any = None) -> None:
        """Refused: an FFN rank never samples."""
        raise AFDError("sample_tokens was called on an FFN rank; tokens are sampled on the attention side")


def _holds(captured: GraphKey, wanted: GraphKey) -> bool:
    if [stage for stage, _ in captured] != [stage for stage, _ in wanted]:
        return False
    return all(max(w, default=0) <= max(c, default=0) for (_, c), (_, w) in zip(captured, wanted, strict=True))
