# SPDX-License-Identifier: Apache-2.0
"""Connectors move hidden states between the attention side and the FFN side."""

from __future__ import annotations

from afd_runtime.connectors.base import AFDConnector, AFDControlPlane
from afd_runtime.connectors.factory import available_connectors, create_connector, register_connector

__all__ = ["AFDConnector", "AFDControlPlane", "available_connectors", "create_connector", "register_connector"]
