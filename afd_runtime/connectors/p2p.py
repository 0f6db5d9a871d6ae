# SPDX-License-Identifier: Apache-2.0
"""``P2PAFDConnector``: writes straight into the peer's buffers. ``config.role`` picks the side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from afd_runtime.config import AFDConfig
from afd_runtime.connectors.base import AFDConnector, AFDControlPlane
from afd_runtime.connectors.p2p_attention import AttentionSide
from afd_runtime.connectors.p2p_ffn import FFNSide
from afd_runtime.control_plane.fingerprint import expert_identity_field
from afd_runtime.errors import AFDConfigError, AFDError
from afd_runtime.metadata import AFDA2FTransferPayload, AFDTransferContext

if TYPE_CHECKING:
    from afd_runtime.model_spec import ModelSpec


class P2PAFDConnector(AFDConnector):
    """Both roles of the direct-write connector.

    rank: attention rank or FFN rank, by ``config.role``. dtype: of the rows (default: the checkpoint's).
    fingerprint_extra: further fields that both sides must agree on; None adds the identity of the expert weights in the
    checkpoint behind ``spec``.
    """

    any_layout = True

    def __init__(
        self,
        config: AFDConfig,
        rank: int,
        spec: ModelSpec,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        fingerprint_extra: Mapping[str, str] | None = None,
    ) -> None:
        if not config.compute_gate_on_attention:
            raise AFDConfigError(
                "compute_gate_on_attention=False with connector='p2p': allowed in this version: True; set it on both "
                "sides"
            )
        self.config, self.rank, self.spec = config, rank, spec
        extra = expert_identity_field(spec) if fingerprint_extra is None else fingerprint_extra
        side = FFNSide if config.role == "ffn" else AttentionSide
        self._side: FFNSide | AttentionSide = side(
            config, rank, spec, device=torch.device(device), dtype=dtype or spec.dtype, fingerprint_extra=extra
        )
        self._initialized = False

    def init_afd_connector(self) -> None:
        """FFN rank: binds (and registers at FFN rank 0). Attention rank: attaches to all its FFN ranks."""
        if self._initialized:
            return
        if isinstance(self._side, FFNSide):
            self._side.control.start()
        else:
            self._side.connect()
        self._initialized = True

    @property
    def is_initialized(self) -> bool:
        """True between ``init_afd_connector`` and ``close``."""
        return self._initialized

    @property
    def control_plane(self) -> AFDControlPlane:
        """The steps: received on an FFN rank, announced on an attention rank."""
        return self._side

    @property
    def exchanged_layers(self) -> tuple[int, ...]:
        """The layers that are exchanged: those with experts."""
        return self.spec.expert_layers

    @property
    def attention(self) -> AttentionSide:
        """The attention side. Raises ``AFDError`` on an FFN rank."""
        if not isinstance(self._side, AttentionSide):
            raise AFDError("this connector has role='ffn'; allowed: role='attention'")
        return self._side

    @property
    def ffn(self) -> FFNSide:
        """The FFN side. Raises ``AFDError`` on an attention rank."""
        if not isinstance(self._side, FFNSide):
            raise AFDError("this connector has role='attention'; allowed: role='ffn'")
        return self._side

    def close(self, reason: str = "its connector was closed") -> None:
        """Detaches (attention) or tells every peer (FFN), and frees the windows. Idempotent."""
        if not self._initialized:
            return
        self._initialized = False
        if isinstance(self._side, FFNSide):
            self._side.control.close(reason)
        else:
            self._side.close()

    def send_attn_output(self, hidden: torch.Tensor, context: AFDTransferContext, **kwargs: Any) -> None:
        """Sends one layer's rows. kwargs: topk_ids [M, k], topk_weights [M, k]."""
        metadata = context.metadata
        self.attention.send_attn_output(hidden, layer_idx=metadata.layer_idx, stage=metadata.stage_idx, **kwargs)

    def recv_ffn_output(self, ref_tensor: torch.Tensor, ubatch_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Waits for the answer. kwargs: layer_idx. Returns [M, H] like ``ref_tensor``."""
        return self.attention.recv_ffn_output(ref_tensor, stage=ubatch_idx, **kwargs)

    def recv_attn_output(self, ubatch_idx: int = 0, **kwargs: Any) -> AFDA2FTransferPayload:
        """Waits for the requests of one layer. kwargs: layer_idx."""
        return self.ffn.recv_attn_output(ubatch_idx, **kwargs)

    def send_ffn_output(self, out: torch.Tensor, context: AFDTransferContext, **kwargs: Any) -> None:
        """Answers them. out: what the experts gave for each pair."""
        self.ffn.send_ffn_output(out, context, **kwargs)
