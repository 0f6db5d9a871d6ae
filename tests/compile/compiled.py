# SPDX-License-Identifier: Apache-2.0
"""Compiles, on a machine without a GPU, what a launcher would launch on one.

``record`` runs a launcher on CPU tensors with the launches replaced by a note of kernel, arguments and options;
``compile_for`` hands such a note to Triton's compiler for a compute capability and returns its outputs.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction

from afd_kernels import _op

TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64",
         torch.uint8: "u8"}  # fmt: skip
OPTIONS = ("num_warps", "num_stages")


@dataclass
class Launch:
    """One recorded launch."""

    fn: JITFunction
    args: dict
    options: dict

    @property
    def name(self) -> str:
        return self.fn.__name__


@contextlib.contextmanager
def record():
    """Yields a list that fills with the launches made inside the block; nothing is executed."""
    launches: list[Launch] = []

    def run(self, *args, grid, warmup, **kwargs):
        options = {k: kwargs.pop(k) for k in OPTIONS if k in kwargs}
        launches.append(Launch(self, dict(zip(self.arg_names, args, strict=False)) | kwargs, options))

    saved = JITFunction.run
    modules = [m for m in _modules() if hasattr(m, "runs_kernel")]
    JITFunction.run = run
    for module in modules:
        module.runs_kernel = lambda tensor: True
    try:
        yield launches
    finally:
        JITFunction.run = saved
        for module in modules:
            module.runs_kernel = _op.runs_kernel


def _modules():
    return [module for name, module in sys.modules.items() if name.startswith("afd_kernels.") and module is not _op]


def compile_for(launch: Launch, capability: int):
    """Compiles a recorded launch for ``capability`` (80, 90, 100, …) as Triton's launcher would specialise it."""
    signature, constants, attrs = {}, {}, {}
    for index, param in enumerate(launch.fn.params):
        value = launch.args.get(param.name)
        if (
            param.is_constexpr
            or value is None
            or (isinstance(value, int) and not isinstance(value, bool) and value == 1)
        ):
            signature[param.name] = "constexpr"
            constants[param.name] = value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = "*" + TYPES[value.dtype]
            attrs[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attrs[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.fn, signature, constants, attrs)
    return compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
