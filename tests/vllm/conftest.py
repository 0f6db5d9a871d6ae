# SPDX-License-Identifier: Apache-2.0
"""vLLM in processes of its own: undivided, with every plugin off, and with its experts on FFN ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from engine_runs import ENV, LLM, MAX_BATCH_TOKENS, MAX_TOKENS, PROMPTS

ROOT = Path(__file__).parents[2]
FAULTS = ROOT / "tests" / "integration" / "faults"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A start of vLLM takes half a minute, and there are several in a test."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and "vllm_run" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(600))
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def vllm_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a small checkpoint of a family that vLLM serves on a CPU, written once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def get(family: str) -> Path:
        from afd_runtime.demo_models import write_demo_model

        path = root / family
        return path if path.exists() else write_demo_model(f"{family}_vllm", path)

    return get


@pytest.fixture(scope="session")
def vllm_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Runs `offline.py` on a checkpoint. afd: the settings of an attention engine; None: undivided, without plugins.

    job: what to change in its job. env: added to its environment. llm: arguments of `LLM`.
    """

    def run(
        model: Path,
        afd: dict[str, Any] | None = None,
        *,
        job: Mapping[str, Any] = MappingProxyType({}),
        env: Mapping[str, str] = MappingProxyType({}),
        **llm: Any,
    ) -> dict[str, Any]:
        work = tmp_path_factory.mktemp("vllm")
        arguments = {**LLM, **llm} | ({} if afd is None else {"additional_config": {"afd": afd}})
        whole = {"model": str(model), "prompts": PROMPTS, "max_tokens": MAX_TOKENS, "llm": arguments}
        whole |= {"report": afd is not None, "out": str(work / "out.json"), **job}
        (work / "job.json").write_text(json.dumps(whole))
        env = {**os.environ, **ENV, "VLLM_PLUGINS": "afd" if afd is not None else "", **env}
        command = [sys.executable, str(Path(__file__).with_name("offline.py")), str(work / "job.json")]
        done = subprocess.run(command, env=env, cwd=work, capture_output=True, text=True)
        if done.returncode:
            lines = (done.stdout + done.stderr).splitlines()
            errors = [line for line in lines if "Error: " in line]
            pytest.fail("\n".join([f"vLLM ended with {done.returncode}", *errors, "...", *lines[-20:]]))
        return json.loads((work / "out.json").read_text())

    return run


@pytest.fixture(scope="session")
def undivided(vllm_run: Callable, vllm_checkpoint: Callable) -> Callable[[str], dict[str, Any]]:
    """What undivided vLLM gives for a family, once."""
    results: dict[str, dict[str, Any]] = {}

    def get(family: str) -> dict[str, Any]:
        if family not in results:
            results[family] = vllm_run(vllm_checkpoint(family))
        return results[family]

    return get


@pytest.fixture
def ffn_group(vllm_checkpoint: Callable, tmp_path: Path) -> Callable[..., AbstractContextManager[dict[str, Any]]]:
    """Runs `afd ffn` processes; gives the settings of an engine that attaches to them. fault: planted in each."""
    from afd_runtime.launch import ProcessGroup, python_module, reserve_port

    @contextmanager
    def run(
        family: str, *, ffn_ranks: int = 1, attention_ranks: int = 1, fault: str | None = None
    ) -> Iterator[dict[str, Any]]:
        model, env, planted = vllm_checkpoint(family), {"OMP_NUM_THREADS": "1"}, tmp_path / "planted"
        if fault is not None:
            planted.mkdir()
            path = os.pathsep.join([str(FAULTS), os.environ.get("PYTHONPATH", "")])
            env |= {"PYTHONPATH": path, "AFD_TEST_FAULT": fault, "AFD_TEST_PLANTED": str(planted)}
        with reserve_port("127.0.0.1") as holder, ProcessGroup() as group:
            port = holder.getsockname()[1]
            shape = {"ffn-ranks": ffn_ranks, "attention-ranks": attention_ranks, "max-batch-tokens": MAX_BATCH_TOKENS}
            flags = [f"--{name}={value}" for name, value in (shape | {"port": port, "dtype": "float32"}).items()]
            for rank in range(ffn_ranks):
                command = python_module("afd_runtime.cli", "ffn", str(model), f"--ffn-rank={rank}", *flags, "--events")
                group.start(f"FFN rank {rank}", command, runs_to_end=False, env=env)
            ranks = {"num_ffn_ranks": ffn_ranks, "num_attention_ranks": attention_ranks}
            yield {"role": "attention", "port": port, **ranks}
            group.check()
        assert fault is None or len(list(planted.iterdir())) == ffn_ranks

    return run


@pytest.fixture
def divided(vllm_run: Callable, vllm_checkpoint: Callable, ffn_group: Callable) -> Callable[..., dict[str, Any]]:
    """Runs a family with its experts in `afd ffn` processes. llm: arguments of `LLM`."""

    def run(family: str, *, ffn_ranks: int = 1, fault: str | None = None, **llm: Any) -> dict[str, Any]:
        with ffn_group(family, ffn_ranks=ffn_ranks, fault=fault) as afd:
            return vllm_run(vllm_checkpoint(family), afd, **llm)

    return run
