# SPDX-License-Identifier: Apache-2.0
"""``FFNServer``: a stand-alone FFN rank. Runner, connector and control plane, no engine."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from afd_runtime.config import AFDConfig
from afd_runtime.connectors.factory import create_connector
from afd_runtime.connectors.p2p import P2PAFDConnector
from afd_runtime.control_plane.messages import LayerTotals
from afd_runtime.errors import AFDConfigError, AFDError, AFDShutdownError, AFDStuckError, one_line
from afd_runtime.ffn_model_runner import GPUFFNModelRunner

if TYPE_CHECKING:
    from afd_runtime.model_spec import ModelSpec

logger = logging.getLogger("afd_runtime.ffn")


class FFNServer:
    """Serves the experts in ``bank`` to the attention ranks of a group.

    bank: ``ExpertBank`` with the experts of ``ffn_rank``, in ``dtype`` and on ``device``; anything with
    ``forward(layer_idx, schedule)``. fingerprint_extra: as for ``P2PAFDConnector``.
    """

    def __init__(
        self,
        config: AFDConfig,
        ffn_rank: int,
        spec: ModelSpec,
        bank: Any,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        fingerprint_extra: Mapping[str, str] | None = None,
    ) -> None:
        if config.role != "ffn":
            raise AFDConfigError(f"config.role is {config.role!r}; allowed: 'ffn' for a server")
        connector = create_connector(
            config.connector, config=config, rank=ffn_rank, spec=spec, device=device, dtype=dtype,
            fingerprint_extra=fingerprint_extra,
        )  # fmt: skip
        if not isinstance(connector, P2PAFDConnector):
            raise AFDConfigError(f"connector is {config.connector!r}; allowed for a server: 'p2p'")
        self.config, self.ffn_rank, self.spec, self.connector = config, ffn_rank, spec, connector
        self.device = torch.device(device)
        cuda = self.device.type == "cuda"
        self.runner = GPUFFNModelRunner(connector, bank, spec.expert_layers, use_cuda_graph=cuda)
        self._ffn_loop_error: BaseException | None = None
        self._serving, self._done = False, threading.Event()
        self.stop_asked_at: float | None = None  # by time.monotonic

    @property
    def endpoint(self) -> str:
        """Where this rank listens, such as ``tcp://127.0.0.1:29650``; empty before ``start``."""
        return self.connector.ffn.control.endpoint

    @property
    def port(self) -> int:
        """The port of ``endpoint``."""
        return int(self.endpoint.rsplit(":", 1)[1])

    @property
    def stats(self) -> dict[int, LayerTotals]:
        """Sums by layer since the start."""
        return self.connector.ffn.layer_totals()

    @property
    def steps_served(self) -> int:
        """Steps that this rank has taken part in."""
        return self.connector.ffn.steps_served

    @property
    def attached(self) -> tuple[int, ...]:
        """The attention ranks that are attached now."""
        return tuple(sorted(self.connector.ffn.control.lanes.ranks))

    @property
    def fatal_error(self) -> str | None:
        """What ended this server, or is about to, in one line; None where nothing did."""
        error = self._ffn_loop_error or self.connector.ffn.stuck
        return None if error is None else one_line(error)

    @property
    def not_ready(self) -> str | None:
        """Why attention ranks cannot attach now, in one line. None: the graphs are captured (on a GPU), the port is
        bound, and this rank (FFN rank 0: each rank of the FFN group) has registered."""
        if self.fatal_error is not None:
            return self.fatal_error
        if self.runner.use_cuda_graph and not all(tables.in_graph for tables in self.connector.ffn.tables):
            return f"FFN rank {self.ffn_rank} captures its graphs"
        return self.connector.ffn.control.not_ready

    def start(self) -> None:
        """Captures the graphs (on a GPU), binds the port; an FFN rank past 0 registers at FFN rank 0.

        Raises ``AFDRefusedError`` or ``AFDAttachError``.
        """
        if not self.runner.stage_graphs:
            self.runner.capture_model()
        self.runner.initialize_afd_connector()

    def serve_forever(self, *, handle_signals: bool = True) -> None:
        """Serves steps until ``stop``, SIGTERM or SIGINT, or until FFN rank 0 ends; then tells every peer and returns.

        Stages are served independently, one thread each; the calling thread serves stage 0. An error in a step ends the
        server: every peer is told, and it is raised here. Signals are handled only where this is the main thread.
        """
        self.start()
        self._serving = True
        main = threading.current_thread() is threading.main_thread()
        others = [
            threading.Thread(target=self._serve_stage, args=(stage,), name=f"afd-ffn-stage-{stage}", daemon=True)
            for stage in range(1, self.config.num_stages)
        ]
        with self._signals() if handle_signals and main else contextlib.nullcontext():
            for thread in others:
                thread.start()
            try:
                self._serve_stage(0)
                for thread in others:
                    thread.join()
            finally:
                error = self._ffn_loop_error
                self.connector.close(
                    "it was asked to stop" if error is None else f"{type(error).__name__}: {error}"[:1000]
                )
                self._done.set()
        if error is not None:
            raise error

    def stop(self, timeout_s: float = 30.0) -> None:
        """Ends ``serve_forever`` after the current step, from any thread, and waits for it. Idempotent."""
        self.connector.ffn.control.stop_serving("it was asked to stop")
        if not self._serving:
            self.connector.close("it was asked to stop")
        elif not self._done.wait(timeout_s):
            raise AFDError(f"FFN rank {self.ffn_rank} did not end within {timeout_s:g} s: a step is still active")

    def request_stop(self) -> None:
        """Asks ``serve_forever`` to end after the current step. Waits for nothing: for signal handlers.

        A step that does not end within ``STOP_PATIENCE_S`` is given up, and its attention ranks are told.
        """
        self.stop_asked_at = self.stop_asked_at or time.monotonic()
        self.connector.ffn.control.request_stop()

    def _serve_stage(self, stage: int) -> None:
        try:
            with self._stream():
                while True:
                    self._serve_step(stage)
        except AFDShutdownError as end:
            logger.info("%s", end)
        except BaseException as error:
            self._ffn_loop_error = self._ffn_loop_error or error
            stuck = error if isinstance(error, AFDStuckError) else None
            self.connector.ffn.control.stop_serving(f"{type(error).__name__}: {error}"[:1000], stuck, failed=True)

    def _serve_step(self, stage: int) -> None:
        payload = self.connector.ffn.recv_dp_metadata_list(stage)
        self.runner.execute_model(
            dp_metadata_list=payload.dp_metadata_list,
            is_graph_capturing=payload.is_graph_capturing,
            is_warmup=payload.is_warmup,
            is_graph_replaying=payload.is_graph_replaying,
        )

    def _stream(self) -> contextlib.AbstractContextManager:
        """A stream of its own: a wait of the other side on a shared stream would hold this side's kernels back.

        torch hands out 32 streams of each priority in turn; engines take theirs from those of the default priority.
        """
        if self.device.type != "cuda":
            return contextlib.nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self.device, priority=-1))

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def ask(number: int, frame: object) -> None:
            self.request_stop()

        before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
