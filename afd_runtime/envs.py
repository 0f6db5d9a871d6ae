# SPDX-License-Identifier: Apache-2.0
"""Every environment variable that this project reads: name, type, default, meaning. Read at the time of the call."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


def _flag(text: str) -> bool:
    value = text.strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("", "0", "false", "no", "off"):
        return False
    raise ValueError("allowed: 1, true, yes, on, 0, false, no, off")


def _level(text: str) -> str:
    value = text.strip().upper()
    if value not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
        raise ValueError("allowed: DEBUG, INFO, WARNING, ERROR, CRITICAL")
    return value


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable. ``get()`` gives its typed value, or ``default`` where it is unset or empty."""

    name: str
    parse: Callable[[str], T]
    default: T
    meaning: str

    def get(self) -> T:
        text = os.environ.get(self.name, "")
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueError(f"{self.name}={text!r}: {error}") from None


AFD_TOKEN: Variable[str] = Variable(
    "AFD_TOKEN", str, "", "Shared secret of one AFD group; required when the control port is not on loopback."
)
AFD_FORBID_REFERENCE: Variable[bool] = Variable(
    "AFD_FORBID_REFERENCE",
    _flag,
    False,
    "Makes a plain-torch reference on a CUDA tensor an error (read by afd_kernels).",
)
AFD_ALLOW_UNTESTED_VLLM: Variable[bool] = Variable(
    "AFD_ALLOW_UNTESTED_VLLM", _flag, False, "Lets the vLLM plugin load on a version that is not tested."
)
AFD_LOG_LEVEL: Variable[str] = Variable(
    "AFD_LOG_LEVEL", _level, "INFO", "Level of the `afd_runtime` logger in the CLI."
)
AFD_EVENT_LOG: Variable[str] = Variable(
    "AFD_EVENT_LOG", str, "", "Directory that each rank appends its protocol events to; unset: nothing is recorded."
)
AFD_COUNT_KERNELS: Variable[bool] = Variable(
    "AFD_COUNT_KERNELS", _flag, False, "Makes `afd generate --json` report Triton launches by kernel name and role."
)

VARIABLES: tuple[Variable, ...] = (
    AFD_TOKEN, AFD_FORBID_REFERENCE, AFD_ALLOW_UNTESTED_VLLM, AFD_LOG_LEVEL, AFD_EVENT_LOG, AFD_COUNT_KERNELS,
)  # fmt: skip
