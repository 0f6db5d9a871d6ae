# SPDX-License-Identifier: Apache-2.0
"""AFDConfig, environment variables, windows and their layout."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from group import SPEC
from pydantic import ValidationError

from afd_runtime import envs
from afd_runtime.config import DEFAULT_PORT, AFDConfig, is_loopback
from afd_runtime.errors import AFDConfigError, AFDError
from afd_runtime.window import LocalFabric, SharedMemoryFabric, ShmHandle, WindowLayout, create_fabric


def test_defaults_and_refusals() -> None:
    config = AFDConfig(role="ffn")
    assert (config.host, config.port, config.placement, config.connector) == (
        "127.0.0.1", DEFAULT_PORT, "sharded", "p2p",
    )  # fmt: skip
    assert config.compute_gate_on_attention and config.reply_timeout_s is None
    assert config.reply_timeout(torch.device("cpu")) == 65.0 and config.reply_timeout(torch.device("cuda")) == 5.0
    for bad in (
        {"role": "both"}, {"unknown": 1}, {"num_ffn_ranks": 0}, {"max_batch_tokens": 0}, {"port": 70000},
        {"num_stages": 0}, {"fabric": "tcp"}, {"reply_timeout_s": 0}, {"reply_dtype": "int8"},
    ):  # fmt: skip
        with pytest.raises(ValidationError, match=next(iter(bad))):
            AFDConfig(**{"role": "ffn", **bad})
    with pytest.raises(ValidationError, match="at least as many attention ranks as FFN ranks"):
        AFDConfig(role="ffn", placement="replicated", num_attention_ranks=1, num_ffn_ranks=2)
    with pytest.raises(ValidationError, match="port=0 with role='attention'"):
        AFDConfig(role="attention", port=0)
    with pytest.raises(ValidationError, match="frozen"):
        config.port = 1  # type: ignore[misc]


def test_token_is_required_off_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AFD_TOKEN", raising=False)
    assert AFDConfig(role="ffn").token() == ""
    with pytest.raises(AFDConfigError, match="host='0.0.0.0' is not a loopback address"):
        AFDConfig(role="ffn", host="0.0.0.0").token()
    with pytest.raises(AFDConfigError, match="10.1.2.3"):
        AFDConfig(role="ffn", bind_host="10.1.2.3").token()
    monkeypatch.setenv("AFD_TOKEN", "x")
    assert AFDConfig(role="ffn", host="0.0.0.0").token() == "x"
    assert is_loopback("127.0.0.2") and is_loopback("::1") and is_loopback("localhost") and not is_loopback("8.8.8.8")


def test_environment_variables_are_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in envs.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
        assert variable.get() == variable.default and variable.meaning
    monkeypatch.setenv("AFD_ALLOW_UNTESTED_VLLM", "yes")
    assert envs.AFD_ALLOW_UNTESTED_VLLM.get() is True
    monkeypatch.setenv("AFD_ALLOW_UNTESTED_VLLM", "perhaps")
    with pytest.raises(ValueError, match="AFD_ALLOW_UNTESTED_VLLM='perhaps': allowed: 1, true"):
        envs.AFD_ALLOW_UNTESTED_VLLM.get()


@pytest.mark.parametrize(("stages", "ffn_ranks", "rows"), [(1, 1, 1), (2, 3, 17), (4, 2, 300)])
def test_window_layout_gives_sizes_before_anything_is_allocated(stages: int, ffn_ranks: int, rows: int) -> None:
    config = AFDConfig(role="ffn", num_ffn_ranks=ffn_ranks, num_stages=stages, max_batch_tokens=rows)
    layout = WindowLayout.of(config, SPEC, torch.bfloat16)
    assert layout.request.num_experts == -(-SPEC.num_experts // ffn_ranks) and layout.request.cap_rows == rows
    assert layout.request_nbytes == stages * layout.request_stride and layout.request_stride >= layout.request.nbytes
    assert layout.reply_nbytes == stages * layout.reply_stride and layout.reply_stride >= layout.reply.nbytes
    assert layout.request_stride % 4096 == layout.reply_stride % 4096 == 0
    wide = WindowLayout.of(config.model_copy(update={"reply_dtype": "float32"}), SPEC, torch.bfloat16)
    assert wide.reply.dtype == torch.float32 and layout.reply.dtype == torch.bfloat16
    assert wide.reply.nbytes > layout.reply.nbytes or rows == 1


def test_shared_memory_reaches_another_process_and_leaves_nothing() -> None:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    fabric = SharedMemoryFabric()
    window = fabric.allocate(8192)
    assert not window.buffer.any() and window.address % 4096 == 0
    window.buffer[5] = 42
    code = (
        "import sys; from afd_runtime.window import *\n"
        f"w = SharedMemoryFabric().open(ShmHandle({window.handle.pid}, {window.handle.fd}, 8192), 8192)\n"
        "assert w.buffer[5] == 42; w.buffer[6] = 43\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert window.buffer[6] == 43
    fd = window.fd
    window.close()
    window.close()
    with pytest.raises(OSError):
        os.fstat(fd)
    assert not os.path.isdir("/dev/shm") or set(os.listdir("/dev/shm")) <= before


def test_only_sealed_windows_of_the_right_size_are_mapped(tmp_path) -> None:
    fabric = SharedMemoryFabric()
    window = fabric.allocate(4096)
    with pytest.raises(AFDError, match="has 4096 bytes; this process expects 8192"):
        fabric.open(window.handle, 8192)
    with open(tmp_path / "file", "w+b") as file:
        file.truncate(4096)
        with pytest.raises(AFDError, match="is not an AFD window"):
            fabric.open(ShmHandle(os.getpid(), file.fileno(), 4096), 4096)
    unsealed = os.memfd_create("afd-window")
    os.ftruncate(unsealed, 4096)
    with pytest.raises(AFDError, match="is not a sealed window"):
        fabric.open(ShmHandle(os.getpid(), unsealed, 4096), 4096)
    os.close(unsealed)
    with pytest.raises(AFDError, match="is not a sealed window of 8192 bytes"):
        fabric.open(ShmHandle(os.getpid(), window.fd, 8192), 8192)
    with pytest.raises(AFDError, match="cannot map the window of process 999999999"):
        fabric.open(ShmHandle(999999999, 3, 4096), 4096)
    with pytest.raises(AFDError, match="set the same fabric on both sides"):
        LocalFabric().open(window.handle, 4096)
    window.close()


def test_local_fabric_knows_only_living_windows_of_this_process() -> None:
    fabric = LocalFabric()
    window = fabric.allocate(4096)
    assert LocalFabric().open(window.handle, 4096).address == window.address
    handle = window.handle
    del window
    with pytest.raises(AFDError, match="threads of one process"):
        fabric.open(handle, 4096)


@pytest.mark.parametrize("fabric,device", [("shm", "cuda:0"), ("cuda", "cpu"), ("auto", "meta")])
def test_fabric_that_does_not_fit_the_device_is_refused(fabric: str, device: str) -> None:
    assert create_fabric(AFDConfig(role="ffn"), torch.device("cpu")).name == "shm"
    assert create_fabric(AFDConfig(role="ffn", fabric="local"), torch.device("cpu")).name == "local"
    with pytest.raises(AFDConfigError, match=f"fabric={fabric!r} with device={device!r}; allowed:"):
        create_fabric(AFDConfig(role="ffn", fabric=fabric), torch.device(device))
