# SPDX-License-Identifier: Apache-2.0
"""transformers with remote experts against the undivided model of a process that never imports this project.

The session here is a stand-in without processes: it computes each exchange from an ExpertBank with plain torch, so
what these tests cover is the engine side, and that the bank's weights mean what the engine means by them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from loop_session import CAP, LoopSession
from transformers import AutoModelForCausalLM

from afd_kernels import fused_experts
from afd_runtime import _greedy
from afd_runtime.demo_models import DEMO_MODELS, WIDE_MODELS, empty_model, write_demo_model
from afd_runtime.integrations.transformers import greedy_generate, load_remote_model
from afd_runtime.model_spec import ModelError, ModelSpec

TOLERANCE = 2e-5
NEW_TOKENS = 32
PROMPTS = [[5, 17, 3], list(range(40, 51)), [7 * i % 500 + 1 for i in range(37)], [400]]


@pytest.fixture(scope="session")
def undivided(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict]:
    """Token ids and logits of the engine alone, from a process of its own, once for each family."""
    root, results = tmp_path_factory.mktemp("undivided"), {}

    def get(family: str) -> dict:
        if family not in results:
            out = root / f"{family}.pt"
            command = [
                sys.executable,
                _greedy.__file__,
                "--model",
                checkpoint(family),
                "--prompts",
                json.dumps(PROMPTS),
            ]
            command += ["--out", out, "--max-new-tokens", NEW_TOKENS, "--max-batch-tokens", CAP]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=env)
            assert done.returncode == 0, done.stderr
            results[family] = torch.load(out)
        return results[family]

    return get


def error(logits: torch.Tensor, reference: torch.Tensor) -> float:
    return ((logits - reference).abs().max() / reference.abs().max()).item()


def generate(path: Path, fault: str | None = None) -> tuple[torch.Tensor, torch.Tensor, LoopSession]:
    session = LoopSession(ModelSpec.from_pretrained(path), fault)
    model = load_remote_model(path, session, dtype=torch.float32, device="cpu")
    return *greedy_generate(model, PROMPTS, NEW_TOKENS, CAP, pad_id=0), session


@pytest.mark.parametrize("family", sorted(DEMO_MODELS))
def test_equal_to_the_undivided_model(checkpoint: Callable, undivided: Callable, family: str) -> None:
    right = undivided(family)
    assert min(len(set(row)) for row in right["ids"].tolist()) >= 24, "too few distinct tokens to prove anything"
    ids, logits, session = generate(checkpoint(family))
    assert torch.equal(ids, right["ids"])
    assert error(logits, right["logits"]) <= TOLERANCE
    check_steps(session)


def check_steps(session: LoopSession) -> None:
    """Every forward announced its rows, then exchanged each expert layer once with exactly these rows, then ended."""
    spec, calls = session.spec, session.calls
    width = 2 + len(spec.expert_layers)
    longest = max(map(len, PROMPTS))
    chunk = CAP // len(PROMPTS)
    rows = [min(chunk, longest - at) * len(PROMPTS) for at in range(0, longest, chunk)]
    rows += [len(PROMPTS)] * (NEW_TOKENS - 1)
    assert len(calls) == width * len(rows)
    for step, expected in enumerate(rows):
        begin, *exchanges, end = calls[step * width : (step + 1) * width]
        assert begin == ("begin", expected) and end == ("end",)
        assert exchanges == [("experts", layer, (expected, spec.hidden_size)) for layer in spec.expert_layers]


@pytest.mark.parametrize("fault", ["zeroed", "shifted", "swapped", "last-dropped", "scaled"])
@pytest.mark.parametrize("family", sorted(DEMO_MODELS))
def test_planted_faults_are_noticed(checkpoint: Callable, undivided: Callable, family: str, fault: str) -> None:
    _, logits, _ = generate(checkpoint(family), fault)
    assert error(logits, undivided(family)["logits"]) > TOLERANCE


@pytest.mark.parametrize("family", sorted(DEMO_MODELS))
def test_no_expert_tensor_is_created_or_read(
    checkpoint: Callable, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(family)
    session = LoopSession(ModelSpec.from_pretrained(path))
    read: set[str] = set()
    monkeypatch.setattr(transformers.modeling_utils, "safe_open", recording_safe_open(read))
    model = load_remote_model(path, session, dtype=torch.float32)
    everything = {name for file in path.glob("*.safetensors") for name in names(file)}
    experts = {name for layer in session.spec.expert_layers for name in session.spec.expert_tensors(layer)}
    assert read == everything - experts and experts < everything
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    kept = {name: value for name, value in whole.state_dict().items() if ".mlp.experts." not in name}
    assert model.state_dict().keys() == kept.keys()
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    for (name, mine), (_, theirs) in zip(model.named_buffers(), whole.named_buffers(), strict=True):
        assert torch.equal(mine, theirs), name
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == model.config.tie_word_embeddings == (family == "mixtral")


def names(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def recording_safe_open(read: set[str]) -> Callable:
    """safetensors' safe_open, noting the name of every tensor whose data is taken."""
    original = transformers.modeling_utils.safe_open

    class Slice:
        def __init__(self, name: str, wrapped: Any) -> None:
            self.name, self.wrapped = name, wrapped

        def __getitem__(self, index: Any) -> torch.Tensor:
            read.add(self.name)
            return self.wrapped[index]

        def __getattr__(self, name: str) -> Any:
            return getattr(self.wrapped, name)

    class File:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.wrapped = original(*args, **kwargs)

        def __enter__(self) -> File:
            self.wrapped.__enter__()
            return self

        def __exit__(self, *args: Any) -> None:
            self.wrapped.__exit__(*args)

        def keys(self) -> list[str]:
            return self.wrapped.keys()

        def get_slice(self, name: str) -> Slice:
            return Slice(name, self.wrapped.get_slice(name))

        def get_tensor(self, name: str) -> torch.Tensor:
            read.add(name)
            return self.wrapped.get_tensor(name)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.wrapped, name)

    return File


@pytest.mark.parametrize("family", sorted(DEMO_MODELS))
def test_the_bank_means_the_same_to_the_kernels(checkpoint: Callable, family: str) -> None:
    session = LoopSession(ModelSpec.from_pretrained(checkpoint(family)))
    spec, generator = session.spec, torch.Generator().manual_seed(1)
    x = torch.randn(13, spec.hidden_size, generator=generator)
    ids = torch.stack([torch.randperm(spec.num_experts, generator=generator)[: spec.top_k] for _ in x]).to(torch.int32)
    scores = torch.rand(13, spec.top_k, generator=generator)
    for layer, weights in session.bank.layers.items():
        biases = {"b_up": weights.b_up, "b_down": weights.b_down}
        y = fused_experts(x, weights.w_up, weights.w_down, scores, ids, activation=spec.activation, **biases)
        assert error(y, session.experts(layer, x, ids, scores)) < 2e-6


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_the_engines_own_generate(checkpoint: Callable, undivided: Callable, family: str) -> None:
    path = checkpoint(family)
    session = LoopSession(ModelSpec.from_pretrained(path))
    model = load_remote_model(path, session, dtype=torch.float32)
    for prompt, right in zip(PROMPTS, undivided(family)["ids"].tolist(), strict=True):
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            prefill_chunk_size=CAP,
            eos_token_id=None,
        )
        assert out[0, len(prompt) :].tolist() == right
    assert max(call[1] for call in session.calls if call[0] == "begin") == CAP


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_checkpoint(tmp_path: Path, dtype: torch.dtype) -> None:
    path = write_demo_model("deepseek_v3", tmp_path / "model", dtype=dtype)
    session = LoopSession(ModelSpec.from_pretrained(path))
    model = load_remote_model(path, session)
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    assert model.dtype == session.spec.dtype == dtype
    tokens = torch.tensor([PROMPTS[1]])
    mine, theirs = (m(input_ids=tokens).logits.detach().float()[0] for m in (model, whole))
    errors = (mine - theirs).abs().amax(-1) / theirs.abs().max()
    assert errors.median() < (0.03 if dtype == torch.bfloat16 else 0.005)  # a near-tie may route one token elsewhere
    gate = model.model.layers[1].mlp.gate
    assert gate.e_score_correction_bias.dtype == whole.model.layers[1].mlp.gate.e_score_correction_bias.dtype


@pytest.mark.parametrize("error_class", [RuntimeError, KeyboardInterrupt])
def test_a_forward_that_raises_aborts_its_step(checkpoint: Callable, error_class: type[BaseException]) -> None:
    path = checkpoint("qwen3_moe")
    session = LoopSession(ModelSpec.from_pretrained(path))
    model = load_remote_model(path, session)
    handle = model.model.layers[2].register_forward_pre_hook(lambda *_: raise_(error_class("broken layer")))
    with pytest.raises(error_class, match="broken layer"):
        model(input_ids=torch.tensor([[1, 2, 3]]))
    assert session.calls == [("begin", 3), ("experts", 0, (3, 80)), ("abort", f"{error_class.__name__}: broken layer")]
    handle.remove()
    session.calls.clear()
    model(inputs_embeds=torch.zeros(2, 4, 80))
    assert session.calls[0] == ("begin", 8) and session.calls[-1] == ("end",)


def raise_(error: BaseException) -> None:
    raise error


def test_too_many_rows_are_refused_before_a_layer_runs(checkpoint: Callable) -> None:
    path = checkpoint("qwen3_moe")
    session = LoopSession(ModelSpec.from_pretrained(path))
    model = load_remote_model(path, session)
    with pytest.raises(AssertionError, match="do not fit"):
        model(input_ids=torch.ones(1, CAP + 1, dtype=torch.long))
    assert session.calls == []


def test_two_models_in_one_process_keep_their_sessions_apart(checkpoint: Callable) -> None:
    sessions = [LoopSession(ModelSpec.from_pretrained(checkpoint(family))) for family in ("mixtral", "qwen3_moe")]
    models = [load_remote_model(session.spec.path, session) for session in sessions]
    models[0](input_ids=torch.tensor([[1]]))
    assert sessions[0].calls and not sessions[1].calls
    whole = AutoModelForCausalLM.from_pretrained(checkpoint("mixtral"), dtype=torch.float32)
    sessions[0].calls.clear()
    whole(input_ids=torch.tensor([[1]]))
    assert not sessions[0].calls, "an undivided model of the same process must stay undivided"


def test_missing_attention_tensor(checkpoint: Callable, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source, name = checkpoint("mixtral"), "model.layers.1.self_attn.q_proj.weight"
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    save_file({key: value for key, value in tensors.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=name):
        load_remote_model(tmp_path, LoopSession(ModelSpec.from_pretrained(tmp_path)))


def test_a_divided_model_is_not_saved(checkpoint: Callable, tmp_path: Path) -> None:
    path = checkpoint("mixtral")
    with pytest.raises(ModelError, match="cannot be saved"):
        load_remote_model(path, LoopSession(ModelSpec.from_pretrained(path))).save_pretrained(tmp_path)


def test_prefill_chunks_and_stop_tokens(checkpoint: Callable, undivided: Callable) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint("glm4_moe"), dtype=torch.float32)
    right, seen = undivided("glm4_moe")["ids"], []
    stop = {int(row[4]) for row in right}
    ids, logits = greedy_generate(
        model, PROMPTS, NEW_TOKENS, 1000, stop_ids=stop, keep_logits=False, on_token=lambda *call: seen.append(call)
    )
    assert ids.shape[1] <= 5 and torch.equal(ids, right[:, : ids.shape[1]]) and logits.shape == (4, 0, 512)
    assert seen == [(step, column.tolist()) for step, column in enumerate(ids.T)]
    with pytest.raises(ValueError, match="max_batch_tokens 3 is less than the batch of 4"):
        greedy_generate(model, PROMPTS, 1, 3)
    with pytest.raises(ValueError, match="non-empty"):
        greedy_generate(model, [[1], []], 1, 8)


def test_the_reference_refuses_to_run_beside_this_project() -> None:
    with pytest.raises(RuntimeError, match="afd_runtime"):
        _greedy.assert_undivided()


def test_the_wide_demo_model_is_of_realistic_width() -> None:
    demo = WIDE_MODELS["deepseek_v2_wide"]
    model = empty_model("deepseek_v2", demo, torch.bfloat16)
    experts = model.model.layers[1].mlp.experts
    assert tuple(experts.gate_up_proj.shape) == (64, 2 * 352, 2048)
    assert tuple(experts.down_proj.shape) == (64, 2048, 352)
    assert not hasattr(model.model.layers[0].mlp, "experts") and len(model.model.layers) == 8
    parameters = sum(p.numel() for p in model.parameters())
    assert 1.0e9 < parameters < 1.2e9
    assert all(p.is_meta for p in model.parameters()) and experts.gate_up_proj.dtype == torch.bfloat16


def test_demo_models(tmp_path: Path) -> None:
    first, second, other = (
        write_demo_model("qwen3_moe", tmp_path / str(i), seed=seed) / "model.safetensors"
        for i, seed in enumerate((3, 3, 4))
    )
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()
    with pytest.raises(ValueError, match="not empty"):
        write_demo_model("qwen3_moe", tmp_path / "0")
    with pytest.raises(ValueError, match="deepseek_v3"):
        write_demo_model("gpt2", tmp_path / "new")
