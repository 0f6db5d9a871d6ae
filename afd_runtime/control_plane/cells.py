# SPDX-License-Identifier: Apache-2.0
"""``AbortCell``: one int32 that a waiting kernel or thread reads, and that the watcher thread sets."""

from __future__ import annotations

import torch


class AbortCell:
    """tensor: int32[1] on ``device``, 0 or 1. ``set`` and ``clear`` work while a kernel waits on any other stream."""

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros(1, dtype=torch.int32, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.set()  # loads what both launch, which would have to wait for a kernel that is already waiting
        self.clear()

    def set(self) -> None:
        """Ends the waits that read this cell."""
        self._write(1)

    def clear(self) -> None:
        """Waits are possible again."""
        self._write(0)

    def _write(self, value: int) -> None:
        if self._stream is None:
            self.tensor.fill_(value)
            return
        with torch.cuda.stream(self._stream):
            self.tensor.fill_(value)
        self._stream.synchronize()
