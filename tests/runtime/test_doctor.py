# SPDX-License-Identifier: Apache-2.0
"""``afd doctor``: each check can pass and can fail, and one that fails does not end the others."""

from __future__ import annotations

import importlib.metadata
import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement

import afd_kernels
from afd_runtime import cli, doctor, doctor_kernels, doctor_windows
from afd_runtime.doctor import FAILED, OK, WARNING, Finding
from afd_runtime.errors import AFDConfigError, AFDError
from afd_runtime.launch import reserve_port
from afd_runtime.window import SharedMemoryFabric

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with reserve_port("127.0.0.1") as holder:
        return holder.getsockname()[1]


def run(arguments: list[str], monkeypatch, capsys) -> tuple[int, str]:
    """Exit code and stdout of ``afd doctor`` in this process."""
    monkeypatch.setattr(sys, "argv", ["afd", "doctor", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0), capsys.readouterr().out


def test_everything_is_well_here(monkeypatch, capsys) -> None:
    start, port = time.monotonic(), free_port()
    code, out = run(["--kernels", "--json", f"--port={port}"], monkeypatch, capsys)
    report = json.loads(out)
    found = {check["name"]: check for check in report["checks"]}
    assert code == 0 and report["ok"] is True and time.monotonic() - start < 20
    assert all(check["status"] in (OK, WARNING) for check in report["checks"]), out
    for name in ("python", "torch", "triton", "transformers", "vllm", "gpu", "cuda ipc", "doorbells", "shared memory",
                 "control port", "token", "vllm plugin"):  # fmt: skip
        assert found[name]["text"], name
    kernels = [check for name, check in found.items() if name.startswith("kernels: ")]
    assert len(kernels) == len(doctor_kernels.ALONE + doctor_kernels.EXCHANGE) == 13
    path = "kernel on" if torch.cuda.is_available() else "reference on the CPU, equal to a loop over tokens"
    assert all(path in check["text"] for check in kernels)
    operations = set(afd_kernels.__all__) & {name for name in dir(afd_kernels) if callable(getattr(afd_kernels, name))}
    served = {"route", "dispatch", "arrival", "experts_forward", "reply", "combine", "wait", "enter_step", "leave_step"}
    assert served <= operations and served <= set(doctor_kernels.ALONE + doctor_kernels.EXCHANGE)


def test_a_port_that_is_taken_fails_and_the_others_go_on(monkeypatch, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out = run([f"--port={port}"], monkeypatch, capsys)
    lines = out.splitlines()
    failed = [line for line in lines if line.startswith("failed")]
    assert code == 1 and len(failed) == 1 and len(lines) == 12
    assert f"127.0.0.1 port {port}" in failed[0] and "choose another --port" in failed[0]


def test_the_supported_versions_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for name, supported in doctor.SUPPORTED.items():
        (line,) = {match for match in re.findall(r'"([\w-]+[><=][^"]*)"', text) if Requirement(match).name == name}
        assert str(Requirement(line).specifier) == f">={supported.oldest}"
    newest = re.search(r"^TORCH \?= torch==(\d+\.\d+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == doctor.SUPPORTED["torch"].newest


@pytest.mark.parametrize(
    ("name", "version", "status", "text"),
    [
        ("torch", "2.8.1", FAILED, "pip install 'torch>=2.9'"),
        ("torch", "2.9.0+cu128", OK, "2.9 … 2.13"),
        ("torch", "2.13.1", OK, "2.13.1"),
        ("torch", "2.14.0", WARNING, "newer than what was tested"),
        ("torch", "3.0", WARNING, "newer"),
        ("torch", None, FAILED, "not installed"),
        ("triton", "3.10.0", WARNING, "newer"),  # not 3.1
        ("triton", "3.5.1", FAILED, "pip install 'triton>=3.6'"),
        ("transformers", "5.16", WARNING, "5.17"),
        ("transformers", "6.0", OK, "5.17 or newer"),
        ("vllm", None, OK, "afd[vllm]"),
        ("vllm", "0.25.0", WARNING, "0.26"),
    ],
)
def test_versions(monkeypatch, name: str, version: str | None, status: str, text: str) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda _: version)
    finding = doctor.check_package(name)
    assert finding.status == status and text in finding.line()
    assert bool(finding.todo) == (status != OK)


def test_a_token_where_the_host_needs_one(monkeypatch) -> None:
    monkeypatch.delenv("AFD_TOKEN", raising=False)
    assert "not needed" in doctor.check_token("127.0.0.1", 29650).text
    with pytest.raises(AFDConfigError, match="secrets.token_hex"):
        doctor.check_token("0.0.0.0", 29650)
    monkeypatch.setenv("AFD_TOKEN", "secret")
    finding = doctor.check_token("0.0.0.0", 29650)
    assert finding.status == OK and "secret" not in finding.text


def test_the_plugin_where_vllm_is_installed(monkeypatch) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda name: "0.30.0" if name == "vllm" else None)
    points = [SimpleNamespace(name="other", value="x:y")]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points if "general" in group else [])
    assert doctor.check_plugin().status == WARNING
    points.append(SimpleNamespace(name="afd", value="somewhere:register"))
    assert doctor.check_plugin() == Finding("vllm plugin", OK, "afd = somewhere:register")


def test_a_gpu_that_is_too_old_or_not_seen(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("os.path.isdir", lambda path: False)
    assert doctor.check_gpu().status == OK
    monkeypatch.setattr("os.path.isdir", lambda path: path == "/proc/driver/nvidia/gpus")
    assert doctor.check_gpu().status == WARNING
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU model {index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9 - 2 * index, 0))
    finding = doctor.check_gpu()
    assert finding.status == FAILED and "0: GPU model 0, 1: GPU model 1; GPU 1 is too old" in finding.line()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(AFDConfigError, match="pip install cuda-bindings"):
        doctor.check_gpu()


def test_a_check_that_raises_has_failed(monkeypatch, capsys) -> None:
    def raises() -> Finding:
        raise OSError("no such\ndevice")

    monkeypatch.setattr(doctor, "check_doorbells", raises)
    monkeypatch.setattr(doctor, "check_shared_memory", lambda: Finding("shared memory", OK, "skipped here"))
    code, out = run([f"--port={free_port()}"], monkeypatch, capsys)
    (line,) = (line for line in out.splitlines() if line.startswith("failed"))
    assert code == 1 and line == "failed  doorbells: OSError: no such device; report it, with this line"
    assert "ok      vllm plugin" in out


def test_a_window_that_a_child_cannot_use(monkeypatch) -> None:
    allocate = SharedMemoryFabric.allocate

    def other_contents(self, nbytes):
        window = allocate(self, nbytes)
        monkeypatch.setattr(doctor_windows, "_pattern", lambda factor: torch.zeros(nbytes, dtype=torch.uint8))
        return window

    monkeypatch.setattr(SharedMemoryFabric, "allocate", other_contents)
    with pytest.raises(AFDError, match="exit code 1.*does not hold what its owner wrote"):
        doctor_windows.share_window("shm")


def test_a_child_that_writes_nothing(monkeypatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, "", ""))
    with pytest.raises(AFDError, match="nothing of it arrived here"):
        doctor_windows.share_window("shm")


@pytest.mark.parametrize("name", doctor_kernels.ALONE + doctor_kernels.EXCHANGE)
def test_an_operation_that_is_wrong_is_named(monkeypatch, name: str) -> None:
    """Each result is made wrong in turn: by one in the last place of an integer, by 0.1 % of a number."""
    right = getattr(doctor_kernels.Operations, name)

    def wrong(self):
        results = right(self)
        return tuple(r * 1.001 if r.is_floating_point() else r + 1 for r in results)

    monkeypatch.setattr(doctor_kernels.Operations, name, wrong)
    findings = doctor_kernels.check_kernels(torch.device("cpu"))
    failed = [finding.name for finding in findings if finding.status == FAILED]
    assert failed[0] == f"kernels: {name}"
    later = (
        doctor_kernels.EXCHANGE[doctor_kernels.EXCHANGE.index(name) + 1 :] if name in doctor_kernels.EXCHANGE else ()
    )
    assert failed[1:] == [f"kernels: {other}" for other in later]
    assert all("not run" in finding.text for finding in findings if finding.name in failed[1:])
