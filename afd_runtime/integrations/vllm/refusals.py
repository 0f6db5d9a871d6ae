# SPDX-License-Identifier: Apache-2.0
"""What an attention engine refuses at its start, by name: versions and features of vLLM that are not tested."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from afd_runtime import envs
from afd_runtime.config import AFDConfig
from afd_runtime.errors import AFDConfigError

TESTED_VERSIONS = ("0.32.0",)
LOAD_FORMATS = ("auto", "hf", "safetensors", "afd")

_ONE = "1"


def _parallel(field: str) -> Callable[[Any], Any]:
    return lambda config: getattr(config.parallel_config, field, None)


#: Name of the option, its value in a VllmConfig, the values that are served, what is allowed in words.
_OPTIONS: tuple[tuple[str, Callable[[Any], Any], Callable[[Any], bool], str], ...] = (
    ("tensor_parallel_size", _parallel("tensor_parallel_size"), lambda v: v == 1, _ONE),
    ("pipeline_parallel_size", _parallel("pipeline_parallel_size"), lambda v: v == 1, _ONE),
    ("prefill_context_parallel_size", _parallel("prefill_context_parallel_size"), lambda v: v in (None, 1), _ONE),
    ("enable_expert_parallel", _parallel("enable_expert_parallel"), lambda v: not v, "False: no expert is local"),
    ("enable_eplb", _parallel("enable_eplb"), lambda v: not v, "False: no expert is local"),
    ("enable_elastic_ep", _parallel("enable_elastic_ep"), lambda v: not v, "False"),
    ("enable_dbo", _parallel("enable_dbo"), lambda v: not v, "False"),
    ("enable_lora", lambda c: c.lora_config is not None, lambda v: not v, "False"),
    ("speculative_config", lambda c: c.speculative_config, lambda v: v is None, "None"),
    ("quantization", lambda c: c.model_config.quantization, lambda v: v is None, "None"),
    ("enable_sleep_mode", lambda c: getattr(c.model_config, "enable_sleep_mode", False), lambda v: not v, "False"),
    ("load_format", lambda c: c.load_config.load_format, lambda v: v in LOAD_FORMATS, "auto, hf or safetensors"),
)  # fmt: skip


def refuse_version() -> None:
    """Raises ``AFDConfigError`` on a vLLM that is not tested, unless ``AFD_ALLOW_UNTESTED_VLLM`` is set."""
    import vllm
    from packaging.version import Version

    if Version(vllm.__version__).base_version not in TESTED_VERSIONS and not envs.AFD_ALLOW_UNTESTED_VLLM.get():
        raise AFDConfigError(
            f"vLLM is {vllm.__version__}; tested: {', '.join(TESTED_VERSIONS)}; install one of them, or set "
            f"{envs.AFD_ALLOW_UNTESTED_VLLM.name}=1"
        )


def refuse_engine(vllm_config: Any, config: AFDConfig) -> None:
    """Raises ``AFDConfigError`` for the first option of the engine that is not served together with AFD."""
    if config.role == "ffn":
        raise AFDConfigError(
            "additional_config['afd'].role is 'ffn'; allowed for a vLLM engine in this version: 'attention'; start the "
            "FFN ranks with: afd ffn MODEL"
        )
    for name, value_of, served, allowed in _OPTIONS:
        value = value_of(vllm_config)
        if not served(value):
            raise AFDConfigError(f"{name} is {value!r}, which is not supported with AFD; allowed: {allowed}")
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size > config.num_attention_ranks:
        raise AFDConfigError(
            f"additional_config['afd'].num_attention_ranks is {config.num_attention_ranks}; allowed: at least "
            f"{parallel.data_parallel_size}, the engine's data_parallel_size; raise it here and on the FFN ranks"
        )
    if parallel.data_parallel_size > 1 and vllm_config.use_v2_model_runner:
        raise AFDConfigError(
            f"data_parallel_size is {parallel.data_parallel_size} with vLLM's second model runner, which is not "
            "supported with AFD; set VLLM_USE_V2_MODEL_RUNNER=0"
        )


def refuse_worker_class(given: str, allowed: tuple[str, ...]) -> None:
    """Raises ``AFDConfigError`` for a worker class that somebody else chose."""
    if given not in allowed:
        raise AFDConfigError(f"worker_cls is {given!r}; allowed with AFD: {' or '.join(allowed)}")
