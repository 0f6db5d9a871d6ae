# SPDX-License-Identifier: Apache-2.0
"""The connector contract. A connector without a control plane cannot drive the FFN loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from afd_runtime.metadata import AFDA2FTransferPayload, AFDControlPayload, AFDTransferContext


class AFDControlPlane(ABC):
    """Tells the FFN side which steps to serve: one payload per step, or per unit of steps in several stages."""

    @abstractmethod
    def recv_dp_metadata_list(self, stage: int | None = None) -> AFDControlPayload:
        """Waits for the next step of ``stage``. None: for the next unit, with all of its stages in one payload.

        Raises ``AFDShutdownError`` when there is none any more.
        """

    @abstractmethod
    def send_dp_metadata_list(self, payload: AFDControlPayload) -> None:
        """Attention side: announces a step in each stage of ``payload``, as one unit."""

    @abstractmethod
    def update_state_from_dp_metadata(self, payload: AFDControlPayload) -> None:
        """Brings the connector into the step that ``payload`` describes. Receiving a payload does it already."""


class AFDConnector(ABC):
    """Moves hidden states of one (layer, stage) to the FFN side and its output back.

    any_layout: True where a step captured once serves every token layout (counts are read on the device).
    """

    any_layout: bool = False

    @abstractmethod
    def init_afd_connector(self) -> None:
        """Opens the connection: allocates, binds or attaches. Idempotent."""

    @property
    @abstractmethod
    def is_initialized(self) -> bool:
        """True between ``init_afd_connector`` and ``close``."""

    @property
    @abstractmethod
    def control_plane(self) -> AFDControlPlane | None:
        """The control plane, or None for a connector that has none."""

    @abstractmethod
    def close(self) -> None:
        """Detaches and frees everything. Idempotent."""

    @abstractmethod
    def send_attn_output(self, hidden: torch.Tensor, context: AFDTransferContext, **kwargs: Any) -> None:
        """Attention side: sends the rows of one (layer, stage). hidden: [M, H]."""

    @abstractmethod
    def recv_ffn_output(self, ref_tensor: torch.Tensor, ubatch_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Attention side: waits for the answer. Returns [M, H] in the dtype and on the device of ``ref_tensor``."""

    @abstractmethod
    def recv_attn_output(self, ubatch_idx: int = 0, **kwargs: Any) -> AFDA2FTransferPayload:
        """FFN side: waits for the rows of the next (layer, stage) of the step."""

    @abstractmethod
    def send_ffn_output(self, out: torch.Tensor, context: AFDTransferContext, **kwargs: Any) -> None:
        """FFN side: answers what ``recv_attn_output`` gave."""
