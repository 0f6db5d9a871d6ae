# SPDX-License-Identifier: Apache-2.0
"""Prometheus series of FFN ranks and attention ranks, read from the runtime's own counters when they are scraped.

Every series counts from the start of the process. Labels: ``role``, and ``ffn_rank`` or ``attention_rank``; ``stage``
for what is counted by stage; ``direction`` (``request``: to FFN ranks, ``reply``: back), the same on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from afd_runtime.remote_experts import AttentionSession
from afd_runtime.server import FFNServer

if TYPE_CHECKING:
    from afd_runtime.connectors.p2p_attention import AttentionSide

__all__ = ["CONTENT_TYPE", "SERIES", "collector_of", "exposition_of"]

#: name → help. ``_total`` follows the name.
SERIES = {
    "afd_rows": "Rows exchanged, over all layers and peers. An FFN rank on a GPU counts what steps announced.",
    "afd_bytes": "Bytes of the messages exchanged, over all layers and peers; from rows as they are counted.",
    "afd_wait_seconds": "Seconds waited: attention for replies, FFN for requests.",
    "afd_experts_seconds": "Seconds that an FFN rank computed experts.",
    "afd_reply_seconds": "Seconds that an FFN rank wrote replies.",
    "afd_replays": "Steps that an FFN rank served by the replay of a captured graph.",
    "afd_eager_steps": "Steps that an FFN rank served without a captured graph.",
    "afd_timeouts": "Waits for a peer that ended by their limit.",
}

Values = Iterable[tuple[Mapping[str, str], float]]
Source = FFNServer | AttentionSession


def collector_of(*sources: Source) -> Collector:
    """A collector of the series of ``sources``, for ``prometheus_client``'s registry of the process or any other.

    sources: ``AttentionSession``s and ``FFNServer``s. Give one registry one collector with all of its sources. Reading
    never waits for a step; on a GPU it copies a few counters.
    Raises ``TypeError`` for anything else.
    """
    return _Collector([_reader_of(source) for source in sources])


def exposition_of(*sources: Source) -> Callable[[], bytes]:
    """A function that gives the series of ``sources`` in Prometheus' text format, from a registry of its own."""
    registry = CollectorRegistry()
    registry.register(collector_of(*sources))
    return lambda: generate_latest(registry)


class _Collector(Collector):
    def __init__(self, readers: list[_Reader]) -> None:
        self._readers = readers

    def collect(self) -> Iterable[Metric]:
        found = [(reader.labels, reader.read()) for reader in self._readers]
        for name, text in SERIES.items():
            family = CounterMetricFamily(name, text)
            for labels, values in found:
                for more, value in values.get(name, ()):
                    family.add_sample(f"{name}_total", {**labels, **more}, float(value))
            yield family


class _Reader:
    """labels: of every sample. read(): (further labels, value) of each sample by the name of its series."""

    labels: dict[str, str]

    def read(self) -> dict[str, Values]:
        raise NotImplementedError


def _reader_of(source: Any) -> _Reader:
    if isinstance(source, FFNServer):
        return _FFNReader(source)
    if isinstance(source, AttentionSession):
        return _AttentionReader(source.connector.attention)
    raise TypeError(f"source is a {type(source).__name__}; allowed: AttentionSession, FFNServer")


class _FFNReader(_Reader):
    def __init__(self, server: FFNServer) -> None:
        self.labels = {"role": "ffn", "ffn_rank": str(server.ffn_rank)}
        self._server, self._side = server, server.connector.ffn

    def read(self) -> dict[str, Values]:
        side, runner = self._side, self._server.runner
        totals = side.layer_totals().values()
        rows, messages = sum(layer.rows for layer in totals), sum(side.messages)
        graphs = {str(stage): sum(graphs.replays.values()) for stage, graphs in runner.stage_graphs.items()}
        return {
            "afd_rows": [({}, rows)],
            "afd_bytes": [
                ({"direction": "request"}, _bytes(side.layout.request, rows, messages)),
                ({"direction": "reply"}, _bytes(side.layout.reply, rows, messages)),
            ],
            "afd_wait_seconds": [({}, sum(layer.wait_s for layer in totals))],
            "afd_experts_seconds": [({}, sum(layer.experts_s for layer in totals))],
            "afd_reply_seconds": [({}, sum(layer.reply_s for layer in totals))],
            "afd_replays": _by_stage(graphs) if graphs else [({}, runner.replays)],
            "afd_eager_steps": [({}, runner.eager_steps)],
            "afd_timeouts": _by_stage(enumerate(side.timeouts)),
        }


class _AttentionReader(_Reader):
    def __init__(self, side: AttentionSide) -> None:
        self.labels = {"role": "attention", "attention_rank": str(side.attention_rank)}
        self._side = side
        self._stream: torch.cuda.Stream | None = None

    def read(self) -> dict[str, Values]:
        side = self._side
        if side.device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(side.device, priority=-1)
        with torch.cuda.stream(self._stream):  # on the engine's own the copies would wait for its step
            layers = list(side.layer_stats().values())
        return {
            "afd_rows": [({}, sum(layer.rows_sent for layer in layers))],
            "afd_bytes": [
                ({"direction": "request"}, sum(layer.bytes_out for layer in layers)),
                ({"direction": "reply"}, sum(layer.bytes_back for layer in layers)),
            ],
            "afd_wait_seconds": [({}, sum(layer.wait_s for layer in layers))],
            "afd_timeouts": _by_stage(enumerate(side.timeouts)),
        }


def _by_stage(counts: Any) -> Values:
    items = counts.items() if isinstance(counts, Mapping) else counts
    return [({"stage": str(stage)}, value) for stage, value in items]


def _bytes(layout: Any, rows: int, messages: int) -> int:
    """What ``messages`` messages with ``rows`` rows together use."""
    fixed = layout.bytes_used(0)
    return messages * fixed + layout.bytes_used(rows) - fixed
