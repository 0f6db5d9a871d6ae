# SPDX-License-Identifier: Apache-2.0
"""What the service does on a GPU: the doctor's checks, series read beside a capture, the end of a graph's step."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from group import SPEC, Failed, checked_step, local_group, new_group, random_layer
from prometheus_client.parser import text_string_to_metric_families

from afd_runtime import doctor, metrics
from afd_runtime.doctor_kernels import ALONE, EXCHANGE, check_kernels
from afd_runtime.remote_experts import AttentionSession

pytestmark = pytest.mark.timeout(120)


def test_the_doctor_finds_nothing_wrong() -> None:
    assert doctor.check_gpu().status == doctor.check_cuda_ipc().status == doctor.OK
    start = time.monotonic()
    findings = check_kernels()
    seconds = time.monotonic() - start
    assert all(f.status == doctor.OK and "kernel on" in f.text and "its reference" in f.text for f in findings), (
        findings
    )
    assert len(findings) == len(ALONE + EXCHANGE) and seconds < 20
    print(f"\nevery operation once: {seconds:.1f} s")


def test_replays_and_times_are_counted() -> None:
    with local_group(device="cuda") as (servers, connect), torch.cuda.stream(torch.cuda.Stream()):
        session = connect()
        for seed in range(5):
            checked_step(session, 7, seed)
        text = metrics.exposition_of(*servers, session)().decode()
        assert servers[0].not_ready is None
    samples = {(s.name, s.labels["role"]): s.value for f in text_string_to_metric_families(text) for s in f.samples}
    rows = 5 * 7 * len(SPEC.expert_layers)
    assert samples["afd_rows_total", "ffn"] == samples["afd_rows_total", "attention"] == rows
    assert samples["afd_replays_total", "ffn"] == 5 and samples["afd_eager_steps_total", "ffn"] == 0
    for name in ("afd_wait_seconds_total", "afd_experts_seconds_total", "afd_reply_seconds_total"):
        assert samples[name, "ffn"] > 0
    assert samples["afd_wait_seconds_total", "attention"] > 0


def capture_while_scraped(session: AttentionSession, captures: int) -> int:
    """Captures a layer again and again in the strictest mode, while another thread scrapes. Returns the scrapes."""
    layer, inputs = SPEC.expert_layers[0], tuple(tensor.cuda() for tensor in random_layer(SPEC, 4, 0))
    scrape, stop, scrapes, errors = metrics.exposition_of(session), threading.Event(), [0], []

    def scrape_on() -> None:
        while not stop.is_set():
            try:
                scrape()
                scrapes[0] += 1
            except RuntimeError as error:
                errors.append(error)

    thread = threading.Thread(target=scrape_on)
    thread.start()
    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(captures):
                with session.offline():
                    session.experts(layer, *inputs)
                    stream.synchronize()
                    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
                        session.experts(layer, *inputs)
    finally:
        stop.set()
        thread.join(30)
    assert not errors, errors
    return scrapes[0]


def test_a_scrape_does_not_disturb_a_capture() -> None:
    with new_group(device="cuda") as group:
        ffn, (attention,) = group.start_all()
        assert attention.call("run", capture_while_scraped, 50) > 50
        attention.call("step", 5, seed=1)
        group.end(ffn)


def test_sigterm_gives_up_a_graphs_step_whose_peer_sends_nothing_more() -> None:
    with new_group(device="cuda") as group:
        ffn, (attention,) = group.start_all()
        attention.call("step", 5, seed=0)
        attention.call("step", 5, seed=1, layers=1)
        start = time.monotonic()
        (report,) = group.end(ffn)
        assert 4 < time.monotonic() - start < 10
        attention.call("abort_step", "nobody serves it")
        with pytest.raises(Failed, match="asked to stop"):
            attention.call("begin_step", 1)
    assert report["steps"] == 2 and any("asked to stop" in text for text in report["warnings"])
