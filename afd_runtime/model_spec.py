# SPDX-License-Identifier: Apache-2.0
"""What the runtime must know of a Mixture-of-Experts checkpoint, from `config.json` and tensor headers alone.

No engine is imported and no weight is read. How a model routes (scores, scales, groups) is not here: that is the
attention engine's own code, and its result travels with each row.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from afd_kernels import SwiGLU
from afd_kernels.message import MAX_EXPERTS
from afd_runtime.checkpoint import DTYPES, ModelError, SafetensorsIndex

__all__ = ["FAMILIES", "ExpertLayout", "Family", "ModelError", "ModelSpec"]


@dataclass(frozen=True)
class Family:
    """How one architecture names its experts. `parts` are the per-expert tensors of gate, up and down."""

    layer_rule: str  # which layers have experts: "all", "after_dense" or "sparse_step"
    modules: tuple[str, ...] = ("mlp.experts",)
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    intermediate_key: str = "moe_intermediate_size"
    transposed: bool = False  # fused tensors are [E, H, 2I] and [E, I, H], with biases (gpt-oss)


FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family("after_dense"),
    "deepseek_v3": Family("after_dense"),
    "glm4_moe": Family("after_dense"),
    "gpt_oss": Family("all", intermediate_key="intermediate_size", transposed=True),
    "mixtral": Family(
        "all", ("block_sparse_moe.experts", "mlp.experts"), ("w1", "w3", "w2"), intermediate_key="intermediate_size"
    ),
    "olmoe": Family("all", intermediate_key="intermediate_size"),
    "qwen2_moe": Family("sparse_step"),
    "qwen3_moe": Family("sparse_step"),
}
_NUM_EXPERTS_KEYS = ("n_routed_experts", "num_local_experts", "num_experts")
_MAX_LAYERS = 10000
_VOLATILE_KEYS = ("_name_or_path", "transformers_version", "architectures", "use_cache")


@dataclass(frozen=True)
class ExpertLayout:
    """Names and shapes of a checkpoint's expert tensors.

    kind: `per_expert` (gate and up [I, H], down [H, I] for each expert), `fused` (gate_up_proj [E, 2I, H], gate rows
    first, down_proj [E, H, I]) or `fused_transposed` ([E, H, 2I] with gate and up alternating, [E, I, H], and biases).
    """

    kind: str
    prefix: str  # with {layer}
    parts: tuple[str, str, str]

    def name(self, layer: int, part: str, expert: int | None = None) -> str:
        """Tensor name of `part`: gate | up | down of one expert, or a fused tensor's own name."""
        prefix = self.prefix.format(layer=layer)
        if expert is None:
            return f"{prefix}.{part}"
        return f"{prefix}.{expert}.{self.parts[('gate', 'up', 'down').index(part)]}.weight"

    def shapes(self, layer: int, experts: int, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every expert tensor of one layer with the shape that it must have."""
        if self.kind == "per_expert":
            for expert in range(experts):
                yield self.name(layer, "gate", expert), (inner, hidden)
                yield self.name(layer, "up", expert), (inner, hidden)
                yield self.name(layer, "down", expert), (hidden, inner)
        elif self.kind == "fused":
            yield self.name(layer, "gate_up_proj"), (experts, 2 * inner, hidden)
            yield self.name(layer, "down_proj"), (experts, hidden, inner)
        else:
            yield self.name(layer, "gate_up_proj"), (experts, hidden, 2 * inner)
            yield self.name(layer, "gate_up_proj_bias"), (experts, 2 * inner)
            yield self.name(layer, "down_proj"), (experts, inner, hidden)
            yield self.name(layer, "down_proj_bias"), (experts, hidden)


@dataclass(frozen=True)
class ModelSpec:
    """One checkpoint. `expert_layers` are the layers that exchange rows; sizes are those of one routed expert.

    `dtype` is the checkpoint's (of its first expert tensor); `config_hash` is equal for equal configs, whatever wrote
    them; `quantization` is None, because quantised checkpoints are refused for now.
    """

    path: Path
    model_type: str
    num_layers: int
    expert_layers: tuple[int, ...]
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: SwiGLU
    dtype: torch.dtype
    quantization: str | None
    config_hash: str
    layout: ExpertLayout

    @classmethod
    def from_pretrained(cls, path: str | Path) -> ModelSpec:
        """Reads `path`/config.json and the safetensors headers. Raises `ModelError`; reads no weight."""
        path = Path(path)
        config = _read_config(path)
        family = _family(path, config)
        num_layers = _size(path, config, "num_hidden_layers", _MAX_LAYERS)
        hidden, inner = _size(path, config, "hidden_size"), _size(path, config, family.intermediate_key)
        experts, top_k = _num_experts(path, config), _size(path, config, "num_experts_per_tok")
        if top_k > experts:
            raise ModelError(f"{path}: num_experts_per_tok {top_k} is more than the {experts} experts of a layer.")
        activation = _activation(path, config, family)
        index = SafetensorsIndex.open(path)
        layout, layers = _find_experts(path, config, family, index, num_layers)
        shapes = {n: s for layer in layers for n, s in layout.shapes(layer, experts, hidden, inner)}
        _check_tensors(index, layout, layers, shapes)
        return cls(
            path=path, model_type=config["model_type"], num_layers=num_layers, expert_layers=layers,
            num_experts=experts, top_k=top_k, hidden_size=hidden, intermediate_size=inner, activation=activation,
            dtype=DTYPES[index.entry(next(iter(shapes))).dtype], quantization=None,
            config_hash=_config_hash(config), layout=layout,
        )  # fmt: skip

    def expert_tensors(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Name and shape of every expert tensor of `layer`."""
        return dict(self.layout.shapes(layer, self.num_experts, self.hidden_size, self.intermediate_size))


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise ModelError(f"{path}: not a directory. Give the directory of a downloaded checkpoint.")
    file = path / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise ModelError(f"{path}: no checkpoint here (there is no config.json).") from error
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(f"{file}: cannot be read as JSON ({error}).") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file}: must hold a JSON object, found {type(config).__name__}.")
    return config


def _family(path: Path, config: dict[str, Any]) -> Family:
    """Refuses, in this order: quantised checkpoints, dense models, architectures not in the table."""
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization:
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
        raise ModelError(
            f"{path}: quantised with {method!r}, which is not supported; "
            "supported are float32, float16 and bfloat16 checkpoints. Use an unquantised version of the model."
        )
    model_type = config.get("model_type")
    known = ", ".join(sorted(FAMILIES))
    if not any(config.get(key) for key in _NUM_EXPERTS_KEYS):
        if "text_config" in config:
            raise ModelError(f"{path}: model_type {model_type!r} nests its text model; supported are {known}.")
        raise ModelError(
            f"{path}: model_type {model_type!r} is a dense model (none of {', '.join(_NUM_EXPERTS_KEYS)} is set); "
            "there are no experts to serve apart from attention. Run it undivided."
        )
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ModelError(f"{path}: model_type {model_type!r} is not supported; supported are {known}.")
    return FAMILIES[model_type]


def _size(path: Path, config: dict[str, Any], key: str, most: int = 1 << 20) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ModelError(f"{path / 'config.json'}: {key} must be a positive integer up to {most}, found {value!r}.")
    return value


def _num_experts(path: Path, config: dict[str, Any]) -> int:
    """The routed experts of a layer; transformers writes this under one of several names and accepts all."""
    found = {key: config[key] for key in _NUM_EXPERTS_KEYS if config.get(key) is not None}
    if len(set(map(str, found.values()))) != 1:
        raise ModelError(f"{path / 'config.json'}: contradicting numbers of experts {found}.")
    return _size(path, config, next(iter(found)), MAX_EXPERTS)


def _activation(path: Path, config: dict[str, Any], family: Family) -> SwiGLU:
    act = config.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise ModelError(f"{path / 'config.json'}: hidden_act {act!r} is not supported; experts must use 'silu'.")
    if not family.transposed:
        return SwiGLU()
    found = {"swiglu_alpha": config.get("swiglu_alpha", 1.702), "swiglu_limit": config.get("swiglu_limit", 7.0)}
    for key, value in found.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
            raise ModelError(f"{path / 'config.json'}: {key} must be a positive number, found {value!r}.")
    alpha, limit = map(float, found.values())
    return SwiGLU(alpha=alpha, beta=1.0, limit=limit, interleaved=True)


def _expected_layers(config: dict[str, Any], rule: str, num_layers: int) -> tuple[int, ...] | None:
    """Layers that have experts by the config, or None where the config does not say."""
    if rule == "after_dense":
        first, every = config.get("first_k_dense_replace"), config.get("moe_layer_freq", 1)
        if not isinstance(first, int) or not isinstance(every, int) or every < 1:
            return None
        return tuple(i for i in range(first, num_layers) if i % every == 0)
    if rule == "sparse_step":
        dense, every = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
        if not isinstance(dense, list) or not isinstance(every, int) or every < 1:
            return None
        return tuple(i for i in range(num_layers) if i not in dense and (i + 1) % every == 0)
    return tuple(range(num_layers))


def _find_experts(
    path: Path, config: dict[str, Any], family: Family, index: SafetensorsIndex, num_layers: int
) -> tuple[ExpertLayout, tuple[int, ...]]:
    """The layout that the tensor names show, and the layers that have experts by names and config alike.

    Layers past `num_layers` are ignored: DeepSeek-V3 and GLM-4 store their next-token-prediction layer there.
    """
    modules = "|".join(map(re.escape, family.modules))
    found: dict[int, tuple[str, str]] = {}
    for name in index.names:
        match = re.match(rf"model\.layers\.(\d+)\.({modules})\.(gate_up_proj$)?", name)
        if match and int(match[1]) < num_layers and (match[3] or int(match[1]) not in found):
            found[int(match[1])] = (match[2], "fused" if match[3] else "per_expert")
    expected = _expected_layers(config, family.layer_rule, num_layers)
    if not found or (expected is not None and set(found) != set(expected)):
        keys = ("first_k_dense_replace", "moe_layer_freq", "mlp_only_layers", "decoder_sparse_step")
        said = {k: config[k] for k in ("num_hidden_layers", *keys) if k in config}
        should = "some layers" if expected is None else f"layers {sorted(expected)}"
        raise ModelError(
            f"{path}: by config.json {said} {should} have experts (model.layers.N.{family.modules[0]}.…), "
            f"but the checkpoint has expert tensors in layers {sorted(found)}. The download may be incomplete."
        )
    if len(set(found.values())) != 1:
        raise ModelError(f"{path}: layers store experts in different ways: {sorted(set(found.values()))}.")
    module, kind = next(iter(found.values()))
    kind = "fused_transposed" if family.transposed else kind
    return ExpertLayout(kind, f"model.layers.{{layer}}.{module}", family.parts), tuple(sorted(found))


def _check_tensors(
    index: SafetensorsIndex, layout: ExpertLayout, layers: tuple[int, ...], shapes: dict[str, tuple[int, ...]]
) -> None:
    """Every expert tensor is there, has its shape and a dtype that is read as it is; and there is no other."""
    for name, shape in shapes.items():
        entry = index.entry(name)
        if entry.shape != shape:
            raise ModelError(
                f"{entry.file}: tensor {name!r} has shape {list(entry.shape)}, config.json asks for {list(shape)}."
            )
        if entry.dtype not in DTYPES:
            raise ModelError(
                f"{entry.file}: tensor {name!r} has dtype {entry.dtype}; supported are {', '.join(DTYPES)}."
            )
    prefixes = tuple(layout.prefix.format(layer=layer) + "." for layer in layers)
    others = sorted(name for name in index.names if name.startswith(prefixes) and name not in shapes)
    if others:
        raise ModelError(
            f"{index.path}: unexpected expert tensor {others[0]!r} ({len(others)} in all); ignoring it (a scale, a "
            "bias, an expert past num_experts) could give wrong results, so this checkpoint is refused."
        )


def _config_hash(config: dict[str, Any]) -> str:
    kept = {key: value for key, value in config.items() if key not in _VOLATILE_KEYS}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]
