# SPDX-License-Identifier: Apache-2.0
"""The AFD runtime: configuration, control plane, connectors, the FFN server and the attention session.

Importing this package imports no torch; its modules do.
"""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["__version__"]
