# SPDX-License-Identifier: Apache-2.0
"""Steps of an engine that runs its layers in a CUDA graph: any layout, whoever takes part, nothing else written."""

from __future__ import annotations

import os
import random
import threading

import pytest
import torch
from engine import Engine, Layouts, Reference
from group import SPEC, Spec, local_group

from afd_runtime.errors import AFDError

STEPS = int(os.environ.get("AFD_TEST_STEPS", "10000"))


@pytest.fixture(autouse=True)
def own_stream():
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


def check(out: torch.Tensor, rows: int, inputs, reference: Reference) -> None:
    want = reference(*inputs)
    torch.testing.assert_close(out[:, :rows].double(), want[:, :rows], rtol=2e-5, atol=2e-5)
    assert not out[:, rows:].any(), "rows past the step's count come back as zero"


def replays(server) -> int:
    return sum(sum(g.replays.values()) for g in server.runner.stage_graphs.values())


class Rank:
    """One attention rank on a thread of its own: a share of the steps, each compared with the reference."""

    def __init__(self, connect, rank: int, steps: int, reference: Reference, barrier: threading.Barrier) -> None:
        self.rank, self.steps, self.reference, self.connect = rank, steps, reference, connect
        self.session = connect(rank)
        self.engine = Engine(self.session)
        self.layouts = Layouts(SPEC, self.session.max_rows, seed=rank)
        self.expected = torch.zeros(len(SPEC.expert_layers), dtype=torch.int64, device="cuda")
        self.worst, self.attached, self.done, self.error = 0.0, 1, 0, None
        self.bounds = torch.tensor([p.start for p in self._blocks()] + [SPEC.num_experts], device="cuda")
        self.barrier = barrier
        self.thread = threading.Thread(target=self._run)
        self.step(self.session.max_rows)  # every torch kernel of the check has been launched before others wait

    def _blocks(self):
        placement = self.session.connector.attention.placement
        return [placement.local_experts(ffn_rank) for ffn_rank in range(placement.num_ffn_ranks)]

    def step(self, rows: int, only_expert: int | None = None) -> None:
        with torch.cuda.stream(self.engine.stream):
            inputs = self.layouts.draw(only_expert)
            self.engine.launch(rows, inputs)
            out, want = self.engine.finish(), self.reference(*inputs)
            mine = torch.arange(out.shape[1], device="cuda") < rows
            error = (out.double() - want * mine[None, :, None]).abs()  # NaN stays NaN
            self.worst = max(self.worst, float((error / (1 + want.abs())).max().nan_to_num(nan=1e9)))
            owner = torch.bucketize(inputs[1].long(), self.bounds, right=True)  # 0: nowhere
            for ffn_rank in range(1, len(self.bounds)):
                self.expected += ((owner == ffn_rank).any(2) & mine).sum(1)
        self.done += 1

    def _run(self) -> None:
        rng = random.Random(self.rank)
        try:
            for rows in range(10):
                self.step(rows)
            for _ in range(
                2
            ):  # the memory of the check, such as workspaces of this thread, is there: now it is measured
                self.barrier.wait(60)
            while self.done < self.steps:
                rows = rng.choice([0, 1, self.session.max_rows, rng.randint(0, self.session.max_rows)])
                self.step(rows, rng.randrange(SPEC.num_experts) if rng.random() < 0.1 else None)
                if self.rank and rng.random() < 0.002:  # the lane leaves the group and comes back, its graph stays
                    self.session.reattach()
                    self.attached += 1
        except BaseException as error:
            self.error = error
            self.barrier.abort()


@pytest.mark.timeout(300)
def test_random_steps_of_three_ranks_and_two_ffn_ranks() -> None:
    with local_group(3, 2, device="cuda", max_batch_tokens=24) as (servers, connect):
        reference = Reference(SPEC)
        barrier = threading.Barrier(4)
        ranks = [Rank(connect, rank, STEPS // 3 + 1, reference, barrier) for rank in range(3)]
        for rank in ranks:
            rank.thread.start()
        barrier.wait(60)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
        barrier.wait(60)
        for rank in ranks:
            rank.thread.join(280)
        assert not any(rank.thread.is_alive() for rank in ranks)
        assert [rank.error for rank in ranks] == [None] * 3
        assert sum(rank.done for rank in ranks) >= STEPS and max(rank.worst for rank in ranks) < 2e-5
        torch.cuda.synchronize()
        after = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
        assert after[0] <= before[0] + (1 << 20) and after[1] >= before[1] - (64 << 20), (before, after)
        for server in servers:
            graphs = server.runner.stage_graphs[0]
            assert server.runner.eager_steps == 0 and len(graphs.graphs) <= 4
            assert replays(server) == server.steps_served > STEPS // 3
        for rank in ranks:
            sent = [stats["rows_sent"] for stats in rank.session.stats.values()]
            assert sent == rank.expected.tolist(), "one row for each token and FFN rank with an expert of it"
        attached = sum(rank.attached for rank in ranks)
        print(f"\n{sum(r.done for r in ranks)} steps, {attached} attaches, worst {max(r.worst for r in ranks):.1e}, "
              f"replays {[replays(s) for s in servers]}")  # fmt: skip


def test_two_stages_in_graphs_of_their_own() -> None:
    with local_group(1, 2, num_stages=2, device="cuda") as (servers, connect):
        session, reference, rng = connect(), Reference(SPEC), random.Random(0)
        engines = [Engine(session, stage) for stage in (0, 1)]
        layouts = [Layouts(SPEC, session.max_rows, seed=stage) for stage in (0, 1)]
        for step in range(100):
            rows, inputs = [rng.randint(0, 16) for _ in engines], [layout.draw() for layout in layouts]
            torch.cuda.current_stream().synchronize()
            for stage in (0, 1) if step % 2 else (1, 0):
                engines[stage].launch(rows[stage], inputs[stage])
            for stage in (0, 1):
                check(engines[stage].finish(), rows[stage], inputs[stage], reference)
        assert all(replays(server) == 200 and server.runner.eager_steps == 0 for server in servers)


@pytest.mark.parametrize("first,then", [([5, 0], [0, 5]), ([16, 16], [1, 2])])
def test_any_layout_after_any_other(first, then) -> None:
    """Cases 14 to 16: other counts, other experts, and other work between two replays."""
    with local_group(2, 1, device="cuda", max_batch_tokens=16) as (_, connect):
        reference, engines, layouts = Reference(SPEC), [], []
        for rank in (0, 1):
            engines.append(Engine(connect(rank)))
            layouts.append(Layouts(SPEC, 16, seed=rank))
        for counts, expert in ((first, 3), (then, None), (first, None), (then, 0)):
            for engine, layout, rows in zip(engines, layouts, counts, strict=True):
                inputs = layout.draw(only_expert=expert)
                torch.cuda.current_stream().synchronize()
                engine.launch(rows, inputs)
                check(engine.finish(), rows, inputs, reference)
            big = torch.randn(1760, 512, device="cuda") @ torch.randn(512, 2048, device="cuda")
            assert big.isfinite().all()


def test_untouched_memory_keeps_its_poison() -> None:
    with local_group(1, 2, device="cuda", max_batch_tokens=16) as (servers, connect):
        session, reference = connect(), Reference(SPEC)
        engine, layout = Engine(session), Layouts(SPEC, 16, seed=0)
        messages = session.connector.attention.layout
        requests = [server.connector.ffn.control.lanes.ranks[0].request.buffer for server in servers]
        placement = session.connector.attention.placement
        bounds = torch.tensor([*(placement.local_experts(f).start for f in (0, 1)), SPEC.num_experts], device="cuda")
        answers = [peer.reply.buffer for peer in session.connector.attention.control.peers]
        for rows in (0, 3, 9):
            torch.cuda.synchronize()
            for view in [messages.request.views(b[: messages.request.nbytes]) for b in requests]:
                view.rows.fill_(float("nan"))
                view.pairs.fill_(-77)
                view.weights.fill_(float("nan"))
            for view in [messages.reply.views(b[: messages.reply.nbytes]) for b in answers]:
                view.rows.fill_(float("nan"))
            inputs = layout.draw()
            torch.cuda.synchronize()
            engine.launch(rows, inputs)
            check(engine.finish(), rows, inputs, reference)
            torch.cuda.synchronize()
            owner = torch.bucketize(inputs[1].long(), bounds, right=True)[:, :rows]  # [L, rows, k], 0: nowhere
            for rank, (request, answer) in enumerate(zip(requests, answers, strict=True)):
                here = owner == rank + 1
                counts, pairs = here.any(2).sum(1), here.sum((1, 2)).max()  # of each layer; all use the same slot
                sent, most = messages.request.views(request[: messages.request.nbytes]), int(counts.max())
                assert sent.header[6] == counts[-1]
                assert not sent.rows[:most].isnan().any() and sent.rows[most:].isnan().all()
                assert (sent.pairs[:pairs] >= 0).all() and (sent.pairs[pairs:] == -77).all()
                assert not sent.weights[:most].isnan().any() and sent.weights[most:].isnan().all()
                back = messages.reply.views(answer[: messages.reply.nbytes]).rows
                assert not back[:most].isnan().any() and back[most:].isnan().all()


def test_no_copy_between_the_gate_and_the_publish() -> None:
    """Every node of an engine's layer, from hidden states to the published message, is a kernel."""
    from cuda.bindings import driver

    from afd_kernels import route

    with local_group(1, 2, device="cuda", max_batch_tokens=16) as (_, connect):
        session = connect()
        stream = torch.cuda.Stream()
        x, gate = torch.randn(16, SPEC.hidden_size, device="cuda"), torch.randn(7, SPEC.hidden_size, device="cuda")
        with torch.cuda.stream(stream), session.offline():

            def layer() -> torch.Tensor:
                weights, ids = route(x, gate, top_k=SPEC.top_k)
                return session.experts(SPEC.expert_layers[0], x, ids, weights)

            layer()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                layer()
        handle = driver.CUgraph(graph.raw_cuda_graph())
        _, _, count = driver.cuGraphGetNodes(handle)
        _, nodes, _ = driver.cuGraphGetNodes(handle, count)
        kinds = {driver.cuGraphNodeGetType(node)[1] for node in nodes}
        assert kinds == {driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL}, kinds


def test_what_a_capture_needs_is_refused_by_name() -> None:
    """Case 37: a first use inside the capture; a capture inside a step; offline inside a step."""
    with local_group(1, 1, device="cuda", max_batch_tokens=8) as (_, connect):
        session = connect()
        stream, layer = torch.cuda.Stream(), SPEC.expert_layers[0]
        memory = torch.zeros(8 * SPEC.hidden_size + 1, device="cuda")
        odd = memory[1:].view(8, SPEC.hidden_size)  # 4 bytes off: a kernel of its own
        ids, weights = torch.zeros(8, 3, dtype=torch.int32, device="cuda"), torch.zeros(8, 3, device="cuda")

        def captured(hidden) -> None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                session.experts(layer, hidden, ids, weights)

        with session.offline():
            with pytest.raises(AFDError, match=r"hidden torch.float32\[8, 24\] .* for the first time inside a graph"):
                captured(odd)
            session.experts(layer, odd, ids, weights)
            torch.cuda.synchronize()
            captured(odd)
        session.begin_step(8)
        with pytest.raises(AFDError, match="is captured inside step"):
            captured(odd)
        with pytest.raises(AFDError, match="stage 0 is in step"), session.offline():
            pass
        session.abort_step("the test is over")
        with pytest.raises(AFDError, match="outside a step"):
            session.experts(layer, odd, ids, weights)


@pytest.mark.timeout(120)
def test_sixteen_ranks_with_graphs_and_other_widths() -> None:
    """16A1F, bf16-like odd sizes: hidden 40, 13 experts, five choices."""
    spec = Spec(num_experts=13, top_k=5, hidden_size=40, intermediate_size=28)
    with local_group(16, 1, device="cuda", max_batch_tokens=8, spec=spec) as (servers, connect):
        reference = Reference(spec)
        engines = [Engine(connect(rank)) for rank in range(16)]
        layouts = [Layouts(spec, 8, seed=rank) for rank in range(16)]
        rng = random.Random(1)
        for _ in range(30):
            chosen = rng.sample(range(16), rng.randint(1, 16))
            work = {rank: (rng.randint(0, 8), layouts[rank].draw()) for rank in chosen}
            torch.cuda.current_stream().synchronize()
            for rank, (rows, inputs) in work.items():
                engines[rank].launch(rows, inputs)
            for rank, (rows, inputs) in work.items():
                check(engines[rank].finish(), rows, inputs, reference)
        assert servers[0].runner.eager_steps == 0 and len(servers[0].runner.stage_graphs[0].graphs) <= 4
