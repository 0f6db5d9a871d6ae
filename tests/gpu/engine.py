# SPDX-License-Identifier: Apache-2.0
"""An attention engine in small: all exchanged layers of one stage in one CUDA graph, and a reference on the GPU."""

from __future__ import annotations

import torch
from group import Spec, layer_weights

from afd_runtime.remote_experts import AttentionSession


class Reference:
    """The routed experts of every exchanged layer at once, dense over all experts, in float64."""

    def __init__(self, spec: Spec) -> None:
        weights = [layer_weights(spec, layer) for layer in spec.expert_layers]
        self.spec = spec
        self.up = torch.stack([up for up, _ in weights]).cuda().double()  # [L, E, 2I, H]
        self.down = torch.stack([down for _, down in weights]).cuda().double()

    def __call__(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [L, M, H], ids and weights [L, M, k] (-1: nowhere) -> float64 [L, M, H]."""
        gate, up = torch.einsum("lmh,leih->lmei", hidden.double(), self.up).chunk(2, dim=-1)
        y = torch.einsum("lmei,lehi->lmeh", gate * torch.sigmoid(gate) * up, self.down)
        scale = torch.zeros(*ids.shape[:2], self.spec.num_experts + 1, dtype=torch.float64, device=ids.device)
        scale.scatter_add_(2, ids.long() % (self.spec.num_experts + 1), weights.double())
        return torch.einsum("lmeh,lme->lmh", y, scale[..., : self.spec.num_experts])


class Layouts:
    """Random token layouts of one fixed shape, made on the GPU: hidden [L, M, H], ids and weights [L, M, k]."""

    def __init__(self, spec: Spec, rows: int, seed: int) -> None:
        self.spec, self.shape = spec, (len(spec.expert_layers), rows)
        self.generator = torch.Generator("cuda").manual_seed(seed)

    def draw(self, only_expert: int | None = None, nowhere: float = 0.1) -> tuple[torch.Tensor, ...]:
        """only_expert: every row has this one choice. nowhere: share of choices that are computed nowhere."""
        make = {"device": "cuda", "generator": self.generator}
        hidden = torch.randn(*self.shape, self.spec.hidden_size, **make)
        weights, ids = torch.rand(*self.shape, self.spec.num_experts, **make).topk(self.spec.top_k, dim=2)
        ids = torch.where(torch.rand(*ids.shape, **make) < nowhere, -1, ids)
        if only_expert is not None:
            ids.fill_(-1)
            ids[..., 0] = only_expert
        return hidden, ids.to(torch.int32), torch.where(ids >= 0, weights, 0.0)


class Engine:
    """Captures the layers of a session's stage and replays them. Inputs and outputs lie in fixed memory."""

    def __init__(self, session: AttentionSession, stage: int = 0, *, keep_graph: bool = False) -> None:
        spec, self.session, self.stage = session.spec, session, stage
        self.stream, shape = torch.cuda.Stream(), (len(spec.expert_layers), session.max_rows)
        with torch.cuda.stream(self.stream):
            self.hidden = torch.randn(*shape, spec.hidden_size, device="cuda")
            self.ids = torch.zeros(*shape, spec.top_k, dtype=torch.int32, device="cuda")
            self.weights = torch.ones(*shape, spec.top_k, device="cuda")
            self.out = torch.full_like(self.hidden, float("nan"))
            with session.offline(stage):
                self._layers()
                self.stream.synchronize()
                assert not self.out.any(), "offline layers give zeros"
                self.graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
                with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                    self._layers()
                if keep_graph:
                    self.graph.instantiate()

    def _layers(self) -> None:
        for index, layer in enumerate(self.session.spec.expert_layers):
            inputs = self.hidden[index], self.ids[index], self.weights[index]
            self.out[index].copy_(self.session.experts(layer, *inputs, self.stage))

    def launch(self, rows: int, inputs: tuple[torch.Tensor, ...]) -> None:
        """Begins a step and launches its graph; ``finish`` ends it."""
        with torch.cuda.stream(self.stream):
            for static, new in zip((self.hidden, self.ids, self.weights), inputs, strict=True):
                static.copy_(new)
            self.out.fill_(float("nan"))
            self.session.begin_step(rows, self.stage)
            self.graph.replay()

    def finish(self) -> torch.Tensor:
        """Ends the step. Returns its outputs [L, M, H]."""
        with torch.cuda.stream(self.stream):
            self.session.end_step(self.stage)
            return self.out.clone()
