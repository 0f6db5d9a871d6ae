# SPDX-License-Identifier: Apache-2.0
"""What every op shares: which implementation runs, argument checks, op registration.

CUDA tensors run the Triton kernel, CPU tensors run the plain-torch reference. Under Triton's interpreter
(``TRITON_INTERPRET=1`` before the first import) CPU tensors run the kernel too; that is how the kernels are tested
on a machine without a GPU.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)


def runs_kernel(tensor: torch.Tensor) -> bool:
    """True where the op on this tensor launches Triton, False where it runs the reference."""
    return tensor.is_cuda or (INTERPRETED and tensor.device.type == "cpu")


def is_tracing() -> bool:
    """True inside ``torch.compile``: only there the registered op is used; eager calls go straight to the launcher."""
    return torch.compiler.is_compiling()


def reference(function: Callable) -> Callable:
    """Marks a plain-torch reference, which refuses CUDA tensors under ``AFD_FORBID_REFERENCE=1``.

    A GPU run that falls back to the reference would pass every comparison and prove nothing.
    """

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if os.environ.get("AFD_FORBID_REFERENCE") == "1" and any(
            isinstance(a, torch.Tensor) and a.is_cuda for a in (*args, *kwargs.values())
        ):
            raise RuntimeError(
                f"{function.__name__} was called on a CUDA tensor while AFD_FORBID_REFERENCE=1; call the op itself, "
                "or move the tensors to the CPU"
            )
        return function(*args, **kwargs)

    return wrapper


@triton.jit
def slot_pointer(address):
    """Bytes of the slot at an int64 address. Slots are 16-byte aligned; rows move 16 bytes at once as it says so."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)


def register(name: str, implementation: Callable, mutates: Sequence[str]) -> Callable:
    """Registers ``afd::<name>``, an op that writes into given tensors and returns nothing, with its fake."""
    op = torch.library.custom_op(f"afd::{name}", implementation, mutates_args=tuple(mutates))
    op.register_fake(lambda *args, **kwargs: None)
    return op


def check(condition: bool, message: str) -> None:
    """Raises ``ValueError(message)`` unless ``condition``.

    The message names the argument, its value, what is allowed and what to do next.
    """
    if not condition:
        raise ValueError(message)


def check_tensor(
    name: str, tensor: torch.Tensor, *, shape: tuple[int | None, ...], dtypes: Sequence[torch.dtype],
    like: torch.Tensor, contiguous: bool = False,
) -> None:  # fmt: skip
    """Checks shape (``None`` is any size), dtype, device (that of ``like``) and, where asked for, contiguity; refuses a
    tensor that needs a gradient."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; a torch.Tensor is needed")
    want = tuple("*" if s is None else s for s in shape)
    ok = tensor.dim() == len(shape) and all(w is None or w == s for w, s in zip(shape, tensor.shape, strict=True))
    check(ok, f"{name} has shape {tuple(tensor.shape)}; allowed: {want}")
    check(tensor.dtype in dtypes, f"{name} is {tensor.dtype}; allowed: {', '.join(map(str, dtypes))}; cast it first")
    check(
        tensor.device == like.device, f"{name} is on {tensor.device}, the other inputs on {like.device}; move it there"
    )
    check(
        not (tensor.requires_grad and tensor.is_floating_point() and torch.is_grad_enabled()),
        f"{name} requires grad; this library is inference only: call it under torch.no_grad()",
    )
    check(
        not contiguous or tensor.is_contiguous(),
        f"{name} is not contiguous (strides {tensor.stride()}); pass contiguous memory",
    )


def check_last_stride(name: str, tensor: torch.Tensor) -> None:
    """Checks that the last dimension is contiguous, whatever torch says of a dimension of size 1."""
    ok = tensor.shape[-1] == 1 or tensor.stride(-1) == 1
    check(ok, f"{name} has strides {tensor.stride()}; allowed: last 1; call .contiguous()")


def workspace_for(workspace: torch.Tensor | None, nbytes: int, device: torch.device, what: str) -> torch.Tensor:
    """The given workspace (uint8, zeroed once by its owner, at least ``nbytes``), or a fresh zeroed one."""
    if workspace is None:
        return torch.zeros(max(nbytes, 16), dtype=torch.uint8, device=device)
    check(
        workspace.dtype == torch.uint8
        and workspace.dim() == 1
        and workspace.is_contiguous()
        and workspace.numel() >= nbytes,
        f"workspace has {workspace.numel()} elements of {workspace.dtype}, shape {list(workspace.shape)}; allowed: one "
        f"dimension of at least {nbytes} contiguous uint8, zeroed once; {what} gives the size",
    )
    same = workspace.device.type == device.type and device.index in (None, workspace.device.index)
    check(same, f"workspace is on {workspace.device}; allowed: {device}")
    check(workspace.data_ptr() % 16 == 0, "workspace is not 16-byte aligned; allocate it on its own")
    return workspace


def element_of(dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """A tensor that only tells a kernel an element type; it is never read or written."""
    return like if like.dtype == dtype else torch.empty(0, dtype=dtype, device=like.device)


class Carver:
    """Cuts typed, 128-byte aligned tensors out of one uint8 buffer; with no buffer it only adds up the size."""

    def __init__(self, buffer: torch.Tensor | None = None) -> None:
        self.buffer, self.nbytes = buffer, 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        start = self.nbytes
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        self.nbytes = (start + size + 127) // 128 * 128
        if self.buffer is None:
            return torch.empty(0, dtype=dtype)
        return self.buffer[start : start + size].view(dtype).view(shape)
