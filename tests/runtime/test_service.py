# SPDX-License-Identifier: Apache-2.0
"""``afd ffn`` as a service: how it starts, how it ends, and what its last line says."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint as tiny
import torch
from group import _FORK

from afd_runtime.config import AFDConfig
from afd_runtime.errors import AFDPeerLost, AFDStepAborted, AFDStuckError
from afd_runtime.launch import reserve_port
from afd_runtime.model_spec import ModelSpec
from afd_runtime.remote_experts import AttentionSession

pytestmark = pytest.mark.timeout(60)
LAYERS = tiny.EXPERT_LAYERS["olmoe"]


def _raise(error: Exception) -> None:
    raise error


PLANTS: dict[str, Callable[[], None]] = {
    "slow": functools.partial(time.sleep, 0.7),
    "hangs": functools.partial(time.sleep, 60),
    "fault": lambda: _raise(RuntimeError("the planted fault\n  with a second line")),
    "stuck": lambda: _raise(AFDStuckError("a planted kernel does not end")),
}


def afd_main(arguments: list[str], stderr: Path, plant: str, env: dict[str, str], ended: Path) -> None:
    """A process that runs the ``afd`` command. plant: what the experts do first. ended: written by an orderly exit."""
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ.update(env)
    from afd_runtime import cli, workers
    from afd_runtime.ffn_backend import ExpertBank

    workers.EXIT_WITHIN_S = float(env.get("EXIT_WITHIN_S", workers.EXIT_WITHIN_S))
    forward = ExpertBank.forward
    if plant:
        ExpertBank.forward = lambda self, *a, **k: (PLANTS[plant](), forward(self, *a, **k))[1]  # type: ignore
    sys.argv = ["afd", *arguments]
    try:
        cli.main()
    finally:
        ended.touch()


class Service:
    """One ``afd ffn`` process with its pages, and the attention session of the test."""

    def __init__(self, folder: Path, plant: str = "", *arguments: str, ffn_ranks: int = 1, **env: str) -> None:
        model = tiny.write(folder / "model", tiny.config("olmoe"), tiny.tensors("olmoe"))
        self.spec, self.stderr, self.ended = ModelSpec.from_pretrained(model), folder / "stderr", folder / "ended"
        holders = [reserve_port("127.0.0.1") for _ in range(2)]
        self.port, self.http_port = (holder.getsockname()[1] for holder in holders)
        options = {"port": self.port, "http-port": self.http_port, "ffn-ranks": ffn_ranks, "max-batch-tokens": 8}
        command = ["ffn", str(model), *(f"--{name}={value}" for name, value in options.items()), *arguments]
        for holder in holders:
            holder.close()
        self.process = _FORK.Process(target=afd_main, args=(command, self.stderr, plant, env, self.ended))
        self.process.start()

    def page(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def until(self, path: str, status: int, within_s: float = 20.0) -> str:
        deadline = time.monotonic() + within_s
        while (answer := self.page(path))[0] != status and time.monotonic() < deadline:
            time.sleep(0.05)
        assert answer[0] == status, (answer, self.stderr.read_text())
        return answer[1]

    def attach(self, **options: Any) -> AttentionSession:
        self.until("/ready", 200)
        options = {"port": self.port, "max_batch_tokens": 8, "reattach_timeout_s": 0.0, **options}
        return AttentionSession.connect(AFDConfig(role="attention", **options), 0, self.spec)

    def exit_code(self, within_s: float) -> int:
        self.process.join(within_s)
        assert self.process.exitcode is not None, f"it still runs after {within_s} s: {self.stderr.read_text()}"
        return self.process.exitcode

    def lines(self) -> list[str]:
        return self.stderr.read_text().splitlines()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    started: list[Service] = []

    def start(*args: Any, **kwargs: Any) -> Service:
        started.append(Service(tmp_path, *args, **kwargs))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()


def layer(session: AttentionSession, index: int, rows: int = 3) -> torch.Tensor:
    hidden = torch.randn(rows, tiny.HIDDEN, generator=torch.Generator().manual_seed(index))
    ids = torch.tensor([[0, 3]] * rows, dtype=torch.int32)
    return session.experts(LAYERS[index], hidden, ids, torch.full((rows, 2), 0.5))


def whole_step(session: AttentionSession, results: list[Any]) -> None:
    try:
        with session.step(3):
            results.extend(layer(session, index) for index in range(len(LAYERS)))
    except Exception as error:
        results.append(error)


def test_sigterm_lets_the_step_in_flight_end(service) -> None:
    afd = service("slow")
    session, results = afd.attach(), []
    step = threading.Thread(target=whole_step, args=(session, results))
    step.start()
    time.sleep(0.9)  # in the second of three layers
    asked = time.monotonic()
    os.kill(afd.process.pid, signal.SIGTERM)
    assert "asked to stop" in afd.until("/ready", 503, 2.0) and afd.page("/health")[0] == 200
    step.join()
    assert [type(result) for result in results] == [torch.Tensor] * 3 and all(r.abs().sum() > 0 for r in results)
    assert afd.exit_code(10.0) == 0 and time.monotonic() - asked < 5.0 and afd.ended.exists()
    with pytest.raises(AFDPeerLost, match="it was asked to stop"):
        session.begin_step(1)
    session.close()
    assert "afd_eager_steps_total" not in afd.page("/metrics")[1]  # the port is free again


def test_sigterm_gives_a_step_up_whose_peer_sends_nothing_more(service) -> None:
    afd = service()
    session, results = afd.attach(), []
    whole_step(session, results)
    assert 'afd_eager_steps_total{ffn_rank="0",role="ffn"} 1.0' in afd.page("/metrics")[1]
    session.begin_step(3)
    layer(session, 0)
    asked = time.monotonic()
    os.kill(afd.process.pid, signal.SIGTERM)
    assert afd.exit_code(10.0) == 0 and time.monotonic() - asked > 4.0
    with pytest.raises((AFDStepAborted, AFDPeerLost), match="asked to stop"):
        layer(session, 1)
    session.close()
    assert any("asked to stop, and no request for layer 1 arrived" in line for line in afd.lines())


@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
def test_a_fatal_error_is_the_last_line(service, level: str) -> None:
    afd = service("fault", AFD_LOG_LEVEL=level)
    session, results = afd.attach(), []
    whole_step(session, results)
    assert isinstance(results[0], AFDPeerLost) and "the planted fault" in str(results[0])
    session.close()
    assert afd.exit_code(5.0) == 1
    assert afd.lines()[-1] == "afd: RuntimeError: the planted fault with a second line"
    assert any("Traceback" in line for line in afd.lines()) == (level == "DEBUG")


def test_a_kernel_that_does_not_end_leaves_at_once(service) -> None:
    afd = service("stuck")
    session, results = afd.attach(), []
    whole_step(session, results)
    session.close()
    assert afd.exit_code(5.0) == 1 and afd.lines()[-1] == "afd: a planted kernel does not end"
    assert not afd.ended.exists(), "nothing may run after that line"


def test_experts_that_hang_do_not_keep_a_process_that_was_asked_to_end(service) -> None:
    afd = service("hangs", EXIT_WITHIN_S="1.5")
    session, results = afd.attach(reply_timeout_s=15.0), []
    step = threading.Thread(target=whole_step, args=(session, results))
    step.start()
    time.sleep(0.5)
    os.kill(afd.process.pid, signal.SIGTERM)
    assert afd.exit_code(5.0) == 1 and "the experts or a kernel do not return" in afd.lines()[-1]
    step.join()
    assert isinstance(results[0], AFDPeerLost)
    session.close()


def test_a_rank_that_waits_for_its_group_is_not_ready_and_can_be_stopped(service) -> None:
    afd = service("", "--ffn-rank=1", ffn_ranks=2)
    while "waits for FFN rank 0" not in afd.until("/ready", 503):
        time.sleep(0.05)
    assert afd.page("/health")[0] == 200
    os.kill(afd.process.pid, signal.SIGTERM)
    assert afd.exit_code(5.0) == 0


def test_an_http_port_that_is_taken_is_refused(service) -> None:
    with reserve_port("127.0.0.1") as taken:
        taken.listen()
        port = taken.getsockname()[1]
        afd = service("", f"--http-port={port}")
        assert afd.exit_code(20.0) == 2
    assert len(afd.lines()) == 1 and f"http_port={port}" in afd.lines()[0]
