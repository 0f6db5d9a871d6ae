# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the end-to-end tests, and their report of what was served and compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAULTS = Path(__file__).parent / "faults"
MARK = "AFD_TEST_RUN"
SERVED = "served"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a small checkpoint of a family, written once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def get(family: str) -> Path:
        from afd_runtime.demo_models import write_demo_model

        path = root / family
        return path if path.exists() else write_demo_model(family, path)

    return get


class Afd:
    """Runs the ``afd`` command with a mark in its environment, by which its processes can be found."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.started: list[subprocess.Popen[str]] = []
        self.env = {**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        self.env["PYTHONPATH"] = os.pathsep.join([str(FAULTS), str(ROOT), os.environ.get("PYTHONPATH", "")])

    def plant(self, fault: str, planted: Path) -> None:
        """Plants ``fault`` in the processes of the next runs; each that has it leaves a file in ``planted``."""
        planted.mkdir()
        self.env |= {"AFD_TEST_FAULT": fault, "AFD_TEST_PLANTED": str(planted)}

    def record_modules(self, path: Path) -> None:
        """The next ``afd ffn`` process writes the names of all modules that it imported to ``path``."""
        self.env["AFD_TEST_MODULES"] = str(path)

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "afd_runtime.cli", *map(str, arguments)]
        pipe = subprocess.PIPE
        self.started.append(subprocess.Popen(command, env=self.env, cwd=ROOT, stdout=pipe, stderr=pipe, text=True))
        return self.started[-1]

    def run(self, *arguments: object, timeout_s: float = 150) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def processes(self) -> list[str]:
        """The command lines of all living processes that were started by this object."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
        return found

    def all_gone(self, within_s: float = 5.0) -> list[str]:
        """Waits until no process is left; returns those that still are."""
        deadline = time.monotonic() + within_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left


@pytest.fixture
def afd() -> Iterator[Afd]:
    """The ``afd`` command; the test fails if one of its processes outlives it."""
    runner = Afd()
    yield runner
    left = runner.all_gone()
    for process in runner.started:  # after a failed test nothing may stay behind either
        process.kill()
    assert left == []


@pytest.fixture
def serve(afd: Afd, record_property: Callable[[str, object], None]) -> Callable[..., dict]:
    """Runs ``afd generate --check --json`` and returns its JSON with the exit code; what it compared is reported."""

    def run(model: Path, *arguments: object, dtype: str = "float32") -> dict:
        done = afd.run("generate", model, "--check", "--json", f"--dtype={dtype}", *arguments)
        assert done.returncode in (0, 1), done.stderr
        result = json.loads(done.stdout)
        fault = afd.env.get("AFD_TEST_FAULT")
        group = " ".join(str(a) for a in arguments if "-ranks" in str(a) or "--placement" in str(a))
        what = f"{model.name} {dtype} {group}{f' fault {fault}' if fault else ''}"
        record_property(SERVED, f"{what}: {_compared(result['check'])}, exit {done.returncode}")
        return {**result, "exit_code": done.returncode}

    return run


def _compared(check: dict) -> str:
    matched = f"{check['matched']}/{check['prompts']} prompts"
    if "layer_calls" in check:
        return f"{matched}, {check['layer_calls']} layer calls, max error {check['max_error']:.1e}"
    return f"{matched}, {check['tokens']} tokens, max logit error {check['max_logit_error']:.1e}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what was served and compared with the undivided model."""
    reports = [r for key in ("passed", "failed") for r in terminalreporter.stats.get(key, []) if r.when == "call"]
    lines = [value for report in reports for key, value in report.user_properties if key == SERVED]
    if lines:
        terminalreporter.section("served and compared with the undivided model")
        for line in sorted(lines):
            terminalreporter.line(line)
