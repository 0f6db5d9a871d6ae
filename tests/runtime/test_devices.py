# SPDX-License-Identifier: Apache-2.0
"""Which GPU a thread launches on."""

from __future__ import annotations

import pytest
import torch

from afd_runtime.devices import check_current, single_gpu_host, use_device
from afd_runtime.errors import AFDConfigError


def test_a_thread_that_launches_on_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.__setitem__(0, device.index))
    for device in ("cpu", "cuda", "cuda:0"):
        check_current(torch.device(device))
    with pytest.raises(
        AFDConfigError, match=r"device is cuda:1, and this thread launches on cuda:0; .*set_device\(1\)"
    ):
        check_current(torch.device("cuda:1"))
    use_device(torch.device("cpu"))
    use_device(torch.device("cuda:1"))
    check_current(torch.device("cuda:1"))


def test_a_host_with_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for names, single in ((["0000:00:06.0"], True), (["a", "b"], False)):
        monkeypatch.setattr("os.listdir", lambda path, names=names: names)
        assert single_gpu_host() is single
