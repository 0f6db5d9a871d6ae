# SPDX-License-Identifier: Apache-2.0
"""``AttentionSession``: the attention side of remote experts, in one object. Engines call nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from afd_runtime.config import AFDConfig
from afd_runtime.connectors.factory import create_connector
from afd_runtime.connectors.p2p import P2PAFDConnector
from afd_runtime.errors import AFDConfigError
from afd_runtime.metadata import AFDTransferContext, AFDTransferMetadata

if TYPE_CHECKING:
    from afd_runtime.model_spec import ModelSpec


class AttentionSession:
    """An attached attention rank. One thread at a time per stage; different stages may run on different threads."""

    def __init__(self, connector: P2PAFDConnector) -> None:
        self.connector = connector
        self.config, self.spec, self.attention_rank = connector.config, connector.spec, connector.rank
        self._ffn_stats: dict[int, dict[str, float]] = {}

    @classmethod
    def connect(
        cls,
        config: AFDConfig,
        attention_rank: int,
        spec: ModelSpec,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        fingerprint_extra: Mapping[str, str] | None = None,
    ) -> AttentionSession:
        """Attaches to every FFN rank that serves ``attention_rank``.

        dtype: of the hidden states (default: the checkpoint's). fingerprint_extra: as for ``P2PAFDConnector``.
        Raises ``AFDRefusedError`` (naming the field and both values), ``AFDAttachError`` or ``AFDConfigError``.
        """
        if config.role != "attention":
            raise AFDConfigError(f"config.role is {config.role!r}; allowed: 'attention' for a session")
        connector = create_connector(
            config.connector, config=config, rank=attention_rank, spec=spec, device=device, dtype=dtype,
            fingerprint_extra=fingerprint_extra,
        )  # fmt: skip
        if not isinstance(connector, P2PAFDConnector):
            raise AFDConfigError(f"connector is {config.connector!r}; allowed for a session: 'p2p'")
        connector.init_afd_connector()
        return cls(connector)

    @property
    def max_rows(self) -> int:
        """Most rows of one step."""
        return self.config.max_batch_tokens

    @property
    def session(self) -> int:
        """The number that FFN rank 0 gave this session."""
        return self.connector.attention.control.session

    def begin_step(self, num_rows: int, stage: int = 0) -> None:
        """Announces a step of ``num_rows`` rows (0 … max_rows). Every exchanged layer must follow, in order."""
        self.connector.attention.begin_step(num_rows, stage)

    def begin_steps(self, rows: Mapping[int, int], streams: Mapping[int, torch.cuda.Stream] | None = None) -> None:
        """Announces a step in each stage of ``rows`` (rows by stage) at once, or in none of them.

        streams: on a GPU the stream that each stage runs on; None: all on the current one.

        For a thread that drives several stages: it may send and wait in all of them in turn, if before it waits for a
        layer's reply it has sent that layer in each lower stage.
        """
        self.connector.attention.begin_steps(rows, streams=streams)

    def experts(
        self,
        layer_idx: int,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        stage: int = 0,
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """The routed experts of one layer, computed on the FFN ranks.

        hidden: [M, H] of the session's dtype; topk_ids: int[M, k] (-1: computed nowhere); topk_weights: [M, k].
        meanwhile: called once the rows are sent, before the replies are waited for, such as for shared experts.
        Rows past the step's count are not sent and come back as zero. Returns [M, H] in the dtype of ``hidden``.
        Raises ``AFDPeerLost``, ``AFDTimeoutError``, ``AFDStepAborted``, ``AFDCapacityError`` or ``AFDProtocolError``.
        """
        side = self.connector.attention
        rows = side.lane(stage).rows
        metadata = AFDTransferMetadata(layer_idx, stage, [rows] if rows else [])
        self.connector.send_attn_output(
            hidden, AFDTransferContext(metadata), topk_ids=topk_ids, topk_weights=topk_weights
        )
        if meanwhile is not None:
            meanwhile()
        return self.connector.recv_ffn_output(hidden, ubatch_idx=stage, layer_idx=layer_idx)

    def end_step(self, stage: int = 0) -> None:
        """Ends the step. Raises ``AFDError`` where layers are missing."""
        self.connector.attention.end_step(stage)

    def abort_step(self, reason: str, stage: int = 0) -> None:
        """Gives the step up, so that no FFN rank waits for its further layers. Nothing happens outside a step."""
        self.connector.attention.abort_step(reason, stage)

    @contextlib.contextmanager
    def step(self, num_rows: int, stage: int = 0) -> Iterator[None]:
        """``begin_step`` … ``end_step``; an exception inside gives the step up."""
        with self.steps({stage: num_rows}):
            yield

    @contextlib.contextmanager
    def steps(self, rows: Mapping[int, int], streams: Mapping[int, torch.cuda.Stream] | None = None) -> Iterator[None]:
        """``begin_steps`` … ``end_step`` of each stage; an exception gives up the steps that have not ended."""
        self.begin_steps(rows, streams)
        try:
            yield
            for stage in rows:
                with torch.cuda.stream((streams or {}).get(stage)):
                    self.end_step(stage)
        except BaseException as error:
            for stage in rows:
                self.abort_step(f"{type(error).__name__}: {error}", stage)
            raise

    @contextlib.contextmanager
    def offline(self, stage: int = 0) -> Iterator[None]:
        """For an engine's profile, warm-up and capture: ``experts`` sends nothing, in any order, and gives zeros.

        A CUDA graph whose layers were captured in here serves every later step: ``begin_step``, replay, ``end_step``.
        Enter it before the capture begins. Raises ``AFDError`` inside a step.
        """
        self.connector.attention.go_offline(stage)
        try:
            yield
        finally:
            self.connector.attention.go_online(stage)

    def reattach(self, timeout_s: float | None = None) -> None:
        """Leaves the group and joins it anew, outside of steps; captured graphs go on.

        A step after a loss does it by itself, for ``reattach_timeout_s``. timeout_s: None is ``attach_timeout_s``.
        Raises ``AFDAttachError`` or ``AFDRefusedError``; the next step tries again.
        """
        self.connector.attention.group.reattach(timeout_s)

    @property
    def stats(self) -> dict[int, dict[str, Any]]:
        """Sums by layer: exchanges, rows, rows_sent, bytes_out, bytes_back and wait_s of this rank.

        Also ffn_wait_s, experts_s and reply_s of its FFN ranks since their start (the slowest rank of each); asks them
        while attached.
        """
        if self.connector.is_initialized:
            self._fetch_ffn_stats()
        return {
            layer: dataclasses.asdict(stats) | self._ffn_stats.get(layer, {})
            for layer, stats in self.connector.attention.layer_stats().items()
        }

    def _fetch_ffn_stats(self) -> None:
        for answer in self.connector.attention.control.stats().values():
            for layer, totals in answer.layers.items():
                found = {"ffn_wait_s": totals.wait_s, "experts_s": totals.experts_s, "reply_s": totals.reply_s}
                known = self._ffn_stats.setdefault(layer, {})
                known.update({name: max(value, known.get(name, 0.0)) for name, value in found.items()})

    def close(self) -> None:
        """Detaches and frees the windows. ``stats`` keeps its last values. Idempotent."""
        if self.connector.is_initialized:
            self._fetch_ffn_stats()
            self.connector.close()

    def __enter__(self) -> AttentionSession:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
