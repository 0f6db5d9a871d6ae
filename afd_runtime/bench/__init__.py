# SPDX-License-Identifier: Apache-2.0
"""The performance-regression gate: what ``afd bench`` and ``afd tune`` do, and ``benchmarks/`` builds on.

Nothing here touches a GPU when it is imported.
"""
