# SPDX-License-Identifier: Apache-2.0
"""The attention role's worker: the platform's own one, whose model has remote experts and whose forwards are steps.

A step is announced as soon as nothing but FFN ranks can delay its forward. vLLM's first model runner lets data
parallel ranks wait for each other within ``execute_model``, so there a step is what runs in ``_model_forward``: if it
began earlier, FFN ranks could wait for a rank that waits for another one's last step. The second runner may replay a
graph without running any Python, so there a step is the whole ``execute_model``. Whatever else runs the model (profile,
warm-up, capture, dummy batches) is offline: it sends nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.platforms import current_platform

from afd_runtime import envs
from afd_runtime.errors import AFDConfigError
from afd_runtime.integrations.vllm.experts import check_remote, make_opaque, remote_experts
from afd_runtime.integrations.vllm.loader import LOAD_FORMAT
from afd_runtime.integrations.vllm.refusals import refuse_engine, refuse_version
from afd_runtime.integrations.vllm.settings import parse_settings
from afd_runtime.model_spec import ModelSpec
from afd_runtime.remote_experts import AttentionSession

logger = logging.getLogger("vllm.plugins.afd")


def _platform_worker() -> Any:
    """The class that vLLM chooses for ``worker_cls="auto"`` on this platform."""
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    if current_platform.is_cuda():
        from vllm.v1.worker.gpu_worker import Worker

        return Worker
    raise AFDConfigError(f"the platform is {current_platform.device_name!r}; allowed with AFD: a CPU or an NVIDIA GPU")


def _log_as_vllm() -> None:
    """What the runtime logs goes where vLLM's own lines go."""
    runtime = logging.getLogger("afd_runtime")
    runtime.handlers, runtime.propagate = logging.getLogger("vllm").handlers, False
    runtime.setLevel(envs.AFD_LOG_LEVEL.get())


class AttentionWorkerMixin:
    """What an attention rank adds to a worker of vLLM."""

    afd_session: AttentionSession | None = None
    _afd_rows = 0  # of the batch that runs
    _afd_is_offline = False

    def init_device(self: Any) -> None:
        """Attaches to the FFN ranks as soon as the device is there, before vLLM profiles its memory.

        Raises ``AFDConfigError``, ``AFDRefusedError`` or ``AFDAttachError``.
        """
        super().init_device()  # type: ignore[misc]
        _log_as_vllm()
        refuse_version()
        vllm_config = self.vllm_config
        max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        config = parse_settings(vllm_config.additional_config, max_tokens)
        refuse_engine(vllm_config, config)
        spec = ModelSpec.from_pretrained(self.model_config.model)
        rank = self.parallel_config.data_parallel_rank
        self.afd_session = AttentionSession.connect(
            config, rank, spec, device=self.device, dtype=self.model_config.dtype
        )
        logger.info("attention rank %d is attached to %d FFN ranks at %s", rank, config.num_ffn_ranks, config.host)
        if not self.use_v2_model_runner:
            self._make_forwards_steps()

    def load_model(self: Any, **kwargs: Any) -> None:
        """Builds the model with remote experts and reads everything but these. Raises ``AFDConfigError``."""
        self.vllm_config.load_config.load_format = LOAD_FORMAT
        with set_current_vllm_config(self.vllm_config):
            get_model_cls(self.vllm_config.model_config)  # imports the model's own subclasses of RoutedExperts
        with remote_experts(self.afd_session):
            super().load_model(**kwargs)  # type: ignore[misc]
        check_remote(self.get_model(), self.afd_session.spec)
        make_opaque(self.get_model())
        logger.info("without experts: %s", self.get_model().afd_load_report)

    def determine_available_memory(self: Any) -> int:
        """Profiles offline."""
        with self._afd_offline():
            return super().determine_available_memory()  # type: ignore[misc]

    def compile_or_warm_up_model(self: Any) -> Any:
        """Warms up and captures offline."""
        with self._afd_offline():
            return super().compile_or_warm_up_model()  # type: ignore[misc]

    def execute_dummy_batch(self: Any) -> None:
        """Runs a batch without requests offline."""
        with self._afd_offline():
            super().execute_dummy_batch()  # type: ignore[misc]

    def execute_model(self: Any, scheduler_output: Any) -> Any:
        """One step: announced with its scheduled tokens, given up where the forward raises. Raises ``AFDError``."""
        self._afd_rows = scheduler_output.total_num_scheduled_tokens
        with self._afd_step() if self.use_v2_model_runner else contextlib.nullcontext():
            return super().execute_model(scheduler_output)  # type: ignore[misc]

    def _afd_step(self: Any) -> contextlib.AbstractContextManager[None]:
        """A step of the scheduled tokens. The second runner also comes here without any, and to warm up."""
        if self._afd_is_offline or not self._afd_rows:
            return contextlib.nullcontext()
        return self.afd_session.step(self._afd_rows)

    @contextlib.contextmanager
    def _afd_offline(self: Any) -> Iterator[None]:
        with self.afd_session.offline():
            self._afd_is_offline = True
            try:
                yield
            finally:
                self._afd_is_offline = False

    def _make_forwards_steps(self: Any) -> None:
        """Makes each call of the first model runner's ``_model_forward``, which only real batches reach, a step."""
        forward = self.model_runner._model_forward

        @functools.wraps(forward)
        def step(*args: Any, **kwargs: Any) -> Any:
            with self._afd_step():
                return forward(*args, **kwargs)

        self.model_runner._model_forward = step

    def afd_report(self: Any) -> dict[str, Any]:
        """What this rank read and exchanged, for ``LLM.collective_rpc("afd_report")``."""
        return {"load": dataclasses.asdict(self.get_model().afd_load_report), "layers": self.afd_session.stats}

    def shutdown(self: Any) -> None:
        """Detaches, then shuts the worker down."""
        if self.afd_session is not None:
            self.afd_session.close()
        super().shutdown()  # type: ignore[misc]


_Worker: Any = _platform_worker()


class AFDAttentionWorker(AttentionWorkerMixin, _Worker):
    """The worker of an attention rank on this platform."""
