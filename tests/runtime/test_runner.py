# SPDX-License-Identifier: Apache-2.0
"""The runner's contract, with connectors that record what is asked of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from group import SPEC

from afd_runtime.config import AFDConfig
from afd_runtime.connectors import AFDConnector, AFDControlPlane, available_connectors, create_connector
from afd_runtime.connectors.factory import register_connector
from afd_runtime.connectors.p2p import P2PAFDConnector
from afd_runtime.errors import AFDConfigError, AFDError, NoControlPlaneError
from afd_runtime.ffn_model_runner import GPUFFNModelRunner, graph_key
from afd_runtime.metadata import (
    AFDA2FTransferPayload,
    AFDControlPayload,
    AFDDPMetadata,
    AFDTransferContext,
    AFDTransferMetadata,
)


class Plane(AFDControlPlane):
    def recv_dp_metadata_list(self, stage: int | None = None) -> AFDControlPayload:
        raise AssertionError("the runner never receives payloads")

    def send_dp_metadata_list(self, payload: AFDControlPayload) -> None: ...

    def update_state_from_dp_metadata(self, payload: AFDControlPayload) -> None: ...


class Recorder(AFDConnector):
    """Hands out rows or routing, and keeps the calls."""

    def __init__(self, plane: AFDControlPlane | None = None, any_layout: bool = False, **payload: Any) -> None:
        self.calls: list[tuple] = []
        self.plane, self.any_layout, self.payload, self.opened = plane, any_layout, payload, 0

    def init_afd_connector(self) -> None:
        self.opened += 1

    @property
    def is_initialized(self) -> bool:
        return self.opened > 0

    @property
    def control_plane(self) -> AFDControlPlane | None:
        return self.plane

    def close(self) -> None: ...

    def send_attn_output(self, hidden: torch.Tensor, context: AFDTransferContext, **kwargs: Any) -> None: ...

    def recv_ffn_output(self, ref_tensor: torch.Tensor, ubatch_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        return ref_tensor

    def recv_attn_output(self, ubatch_idx: int = 0, **kwargs: Any) -> AFDA2FTransferPayload:
        self.calls.append(("recv", kwargs["layer_idx"], ubatch_idx))
        return AFDA2FTransferPayload(
            torch.ones(2, 3), AFDTransferContext(AFDTransferMetadata(-1, -1, [2])), **self.payload
        )

    def send_ffn_output(self, out: torch.Tensor, context: AFDTransferContext, **kwargs: Any) -> None:
        self.calls.append(("send", context.metadata.layer_idx, context.metadata.stage_idx, out))


class Model:
    def forward(self, layer_idx: int, schedule: Any) -> str:
        return f"packed {layer_idx} {schedule}"

    def compute_experts_output(self, hidden: torch.Tensor, layer_idx: int, router_logits: torch.Tensor) -> str:
        return f"experts {layer_idx}"

    def compute_ffn_output(self, hidden: torch.Tensor, layer_idx: int, input_ids: torch.Tensor | None = None) -> str:
        return f"ffn {layer_idx}"


def metadata(*stages: list[int]) -> dict[int, AFDDPMetadata]:
    return {stage: AFDDPMetadata.from_counts(counts) for stage, counts in enumerate(stages)}


def test_a_connector_without_control_plane_is_rejected() -> None:
    for kind in (NotImplementedError, AssertionError, NoControlPlaneError):
        with pytest.raises(kind, match="Recorder has control_plane=None"):
            GPUFFNModelRunner(Recorder(), Model(), (0,))


def test_forward_is_layers_by_stages_and_stamps_the_metadata() -> None:
    connector, seen = Recorder(Plane(), routing="schedule"), []
    runner = GPUFFNModelRunner(connector, Model(), (1, 4), on_layer=lambda *what: seen.append(what))
    runner.initialize_afd_connector()
    runner.initialize_afd_connector()
    assert connector.opened == 1
    runner.execute_model(dp_metadata_list=metadata([1, 2], [3, 0]))
    assert [call[:3] for call in connector.calls] == [
        (kind, layer, stage) for layer in (1, 4) for stage in (0, 1) for kind in ("recv", "send")
    ]
    assert [call[3] for call in connector.calls if call[0] == "send"][2] == "packed 4 schedule"
    assert [(m.layer_idx, m.stage_idx, dp.max_tokens_across_dp_cpu) for m, dp in seen][:2] == [(1, 0, 2), (1, 1, 3)]


def test_gate_on_either_side() -> None:
    connector = Recorder(Plane(), router_logits=torch.zeros(2, 4))
    GPUFFNModelRunner(connector, Model(), (2,)).execute_model(dp_metadata_list=metadata([2]))
    assert connector.calls[-1][3] == "experts 2"
    connector = Recorder(Plane())
    GPUFFNModelRunner(connector, Model(), (2,), compute_gate_on_attention=False).execute_model(
        dp_metadata_list=metadata([2])
    )
    assert connector.calls[-1][3] == "ffn 2"
    with pytest.raises(AFDError, match="layer 2 arrived without routing and router_logits"):
        GPUFFNModelRunner(Recorder(Plane()), Model(), (2,)).execute_model(dp_metadata_list=metadata([2]))


def test_replay_rules() -> None:
    ran: list[str] = []
    graphs = {
        graph_key(metadata([4, 4])): lambda: ran.append("4"),
        graph_key(metadata([9, 9])): lambda: ran.append("9"),
    }
    exact = GPUFFNModelRunner(Recorder(Plane(), routing=0), Model(), (0,), graphs=graphs)
    exact.execute_model(dp_metadata_list=metadata([4, 4]))  # not replaying
    exact.execute_model(dp_metadata_list=metadata([4, 3]), is_graph_replaying=True)  # not the exact key
    exact.execute_model(dp_metadata_list=metadata([4, 4]), is_graph_replaying=True)
    assert (ran, exact.replays, exact.eager_steps) == (["4"], 1, 2)
    ran.clear()
    any_layout = GPUFFNModelRunner(Recorder(Plane(), any_layout=True, routing=0), Model(), (0,), graphs=graphs)
    for counts in ([0, 4], [5, 0], [0, 0]):
        any_layout.execute_model(dp_metadata_list=metadata(counts))
    any_layout.execute_model(dp_metadata_list=metadata([10, 0]))  # more than any class holds
    any_layout.execute_model(dp_metadata_list=metadata([1, 1]), is_warmup=True)
    assert (ran, any_layout.replays, any_layout.eager_steps) == (["4", "9", "4"], 3, 2)


def test_what_an_ffn_runner_refuses() -> None:
    runner = GPUFFNModelRunner(Recorder(Plane()), Model(), (0,))
    with pytest.raises(AFDError, match="dp_metadata_list is None"):
        runner.execute_model(None, None)
    with pytest.raises(AFDError, match="sample_tokens was called on an FFN rank"):
        runner.sample_tokens(None)
    runner.capture_model(dp_metadata_list=metadata([1]), is_warmup=True, is_attn_graph_capturing=False)
    with pytest.raises(AFDConfigError, match="use_cuda_graph=True"):
        GPUFFNModelRunner(Recorder(Plane()), Model(), (0,), use_cuda_graph=True).capture_model()


def test_factory_and_the_p2p_connector_by_role() -> None:
    assert "p2p" in available_connectors()
    with pytest.raises(AFDConfigError, match="connector is 'nccl'; allowed:"):
        create_connector("nccl")
    with pytest.raises(AFDConfigError, match="already registered"):
        register_connector("p2p", "a.b:C")
    with pytest.raises(AFDConfigError, match="allowed: 'package.module:Class'"):
        register_connector("other", "a.b.C")
    connector = create_connector("p2p", config=AFDConfig(role="attention"), rank=0, spec=SPEC, fingerprint_extra={})
    assert isinstance(connector, P2PAFDConnector) and connector.any_layout and not connector.is_initialized
    assert connector.control_plane is not None and connector.exchanged_layers == (1, 3, 4)
    with pytest.raises(AFDError, match="allowed: role='ffn'"):
        connector.recv_attn_output(0, layer_idx=1)
    with pytest.raises(AFDConfigError, match="compute_gate_on_attention=False with connector='p2p'"):
        P2PAFDConnector(AFDConfig(role="ffn", compute_gate_on_attention=False), 0, SPEC, fingerprint_extra={})
    with pytest.raises(AFDConfigError, match="ffn_rank is 1; allowed: 0 … 0"):
        P2PAFDConnector(AFDConfig(role="ffn"), 1, SPEC, fingerprint_extra={})


def test_payload_types() -> None:
    payload = AFDControlPayload({0: AFDDPMetadata.from_counts([3, 0, 5])})
    assert not (payload.is_graph_capturing or payload.is_warmup or payload.is_graph_replaying)
    assert payload.dp_metadata_list[0].num_tokens_across_dp_cpu.dtype == torch.int32
    assert payload.dp_metadata_list[0].max_tokens_across_dp_cpu == 5
    with pytest.raises(AFDConfigError, match="seq_lens is .3, 0.; allowed: lengths above 0"):
        AFDTransferMetadata(0, 0, [3, 0])
