# SPDX-License-Identifier: Apache-2.0
"""``additional_config["afd"]`` of a vLLM engine as an ``AFDConfig``. Imports no vLLM."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from typing import Any

import pydantic

from afd_runtime.config import AFDConfig
from afd_runtime.errors import AFDConfigError

logger = logging.getLogger("vllm.plugins.afd")

KEY = "afd"
#: Names that ``vllm-project/afd-plugin`` gives to fields.
ALIASES = {"afd_role": "role", "afd_connector": "connector", "afd_host": "host", "afd_port": "port"}
FIELDS = (
    "role", "connector", "host", "port", "num_attention_ranks", "num_ffn_ranks", "compute_gate_on_attention",
    "connector_extra_config",
)  # fmt: skip
#: Fields of ``AFDConfig`` that ``connector_extra_config`` may set.
EXTRA_FIELDS = (
    "bind_host", "placement", "max_batch_tokens", "reply_timeout_s", "peer_timeout_s", "attach_timeout_s",
    "liveness_timeout_s", "reattach_timeout_s", "doorbells", "reply_dtype",
)  # fmt: skip
OWN_CONNECTOR = "p2p"
#: Connectors of other plugins whose commands start unchanged; the direct-write connector serves them.
SERVED_CONNECTORS = ("P2pNcclAFDConnector",)


def is_configured(additional_config: object) -> bool:
    """Whether an engine with this ``additional_config`` takes part in an AFD group."""
    return isinstance(additional_config, Mapping) and KEY in additional_config


def parse_settings(additional_config: Mapping[str, Any], max_num_batched_tokens: int) -> AFDConfig:
    """The group as this engine sees it.

    additional_config: with the key ``afd``. max_num_batched_tokens: of the engine's scheduler; ``max_batch_tokens``
    defaults to it and may not be less. Raises ``AFDConfigError``, which names the field, its value and what is allowed.
    """
    fields = _renamed(additional_config[KEY])
    _refuse_unknown(fields, FIELDS, "")
    if "role" not in fields:
        raise AFDConfigError(f"{_at('role')} is missing; allowed: 'attention', 'ffn'")
    extra = _extra(fields.pop("connector_extra_config", {}), fields)
    values = {"max_batch_tokens": max_num_batched_tokens, **fields, **extra}
    try:
        config = AFDConfig.model_validate(values, strict=True)
    except pydantic.ValidationError as error:
        raise AFDConfigError("; ".join(_describe(item) for item in error.errors())) from None
    if config.max_batch_tokens < max_num_batched_tokens:
        raise AFDConfigError(
            f"{_at('connector_extra_config.max_batch_tokens')}={config.max_batch_tokens}; allowed: at least "
            f"{max_num_batched_tokens}, the engine's max_num_batched_tokens; raise it here and on the FFN ranks, or "
            "lower --max-num-batched-tokens"
        )
    return config


def _renamed(given: object) -> dict[str, Any]:
    """The fields under their own names."""
    if not isinstance(given, Mapping):
        raise AFDConfigError(
            f"additional_config[{KEY!r}] is {given!r}; allowed: an object with the fields {', '.join(FIELDS)}"
        )
    fields: dict[str, Any] = {}
    for name, value in given.items():
        own = ALIASES.get(name, str(name))
        if own in fields:
            raise AFDConfigError(f"{_at(own)} is given twice, once as an alias; give one of them")
        fields[own] = value
    return fields


def _extra(given: object, fields: dict[str, Any]) -> dict[str, Any]:
    """``connector_extra_config``. Puts our own connector's name into ``fields``."""
    if not isinstance(given, Mapping):
        raise AFDConfigError(
            f"{_at('connector_extra_config')} is {given!r}; allowed: an object with the fields "
            f"{', '.join(EXTRA_FIELDS)}"
        )
    connector = fields.setdefault("connector", OWN_CONNECTOR)
    if connector in SERVED_CONNECTORS:
        fields["connector"] = OWN_CONNECTOR
        ignored = f"; its connector_extra_config {sorted(given)} is not used" if given else ""
        logger.warning("connector %r: the direct-write connector %r serves it%s", connector, OWN_CONNECTOR, ignored)
        return {}
    if connector != OWN_CONNECTOR:
        allowed = ", ".join(map(repr, (OWN_CONNECTOR, *SERVED_CONNECTORS)))
        raise AFDConfigError(f"{_at('connector')} is {connector!r}; allowed: {allowed}")
    _refuse_unknown(given, EXTRA_FIELDS, "connector_extra_config.")
    return dict(given)


def _refuse_unknown(given: Mapping[str, Any], allowed: tuple[str, ...], prefix: str) -> None:
    for name in given:
        if name not in allowed:
            close = difflib.get_close_matches(str(name), allowed, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise AFDConfigError(f"{_at(f'{prefix}{name}')} is unknown; allowed: {', '.join(allowed)}{hint}")


def _describe(item: Any) -> str:
    name = ".".join(map(str, item["loc"]))
    message = item["msg"].removeprefix("Value error, ")
    if not name:
        return f"additional_config[{KEY!r}]: {message}"
    where = f"connector_extra_config.{name}" if name in EXTRA_FIELDS else name
    return f"{_at(where)} is {item['input']!r}: {message}"


def _at(field: str) -> str:
    return f"additional_config[{KEY!r}].{field}"
