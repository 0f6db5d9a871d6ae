# SPDX-License-Identifier: Apache-2.0
"""Compiles, on a machine without a GPU, what a launcher would launch on one.

``record`` runs a launcher on CPU tensors with the launches replaced by a note of kernel, arguments and options;
``compile_for`` hands such a note to Triton's compiler for a compute capability and returns its outputs; ``resources``
says what the compiled kernel takes.
"""

from __future__ import annotations

import contextlib
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
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
def record() -> Iterator[list[Launch]]:
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


def compile_for(launch: Launch, capability: int) -> Any:
    """Compiles a recorded launch for ``capability`` (80, 90, 100, …) as Triton's launcher would specialise it."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attrs: dict[tuple[int, ...], Any] = {}
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


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes.

    registers: of a thread. stack: bytes of a thread, where spilled registers go. shared: bytes of a block. wgmma:
    matrix instructions of a warp group (``wgmma``, ``tcgen05``), mma: of a warp. ptx: instructions. code: bytes.
    """

    registers: int
    stack: int
    shared: int
    wgmma: int
    mma: int
    ptx: int
    code: int


def resources(kernel: Any) -> Resources:
    """Reads them from the outputs of ``compile_for``, without a GPU."""
    ptx, cubin = kernel.asm["ptx"], kernel.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump -res-usage printed {usage!r}; a line with REG and STACK is needed")
    return Resources(
        registers=int(found[1]), stack=int(found[2]), shared=kernel.metadata.shared,
        wgmma=len(re.findall(r"\bwgmma\.mma_async|\btcgen05\.mma\b", ptx)), mma=len(re.findall(r"\bmma\.sync", ptx)),
        ptx=len(re.findall(r"^\s*(?:@!?%\w+\s+)?[a-z][\w.:]*\b.*;$", ptx, re.M)), code=code_bytes(cubin),
    )  # fmt: skip


def code_bytes(cubin: bytes) -> int:
    """Bytes of machine code in a cubin: its ``.text`` sections alone, because the debug tables hold paths."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry_size, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + entry_size * index) for index in range(count)]
    names = sections[names_at][4]
    return sum(size for name, *_, size in sections if cubin[names + name :].startswith(b".text."))
