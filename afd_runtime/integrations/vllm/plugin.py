# SPDX-License-Identifier: Apache-2.0
"""What the plugin does to an engine's configuration: it chooses the worker class, and refuses what cannot work.

vLLM has no plug point between the arguments and the worker class `auto`, so `EngineArgs.create_engine_config` is
wrapped: once, and without effect on an engine that has no ``additional_config["afd"]``.
"""

from __future__ import annotations

import functools
from typing import Any

from afd_runtime.integrations.vllm.settings import is_configured, parse_settings

ATTENTION_WORKER = "afd_runtime.integrations.vllm.attention_worker.AFDAttentionWorker"
_MARK = "afd_original"


def install() -> None:
    """Wraps `EngineArgs.create_engine_config`. Idempotent."""
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        vllm_config = original(self, *args, **kwargs)
        if is_configured(vllm_config.additional_config):
            choose_worker(vllm_config, given=self.worker_cls)
        return vllm_config

    setattr(create_engine_config, _MARK, original)
    EngineArgs.create_engine_config = create_engine_config


def choose_worker(vllm_config: Any, *, given: str) -> None:
    """Puts this project's worker class into ``vllm_config``. given: the ``worker_cls`` of the engine's arguments.

    Raises ``AFDConfigError`` for a configuration that cannot work, before a model is loaded.
    """
    from afd_runtime.integrations.vllm.refusals import refuse_engine, refuse_version, refuse_worker_class

    refuse_version()
    scheduler = vllm_config.scheduler_config
    config = parse_settings(vllm_config.additional_config, scheduler.max_num_batched_tokens)
    refuse_engine(vllm_config, config)
    refuse_worker_class(given, allowed=("auto", ATTENTION_WORKER))
    config.token()  # off loopback one is needed
    vllm_config.parallel_config.worker_cls = ATTENTION_WORKER
