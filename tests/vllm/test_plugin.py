# SPDX-License-Identifier: Apache-2.0
"""What the plugin does to an engine's configuration, before any process is started."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed")

from vllm.engine.arg_utils import EngineArgs  # noqa: E402

from afd_runtime.errors import AFDConfigError  # noqa: E402
from afd_runtime.integrations.vllm import plugin, refusals, register  # noqa: E402


@pytest.fixture
def engine_config(vllm_checkpoint: Callable) -> Callable[..., Any]:
    """An engine's configuration; afd: its settings, or None."""

    def create(afd: dict[str, Any] | None = None, **arguments: Any) -> Any:
        additional = {} if afd is None else {"additional_config": {"afd": afd}}
        fixed = {"model": str(vllm_checkpoint("qwen3_moe")), "skip_tokenizer_init": True, "max_num_batched_tokens": 256}
        return EngineArgs(**fixed, **additional, **arguments).create_engine_config()

    return create


def test_installed_and_registered_once() -> None:
    (entry,) = [e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "afd"]
    assert entry.load() is register
    register()
    wrapped = EngineArgs.create_engine_config
    register()
    assert EngineArgs.create_engine_config is wrapped and not hasattr(wrapped.afd_original, "afd_original")


def test_an_engine_without_settings_is_untouched(engine_config: Callable) -> None:
    config = engine_config()
    assert config.parallel_config.worker_cls.startswith("vllm.") and config.load_config.load_format == "auto"


def test_the_attention_worker_is_chosen(engine_config: Callable) -> None:
    for arguments in ({}, {"worker_cls": plugin.ATTENTION_WORKER}):
        config = engine_config({"role": "attention"}, **arguments)
        assert config.parallel_config.worker_cls == plugin.ATTENTION_WORKER


REFUSED = [
    ({"role": "ffn"}, {}, "afd ffn MODEL"),
    ({"rôle": "attention"}, {}, "'afd'].rôle is unknown"),
    ({"host": "192.0.2.7"}, {}, "AFD_TOKEN"),
    ({}, {"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"}, "worker_cls is 'vllm.v1.worker.cpu_worker.CPUWorker'"),
    ({}, {"tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
    ({}, {"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
    ({}, {"data_parallel_size": 2}, "num_attention_ranks is 1; allowed: at least 2"),
    ({}, {"enable_expert_parallel": True}, "enable_expert_parallel is True"),
    ({}, {"enable_lora": True}, "enable_lora is True"),
    ({}, {"load_format": "dummy"}, "load_format is 'dummy'"),
]


@pytest.mark.parametrize(("afd", "arguments", "message"), REFUSED)
def test_refused_by_name(
    engine_config: Callable, monkeypatch: pytest.MonkeyPatch, afd: dict, arguments: dict, message: str
) -> None:
    monkeypatch.delenv("AFD_TOKEN", raising=False)
    with pytest.raises(AFDConfigError) as error:
        engine_config({"role": "attention", **afd}, **arguments)
    assert message in str(error.value)


def test_other_versions_need_a_word(engine_config: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "TESTED_VERSIONS", ("0.1.0",))
    with pytest.raises(AFDConfigError, match="tested: 0.1.0; .*AFD_ALLOW_UNTESTED_VLLM=1"):
        engine_config({"role": "attention"})
    monkeypatch.setenv("AFD_ALLOW_UNTESTED_VLLM", "1")
    assert engine_config({"role": "attention"}).parallel_config.worker_cls == plugin.ATTENTION_WORKER
