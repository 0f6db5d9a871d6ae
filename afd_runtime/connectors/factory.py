# SPDX-License-Identifier: Apache-2.0
"""Connectors by name. A connector's module is imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import Any

from afd_runtime.connectors.base import AFDConnector
from afd_runtime.errors import AFDConfigError

_CONNECTORS: dict[str, str] = {"p2p": "afd_runtime.connectors.p2p:P2PAFDConnector"}


def available_connectors() -> tuple[str, ...]:
    """The names that ``create_connector`` knows."""
    return tuple(sorted(_CONNECTORS))


def register_connector(name: str, target: str) -> None:
    """Makes a connector known. target: ``package.module:Class``, imported on first use. A taken name is refused."""
    if name in _CONNECTORS:
        raise AFDConfigError(f"connector {name!r} is already registered as {_CONNECTORS[name]}; choose another name")
    if target.count(":") != 1:
        raise AFDConfigError(f"target is {target!r}; allowed: 'package.module:Class'")
    _CONNECTORS[name] = target


def create_connector(name: str, **kwargs: Any) -> AFDConnector:
    """Builds the connector ``name``; ``kwargs`` go to its class. It is not initialised yet."""
    if name not in _CONNECTORS:
        raise AFDConfigError(f"connector is {name!r}; allowed: {', '.join(available_connectors())}")
    module, _, attribute = _CONNECTORS[name].partition(":")
    cls = getattr(importlib.import_module(module), attribute)
    if not issubclass(cls, AFDConnector):
        raise AFDConfigError(f"connector {name!r} ({_CONNECTORS[name]}) is not an AFDConnector")
    return cls(**kwargs)
