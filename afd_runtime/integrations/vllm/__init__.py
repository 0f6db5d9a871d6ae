# SPDX-License-Identifier: Apache-2.0
"""vLLM as the attention engine: a general plugin that is inert without ``additional_config["afd"]``."""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """The entry point `afd` in `vllm.general_plugins`. vLLM calls it in each of its processes, some more than once."""
    from afd_runtime.integrations.vllm.plugin import install

    install()
